"""The searches for ways and for where one is bad: one at a time, driven by the clock and by what routers answer.

Times are CLOCK_MONOTONIC nanoseconds. One thread, the agent's.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from pytools.kernel.netlink.bonds import Bundle
from pytools.sources.probing.lower_taps import LowerTaps
from pytools.sources.probing.path_ways import BAD, FIRST_REPLY_NS, PathWays, Search, Seen
from pytools.sources.probing.sweep import Sweep
from pytools.sources.probing.tracing import Ask, Batch, Locating, Meeting, Reply
from pytools.units import SECOND

REPLY_NS: Final = 200_000_000  # in which a router answers, besides twice the longest round trip so far

_AGAIN_NS: Final = 600 * SECOND  # a search, though nothing has changed
CHANGED_NS: Final = 60 * SECOND  # between two searches of one path, whatever changes
_SURE_NS: Final = 10 * SECOND  # from the first search, which is soon over, to the second, which misses hardly any
_LOCATE_NS: Final = 60 * SECOND
_ASK_NS: Final = 50_000_000  # for each that is asked


class Searches:
    """What is searched now, and what waits for that.

    Parameters
    ----------
    wakeups : epoll
        Readable when a router has answered, or a lower interface is to be read, until `hear` is called.
    port : int
        Of the peers' probes.
    learn : callable
        Called with a search that has come to its end, or has found enough to be told.

    Attributes
    ----------
    sweep : Sweep or None
        Whose ports are asked; None: nothing is searched.
    bundles : mapping
        Bonds and teams, by interface.
    """

    def __init__(self, wakeups: select.epoll, port: int, learn: Callable[[Search, int], None]) -> None:
        self._wakeups, self._port, self._learn = wakeups, port, learn
        self.sweep: Sweep | None = None
        self.bundles: Mapping[str, Bundle] = {}
        self._taps: LowerTaps | None = None
        self._search: Search | None = None
        self._waiting: Search | None = None  # a search that has to wait for another
        self._ask_ns = 0  # not before
        self._seq = 0

    # ---- what is searched ----

    def begin(self, paths: Iterable[PathWays], routers: Callable[[PathWays], int], now_ns: int) -> None:
        """Begin what is due: first where a bad way is bad; a search of all ways that can be told waits for it."""
        search = self._search
        if search is not None and (search.asked or not search.counted):
            return
        waiting = []
        for known in paths:
            for seen in known.seen:
                if seen.state in BAD and (not seen.located_ns or now_ns - seen.located_ns >= _LOCATE_NS):
                    seen.located_ns = now_ns
                    if self._locate(known, seen):
                        self._step(now_ns)
                        return
            if search is None and _is_due(known, routers(known), now_ns):
                waiting.append(known)
        if waiting:
            known = min(waiting, key=lambda each: each.searched_ns)
            known.searched_ns, known.routers = now_ns, routers(known)
            known.searches += 1
            meeting = Meeting(known.routers, known.hops, known.pinned.path.interface in self.bundles)
            self._search = Search(known, meeting)
            self._step(now_ns)

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
            self._end()
            self._learn(search, now_ns)
            return
        if search.counted and search.known.found is None:
            self._learn(search, now_ns)
        if not any(ask.hop == 0 for ask in search.batch.asks):
            self._close_taps()
        self._ask_ns = max(self._ask_ns, last_ns + search.batch.after_ns)

    def drop(self, known: PathWays) -> None:
        """Search this path no more."""
        if self._waiting is not None and self._waiting.known is known:
            self._waiting = None
        if self._search is not None and self._search.known is known:
            self._end()

    def _end(self) -> None:
        if self._search is not None:
            self._search.steps.close()
        self._search, self._waiting = self._waiting, None
        self._close_taps()

    def close(self) -> None:
        """Search nothing; `begin` begins anew."""
        self._waiting = self.sweep = None
        self._end()

    # ---- probes and answers ----

    def due_ns(self) -> int | None:
        """When `hear` is to be called, though no router answers; None: no search is under way."""
        search = self._search
        if search is None or search.batch is None:
            return None
        if not search.asked:
            return self._ask_ns
        queue_ns = max((each.verdict.queueing_ns or 0 for each in search.known.seen), default=0)
        return max(search.asked.values()) + search.known.reply_ns + 2 * queue_ns

    def hear(self) -> None:
        """Take what routers have said; ask what is to be asked next."""
        if self.sweep is None:
            return
        now_ns = time.monotonic_ns()
        for spoke in self.sweep.spoke():
            self._match(spoke.port, spoke.destination, spoke.router, spoke.seq, now_ns)
        self._match_lowers(self.sweep, now_ns)
        search, due_ns = self._search, self.due_ns()
        if search is None or search.batch is None or due_ns is None:
            return
        if not search.asked:
            if now_ns >= due_ns:
                self._ask(self.sweep, search, search.batch)
            return
        known, last_ns = search.known, max(search.asked.values())
        if len(search.replies) == len(search.asked) or now_ns >= due_ns:
            longest_ns = max((each.round_trip_ns for each in search.replies.values()), default=0)
            if longest_ns:
                first = known.reply_ns == FIRST_REPLY_NS
                known.reply_ns = max(0 if first else known.reply_ns, REPLY_NS + 2 * longest_ns)
            self._ask_ns = last_ns + _ASK_NS * len(search.asked)
            self._step(now_ns, last_ns)

    def _ask(self, sweep: Sweep, search: Search, batch: Batch) -> None:
        known, search.seqs = search.known, {}
        for ask in batch.asks:
            search.asked[ask] = time.monotonic_ns()
            if ask.hop == 0:
                self._open_taps(known)
                sweep.send(known.pinned, ask.port, search.asked[ask])
                continue
            self._seq = (self._seq + 1) & 0xFFFFFFFF
            search.seqs[self._seq] = ask
            sweep.ask(known.pinned, ask.port, ask.hop, self._seq)

    def _match(self, port: int, destination: str, router: str, seq: int | None, now_ns: int) -> None:
        search = self._search
        if search is None or destination != search.known.address:
            return
        # A router that sends no more than the ports back says not which probe it was: one at a time has a port.
        one_of_port = next((each for each in search.asked if each.port == port), None)
        ask = one_of_port if seq is None else search.seqs.get(seq)
        if ask is not None and ask.port == port and ask in search.asked:
            search.replies.setdefault(ask, Reply(router, now_ns - search.asked[ask]))

    # ---- interfaces below ----

    def _open_taps(self, known: PathWays) -> None:
        bundle = self.bundles.get(known.pinned.path.interface)
        if self._taps is None and bundle is not None:
            with contextlib.suppress(OSError):  # one has just gone: then the bundle is another one soon
                self._taps = LowerTaps(self._wakeups, bundle.ports, self._port)

    def _close_taps(self) -> None:
        if self._taps is not None:
            self._taps.close()
            self._taps = None

    def _match_lowers(self, sweep: Sweep, now_ns: int) -> None:
        search = self._search
        if self._taps is None or search is None:
            return
        for left in self._taps.seen():
            ask = Ask(left.source_port - sweep.first_port, 0)
            if left.destination == search.known.address and ask in search.asked:
                search.replies.setdefault(ask, Reply(left.lower, now_ns - search.asked[ask]))


def _is_due(known: PathWays, routers: int, now_ns: int) -> bool:
    since_ns = now_ns - known.searched_ns
    changed = routers != known.routers or any(each.state == "dead" for each in known.seen)
    again_ns = _SURE_NS if known.searches == 1 else CHANGED_NS if changed else _AGAIN_NS
    return not known.searched_ns or since_ns >= again_ns
