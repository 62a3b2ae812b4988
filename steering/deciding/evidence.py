"""What is known now: of every subject (a path, an interface, a queue pair) the newest fact.

Times are CLOCK_MONOTONIC nanoseconds of this host. No I/O; one thread. Any program may publish a signal: one that is
from the future, about another host's path, older than what is known, or one subject too many is refused and counted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

import msgspec

from pytools.signals import (
    Job,
    Link,
    LinkEvent,
    Path,
    PathDelay,
    PathEcn,
    PathLiveness,
    PathMtu,
    RdmaPort,
    RdmaQueuePair,
    Signal,
    TcpPath,
)
from steering.deciding.failure_classifier import has_answered

FORGET_NS: Final = 300_000_000_000  # a subject not heard of for so long is forgotten
FUTURE_NS: Final = 1_000_000_000  # a fact may be this far ahead of our own look at the clock
MOST: Final = 16_384  # subjects of one kind
_SWEEP_NS: Final = 10_000_000_000
_SHORTER_GONE_NS: Final = 10_000_000_000  # after this without the shorter window, the longer one counts
_OF_THE_INTERFACE: Final = ("carrier_lost", "carrier_found", "removed", "flap", "queue_full", "pause_storm")

_S = TypeVar("_S", bound=Signal)
_T = TypeVar("_T", bound=Signal)


class Facts(msgspec.Struct, frozen=True):
    """Everything that is known of one path."""

    path: Path
    delay: PathDelay | None = None  # over the shortest window
    liveness: PathLiveness | None = None
    siblings: tuple[PathLiveness, ...] = ()  # of the other paths to the same peer
    tcp: TcpPath | None = None
    ecn: PathEcn | None = None
    mtu: PathMtu | None = None
    link: Link | None = None
    ports: tuple[RdmaPort, ...] = ()
    queue_pairs: tuple[RdmaQueuePair, ...] = ()
    events: tuple[LinkEvent, ...] = ()  # of the path and its interface, the newest of each word
    jobs: tuple[Job, ...] = ()  # with traffic on it

    @property
    def answered(self) -> bool:
        """Whether any probe of the path is known to have been answered, however long ago."""
        known = self.liveness is not None and has_answered(self.liveness)
        return known or (self.delay is not None and self.delay.received > 0)

    def event(self, *words: str) -> LinkEvent | None:
        found = [event for event in self.events if event.what in words]
        return max(found, key=lambda event: (min(event.happened_ns, event.at_ns), event.at_ns), default=None)


class _Newest(Generic[_S]):
    """The newest fact of each subject; subjects of one group (a path, an interface, a peer) are found together."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[Hashable, _S]] = {}
        self._count = 0

    def put(self, group: Hashable, fact: _S, key: Hashable = None) -> bool:
        """Keep a fact, unless a newer one is known or there is no room."""
        members = self._groups.get(group, {})
        known = members.get(key)
        if known is None:
            if self._count >= MOST:
                return False
            self._count += 1
            self._groups[group] = members
        elif fact.at_ns < known.at_ns:
            return False
        members[key] = fact
        return True

    def one(self, group: Hashable, key: Hashable = None) -> _S | None:
        return self._groups.get(group, {}).get(key)

    def all(self, group: Hashable) -> tuple[_S, ...]:
        return tuple(self._groups.get(group, {}).values())

    def drop(self, group: Hashable, key: Hashable = None) -> None:
        members = self._groups.get(group, {})
        if members.pop(key, None) is not None:
            self._count -= 1
        if not members:
            self._groups.pop(group, None)

    def forget(self, before_ns: int) -> None:
        """Forget subjects that were not heard of since."""
        old = [(g, k) for g, members in self._groups.items() for k, fact in members.items() if fact.at_ns < before_ns]
        for group, key in old:
            self.drop(group, key)


