"""Congestion marks: told within a second on the path they came by, and counted as the kernel counts them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import bpf_objects
import pytest
import support
from watching import SECOND_NS, Watcher, watchers, work_for, work_until

from pytools.errors import UsageError
from pytools.kernel import netns
from pytools.lab import Host, Lab, filters
from pytools.signals import PathEcn

SO_MARK, TCLASS = 36, 67
MARKS = {"rail1": 501, "rail2": 502}  # also the numbers of the tables of the tests
ECT0, ECT1 = 2, 1
ADDRESSES = {4: ("10.9.0.1", "10.9.0.2"), 6: ("fd00:9::1", "fd00:9::2")}
INET = {4: socket.AF_INET, 6: socket.AF_INET6}
PORT = 7000
LAB = {"rate": "none", "ipv6": True}


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Watcher]]:
    made = watchers(lab)
    with contextlib.ExitStack() as sinks:
        # Never read; without them h1 would answer with ICMP errors, which copy the ECN field of what they are about.
        for family in (4, 6):
            with netns.inside(lab.hosts[0].netns):
                sink = sinks.enter_context(socket.socket(INET[family], socket.SOCK_DGRAM))
            sink.bind((ADDRESSES[family][0], PORT))
        yield made
    assert not any([each.close() for each in made]), "close must leave no rule and no table"


def kernel_counts(host: Host, family: int) -> tuple[int, int]:
    """Packets received that can be marked, and those that are, by the kernel's own count of the namespace."""
    with netns.inside(host.netns):
        if family == 6:
            words = Path("/proc/thread-self/net/snmp6").read_text().split()
            known = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            names = ("Ip6InECT0Pkts", "Ip6InECT1Pkts", "Ip6InCEPkts")
        else:
            names_line, values_line = [
                line.split()[1:]
                for line in Path("/proc/thread-self/net/netstat").read_text().splitlines()
                if line.startswith("IpExt:")
            ]
            known = dict(zip(names_line, map(int, values_line), strict=True))
            names = ("InECT0Pkts", "InECT1Pkts", "InCEPkts")
    return sum(known[name] for name in names), known[names[-1]]


def sending(watcher: Watcher, family: int, rail: str, kind: int = socket.SOCK_DGRAM) -> socket.socket:
    """A socket of a host whose packets take a rail."""
    with netns.inside(watcher.namespace):
        made = socket.socket(INET[family], kind)
    lead_along(watcher, family, rail)
    made.setsockopt(socket.SOL_SOCKET, SO_MARK, MARKS[rail])
    return made


def lead_along(watcher: Watcher, family: int, rail: str) -> None:
    """Have marked packets take a rail, by a rule and a table of the test's own."""
    address = ADDRESSES[family][1 if watcher.config.host == "h1" else 0]
    (path,) = [p.path for p in watcher.mesh.paths.current if (p.path.address, p.path.interface) == (address, rail)]
    mark = str(MARKS[rail])
    ip = ["ip", "-n", watcher.namespace, f"-{family}"]
    if f"lookup {mark}" not in support.run([*ip, "rule"]).stdout:
        support.run([*ip, "rule", "add", "fwmark", mark, "table", mark])
    support.run([*ip, "route", "replace", "default", "via", path.gateway, "dev", rail, "table", mark])


def send_able(watcher: Watcher, family: int, rail: str, count: int, ecn: int = ECT0) -> None:
    """Datagrams from h2 to h1 that can be marked; nobody answers them."""
    with sending(watcher, family, rail) as out:
        if family == 4:
            out.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, ecn)
        else:
            out.setsockopt(socket.IPPROTO_IPV6, TCLASS, ecn)
        out.bind((ADDRESSES[family][1], 0))
        for _ in range(count):
            out.sendto(b"x" * 100, (ADDRESSES[family][0], PORT))


def told(watcher: Watcher, family: int, rail: str, packets: int) -> Callable[[], PathEcn | None]:
    """The latest word on a path once it counts so many packets."""

    def ask() -> PathEcn | None:
        of_path = [
            each for each in watcher.ecns if each.path.address == ADDRESSES[family][1] and each.path.interface == rail
        ]
        return of_path[-1] if of_path and of_path[-1].total_packets >= packets else None

    return ask


@pytest.mark.parametrize("family", [4, 6])
def test_marks_are_told_within_a_second_and_counted_exactly(lab: Lab, hosts: list[Watcher], family: int) -> None:
    first, second = hosts
    work_until(hosts, lambda: first.ecns, "the first window is over")
    lab.mark(1, every=3)
    send_able(second, family, "rail2", 40)
    since_ns = time.monotonic_ns()
    send_able(second, family, "rail1", 100)
    send_able(second, family, "rail1", 20, ECT1)
    event, *_ = work_until(hosts, lambda: list(first.events), "the marks are told of")
    assert (event.what, event.interface) == ("ce_marked", "rail1")
    assert event.at_ns - since_ns <= SECOND_NS * support.slow_factor()
    (path,) = event.paths
    assert (path.source, path.destination, path.address) == ("h1", "h2", ADDRESSES[family][1])

    seen = work_until(hosts, told(first, family, "rail1", 120), "the window with all of them is over")
    assert lab.counts(1)["able"] == 120
    assert 38 <= lab.counts(1)["marked"] <= 40, "every third, by each CPU"
    assert (seen.total_packets, seen.total_ce_packets) == (120, lab.counts(1)["marked"])
    windows = [each for each in first.ecns if each.path == seen.path]
    assert sum(each.packets for each in windows) == 120
    assert sum(each.ce_packets for each in windows) == seen.total_ce_packets

    def all_told() -> bool:
        return sum(each.values["ce_packets"] for each in first.events) == seen.total_ce_packets

    work_until(hosts, all_told, "all are told of")
    other = work_until(hosts, told(first, family, "rail2", 40), "the other rail's window is over")
    assert (other.total_packets, other.total_ce_packets) == (40, 0)
    assert kernel_counts(lab.hosts[0], family) == (160, seen.total_ce_packets)
    assert second.events == []

    lab.heal(1)
    assert lab.counts(1) == {}
    first.events.clear()
    send_able(second, family, "rail1", 50)
    after = work_until(hosts, told(first, family, "rail1", 170), "the window with the unmarked ones is over")
    assert after.total_ce_packets == seen.total_ce_packets
    assert first.events == []


