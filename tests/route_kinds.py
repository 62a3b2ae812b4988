"""Hosts whose routes to a peer are of one kind each, and whoever owns these routes: a person, or a routing daemon.

Imported as `route_kinds`. Each has three rails to the peer and a fourth cable for what comes back, both families, the
prefixes `PREFIX`. Nobody but the owner, the kernel and swerve writes a route.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path as File
from typing import Any, ClassVar

import routing_daemons
import support

from pytools.kernel.netns import inside

RAILS = (1, 2, 3)
FAMILIES = (4, 6)
SOURCE = {4: "10.9.0.1", 6: "fd00:9::1"}
PEER = {4: "10.9.0.2", 6: "fd00:9::2"}
LENGTH = {4: 32, 6: 128}
NODAD = {4: "", 6: "nodad"}
PREFIX = {family: f"{PEER[family]}/{LENGTH[family]}" for family in FAMILIES}
_BACK = 7
_ROUTER_SOLICITATION = bytes([133, *bytes(7)])  # the kernel fills the checksum in


def gateway(family: int, rail: int, end: int = 1) -> str:
    """An address of a rail; end 1 is the peer's."""
    return f"10.{rail}.1.{end}" if family == 4 else f"fd00:{rail}::{end}"


class Host(support.Namespace):
    """The host that is steered, its peer, and the owner of its routes."""

    device = ""  # what its applications are bound to

    def __init__(self, netns: str, peer: str) -> None:
        super().__init__(netns)
        self.peer = peer
        for host, end, addresses in ((netns, 2, SOURCE), (peer, 1, PEER)):
            commands = [
                f"address add {addresses[family]}/{LENGTH[family]} dev lo {NODAD[family]}" for family in FAMILIES
            ]
            for rail in (*RAILS, _BACK):
                commands += [support.joining(peer, f"rail{rail}")] if host == netns else []
                commands.append(f"address add {gateway(4, rail, end)}/24 dev rail{rail}")
                commands.append(f"address add {gateway(6, rail, end)}/64 dev rail{rail} nodad")
                commands.append(f"link set dev rail{rail} up")
            support.ip(host, *commands)
            with inside(host):
                for rail in (*RAILS, _BACK):
                    File(f"/proc/sys/net/ipv6/conf/rail{rail}/keep_addr_on_down").write_text("1")
                for protocol in ("ipv4", "ipv6"):  # spread by ports as well
                    File(f"/proc/sys/net/{protocol}/fib_multipath_hash_policy").write_text("1")
        routes = (f"{SOURCE[family]}/{LENGTH[family]} via {gateway(family, _BACK, 2)}" for family in FAMILIES)
        support.ip(peer, *(f"route add {route} dev rail{_BACK}" for route in routes))

    # ---- its routes ----

    #: The rails that carry packets as the owner has it, with rail 1 drained, and then with rail 2 withdrawn as well.
    first, drained, withdrawn = frozenset(RAILS), frozenset({2, 3}), frozenset({3})
    manage: ClassVar[dict[str, Any]] = {}  # more of the policy
    look_up: tuple[str, ...] = ()
    regains = True  # whether a carrier that is back brings the hop back into their routes
    restorable = True  # whether `restore` does
    specific = True  # the route to the peer is for it alone; else it is the default route
    spares: Callable[[str], bool] = staticmethod(lambda row: False)  # what the owner makes of what is ours

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Have the owner route over all rails."""
        for family in FAMILIES:
            self.lay(family, RAILS)
        yield

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        """Route a family's prefix over these rails."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """The owner takes rail 2 out."""
        for family in FAMILIES:
            self.lay(family, (1, 3))

    def restore(self) -> None:
        """The owner has rail 2 in again; also what he has to do after a carrier was lost."""
        for family in FAMILIES:
            self.lay(family, RAILS)

    def has_all(self) -> None:
        """Wait until the owner routes over all rails."""
        support.wait_until(lambda: self.hops() == {(f, rail) for f in FAMILIES for rail in RAILS}, 30, "all are back")

    # ---- what is done and seen ----

    @staticmethod
    def _ip(netns: str, *words: str) -> str:
        return support.run(["ip", "-n", netns, *words]).stdout

    def cable(self, rail: int, there: bool) -> None:
        """Pull a cable, or plug it in."""
        self._ip(self.peer, "link", "set", "dev", f"rail{rail}", "up" if there else "down")

    def others(self) -> list[str]:
        """All that is not ours, byte by byte, but for what the owner makes of what is ours."""
        return [row for row in super().others() if not self.spares(row)]

    def used(self, family: int) -> frozenset[int]:
        """The rails that packets to the peer may leave by."""
        rows = self.rows("route", "get", "fibmatch", PEER[family], "from", SOURCE[family], *self.look_up)
        return frozenset(int(hop["dev"][4:]) for row in rows for hop in row.get("nexthops", [row]))

    def uses(self, rails: frozenset[int]) -> bool:
        """Whether these are the rails for both families."""
        return all(self.used(family) == rails for family in FAMILIES)

    def gateways(self, family: int) -> dict[int, str]:
        """The gateway that the owner's routes have on each rail."""
        found = {}
        for row in self.rows(f"-{family}", "route", "show", "table", "all"):
            for hop in row.get("nexthops", [row]):
                name = hop.get("dev", "")
                address = hop.get("gateway") or hop.get("via", {}).get("host")
                if address and name.startswith("rail") and name != f"rail{_BACK}":
                    found[int(name[4:])] = str(address)
        return found

    def hops(self) -> set[tuple[int, int]]:
        """Families and rails of the routes to the peer in the main table."""
        found = set()
        for family in FAMILIES:
            for row in self.rows(f"-{family}", "route", "show", "table", "main"):
                if row["dst"] == (PEER[family] if self.specific else "default"):
                    found |= {(family, int(hop["dev"][4:])) for hop in row.get("nexthops", [row])}
        return found


