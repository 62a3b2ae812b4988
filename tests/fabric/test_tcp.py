"""TCP by cause and with an owner, against the kernel's own figures, over links that really lose segments.

Host 1 of a lab sends to host 2; the queues of the rails are short, so a flow that fills them loses segments. The long
version of this is tests/prove/tcp_exact.py; each cause by itself is forced in tests/kernel/test_tcp_program.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
import tcp_kit as kit
from tcp_kit import MEASURED, MEGABYTE, RECEIVER, RECEIVER6, receiver, sender

from pytools.errors import SwerveError
from pytools.kernel import tracefs
from pytools.kernel.bpf import cgroups
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import PacketDrops, Stall
from pytools.sources.tcp import table

pytestmark = pytest.mark.beside

CONTAINER = "4ed2d2d1bd03ff74f6ab2ab9a4d7b5e22bf9fe3a9a3bd0a70ba0d5c3f3f1a6b7"


@pytest.fixture
def lossy(unique_name: Callable[[], str]) -> Iterator[Lab]:
    """Two hosts, two rails; queues shorter than a burst, so that a flow that fills a rail loses some."""
    support.require("nstat", "ss", "bcc", "tracefs")
    rate = "400mbit" if support.slow_factor() == 1 else "50mbit"
    with Lab.up(unique_name(), hosts=2, rails=2, rate=rate, queue_bytes=40_000) as lab:
        yield lab


@pytest.mark.guest(thorough=True)
def test_mixed_transfers_equal_ss_and_the_kernel(lossy: Lab) -> None:
    """IPv4 and IPv6, one stream and several at once, large writes and small ones; every figure of each connection."""
    kit.causes_agree(lambda: mixed_transfers(lossy))


def mixed_transfers(lossy: Lab) -> tuple[object, object]:
    """Compare all that is told of some transfers, but for what needs every change of state: that is returned."""
    with kit.watching(sender(lossy)) as watch, contextlib.ExitStack() as open_ends:
        before = kit.nstat(sender(lossy))
        servers = [open_ends.enter_context(kit.listener(lossy, address)) for address in (RECEIVER, RECEIVER6)]
        pairs = [open_ends.enter_context(kit.connected(lossy, server)) for server in (*servers, *servers)]
        size = 20 * MEGABYTE // max(1, int(support.slow_factor() // 4))
        kit.transfer(pairs[:1], size)
        kit.transfer(pairs[1:], size)
        kit.transfer(pairs[:2], size // 2, chunk_bytes=1300)
        kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")

        flows = watch.flows()
        by_ss = kit.ss_counts(sender(lossy))
        ports = {near.getsockname()[1] for near, _ in pairs}
        assert set(flows) >= ports
        assert {
            port: (flows[port].retransmitted_segments, flows[port].retransmitted_bytes, flows[port].spurious_segments)
            for port in ports
        } == {port: (by_ss[port].segments, by_ss[port].bytes, by_ss[port].spurious) for port in ports}
        for near, _ in pairs:
            flow, told = flows[near.getsockname()[1]], kit.timeouts_of(near)
            assert told is None or flow.timeouts == told
            assert flow.owner.pid == os.getpid()
            assert flow.state == "established"
            assert flow.remote in (RECEIVER, RECEIVER6)

        host, kernel = watch.host(), kit.nstat(sender(lossy))
        grown = {name: value - before.get(name, 0) for name, value in kernel.items()}
        assert grown["TcpRetransSegs"] > 0, "nothing was lost: the test shows nothing"
        assert host.retransmitted_segments == grown["TcpRetransSegs"]
        assert host.timeouts == grown["TcpExtTCPTimeouts"]
        # What a timer sends itself is in neither of the kernel's counters by cause: one segment for each timeout.
        by_timer = grown["TcpExtTCPSlowStartRetrans"] + host.timeouts
        assert host.retransmitted.syn == grown["TcpExtTCPSynRetrans"]
        assert host.retransmitted.unknown == 0
        assert sum(watch.totals().values()) == grown["TcpRetransSegs"]
        assert {name: host.kernel.get(name, 0) for name in grown if name.startswith("TcpExtTCPTime")} == {
            name: value for name, value in grown.items() if name.startswith("TcpExtTCPTime")
        }
        drops = watch.source.drops()
        assert not any(count for name, count in drops.items() if name != "tcp_congestion_missed")
        ours = (host.retransmitted.fast, host.retransmitted.timeout)
        return ours, (grown["TcpExtTCPFastRetrans"], by_timer)


def test_causes_equal_a_capture(lossy: Lab, tmp_path: Path) -> None:
    support.require("tcpdump", "ethtool")
    kit.route_over(lossy, 1)
    offloads = ["tso", "off", "gso", "off"]  # so that each packet of the capture is one segment
    support.run(["ip", "netns", "exec", sender(lossy), "ethtool", "-K", "rail1", *offloads])
    file = tmp_path / "out.pcap"
    with kit.watching(sender(lossy)) as watch, kit.listener(lossy) as server, contextlib.ExitStack() as open_ends:
        with kit.captured(sender(lossy), "rail1", file):
            lossy.blackhole(1, (1, 2))
            with inside(sender(lossy)):
                late = open_ends.enter_context(socket.socket())
                late.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    late.connect(server.getsockname())
            kit.until(lambda: watch.host().retransmitted.syn >= 1, "a SYN is retransmitted")
            lossy.heal()
            far = open_ends.enter_context(server.accept()[0])
            with kit.connected(lossy, server) as other:
                kit.transfer([(late, far), other], 4 * MEGABYTE)
                kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")
                flows = watch.flows()
        seen = kit.repeats(file)
    ports = (late_port := min(flows, key=lambda port: flows[port].first_ns), *(set(flows) - {late_port}))
    assert {port: (flows[port].retransmitted_bytes, flows[port].retransmitted.syn) for port in ports} == {
        port: (seen[port].bytes, seen[port].syns) for port in ports
    }
    for port in ports:
        assert flows[port].retransmitted_segments - flows[port].retransmitted.syn == seen[port].segments
    assert flows[late_port].retransmitted.syn >= 1
    assert sum(flow.retransmitted.fast for flow in flows.values()) > 0


def test_a_flow_that_moves_is_counted_where_it_was(lossy: Lab) -> None:
    with kit.watching(sender(lossy)) as watch, kit.listener(lossy) as server, kit.connected(lossy, server) as ends:
        before = kit.nstat(sender(lossy))["TcpRetransSegs"]
        kit.route_over(lossy, 1)
        kit.transfer([ends], 10 * MEGABYTE)
        kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")
        first = kit.nstat(sender(lossy))["TcpRetransSegs"] - before
        assert first > 0
        assert {where: count for where, count in watch.totals().items() if count} == {("rail1", MEASURED): first}
        kit.route_over(lossy, 2)
        kit.transfer([ends], 10 * MEGABYTE)
        kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")
        second = kit.nstat(sender(lossy))["TcpRetransSegs"] - before - first
        assert second > 0
        assert {where: count for where, count in watch.totals().items() if count} == {
            ("rail1", MEASURED): first,
            ("rail2", None): second,
        }
        port = ends[0].getsockname()[1]
        assert watch.flows()[port].stall is None
        lossy.cut(2)
        ends[0].sendall(b"?")
        stalls: list[Stall] = []

        def stalled() -> bool:
            flow = watch.flows(0.5).get(port)
            stalls.extend([flow.stall] if flow is not None and flow.stall is not None else [])
            return bool(stalls)

        kit.until(stalled, "the connection is told to wait for its timer")
        assert stalls[0].timeouts >= 1 and stalls[0].rto_ns >= 400_000_000 and stalls[0].lasted_ns > 0


def test_what_precedes_the_source_is_not_counted(lossy: Lab) -> None:
    with kit.listener(lossy) as server, kit.connected(lossy, server) as ends:
        kit.transfer([ends], 10 * MEGABYTE)
        kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")
        earlier, earlier_timeouts = kit.nstat(sender(lossy)), kit.timeouts_of(ends[0])
        with kit.watching(sender(lossy)) as watch:
            kit.transfer([ends], 10 * MEGABYTE)
            kit.until(lambda: kit.all_acknowledged(sender(lossy)), "all is acknowledged")
            flow = watch.flows()[ends[0].getsockname()[1]]
            kernel = kit.nstat(sender(lossy))
            assert earlier["TcpRetransSegs"] < kernel["TcpRetransSegs"]
            assert flow.retransmitted_segments == kernel["TcpRetransSegs"] - earlier["TcpRetransSegs"]
            timeouts = kit.timeouts_of(ends[0])
            if timeouts is not None and earlier_timeouts is not None:
                assert flow.timeouts == timeouts - earlier_timeouts
            assert watch.host().kernel["TcpRetransSegs"] == flow.retransmitted_segments


def test_many_short_connections_with_a_small_table(lossy: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than rows: those that had to make room are counted, and no total misses anything of them."""
    connections, rows = 1500, 256
    monkeypatch.setattr(table, "_RECOUNT_NS", 10**9)  # not every ten seconds
    with kit.watching(sender(lossy), flows=rows) as watch, kit.listener(lossy) as server:
        before = kit.nstat(sender(lossy))
        for _ in range(connections):
            with kit.connected(lossy, server) as (near, far):
                near.sendall(b"x" * 100)
                assert far.recv(100, socket.MSG_WAITALL)
        kit.until(lambda: kit.settled(sender(lossy)), "all connections are closed")
        present = len(watch.loaded.map("tcp_flows").read()[0])

        def counted() -> bool:
            watch.run(0.1)
            return watch.host().flows == present

        kit.until(counted, "the rows are counted again")
        host, kernel = watch.host(), kit.nstat(sender(lossy))
        assert len(watch.loaded.map("tcp_flows").read()[0]) == present
        assert kernel["TcpActiveOpens"] - before["TcpActiveOpens"] == connections
        assert host.created == connections
        assert host.retransmitted_segments == kernel["TcpRetransSegs"] - before["TcpRetransSegs"]
        assert host.sent_bytes == connections * 100
        assert (host.flows, host.capacity) == (present, rows)
        assert host.evicted == connections - present
        assert host.evicted >= connections - rows


