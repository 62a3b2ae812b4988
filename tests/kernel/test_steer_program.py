"""steer.c on packets made by hand: which flow a packet is of, what becomes of it, and what is counted.

The packets run on the loopback interface (index 1) of the test's namespace: a target there is "where it is already".
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator

import numpy as np
import packets as p
import pin_kit as kit
import pytest
import support
from packet_runs import PacketRuns

from pytools.errors import RefusedError
from steering.actuators import flow_keys
from steering.actuators.flow_table import FlowTable
from steering.plan import FlowKey

UNSPEC, REDIRECT = 0xFFFFFFFF, 7
HERE, SECOND, NOWHERE = 1, 100, 0x7FFF  # interface indexes; there is nothing at the last
V4 = FlowKey(p.TCP, "10.9.0.1", 5000, "10.9.0.2", 6000)
V6 = FlowKey(p.TCP, "fd00:9::1", 5000, "fd00:9::2", 6000)
FLOWS = {"ipv4": V4, "ipv6": V6}
families = pytest.mark.parametrize("over", FLOWS.values(), ids=FLOWS.keys())
BIG = 500


class Steer:
    """The table, and packets to run through its program."""

    def __init__(self, table: FlowTable) -> None:
        self.table, self._runs = table, PacketRuns()
        self._before = table.counters()

    def run(self, frame: bytes, segments: int = 0, segment_bytes: int = 0, mark: int = 0) -> int:
        return self.altered(frame, segments, segment_bytes, mark)[0]

    def altered(self, frame: bytes, segments: int = 0, segment_bytes: int = 0, mark: int = 0) -> tuple[int, bytes]:
        done = self._runs.run(self.table.program_fd, frame, mark, segments=segments, segment_bytes=segment_bytes)
        return done.verdict, done.frame

    def counted(self) -> dict[str, int]:
        """Counters that have moved since the last call."""
        before, self._before = self._before, self.table.counters()
        return {name: value - before[name] for name, value in self._before.items() if value != before[name]}

    def target(self, ifindex: int, alive: bool = True, gateway: str = "10.1.1.1", row: int = 3) -> None:
        targets = self.table.targets
        targets["gateway"]["bytes"][row] = np.frombuffer(flow_keys.address(gateway).mapped, np.uint8)
        targets["family"][row] = 10 if ":" in gateway else 2
        targets["ifindex"][row], targets["alive"][row] = ifindex, alive

    def pin(self, *flows: FlowKey, until_ns: int | None = None, row: int = 3) -> None:
        until = kit.soon() if until_ns is None else until_ns
        self.table.grant("pin_until_ns", flows, [until] * len(flows), target=[row] * len(flows))

    def label(self, flow: FlowKey, label: int, until_ns: int | None = None) -> None:
        self.table.grant("label_until_ns", [flow], [kit.soon() if until_ns is None else until_ns], label=[label])


@pytest.fixture(scope="module")
def made(make_lasting_namespace: Callable[[], str]) -> Iterator[Steer]:
    support.require("netns", "bcc")
    netns = make_lasting_namespace()
    support.ip(netns, f"link add v0 index {SECOND} type veth peer name v1")
    with kit.table(netns) as table:
        yield Steer(table)


@pytest.fixture
def steer(made: Steer) -> Steer:
    flows = [row.flow for row in made.table.read()]
    made.table.end("pin_until_ns", flows)
    made.table.end("label_until_ns", flows)
    assert made.table.read() == []
    made.table.targets[:] = 0
    made.counted()
    return made


def tcp(payload: bytes = b"", source: int = 5000, destination: int = 6000) -> bytes:
    return struct.pack("!HHIIBBHHH", source, destination, 1, 2, 5 << 4, 0x10, 0, 0, 0) + payload


def packet(over: FlowKey, payload: bytes = b"", **options: object) -> bytes:
    """A packet of a flow."""
    build = p.ipv6 if ":" in over.remote else p.ipv4
    if over.protocol == p.TCP:
        inner = tcp(payload, over.local_port, over.remote_port)
    else:
        inner = p.udp(payload, over.local_port, over.remote_port)
    return build(inner, over.local, over.remote, protocol=over.protocol, **options)  # type: ignore[arg-type]


def lo_to_itself(steer: Steer, over: FlowKey) -> None:
    """Pin a flow to where the test's packets are: the row counts, the packet stays."""
    steer.target(HERE)
    steer.pin(over)


