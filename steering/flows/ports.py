"""Local ports of new IPv4 TCP connections, chosen for good ways behind the first hop. Pure but for the generator.

Where one nexthop leads to several hidden ways (`path_way`), routers choose by a hash of protocol, addresses and ports.
So what a probe of UDP tells about a port does not hold for TCP: the way of each local port is learnt by a SYN of the
very connection, which dies at the router that names the way (`Ask`, `answered`). Destinations are those that this host
connects to, the most used first. While some ways of a path are bad and others are not, the ports of good ways are
offered for new connections. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pytools.signals import PathWay, Signal, TcpFlow
from pytools.units import SECOND
from steering.flows.hidden_ways import Fan, WayAct, Ways
from steering.plan import Peer
from steering.policy.actions import Ports

MOST_PEERS: Final = 64
_FORGOTTEN_NS: Final = 600 * SECOND  # a destination that nobody connects to
_CHECK_NS: Final = 10 * SECOND  # a known port of each destination is asked for again: routes change, and hashes
_DECIDE_NS: Final = SECOND // 2
_TRIES: Final = 8  # so many times the ports that are wanted; then others have their turn
_SPARE: Final = 4  # so many times the ports that are wanted are remembered, those of bad ways with them


@dataclass(frozen=True, slots=True)
class Ask:
    """A SYN to be sent: from a local port to a destination, so that it dies at the router that names the way."""

    peer: Peer
    port: int
    distance: int  # the TTL


@dataclass(frozen=True, slots=True)
class PortPlan:
    """What is wanted of new connections now."""

    offers: Mapping[Peer, tuple[int, ...]]
    acts: tuple[WayAct, ...]


@dataclass(slots=True)
class _Known:
    used_ns: int
    newest_ns: int = 0  # when its newest connection began
    connections: int = 0
    asked_ns: int = 0
    tries: int = 0  # ports asked about since enough were known
    ports: dict[int, str] = field(default_factory=dict)  # the router of its way; asked the longest ago first


class PortEngine:
    """All destinations under one policy; without `learns` nothing is sent, and acts name no port.

    `draw` gives a local port that the kernel may use for a connection.
    """

    def __init__(self, wanted: Ports, managed: tuple[str, ...], draw: Callable[[], int], learns: bool = True) -> None:
        self._wanted, self._draw, self._learns = wanted, draw, learns
        self.ways = Ways(wanted, managed, 4)  # what is known of the ways to managed addresses
        self._peers: dict[Peer, _Known] = {}
        self._offers: dict[Peer, tuple[int, ...]] = {}
        self._told: dict[str, WayAct] = {}  # what is avoided, by address
        self._decide_ns = 0  # not before this, unless there is news
        # what became of the SYNs that were sent
        self.counts = dict.fromkeys(("asked", "answered", "silent", "busy", "arrived", "moved"), 0)

    # ---- what is heard ----

    def take(self, signal: Signal, now: int) -> None:
        if isinstance(signal, PathWay):
            if self.ways.take(signal, now, self._void):
                self._decide_ns = now
        elif isinstance(signal, TcpFlow) and signal.remote in self.ways.fans and signal.segments_in:  # no SYN of ours
            self._take_flow(signal, now)

    def _take_flow(self, signal: TcpFlow, now: int) -> None:
        peer = Peer(signal.remote, signal.remote_port)
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= MOST_PEERS and not self._make_room(now):
                return
            known = self._peers[peer] = _Known(now)
        known.used_ns = now
        if signal.first_ns > known.newest_ns:
            known.newest_ns, known.connections = signal.first_ns, known.connections + 1

    def use(self, peer: Peer, now: int) -> None:
        """Learn ports for a destination, though this host has connected to it only once."""
        known = self._peers.get(peer)
        if known is None and (len(self._peers) < MOST_PEERS or self._make_room(now)):
            known = self._peers[peer] = _Known(now)
        if known is not None:
            known.used_ns, known.connections = now, max(known.connections, 2)

    def known(self, peer: Peer) -> Mapping[int, str]:
        """The router of each port's way, as far as it is known."""
        return self._peers[peer].ports if peer in self._peers else {}

    def _make_room(self, now: int) -> bool:
        """Forget the least used destination, if it was used once only or not of late."""
        peer, known = min(self._peers.items(), key=lambda item: (item[1].connections, item[1].used_ns))
        if known.connections > 1 and now - known.used_ns < _FORGOTTEN_NS:
            return False
        del self._peers[peer]
        return True

    # ---- what is to be learnt ----

    def ask(self, now: int) -> Ask | None:
        """The next SYN to send; None when enough is known."""
        for peer in [peer for peer, known in self._peers.items() if now - known.used_ns > _FORGOTTEN_NS]:
            del self._peers[peer]
        used = sorted(self._peers.items(), key=lambda item: -item[1].connections)
        served = [
            (peer, known, fan) for peer, known in used if (fan := self.ways.served(peer.address, now)) is not None
        ]
        for peer, known, fan in served:
            if self._enough(known, fan, now):
                known.tries = 0
            elif known.connections > 1 and known.tries < _TRIES * self._wanted.keep:
                known.tries += 1
                return self._new(peer, known, fan, now)
        for peer, known, fan in served:
            if known.connections > 1 and now - known.asked_ns > _CHECK_NS:
                if not known.ports:
                    return self._new(peer, known, fan, now)
                port = next(iter(known.ports))
                known.ports[port], known.asked_ns = known.ports.pop(port), now  # the last one now
                return Ask(peer, port, fan.distance)
        return None

    def _new(self, peer: Peer, known: _Known, fan: Fan, now: int) -> Ask | None:
        """Ask about a port of which nothing is known, if one is found at once."""
        known.asked_ns = now
        taken = {port for each in self._peers.values() for port in each.ports}
        port = next((port for port in (self._draw() for _ in range(_SPARE)) if port not in taken), None)
        return None if port is None else Ask(peer, port, fan.distance)

    def _enough(self, known: _Known, fan: Fan, now: int) -> bool:
        bad, good = self.ways.parted(fan, now)
        if not bad:
            return len(known.ports) >= 2 * self._wanted.keep
        return sum(router in good for router in known.ports.values()) >= self._wanted.keep

    def answered(self, ask: Ask, router: str | None, now: int) -> None:
        """What came of a SYN: the router where it died, or nothing."""
        known = self._peers.get(ask.peer)
        self.counts["asked"] += 1
        self.counts["silent" if router is None else "answered"] += 1
        if known is None or router is None:
            return
        before = known.ports.pop(ask.port, None)
        if before is not None and before != router:  # the hash is another one: all that was learnt is void
            self.counts["moved"] += 1
            self._void(ask.peer.address)
        known.ports[ask.port], self._decide_ns = router, now
        if len(known.ports) > _SPARE * self._wanted.keep:
            del known.ports[next(iter(known.ports))]

    def arrived(self, ask: Ask) -> None:
        """Take note that a SYN arrived at its destination: the route is shorter than was told, so no more are sent."""
        self.counts["asked"] += 1
        self.counts["arrived"] += 1
        if (fan := self.ways.fans.get(ask.peer.address)) is not None:
            fan.passed = ask.distance

    def busy(self) -> None:
        """Take note that a port could not be asked for: a connection has it."""
        self.counts["busy"] += 1

    # ---- what is wanted ----

    def decide(self, now: int) -> PortPlan:
        """What is offered to new connections, and what is new about that."""
        if now < self._decide_ns:
            return PortPlan(self._offers, ())
        self._offers, self._decide_ns = {}, now + _DECIDE_NS
        acts = []
        for address, fan in self.ways.fans.items():
            bad, good = self.ways.parted(fan, now)
            known = {peer: self._peers[peer].ports for peer in self._at(address)} if bad else {}
            here = {
                peer: tuple(port for port, router in ports.items() if router in good) for peer, ports in known.items()
            }
            self._offers |= here
            if bad != fan.avoided and (not bad or not self._learns or any(here.values())):
                acts.append(self._act(fan, bad, known, now))
                fan.avoided = bad
        return PortPlan(self._offers, tuple(acts))

    def _act(self, fan: Fan, bad: frozenset[str], known: Mapping[Peer, Mapping[int, str]], now: int) -> WayAct:
        told = self._told.pop(fan.path.address, None)
        if not bad:
            before, after = (told.after, told.before) if told is not None else ({}, {})
            return self.ways.act(fan, bad, before, after, now)
        by_way = dict.fromkeys(sorted(fan.ways), 0)
        for ports in known.values():
            for router in ports.values():
                if router in by_way:
                    by_way[router] += 1
        after = {router: 0 if router in bad else count for router, count in by_way.items()}
        act = self._told[fan.path.address] = self.ways.act(fan, bad, by_way, after, now)
        return act

    def all_back(self, why: str) -> tuple[WayAct, ...]:
        """Avoid nothing any more."""
        told, self._told = self._told, {}
        return tuple(replace(act, before=act.after, after=act.before, because=why, over=True) for act in told.values())

    def _void(self, address: str) -> None:
        """Learn anew which ways ports to an address take."""
        for peer in self._at(address):
            self._peers[peer].ports, self._peers[peer].tries = {}, 0

    def _at(self, address: str) -> Iterator[Peer]:
        return iter([peer for peer in self._peers if peer.address == address])

    def facts(self) -> list[dict[str, object]]:
        """What is known of each destination, for the operator."""
        return [
            {"peer": str(peer), "known": len(known.ports), "avoided": self.ways.avoided(peer.address)}
            for peer, known in self._peers.items()
            if known.ports
        ]
