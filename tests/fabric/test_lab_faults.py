"""Cut cables and dead hosts: what exactly is lost, what each end notices, and that healing undoes it."""

from __future__ import annotations

import json
import re
import sys

import pytest
import support
from click.testing import CliRunner

from pytools.errors import SwerveError, UsageError
from pytools.kernel.netlink.routing import Netlink
from pytools.lab import cli

pytestmark = pytest.mark.beside

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
LAB = {"hosts": 3}
NEEDS = ("ping",)


def wait_for_ping(lab, place, address):
    """After a silence the kernel asks for its neighbour once a second, so the first ping may come too early."""
    support.wait_until(lambda: support.pings(place, address), 10, f"{address} answers {place.name}")


def carriers(lab):
    """Whether each end of each cable has its carrier according to iproute2, by namespace and name."""
    found = {}
    for each in (*lab.hosts, *lab.rails):
        for link in json.loads(support.run(["ip", "-n", each.netns, "-j", "link"]).stdout):
            if link["ifname"] != "lo":
                found[each.name, link["ifname"]] = "LOWER_UP" in link["flags"]
    return found


def routing(host):
    """Nexthops, groups and routes of a host according to iproute2."""
    said = [json.loads(support.run(["ip", "-n", host.netns, "-j", "nexthop"]).stdout)]
    said += [
        json.loads(support.run(["ip", "-n", host.netns, *family, "-j", "route"]).stdout) for family in ((), ("-6",))
    ]
    return [sorted(json.dumps(each, sort_keys=True) for each in several) for several in said]


def test_a_silent_cut_loses_everything_on_one_cable_and_nobody_notices(lab):
    first, second, third = lab.hosts
    gateway = first.interfaces[0].gateway
    assert support.pings(first, gateway)
    before = [routing(host) for host in lab.hosts]
    lab.cut(1, host=1)
    assert not support.pings(first, gateway), "the rail itself is silent, too"
    assert not support.pings(lab.rails[0], first.interfaces[0].address), "and hears nothing"
    assert not support.pings(first, first.interfaces[0].gateway6)
    assert not support.pings(first, second.interfaces[0].address)
    assert support.pings(first, second.interfaces[1].address)
    assert support.pings(second, third.interfaces[0].address), "the rail's other cables work"
    assert all(carriers(lab).values())
    assert [routing(host) for host in lab.hosts] == before
    assert lab.counts(1)["lost"] >= 4
    assert lab.counts(2) == {}
    lab.heal()
    wait_for_ping(lab, first, gateway)
    wait_for_ping(lab, first, second.interfaces[0].address)
    assert lab.counts(1) == {}


def test_every_packet_on_a_cut_cable_is_counted_once(lab):
    first = lab.hosts[0]
    gateway = first.interfaces[0].gateway
    assert support.pings(first, gateway)  # the neighbours know each other for the next seconds
    lab.cut(1, host=1)
    before = lab.counts(1)["lost"]
    with pytest.raises(SwerveError):
        lab.run(first, ["ping", "-n", "-c50", "-i0.01", "-W0.2", gateway])
    assert 50 <= lab.counts(1)["lost"] - before <= 60  # and what neighbour discovery adds


def test_a_random_share_is_lost_towards_one_host_and_counted(lab):
    first, second, third = lab.hosts
    assert support.pings(first, first.interfaces[0].gateway)  # the neighbours know each other for the next seconds
    lab.lose(1, 0.3, toward=1)
    many = ["ping", "-n", "-q", "-i0.002", "-c400", "-W0.2"]
    said = lab.run(first, [*many, first.interfaces[0].gateway])
    received, lost = int(re.findall(r"(\d+) received", said)[0]), lab.counts(1)["lost_at_random"]
    assert 400 <= received + lost <= 410, "and what neighbour discovery adds"
    assert 60 <= lost <= 180, "30 % of 400: outside once in 10^9 runs"
    assert "400 received" in lab.run(second, [*many, third.interfaces[0].address]), "other ports lose nothing"
    with pytest.raises(UsageError, match="already"):
        lab.lose(1, 0.1, toward=1)
    lab.cut(1, host=1)
    assert not support.pings(first, first.interfaces[0].gateway), "a cut cable loses all, whatever it lost before"
    lab.heal()
    assert lab.counts(1) == {}
    wait_for_ping(lab, first, first.interfaces[0].gateway)


