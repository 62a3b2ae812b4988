"""FRR on a lab: zebra, bgpd and bfdd in every host and rail, eBGP over every cable, BFD to the neighbour one hop away.

The lab's static routes between hosts are taken away, so that traffic goes where FRR says. Every daemon is a process of
the lab, so it ends with it; its sockets lie in a directory of its own below /run/frr (pathspace), removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from _common import note, wait_until

from pytools.errors import CapabilityError
from pytools.kernel.netlink.routing import MAIN_TABLE, Family, Netlink, Route
from pytools.lab import Host, Lab, Rail

FAMILIES: Final[tuple[Family, ...]] = (4, 6)
DAEMONS: Final = Path("/usr/lib/frr")
_RUN: Final = Path("/run/frr")
_ORDER: Final = ("zebra", "bfdd", "bgpd")
_STATIC, _BGP = 4, 186  # RTPROT_*
_READY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Bfd:
    """How often a neighbour says that it lives, and how often in a row it may be missed."""

    interval_ms: int
    multiplier: int


DEFAULT: Final = Bfd(300, 3)  # FRR's own; its documentation names 10 ms as the smallest interval (and 2 as the
FASTEST: Final = Bfd(10, 3)  # smallest multiplier, which one late wake-up is enough to trip)


def available() -> bool:
    """Whether FRR is installed."""
    return all((DAEMONS / name).exists() for name in _ORDER)


class _Neighbour(NamedTuple):
    address: str
    system: int


@dataclass(frozen=True, slots=True)
class _Node:
    place: Host | Rail
    system: int  # number of its autonomous system
    router_id: str
    neighbours: tuple[_Neighbour, ...]
    networks: tuple[str, ...]

    @property
    def pathspace(self) -> str:
        return self.place.netns


def _nodes(lab: Lab) -> list[_Node]:
    """Every host and every rail is an autonomous system of its own."""
    hosts = [
        _Node(
            host,
            65000 + host.number,
            host.service,
            tuple(_Neighbour(each.gateway, 65100 + each.rail) for each in host.interfaces),
            (f"{host.service}/32",),
        )
        for host in lab.hosts
    ]
    rails = [
        _Node(
            rail,
            65100 + rail.number,
            f"10.{rail.number}.0.0",
            tuple(_Neighbour(host.interfaces[rail.number - 1].address, 65000 + host.number) for host in lab.hosts),
            (),
        )
        for rail in lab.rails
    ]
    return [*hosts, *rails]


def _configuration(node: _Node, bfd: Bfd) -> dict[str, str]:
    """What each daemon is told."""
    head = f"hostname {node.place.name}\nlog file {_RUN / node.pathspace}/log\n"
    profile = f"receive-interval {bfd.interval_ms}\n  transmit-interval {bfd.interval_ms}\n"
    profile += f"  detect-multiplier {bfd.multiplier}"
    bgp = [
        f"router bgp {node.system}",
        f" bgp router-id {node.router_id}",
        " no bgp ebgp-requires-policy",
        " no bgp network import-check",
        " bgp bestpath as-path multipath-relax",
        " timers bgp 3 9",
    ]
    for each in node.neighbours:
        bgp += [
            f" neighbor {each.address} remote-as {each.system}",
            f" neighbor {each.address} bfd profile lab",
            f" neighbor {each.address} timers connect 1",
        ]
        if isinstance(node.place, Rail):  # hosts call: with both calling once a second, calls collide for ever
            bgp.append(f" neighbor {each.address} passive")
    bgp += [" address-family ipv4 unicast", "  maximum-paths 8"]
    bgp += [f"  network {each}" for each in node.networks]
    return {
        # With nexthop objects 8.4 never puts a hop back that the kernel dropped with its carrier.
        "zebra": f"{head}no zebra nexthop kernel enable\n",
        "bfdd": f"{head}bfd\n profile lab\n  {profile}\n",
        "bgpd": head + "\n".join(bgp) + "\n",
    }


class Frr:
    """FRR at work on a lab: it routes for the lab's hosts and rails."""

    def __init__(self, lab: Lab, bfd: Bfd) -> None:
        self._lab, self._nodes = lab, _nodes(lab)
        self._bfd = bfd
        self._processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start every daemon, and wait until all is well."""
        for node in self._nodes:
            place = _RUN / node.pathspace
            place.mkdir(parents=True)
            shutil.chown(place, "frr", "frr")
            for daemon, text in _configuration(node, self._bfd).items():
                file = place / f"{daemon}.conf"
                file.write_text(text)
                shutil.chown(file, "frr", "frr")
                words = ["nice", "-n", "-20", str(DAEMONS / daemon), "-N", node.pathspace, "-f", str(file), "-P", "0"]
                self._processes.append(self._lab.start(node.place, words))
                if daemon == "zebra":  # the others give up soon when it is not there
                    wait_until((place / "zserv.api").exists, "zebra serves")
        wait_until(lambda: all(self._watched(node) for node in self._nodes), "all BFD sessions are up", _READY_S)
        wait_until(self.is_whole, "FRR has spread its routes", _READY_S)

    def is_whole(self) -> bool:
        """Whether every host reaches every other over every rail."""
        return all(self.spread(host) for host in self._lab.hosts)

    def heal(self, rail: int) -> None:
        """Heal a rail of the lab, which puts its own routes back with a cable, and leave the routing to FRR."""
        self._lab.heal(rail)
        clear(self._lab)

    def spread(self, host: Host) -> bool:
        """Whether a host's routes to all others use all rails."""
        with Netlink(host.netns) as netlink:
            routes = {each.destination: len(each.hops) for each in netlink.routes(4) if each.protocol == _BGP}
        others = [f"{other.service}/32" for other in self._lab.hosts if other is not host]
        return all(routes.get(prefix) == len(self._lab.rails) for prefix in others)

    def sessions(self, place: Host | Rail) -> list[dict[str, Any]]:
        """What bfdd says of its sessions."""
        words = ["vtysh", "-N", place.netns, "-c", "show bfd peers json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        try:
            found: list[dict[str, Any]] = json.loads(done.stdout)
        except json.JSONDecodeError:
            return []
        return found

    def _watched(self, node: _Node) -> bool:
        up = [each for each in self.sessions(node.place) if each["status"] == "up"]
        return len(up) == len(node.neighbours)

    def close(self) -> None:
        """End the daemons; their routes stay until the namespace goes."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(10)
        for node in self._nodes:
            shutil.rmtree(_RUN / node.pathspace, ignore_errors=True)


@contextlib.contextmanager
def routed(lab: Lab, bfd: Bfd) -> Iterator[Frr]:
    """Let FRR route between the hosts of a lab for a while.

    Raises
    ------
    CapabilityError
        If it is not installed.
    """
    if not available():
        raise CapabilityError("FRR is not installed", "apt-get install frr")
    clear(lab)
    frr = Frr(lab, bfd)
    try:
        frr.start()
        first = frr.sessions(lab.hosts[0])[0]
        agreed = {name: first[name] for name in ("receive-interval", "transmit-interval", "detect-multiplier")}
        note(f"FRR's BFD agreed on {agreed}")
        yield frr
    finally:
        frr.close()


def clear(lab: Lab) -> None:
    """Take the lab's own routes between hosts away, and every nexthop object: what FRR finds it would half adopt."""
    services = {f"{host.service}/32" for host in lab.hosts} | {f"{host.service6}/128" for host in lab.hosts}
    for netns in [host.netns for host in lab.hosts] + [rail.netns for rail in lab.rails]:
        with Netlink(netns) as netlink:
            for nexthop in netlink.nexthops():
                if nexthop.protocol == _STATIC:
                    netlink.del_nexthop(nexthop.id)
            for route in (each for family in FAMILIES for each in netlink.routes(family)):
                if route.destination in services and route.protocol == _STATIC:
                    netlink.del_route(Route(route.destination, route.family, MAIN_TABLE, protocol=_STATIC))
