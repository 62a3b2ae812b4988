"""Rails over each kind of device that hosts have: probed, found dead, left by an act, and taken again; flows pinned.

The machine's own kernel has VXLAN alone; the second one has them all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import packets
import pin_kit
import pytest
import support
import watching
from pin_kit import compiled_once

from pytools.config import Links, Probe
from pytools.errors import SwerveError
from pytools.kernel.bpf import attach, loader
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.lab.building import agent_config
from pytools.lab.devices import VRF
from pytools.lab.topology import KINDS
from pytools.signals import PathLiveness, PathWay, Underlay
from pytools.sources import programs
from pytools.sources.links.source import LinkSource
from pytools.sources.probing.measurements import RECEIVED
from steering.actuators.overlay import Overlay
from steering.actuators.owners_routes import ONE_HOP
from steering.actuators.pins import PinTarget
from steering.plan import FlowKey, Pin
from steering.policy.model import Manage

__all__ = ["compiled_once"]  # fixtures

HERE = {"vxlan"}
TUNNELS = {"vxlan", "geneve", "gre", "sit", "wireguard"}
FLOWS, PACKETS = 30, 120
NOISE = 15  # packets that are nobody's: neighbours are asked for
OURS = {"destinations": ["10.9.0.0/16", "fd00:9::/64"]}


def params(*alike: str) -> dict[str, Any]:
    """Each kind of device; those that are like another one are left to runs of all cases."""
    guest = {each: pytest.mark.guest(only=True, thorough=each in alike) for each in KINDS if each not in HERE}
    return {each: pytest.param(each, marks=guest.get(each, ())) for each in KINDS}


PARAMS, PROBED = params("sit"), params("bond-xor", "geneve", "gre", "sit")
SAMPLED = params(*{*KINDS} - {"team", "wireguard"})


@pytest.fixture(scope="module", params=PARAMS.values())
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    support.require("bcc", "netns")
    with Lab.up(f"over-{request.param}", hosts=2, rate="none", ipv6=True, over=request.param) as made:
        yield made


@pytest.mark.parametrize("lab", PROBED.values(), indirect=True, scope="module")
def test_every_rail_is_probed_and_one_that_is_cut_is_found(lab: Lab) -> None:
    check_probed(lab, (4, 6))


def check_probed(lab: Lab, families: tuple[int, ...]) -> None:
    made = watching.watchers(lab, links=Links(mtu_interval_s=0))
    live: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for each in made:
            stack.callback(each.close)
        told = made[0].bus.subscribe(frozenset({"path_liveness"}))

        def missed() -> dict[str, int]:
            for signal in told.read():
                if isinstance(signal, PathLiveness):
                    live[str(signal.path)] = signal.missed
            return {path: count for path, count in live.items() if count >= 3}

        def answered() -> bool:
            counts = made[0].mesh.measurements.counts
            paths = made[0].mesh.paths.current
            return (
                len(paths) == lab.spec.rails * len(families)
                and all(counts[each.index, RECEIVED] >= 10 for each in paths)
                and not missed()
            )

        watching.work_until(made, answered, "every path answers")
        below = {path.interface: ways for path, ways in made[0].mesh.underlays.counted().items()}
        outer = {f"rail{rail}": f"10.{100 + rail}.1.1" for rail in (1, 2)} if lab.spec.over in TUNNELS else {}
        assert below == {rail: [Underlay(there, "", f"cable1-{rail}")] for rail, there in outer.items()}
        lab.cut(1)
        watching.work_until(made, lambda: len(missed()) == len(families), "all families are silent on rail 1")
        assert all("rail1" in path for path in missed())
        lab.heal(1)
        watching.work_until(made, lambda: not missed(), "they answer again")


@pytest.mark.deadline(240)
@pytest.mark.parametrize("lab", [PARAMS["bond-xor"], params("team")["team"]], indirect=True, scope="module")
def test_the_port_of_a_bond_or_team_that_loses_silently_is_named(lab: Lab) -> None:
    check_port_named(lab, (4, 6))


def check_port_named(lab: Lab, families: tuple[int, ...]) -> None:
    """One of the two cables of rail 1 drops the UDP that arrives at its end, and keeps its carrier."""
    made = watching.watchers(lab, probe=Probe(interval_ms=100, sweep_per_s=40), links=Links(mtu_interval_s=0))
    near, rail = lab.hosts[0], lab.rails[0]
    addresses = [lab.hosts[1].service if family == 4 else lab.hosts[1].service6 for family in families]
    ways: dict[tuple[str, int], PathWay] = {}
    with contextlib.ExitStack() as stack:
        for each in made:
            stack.callback(each.close)
        told = made[0].bus.subscribe(frozenset({"path_way"}))
        with inside(near.netns):
            links = LinkSource(
                *(made[0].config, made[0].netlink, made[0].bus, made[0].mesh.interfaces),
                *(made[0].mesh.paths.all_paths, lambda _index, _carrier: None),
                bundles_changed=made[0].mesh.ways.set_bundles,
            )
        stack.callback(links.close)
        made[0].due[links.tick] = 0

        def states() -> dict[tuple[str, str], str]:
            for signal in told.read():
                if isinstance(signal, PathWay) and signal.path.address in addresses:
                    ways[f"{signal.path.interface} {signal.path.address}", signal.way] = signal
            return {(path, signal.lower): signal.state for (path, _), signal in ways.items()}

        keys = {
            (f"rail{number} {address}", f"cable{cable}-rail{number}")
            for number, address in itertools.product((1, 2), addresses)
            for cable in (1, 2)
        }
        healthy = dict.fromkeys(keys, "healthy")
        watching.work_until(made, lambda: states() == healthy, "each way by each port is met", 90)
        for way in ways.values():
            assert way.ways == 2 and way.router == "" and way.confidence >= 0.99
            assert len(way.ports) >= 10, way
        port = f"cable2-{rail.ports[0].name}"
        drop_udp(lab, port)
        sick = healthy | {key: "dead" for key in keys if key[1] == "cable2-rail1"}
        watching.work_until(made, lambda: states() == sick, "the port is named", 60)

        def located() -> bool:
            return states() == sick and all(each.sick_hop == 0 for each in ways.values() if each.state == "dead")

        watching.work_until(made, located, "the loss is before the first router", 90)
        support.run(["tc", "-n", rail.netns, "qdisc", "del", "dev", port, "ingress"])
        watching.work_until(made, lambda: states() == healthy, "it is healthy again", 90)


def drop_udp(lab: Lab, port: str) -> None:
    """At an interface at rail 1's end; neighbours are asked for by it all the same."""
    netns = lab.rails[0].netns
    support.run(["tc", "-n", netns, "qdisc", "add", "dev", port, "ingress"])
    for protocol, header in (("ip", "ip"), ("ipv6", "ip6")):
        into = ["filter", "add", "dev", port, "ingress", "prio", "1" if header == "ip" else "2"]
        udp = ["u32", "match", header, "protocol", "17", "0xff", "action", "drop"]
        support.run(["tc", "-n", netns, *into, "protocol", protocol, *udp])