@pytest.mark.parametrize("family", [4, 6])
def test_segments_of_large_buffers_are_counted_one_by_one(lab: Lab, hosts: list[Watcher], family: int) -> None:
    """TCP with ECN over devices that hand on buffers of many segments: as the kernel counts, whatever was merged."""
    first, second = hosts
    for host in lab.hosts:
        with netns.inside(host.netns):
            Path("/proc/sys/net/ipv4/tcp_ecn").write_text("1\n")
    lab.mark(1, every=400)  # a buffer is marked as a whole
    total = 6_000_000
    with netns.inside(lab.hosts[0].netns):
        listener = socket.socket(INET[family], socket.SOCK_STREAM)
    with listener, sending(second, family, "rail1", socket.SOCK_STREAM) as out:
        listener.bind((ADDRESSES[family][0], PORT))
        listener.listen()
        out.bind((ADDRESSES[family][1], 0))
        out.connect((ADDRESSES[family][0], PORT))
        sink, _ = listener.accept()
        with sink:
            sender = threading.Thread(target=out.sendall, args=(bytes(total),))
            sender.start()
            got = 0
            while got < total:
                got += len(sink.recv(1 << 20))
            sender.join()
    packets, marked = kernel_counts(lab.hosts[0], family)
    assert marked > 0
    assert packets > 2 * marked
    seen = work_until(hosts, told(first, family, "rail1", packets), "the window with all of them is over")
    assert (seen.total_packets, seen.total_ce_packets) == (packets, marked)
    assert marked <= lab.counts(1)["marked"], "acknowledgements the other way may be marked as well"


def test_marks_that_go_on_are_told_of_once_a_second(lab: Lab, hosts: list[Watcher]) -> None:
    first, second = hosts
    lab.mark(1)
    until_ns = time.monotonic_ns() + 4 * SECOND_NS
    sent = 0
    while time.monotonic_ns() < until_ns:
        send_able(second, 4, "rail1", 5)
        sent += 5
        work_for(hosts, 0.02)
    work_until(hosts, told(first, 4, "rail1", sent), "all are counted")
    work_until(hosts, lambda: sum(event.values["ce_packets"] for event in first.events) == sent, "all are told of")
    times = [event.at_ns for event in first.events]
    assert len(times) >= 3
    assert all(later - earlier >= SECOND_NS for earlier, later in itertools.pairwise(times))


def test_what_cannot_be_marked_stays_as_it_was(lab: Lab, hosts: list[Watcher]) -> None:
    first, second = hosts
    lab.mark(1)
    send_able(second, 4, "rail1", 30, ecn=0)
    send_able(second, 4, "rail1", 1)
    seen = work_until(hosts, told(first, 4, "rail1", 1), "the one that can be marked is counted")
    assert (seen.total_packets, seen.total_ce_packets) == (1, 1)
    assert kernel_counts(lab.hosts[0], 4) == (1, 1)


def test_a_rail_has_one_mark_at_a_time_and_one_port_may_have_it_alone(lab: Lab, hosts: list[Watcher]) -> None:
    first, second = hosts
    lab.mark(1, toward=2)
    with pytest.raises(UsageError, match="this fault already"):
        lab.mark(1)
    send_able(second, 4, "rail1", 10)
    seen = work_until(hosts, told(first, 4, "rail1", 10), "they are counted")
    assert seen.total_ce_packets == 0, "they went towards h1"
    lab.heal()
    lab.mark(1, toward=1)
    send_able(second, 4, "rail1", 10)
    assert work_until(hosts, told(first, 4, "rail1", 20), "they are counted").total_ce_packets == 10


def test_down_takes_the_programs_with_it(unique_name: Callable[[], str]) -> None:
    support.require("bcc", "netns")
    with Lab.up(unique_name(), hosts=2, rails=2, rate="none") as lab:
        lab.mark(1)
        lab.mtu(2, 1400, silent=True)
        assert lab.show()["rails"][0]["faults"] == {"able": 0, "marked": 0}
        assert lab.show()["rails"][1]["faults"] == {"too_long": 0}
        maps = [number for rail in lab.rails for _, number in filters.programs(rail, rail.ports)]
        assert len(maps) == 2

    def gone() -> bool:
        return bpf_objects.numbered().isdisjoint(("map", number) for number in maps)

    support.wait_until(gone, 20, "the programs are gone with the namespaces")