@pytest.mark.guest
@families
def test_a_pinned_flow_is_redirected(steer: Steer, over: FlowKey) -> None:
    steer.target(SECOND, gateway="10.1.1.1" if over is V4 else "fe80::1")
    steer.pin(over)
    assert steer.run(packet(over, bytes(BIG))) == REDIRECT
    assert steer.counted() == {"redirected": 1}
    (row,) = steer.table.read()
    assert (row.packets, row.bytes) == (0, 0), "it is counted where it leaves"


@families
def test_nothing_is_looked_at_while_nothing_is_steered(steer: Steer, over: FlowKey) -> None:
    fragment = p.ipv4(bytes(100), fragment=7)
    assert steer.run(packet(over)) == UNSPEC
    assert steer.run(fragment) == UNSPEC
    assert steer.counted() == {}
    lo_to_itself(steer, over)
    assert steer.run(fragment) == UNSPEC
    assert steer.counted() == {"fragments": 1}
    steer.table.end("pin_until_ns", [over])
    assert steer.run(fragment) == UNSPEC
    assert steer.counted() == {}


@pytest.mark.parametrize("protocol", [p.TCP, p.UDP], ids=["tcp", "udp"])
@families
def test_packets_are_of_the_flow_of_their_five_fields(steer: Steer, over: FlowKey, protocol: int) -> None:
    v6 = over is V6
    other = "fd00:9::77" if v6 else "10.9.0.77"
    one = FlowKey(protocol, over.local, 5000, over.remote, 6000)
    lo_to_itself(steer, one)
    near_misses = [
        FlowKey(p.TCP + p.UDP - protocol, one.local, 5000, one.remote, 6000),
        FlowKey(protocol, other, 5000, one.remote, 6000),
        FlowKey(protocol, one.local, 5001, one.remote, 6000),
        FlowKey(protocol, one.local, 5000, other, 6000),
        FlowKey(protocol, one.local, 5000, one.remote, 6001),
        FlowKey(protocol, one.remote, 6000, one.local, 5000),
        FlowKey(protocol, one.local, 6000, one.remote, 5000),
    ]
    for miss in near_misses:
        assert steer.run(packet(miss, bytes(BIG))) == UNSPEC
    assert steer.counted() == {}
    assert steer.run(packet(one, bytes(BIG))) == UNSPEC
    assert steer.counted() == {"on_target": 1}


@families
def test_what_leaves_by_its_target_is_counted_by_segments_and_bytes(steer: Steer, over: FlowKey) -> None:
    lo_to_itself(steer, over)
    before = time.monotonic_ns()
    frame = packet(over, bytes(BIG))
    assert steer.run(frame) == UNSPEC
    assert steer.run(frame, segments=7) == UNSPEC
    (row,) = steer.table.read()
    assert (row.packets, row.bytes) == (8, 2 * len(frame)), "test runs say nothing of the headers of segments"
    assert before - kit.SECOND < row.last_ns <= time.monotonic_ns()
    assert steer.counted() == {"on_target": 8}


@pytest.mark.guest
@families
def test_a_lease_ends_by_itself(steer: Steer, over: FlowKey) -> None:
    steer.target(HERE)
    steer.pin(over, until_ns=time.monotonic_ns() + 50_000_000)
    frame = packet(over)
    while steer.run(frame) == UNSPEC and steer.counted() == {"on_target": 1}:
        assert steer.table.read()[0].pin_until_ns + kit.SECOND > time.monotonic_ns(), "it never ended"
    steer.counted()
    steer.run(frame)
    assert steer.counted() == {"expired": 1}
    assert time.monotonic_ns() >= steer.table.read()[0].pin_until_ns, "it ended early"
    assert steer.table.renew("pin_until_ns", [over], [kit.soon()]) == set()
    steer.run(frame)
    assert steer.counted() == {"on_target": 1}


