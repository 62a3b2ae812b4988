"""Which ports of bonds we selected: in a file in /run before each is made, until the former port is put back.

The kernel has no lease for it. So whoever ends it (the controller, its guardian, `swerve steer off`) reads the file,
and puts the former port back, if the bond is still on one that we selected. Nothing here waits for a disk. One thread,
in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from pytools import directories, owned_files
from pytools.errors import SwerveError
from pytools.kernel.netlink.routing import Netlink
from steering.actuators import bonds
from steering.plan import Bond, BondAct

_MOST_BYTES: Final = 1 << 20


class Selected(msgspec.Struct, frozen=True):
    """A bond whose active port is our choice; ports by index."""

    bond: str
    index: int
    former: int  # the port to put back
    chosen: tuple[int, ...]  # the last one that we selected, and the one that was about to be


class _File(msgspec.Struct, frozen=True):
    scope: str  # boot and network namespace
    bonds: tuple[Selected, ...]


class Restored(NamedTuple):
    act: BondAct
    failure: str = ""

    @property
    def text(self) -> str:
        return f"{self.act.bond.name}: {self.failure or self.act.bond.port(self.act.port) + ' is active'}"


def load(path: Path, scope: str) -> tuple[Selected, ...]:
    """What is remembered of this boot and namespace; a torn or writable file is none."""
    try:
        found = msgspec.json.decode(directories.read_obeyed(path, _MOST_BYTES), type=_File)
    except (OSError, SwerveError, ValueError):
        return ()
    return found.bonds if found.scope == scope else ()


def save(path: Path, scope: str, selected: Iterable[Selected]) -> None:
    """Remember these, and nothing else.

    Raises
    ------
    OSError
        If they cannot be written.
    """
    kept = tuple(selected)
    if kept:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned_files.replace(path, msgspec.json.encode(_File(scope, kept)))
    else:
        path.unlink(missing_ok=True)


def restore(netlink: Netlink, path: Path, scope: str, why: str) -> list[Restored]:
    """Put the former port of each bond back, if it is still on one that we selected; what is left stays in the file.

    Raises
    ------
    SwerveError
        If bonds cannot be read.
    """
    kept = load(path, scope)
    if not kept:
        return []
    there = bonds.read(netlink).bonds
    done = [each for known in kept for each in _restore(netlink, there.get(known.bond), known, why)]
    left = {each.act.bond.name for each in done if each.failure}
    with contextlib.suppress(OSError):
        save(path, scope, (known for known in kept if known.bond in left))
    return done


def _restore(netlink: Netlink, bond: Bond | None, known: Selected, why: str) -> Iterator[Restored]:
    now = time.monotonic_ns()
    if bond is None or bond.index != known.index or bond.active == known.former:
        return
    if bond.active not in known.chosen:
        yield Restored(BondAct(bond, bond.active, f"{why}; {_left_alone(bond)}", "bonds", now, over=True))
        return
    act = BondAct(bond, known.former, why, "bonds", now, over=True)
    try:
        bonds.select(netlink, bond.index, known.former)
    except SwerveError as error:
        yield Restored(act, str(error))
    else:
        yield Restored(act)


def _left_alone(bond: Bond) -> str:
    return f"{bond.port(bond.active)} stays active: the bond's monitor or somebody else selected it since"
