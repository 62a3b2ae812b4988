"""The lab with real traffic: what it promises to the demo, the tests and the benchmarks."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import support
from click.testing import CliRunner

from pytools import config, directories
from pytools.errors import SwerveError, UsageError
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab, building, cli, clocks, fabric, namespaces, processes, state

RECEIVE = """
import socket, sys
box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
box.bind((sys.argv[1], 7000))
print("ready", flush=True)
seen = 0
while True:
    word = box.recv(100)
    if word == b"end":
        print(seen, flush=True)
        seen = 0
    else:
        seen += 1
"""
SEND = """
import socket, sys
for flow in range(int(sys.argv[2])):
    out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.sendto(b"x", (sys.argv[1], 7000))
"""
LAB = {"hosts": 3, "rate": "100mbit"}


class Receiver:
    """Counts UDP packets to one address of a host."""

    def __init__(self, lab, host, address):
        self.process = lab.start(host, [sys.executable, "-c", RECEIVE, address], stdout=subprocess.PIPE)
        self.netns, self.address = host.netns, address
        self.total = 0
        assert self.process.stdout.readline() == "ready\n"

    def count(self):
        """Packets so far: asked for from inside, so that no rail can lose or delay the question."""
        with inside(self.netns), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            out.sendto(b"end", (self.address, 7000))
        self.total += int(self.process.stdout.readline())
        return self.total

    def wait_for(self, packets):
        """Wait until so many have arrived; a queue or a busy processor may hold them for a while."""
        support.wait_until(lambda: self.count() >= packets, 10, f"{packets} packets arrive")
        assert self.total == packets


def send(lab, host, address, packets):
    lab.run(host, [sys.executable, "-c", SEND, address, str(packets)])


def goodput(lab, address, seconds=1):
    """What TCP brings host 2 from host 1, in bit/s; now and then iperf3 loses its control connection."""
    support.require("iperf3")
    found = {}
    for _ in range(3):
        server = lab.start(lab.hosts[1], ["iperf3", "-s", "-1", "--forceflush", "-B", address], stdout=subprocess.PIPE)
        for line in server.stdout:
            if "listening" in line:
                break
        words = ["iperf3", "-J", "-t", str(seconds), "-c", address]
        found = json.loads(lab.run(lab.hosts[0], words))
        if "sum_received" in found["end"]:
            return found["end"]["sum_received"]["bits_per_second"]
        server.kill()
        server.wait()
    raise AssertionError(f"iperf3: {found}")


def transmitted(netns):
    """Packets sent by each interface of a namespace."""
    shown = json.loads(support.run(["ip", "-n", netns, "-s", "-j", "link"]).stdout)
    return {each["ifname"]: each["stats64"]["tx"]["packets"] for each in shown}


def left_of(name):
    """Everything that a lab of this name still has."""
    files = [
        str(place)
        for base in (directories.runtime_dir(None).parent, directories.state_dir(None).parent)
        for place in base.rglob("*")
        if name in place.name
    ]
    return files + [each for each in namespaces.names() if name in each] + list(processes.marked(name))


@pytest.mark.guest
def test_every_service_address_is_reached_at_once_over_both_families(lab):
    support.require("ping")
    for source in lab.hosts:
        for destination in lab.hosts:
            assert support.pings(source, destination.service)
            assert support.pings(source, destination.service6)


def test_every_rail_address_is_reached_over_its_rail(lab):
    support.require("ping")
    for rail, interface in enumerate(lab.hosts[1].interfaces, start=1):
        before = transmitted(lab.hosts[0].netns)
        assert support.pings(lab.hosts[0], interface.address)
        assert support.pings(lab.hosts[0], interface.address6)
        after = transmitted(lab.hosts[0].netns)
        assert after[f"rail{rail}"] >= before[f"rail{rail}"] + 2


def test_flows_are_spread_over_both_rails_and_all_arrive(lab):
    receiver = Receiver(lab, lab.hosts[1], lab.hosts[1].service)
    before = transmitted(lab.hosts[0].netns)
    send(lab, lab.hosts[0], lab.hosts[1].service, 100)
    after = transmitted(lab.hosts[0].netns)
    receiver.wait_for(100)
    for rail in ("rail1", "rail2"):
        assert after[rail] - before[rail] >= 20


def test_one_group_per_destination_and_family_carries_the_route(lab):
    host = lab.hosts[0]
    with Netlink(host.netns) as netlink:
        groups = {group.id: group.weights for group in netlink.groups()}
        routes = {each.destination: each for each in netlink.routes(4) + netlink.routes(6)}
    assert groups == {102: {11: 1, 12: 1}, 103: {11: 1, 12: 1}, 202: {21: 1, 22: 1}, 203: {21: 1, 22: 1}}
    assert (routes["10.9.0.2/32"].nexthop_id, routes["10.9.0.2/32"].prefsrc) == (102, "10.9.0.1")
    assert (routes["fd00:9::3/128"].nexthop_id, routes["fd00:9::3/128"].prefsrc) == (203, "fd00:9::1")
    assert len(routes["10.9.0.2/32"].hops) == len(routes["fd00:9::3/128"].hops) == 2


def test_only_the_rails_shape_and_show_says_what_the_kernel_says(lab):
    lab.congest(2, "10mbit", toward=2)
    shown = lab.show()
    for rail, said in zip(lab.rails, shown["rails"], strict=True):
        queues = json.loads(support.run(["tc", "-n", rail.netns, "-j", "qdisc"]).stdout)
        kernel = {each["dev"]: each["options"] for each in queues if each["kind"] == "tbf"}
        assert {port["interface"] for port in said["ports"]} == set(kernel)
        for port in said["ports"]:
            assert port["rate_bit_s"] == kernel[port["interface"]]["rate"] * 8
            assert port["queue_bytes"] == 65536
            assert port["carrier"]
    assert shown["rails"][1]["ports"][1]["rate_bit_s"] == 10_000_000
    assert shown["rails"][1]["ports"][0]["rate_bit_s"] == 100_000_000
    for host in lab.hosts:
        kinds = {each["kind"] for each in json.loads(support.run(["tc", "-n", host.netns, "-j", "qdisc"]).stdout)}
        assert kinds == {"noqueue"}


def test_congestion_cuts_what_tcp_gets_and_healing_gives_it_back(lab):
    address = lab.hosts[1].interfaces[0].address
    healthy = goodput(lab, address)
    assert healthy <= 100e6
    lab.congest(1, "5mbit")
    assert goodput(lab, address) <= 5.2e6 < healthy
    lab.heal(1)
    assert goodput(lab, address) > 6e6


def test_other_traffic_fills_a_port_until_it_is_healed(lab):
    def waiting():
        ports = {port["interface"]: port for port in lab.show()["rails"][0]["ports"]}
        return ports["h2"]["waiting_bytes"] > 40_000 and ports["h2"]["dropped_packets"] > 0

    lab.congest(1, "10mbit")
    lab.load(1, "12mbit", toward=2)
    support.wait_until(waiting, 20, "the load fills the queue")
    ports = {port["interface"]: port for port in lab.show()["rails"][0]["ports"]}
    assert ports["h1"]["waiting_bytes"] == ports["h3"]["waiting_bytes"] == 0
    assert len(lab.show()["processes"]) == 1
    lab.heal(2)
    assert len(lab.show()["processes"]) == 1
    lab.heal(1)
    assert lab.show()["processes"] == []


def test_a_short_queue_loses_packets_and_counts_them(lab):
    receiver = Receiver(lab, lab.hosts[1], lab.hosts[1].interfaces[0].address)
    send(lab, lab.hosts[0], receiver.address, 1)  # the neighbours know each other: nothing is lost there
    receiver.wait_for(1)
    lab.congest(1, "100kbit", queue_bytes=4000)
    sent = arrived = dropped = 0

    def settled():
        nonlocal arrived, dropped
        (port,) = (each for each in lab.show()["rails"][0]["ports"] if each["interface"] == "h2")
        assert port["queue_bytes"] == 4000
        dropped = port["dropped_packets"]
        arrived = receiver.count() - 1
        return arrived + dropped >= sent

    # The queue holds some 90 of these. A burst of 200 fits a processor's backlog (1,000 packets) and a socket's buffer
    # (277), which lose packets too, and count them elsewhere, while their process or softirq does not run. A sender
    # that has to wait for a processor is too slow to fill the queue: then some more bursts do.
    while sent < 1_000 or (not dropped and sent < 20_000):
        send(lab, lab.hosts[0], receiver.address, 200)
        sent += 200
        support.wait_until(settled, 10, "every packet has arrived or was counted as lost")
    assert arrived + dropped <= sent + 10  # a few packets of neighbour and multicast discovery may be lost as well
    assert arrived > 0 < dropped


def test_a_blackhole_of_one_direction_leaves_the_other_and_the_carrier(lab):
    support.require("ping")
    first, second, third = lab.hosts
    there = Receiver(lab, second, second.interfaces[0].address)
    back = Receiver(lab, first, first.interfaces[0].address)
    lab.blackhole(1, (1, 2))
    send(lab, first, there.address, 10)
    send(lab, second, back.address, 10)
    back.wait_for(10)
    assert there.count() == 0
    assert support.pings(first, third.interfaces[0].address)
    assert support.pings(first, second.interfaces[1].address)
    assert support.pings(first, first.interfaces[0].gateway)
    assert all(port["carrier"] for rail in lab.show()["rails"] for port in rail["ports"])
    with Netlink(first.netns) as netlink:
        assert all(link.carrier for link in netlink.links())
        assert netlink.group(102).weights == {11: 1, 12: 1}
    lab.heal()
    send(lab, first, there.address, 10)
    there.wait_for(10)


def test_a_blackhole_holds_for_service_addresses_of_both_families(lab):
    support.require("ping")
    lab.blackhole(1)
    lab.blackhole(2, (1, 2))
    assert not support.pings(lab.hosts[0], lab.hosts[1].service)
    assert not support.pings(lab.hosts[0], lab.hosts[1].service6)
    lab.blackhole(2, (1, 2))  # a second time changes nothing
    lab.heal(2)
    assert not any(port["loses_packets_to"] for port in lab.show()["rails"][1]["ports"])
    assert all(port["loses_packets_to"] == ["everywhere"] for port in lab.show()["rails"][0]["ports"])


def test_an_unshaped_lab_can_be_congested_and_healed(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=1, rate="none") as lab:
        with pytest.raises(UsageError, match="no queue to congest"):
            lab.congest(1, queue_bytes=5000)
        lab.congest(1, "10mbit")
        assert [port["rate_bit_s"] for port in lab.show()["rails"][0]["ports"]] == [10_000_000] * 2
        lab.heal()
        assert [port["rate_bit_s"] for port in lab.show()["rails"][0]["ports"]] == [None] * 2


def test_the_agents_are_told_their_peers(unique_name):
    with Lab.up(unique_name(), hosts=3, rails=1, ipv6=True) as lab:
        told = config.load(directories.default_config(lab.hosts[2].netns))
    assert told.host == "h3"
    assert [peer.address for peer in told.peers] == ["10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2"]


def test_hosts_get_clocks_of_their_own_and_agents_that_talk(unique_name):
    wanted = clocks.draw(3, 5, 0, shared=[[1, 3]])
    with Lab.up(unique_name(), hosts=3, rails=1, ipv6=True, clocks=wanted) as lab:
        told = [config.load(directories.default_config(host.netns)) for host in lab.hosts]
        assert [lab.clock(host) for host in lab.hosts] == wanted == [lab.clock(number) for number in (1, 2, 3)]
        assert [clocks.load(Path(each.virtual_clock)) for each in told] == wanted
        assert {peer.clock for each in told for peer in each.peers} == {"free_running"}
        (key,) = {each.bus.key_file for each in told}
        assert Path(key).stat().st_mode & 0o777 == 0o600
        assert len(Path(key).read_bytes()) == 32
        again = Lab.open(lab.name)
        before = time.monotonic_ns()
        at_ns = again.step_clock(2, 10_000_000)
        assert at_ns > before
        assert lab.clock(2) == wanted[1].stepped(at_ns, 10_000_000)
        assert lab.clock(1) == wanted[0]
    assert left_of(lab.name) == []


def test_without_clocks_all_hosts_share_the_machines(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=1, bus=True) as lab:
        told = config.load(directories.default_config(lab.hosts[0].netns))
        assert told.virtual_clock == ""
        assert Path(told.bus.key_file).stat().st_size == 32
        assert {peer.clock for peer in told.peers} == {"shared"}
        with pytest.raises(UsageError, match="no clock of its own"):
            lab.clock(1)
    assert left_of(lab.name) == []


def test_two_keys_are_not_the_same(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=1, bus=True) as one, Lab.up(unique_name(), hosts=2, bus=True) as other:
        assert state.key_file(one.name).read_bytes() != state.key_file(other.name).read_bytes()


def test_two_labs_do_not_meet(lab, unique_name):
    support.require("ping")
    with Lab.up(unique_name(), hosts=2, rails=1) as other:
        lab.blackhole(1)
        lab.congest(2, "10mbit")
        assert support.pings(other.hosts[0], other.hosts[1].service)
        assert [port["rate_bit_s"] for port in other.show()["rails"][0]["ports"]] == [100_000_000] * 2
        assert {lab.name, other.name} <= set(state.labs())
    assert left_of(other.name) == []
    lab.heal()
    assert support.pings(lab.hosts[0], lab.hosts[1].service)


def test_a_name_that_is_taken_is_refused_and_the_lab_stays(lab):
    with pytest.raises(UsageError, match="already exists") as caught:
        Lab.up(lab.name, hosts=2, rails=1)
    assert f"down --name {lab.name}" in caught.value.next_step
    assert len(lab.show()["hosts"]) == 3


@pytest.mark.parametrize(
    "act",
    [
        lambda lab: lab.congest(3, "10mbit"),
        lambda lab: lab.congest(1, "10mbit", toward=4),
        lambda lab: lab.blackhole(0),
        lambda lab: lab.blackhole(1, (1, 9)),
        lambda lab: lab.blackhole(1, (1, 1)),
        lambda lab: lab.heal(3),
    ],
)
def test_what_is_not_there_cannot_be_harmed(lab, act):
    with pytest.raises(UsageError) as caught:
        act(lab)
    assert caught.value.next_step


def test_nothing_of_a_lab_stays(unique_name):
    lab = Lab.up(unique_name(), hosts=2, rails=2)
    stubborn = "trap '' TERM; (sleep 1000 & sleep 1000 & wait) & wait; while :; do wait; done"
    lab.start(lab.hosts[0], ["sh", "-c", stubborn])
    outside = Path(directories.state_dir(lab.hosts[0].netns))
    outside.mkdir(parents=True)
    (outside / "journal").write_text("x")
    support.wait_until(lambda: len(processes.marked(lab.name)) == 4, 10, "the process has its children")
    assert lab.down() == []
    assert left_of(lab.name) == []
    assert lab.down() == []


def test_a_process_that_the_lab_did_not_start_is_named_and_left(unique_name):
    lab = Lab.up(unique_name(), hosts=2, rails=1)
    with inside(lab.hosts[0].netns):
        foreign = subprocess.Popen(["sleep", "1000"])
    try:
        (said,) = lab.down()
        assert str(foreign.pid) in said
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()
    assert left_of(lab.name) == []


def test_a_lab_that_cannot_be_finished_is_removed(unique_name, monkeypatch):
    def fails(*_):
        raise SwerveError("no more")

    monkeypatch.setattr(building, "route_host", fails)
    name = unique_name()
    with pytest.raises(SwerveError, match="no more"):
        Lab.up(name, hosts=2, rails=1)
    assert left_of(name) == []


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        ("building._write_key", 1),
        ("namespaces.set_sysctls", 2),
        ("wiring.add_veth", 3),
        ("wiring.shape", 1),
        ("building._write_config", 2),
        ("clocks.save", 3),
    ],
)
def test_down_removes_what_a_killed_up_left(unique_name, function, calls):
    name = unique_name()
    module, attribute = function.split(".")
    script = f"""