def test_the_owner_is_the_process_in_its_container(lossy: Lab, unique_name: Callable[[], str]) -> None:
    support.require("iperf3")
    try:
        root = cgroups.root()
    except SwerveError as error:
        pytest.skip(f"missing: {error}")
    group = root / f"swerve-{unique_name()}" / f"docker-{CONTAINER}.scope"
    group.mkdir(parents=True)
    child = None
    # Joins the group first, so that its connections carry it, then becomes iperf3.
    join = "import os, sys; open(sys.argv[1], 'w').write('0'); os.execvp('iperf3', sys.argv[2:])"
    try:
        with kit.iperf3_server(receiver(lossy)), kit.watching(sender(lossy)) as watch:
            command = [sys.executable, "-c", join, str(group / "cgroup.procs"), "iperf3", "-c", RECEIVER, "-t", "30"]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            end = time.monotonic() + 20 * support.slow_factor()
            owners = set()
            while not (owners and all(owner.pid for owner in owners)) and time.monotonic() < end:
                owners = {flow.owner for flow in watch.flows(0.6).values()}
            assert {(owner.pid, owner.command) for owner in owners} == {(child.pid, "iperf3")}
            assert {owner.container for owner in owners} == {CONTAINER}
            assert {owner.cgroup for owner in owners} == {str(Path("/") / group.relative_to(root))}
    finally:
        if child is not None:
            child.send_signal(signal.SIGKILL)
            child.wait()
        group.rmdir()
        group.parent.rmdir()