class Evidence:
    """The newest fact of every subject."""

    def __init__(self) -> None:
        # signals that were not taken: from the future, too old, about another host's path, of too many
        # subjects
        self.refused = 0
        self._places: dict[tuple[str, str], dict[Path, int]] = {}  # host and interface -> its paths, and when heard of
        self._swept_ns: int | None = None
        self._measured_after_ns = self._happened_after_ns = 0  # what is older is of before a suspend
        self._clear()

    def _clear(self) -> None:
        self._delays: _Newest[PathDelay] = _Newest()
        self._liveness: _Newest[PathLiveness] = _Newest()  # by peer
        self._tcp: _Newest[TcpPath] = _Newest()
        self._ecn: _Newest[PathEcn] = _Newest()
        self._mtu: _Newest[PathMtu] = _Newest()
        self._links: _Newest[Link] = _Newest()  # by host and interface
        self._ports: _Newest[RdmaPort] = _Newest()
        self._pairs: _Newest[RdmaQueuePair] = _Newest()
        self._events: _Newest[LinkEvent] = _Newest()  # by path, or by host and interface
        self._pair_paths: dict[Hashable, Path] = {}
        self._jobs: _Newest[Job] = _Newest()  # by path

    def take(self, signal: Signal, now: int) -> tuple[Path, ...]:
        """Take note of a fact.

        Returns
        -------
        tuple of Path
            What it says something about: none if it was refused, or is of no use here.
        """
        self._sweep(now)
        since = self._happened_after_ns if isinstance(signal, LinkEvent | Link) else self._measured_after_ns
        if not max(now - FORGET_NS, since) <= signal.at_ns <= now + FUTURE_NS:
            self.refused += 1
            return ()
        told = self._digest(signal)
        self.refused += told is None
        return told or ()

    def _digest(self, signal: Signal) -> tuple[Path, ...] | None:  # noqa: PLR0911 (one return per kind of signal)
        match signal:
            case PathDelay():
                known = self._delays.one(signal.path)
                longer = known is not None and signal.window_ns > known.window_ns
                if longer and known is not None and signal.at_ns - known.at_ns < _SHORTER_GONE_NS:
                    return ()
                return self._of_path(self._delays, signal, signal.path)
            case PathLiveness():
                return self._of_path(self._liveness, signal, signal.path, _peer(signal.path), signal.path)
            case TcpPath():
                return () if signal.path is None else self._of_path(self._tcp, signal, signal.path)
            case PathEcn():
                return self._of_path(self._ecn, signal, signal.path)
            case PathMtu():
                return self._of_path(self._mtu, signal, signal.path)
            case RdmaQueuePair():
                return self._queue_pair(signal)
            case Link():
                return self._of_interface(self._links, signal, signal.interface)
            case RdmaPort():
                return self._of_interface(self._ports, signal, signal.interface, (signal.device, signal.port))
            case LinkEvent():
                return self._event(signal)
            case Job():
                return self._job(signal)
            case _:
                return ()

    def _of_path(
        self, facts: _Newest[_T], signal: _T, path: Path, group: Hashable = None, key: Hashable = None
    ) -> tuple[Path, ...] | None:
        """Keep a fact about a path; its peer's other paths are judged by it too when it is kept by peer."""
        if not self._known(path, signal) or not facts.put(group or path, signal, key):
            return None
        if group is None:
            return (path,)
        return tuple(each.path for each in self._liveness.all(group))

    def _of_interface(
        self, facts: _Newest[_T], signal: _T, interface: str, key: Hashable = None
    ) -> tuple[Path, ...] | None:
        place = (signal.host, interface)
        if not facts.put(place, signal, key):
            return None
        return tuple(self._places.get(place, ()))

    def _event(self, signal: LinkEvent) -> tuple[Path, ...] | None:
        if signal.what in _OF_THE_INTERFACE:
            return self._of_interface(self._events, signal, signal.interface, signal.what)
        mine = [path for path in signal.paths if self._known(path, signal)]
        taken = tuple(path for path in mine if self._events.put(path, signal, signal.what))
        return taken if taken or not signal.paths else None

    def _queue_pair(self, signal: RdmaQueuePair) -> tuple[Path, ...] | None:
        key = signal.key
        before = self._pair_paths.get(key)
        known = None if before is None else self._pairs.one(before, key)
        if known is not None and signal.at_ns < known.at_ns:
            return None
        if before is not None and (signal.closed or before != signal.path):
            self._pairs.drop(before, key)
            del self._pair_paths[key]
        told = () if before is None else (before,)
        if signal.path is None or signal.closed:
            return told
        if not self._known(signal.path, signal) or not self._pairs.put(signal.path, signal, key):
            return None
        self._pair_paths[key] = signal.path
        return tuple(dict.fromkeys((*told, signal.path)))

    def _job(self, signal: Job) -> tuple[Path, ...] | None:
        used = [each.path for each in signal.paths if each.path is not None]
        taken = tuple(path for path in used if self._known(path, signal) and self._jobs.put(path, signal, signal.key))
        return taken if taken or not used else None

    def _known(self, path: Path, signal: Signal) -> bool:
        """Take note of a path of this host; False for another host's, or one too many."""
        place = path.source, path.interface
        heard = self._places.get(place, {}).get(path)
        if path.source != signal.host or (heard is None and sum(map(len, self._places.values())) >= MOST):
            return False
        self._places.setdefault(place, {})[path] = max(signal.at_ns, heard or 0)
        return True

    def _sweep(self, now: int) -> None:
        """Forget what was not heard of for long."""
        if self._swept_ns is not None and 0 <= now - self._swept_ns < _SWEEP_NS:
            return
        self._swept_ns = now
        before = now - FORGET_NS
        for facts in (self._delays, self._liveness, self._tcp, self._ecn, self._mtu, self._links, self._ports):
            facts.forget(before)
        self._pairs.forget(before)
        self._jobs.forget(before)
        self._events.forget(before)
        self._pair_paths = {key: path for key, path in self._pair_paths.items() if self._pairs.one(path, key)}
        self._places = {
            place: kept
            for place, paths in self._places.items()
            if (kept := {path: at_ns for path, at_ns in paths.items() if at_ns >= before})
        }

    @property
    def paths(self) -> Iterable[Path]:
        """Every path that anything is known of."""
        return (path for paths in self._places.values() for path in paths)

    def delay(self, path: Path) -> PathDelay | None:
        return self._delays.one(path)

    def facts(self, path: Path) -> Facts:
        place, peer = (path.source, path.interface), _peer(path)
        return Facts(
            path=path,
            delay=self.delay(path),
            liveness=self._liveness.one(peer, path),
            siblings=tuple(each for each in self._liveness.all(peer) if each.path != path),
            tcp=self._tcp.one(path),
            ecn=self._ecn.one(path),
            mtu=self._mtu.one(path),
            link=self._links.one(place),
            ports=self._ports.all(place),
            queue_pairs=self._pairs.all(path),
            events=(*self._events.all(path), *self._events.all(place)),
            jobs=self._jobs.all(path),
        )

    def suspended(self, after_ns: int, before_ns: int) -> None:
        """Believe nothing that was measured before a suspend, which lay in between: it says nothing of now.

        Paths stay known. News of links may have come at once with the end of it.
        """
        self._happened_after_ns, self._measured_after_ns = after_ns, before_ns
        self._clear()

    def forget_windows(self) -> None:
        """Another agent may measure over other windows."""
        self._delays = _Newest()


def _peer(path: Path) -> tuple[str, str]:
    return path.source, path.destination