@families
@pytest.mark.parametrize(
    ("ifindex", "alive", "reason"), [(SECOND, False, "dead"), (NOWHERE, True, "dead"), (0, True, "missing")]
)
def test_what_cannot_be_redirected_goes_as_it_is_routed(
    steer: Steer, over: FlowKey, ifindex: int, alive: bool, reason: str
) -> None:
    steer.target(ifindex, alive)
    steer.pin(over)
    frame = packet(over, bytes(BIG))
    assert steer.altered(frame, segments=3) == (UNSPEC, frame)
    assert steer.counted() == {reason: 3}
    assert steer.table.read()[0].packets == 0


@families
def test_what_is_too_large_goes_as_it_is_routed(steer: Steer, over: FlowKey) -> None:
    """To the byte; the MTU is looked at once a tick."""
    steer.target(SECOND, gateway="10.1.1.1" if over is V4 else "fe80::1")
    steer.pin(over)
    headers = len(packet(over)) - 14
    assert steer.run(packet(over, bytes(1500 - headers))) == REDIRECT
    frame = packet(over, bytes(1501 - headers))
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"redirected": 1, "too_large": 1}
    assert steer.table.targets["mtu"][3] == 1500


@pytest.mark.parametrize("row", [4095, 4096, 0xFFFFFFFF])
def test_a_row_that_is_not_there_is_missing(steer: Steer, row: int) -> None:
    steer.pin(V4, row=row)
    assert steer.run(packet(V4)) == UNSPEC
    assert steer.counted() == {"missing": 1}


def test_ip_options_and_jumbo_headers_move_the_ports(steer: Steer) -> None:
    steer.target(HERE)
    steer.pin(V4, V6)
    for words in range(1, 11):
        assert steer.run(p.ipv4(tcp(), protocol=p.TCP, options=b"\x01" * 4 * words)) == UNSPEC
    assert steer.counted() == {"on_target": 10}
    jumbo = bytearray(p.ipv6(struct.pack("!BBBBI", p.TCP, 0, 0xC2, 4, 28) + tcp(), protocol=0))
    jumbo[18:20] = b"\0\0"
    assert steer.run(bytes(jumbo)) == UNSPEC
    assert steer.counted() == {"on_target": 1}


@pytest.mark.parametrize(
    "frame",
    [
        p.ipv4(tcp(), protocol=p.TCP, fragment=0x2000),
        p.ipv4(tcp(), protocol=p.TCP, fragment=100),
        p.ipv4(tcp(), protocol=p.TCP, fragment=0x2064),
        p.ipv6(struct.pack("!BBHI", p.TCP, 0, 1, 9) + tcp(), protocol=44),
    ],
    ids=["first", "last", "middle", "ipv6"],
)
def test_fragments_are_left_alone_and_counted(steer: Steer, frame: bytes) -> None:
    lo_to_itself(steer, V4)
    steer.pin(V6)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"fragments": 1}


@pytest.mark.parametrize(
    "frame",
    [p.ipv4(tcp(), protocol=p.TCP)[:36], p.ipv6(tcp(), protocol=p.TCP)[:56]],
    ids=["ipv4", "ipv6"],
)
def test_ports_that_are_cut_off_are_counted(steer: Steer, frame: bytes) -> None:
    lo_to_itself(steer, V4)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"unreadable": 1}