def _hop(family: int, rail: int) -> tuple[str, ...]:
    return "via", gateway(family, rail), "dev", f"rail{rail}"


def _hops(family: int, rails: tuple[int, ...]) -> list[str]:
    return [word for rail in rails for word in ("nexthop", *_hop(family, rail))]


class Plain(Host):
    """One hop; the policy names the others. Withdrawing is replacing it."""

    first, drained = frozenset({1}), frozenset({2})
    manage: ClassVar = {
        "alternatives": [{"via": gateway(family, rail), "dev": f"rail{rail}"} for family in FAMILIES for rail in (2, 3)]
    }

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        hop = 1 if 2 in rails else 3
        self.ip(f"-{family}", "route", "replace", PREFIX[family], *_hop(family, hop))


class Multipath(Host):
    """A route that lists its hops."""

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        self.ip(f"-{family}", "route", "replace", PREFIX[family], *_hops(family, rails))


class NexthopGroup(Host):
    """A route over a group of nexthop objects. Withdrawing deletes the nexthop.

    The kernel deletes one that loses its carrier, and nobody brings it back but the owner.
    """

    regains = False

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        for rail in rails:
            self.ip("nexthop", "replace", "id", str(10 * family + rail), *_hop(family, rail))
        members = "/".join(str(10 * family + rail) for rail in rails)
        self.ip("nexthop", "replace", "id", str(100 * family), "group", members)
        self.ip(f"-{family}", "route", "replace", PREFIX[family], "nhid", str(100 * family))

    def withdraw(self) -> None:
        for family in FAMILIES:
            self.ip("nexthop", "del", "id", str(10 * family + 2))


