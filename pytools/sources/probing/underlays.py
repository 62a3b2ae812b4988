"""Which routes the outer packets of tunnels take: the hops of the route to the peer's outer address.

Which of several the kernel chooses cannot be computed: it remembers the route of a tunnel per CPU, from the first
packet that it sends there. So observe.c counts them where they leave; probes are among them. One thread: the agent's,
in the namespace that it measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pytools.errors import SwerveError
from pytools.kernel.addresses import mapped
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.netlink.routing import Link, Netlink, Nexthop
from pytools.kernel.netlink.tables import Tunnel
from pytools.kernel.netlink.tunnels import to_peer
from pytools.signals import Path, Underlay
from pytools.sources.probing.paths import PinnedPath, ways_of

_Key = tuple[bytes, int, int, int]  # outer address, interface index, destination port, protocol


class Underlays:
    """Of each path by a tunnel, the ways below it, and how many packets took each.

    Parameters
    ----------
    loaded : Loaded
        With observe.c; without it nothing is counted. Stays the caller's.
    """

    def __init__(self, netlink: Netlink, loaded: Loaded) -> None:
        self._netlink = netlink
        self._map = loaded.map("tunnel_packets") if loaded.has_map("tunnel_packets") else None
        self._known = loaded.map("tunnels_known") if loaded.has_map("tunnels_known") else None
        self._ways: dict[Path, list[tuple[Underlay, _Key]]] = {}
        self._several: dict[_Key, str] = {}  # with the name of the interface: those that are counted
        self._before: dict[_Key, int] = {}
        self.refused = 0  # how many ways are not counted, since the kernel's table is full

    def look(self, paths: Sequence[PinnedPath], links: dict[int, Link]) -> None:
        """Look at the routes below the tunnels again."""
        ways: dict[Path, list[tuple[Underlay, _Key]]] = {}
        if any(link.tunnel for link in links.values()):
            nexthops = {nexthop.id: nexthop for nexthop in self._netlink.nexthops()}
            members = {group.id: tuple(group.weights) for group in self._netlink.groups()}
            for pinned in paths:
                link, path = links.get(pinned.ifindex), pinned.path
                if link is None or link.tunnel is None:
                    continue
                try:
                    tunnel = to_peer(self._netlink, link, path.gateway or path.address, path.address)
                    ways[path] = list(self._below(tunnel, links, nexthops, members)) if tunnel else []
                except (SwerveError, OSError):
                    ways[path] = []
        self._ways = ways
        self._count(
            {key: way.interface for each in ways.values() if len(each) > 1 for way, key in each if _apart(way, each)}
        )

    def _below(
        self, tunnel: Tunnel, links: dict[int, Link], nexthops: dict[int, Nexthop], members: dict[int, tuple[int, ...]]
    ) -> Iterable[tuple[Underlay, _Key]]:
        route = self._netlink.route_get(tunnel.remote, tunnel.mark, True, tunnel.link, tunnel.local or None)
        for gateway, ifindex, _, _ in ways_of(route, nexthops, members):
            link = links.get(ifindex or 0)
            if link is not None and link.up and tunnel.link in (0, link.index):
                way = Underlay(tunnel.remote, gateway or "", link.name)
                yield way, (mapped(tunnel.remote), link.index, tunnel.port, tunnel.protocol)

    def _count(self, wanted: dict[_Key, str]) -> None:
        if self._map is None or self._known is None or wanted == self._several:
            return
        for key in self._several.keys() - wanted.keys():
            self._map.delete(self._row(key))
            self._before.pop(key, None)
        self.refused = 0
        for key in wanted.keys() - self._several.keys():
            try:
                self._map.update(self._row(key), 0)
            except SwerveError:
                self.refused += 1
        self._several = wanted
        self._known.update(0, len(wanted))

    def _row(self, key: _Key) -> Any:
        assert self._map is not None
        row = np.zeros((), self._map.key)
        row["remote"]["bytes"] = np.frombuffer(key[0], np.uint8)
        row["ifindex"], row["port"], row["protocol"] = key[1:]
        return row

    def interfaces(self) -> set[str]:
        """Where packets are to be counted."""
        return set(self._several.values())

    def counted(self) -> dict[Path, list[Underlay]]:
        """The ways below each tunnel, with the packets since the last call."""
        if not self._ways:
            return {}
        grown: dict[_Key, int] = {}
        if self._map is not None and self._several:
            keys, values = self._map.read()
            rows = zip(
                (each.tobytes() for each in keys["remote"]["bytes"]),
                *(keys[name].tolist() for name in ("ifindex", "port", "protocol")),
                strict=True,
            )
            now = dict(zip(rows, values.sum(axis=1).tolist(), strict=True))
            grown = {key: count - self._before.get(key, 0) for key, count in now.items()}
            self._before = now
        return {path: list(_told(each, grown)) for path, each in self._ways.items()}


def _apart(way: Underlay, ways: Sequence[tuple[Underlay, _Key]]) -> bool:
    """Whether the interface of a way distinguishes it from the others."""
    return [other.interface for other, _ in ways].count(way.interface) == 1


def _told(ways: Sequence[tuple[Underlay, _Key]], grown: dict[_Key, int]) -> Iterable[Underlay]:
    """With the counts, if any packet was counted: probes at least are always sent."""
    seen = any(grown.get(key) for _, key in ways)
    for way, key in ways:
        yield Underlay(way.address, way.gateway, way.interface, grown.get(key) if seen else None)