@pytest.mark.parametrize(
    "frame",
    [
        p.ipv4(tcp(), protocol=1),
        p.ipv4(tcp(), protocol=p.TCP, tags=(p.TAG_8021Q,)),
        p.ipv6(tcp(), protocol=60),
        p.ipv6(struct.pack("!BBHI", p.TCP, 0, 0x0502, 0) + tcp(), protocol=0),
        p.ethernet(0x0806, bytes(60)),
        p.ethernet(0x0800, b"\x44" + bytes(8) + b"\x06" + bytes(40)),
        p.ethernet(0x0800, b"\x65" + bytes(8) + b"\x06" + bytes(40)),
        p.ethernet(0x86DD, b"\x40" + bytes(5) + b"\x06" + bytes(60)),
        bytes(14),
    ],
    ids=["icmp", "tagged", "options", "hop by hop", "arp", "short header", "no ipv4", "no ipv6", "empty"],
)
def test_other_packets_leave_no_trace(steer: Steer, frame: bytes) -> None:
    lo_to_itself(steer, V4)
    steer.pin(V6)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {}


@pytest.mark.parametrize(
    "over",
    [
        FlowKey(p.UDP, "10.9.0.1", 5000, "224.1.2.3", 5000),
        FlowKey(p.UDP, "10.9.0.1", 5000, "239.255.255.255", 5000),
        FlowKey(p.UDP, "10.9.0.1", 5000, "255.255.255.255", 5000),
        FlowKey(p.UDP, "fd00:9::1", 5000, "ff02::1:3", 5000),
    ],
    ids=["multicast", "last multicast", "broadcast", "multicast 6"],
)
def test_multicast_stays_whatever_the_table_says(steer: Steer, over: FlowKey) -> None:
    assert steer.table.objection(over), "user space does not put them there in the first place"
    steer.target(NOWHERE)
    steer.pin(over)
    steer.label(over, 0x12345)
    frame = packet(over, bytes(60))
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"exempt": 1}


@pytest.mark.parametrize(
    ("mark", "counted"),
    [
        (0, "on_target"),
        (kit.MARK_SEND, "exempt"),
        (kit.MARK_SEND + 1, "exempt"),
        (kit.MARK_SEND & 0xFFFF, "on_target"),
        (kit.MARK_SEND ^ 1 << 16, "on_target"),
    ],
    ids=["of an application", "sent", "to be stamped", "low bits alone", "another"],
)
def test_our_probes_stay_whatever_their_ports(steer: Steer, mark: int, counted: str) -> None:
    for over in (
        FlowKey(p.UDP, "10.9.0.1", 5000, "10.9.0.2", p.PORT),
        FlowKey(p.UDP, "fd00:9::1", 7000, "fd00:9::2", 1),
    ):
        lo_to_itself(steer, over)
        steer.run(packet(over), mark=mark)
        assert steer.counted() == {counted: 1}


# ---- labels ----


def with_head(frame: bytes, traffic_class: int, label: int) -> bytes:
    return frame[:14] + struct.pack("!I", 6 << 28 | traffic_class << 20 | label) + frame[18:]


@pytest.mark.parametrize("label", [1, 0x12345, 0xFFFFF])
@pytest.mark.parametrize("traffic_class", [0, 0x03, 0xFC, 0xFF])
@pytest.mark.parametrize("protocol", [p.TCP, p.UDP], ids=["tcp", "udp"])
def test_only_the_label_is_rewritten(steer: Steer, label: int, traffic_class: int, protocol: int) -> None:
    over = FlowKey(protocol, V6.local, 5000, V6.remote, 6000)
    steer.label(over, label)
    frame = packet(over, bytes(range(200)))
    for before in (0, 0xABCDE, 0xFFFFF ^ label):
        changed = steer.altered(with_head(frame, traffic_class, before))
        assert changed == (UNSPEC, with_head(frame, traffic_class, label))
    assert steer.counted() == {"relabelled": 3}
    same = with_head(frame, traffic_class, label)
    assert steer.altered(same) == (UNSPEC, same)
    assert steer.counted() == {}
    assert steer.altered(with_head(frame, 0, 0), segments=44)[1] == with_head(frame, 0, label)
    assert steer.counted() == {"relabelled": 44}
    assert steer.table.read()[0].relabelled == 47