class Metric(Host):
    """A route for each hop, one better than the other."""

    first, drained = frozenset({1}), frozenset({2})
    patience_s = 30  # until its daemon's routes are there

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        for rail in RAILS:
            metric = ("metric", str(50 + rail))
            if rail in rails:
                self.ip(f"-{family}", "route", "replace", PREFIX[family], *_hop(family, rail), *metric)
            else:
                self.ip(f"-{family}", "route", "del", PREFIX[family], *metric)

    @contextlib.contextmanager
    def _at_work(self, daemon: Any) -> Iterator[None]:
        daemon.start()
        try:
            self._has(RAILS)
            yield
        finally:
            daemon.stop()

    def _has(self, rails: tuple[int, ...]) -> None:
        """Wait until the daemon's routes leave by these rails."""
        wanted = {(family, rail) for family in FAMILIES for rail in rails}
        support.wait_until(lambda: self.hops() == wanted, self.patience_s, f"it routes by {rails}")


class SourceTable(Host):
    """A table of its own for packets from the service address."""

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        with super().owned():
            for family in FAMILIES:
                self.ip(f"-{family}", "rule", "add", "from", SOURCE[family], "lookup", "100")
            yield

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        self.ip(f"-{family}", "route", "replace", "default", "table", "100", *_hops(family, rails))


class Vrf(Host):
    """A VRF of its own for everything."""

    device = "blue"
    manage: ClassVar = {"vrfs": ["blue"]}
    look_up = ("vrf", "blue")

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        self.ip("link", "add", "blue", "type", "vrf", "table", "77")
        self.ip("link", "set", "dev", "blue", "up")
        for rail in (*RAILS, _BACK):
            self.ip("link", "set", "dev", f"rail{rail}", "master", "blue")
            self.ip("address", "replace", f"{gateway(6, rail, 2)}/64", "dev", f"rail{rail}", "nodad")
        for family in FAMILIES:
            address = f"{SOURCE[family]}/{LENGTH[family]}"
            self.ip("address", "del", address, "dev", "lo")
            self.ip("address", "add", address, "dev", "blue")
        with super().owned():
            yield

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        self.ip(f"-{family}", "route", "replace", PREFIX[family], "vrf", "blue", *_hops(family, rails))


class Bgp(Host):
    """The peer announces its addresses by BGP, in one session for each rail and family."""

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        sessions = "".join(
            f"protocol bgp {_session(family, rail)} from speaker {{ local {gateway(family, rail)} as 65002;"
            f" neighbor {gateway(family, rail, 2)} as 65001;"
            f" ipv{family} {{ import none; export all; next hop self; }}; }}\n"
            for family in FAMILIES
            for rail in RAILS
        )
        static = "".join(
            f"protocol static {{ ipv{family}; route {PREFIX[family]} unreachable; }}\n" for family in FAMILIES
        )
        text = _BIRD.format(end=1) + static + sessions
        with routing_daemons.bird(self.peer, text) as self._announces, self._speaker():
            self.has_all()
            yield

    def _speaker(self) -> contextlib.AbstractContextManager[object]:
        raise NotImplementedError

    def withdraw(self) -> None:
        for family in FAMILIES:
            self._announces.ask("disable", _session(family, 2))

    def restore(self) -> None:
        for family in FAMILIES:
            self._announces.ask("enable", _session(family, 2))
        self.has_all()


def _session(family: int, rail: int) -> str:
    return f"rail{rail}v{family}"


_BIRD = """\
router id 10.9.1.{end};
protocol device {{ scan time 1; }}
template bgp speaker {{
  hold time 30; connect delay time 1; connect retry time 1; error wait time 1, 2; check link yes;
}}
"""


class Bird(Bgp):
    """bird, with BGP over several hops."""

    def _speaker(self) -> contextlib.AbstractContextManager[object]:
        kernels = "".join(
            f"protocol kernel {{ ipv{family} {{ import none; export all; }}; merge paths yes; scan time 1; }}\n"
            for family in FAMILIES
        )
        sessions = "".join(
            f"protocol bgp {_session(family, rail)} from speaker {{ local {gateway(family, rail, 2)} as 65001;"
            f" neighbor {gateway(family, rail)} as 65002; ipv{family} {{ import all; export none; }}; }}\n"
            for family in FAMILIES
            for rail in RAILS
        )
        return routing_daemons.bird(self.netns, _BIRD.format(end=2) + kernels + sessions)


