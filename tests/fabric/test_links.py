"""What happens to links of a lab is told with the right interface and paths, and counted as the kernel counts it."""

from __future__ import annotations

import itertools
import socket
import subprocess
from pathlib import Path

import pytest
import support
from link_watch import Watching, kernel_link, kernel_queues, watching

from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Link
from pytools.signals import Path as NetworkPath

pytestmark = pytest.mark.beside

RAILS = ("rail1", "rail2")
SOON_S = 1.0  # in which an event is told
LAB = {"hosts": 3}


def paths(lab: Lab) -> list[NetworkPath]:
    """Every path of host 1, as a mesh would have it."""
    return [
        NetworkPath("h1", other.name, other.service, interface.gateway, interface.name)
        for other in lab.hosts[1:]
        for interface in lab.hosts[0].interfaces
    ]


def over(lab: Lab, interface: str) -> list[NetworkPath]:
    return [path for path in paths(lab) if path.interface == interface]


def agrees_with_the_kernel(link: Link, netns: str) -> bool:
    """Every count of a reading equals iproute2's, made now."""
    shown = kernel_link(netns, link.interface)
    sent, received, mine = shown["stats64"]["tx"], shown["stats64"]["rx"], link.counters
    counters = (
        (mine.sent_bytes, mine.sent_packets, mine.sent_errors, mine.sent_drops),
        (mine.received_bytes, mine.received_packets, mine.received_errors, mine.received_drops),
    )
    kernel = tuple(tuple(each[name] for name in ("bytes", "packets", "errors", "dropped")) for each in (sent, received))
    queues = [
        (each.kind, each.drops, each.overlimits, each.requeues, each.backlog_bytes, each.backlog_packets)
        for each in link.qdiscs
    ]
    shown_queues = [
        tuple(each[name] for name in ("kind", "drops", "overlimits", "requeues", "backlog", "qlen"))
        for each in kernel_queues(netns, link.interface)
    ]
    return (counters, queues, link.mtu_bytes) == (kernel, shown_queues, shown["mtu"])


@pytest.mark.guest
def test_a_flap_is_told_with_its_interface_its_paths_and_its_times(lab: Lab) -> None:
    host, rail = lab.hosts[0], lab.rails[0]
    known = paths(lab)
    with watching(host.netns, lambda: RAILS, lambda: known) as work:
        support.run(["ip", "-n", rail.netns, "link", "set", "h1", "down"])
        lost = work.event("carrier_lost", "rail1", SOON_S)
        known[:] = over(lab, "rail2")  # the routes went with the carrier
        work.until(lambda: not work.link("rail1").carrier, "the link is shown without a carrier")
        for _ in range(3):  # each a window; in the meantime it is seen that the paths are gone
            work.link("rail1")
        support.run(["ip", "-n", rail.netns, "link", "set", "h1", "up"])
        found, flap = work.event("carrier_found", "rail1", SOON_S), work.event("flap", "rail1", SOON_S)
        assert lost.paths == found.paths == flap.paths == over(lab, "rail1")
        assert flap.values["lost_ns"] == lost.happened_ns < flap.values["found_ns"] == found.happened_ns
        assert flap.values["down_ns"] == found.happened_ns - lost.happened_ns
        assert flap.values["flaps"] == 1
        kernel = kernel_link(host.netns, "rail1")["stats64"]["tx"]["carrier_changes"]
        assert work.link("rail1").carrier_changes == found.values["carrier_changes"] == kernel
        assert {each.interface for each in work.events} == {"rail1"}
        with inside(host.netns):
            index = socket.if_nametoindex("rail1")
        assert work.carriers == [(index, False), (index, True)]