@pytest.mark.guest
def test_a_label_is_a_lease_of_its_own(steer: Steer) -> None:
    frame = packet(V6)
    steer.label(V6, 7, until_ns=time.monotonic_ns() - kit.SECOND)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"label_expired": 1}
    steer.target(HERE)
    steer.pin(V6)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {"label_expired": 1, "on_target": 1}
    steer.label(V6, 7)
    assert steer.altered(frame) == (UNSPEC, with_head(frame, 0, 7))
    assert steer.counted() == {"relabelled": 1, "on_target": 1}
    steer.table.end("pin_until_ns", [V6])
    assert steer.altered(frame) == (UNSPEC, with_head(frame, 0, 7))
    assert steer.counted() == {"relabelled": 1}
    assert [row.flow for row in steer.table.read()] == [V6], "its label keeps the row"
    steer.table.end("label_until_ns", [V6])
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.table.read() == []


@pytest.mark.guest
def test_the_label_that_packets_come_with_is_seen(steer: Steer) -> None:
    frame, seen = packet(V6), steer.table.seen
    steer.table.grant("watch_until_ns", [V6, V4], [kit.soon()] * 2)
    assert seen([V6]) == {}
    for label in (0, 0xFFFFF, 0xABCDE):
        assert steer.altered(with_head(frame, 0, label)) == (UNSPEC, with_head(frame, 0, label))
        assert steer.run(packet(V4)) == UNSPEC
        assert seen([V6, V4]) == {V6: label} and steer.counted() == {}
    steer.label(V6, 7)
    assert steer.altered(with_head(frame, 0, 5))[1] == with_head(frame, 0, 7)
    steer.altered(with_head(frame, 0, 7))
    assert seen([V6]) == {V6: 5}, "where it is redirected to it comes with ours"
    steer.table.end("label_until_ns", [V6])
    assert len(steer.table.read()) == 2, "it is watched still"
    steer.table.end("watch_until_ns", [V6, V4])
    assert steer.table.read() == [] and seen([V6]) == {}


def test_a_packet_is_relabelled_before_it_is_redirected(steer: Steer) -> None:
    steer.target(SECOND, gateway="fe80::1")
    steer.pin(V6)
    steer.label(V6, 0xABCDE)
    frame = packet(V6)
    assert steer.altered(frame) == (REDIRECT, with_head(frame, 0, 0xABCDE))
    assert steer.counted() == {"relabelled": 1, "redirected": 1}


def test_ipv4_packets_have_no_label(steer: Steer) -> None:
    steer.label(V4, 0xABCDE)
    frame = packet(V4)
    assert steer.altered(frame) == (UNSPEC, frame)
    assert steer.counted() == {}


# ---- the table ----