class Zebra(Host):
    """FRR as installed.

    A hop that the kernel dropped with its carrier never comes back, with or without swerve: the group keeps its number,
    and zebra takes it for installed.
    """

    zebra = ""
    regains = restorable = False

    @staticmethod
    def spares(row: str) -> bool:
        """Nexthop objects that zebra makes for hops that it sees in our routes."""
        return row.startswith('{"id": ') and '"protocol": "zebra"' in row

    def believed(self) -> set[tuple[int, int]]:
        """Families and rails that zebra takes for installed."""
        found = set()
        for family in FAMILIES:
            asked = f"show {'ip' if family == 4 else 'ipv6'} route {PREFIX[family]} json"
            routes = json.loads(support.run(["vtysh", "-N", self.netns, "-c", asked]).stdout)
            hops = [hop for each in routes.get(PREFIX[family], ()) for hop in each["nexthops"] if hop.get("fib")]
            found |= {(family, int(hop["interfaceName"][4:])) for hop in hops}
        return found


class FrrStatic(Zebra):
    """FRR as installed, with static routes."""

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        text = "".join(
            f"{'ip' if family == 4 else 'ipv6'} route {PREFIX[family]} {gateway(family, rail)} rail{rail}\n"
            for family in FAMILIES
            for rail in RAILS
        )
        with routing_daemons.frr(self.netns, staticd=text):
            self.has_all()
            yield


class Frr(Zebra, Bgp):
    """FRR as installed, with BGP over several hops."""

    def _speaker(self) -> contextlib.AbstractContextManager[object]:
        def each(text: str, *families: int) -> str:
            return "".join(text.format(gateway(family, rail)) for family in families for rail in RAILS)

        text = (
            "router bgp 65001\n bgp router-id 10.9.1.2\n no bgp ebgp-requires-policy\n timers bgp 3 30\n"
            + each(" neighbor {0} remote-as 65002\n neighbor {0} timers connect 1\n", *FAMILIES)
            + " address-family ipv4 unicast\n  maximum-paths 8\n"
            + each("  no neighbor {0} activate\n", 6)
            + " exit-address-family\n address-family ipv6 unicast\n  maximum-paths 8\n"
            + each("  neighbor {0} activate\n", 6)
            + " exit-address-family\n"
        )
        return routing_daemons.frr(self.netns, self.zebra, bgpd=text)


class FrrClassic(Frr):
    """FRR that lists hops in its routes."""

    zebra = "no zebra nexthop kernel enable\n"
    regains = restorable = True


class ByFiles(Metric):
    """A daemon with a static route in the file of each interface, one better than the other."""

    daemon: Callable[..., Any]

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as place:
            self._daemon = self.daemon(self.netns, File(place))
            self._write(RAILS)
            with self._at_work(self._daemon):
                yield

    def restart(self) -> int:
        """Start it again; its process number."""
        self._daemon.stop()
        return self._daemon.start()

    def reload(self) -> None:
        """Have it work by what its files say now; without D-Bus that is another start."""
        self.restart()

    def withdraw(self) -> None:
        self._write((1, 3))
        self.reload()
        self._has((1, 3))

    def restore(self) -> None:
        self._write(RAILS)
        self.reload()
        self._has(RAILS)

    def _write(self, rails: tuple[int, ...]) -> None:
        for rail in RAILS:
            self._daemon.write(*self.file(rail, FAMILIES if rail in rails else ()))

    def file(self, rail: int, routed: tuple[int, ...]) -> tuple[str, str]:
        """Name and text of the file of a rail, with routes of these families."""
        raise NotImplementedError