class Flows:
    """Datagrams of several flows from host 1 to host 2, which gets them all."""

    def __init__(self, lab: Lab, version: int) -> None:
        self.lab = lab
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        self.ends = [host.service if version == 4 else host.service6 for host in lab.hosts]
        self.far = self._socket(family, 1)
        self.far.settimeout(5 * support.slow_factor())
        self.near = [self._socket(family, 0) for _ in range(FLOWS)]

    def _socket(self, family: int, host: int) -> socket.socket:
        with inside(self.lab.hosts[host].netns):
            made = socket.socket(family, socket.SOCK_DGRAM)
        if self.lab.spec.over == "vrf":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, VRF.encode())
        made.bind((self.ends[host], 0))
        return made

    def key(self, number: int) -> FlowKey:
        local, remote = (each.getsockname()[1] for each in (self.near[number], self.far))
        return FlowKey(socket.IPPROTO_UDP, self.ends[0], local, self.ends[1], remote)

    def rails(self, *numbers: int) -> set[int]:
        """Send on these flows, or all; the rails that carried what arrived, which was everything."""
        before = self._sent()
        chosen = [self.near[number] for number in numbers] or self.near
        sending = chosen * (PACKETS // len(chosen))
        for each in sending:
            each.sendto(b"x" * 100, (self.ends[1], self.far.getsockname()[1]))
            assert self.far.recv(200) == b"x" * 100
        after = self._sent()
        moved = {rail: after[rail] - before[rail] for rail in after}
        assert sum(moved.values()) >= len(sending), moved
        return {rail for rail, packets in moved.items() if packets > NOISE}

    def _sent(self) -> dict[int, int]:
        netns = self.lab.hosts[0].netns
        shown = {row["ifname"]: row for row in json.loads(support.run(["ip", "-n", netns, "-j", "-s", "link"]).stdout)}
        return {rail: shown[f"rail{rail}"]["stats64"]["tx"]["packets"] for rail in range(1, self.lab.spec.rails + 1)}

    def close(self) -> None:
        for each in (*self.near, self.far):
            each.close()


@pytest.fixture(params=[4, 6], ids=["ipv4", "ipv6"])
def flows(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Flows]:
    with contextlib.closing(Flows(lab, request.param)) as made:
        yield made


def test_an_act_moves_packets_and_its_undo_brings_them_back(lab: Lab, flows: Flows) -> None:
    check_steered(lab, flows)


def test_hosts_without_ipv4_are_measured_and_steered(unique_name: Callable[[], str]) -> None:
    support.require("bcc", "netns")
    with Lab.up(unique_name(), hosts=2, rate="none", ipv6=True) as lab:
        for netns in [host.netns for host in lab.hosts] + [rail.netns for rail in lab.rails]:
            support.run(["ip", "-n", netns, "-4", "address", "flush", "scope", "global"])
        check_probed(lab, (6,))
        check_sampled(lab, (6,))
        with contextlib.closing(Flows(lab, 6)) as flows:
            check_steered(lab, flows)
            check_pinned(lab, flows)


@pytest.mark.parametrize("table", ["main", "77"], ids=["multipath", "source table"])
def test_routes_that_list_their_hops_are_measured_and_steered(unique_name: Callable[[], str], table: str) -> None:
    support.require("bcc", "netns")
    with Lab.up(unique_name(), hosts=2, rate="none", ipv6=True) as lab:
        for host, other in (lab.hosts, lab.hosts[::-1]):
            for family in (4, 6):
                source, peer = (each.service if family == 4 else each.service6 for each in (host, other))
                gateways = [(each.gateway if family == 4 else each.gateway6, each.name) for each in host.interfaces]
                hops = [word for gateway, name in gateways for word in ("nexthop", "via", gateway, "dev", name)]
                ip = ["ip", "-n", host.netns, f"-{family}"]
                support.run([*ip, "route", "del", peer])
                to = peer if table == "main" else "default"
                support.run([*ip, "route", "add", to, "table", table, "src", source, *hops])
                if table != "main":
                    support.run([*ip, "rule", "add", "from", source, "lookup", table])
        check_probed(lab, (4, 6))
        check_sampled(lab, (4, 6))
        for version in (4, 6):
            with contextlib.closing(Flows(lab, version)) as flows:
                check_steered(lab, flows)
                check_pinned(lab, flows)


def test_a_single_rail_is_measured_and_there_is_nothing_to_steer(unique_name: Callable[[], str]) -> None:
    support.require("bcc", "netns")
    with Lab.up(unique_name(), hosts=2, rails=1, rate="none", ipv6=True) as lab:
        check_probed(lab, (4, 6))
        check_sampled(lab, (4, 6))
        with inside(lab.hosts[0].netns), Netlink() as netlink:
            found = Overlay(netlink, Manage.model_validate(OURS), apply=True).refresh()
        assert not found.groups
        assert set(found.refused.values()) == {ONE_HOP}


def check_steered(lab: Lab, flows: Flows) -> None:
    manage = Manage.model_validate(OURS | ({"vrfs": [VRF]} if lab.spec.over == "vrf" else {}))
    with inside(lab.hosts[0].netns), Netlink() as netlink:
        overlay = Overlay(netlink, manage, apply=True)
        found = overlay.refresh()
        [target] = found.targets_of(flows.ends[1])
        group = found.groups[target]
        [stays] = [each.nexthop_id for each in group.members if each.interface == "rail2"]
        if lab.spec.over == "vrf":  # as docs/neighbours.md says of kernels from 5.18 to 6.14
            with pytest.raises(SwerveError, match="this kernel matches no rule with packets of VRF"):
                overlay.apply(group.target, ((stays, 1),))
            return
        assert flows.rails() == {1, 2}
        assert overlay.apply(group.target, ((stays, 1),))
        assert flows.rails() == {2}
        assert overlay.apply(group.target, group.original)
        assert flows.rails() == {1, 2}


@contextlib.contextmanager
def sampling(lab: Lab, host: int) -> Iterator[Callable[[], list[int]]]:
    """Every datagram of a host's rails is sampled; what has been."""
    config = agent_config(lab.hosts[host], lab.hosts, ipv6=True)
    with inside(lab.hosts[host].netns), loader.load([programs.samples(config)]) as loaded, contextlib.ExitStack() as on:
        assert loaded.failed == {}
        loaded.map("sample_settings").update(0, (3, 16, 0, 0))
        peers, ring = loaded.map("sample_peers"), loaded.ring("samples", "sample")
        for each in lab.hosts:
            for address in (each.service, each.service6):
                key = np.zeros((), peers.key)
                key["bytes"] = np.frombuffer(packets.mapped(address), np.uint8)
                peers.update(key, 3)
        for rail in lab.hosts[host].interfaces:
            for direction in ("egress", "ingress"):
                on.enter_context(attach.attach_tc(loaded.programs[f"sample_{direction}"], rail.name, direction))
        yield lambda: [int(record["key"]) for record in ring.read()]


@pytest.mark.parametrize("lab", SAMPLED.values(), indirect=True, scope="module")
def test_application_packets_are_sampled_alike_at_both_ends(lab: Lab) -> None:
    check_sampled(lab, (4, 6))


def check_sampled(lab: Lab, families: tuple[int, ...]) -> None:
    with sampling(lab, 0) as sent, sampling(lab, 1) as received:
        for version in families:
            with contextlib.closing(Flows(lab, version)) as flows:
                flows.rails()
            keys = sent()
            assert len(keys) == PACKETS and sorted(received()) == sorted(keys)


def test_a_pinned_flow_leaves_by_its_rail_and_none_is_lost(lab: Lab, flows: Flows) -> None:
    check_pinned(lab, flows)


def check_pinned(lab: Lab, flows: Flows) -> None:
    near, version = lab.hosts[0].interfaces, 6 if ":" in flows.ends[0] else 4
    targets = [
        PinTarget(each.rail, each.index, each.gateway if version == 4 else each.gateway6, True, "any") for each in near
    ]
    with pin_kit.pinning_in(lab.hosts[0].netns, targets) as pins:
        routed = flows.rails(0)
        assert len(routed) == 1
        for rail in (3 - min(routed), min(routed)):
            assert pins.install([Pin(flows.key(0), "any", rail, pin_kit.soon())]) == {}
            assert flows.rails(0) == {rail}