def flows(count: int, first: int = 0) -> list[FlowKey]:
    return [FlowKey(p.TCP, "10.9.0.1", 1 + n % 60000, "10.9.0.2", 1 + n // 60000) for n in range(first, first + count)]


def test_what_is_read_back_is_what_was_written(steer: Steer) -> None:
    one, two = V4, FlowKey(p.UDP, "fd00:9::1", 1, "fe80::1", 65535)
    steer.table.grant("pin_until_ns", [one, two], [kit.soon(), kit.soon()], target=[5, 6])
    steer.label(two, 99, until_ns=12345)
    rows = {row.flow: row for row in steer.table.read()}
    assert rows.keys() == {one, two}
    assert (rows[one].target, rows[one].label_until_ns, rows[one].label) == (5, 0, 0)
    assert (rows[two].target, rows[two].label_until_ns, rows[two].label) == (6, 12345, 99)
    assert steer.table.end("pin_until_ns", [one, two, FlowKey(p.TCP, "10.0.0.1", 1, "10.0.0.2", 2)]) == {one, two}
    assert [row.flow for row in steer.table.read()] == [two]


@pytest.mark.guest
def test_a_full_table_refuses_and_keeps_what_it_has(steer: Steer) -> None:
    capacity = len(steer.table.rows)
    held = flows(capacity - 3)
    steer.pin(*held)
    with pytest.raises(RefusedError, match=f"4 more flows cannot be steered: {capacity - 3} of {capacity}"):
        steer.pin(*flows(4, first=capacity))
    assert {row.flow for row in steer.table.read()} == set(held)
    steer.pin(*held[:10], *flows(3, first=capacity))  # those that are there need no room
    assert len(steer.table.read()) == capacity
    with pytest.raises(RefusedError):
        steer.pin(*flows(1, first=2 * capacity))
    assert steer.table.end("pin_until_ns", held[:1]) == {held[0]}
    steer.pin(*flows(1, first=2 * capacity))


def test_leases_that_ended_make_room(steer: Steer) -> None:
    capacity = len(steer.table.rows)
    ended, lasting = flows(capacity // 2), flows(capacity - capacity // 2, first=capacity)
    steer.pin(*ended, until_ns=time.monotonic_ns())
    steer.pin(*lasting)
    steer.pin(V4)
    assert {row.flow for row in steer.table.read()} == {*lasting, V4}
    assert steer.table.renew("pin_until_ns", [ended[0], V4], [kit.soon()] * 2) == {ended[0]}


def test_a_row_is_of_its_flow_alone(steer: Steer) -> None:
    """Another flow with its tag in its set, which chance makes of one pair in 2^43, is led to a row not its own."""
    lo_to_itself(steer, V4)
    rows, sets = steer.table.rows, steer.table.sets
    keys = flow_keys.encoded([V4, V6], rows.dtype["flow"])
    held = np.flatnonzero(rows["pin_until_ns"])
    (row,) = (at for at in held.tolist() if rows["flow"][at].tobytes() == keys[0].tobytes())
    value = int(flow_keys.hashes(keys, int(steer.table.settings["seed"][0]))[1])
    entries = sets["entries"][value & (len(sets) - 1)]
    entries[7] = (value >> 32 | 1) << 32 | row
    for key, counted in ((keys[0], {}), (keys[1], {"on_target": 1})):
        rows["flow"][row] = key
        assert steer.run(packet(V6)) == UNSPEC
        assert steer.counted() == counted
    rows["flow"][row] = keys[0]
    entries[7] = 0


def test_a_row_begins_from_zero(steer: Steer) -> None:
    capacity = len(steer.table.rows)
    lo_to_itself(steer, V4)
    steer.run(packet(V4))
    steer.label(V4, 5)
    steer.table.end("pin_until_ns", [V4])
    steer.table.end("label_until_ns", [V4])
    steer.pin(*flows(capacity))
    assert {(row.packets, row.bytes, row.last_ns, row.label) for row in steer.table.read()} == {(0, 0, 0, 0)}


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        (FlowKey(p.TCP, "10.9.0.1", 1, "fd00::1", 1), "two families"),
        (FlowKey(1, "10.9.0.1", 1, "10.9.0.2", 1), "only TCP and UDP"),
        (FlowKey(p.TCP, "10.9.0.1", 0, "10.9.0.2", 1), "a port"),
        (FlowKey(p.TCP, "10.9.0.1", 1, "10.9.0.2", 65536), "a port"),
        (FlowKey(p.UDP, "10.9.0.1", 1, "224.0.0.1", 1), "receivers"),
        (FlowKey(p.UDP, "fd00::1", 1, "ff02::1", 1), "receivers"),
        (FlowKey(p.TCP, "127.0.0.1", 1, "127.0.0.2", 1), "leave this host"),
        (FlowKey(p.TCP, "10.9.0.1", 1, "10.9.0.1", 2), "leave this host"),
        (FlowKey(p.TCP, "10.9.0.1", 1, "peer", 2), "peer"),
        (V4, ""),
        (V6, ""),
    ],
)
def test_what_cannot_be_steered_is_said(steer: Steer, over: FlowKey, reason: str) -> None:
    assert reason in steer.table.objection(over)
    assert bool(steer.table.objection(over)) == bool(reason)
