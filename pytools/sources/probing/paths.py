"""The paths to the peers: every nexthop of every route to them, whatever its weight.

A path is a nexthop of the route to a peer, or of the route from one of our addresses to it, and keeps its index for the
agent's lifetime. Nothing is put into the kernel here: probe.c redirects each probe to its path's gateway. One thread;
in the namespace of the netlink socket.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytools.config import Peer
from pytools.kernel.bpf import contract
from pytools.kernel.netlink.monitor import Group, Monitor
from pytools.kernel.netlink.nexthops import family_of
from pytools.kernel.netlink.routing import LOCAL, UNICAST, Family, Link, Netlink, NetlinkError, Nexthop, Route
from pytools.kernel.own_addresses import nearest, with_own_routes
from pytools.signals import Path

MOST_PATHS: Final = contract.constant("SWERVE_PROBE_PATHS")
SPOKEN_FOR_NS: Final = 10_000_000_000  # a controller reports every path once a second

_ONLINK: Final = 4  # RTNH_F_ONLINK


@dataclass(frozen=True, slots=True)
class PinnedPath:
    """A path with what leads probes along it."""

    index: int
    path: Path
    peer: Peer
    family: Family
    ifindex: int
    source: str  # our address, as the route to the peer has it
    nexthop_id: int | None
    onlink: bool
    bare: bool = False  # its interface has no Ethernet header

    @property
    def shared_clock(self) -> bool:
        """Whether both ends read one clock."""
        return self.peer.clock == "shared"

    @property
    def way(self) -> tuple[int, str, bool]:
        """What of it may change the base delay."""
        return self.ifindex, self.source, self.onlink


@dataclass(frozen=True, slots=True)
class Session:
    """What stays the same in all probes of a session."""

    pinned: PinnedPath
    source_port: int
    row: int = 0  # of probe_sessions; its session identifier is one more
    counts: bool = False  # whether an unanswered probe counts for silence
    ttl: int = 255
    flow_label: int = 0  # of IPv6


class PinnedPaths:
    """The paths to all peers, as the kernel has them now.

    Parameters
    ----------
    host : str
        Our name, the source of every path.
    """

    def __init__(self, netlink: Netlink, host: str, peers: Sequence[Peer]) -> None:
        self.current: tuple[PinnedPath, ...] = ()
        self.unreachable: dict[str, str] = {}  # peer's address -> why it has no path
        self.refused: dict[str, str] = {}  # path -> why it is not probed
        self.links: dict[int, Link] = {}  # by index, as they were last
        self._netlink, self._host, self._peers = netlink, host, peers
        self._index: dict[Path, int] = {}
        self._ends = {(peer.name, peer.address) for peer in peers}
        self._by_end: dict[tuple[str, str], Path] = {}  # remote address and interface -> path
        self._spoken_ns: dict[Path, int] = {}  # path -> when a controller last spoke of it
        self._numbered = 0  # paths so far: no index is given twice

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """From now on the paths to these; a path that goes keeps its index to itself, so none is taken for another."""
        self._peers, self._ends = peers, {(peer.name, peer.address) for peer in peers}
        self._have(pinned for pinned in self.current if self._is_wanted(pinned.path))
        for path in [path for path in self._index if not self._is_wanted(path)]:
            self._index.pop(path)
            self._spoken_ns.pop(path, None)
        addresses = {peer.address for peer in peers}
        self.unreachable = {address: why for address, why in self.unreachable.items() if address in addresses}

    def _is_wanted(self, path: Path) -> bool:
        return (path.destination, path.address) in self._ends

    def refresh(self, now_ns: int) -> bool:
        """Look at the routes again; returns whether `current` is another than before."""
        self._forget(now_ns)
        self.links = links = {link.index: link for link in self._netlink.links()}
        nexthops = {nexthop.id: nexthop for nexthop in self._netlink.nexthops()}
        members = {group.id: tuple(group.weights) for group in self._netlink.groups()}
        own, sources = self._sources()
        hops: dict[Path, PinnedPath] = {}
        for peer in self._peers:
            self.unreachable.pop(peer.address, None)
            paired = sources[peer.address]
            for source in (None, *paired):
                found = list(self._hops_of(peer, source, links, nexthops, members))
                if source is None and len(found) == 1 and found[0].source in own.difference(paired):
                    continue  # of sockets that are bound to no address; an address of another rail would be theirs
                for hop in found:
                    hops.setdefault(hop.path, hop)
                    self.unreachable.pop(peer.address, None)
        hops |= {hop.path: hop for hop in list(self._drained(hops, links, nexthops))}
        self.refused = {}
        wanted = []
        for pinned in self.current:
            if pinned.path not in hops and self._still_there(pinned, links, nexthops):
                wanted.append(pinned)
        for hop in hops.values():
            index = self._index_of(hop.path)
            if index is not None:
                wanted.append(replace(hop, index=index))
        before = self.current
        self._have(wanted)
        return before != self.current

    def _have(self, wanted: Iterable[PinnedPath]) -> None:
        self.current = tuple(sorted(wanted, key=lambda pinned: pinned.index))
        self._by_end = {
            (str(ipaddress.ip_address(pinned.path.address)), pinned.path.interface): pinned.path
            for pinned in reversed(self.current)
        }

    def path_of(self, remote: str, interface: str) -> Path | None:
        """The path to an address by an interface; None when it is on no measured one."""
        return self._by_end.get((remote, interface))

    def all_paths(self) -> list[Path]:
        """Every path that is probed now."""
        return [pinned.path for pinned in self.current]

    def remember(self, path: Path, now_ns: int) -> bool:
        """Look for a path that no route may show: a controller that keeps it drained, or standing by, reports it.

        Returns
        -------
        bool
            Whether it is news, so that `refresh` may find more than before.
        """
        known = path.source == self._host and self._is_wanted(path)
        if not known or (path not in self._spoken_ns and len(self._spoken_ns) >= MOST_PATHS):
            return False
        before_ns = self._spoken_ns.get(path)
        self._spoken_ns[path] = now_ns
        return before_ns is None

    def _forget(self, now_ns: int) -> None:
        """A controller that has ended, or releases a path, no longer reports it."""
        self._spoken_ns = {path: at_ns for path, at_ns in self._spoken_ns.items() if now_ns - at_ns < SPOKEN_FOR_NS}

    def _drained(
        self, hops: dict[Path, PinnedPath], links: dict[int, Link], nexthops: dict[int, Nexthop]
    ) -> Iterator[PinnedPath]:
        """Paths that a controller names or from before, if their nexthop is there and their peer has a route by others.

        A nexthop that is not an object leaves nothing in the kernel: only a controller can report that it is there.
        """
        by_address = {hop.path.address: hop for hop in hops.values()}
        up = {link.name: link for link in links.values() if link.up}
        by_end = {
            (nexthop.gateway or "", links[nexthop.ifindex].name): nexthop
            for nexthop in nexthops.values()
            if nexthop.ifindex in links and links[nexthop.ifindex].up
        }
        for path in (self._spoken_ns.keys() | self._index) - hops.keys() - {pinned.path for pinned in self.current}:
            nexthop, other = by_end.get((path.gateway, path.interface)), by_address.get(path.address)
            if other is None or path.interface not in up:
                continue
            link = up[path.interface]
            found = replace(other, path=path, ifindex=link.index, bare=link.bare)
            if nexthop is not None and other.nexthop_id is not None:
                yield replace(found, nexthop_id=nexthop.id, onlink=bool(nexthop.flags & _ONLINK))
            elif path in self._spoken_ns:
                own = self._source_by(path, found.ifindex)
                if own or other.nexthop_id is None:
                    yield replace(found, nexthop_id=None, onlink=False, source=own or other.source)

    def _source_by(self, path: Path, ifindex: int) -> str:
        """Our address by the route that leads along a path, if it only stands by too; empty where there is none."""
        try:
            route = self._netlink.route_get(path.address, oif=ifindex)
        except NetlinkError:
            return ""
        return route.prefsrc or "" if (route.gateway or "") == path.gateway else ""

    def _still_there(self, pinned: PinnedPath, links: dict[int, Link], nexthops: dict[int, Nexthop]) -> bool:
        """Whether a path that no route uses any more can come back: its nexthop was only taken out of the group."""
        link = links.get(pinned.ifindex)
        if link is None or not link.up:
            return False
        if pinned.nexthop_id is None:
            return pinned.path in self._spoken_ns
        nexthop = nexthops.get(pinned.nexthop_id)
        return (
            nexthop is not None and nexthop.ifindex == pinned.ifindex and (nexthop.gateway or "") == pinned.path.gateway
        )

    def _index_of(self, path: Path) -> int | None:
        """The index that a path keeps for as long as the agent lives; None when there are no more."""
        if path not in self._index:
            if self._numbered == MOST_PATHS:
                self.refused[str(path)] = f"there are more than {MOST_PATHS} paths"
                return None
            self._index[path] = self._numbered
            self._numbered += 1
        return self._index[path]

    def _sources(self) -> tuple[set[str], dict[str, Sequence[str]]]:
        """Our addresses that have routes of their own, and those from which each address of a peer is probed."""
        addresses = self._netlink.addresses()
        of_peers: dict[tuple[str, Family], list[str]] = {}
        for peer in self._peers:
            of_peers.setdefault((peer.name, family_of(peer.address)), []).append(peer.address)
        own = {
            family: with_own_routes(family, self._netlink.rules(family), addresses)
            for family in {family for _, family in of_peers}
        }
        chosen = {
            address: nearest(address, of_peer, own[family])
            for (_, family), of_peer in of_peers.items()
            for address in of_peer
        }
        return {address for of_family in own.values() for address in of_family}, chosen

    def _route_to(self, address: str, source: str | None, links: dict[int, Link]) -> tuple[Route, int]:
        """The route to an address, and the index of the VRF that it is in: a VRF's only where no other leads there."""
        for vrf in (0, *(link.index for link in links.values() if link.vrf_table)):
            try:
                return self._netlink.route_get(address, matched=True, oif=vrf, source=source), vrf
            except NetlinkError as error:
                refusal = error
        raise refusal

    def _hops_of(
        self,
        peer: Peer,
        source: str | None,
        links: dict[int, Link],
        nexthops: dict[int, Nexthop],
        members: dict[int, tuple[int, ...]],
    ) -> Iterator[PinnedPath]:
        """Every way to a peer that the kernel might choose, whatever the weights; not numbered yet.

        For packets from an address of ours, or for those of which the route chooses the source.
        """
        try:
            route, vrf = self._route_to(peer.address, source, links)
            any_source = source or route.prefsrc or self._netlink.route_get(peer.address, oif=vrf).prefsrc
        except NetlinkError as error:
            if source is None:
                self.unreachable[peer.address] = error.sentence or str(error)
            return
        if route.kind != UNICAST or any_source is None:
            if source is None:
                self.unreachable[peer.address] = "it is this host" if route.kind == LOCAL else "the route leads nowhere"
            return
        for gateway, ifindex, nexthop_id, onlink in ways_of(route, nexthops, members):
            link = links.get(ifindex or 0)
            if link is None or not link.up:
                continue
            path = Path(self._host, peer.name, peer.address, gateway or "", link.name)
            ours = source or route.prefsrc or self._source_by(path, link.index) or any_source
            yield PinnedPath(-1, path, peer, route.family, link.index, ours, nexthop_id, onlink, link.bare)


