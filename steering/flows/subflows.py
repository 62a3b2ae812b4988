"""MPTCP connections over IPv4 off bad ways behind the first hop: another subflow, then the end of the bad one. Pure.

The way of each subflow is learnt by segments with its addresses and ports, as those of flow labels are; those of ports
that a new one may have are known already (ports.py). Over IPv6 subflows are moved by their labels, as all TCP is. What
is done stays: a subflow has no lease, and is not put back. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.units import SECOND
from steering.flows.hidden_ways import WayAct
from steering.flows.ports import PortEngine
from steering.plan import FlowKey, Peer

_CHECK_NS: Final = 10 * SECOND  # the way of each subflow is asked about again
_SILENT: Final = 3  # so often it is asked about before it counts that no router answers
_ESTABLISHED_NS: Final = SECOND  # a new subflow has so long
_TRIES: Final = 4
_AGAIN_NS: Final = 10 * SECOND  # after so many in vain


@dataclass(frozen=True, slots=True)
class SubflowAsk:
    """A segment to be sent of a subflow, so that it dies at the router that names the way."""

    flow: FlowKey
    distance: int
    interface: str


@dataclass(frozen=True, slots=True)
class Create:
    """A further subflow beside one, from this port."""

    flow: FlowKey
    port: int


@dataclass(frozen=True, slots=True)
class Destroy:
    """The end of a subflow that another has replaced, and what to tell."""

    flow: FlowKey
    way: WayAct


@dataclass(slots=True)
class _Known:
    token: int
    established: bool
    router: str | None = None
    asked_ns: int = 0
    unanswered: int = 0
    port: int = 0  # of the subflow that is to replace it
    since_ns: int = 0
    tries: int = 0
    tried: set[int] = field(default_factory=set)


class SubflowEngine:
    """All MPTCP connections under one policy.

    Parameters
    ----------
    ports : PortEngine
        Knows ways, and which ports take which.
    """

    def __init__(self, ports: PortEngine) -> None:
        self._ports = ports
        self._flows: dict[FlowKey, _Known] = {}

    def seen(self, subflows: Iterable[tuple[FlowKey, int, bool]], now: int) -> None:
        """Take note of all subflows: each with its token, and whether it is established."""
        before, self._flows = self._flows, {}
        for flow, token, established in subflows:
            if self._ports.ways.served(flow.remote, now) is None:
                continue
            known = before.get(flow)
            if known is None or known.token != token:
                known = _Known(token, established)
            known.established = established
            self._flows[flow] = known
            self._ports.use(Peer(flow.remote, flow.remote_port), now)

    def ask(self, now: int) -> SubflowAsk | None:
        """The next segment to send; None when enough is known."""
        for flow, known in self._flows.items():
            unknown = known.router is None and known.unanswered < _SILENT
            fan = self._ports.ways.served(flow.remote, now)
            if fan is not None and (unknown or now - known.asked_ns > _CHECK_NS):
                known.asked_ns = now
                return SubflowAsk(flow, fan.distance, fan.path.interface)
        return None

    def answered(self, flow: FlowKey, router: str | None) -> None:
        """What came of a segment: the router where it died, or nothing."""
        known = self._flows.get(flow)
        if known is None:
            return
        known.unanswered = known.unanswered + 1 if router is None else 0
        known.router = router or known.router

    def decide(self, now: int) -> Iterator[Create | Destroy]:
        for flow, known in list(self._flows.items()):
            fan = self._ports.ways.served(flow.remote, now)
            if fan is None or not known.established:
                continue
            bad, good = self._ports.ways.parted(fan, now)
            if not bad:
                known.port = 0
            elif known.port and self._is_replaced(flow, known):
                new = self._ports.known(_peer(flow)).get(known.port)
                known.port = 0
                yield Destroy(flow, self._ports.ways.act(fan, bad, {str(known.router): 1}, {str(new): 1}, now))
            elif known.port and now - known.since_ns < _ESTABLISHED_NS:
                continue
            elif self._is_astray(known, bad) and (port := self._next(flow, known, good, now)) is not None:
                known.port, known.since_ns, known.tries = port, now, known.tries + 1
                yield Create(flow, port)

    def _is_astray(self, known: _Known, bad: frozenset[str]) -> bool:
        return known.router in bad or (known.router is None and known.unanswered >= _SILENT)

    def _is_replaced(self, flow: FlowKey, known: _Known) -> bool:
        new = self._flows.get(FlowKey(flow.protocol, flow.local, known.port, flow.remote, flow.remote_port))
        return new is not None and new.token == known.token and new.established

    def _next(self, flow: FlowKey, known: _Known, good: frozenset[str], now: int) -> int | None:
        """A port of a good way that was not tried yet."""
        if known.tries >= _TRIES:
            if now - known.since_ns < _AGAIN_NS:
                return None
            known.tries, known.tried = 0, set()
        used = {each.local_port for each in self._flows} | {each.port for each in self._flows.values()} | known.tried
        ways = self._ports.known(_peer(flow))
        port = next((port for port, router in ways.items() if router in good and port not in used), None)
        if port is not None:
            known.tried.add(port)
        return port

    def refused(self, flow: FlowKey) -> None:
        """Take note that the kernel has refused another subflow: the next port is tried at once."""
        if (known := self._flows.get(flow)) is not None:
            known.port = 0

    def facts(self) -> Mapping[str, int]:
        """How many subflows there are, and of how many the way is known."""
        return {"flows": len(self._flows), "known": sum(known.router is not None for known in self._flows.values())}


def _peer(flow: FlowKey) -> Peer:
    return Peer(flow.remote, flow.remote_port)
