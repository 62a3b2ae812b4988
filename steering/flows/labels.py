"""Flow labels of live IPv6 TCP connections, chosen for good ways behind the first hop. Pure but for the generator.

Routers choose a way (`path_way`) by a hash of addresses, flow label and perhaps more. Nothing is assumed of that hash
but that it stays: the way of a label is learnt for each connection, by a segment with its addresses, ports and that
label, which dies at the router that names the way (`Ask`, `answered`). Learnt are the label that the connection has,
as the kernel program sees it, and others, until two ways besides its own are known. Once its way is bad and another is
not, the connection gets a label of a good one, until no way is bad. Connections that have sent most come first.
Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.signals import PathWay, Signal, TcpFlow
from pytools.units import SECOND
from steering.flows.hidden_ways import Fan, WayAct, Ways
from steering.flows.rates import FORGOTTEN_NS, OVER, key_of
from steering.plan import FlowKey
from steering.policy.actions import Labels

MOST_FLOWS: Final = 64
_OTHERS: Final = 2  # so many ways besides its own are looked for
_CHECK_NS: Final = 10 * SECOND  # the label of each connection is asked about again: routes change, and hashes
_CHECKS_NS: Final = 2 * SECOND  # between two of these: routers limit answers, and others need them, too
_DECIDE_NS: Final = SECOND // 2
_TRIES: Final = 16  # other labels; with four ways 99 of 100 connections have met two others by then
_SILENT: Final = 3  # so often a label is asked about before it counts that no router answers


@dataclass(frozen=True, slots=True)
class Ask:
    """A segment to be sent: of a connection, with a flow label, so that it dies at the router that names the way."""

    flow: FlowKey
    label: int
    distance: int  # the hop limit
    interface: str


@dataclass(frozen=True, slots=True)
class LabelAct:
    """Other labels for connections to one address, or none of ours any more."""

    way: WayAct
    give: Mapping[FlowKey, int] = field(default_factory=dict)
    end: tuple[FlowKey, ...] = ()


@dataclass(slots=True)
class _Known:
    first_ns: int
    heard_ns: int
    sent_bytes: int
    own: int | None = None  # the label that its packets come with
    held: int | None = None  # the label that we gave it
    ways: dict[int, str] = field(default_factory=dict)  # the router of its way, by label
    asked_ns: int = 0  # when its label was last asked about
    unanswered: int = 0  # so often in a row
    tries: int = 0  # other labels that were asked about
    rehashed: bool = False  # by the kernel, since its way was known

    @property
    def label(self) -> int | None:
        return self.own if self.held is None else self.held

    @property
    def router(self) -> str | None:
        """Of the way that it takes; None: not known."""
        return None if self.label is None else self.ways.get(self.label)

    @property
    def own_router(self) -> str | None:
        """Of the way that it would take without us."""
        return None if self.own is None else self.ways.get(self.own)


class LabelEngine:
    """All connections under one policy; without `learns` nothing is sent, and acts name no connection."""

    def __init__(self, wanted: Labels, managed: tuple[str, ...], draw: Callable[[], int], learns: bool = True) -> None:
        self._draw, self._learns = draw, learns
        self._ways = Ways(wanted, managed, 6)
        self._flows: dict[FlowKey, _Known] = {}
        self._decide_ns = 0  # not before this, unless there is news
        self._checked_ns = 0  # when a label that is known was last asked about again
        # what became of the segments that were sent
        self.counts = dict.fromkeys(("asked", "answered", "silent", "moved"), 0)

    # ---- what is heard ----

    def take(self, signal: Signal, now: int) -> None:
        if isinstance(signal, PathWay):
            if self._ways.take(signal, now, self._void):
                self._decide_ns = now
        elif isinstance(signal, TcpFlow) and signal.remote in self._ways.fans and not signal.namespace:
            self._take_flow(signal, now)

    def _take_flow(self, signal: TcpFlow, now: int) -> None:
        key = key_of(signal)
        known = self._flows.get(key)
        if signal.state in OVER:
            self._flows.pop(key, None)
        elif known is not None and known.first_ns == signal.first_ns:
            known.heard_ns, known.sent_bytes = now, signal.sent_bytes
        elif signal.segments_in and (known is not None or self._has_room(signal.sent_bytes)):
            self._flows[key] = _Known(signal.first_ns, now, signal.sent_bytes)

    def _has_room(self, sent_bytes: int) -> bool:
        """Forget the connection that has sent least, if that is less, and its way is none of our doing."""
        if len(self._flows) < MOST_FLOWS:
            return True
        free = [(known.sent_bytes, key) for key, known in self._flows.items() if known.held is None]
        least, key = min(free, default=(sent_bytes, None))
        if key is None or least >= sent_bytes:
            return False
        del self._flows[key]
        return True

    def watched(self, now: int) -> tuple[FlowKey, ...]:
        """Connections whose labels are to be looked at."""
        for key in [key for key, known in self._flows.items() if now - known.heard_ns > FORGOTTEN_NS]:
            del self._flows[key]
        return tuple(key for key in self._flows if self._ways.served(key.remote, now) is not None)

    def interfaces(self, now: int) -> frozenset[str]:
        """Where their packets leave."""
        return frozenset(self._ways.fans[key.remote].path.interface for key in self.watched(now))

    def seen(self, labels: Mapping[FlowKey, int], now: int) -> None:
        """Take note of the labels that packets of connections come with."""
        for key, label in labels.items():
            known = self._flows.get(key)
            if known is None or known.own == label:
                continue
            known.rehashed = known.own in known.ways
            if known.rehashed and known.held is None:
                self._decide_ns = now
            known.own, known.asked_ns, known.unanswered = label, 0, 0

    # ---- what is to be learnt ----

    def ask(self, now: int) -> Ask | None:
        """The next segment to send; None when enough is known."""
        served = [
            (key, known, fan)
            for key, known in sorted(self._flows.items(), key=lambda item: -item[1].sent_bytes)
            if known.label is not None and (fan := self._ways.served(key.remote, now)) is not None
        ]
        for key, known, fan in served:
            if known.router is None and known.unanswered < _SILENT and known.label is not None:
                return self._ask_about(key, known, fan, known.label, now)
        for key, known, fan in served:
            if known.tries < _TRIES and not self._enough(known, fan, now):
                known.tries += 1
                return Ask(key, self._draw(), fan.distance, fan.path.interface)
        if now - self._checked_ns < _CHECKS_NS:
            return None
        for key, known, fan in sorted(served, key=lambda each: each[1].asked_ns):
            if now - known.asked_ns > _CHECK_NS and known.label is not None:
                self._checked_ns = now
                if not self._enough(known, fan, now):
                    known.tries = min(known.tries, _TRIES - 1)
                return self._ask_about(key, known, fan, known.label, now)
        return None

    def _ask_about(self, key: FlowKey, known: _Known, fan: Fan, label: int, now: int) -> Ask:
        known.asked_ns = now
        return Ask(key, label, fan.distance, fan.path.interface)

    def _enough(self, known: _Known, fan: Fan, now: int) -> bool:
        bad, good = self._ways.parted(fan, now)
        met = set(known.ways.values())
        others = min(_OTHERS, len(self._ways.known(fan, now)) - 1)
        return bool(met & good) if bad else len(met - {known.router}) >= others

    def answered(self, ask: Ask, router: str | None, now: int) -> None:
        """What came of a segment: the router where it died, or nothing."""
        known = self._flows.get(ask.flow)
        self.counts["asked"] += 1
        self.counts["silent" if router is None else "answered"] += 1
        if known is None:
            return
        if ask.label == known.label:
            known.unanswered = 0 if router is not None else known.unanswered + 1
        if router is None:
            return
        before = known.ways.get(ask.label)
        if before is not None and before != router:  # the hash is another one: all that was learnt is void
            self.counts["moved"] += 1
            self._void(ask.flow.remote)
        known.ways[ask.label], self._decide_ns = router, now
        if ask.label == known.own:
            known.rehashed = False

    # ---- what is wanted ----

    def decide(self, now: int) -> tuple[LabelAct, ...]:
        """What is to be done to connections now."""
        if now < self._decide_ns:
            return ()
        self._decide_ns = now + _DECIDE_NS
        return tuple(act for address, fan in self._ways.fans.items() for act in self._acts(address, fan, now))

    def _acts(self, address: str, fan: Fan, now: int) -> Iterator[LabelAct]:
        bad, good = self._ways.parted(fan, now)
        give, end = dict[FlowKey, int](), list[FlowKey]()
        before = Counter(known.router for _, known in self._at(address))
        after = before.copy()
        for key, known in self._at(address):
            if bad and self._is_astray(known, bad) and (label := _best(known, good, after)) is not None:
                give[key] = label
                after[known.router], after[known.ways[label]] = after[known.router] - 1, after[known.ways[label]] + 1
            elif not bad and known.held is not None:
                end.append(key)
                after[known.router], after[known.own_router] = after[known.router] - 1, after[known.own_router] + 1
        if give or end or (bad != fan.avoided and not self._learns):
            act = self._ways.act(fan, bad, _of_ways(before, fan), _of_ways(after, fan), now)
            yield LabelAct(act, give, tuple(end))
        fan.avoided = bad

    def _is_astray(self, known: _Known, bad: frozenset[str]) -> bool:
        """Whether a connection takes a bad way, or one that no router tells though others are told."""
        return known.router in bad or (known.router is None and (known.rehashed or known.unanswered >= _SILENT))

    def carried_out(self, act: LabelAct, refused: Mapping[FlowKey, str]) -> None:
        """Take note that an act was carried out, but for the connections that were refused."""
        for key, label in act.give.items():
            if key not in refused and key in self._flows:
                self._flows[key].held, self._flows[key].asked_ns = label, 0
        for key in act.end:
            if key in self._flows:
                self._flows[key].held = None

    def lost(self, flows: Iterable[FlowKey]) -> None:
        """Take note that these connections have no label of ours any more."""
        for key in flows:
            if key in self._flows:
                self._flows[key].held = None

    @property
    def held(self) -> tuple[FlowKey, ...]:
        """Connections that have a label of ours."""
        return tuple(key for key, known in self._flows.items() if known.held is not None)

    def all_back(self, why: str, now: int) -> tuple[LabelAct, ...]:
        """Take every label of ours back."""
        acts = []
        for address, fan in self._ways.fans.items():
            keys = tuple(key for key, known in self._at(address) if known.held is not None)
            if keys:
                before = _of_ways(Counter(known.router for _, known in self._at(address)), fan)
                after = _of_ways(Counter(known.own_router for _, known in self._at(address)), fan)
                acts.append(LabelAct(WayAct(fan.path, before, after, f"{fan.path}: {why}", now, over=True), end=keys))
        return tuple(acts)

    def _void(self, address: str) -> None:
        """Learn anew which ways labels take to an address."""
        for _, known in self._at(address):
            known.ways, known.tries, known.unanswered, known.rehashed = {}, 0, 0, False

    def _at(self, address: str) -> Iterator[tuple[FlowKey, _Known]]:
        return ((key, known) for key, known in self._flows.items() if key.remote == address)

    def facts(self) -> list[dict[str, object]]:
        """What is known of the connections to each address, for the operator."""
        return [
            {
                "address": address,
                "flows": len(found),
                "known": sum(known.router is not None for known in found),
                "movable": sum(len(set(known.ways.values())) > 1 for known in found),
                "avoided": self._ways.avoided(address),
            }
            for address in self._ways.fans
            if (found := [known for _, known in self._at(address)])
        ]


def _best(known: _Known, good: frozenset[str], taken: Counter[str | None]) -> int | None:
    """A label whose way is good, the one with the fewest connections."""
    labels = [label for label, router in known.ways.items() if router in good]
    return min(labels, key=lambda label: (taken[known.ways[label]], label), default=None)


def _of_ways(counts: Counter[str | None], fan: Fan) -> dict[str, int]:
    return {router: counts[router] for router in sorted(fan.ways)}
