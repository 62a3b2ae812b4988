"""Ways behind the first hop, by agents in a lab whose rail hashes flows over four: all met, the bad ones named."""

from __future__ import annotations

import contextlib

import pytest
import steering_kit as kit
import support
import yaml

from pytools import directories
from pytools.ipc.bus import Client
from pytools.lab import namespaces

LAB = {"hosts": 2, "rails": 1, "ipv6": True, "inner": 4}


@pytest.fixture
def told(lab):
    """The latest word on every way of h1's paths, by address and router; the sweep is as fast as may be."""
    for host in lab.hosts:
        file = directories.default_config(host.netns)
        config = yaml.safe_load(file.read_text())
        config["probe"] = config.get("probe", {}) | {"sweep_per_s": 40}
        file.write_text(yaml.safe_dump(config))
    kit.agents(lab)
    known = {}
    with contextlib.closing(Client(directories.agent_socket(lab.hosts[0].netns), frozenset({"path_way"}))) as client:

        def hear():
            for each in client.read():
                if not each.router:
                    continue
                known[each.path.address, each.router] = each
            return known

        yield hear


def routers(lab, way, family):
    """The addresses by which a way answers h1."""
    port = lab.rails[0].inner[way - 1].ports[0]
    return port.address if family == 4 else port.address6


def state(known, lab, family):
    address = lab.hosts[1].service if family == 4 else lab.hosts[1].service6
    found = {way: known.get((address, routers(lab, way, family))) for way in (1, 2, 3, 4)}
    return [each.state if each is not None else None for each in found.values()], found


def told_together(known, lab, family):
    """Whether these are the ways of one look: a port may be another way's at the next."""
    return len({each and each.at_ns for each in state(known, lab, family)[1].values()}) == 1


def wait_for(lab, told, wanted, families=(4, 6), seconds=100):
    def all_are():
        known = told()
        return all(state(known, lab, family)[0] == wanted for family in families)

    support.wait_until(all_are, seconds, f"the ways are {wanted}")
    return told()


@pytest.mark.deadline(240)
def test_all_ways_are_met_and_the_slow_and_the_dead_one_are_named(lab, told):
    wait_for(lab, told, ["healthy"] * 4)
    for family in (4, 6):
        support.wait_until(lambda family=family: told_together(told(), lab, family), 60, "all ways are told at once")
        _, found = state(told(), lab, family)
        ports = [port for each in found.values() for port in each.ports]
        assert len(set(ports)) == len(ports) == found[1].ports_in_all >= 28
        assert all((each.ways, each.differs_at) == (4, 2) and each.confidence >= 0.95 for each in found.values())
    lab.congest(1, "10mbit", 40_000, toward=2, inner=2)
    lab.load(1, "11mbit", toward=2, inner=2)
    lab.blackhole(1, None, inner=3)
    wait_for(lab, told, ["healthy", "slow", "dead", "healthy"])

    def located():
        found = [state(told(), lab, family)[1] for family in (4, 6)]
        return all((each[2].sick_hop, each[3].sick_hop) == (2, 1) for each in found)

    support.wait_until(located, 100, "the queue is behind the way's router, the loss before it")
    lab.heal()
    wait_for(lab, told, ["healthy"] * 4)


@pytest.mark.deadline(180)
def test_loss_of_all_ways_calls_none_dead(lab, told):
    for way in lab.rails[0].inner:
        namespaces.set_sysctls(way.netns, {"ipv4/icmp_ratelimit": 0, "ipv6/icmp/ratelimit": 0})  # met sooner
    wait_for(lab, told, ["healthy"] * 4)
    lab.lose(1, 0.2)
    worst = []

    def many_lost():
        found = [each for family in (4, 6) for each in state(told(), lab, family)[1].values()]
        worst.extend(each.state for each in found)
        return all(each.lost >= 2 and each.sent >= 20 for each in found)

    support.wait_until(many_lost, 60, "20 % of the probes of every way are lost")
    assert "dead" not in worst