def flood(lab: Lab, interface: int) -> subprocess.Popen[str]:
    """More UDP from host 1 to host 2 by one rail than its shaper lets through; ends when the lab does."""
    address = lab.hosts[1].interfaces[interface - 1].address
    server = lab.start(lab.hosts[1], ["iperf3", "-s", "--forceflush", "-B", address], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert any("listening" in line for line in server.stdout)
    return lab.start(lab.hosts[0], ["iperf3", "-u", "-b", "20M", "-l", "1200", "-t", "60", "-c", address])


def test_a_full_queue_is_told_with_its_interface_paths_and_drops(lab: Lab) -> None:
    support.require("iperf3", "tc")
    host = lab.hosts[0]
    shaper = ["tbf", "rate", "5mbit", "burst", "5000", "limit", "30000"]
    support.run(["tc", "-n", host.netns, "qdisc", "add", "dev", "rail2", "root", *shaper])
    with watching(host.netns, lambda: RAILS, lambda: paths(lab)) as work:
        traffic = flood(lab, 2)
        support.wait_until(lambda: kernel_queues(host.netns, "rail2")[0]["drops"], 10, "the shaper drops packets")
        work.event("queue_full", "rail2", SOON_S)
        work.until(lambda: [each.what for each in work.events].count("queue_full") >= 3, "three events of a full queue")
        traffic.terminate()
        traffic.wait()
        full = [each for each in work.events if each.what == "queue_full"]
        assert {each.interface for each in full} == {"rail2"}
        assert all(each.paths == over(lab, "rail2") for each in full)
        assert all(each.values["limit_bytes"] == 30_000 for each in full)
        gaps = [later.happened_ns - before.happened_ns for before, later in itertools.pairwise(full)]
        assert min(gaps) >= 1_000_000_000

        def quiet() -> Link | None:
            link = work.link("rail2")
            return link if drained(link, work) and agrees_with_the_kernel(link, host.netns) else None

        last = work.until(quiet, "the queue is empty, all its drops are told, and iproute2 shows the same", 20)
        assert dropped(last) == sum(each.values["drops"] for each in work.events if each.what == "queue_full") > 0


def dropped(link: Link) -> int:
    return sum(queue.drops for queue in link.qdiscs)


def drained(link: Link, work: Watching) -> bool:
    told = sum(each.values["drops"] for each in work.events if each.what == "queue_full")
    return told == dropped(link) and not any(queue.backlog_bytes for queue in link.qdiscs)


@pytest.mark.guest
def test_counts_equal_the_kernels(lab: Lab) -> None:
    support.require("ping", "tc")
    host = lab.hosts[0]
    with watching(host.netns, lambda: RAILS, lambda: paths(lab)) as work:
        for rail in (1, 2):
            lab.run(host, ["ping", "-n", "-c2", "-i0.01", "-W5", lab.hosts[1].interfaces[rail - 1].address])
        for interface in RAILS:
            work.until(
                lambda interface=interface: agrees_with_the_kernel(work.link(interface), host.netns),  # type: ignore[misc]
                f"a reading of {interface} is what iproute2 shows at the same moment",
            )
            assert work.link(interface).counters.sent_packets >= 2
            assert work.link(interface).paths == over(lab, interface)


def failed_in_kernel(netns: str, address: str) -> bool:
    return "FAILED" in support.run(["ip", "-n", netns, "neigh", "show", address]).stdout


def test_a_gateway_that_does_not_answer_is_told_with_its_paths(lab: Lab) -> None:
    host, rail = lab.hosts[0], lab.rails[1]
    gateway = host.interfaces[1].gateway
    support.require("ping")
    with watching(host.netns, lambda: RAILS, lambda: paths(lab)) as work:
        Path("/proc/sys/net/ipv4/neigh/rail2/retrans_time_ms").write_text("50")  # of the namespace that is watched
        support.run(["ip", "-n", rail.netns, "link", "set", "h1", "arp", "off"])
        lab.run(host, ["ip", "neigh", "flush", "dev", "rail2"])
        ping = lab.start(host, ["ping", "-n", "-i0.2", "-W1", lab.hosts[1].interfaces[1].address])
        support.wait_until(lambda: failed_in_kernel(host.netns, gateway), 10, "the kernel has given the gateway up")
        failed = work.event("neighbour_failed", "rail2", SOON_S)
        assert failed.paths == over(lab, "rail2")
        assert gateway in failed.detail
        assert work.link("rail2").failed_neighbours == [gateway]
        support.run(["ip", "-n", rail.netns, "link", "set", "h1", "arp", "on"])
        back = work.event("neighbour_reachable", "rail2")
        assert back.values["down_ns"] == back.happened_ns - failed.happened_ns
        assert work.link("rail2").failed_neighbours == []
        ping.terminate()
        ping.wait()
        assert work.told().count(("neighbour_failed", "rail2")) == 1  # the kernel tried more than once
        assert {each.interface for each in work.events} == {"rail2"}
