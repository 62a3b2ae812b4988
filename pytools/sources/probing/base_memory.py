"""Saves the base delays for the agent's next start: a file in /run, so that a standing queue does not become the base.

Written every few seconds and at the end; not synced, because it is valid in the same boot only. A file that is torn, of
another boot or namespace, or that others could have written, is ignored. Times are CLOCK_MONOTONIC nanoseconds. One
thread: the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as File
from typing import Annotated, Final, NamedTuple

import msgspec

from pytools import directories, log
from pytools.errors import SwerveError
from pytools.estimators.remembered_bases import RememberedBase, Time
from pytools.log import Level
from pytools.owned_files import ReplacedFile
from pytools.signals import Path
from pytools.sources.probing.paths import MOST_PATHS, SPOKEN_FOR_NS, PinnedPath
from pytools.sources.source import Source

_VERSION: Final = 1
_MOST_BYTES: Final = 8 << 20
_EVERY_NS: Final = 5_000_000_000
_EVERY_TIMES: Final = 200  # or so many times as long as it takes
_OLDEST_NS: Final = 24 * 3_600_000_000_000  # what was known so long ago is not known any more
_Port = Annotated[int, msgspec.Meta(ge=1024, le=65535)]


class PathBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Path
    ifindex: int
    source: str
    onlink: bool
    at_ns: Time  # when it was known
    gone: bool  # whether the path was gone then
    base: RememberedBase  # without clocks where the ends have different ones


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    scope: str  # boot and network namespace
    ports: tuple[_Port, ...]  # source ports of probes, by flow: a hash on the way may lead others along another way
    dscp: int
    paths: list[msgspec.Raw]  # PathBase


class Found(NamedTuple):
    """What a predecessor knew of a path."""

    base: RememberedBase
    at_ns: int
    changed: bool  # whether the route may be another one now


class BaseMemory(Source):
    """The file, and what is in it that no path has taken up yet.

    Parameters
    ----------
    scope : str
        This boot and network namespace.
    clock : callable
        CLOCK_MONOTONIC.
    """

    def __init__(self, place: File, scope: str, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._place, self._scope, self._clock, self._began_ns = place, scope, clock, clock()
        self._file = ReplacedFile(
            place, lambda error: log.event(Level.WARNING, "base delays are not kept for a successor", why=error)
        )
        self._left: dict[Path, PathBase] = {}
        self._refused = self._due_ns = 0
        self._same_probes = False
        self._bases: Callable[[int], Iterable[PathBase]] | None = None
        self.ports: Sequence[int] = ()  # those of the predecessor
        self._dscp = 0
        self._load(self._began_ns)

    def _load(self, now_ns: int) -> None:
        try:
            found = msgspec.json.decode(directories.read_obeyed(self._place, _MOST_BYTES), type=Contents)
        except FileNotFoundError:
            return
        except (OSError, SwerveError, ValueError) as error:
            self._refuse(str(error))
            return
        if (found.version, found.scope) != (_VERSION, self._scope):
            self._refuse("it is of another boot, network namespace or version")
            return
        self.ports, self._dscp = found.ports, found.dscp
        for raw in found.paths[:MOST_PATHS]:
            try:
                each = msgspec.json.decode(raw, type=PathBase)
            except ValueError as error:
                self._refuse(str(error))
                continue
            if max(each.at_ns, each.base.since_ns, each.base.reached_ns) > now_ns:
                self._refuse(f"{each.path}: it is of the future")
            else:
                self._left[each.path] = each

    def _refuse(self, why: str) -> None:
        if not self._refused:
            log.event(Level.WARNING, "remembered base delays are ignored", file=self._place, why=why)
        self._refused += 1

    def keep(self, bases: Callable[[int], Iterable[PathBase]], ports: Sequence[int], dscp: int) -> None:
        """From now on write what these are.

        Parameters
        ----------
        bases : callable
            What is known at a time.
        ports : sequence of int
            By flow; looked at whenever the file is written.
        """
        self._same_probes = (tuple(ports), dscp) == (tuple(self.ports), self._dscp)
        self._bases, self.ports, self._dscp = bases, ports, dscp

    def found(self, pinned: PinnedPath, now_ns: int) -> Found | None:
        """What the predecessor knew of a path that is new to this agent; once.

        Its route may be another one if it was gone, if it turns up later than a drained path is learned of, if our own
        end is another one, or if other probes are sent than before.
        """
        left = self._left.pop(pinned.path, None)
        if left is None or now_ns - left.at_ns > _OLDEST_NS:
            return None
        base = left.base if pinned.shared_clock else left.base.without_clocks()
        late = now_ns - self._began_ns > SPOKEN_FOR_NS
        other = (left.ifindex, left.source, left.onlink) != pinned.way
        return Found(base, left.at_ns, left.gone or late or other or not self._same_probes)

    def tick(self, now_ns: int) -> int:
        """Write, if it is time; returns when it is again."""
        if now_ns >= self._due_ns:
            began_ns = self._clock()
            self._write(now_ns)
            took_ns = self._clock() - began_ns
            self._due_ns = now_ns + max(_EVERY_NS, _EVERY_TIMES * took_ns)
        return self._due_ns

    def _write(self, now_ns: int) -> None:
        """Replace the file. What cannot be written costs a successor its knowledge, and nothing else."""
        if self._bases is None:
            return
        known = {path: each for path, each in self._left.items() if now_ns - each.at_ns <= _OLDEST_NS}
        known |= {each.path: each for each in self._bases(now_ns)}
        if not known:
            return
        paths = [msgspec.Raw(msgspec.json.encode(each)) for each in known.values()]
        contents = Contents(_VERSION, self._scope, tuple(self.ports), self._dscp, paths[-MOST_PATHS:])
        self._file.write(msgspec.json.encode(contents))

    def drops(self) -> dict[str, int]:
        """What of the file was ignored."""
        return {"probe_bases_refused": self._refused}

    def close(self) -> None:
        """Write what is known at the end, if this agent has begun to."""
        if self._due_ns:
            self._write(self._clock())