def ways_of(
    route: Route, nexthops: dict[int, Nexthop], members: dict[int, tuple[int, ...]]
) -> list[tuple[str | None, int | None, int | None, bool]]:
    """Gateway, interface, nexthop object (if it is one), and whether that is on-link by decree, of each way."""
    if route.nexthop_id is None:
        if route.hops:
            return [(hop.gateway, hop.ifindex, None, False) for hop in route.hops]
        return [(route.gateway, route.ifindex, None, False)]
    objects = [nexthops.get(each) for each in members.get(route.nexthop_id, (route.nexthop_id,))]
    return [
        (nexthop.gateway, nexthop.ifindex, nexthop.id, bool(nexthop.flags & _ONLINK))
        for nexthop in objects
        if nexthop is not None and not nexthop.blackhole
    ]


class Changes(Monitor):
    """Tells that links, routes, rules or nexthops have changed; not which. Made in the caller's network namespace."""

    def __init__(self) -> None:
        families = (Group.ADDRESS4, Group.ADDRESS6, Group.ROUTE4, Group.ROUTE6, Group.RULE4, Group.RULE6)
        super().__init__((Group.LINK, *families, Group.NEXTHOP))

    def happened(self) -> bool:
        """Whether anything changed since the last call."""
        return sum(1 for _ in self.messages()) > 0
