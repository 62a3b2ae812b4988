"""The ways of each path: found, distinguished, and judged by probes from many source ports.

Only for paths over a bond or team which hashes flows, or with two routers or more, by the hop limits of steady probes;
without such paths nothing is sent and no socket is open. One path at a time is searched for ways; then a sweep takes
their ports in turn, at a rate that all paths share. Times are CLOCK_MONOTONIC nanoseconds. One thread; called whenever
the mesh reads replies.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping
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
from pytools.sources.probing.lower_taps import LowerTaps
from pytools.sources.probing.path_ways import FIRST_REPLY_NS, PathWays, Search, Seen
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.program import ProbeProgram
from pytools.sources.probing.sweep import Sweep
from pytools.sources.probing.tracing import Ask, Batch, Locating, Meeting, Reply

_SECOND_NS: Final = 1_000_000_000
_MOST_ROUTERS: Final = 30
_AGAIN_NS: Final = 600 * _SECOND_NS  # a search, though nothing has changed
_CHANGED_NS: Final = 60 * _SECOND_NS  # between two searches of one path, whatever changes
_SURE_NS: Final = 10 * _SECOND_NS  # from the first search, which is soon over, to the second, which misses hardly any
_LOCATE_NS: Final = 60 * _SECOND_NS
_TELL_NS: Final = 5 * _SECOND_NS
_LOOK_NS: Final = _SECOND_NS  # between two looks at which paths have ways
_REPLY_NS: Final = 200_000_000  # besides twice the longest round trip so far
_ASK_NS: Final = 50_000_000  # for each that is asked
_BURST: Final = 8  # probes of a sweep at once
_BAD: Final = frozenset({"slow", "lossy", "dead"})


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
        self._bundles: Mapping[str, Bundle] = {}
        self._taps: LowerTaps | None = None
        self._sweep: Sweep | None = None
        self._refused_ns = 0  # when there were no ports for it
        self._look_ns = self._sent_ns = 0
        self._allowed = 0.0  # probes that may be sent now
        self._search: Search | None = None
        self._waiting: Search | None = None  # a search that has to wait for another
        self._ask_ns = 0  # not before
        self._seq = 0
        self._refused = self._gone_bytes = 0
        self._wakeups = select.epoll()

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
        changed = {name for name in {*self._bundles, *bundles} if self._bundles.get(name) != bundles.get(name)}
        self._bundles = bundles
        for index in [index for index, known in self._paths.items() if known.pinned.path.interface in changed]:
            self._drop(index)
        self._look_ns = 0

    def _drop(self, index: int) -> None:
        gone = self._paths.pop(index)
        if index in self._order:
            self._order.remove(index)
        if self._sweep is not None:
            self._sweep.forget(index)
        if self._waiting is not None and self._waiting.known is gone:
            self._waiting = None
        if self._search is not None and self._search.known is gone:
            self._end_search()

    def note(self, paths: NDArray[np.int64], ttl: NDArray[np.uint8]) -> None:
        """Take note of what the hop limits of answered probes were."""
        known = paths < len(self.ttl)
        self.ttl[paths[known]] = ttl[known]

    def take(self, records: NDArray[Any]) -> None:
        """Work on the kernel's records of a sweep."""
        if self._sweep is not None:
            for fate in self._sweep.fates(records):
                if fate.forward_ns != MISSING:  # else the reflector gives no time
                    self._note(*fate)

    def _note(self, path: int, port: int, sent_ns: int, forward_ns: int) -> None:
        known = self._paths.get(path)
        seen = known.by_port.get(port) if known is not None else None
        if known is None or seen is None or sent_ns < seen.since_ns:
            return
        seen.probes.append((sent_ns, forward_ns))
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
        self.hear()
        for fate in self._sweep.expired(now_ns):
            self._note(*fate)
        self._send(now_ns)
        for index in self._order:
            known = self._paths[index]
            if known.news >= len(known.seen) and known.judge():
                self._tell(known, now_ns)
        self._begin_search(now_ns)

    def _look(self, now_ns: int) -> None:
        """Find the paths that may have several ways, and publish those whose ways are known."""
        several = np.flatnonzero((self.ttl > 255 - _MOST_ROUTERS) & (self.ttl <= 253)).tolist()
        if self._bundles:
            bundled = (index for index, pinned in self._pinned.items() if pinned.path.interface in self._bundles)
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
        if self._refused_ns and now_ns - self._refused_ns < _CHANGED_NS:
            return False
        families = {pinned.family for pinned in self._pinned.values()}
        if self._sweep is not None:
            self._close_sweep()
        try:
            timeout_ns = int(self._probe.timeout_ms * 1e6)
            probe = self._probe
            self._sweep = Sweep(self._program, self._wakeups, families, probe.port, probe.dscp, timeout_ns)
        except (SwerveError, OSError) as error:
            self._refused_ns = now_ns
            log.event(Level.WARNING, "no search for hidden ways", why=error)
            return False
        return True

    # ---- the sweep ----

    def _send(self, now_ns: int) -> None:
        """So many probes as the time since the last allows, each along the next path."""
        assert self._sweep is not None
        per_ns = self._probe.sweep_per_s / _SECOND_NS
        self._allowed = min(_BURST, self._allowed + (now_ns - self._sent_ns) * per_ns)
        self._sent_ns = now_ns
        while self._allowed >= 1 and self._order:
            self._allowed -= 1
            known = self._paths[self._order[0]]
            self._order.rotate(-1)
            _, port = known.order[known.turn % len(known.order)]
            known.turn += 1
            if not self._sweep.send(known.pinned, port, time.monotonic_ns()):
                return

    # ---- searches ----

    def _begin_search(self, now_ns: int) -> None:
        search = self._search
        if search is not None and (search.asked or not search.counted):
            return
        for known in self._paths.values():
            for seen in known.seen:
                if seen.state in _BAD and (not seen.located_ns or now_ns - seen.located_ns >= _LOCATE_NS):
                    seen.located_ns = now_ns
                    if self._locate(known, seen):
                        self._step(now_ns)
                        return
        if search is not None:
            return
        waiting = [known for known in self._paths.values() if self._is_due(known, now_ns)]
        if waiting:
            known = min(waiting, key=lambda each: each.searched_ns)
            known.searched_ns, known.routers = now_ns, self._routers(known)
            known.searches += 1
            meeting = Meeting(known.routers, known.hops, known.pinned.path.interface in self._bundles)
            self._search = Search(known, meeting)
            self._step(now_ns)

    def _routers(self, known: PathWays) -> int:
        return 255 - int(self.ttl[known.pinned.index])

    def _is_due(self, known: PathWays, now_ns: int) -> bool:
        since_ns = now_ns - known.searched_ns
        dead = any(each.state == "dead" for each in known.seen)
        changed = self._routers(known) != known.routers or dead
        again_ns = _SURE_NS if known.searches == 1 else _CHANGED_NS if changed else _AGAIN_NS
        return not known.searched_ns or since_ns >= again_ns

    def _locate(self, known: PathWays, seen: Seen) -> bool:
        good = [each for each in known.seen if each.state == "healthy"]
        alike = [each for each in good if each.way.lower == seen.way.lower]
        first = 1 if not alike else None if known.found is None else known.found.differs_at
        if not good or first is None:
            return False
        verdict = seen.verdict
        size = verdict.queueing_ns or 0 if seen.state == "slow" else verdict.lost / max(1, verdict.sent)
        locating = Locating(seen.way, (alike or good)[0].way, seen.state, first, size)
        if self._search is not None:
            self._waiting = self._search
        self._search = Search(known, locating, seen)
        return True

    def _step(self, now_ns: int, last_ns: int = 0) -> None:
        search = self._search
        assert search is not None
        replies, search.replies, search.asked = search.replies, {}, {}
        try:
            search.batch = search.steps.send(replies) if search.batch is not None else next(search.steps)
        except StopIteration:
            self._end_search()
            self._learn(search, now_ns)
            return
        if search.counted and search.known.found is None:
            self._learn(search, now_ns)
        if not any(ask.hop == 0 for ask in search.batch.asks):
            self._close_taps()
        self._ask_ns = max(self._ask_ns, last_ns + search.batch.after_ns)

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.steps.close()
        self._search, self._waiting = self._waiting, None
        self._close_taps()

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
        elif search.sick is not None and search.sick.state in _BAD:
            search.sick.sick_hop = what.hop
        self._tell(known, now_ns)

    def hear(self) -> None:
        """Take what routers have said; ask what is to be asked next."""
        if self._sweep is None:
            return
        now_ns = time.monotonic_ns()
        for spoke in self._sweep.spoke():
            self._match(spoke.port, spoke.destination, spoke.router, spoke.seq, now_ns)
        self._match_lowers(now_ns)
        search = self._search
        if search is None or search.batch is None:
            return
        if not search.asked:
            if now_ns >= self._ask_ns:
                self._ask(search, search.batch)
            return
        known, last_ns = search.known, max(search.asked.values())
        due_ns = self.due_ns()
        if len(search.replies) == len(search.asked) or (due_ns is not None and now_ns >= due_ns):
            longest_ns = max((each.round_trip_ns for each in search.replies.values()), default=0)
            if longest_ns:
                first = known.reply_ns == FIRST_REPLY_NS
                known.reply_ns = max(0 if first else known.reply_ns, _REPLY_NS + 2 * longest_ns)
            self._ask_ns = last_ns + _ASK_NS * len(search.asked)
            self._step(now_ns, last_ns)

    def due_ns(self) -> int | None:
        """When `hear` is to be called, though no router answers; None: no search is under way."""
        search = self._search
        if search is None or search.batch is None:
            return None
        if not search.asked:
            return self._ask_ns
        queue_ns = max((each.verdict.queueing_ns or 0 for each in search.known.seen), default=0)
        return max(search.asked.values()) + search.known.reply_ns + 2 * queue_ns

    def _ask(self, search: Search, batch: Batch) -> None:
        assert self._sweep is not None
        known, search.seqs = search.known, {}
        for ask in batch.asks:
            search.asked[ask] = time.monotonic_ns()
            if ask.hop == 0:
                self._open_taps(known)
                self._sweep.send(known.pinned, ask.port, search.asked[ask])
                continue
            self._seq = (self._seq + 1) & 0xFFFFFFFF
            search.seqs[self._seq] = ask
            self._sweep.ask(known.pinned, ask.port, ask.hop, self._seq)

    def _open_taps(self, known: PathWays) -> None:
        bundle = self._bundles.get(known.pinned.path.interface)
        if self._taps is None and bundle is not None:
            with contextlib.suppress(OSError):  # one has just gone: then the bundle is another one soon
                self._taps = LowerTaps(self._wakeups, bundle.ports, self._probe.port)

    def _close_taps(self) -> None:
        if self._taps is not None:
            self._taps.close()
            self._taps = None

    def _match_lowers(self, now_ns: int) -> None:
        search = self._search
        if self._taps is None or self._sweep is None or search is None:
            return
        for left in self._taps.seen():
            ask = Ask(left.source_port - self._sweep.first_port, 0)
            if left.destination == search.known.address and ask in search.asked:
                search.replies.setdefault(ask, Reply(left.lower, now_ns - search.asked[ask]))

    def _match(self, port: int, destination: str, router: str, seq: int | None, now_ns: int) -> None:
        search = self._search
        if search is None or destination != search.known.address:
            return
        # A router that sends no more than the ports back says not which probe it was: one at a time has a port.
        one_of_port = next((each for each in search.asked if each.port == port), None)
        ask = one_of_port if seq is None else search.seqs.get(seq)
        if ask is not None and ask.port == port and ask in search.asked:
            search.replies.setdefault(ask, Reply(router, now_ns - search.asked[ask]))

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
        return bool(self._order)

    def fileno(self) -> int:
        """For a selector: readable when a router has answered, until `hear` is called."""
        return self._wakeups.fileno()

    @property
    def refused(self) -> int:
        """How many probes were not sent."""
        return self._refused + (0 if self._sweep is None else self._sweep.refused)

    def wire_bytes(self) -> int:
        return self._gone_bytes + (0 if self._sweep is None else self._sweep.wire_bytes)

    def _close_sweep(self) -> None:
        assert self._sweep is not None
        self._waiting = None
        self._end_search()
        self._gone_bytes += self._sweep.wire_bytes
        self._refused += self._sweep.refused
        self._sweep.close()
        self._sweep = None

    def close(self) -> None:
        if self._sweep is not None:
            self._close_sweep()
        self._close_taps()
        self._wakeups.close()
