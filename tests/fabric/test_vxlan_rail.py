"""A rail that is a VXLAN tunnel over another rail: it is probed, answers, and is dead only when the tunnel is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest
import steering_kit
import support
import watching
import yaml
from watching import Watcher

from pytools import directories
from pytools.config import AgentConfig, Links, Probe
from pytools.ipc.bus import Client, Subscription
from pytools.lab.building import agent_config
from pytools.lab.fabric import Lab
from pytools.lab.topology import Host, group_id
from pytools.signals import Path, PathDelay, PathLiveness
from pytools.sources.probing.measurements import RECEIVED, SENT
from steering.deciding.failure_classifier import Silence, classify

TUNNEL = "vx0"
NEXTHOP = 77
LAB = {"rails": 1, "rate": "none"}
PROBES = 40  # of a path, before it is judged


def ip(host: Host, *words: str) -> str:
    return support.run(["ip", "-n", host.netns, *words]).stdout


def add_tunnel(host: Host, other: Host) -> None:
    """Give a host a tunnel over the only rail, and half of its traffic to the other one."""
    ends = host.interfaces[0].address, other.interfaces[0].address
    made = ["type", "vxlan", "id", "7", "local", ends[0], "remote", ends[1], "dstport", "4789", "dev", "rail1"]
    done = support.run(["ip", "-n", host.netns, "link", "add", TUNNEL, *made], check=False)
    if "Unknown device type" in done.stderr:
        pytest.skip("missing: the link type vxlan (CONFIG_VXLAN)")
    assert done.returncode == 0, done.stderr
    ip(host, "address", "add", f"10.77.0.{host.number}/24", "dev", TUNNEL)
    ip(host, "link", "set", "dev", TUNNEL, "up")
    ip(host, "nexthop", "add", "id", str(NEXTHOP), "via", f"10.77.0.{other.number}", "dev", TUNNEL)
    group = str(group_id(other.number, 4))
    ip(host, "nexthop", "replace", "id", group, "group", f"{host.interfaces[0].nexthop_id}/{NEXTHOP}")


@pytest.fixture
def lab(lab: Lab) -> Lab:
    for host, other in (lab.hosts, lab.hosts[::-1]):
        add_tunnel(host, other)
    return lab


class Told:
    """What one host has told of its paths."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self._told: Subscription = watcher.bus.subscribe(frozenset({"path_liveness", "path_delay"}))
        self.live: dict[Path, PathLiveness] = {}
        self.delays: dict[str, PathDelay] = {}
        self.dead: list[Silence] = []  # what was said of the tunnel when it was called dead

    def read(self) -> bool:
        for signal in self._told.read():
            if isinstance(signal, PathDelay):
                self.delays[signal.path.interface] = signal
            elif isinstance(signal, PathLiveness):
                self.live[signal.path] = signal
                found = self.verdict(signal)
                if signal.missed >= max(3, signal.limit or 0) and found.cause == "path_dead":
                    self.dead.append(found)
        return True

    def verdict(self, signal: PathLiveness) -> Silence:
        return classify(signal, [each for path, each in self.live.items() if path != signal.path])

    def causes(self) -> set[str]:
        """What is said of all paths now."""
        return {self.verdict(each).cause for each in self.live.values()}

    def counted(self, counter: int) -> dict[str, int]:
        counts = self.watcher.mesh.measurements.counts
        return {each.path.interface: int(counts[each.index, counter]) for each in self.watcher.mesh.paths.current}


def routing(host: Host) -> list[str]:
    """All rules, and all routes in all tables."""
    return [*ip(host, "rule").splitlines(), *ip(host, "route", "show", "table", "all").splitlines()]


def sent_packets(host: Host) -> int:
    return int(json.loads(ip(host, "-j", "-s", "link", "show", "dev", TUNNEL))[0]["stats64"]["tx"]["packets"])


def test_a_vxlan_rail_is_probed_through_the_tunnel_and_healthy(lab: Lab) -> None:
    before, sent = [routing(host) for host in lab.hosts], [sent_packets(host) for host in lab.hosts]
    made: list[Watcher] = []
    try:
        for host in lab.hosts:
            config = agent_config(host, lab.hosts, ipv6=False)
            probing = Probe(interval_ms=20), Links(mtu_interval_s=0)
            made.append(Watcher(host.netns, AgentConfig(config.host, config.peers, probe=probing[0], links=probing[1])))
        hosts = [Told(each) for each in made]

        def enough() -> bool:
            return all(each.read() and min(each.counted(RECEIVED).values()) >= PROBES for each in hosts) and all(
                each.causes() == {"answers"} for each in hosts
            )

        assert [set(each.counted(SENT)) for each in hosts] == [{"rail1", TUNNEL}] * 2
        watching.work_until(made, enough, "every path answers, and has answered many probes")
        for host, told, packets in zip(lab.hosts, hosts, sent, strict=True):
            answered, asked = told.counted(RECEIVED), told.counted(SENT)
            assert asked[TUNNEL] - answered[TUNNEL] <= 3, "but for those under way"
            assert sent_packets(host) - packets >= asked[TUNNEL], "the probes went through the tunnel"
            assert told.delays[TUNNEL].forward.samples > 0
            assert not told.dead
        assert [routing(host) for host in lab.hosts] == before, "no rule, no table, no route of ours"
        ip(lab.hosts[1], "link", "set", "dev", TUNNEL, "down")
        first = hosts[0]
        watching.work_until(made[:1], lambda: first.read() and bool(first.dead), "the dead tunnel is called dead")
        assert {path.interface for path, each in first.live.items() if each.missed} == {TUNNEL}
    finally:
        left = [each.close() for each in made]
    assert not any(left)


def test_agents_say_which_rails_carry_a_tunnel(unique_name: Callable[[], str]) -> None:
    with Lab.up(unique_name(), hosts=2, rate="none") as lab:
        for host, other in (lab.hosts, lab.hosts[::-1]):
            ends = ["local", host.service, "remote", other.service]
            ip(host, "link", "add", TUNNEL, "type", "vxlan", "id", "7", *ends, "dstport", "4789")
            ip(host, "address", "add", f"10.77.0.{host.number}/24", "dev", TUNNEL)
            ip(host, "link", "set", "dev", TUNNEL, "up")
            file = directories.runtime_dir(host.netns) / "agent.yaml"
            peer = {"name": other.name, "address": f"10.77.0.{other.number}", "clock": "shared"}
            file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"peers": [peer]}))
        steering_kit.agents(lab)
        client = Client(directories.agent_socket(lab.hosts[0].netns), frozenset({"path_delay"}))
        with contextlib.closing(client):

            def carried() -> dict[str, int | None]:
                found = [each for each in client.read() if isinstance(each, PathDelay) and each.underlay]
                ways = {way.interface: way.packets for each in found for way in each.underlay or ()}
                return ways if any(ways.values()) else {}

            told = support.wait_until(carried, 30, "probes are counted")
        assert set(told) == {"rail1", "rail2"}
        assert "over rail" in support.swerve("delay", "-n", lab.hosts[0].netns).stdout