class Networkd(ByFiles):
    """systemd-networkd."""

    daemon = routing_daemons.Networkd

    def file(self, rail: int, routed: tuple[int, ...]) -> tuple[str, str]:
        text = f"[Match]\nName=rail{rail}\n[Network]\nIPv6AcceptRA=no\n"
        text += "".join(f"Address={gateway(f, rail, 2)}/{24 if f == 4 else 64}\n" for f in FAMILIES)
        for family in routed:
            text += f"[Route]\nDestination={PREFIX[family]}\nGateway={gateway(family, rail)}\nMetric={50 + rail}\n"
        return f"rail{rail}.network", text


class NetworkManager(ByFiles):
    """NetworkManager."""

    daemon = routing_daemons.NetworkManager

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        for rail in RAILS:  # what it finds configured when it starts for the first time it leaves alone
            self.ip("address", "flush", "dev", f"rail{rail}")
        with super().owned():
            yield

    def reload(self) -> None:
        self._daemon.ask("connection", "reload")
        self._daemon.ask("device", "reapply", "rail2")

    def file(self, rail: int, routed: tuple[int, ...]) -> tuple[str, str]:
        text = f"[connection]\nid=rail{rail}\ntype=ethernet\ninterface-name=rail{rail}\n[ethernet]\n"
        for family in FAMILIES:
            text += f"[ipv{family}]\nmethod=manual\naddress1={gateway(family, rail, 2)}/{24 if family == 4 else 64}\n"
            text += f"route-metric={100 + rail}\n"
            if family in routed:
                text += f"route1={PREFIX[family]},{gateway(family, rail)},{50 + rail}\n"
        return f"rail{rail}.nmconnection", text


class Leased(Metric):
    """A DHCP server and a router on each rail; the host has default routes, those by rail 1 are the best.

    Withdrawing is a renewal that is refused, then a lease without a router; and a router that announces its end.
    """

    specific = False
    patience_s = 90  # a client whose request met no server, as that was just started again, asks again after 60 s
    renewal_s = 19  # networkd does not repeat a request before 60 s, and misses answers when it asks more often

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        for rail in RAILS:
            self.ip("-4", "address", "flush", "dev", f"rail{rail}")
        with tempfile.TemporaryDirectory() as name:
            place = File(name)
            place.chmod(0o755)
            self.server = routing_daemons.Dnsmasq(self.peer, place)
            self._client = self._made(place)
            self._serve(RAILS)
            try:
                with self._at_work(self._client):
                    yield
            finally:
                self.server.stop()

    def _made(self, place: File) -> routing_daemons.Dhclient | routing_daemons.ByFiles:
        raise NotImplementedError

    def withdraw(self) -> None:
        self._serve((1, 3))
        self._has((1, 3))

    def restore(self) -> None:
        self._serve(RAILS)
        self._has(RAILS)

    def renewed(self) -> None:
        """Wait until every lease was renewed, and every router heard, once more."""
        tellings = [(what, f"rail{rail}") for what in ("DHCPACK", "RTR-ADVERT") for rail in RAILS]
        before = {each: self.server.told(*each) for each in tellings}
        for rail in RAILS:
            with inside(self.netns), socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as asks:
                asks.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"rail{rail}".encode())
                asks.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
                asks.sendto(_ROUTER_SOLICITATION, ("ff02::2", 0))
        for each in tellings:
            support.wait_until(lambda: self.server.told(*each) > before[each], 90, f"{each} comes again")  # noqa: B023

    def _serve(self, rails: tuple[int, ...]) -> None:
        text = f"dhcp-option=59,{self.renewal_s + 1}\n"
        for rail, preference in zip(RAILS, ("high,", "", "low,"), strict=True):
            name, routed = f"rail{rail}", rail in rails
            address = gateway(4, rail, 2 if routed else 3)
            text += f"interface={name}\ndhcp-range=set:{name},{address},{address},255.255.255.0,120\n"
            text += f"dhcp-range=fd00:{rail}::,ra-only,64\nra-param={name},{preference}4,{600 if routed else 0}\n"
            text += "" if routed else f"dhcp-option=tag:{name},3\n"
        self.server.serve(text)


