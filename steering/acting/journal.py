"""The journal: what was done to weights and why, as JSON Lines.

It is history. What is in force is in the kernel: a rule of ours (`leftovers`), which whoever undoes deletes without
reading a file. Entries: applied, failed, undone. About a whole run (`act_id` names it): confirmed, expired
(confirming.py). `at_ns` is CLOCK_MONOTONIC, `unix_ns` CLOCK_REALTIME. One writer at a time: whoever holds the `Lock`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from pytools import directories
from pytools.closing import Closing
from pytools.errors import CapabilityError
from pytools.owned_files import as_owner
from steering.acting.background import Later
from steering.plan import Group, Member, Target, Weights, weights_of

Kind = Literal["applied", "failed", "undone", "confirmed", "expired"]
KINDS: Final = ("applied", "failed", "undone", "confirmed", "expired")
FILE: Final = "journal.jsonl"
LOCK_FILE: Final = "lock"
ROTATE_BYTES: Final = 4 << 20
_WAIT_S: Final = 0.2  # for the disk, before the journal is read


@dataclass(frozen=True, slots=True)
class Entry:
    kind: Kind
    act_id: str
    target: Target
    members: tuple[Member, ...]  # of the target before anything of ours, with their original weights
    before: Weights
    after: Weights
    because: str
    under: str
    scope: str  # boot and network namespace (netns.scope): what it records was in force there alone
    by: str = "controller"  # who wrote it: controller, guardian, command
    at_ns: int = 0
    unix_ns: int = 0
    host: str = ""  # as the agent calls it: for whoever tells of this act later

    @property
    def group(self) -> Group:
        """The target before anything of ours; its destinations are not known any more."""
        return Group(self.target, (), self.members, self.before)

    @property
    def original(self) -> Weights:
        """The weights before anything of ours."""
        return weights_of((member.nexthop_id, member.weight) for member in self.members)


@dataclass(frozen=True, slots=True)
class Contents:
    entries: tuple[Entry, ...]
    torn: int  # lines that are no entry: a write that a crash cut off

    def in_force(self, scope: str) -> dict[Target, Entry]:
        """The last act on every target that does not have its original weights, if our rule is in the kernel."""
        found: dict[Target, Entry] = {}
        for entry in self.entries:
            if entry.scope != scope or entry.kind not in ("applied", "undone"):
                continue
            found.pop(entry.target, None)
            if entry.kind == "applied" and entry.after != entry.original:
                found[entry.target] = entry
        return found


def directory(netns: str | None) -> Path:
    """Where this instance's journal and lock are; made with mode 0700 when missing."""
    path = directories.state_dir(netns)
    try:
        with as_owner(path.parent):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    return path


def _not_ours(path: Path, error: OSError) -> CapabilityError:
    return CapabilityError(f"{path}: {error.strerror}", "run it as root")


def read(path: Path) -> Contents:
    """All that can be read of a journal; a missing one is empty."""
    try:
        with as_owner(path):
            text = path.read_bytes()
    except FileNotFoundError:
        return Contents((), 0)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    return _parse_all(text)


def _parse_all(text: bytes) -> Contents:
    found = [parse(line) for line in text.split(b"\n") if line]
    entries = tuple(entry for entry in found if entry is not None)
    return Contents(entries, len(found) - len(entries))


def parse(line: bytes) -> Entry | None:
    try:
        raw = json.loads(line)
        known = {name: raw[name] for name in (f.name for f in fields(Entry)) if name in raw}
        known["members"] = tuple(Member(int(n), str(g), str(i), int(w)) for n, g, i, w in raw["members"])
        for name in ("before", "after"):
            known[name] = weights_of((int(n), int(w)) for n, w in raw[name])
        entry = Entry(**known)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return entry if entry.kind in KINDS and isinstance(entry.target, str) else None


