"""Longer ways and bursts in the lab, with real packets."""

import re
import socket

import pytest
import support

from pytools.errors import SwerveError, UsageError
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab, processes

SO_RCVBUFFORCE = 33  # Python has no name for it
EXTRA_US = 100_000  # so much that no busy machine adds as much again
LAB = {"hosts": 3, "rate": "20mbit"}


def round_trip_ms(lab, source, destination):
    """The smallest of several."""
    support.require("ping")
    told = lab.run(source, ["ping", "-n", "-q", "-c4", "-i0.05", "-W5", destination])
    return float(re.findall(r"= ([\d.]+)/", told)[0])


def addresses_over(host, rail):
    return host.interfaces[rail - 1].address, host.interfaces[rail - 1].address6


def rules_of(rail):
    with Netlink(rail.netns) as netlink:
        return netlink.rules(4) + netlink.rules(6)


def test_packets_one_way_take_longer_and_all_others_do_not(lab):
    first, second, third = lab.hosts
    before = rules_of(lab.rails[0])
    lab.delay(1, 1, 2, EXTRA_US)
    for address in addresses_over(second, 1):
        assert EXTRA_US / 1000 <= round_trip_ms(lab, first, address) < 2 * EXTRA_US / 1000
    for source, destination, rail in ((first, second, 2), (first, third, 1), (second, third, 1)):
        for address in addresses_over(destination, rail):
            assert round_trip_ms(lab, source, address) < EXTRA_US / 1000
    with pytest.raises(UsageError, match="delays packets from h1 to h2 already"):
        lab.delay(1, 1, 2, 5)
    lab.delay(1, 2, 1, EXTRA_US)
    assert round_trip_ms(lab, first, addresses_over(second, 1)[0]) >= 2 * EXTRA_US / 1000
    lab.heal(1)
    assert round_trip_ms(lab, first, addresses_over(second, 1)[0]) < EXTRA_US / 1000
    assert rules_of(lab.rails[0]) == before
    assert processes.marked(lab.name) == {}


def test_service_addresses_take_the_longer_way_too(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=1) as lab:
        lab.delay(1, 1, 2, EXTRA_US)
        for address in (lab.hosts[1].service, lab.hosts[1].service6):
            assert round_trip_ms(lab, lab.hosts[0], address) >= EXTRA_US / 1000


def test_many_packets_are_held_at_once_and_arrive_in_order(lab):
    first, second = lab.hosts[:2]
    with inside(second.netns):
        sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(first.netns):
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sink, out:
        sink.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 4 << 20)  # they come all at once
        sink.bind((second.interfaces[0].address, 7000))
        lab.delay(1, 1, 2, EXTRA_US)
        for number in range(400):
            out.sendto(number.to_bytes(2), sink.getsockname())
        sink.settimeout(20)
        assert [int.from_bytes(sink.recv(10)) for _ in range(400)] == list(range(400))


def test_tcp_goes_the_longer_way_whole(lab):
    """Segments that were one large packet when they left, and checksums that nobody had computed yet."""
    first, second = lab.hosts[:2]
    lab.delay(1, 1, 2, 1000)
    with inside(second.netns):
        listener = socket.create_server((second.interfaces[0].address, 7000))
    with inside(first.netns):
        out = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener, out:
        out.settimeout(20)
        out.connect(listener.getsockname())
        end, _ = listener.accept()
        with end:
            sent = bytes(range(256)) * 200
            out.sendall(sent)
            out.shutdown(socket.SHUT_WR)
            received = b""
            while part := end.recv(1 << 16):
                received += part
    assert received == sent


def test_a_holder_that_dies_leaves_the_way_as_it_was(lab):
    lab.delay(1, 1, 2, EXTRA_US)
    processes.end(lab.name, load=1)
    assert round_trip_ms(lab, lab.hosts[0], addresses_over(lab.hosts[1], 1)[0]) < EXTRA_US / 1000


def test_a_holder_that_cannot_begin_says_why(lab, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SwerveError, match=r"pytools\.lab\.delay_line"):
        lab.delay(1, 1, 2, EXTRA_US)
    assert [rule for rule in rules_of(lab.rails[0]) if rule.iif] == []


def test_bursts_reach_every_port_of_their_rail_until_it_is_healed(lab):
    lab.bursts(1, 0.5)

    def sent():
        counted = lab.sent_bytes()
        return {rail: [counted[rail, host] for host in (1, 2, 3)] for rail in (1, 2)}

    before = sent()
    support.wait_until(lambda: min(sent()[1]) > max(before[1]) + 500_000, 60, "every port has sent half a megabyte")
    assert max(sent()[2]) < 100_000
    assert len(processes.marked(lab.name)) == 1
    lab.heal(1)
    assert processes.marked(lab.name) == {}


def test_an_unshaped_lab_has_no_share_to_fill(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=1, rate="none") as lab:
        with pytest.raises(UsageError, match="no rate"):
            lab.bursts(1, 0.5)
        assert lab.sent_bytes() == {}
        with pytest.raises(UsageError, match="out of range"):
            lab.bursts(1, 1.5)
