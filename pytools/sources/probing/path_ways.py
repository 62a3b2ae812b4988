"""The ways behind the first hop of one path: which there are, the probes along each, and the records published.

Times are CLOCK_MONOTONIC nanoseconds. One thread, the agent's.
"""

from __future__ import annotations

import ipaddress
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

import numpy as np

from pytools.estimators import ways as estimator
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.ways import LATEST, Key, Probes, State, Verdict, Way, Ways
from pytools.estimators.windows import MISSING
from pytools.signals import PathWay
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.tracing import LATE_NS, Ask, Batch, Locating, Meeting, Reply

BAD: Final = frozenset({"slow", "lossy", "dead"})
FIRST_REPLY_NS: Final = 500_000_000  # in which a router answers, until it is known how long it takes
_DRIFT: Final = 1e-4  # of two clocks against each other
_EXTRA: Final = 12  # probes of a hurry: enough to tell silence from a loss of 20 %
_EXTRA_EVERY_NS: Final = 20_000_000
_LOOK_NS: Final = 50_000_000
_HURRIED_NS: Final = _EXTRA * _EXTRA_EVERY_NS + LATE_NS + 4 * _LOOK_NS  # until all are answered or late


class Seen:
    """One way, and what probes along it have shown."""

    def __init__(self, number: int, way: Way) -> None:
        self.number, self.way, self.turn = number, way, 0
        self.probes: deque[tuple[int, int]] = deque(maxlen=LATEST)
        self.state: State = "unmeasured"
        self.verdict = Verdict("unmeasured", 0, 0, None, None, None, 0)
        self.sick_hop: int | None = None
        self.located_ns = self.since_ns = self.hurried_ns = 0

    def note(self, sent_ns: int, forward_ns: int) -> None:
        """Take note of a probe's fate; of one that counted as lost the answer may come after all."""
        lost = sent_ns, MISSING
        if forward_ns != MISSING and lost in self.probes:
            self.probes[self.probes.index(lost)] = sent_ns, forward_ns
        else:
            self.probes.append((sent_ns, forward_ns))


class PathWays:
    def __init__(self, pinned: PinnedPath) -> None:
        self.pinned, self.address = pinned, str(ipaddress.ip_address(pinned.path.address))
        self.routers = 0  # when it was searched
        self.reply_ns = FIRST_REPLY_NS  # in which a router answers, if it does
        self.searched_ns = self.told_ns = self.searches = 0
        self.found: Ways | None = None
        self.hops: Sequence[estimator.Hop] = ()
        self.numbers: dict[Key, int] = {}
        self.seen: list[Seen] = []
        self.turn = self.news = 0
        self.by_port: dict[int, Seen] = {}

    def learn(self, found: Ways) -> None:
        """Have these ways; of one that was there before what is known stays, unless no other is left to judge it by."""
        before = {each.way.key: each for each in self.seen if len(found.ways) > 1}
        self.found, self.seen = found, []
        for way in found.ways:
            part = self.numbers.pop(way.key[:-1], 0)  # of one that has been found to part again, the first keeps it
            number = self.numbers.setdefault(way.key, part or max(self.numbers.values(), default=0) + 1)
            seen = before.get(way.key) or Seen(number, way)
            seen.way = way
            self.seen.append(seen)
        self.by_port = {port: each for each in self.seen for port in each.way.ports}

    def next_port(self) -> int:
        """That of the sweep's next probe: ways in turn, however many ports each has, and of each way its ports."""
        seen = self.seen[self.turn % len(self.seen)]
        port = seen.way.ports[self.turn // len(self.seen) % len(seen.way.ports)]
        self.turn += 1
        return port

    def judge(self) -> bool:
        """Whether the state of a way is another one now."""
        self.news, changed = 0, False
        probes = []
        for each in self.seen:
            sent, forward = np.array(sorted(each.probes), np.int64).reshape(-1, 2).T
            probes.append(Probes(sent, forward))
        drift = 0.0 if self.pinned.shared_clock else _DRIFT
        verdicts = estimator.judge(probes, [each.state for each in self.seen], drift, 2 * STAMP_BOUND_NS)
        for each, verdict in zip(self.seen, verdicts, strict=True):
            each.verdict = verdict
            if verdict.state == each.state:
                continue
            answered = [at_ns for at_ns, forward_ns in each.probes if forward_ns != MISSING]
            if each.state == "dead" and answered:  # again: what was lost before is over
                each.since_ns = max(answered)
                each.probes = deque([one for one in each.probes if one[0] >= each.since_ns], LATEST)
            each.state, each.sick_hop, each.located_ns, changed = verdict.state, None, 0, True
        return changed

    def signals(self, host: str, first_port: int, now_ns: int) -> Iterator[PathWay]:
        """The record of each way; ports are counted from the first of the sweep's."""
        assert self.found is not None
        found, unix_ns = self.found, time.time_ns()
        for seen in self.seen:
            way, verdict = seen.way, seen.verdict
            router = None if found.differs_at is None or way.alone else way.hops[found.differs_at - 1]
            yield PathWay(
                host=host,
                at_ns=now_ns,
                unix_ns=unix_ns,
                path=self.pinned.path,
                way=seen.number,
                ways=len(found.ways),
                confidence=round(found.confidence, 4),
                ports=[first_port + port for port in way.ports],
                ports_in_all=found.ports,
                hops=list(way.hops),
                differs_at=found.differs_at,
                router=router or "",
                lower=way.lower,
                state=seen.state,
                window_ns=verdict.window_ns,
                sent=verdict.sent,
                lost=verdict.lost,
                loss_bound=verdict.loss_bound,
                queueing_p50_ns=verdict.queueing_ns,
                queueing_bound_ns=verdict.queueing_bound_ns,
                sick_hop=seen.sick_hop,
            )


class Hurry:
    """Extra probes along a way whose answers are overdue: whether it is dead shows sooner than in turns of all ways."""

    def __init__(self, known: PathWays, seen: Seen, now_ns: int) -> None:
        self.known, self.seen, self._ports = known, seen, cycle(seen.way.ports)
        self._left, self._due_ns, self._until_ns = _EXTRA, now_ns, now_ns + _HURRIED_NS
        seen.hurried_ns = now_ns

    def port(self, now_ns: int) -> int | None:
        """That of a probe which is due now."""
        if not self._left or now_ns < self._due_ns:
            return None
        self._left, self._due_ns = self._left - 1, now_ns + _EXTRA_EVERY_NS
        return next(self._ports)

    def over(self, now_ns: int) -> bool:
        return now_ns >= self._until_ns or self.seen.state == "dead"

    def due_ns(self, now_ns: int) -> int:
        """When to look again: a probe is due, or answers, and those that are late."""
        return self._due_ns if self._left else now_ns + _LOOK_NS


@dataclass
class Search:
    """A search under way: of all ways of a path, or of where one is bad."""

    known: PathWays
    what: Meeting | Locating
    sick: Seen | None = None  # of `Locating`
    batch: Batch | None = None
    asked: dict[Ask, int] = field(default_factory=dict)  # when
    seqs: dict[int, Ask] = field(default_factory=dict)
    replies: dict[Ask, Reply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = self.what.search()

    @property
    def counted(self) -> bool:
        """Whether it is of all ways, and has found enough of them to be told."""
        return isinstance(self.what, Meeting) and self.what.counted