def test_dropped_packets_have_the_kernels_reasons(lossy: Lab) -> None:
    """What the queue of the rail drops; the machine may have dropped more meanwhile, but hardly for this reason."""
    names = tracefs.drop_reasons()
    assert names, "the kernel gives no reasons"
    rail = lossy.rails[0].netns
    with kit.watching(sender(lossy)) as watch, kit.listener(lossy) as server, kit.connected(lossy, server) as ends:
        kit.route_over(lossy, 1)
        with drops_during_init() as during_init:
            before = qdisc_drops(rail)
            kit.transfer([ends], 10 * MEGABYTE)
            dropped = qdisc_drops(rail) - before
            watch.source.read(time.monotonic_ns())
        dropped -= sum("reason: QDISC_" in line for line in during_init)
        assert dropped > 0, "nothing was lost: the test shows nothing"
        told = {each.reason: each.total_packets for each in watch.newest(PacketDrops)[-1].reasons}
    assert set(told) <= {*names.values(), "other", *(name for name in told if "reason_" in name)}
    assert sum(count for reason, count in told.items() if reason.startswith("QDISC_")) >= dropped, told


@contextlib.contextmanager
def drops_during_init() -> Iterator[list[str]]:
    """The kernel's own record of packets dropped while a thread of the machine's first process was interrupted.

    On some virtual machines (a 6.18 kernel in Firecracker) programs on raw tracepoints are passed over just then, and
    no counter of theirs says so.
    """
    trace = Path("/sys/kernel/tracing/instances") / f"swerve-test-{os.getpid()}"
    lines: list[str] = []
    trace.mkdir()
    try:
        (trace / "events/skb/kfree_skb/enable").write_text("1")
        yield lines
        (trace / "events/skb/kfree_skb/enable").write_text("0")
        threads = set(os.listdir("/proc/1/task"))
        events = re.findall(r"^ *\S.*?-(\d+) +\[.*kfree_skb: (.*)$", (trace / "trace").read_text(), re.MULTILINE)
        assert events, "the kernel recorded nothing"
        lines += [what for thread, what in events if thread in threads]
    finally:
        trace.rmdir()