class Dhclient(Leased):
    """dhclient, and the kernel's own ears for routers."""

    renewal_s = 2

    def _made(self, place: File) -> routing_daemons.Dhclient:
        return routing_daemons.Dhclient(self.netns, place, {f"rail{rail}": 100 + rail for rail in RAILS})


class NetworkdLeased(Leased):
    """systemd-networkd for both."""

    def restart(self) -> None:
        """Start it again: it deletes all its routes, and asks for leases and routers anew."""
        self._client.stop()
        self._client.start()
        self._has(RAILS)

    def _made(self, place: File) -> routing_daemons.Networkd:
        (place / "networkd").mkdir()
        client = routing_daemons.Networkd(self.netns, place / "networkd")
        for rail in RAILS:
            text = (
                f"[Match]\nName=rail{rail}\n[Network]\nDHCP=ipv4\nIPv6AcceptRA=yes\nAddress={gateway(6, rail, 2)}/64\n"
            )
            text += f"[DHCPv4]\nRouteMetric={100 + rail}\n[IPv6AcceptRA]\nRouteMetric={100 + rail}\n"
            client.write(f"rail{rail}.network", text)
        return client


class Cilium(Plain):
    """The rules and routes of Cilium 1.18, laid by hand; the routes between nodes say that they are the kernel's."""

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        self.ip("link", "add", "cilium_host", "type", "veth", "peer", "name", "cilium_net")
        for name in ("cilium_host", "cilium_net"):
            self.ip("link", "set", "dev", name, "up")
        for family, router in ((4, "169.254.9.2"), (6, "fe80::2")):
            for pref, words in (
                (9, ("fwmark", "0x200/0xf00", "lookup", "2004")),
                (10, ("fwmark", "0xa00/0xf00", "lookup", "2005")),
                (100, ("lookup", "local")),
                (111, ("from", SOURCE[family], "lookup", "11")),
            ):
                self.ip(f"-{family}", "rule", "add", "pref", str(pref), *words, "proto", "kernel")
            self.ip(f"-{family}", "rule", "del", "pref", "0")
            self._add(family, "local", "default", "dev", "lo", "table", "2004")
            self._add(family, router, "dev", "cilium_host", "table", "2005")
            self._add(family, "default", "via", router, "dev", "cilium_host", "table", "2005")
            self._add(family, "default", *_hop(family, 1), "table", "11")
        with super().owned():
            yield

    def _add(self, family: int, *words: str) -> None:
        self.ip(f"-{family}", "route", "replace", *words, "proto", "kernel")

    def lay(self, family: int, rails: tuple[int, ...]) -> None:
        hop = _hop(family, 1 if 2 in rails else 3)
        self._add(family, PREFIX[family], *hop)
        self._add(family, "default", *hop, "table", "11")


class NetworkManagerLeased(Leased):
    """NetworkManager for both."""

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        for rail in RAILS:  # as above
            self.ip("address", "flush", "dev", f"rail{rail}")
        with super().owned():
            yield

    def _made(self, place: File) -> routing_daemons.NetworkManager:
        (place / "manager").mkdir()
        client = routing_daemons.NetworkManager(self.netns, place / "manager")
        for rail in RAILS:
            text = f"[connection]\nid=rail{rail}\ntype=ethernet\ninterface-name=rail{rail}\n[ethernet]\n"
            text += "".join(f"[ipv{f}]\nmethod=auto\nroute-metric={100 + rail}\n" for f in FAMILIES)
            client.write(f"rail{rail}.nmconnection", text)
        return client
