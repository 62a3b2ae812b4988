"""Hosts with an address, a rule and a table for each interface: agents find every path, and every path answers.

Two hosts, and a router for each rail that knows nothing of the other: what leaves by the wrong rail gets nowhere.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path as File

import pytest
import support
import yaml

from pytools import directories
from pytools.doctor import agent as doctor
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.netns import inside
from pytools.signals import Path, PathDelay, PathLiveness

RAILS = (1, 2)
FAMILIES = (4, 6)
LENGTH = {4: 24, 6: 64}
SERVICE = {4: "10.9.0.{host}", 6: "fd00:9::{host}"}
Ends = tuple[str, str, str]  # the peer's address, gateway, interface


def address(family: int, rail: int, host: int, end: int = 2) -> str:
    """An address of the cable from a host to the router of a rail; end 1 is the router's."""
    return f"10.{rail}.{host}.{end}" if family == 4 else f"fd00:{rail}:{host}::{end}"


class Fabric:
    """The namespaces; hosts are numbered from 1."""

    def __init__(self, make: Callable[[], str]) -> None:
        self.hosts = {1: make(), 2: make()}
        self.routers = {rail: make() for rail in RAILS}
        for router in self.routers.values():
            with inside(router):
                File("/proc/sys/net/ipv4/ip_forward").write_text("1")
                File("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
        for rail in self.routers:
            for host in self.hosts:
                self._connect(rail, host)
        for host, netns in self.hosts.items():
            services = {family: SERVICE[family].format(host=host) for family in FAMILIES}
            for rail, router in self.routers.items():
                device = self.interface(rail, host)
                ways = (f"{services[family]} via {address(family, rail, host)} dev {device}" for family in FAMILIES)
                support.ip(router, *(f"route add {way}" for way in ways))
            defaults = (" ".join(self._gateway(family, 1, host)) for family in FAMILIES)
            support.ip(
                netns,
                *(f"address add {service} dev lo{' nodad' * (family == 6)}" for family, service in services.items()),
                *(f"route add default {way}" for way in defaults),
            )

    @staticmethod
    def ip(netns: str, *words: str) -> None:
        support.run(["ip", "-n", netns, *words])

    @staticmethod
    def interface(rail: int, host: int) -> str:
        return f"rail{rail}" if host == 1 else f"back{rail}"

    def _gateway(self, family: int, rail: int, host: int) -> tuple[str, ...]:
        return "via", address(family, rail, host, 1), "dev", self.interface(rail, host)

    def _connect(self, rail: int, host: int) -> None:
        name, router = self.interface(rail, host), self.routers[rail]
        for netns, end in ((self.hosts[host], 2), (router, 1)):
            prefixes = {family: f"{address(family, rail, host, end)}/{LENGTH[family]}" for family in FAMILIES}
            support.ip(
                netns,
                *([support.joining(router, name)] if netns != router else []),
                f"address add {prefixes[4]} dev {name}",
                f"address add {prefixes[6]} dev {name} nodad",
                f"link set dev {name} up",
            )

    def source_table(self, rail: int, host: int) -> None:
        """Give what a host sends from its address of a rail a table of its own."""
        for family in FAMILIES:
            netns, table = self.hosts[host], str(100 + rail)
            self.ip(netns, f"-{family}", "route", "add", "default", "table", table, *self._gateway(family, rail, host))
            self.ip(netns, f"-{family}", "rule", "add", "from", address(family, rail, host), "lookup", table)


class Agent:
    """The agent of a host, and what it has told of its paths."""

    def __init__(self, fabric: Fabric, host: int, peers: list[str], file: File) -> None:
        self.netns = fabric.hosts[host]
        self.delays: dict[Ends, PathDelay] = {}
        self.live: dict[Ends, PathLiveness] = {}
        entries = [{"name": f"h{3 - host}", "address": each, "clock": "shared"} for each in peers]
        file.write_text(yaml.safe_dump({"host": f"h{host}", "peers": entries}))
        self.file = file
        self.process = subprocess.Popen([*support.SWERVE, "agent", "-n", self.netns, "--config", str(file)])

        def connected() -> Client | None:
            assert self.process.poll() is None, "the agent has ended"
            with contextlib.suppress(SwerveError):
                return Client(directories.agent_socket(self.netns), frozenset({"path_delay", "path_liveness"}))
            return None

        client = support.wait_until(connected, 30, "the agent serves")
        assert client is not None
        self.client = client

    def read(self) -> None:
        def ends(path: Path) -> Ends:
            return path.address, path.gateway, path.interface

        for signal in self.client.read():
            if isinstance(signal, PathDelay):
                self.delays[ends(signal.path)] = signal
            elif isinstance(signal, PathLiveness):
                self.live[ends(signal.path)] = signal

    def answering(self) -> set[Ends]:
        self.read()
        return {path for path, signal in self.delays.items() if signal.received}

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait()
        directories.base_delays(self.netns).unlink(missing_ok=True)


@pytest.fixture
def fabric(make_namespace: Callable[[], str]) -> Fabric:
    support.require("bcc", "netns")
    return Fabric(make_namespace)


@pytest.fixture
def agents(fabric: Fabric, tmp_path: File) -> Iterator[Callable[[int, list[str]], Agent]]:
    with contextlib.ExitStack() as stack:

        def make(host: int, peers: list[str]) -> Agent:
            return stack.enter_context(contextlib.closing(Agent(fabric, host, peers, tmp_path / f"h{host}.yaml")))

        yield make


def rails_of(host: int, family: int) -> list[str]:
    return [address(family, rail, host) for rail in RAILS]


def paths_to(addresses: list[str], family: int, host: int = 1) -> set[Ends]:
    """By each rail to the address at the same place."""
    interfaces = [Fabric.interface(rail, host) for rail in RAILS]
    gateways = [address(family, rail, host, 1) for rail in RAILS]
    return set(zip(addresses, gateways, interfaces, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_interface_is_measured_against_the_peers_of_its_rail(
    fabric: Fabric, agents: Callable[[int, list[str]], Agent], family: int
) -> None:
    for rail in RAILS:
        for host in fabric.hosts:
            fabric.source_table(rail, host)
    ours = agents(1, rails_of(2, family))
    agents(2, rails_of(1, family))
    expected = paths_to(rails_of(2, family), family)
    support.wait_until(lambda: ours.answering() >= expected and set(ours.live) >= expected, 30, "all paths answer")
    assert set(ours.live) == set(ours.delays) == expected
    with inside(ours.netns):  # what `swerve doctor` looks at
        assert doctor.others_at_tc(ours.netns, ours.file) == doctor.Finding(True, "on rail1, rail2")

    down = fabric.routers[2]
    fabric.ip(down, "link", "set", "dev", "back2", "down")
    (lost,) = [path for path in expected if path[2] == "rail2"]

    def dead() -> bool:
        ours.read()
        return ours.live[lost].missed >= (ours.live[lost].limit or 3)

    support.wait_until(dead, 20, "the rail whose far cable is out is silent")
    assert all(signal.missed == 0 for path, signal in ours.live.items() if path != lost)
    assert set(ours.live) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_address_of_all_rails_is_measured_by_each_and_a_rule_that_comes_is_noticed(
    fabric: Fabric, agents: Callable[[int, list[str]], Agent], family: int
) -> None:
    service = SERVICE[family].format(host=2)
    fabric.source_table(1, 1)
    ours = agents(1, [service])
    agents(2, rails_of(1, family))
    by_rail = {path[2]: path for path in paths_to([service] * len(RAILS), family)}
    support.wait_until(lambda: ours.answering() == {by_rail["rail1"]}, 30, "the one path answers")
    fabric.source_table(2, 1)
    support.wait_until(lambda: ours.answering() == set(by_rail.values()), 20, "both do")