def qdisc_drops(namespace: str) -> int:
    """Packets that the queues of a namespace have dropped."""
    shown = support.run(["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]).stdout
    return sum(int(each.get("drops", 0)) for each in json.loads(shown))


def test_drops_of_a_connection(lossy: Lab) -> None:
    """What was acknowledged already and comes once more is dropped for that reason, and the receiving host says so."""
    if "rx_sk" not in tracefs.fields("skb", "kfree_skb"):
        pytest.skip("missing: a kernel that names the socket of a dropped packet (6.11)")
    from scapy.layers.inet import IP, TCP

    with kit.watching(receiver(lossy)) as watch, kit.listener(lossy) as server, kit.connected(lossy, server) as ends:
        near, far = ends
        for _ in range(8):  # a connection is told once it has sent so many segments
            near.sendall(b"0123456789")
            assert far.recv(10, socket.MSG_WAITALL)
            far.sendall(b"answer")
            assert near.recv(6, socket.MSG_WAITALL)
        source, destination = near.getsockname(), far.getsockname()
        before = len(watch.flows())
        assert before == 1
        raw = bytes(
            IP(src=source[0], dst=destination[0])
            / TCP(sport=source[1], dport=destination[1], flags="A", seq=1, ack=1)
            / b"long gone"
        )
        with inside(sender(lossy)), socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as out:
            for _ in range(3):
                out.sendto(raw, (destination[0], 0))
        drops: dict[str, int] = {}
        end = time.monotonic() + 10
        while not drops and time.monotonic() < end:
            flows = watch.flows(0.6)
            drops = next((flow.drops for flow in flows.values() if flow.local_port == destination[1]), {})
        assert sum(drops.values()) == 3
        assert set(drops) <= set(tracefs.drop_reasons().values())