def test_a_whole_rail_is_cut_and_a_second_cut_changes_nothing(lab):
    lab.cut(1, host=2)
    lab.cut(1)
    lab.cut(1)
    for host in lab.hosts:
        assert not support.pings(host, host.interfaces[0].gateway)
        assert support.pings(host, host.interfaces[1].gateway)
    lab.heal(1)
    for host in lab.hosts:
        wait_for_ping(lab, host, host.interfaces[0].gateway)


def test_a_lost_carrier_takes_the_hosts_nexthops_and_healing_gives_the_rail_back(lab):
    first, second, _ = lab.hosts
    before, rails_before = [routing(host) for host in lab.hosts], [routing(rail) for rail in lab.rails]
    lab.cut(1, host=1, carrier=True)
    lost = {place for place, carrier in carriers(lab).items() if not carrier}
    assert lost == {("h1", "rail1"), ("r1", "h1")}
    with Netlink(first.netns) as netlink:  # the kernel deletes them a moment after the carrier has gone
        support.wait_until(lambda: {each.id for each in netlink.nexthops()} == {12, 22}, 20, "two nexthops have gone")
        assert netlink.group(102).weights == {12: 1}
    assert [routing(host) for host in lab.hosts[1:]] == before[1:], "the others cannot know"
    # From that rail's own address: answers to the service address would take either rail, as this boot's hash has it.
    assert support.pings(first, second.service, first.interfaces[1].address), "over the other rail"
    lab.heal(1)
    assert all(carriers(lab).values())
    support.wait_until(lambda: [routing(rail) for rail in lab.rails] == rails_before, 10, "the rail's routes are back")
    with Netlink(first.netns) as netlink:
        assert netlink.group(102).weights == {12: 1}, "nobody has put it back"
    lab.heal(1, routes=True)
    assert [routing(host) for host in lab.hosts] == before
    for address in (second.interfaces[0].address, second.interfaces[0].address6):
        wait_for_ping(lab, first, address)


def test_a_dead_host_is_silent_on_every_rail_and_its_processes_are_gone(lab):
    first, second, third = lab.hosts
    mourned, survivor = lab.start(second, SLEEP), lab.start(first, SLEEP)
    assert support.pings(first, second.service)
    killed = lab.kill_host(2)
    assert [str(mourned.pid) in line for line in killed] == [True]
    assert mourned.wait(20) == -9
    assert survivor.poll() is None
    for interface in second.interfaces:
        assert not support.pings(first, interface.address)
    for interface in third.interfaces:
        assert support.pings(first, interface.address)
    assert all(carriers(lab).values())
    lab.heal()
    wait_for_ping(lab, first, second.service)


@pytest.mark.parametrize(
    "act",
    [
        lambda lab: lab.cut(3),
        lambda lab: lab.cut(1, host=4),
        lambda lab: lab.cut(1, host=0, carrier=True),
        lambda lab: lab.kill_host(4),
        lambda lab: lab.lose(3, 0.5),
        lambda lab: lab.lose(1, 1.0),
    ],
)
def test_what_cannot_be_is_refused(lab, act):
    with pytest.raises(UsageError) as caught:
        act(lab)
    assert caught.value.next_step


def test_the_commands_cut_kill_and_heal(lab):
    def command(*words):
        result = CliRunner().invoke(cli.lab, [words[0], "--name", lab.name, *words[1:]], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    sleeper = lab.start(lab.hosts[1], SLEEP)
    before = routing(lab.hosts[0])
    command("cut", "--rail", "1", "--host", "h1")
    assert " packets lost" in command("show")
    command("cut", "--rail", "2", "--host", "h1", "--carrier")
    command("lose", "--rail", "2", "--share", "0.5", "--toward", "h3")
    assert " lost at random" in command("show")
    assert "no carrier" in command("show")
    assert f"killed: {sleeper.pid} " in command("kill-host", "--host", "h2")
    command("heal", "--routes")
    shown = command("show")
    assert " lost" not in shown and "no carrier" not in shown
    assert routing(lab.hosts[0]) == before
