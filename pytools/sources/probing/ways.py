"""The ways of each path: found, distinguished, and judged by probes from many source ports.

Only for paths over a bond or team which hashes flows, or with two routers or more, by the hop limits of steady probes;
without such paths nothing is sent and no socket is open. One path at a time is searched for ways; then a sweep takes
their ports in turn, at a rate that all paths share. Times are CLOCK_MONOTONIC nanoseconds. One thread; called whenever
the mesh reads replies.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools import log
from pytools.config import Probe
from pytools.errors import SwerveError
from pytools.estimators.windows import MISSING
from pytools.ipc.bus import Bus
from pytools.kernel.netlink.bonds import Bundle
from pytools.log import Level
from pytools.signals import WAY_LASTS_NS
from pytools.sources.probing.path_ways import BAD, Hurry, PathWays, Search, Seen
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.program import ProbeProgram
from pytools.sources.probing.searches import CHANGED_NS, REPLY_NS, Searches
from pytools.sources.probing.sweep import Fate, Sweep
from pytools.sources.probing.tracing import Meeting
from pytools.units import SECOND

_MOST_ROUTERS: Final = 30
_TELL_NS: Final = WAY_LASTS_NS // 3
_LOOK_NS: Final = SECOND  # between two looks at which paths have ways
_BURST: Final = 8  # probes of a sweep at once
_HURRIES: Final = 4  # ways with extra probes at once: a dead one is one of each address family
_HURRY_AGAIN_NS: Final = 5 * SECOND  # of one way


class HiddenWays:
    """All paths' ways.

    Parameters
    ----------
    host : str
        Our name.

    Attributes
    ----------
    ttl : ndarray of uint8
        By path: of the newest probe that was answered, at the peer; 0: none was.
    """

    def __init__(self, host: str, probe: Probe, program: ProbeProgram, bus: Bus) -> None:
        self._host, self._probe, self._program, self._bus = host, probe, program, bus
        self.ttl = np.zeros(0, np.uint8)
        self._pinned: dict[int, PinnedPath] = {}
        self._paths: dict[int, PathWays] = {}
        self._order: deque[int] = deque()  # paths with several ways, as they are swept
        self._sweep: Sweep | None = None
        self._refused_ns = 0  # when there were no ports for it
        self._look_ns = self._sent_ns = 0
        self._allowed = 0.0  # probes that may be sent now
        self._hurries: list[Hurry] = []
        self._refused = self._gone_bytes = 0
        self._wakeups = select.epoll()
        self.searches = Searches(self._wakeups, probe.port, self._learn)

    # ---- what there is ----

    def set_paths(self, paths: Iterable[PinnedPath]) -> None:
        """Look for ways along these paths from now on."""
        self._pinned = {pinned.index: pinned for pinned in paths}
        most = max(self._pinned, default=-1) + 1
        if most > len(self.ttl):
            self.ttl = np.concatenate([self.ttl, np.zeros(most - len(self.ttl), np.uint8)])
        for index in [index for index, known in self._paths.items() if self._pinned.get(index) != known.pinned]:
            self._drop(index)
        self._look_ns = 0

    def set_bundles(self, bundles: Mapping[str, Bundle]) -> None:
        """Take note which paths leave by a bond or team, by interface; of one that has changed all is met again."""
        before, self.searches.bundles = self.searches.bundles, bundles
        changed = {name for name in {*before, *bundles} if before.get(name) != bundles.get(name)}
        for index in [index for index, known in self._paths.items() if known.pinned.path.interface in changed]:
            self._drop(index)
        self._look_ns = 0

    def _drop(self, index: int) -> None:
        gone = self._paths.pop(index)
        if index in self._order:
            self._order.remove(index)
        self._hurries = [each for each in self._hurries if each.known is not gone]
        if self._sweep is not None:
            self._sweep.under_way.forget(index)
        self.searches.drop(gone)

    def note(self, paths: NDArray[np.int64], ttl: NDArray[np.uint8]) -> None:
        """Take note of what the hop limits of answered probes were."""
        known = paths < len(self.ttl)
        self.ttl[paths[known]] = ttl[known]

    def take(self, records: NDArray[Any]) -> None:
        """Work on the kernel's records of a sweep."""
        if self._sweep is not None:
            for fate in self._sweep.under_way.answered(records):
                if fate.forward_ns != MISSING:  # else the reflector gives no time
                    self._note(fate)

    def _way_of(self, fate: Fate) -> tuple[PathWays, Seen] | None:
        known = self._paths.get(fate.path)
        seen = known.by_port.get(fate.port) if known is not None else None
        return None if known is None or seen is None else (known, seen)

    def _note(self, fate: Fate) -> None:
        if (way := self._way_of(fate)) is None:
            return
        known, seen = way
        if fate.sent_ns >= seen.since_ns:
            seen.note(fate.sent_ns, fate.forward_ns)
            known.news += 1

    # ---- what is due ----

    def tick(self, now_ns: int) -> None:
        if not self._probe.sweep_per_s:
            return
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            self._look(now_ns)
        if self._sweep is None:
            return
        self.searches.hear()
        for fate in self._sweep.under_way.late(now_ns):
            self._note(fate)
        self._send(now_ns)
        self._send_extra(now_ns)
        for index in self._order:
            known = self._paths[index]
            if known.news >= len(known.seen) and known.judge():
                self._tell(known, now_ns)
        self.searches.begin(self._paths.values(), self._routers, now_ns)

    def _look(self, now_ns: int) -> None:
        """Find the paths that may have several ways, and publish those whose ways are known."""
        several = np.flatnonzero((self.ttl > 255 - _MOST_ROUTERS) & (self.ttl <= 253)).tolist()
        if bundles := self.searches.bundles:
            bundled = (index for index, pinned in self._pinned.items() if pinned.path.interface in bundles)
            several += [index for index in bundled if self.ttl[index] > 253]
        for index in several:
            if index in self._pinned and index not in self._paths and self._has_ports(index, now_ns):
                self._paths[index] = PathWays(self._pinned[index])
        for known in self._paths.values():
            if known.found is not None and now_ns - known.told_ns >= _TELL_NS:
                self._tell(known, now_ns)

    def _has_ports(self, index: int, now_ns: int) -> bool:
        if self._sweep is not None and self._sweep.has(self._pinned[index]):
            return True
        if self._refused_ns and now_ns - self._refused_ns < CHANGED_NS:
            return False
        families = {pinned.family for pinned in self._pinned.values()}
        if self._sweep is not None:
            self._close_sweep()
        try:
            timeout_ns = int(self._probe.timeout_ms * 1e6)
            probe = self._probe
            self._sweep = Sweep(self._program, self._wakeups, families, probe.port, probe.dscp, timeout_ns)
            self.searches.sweep = self._sweep
        except (SwerveError, OSError) as error:
            self._refused_ns = now_ns
            log.event(Level.WARNING, "no search for hidden ways", why=error)
            return False
        return True

    # ---- the sweep ----

    def _send(self, now_ns: int) -> None:
        """So many probes as the time since the last allows, each along the next path."""
        assert self._sweep is not None
        per_ns = self._probe.sweep_per_s / SECOND
        self._allowed = min(_BURST, self._allowed + (now_ns - self._sent_ns) * per_ns)
        self._sent_ns = now_ns
        while self._allowed >= 1 and self._order:
            self._allowed -= 1
            known = self._paths[self._order[0]]
            self._order.rotate(-1)
            if not self._sweep.send(known.pinned, known.next_port(), time.monotonic_ns()):
                return

    def _send_extra(self, now_ns: int) -> None:
        assert self._sweep is not None
        self._hurries = [each for each in self._hurries if not each.over(now_ns)]
        self._hurries += islice(self._overdue(now_ns), _HURRIES - len(self._hurries))
        for hurry in self._hurries:
            if (port := hurry.port(now_ns)) is not None:
                self._sweep.send(hurry.known.pinned, port, time.monotonic_ns())

    def _overdue(self, now_ns: int) -> Iterator[Hurry]:
        """Ways of which an answer is overdue."""
        assert self._sweep is not None
        for fate in self._sweep.under_way.waiting():
            if (way := self._way_of(fate)) is None:
                continue
            known, seen = way
            if len(known.seen) < 2 or seen.state == "dead":
                continue
            overdue = now_ns - fate.sent_ns >= known.reply_ns - REPLY_NS // 2
            if overdue and now_ns - seen.hurried_ns >= _HURRY_AGAIN_NS:
                yield Hurry(known, seen, now_ns)

    # ---- what searches find ----

    def _routers(self, known: PathWays) -> int:
        return 255 - int(self.ttl[known.pinned.index])

    def _learn(self, search: Search, now_ns: int) -> None:
        known, what = search.known, search.what
        if isinstance(what, Meeting):
            found = what.ways()
            known.hops = [dict(hop) for hop in what.hops]
            known.learn(found)
            index = known.pinned.index
            if index in self._order:
                self._order.remove(index)
            if len(found.ways) > 1:
                self._order.append(index)
        elif what.moved:
            self._drop(known.pinned.index)
            return
        elif search.sick is not None and search.sick.state in BAD:
            search.sick.sick_hop = what.hop
        self._tell(known, now_ns)

    # ---- telling ----

    def _tell(self, known: PathWays, now_ns: int) -> None:
        known.told_ns = now_ns
        if self._bus.wanted("path_way"):
            assert self._sweep is not None
            for signal in known.signals(self._host, self._sweep.first_port, now_ns):
                self._bus.publish(signal)

    # ---- for the mesh ----

    @property
    def sweeping(self) -> bool:
        """Whether any path has several ways, which are probed in turn."""
        return self._sweep is not None and bool(self._order)

    def look_ns(self, now_ns: int) -> int | None:
        """When the ring is to be read, and `tick` called; None: as often as it suits."""
        return min((each.due_ns(now_ns) for each in self._hurries), default=None)

    def fileno(self) -> int:
        """For a selector: readable when a router has answered, until `searches.hear` is called."""
        return self._wakeups.fileno()

    @property
    def refused(self) -> int:
        """How many probes were not sent."""
        return self._refused + (0 if self._sweep is None else self._sweep.refused)

    def wire_bytes(self) -> int:
        return self._gone_bytes + (0 if self._sweep is None else self._sweep.wire_bytes)

    def _close_sweep(self) -> None:
        assert self._sweep is not None
        self.searches.close()
        self._hurries.clear()  # nobody would send them, and the ring would be read without end
        self._gone_bytes += self._sweep.wire_bytes
        self._refused += self._sweep.refused
        self._sweep.close()
        self._sweep = None

    def close(self) -> None:
        if self._sweep is not None:
            self._close_sweep()
        self._wakeups.close()