import itertools, os, signal
from pytools.lab import Lab, building, clocks, namespaces, wiring
real, count = {function}, itertools.count(1)
def killed(*words):
    if next(count) == {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*words)
setattr({module}, {attribute!r}, killed)
Lab.up({name!r}, hosts=3, rails=2, clocks=1)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert left_of(name) != []
    with pytest.raises(UsageError, match="already exists"):
        Lab.up(name, hosts=2, rails=1)
    assert state.tear_down(name) == []
    assert left_of(name) == []


def test_a_lab_is_found_without_its_file(unique_name):
    name = unique_name()
    lab = Lab.up(name, hosts=2, rails=1)
    sleeper = lab.start(lab.hosts[0], ["sleep", "1000"])
    (directories.runtime_dir(None).parent / "labs" / f"{name}.json").unlink()
    assert name in state.labs()
    with pytest.raises(UsageError, match="without its description"):
        Lab.open(name)
    state.tear_down(name)
    assert sleeper.wait(timeout=10) == -signal.SIGTERM
    assert left_of(name) == []


def test_the_commands_do_it_all(unique_name):
    name = unique_name()

    def lab(*words):
        result = CliRunner().invoke(cli.lab, [words[0], "--name", name, *words[1:]], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    try:
        made = json.loads(
            lab("up", "--hosts", "3", "--rails", "1", "--rate", "50mbit", "--clocks", "7", "--share", "h1,h3", "--json")
        )
        assert (len(made["hosts"]), made["rate_bit_s"]) == (3, 50_000_000)
        truth = json.loads(lab("clock", "-j"))
        assert [each["host"] for each in truth["clocks"]] == ["h1", "h2", "h3"]
        assert truth["clocks"][1]["drift_ppb"] != truth["clocks"][2]["drift_ppb"] == 0
        stepped = json.loads(lab("clock", "--host", "h3", "--step", "-10ms", "-j"))
        assert fabric.Lab.open(name).clock(3).steps == (clocks.Step(stepped["at_ns"], -10_000_000),)
        assert f"{truth['clocks'][2]['offset_ns']:+,} ns, +0 ns/s, 1 step" in lab("clock")
        lab("delay", "--rail", "1", "--direction", "h2:h1", "--us", "300")
        lab("bursts", "--rail", "1", "--share", "0.1")
        commands = " ".join(each["command"] for each in json.loads(lab("show", "-j"))["processes"])
        assert "pytools.lab.delay_line hold2-1 300000 0" in commands
        assert f"pytools.lab.bursts {name} 1 0.1 1" in commands
        lab("congest", "--rail", "1", "--rate", "10mbit", "--toward", "h2")
        lab("blackhole", "--rail", "1", "--direction", "h1:h2")
        text = lab("show")
        assert "to h2, 10mbit" in text
        assert "loses what h1 sends to 10.1.2.2/32, 10.9.0.2/32" in text
        lab("heal")
        healed = lab("show")
        assert "loses" not in healed
        assert "process" not in healed
    finally:
        lab("down")
    assert left_of(name) == []


def test_settings_outside_the_namespaces_stay(unique_name):
    watched = [
        "ipv4/ip_forward",
        "ipv4/fib_multipath_hash_policy",
        "ipv4/conf/all/rp_filter",
        "ipv6/conf/all/forwarding",
    ]

    def read():
        return [(Path("/proc/sys/net") / each).read_text() for each in watched]

    before, where = read(), os.stat("/proc/thread-self/ns/net").st_ino
    with Lab.up(unique_name(), hosts=2, rails=1):
        assert read() == before
        assert os.stat("/proc/thread-self/ns/net").st_ino == where
    assert read() == before