class Journal(Closing):
    """Appends entries.

    Parameters
    ----------
    path : Path
        The file; made with mode 0600 when missing.
    later : Later, optional
        Does the writing, so that nobody waits for the disk; stays the caller's.
    """

    def __init__(self, path: Path, later: Later | None = None) -> None:
        self.path, self._later = path, later
        self._unwritten: list[Entry] = []
        self._fd = _open_synced(path)

    def write(self, *entries: Entry, sync: bool = False) -> None:
        """Append entries, in one write; with `sync` they are on disk when it returns.

        Raises
        ------
        OSError
            If not all of them are. Of what is written later it is not known: see `Later.failure`.
        """
        if self._later is None or sync:
            self._append(entries, sync)
        elif entries:
            self._unwritten += entries
            if not self._later.put(lambda: self._append_later(entries)):
                del self._unwritten[-len(entries) :]

    def _append_later(self, entries: tuple[Entry, ...]) -> None:
        try:
            self._append(entries)
        finally:
            del self._unwritten[: len(entries)]

    def _append(self, entries: tuple[Entry, ...], sync: bool = False) -> None:
        lines = [json.dumps(_as_line(entry), separators=(",", ":")).encode() for entry in entries]
        if lines:
            append_line(self._fd, b"\n".join(lines), self.path)
        if sync:
            os.fdatasync(self._fd)

    def read(self) -> Contents:
        """All that was written, by whomever, and what is still to be."""
        if self._later is not None:
            self._later.wait(_WAIT_S)
        unwritten = tuple(self._unwritten)
        found = read(self.path)
        return Contents((*found.entries, *unwritten), found.torn)

    def failure(self) -> str:
        """Why entries could not be written later, since this was last asked; empty when they could."""
        return self._later.failure() if self._later is not None else ""

    def rotate(self) -> None:
        """Put a long journal aside, once all is written; to be called while nothing is in force."""
        self._in_turn(self._rotate)

    def _rotate(self) -> None:
        if os.fstat(self._fd).st_size < ROTATE_BYTES:
            return
        with as_owner(self.path):
            os.replace(self.path, self.path.with_suffix(".jsonl.1"))
        os.close(self._fd)
        self._fd = _open_synced(self.path)

    def close(self) -> None:
        self._in_turn(lambda: os.close(self._fd))

    def _in_turn(self, do: Callable[[], object]) -> None:
        """Do something to the file after what is still to be written to it."""
        if self._later is None:
            do()
        else:
            self._later.put(do)


def _as_line(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"members": [astuple(member) for member in entry.members]}


def append_line(fd: int, line: bytes, path: Path) -> None:
    """Append a line, or several; one that somebody, or a full disk, left torn before it is closed off.

    Raises
    ------
    OSError
        If it was not, or not wholly, written.
    """
    size = os.fstat(fd).st_size
    torn = size and os.pread(fd, 1, size - 1) != b"\n"
    data = (b"\n" if torn else b"") + line + b"\n"
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, "the disk is full", str(path))


def _open_synced(path: Path) -> int:
    """A journal opened for appending; its name, too, is on disk."""
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    os.fsync(fd)
    sync_folder(path.parent)
    return fd


def sync_folder(folder: Path) -> None:
    """Have the names in a directory on disk."""
    with as_owner(folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def entry_now(  # the two clocks are read here, so that no caller forgets one
    kind: Kind,
    act_id: str,
    group: Group,
    before: Weights,
    after: Weights,
    because: str,
    under: str,
    scope: str,
    by: str = "controller",
    host: str = "",
) -> Entry:
    """An entry with the present time; `group` is the target before anything of ours."""
    return Entry(
        kind,
        act_id,
        group.target,
        group.members,
        before,
        after,
        because,
        under,
        scope,
        by,
        time.monotonic_ns(),
        time.time_ns(),
        host,
    )


def as_json(entry: Entry) -> dict[str, Any]:
    """An entry for other programs; weights by the ids of hops, and in `named` by their names."""
    weights = {"before": entry.before, "after": entry.after, "original": entry.original}
    named = {which: entry.group.named(each) for which, each in weights.items()}
    return asdict(entry) | {"original": entry.original, "named": named}
