"""What two readings of an interface, its queues and its neighbours mean, on rows made by hand."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support import mentions

from pytools.kernel.netlink import links as kernel
from pytools.kernel.netlink.bonds import BondRow, PortRow
from pytools.kernel.netlink.links import FAILED, Heard, LinkRow, NeighbourRow, QdiscRow
from pytools.signals import LinkCounters, Path
from pytools.sources.links.events import LinkHistory, NeighbourHistory, QueueHistory
from pytools.sources.links.interface import Interface, grown
from steering.actuators import bonds
from steering.plan import Bond, moves_back

S, MS = 1_000_000_000, 1_000_000
ROOT, INGRESS = 0xFFFFFFFF, 0xFFFFFFF1
UP = LinkRow(5, "eth0", True, True, 4, 2, 2, 1500, *range(10, 18))


def lost(row: LinkRow, times: int = 1) -> LinkRow:
    downs, ups = row.carrier_downs + times, row.carrier_ups + times - 1
    return replace(row, carrier=False, carrier_downs=downs, carrier_ups=ups, carrier_changes=downs + ups)


def found(row: LinkRow, times: int = 1) -> LinkRow:
    downs, ups = row.carrier_downs + times - 1, row.carrier_ups + times
    return replace(row, carrier=True, carrier_downs=downs, carrier_ups=ups, carrier_changes=downs + ups)


def kinds(happened: list) -> list[str]:
    return [each.what for each in happened]


# ---- carrier ----


def test_a_flap_is_told_with_its_times_when_the_carrier_is_back() -> None:
    history = LinkHistory(UP, 0, 60 * S)
    down = lost(UP)
    assert kinds(history.take(down, 100 * MS)) == ["carrier_lost"]
    assert history.take(down, 200 * MS) == []
    back, flap = history.take(found(down), 412 * MS)
    assert (back.what, back.happened_ns, flap.what) == ("carrier_found", 412 * MS, "flap")
    times = {"lost_ns": 100 * MS, "found_ns": 412 * MS, "down_ns": 312 * MS, "flaps": 1, "unseen": 0}
    assert flap.values == times
    assert "312.0 ms" in flap.detail


def test_a_port_that_its_bond_cannot_use_is_told_unless_its_carrier_is_gone() -> None:
    agreed = PortRow(True, "up", 0, 0, 1, 0x3F, 0x3D)
    good = replace(UP, port=agreed)
    history = LinkHistory(good, 0, 60 * S)
    (event,) = history.take(replace(good, port=replace(agreed, actor=0xBF, partner=0x35)), S)
    assert event.what == "bond_port_lost"
    assert mentions(event.detail, "LACP", "this end is expired", "partner is not synchronization")
    assert history.take(replace(good, port=replace(agreed, actor=0x47, partner=0)), 2 * S) == []
    assert kinds(history.take(good, 3 * S)) == ["bond_port_found"]
    assert kinds(history.take(lost(replace(good, port=replace(agreed, status="down", actor=0))), 4 * S)) == [
        "carrier_lost"
    ]
    back = found(lost(replace(good, port=replace(agreed, actor=0x05))))
    assert kinds(history.take(back, 5 * S)) == ["carrier_found", "flap"], "LACP has yet to agree"
    assert history.take(replace(back, port=agreed), 6 * S) == []
    (down,) = LinkHistory(good, 0, S).take(replace(good, port=PortRow(False, "down", 3, 0, None, None, None)), S)
    assert (down.what, down.values) == ("bond_port_lost", {"failures": 3}) and mentions(down.detail, "link", "down")


def test_a_bond_and_its_ports_are_read() -> None:
    bond = attribute(1, b"\4") + attribute(2, struct.pack("=I", 7)) + attribute(14, b"\1")
    port = attribute(1, b"\1") + attribute(2, b"\2") + attribute(3, struct.pack("=I", 9)) + attribute(5, b"\3\0")
    port += attribute(6, b"\2\0") + attribute(7, b"\x3f") + attribute(8, b"\x3d\0")

    def row(*inner: bytes) -> LinkRow:
        return kernel.link_of(struct.pack("=BxHiII", 0, 1, 5, 0, 0) + attribute(18, b"".join(inner)))

    assert row(attribute(1, b"bond\0"), attribute(2, bond)).bond == BondRow("802.3ad", "layer3+4", 7)
    read = row(attribute(4, b"bond\0"), attribute(5, port)).port
    assert read == PortRow(False, "down", 9, 3, 2, 0x3F, 0x3D)
    assert row(attribute(4, b"bridge\0"), attribute(5, port)).port is None


def test_the_bond_of_an_interface_is_told_with_the_port_that_it_prefers() -> None:
    def body(index: int, name: str, *more: bytes) -> bytes:
        return struct.pack("=BxHiII", 0, 1, index, 0, 0) + attribute(3, name.encode() + b"\0") + b"".join(more)

    port = attribute(10, struct.pack("=I", 9)), attribute(18, attribute(4, b"bond\0") + attribute(5, b""))
    options = attribute(1, b"\1") + attribute(11, struct.pack("=I", 6))
    vlan = attribute(5, struct.pack("=I", 9)), attribute(18, attribute(1, b"vlan\0"))
    bodies = [
        *(body(5, "eth0", *port), body(6, "eth1", *port), body(8, "eth9"), body(7, "bond0.7", *vlan)),
        body(9, "bond0", attribute(18, attribute(1, b"bond\0") + attribute(2, options))),
    ]
    netlink: Any = SimpleNamespace(socket=SimpleNamespace(dump_bodies=lambda *_: bodies))
    stack = kernel.Tables(netlink).stack()
    assert stack.devices == dict.fromkeys((5, 6, 7, 9), "bond0")
    assert stack.bonds == dict.fromkeys((5, 6), BondRow("active-backup", "layer2", 0, 6))
    told = []
    for row in map(kernel.link_of, bodies[:2]):
        interface = Interface("h1", row, 0, 60 * S)
        interface.bond, interface.device = stack.bonds[row.index], stack.devices[row.index]
        told.append(interface.signal([], S))
    assert [(link.bond, link.port and link.port.preferred) for link in told] == [("bond0", False), ("bond0", True)]
    found, over = bonds.read(netlink)
    assert over == {"bond0.7": "bond0", "bond0": "bond0"}
    assert found == {"bond0": Bond(9, "bond0", 0, ((5, "eth0"), (6, "eth1")), frozenset(), moves_back("eth1"))}


def test_flaps_are_counted_within_the_window() -> None:
    history, row = LinkHistory(UP, 0, 60 * S), UP
    counts = []
    for second in (1, 20, 40, 90):
        row = lost(row)
        history.take(row, second * S)
        row = found(row)
        counts += [each.values["flaps"] for each in history.take(row, second * S + MS) if each.what == "flap"]
    assert counts == [1, 2, 3, 2]


def test_a_carrier_that_was_gone_for_longer_than_the_window_has_not_flapped() -> None:
    history = LinkHistory(UP, 0, 60 * S)
    down = lost(UP)
    history.take(down, S)
    assert kinds(history.take(found(down), 61 * S + 1)) == ["carrier_found"]


def test_an_interface_first_seen_without_carrier_has_not_flapped_when_it_finds_one() -> None:
    down = lost(UP)
    assert kinds(LinkHistory(down, 0, 60 * S).take(found(down), S)) == ["carrier_found"]


def test_a_flap_between_two_readings_is_seen_by_the_kernels_count() -> None:
    history = LinkHistory(UP, S, 60 * S)
    (flap,) = history.take(found(lost(UP), 1), 2 * S)
    assert flap.values == {"lost_ns": S, "found_ns": 2 * S, "down_ns": S, "flaps": 1, "unseen": 1}
    (again,) = history.take(found(lost(history.row, 3), 1), 3 * S)
    assert (again.values["unseen"], again.values["flaps"]) == (3, 4)
    assert "3 times" in again.detail


@pytest.mark.parametrize("times", [1, 2, 4])
def test_flaps_that_precede_a_loss_or_a_return_are_told_before_it(times: int) -> None:
    history = LinkHistory(UP, 0, 60 * S)
    down = lost(UP, times)
    happened = history.take(down, S)
    assert kinds(happened) == (["flap"] if times > 1 else []) + ["carrier_lost"]
    assert sum(each.values.get("unseen", 0) for each in happened) == times - 1
    back = history.take(found(down, times), 2 * S)
    assert kinds(back) == (["flap"] if times > 1 else []) + ["carrier_found", "flap"]
    assert back[-1].values["flaps"] == 2 * (times - 1) + 1


def test_the_kernels_counts_may_wrap() -> None:
    row = replace(UP, carrier_downs=2**32 - 1, carrier_ups=2**32 - 1)
    history = LinkHistory(row, 0, 60 * S)
    (flap,) = history.take(replace(row, carrier_downs=0, carrier_ups=0), S)
    assert flap.values["unseen"] == 1


def test_set_down_by_hand_is_told_as_such() -> None:
    (event,) = LinkHistory(UP, 0, 60 * S).take(replace(UP, up=False, carrier=False), S)
    assert (event.what, event.detail) == ("carrier_lost", "it was set down")


def test_a_new_mtu_is_told() -> None:
    (event,) = LinkHistory(UP, 0, 60 * S).take(replace(UP, mtu=9000), S)
    assert (event.what, event.values) == ("mtu_changed", {"before_bytes": 1500, "after_bytes": 9000})


# ---- queues ----


def queue(
    kind: str = "tbf",
    drops: int = 0,
    backlog: tuple[int, int] = (0, 0),
    limit: tuple[int | None, int | None] = (10_000, None),
    handle: int = 0x1_0000,
    parent: int = ROOT,
) -> QdiscRow:
    return QdiscRow(5, kind, handle, parent, *backlog, drops, 0, 0, *limit)


def test_drops_before_the_first_reading_are_no_event_and_later_ones_are() -> None:
    history = QueueHistory()
    assert history.take([queue(drops=100)], 1500, 0) is None
    assert history.take([queue(drops=100)], 1500, S) is None
    event = history.take([queue(drops=107, backlog=(9000, 6))], 1500, 2 * S)
    assert event is not None
    assert event.values == {"drops": 7, "backlog_bytes": 9000, "backlog_packets": 6, "limit_bytes": 10_000}
    assert mentions(event.detail, "tbf 1:", "root", "7 packets", "9000 of 10000 bytes")


def test_drops_within_a_quiet_second_are_told_after_it() -> None:
    history = QueueHistory()
    history.take([queue()], 1500, 0)
    told = [history.take([queue(drops=step + 1)], 1500, S + step * 250 * MS) for step in range(9)]
    assert [None if each is None else each.values["drops"] for each in told] == [1, *[None] * 3, 4, *[None] * 3, 4]
    assert history.take([queue(drops=9)], 1500, 5 * S) is None


@pytest.mark.parametrize(
    ("row", "full"),
    [
        (queue(backlog=(8_487, 6)), True),  # 8487 + 1500 + 14 do not fit into 10000
        (queue(backlog=(8_486, 6)), False),
        (queue(limit=(1_000, None)), False),  # no packet of full size ever fits: an empty queue is not full
        (queue("pfifo", backlog=(90, 3), limit=(None, 3)), True),
        (queue("pfifo", backlog=(90, 2), limit=(None, 3)), False),
        (queue("cake", backlog=(10**9, 10**6), limit=(None, None)), False),
    ],
)
def test_a_queue_without_room_for_one_more_packet_is_full(row: QdiscRow, full: bool) -> None:
    history = QueueHistory()
    history.take([queue()], 1500, 0)
    event = history.take([row], 1500, S)
    assert (event is not None) == full
    if event is not None:
        assert event.values["drops"] == 0
        assert "is full" in event.detail


def test_drops_of_a_leaf_that_its_root_counts_too_count_once_and_the_leaf_is_named() -> None:
    def tree(drops: int) -> list[QdiscRow]:
        leaf = queue("pfifo", drops, limit=(None, 9), handle=0x20_0000, parent=0x1_000A)
        return [queue("htb", drops, limit=(None, None)), leaf]

    history = QueueHistory()
    history.take(tree(0), 1500, 0)
    event = history.take(tree(5), 1500, S)
    assert event is not None
    assert event.values["drops"] == 5
    assert "pfifo 20: (1:a)" in event.detail


def test_drops_of_the_queues_of_a_multiqueue_device_add_up() -> None:
    def queues(first: int, second: int) -> list[QdiscRow]:
        leaves = [queue("pfifo_fast", n, limit=(None, None), handle=0, parent=i) for i, n in ((1, first), (2, second))]
        return [queue("mq", first + second, limit=(None, None), handle=0), *leaves]  # as the kernel sums them

    history = QueueHistory()
    history.take(queues(1, 1), 1500, 0)
    event = history.take(queues(3, 5), 1500, S)
    assert event is not None
    assert event.values["drops"] == 6
    assert "(0:2)" in event.detail


def test_a_queue_that_was_replaced_counts_from_zero_and_filters_on_arrival_do_not_count() -> None:
    history = QueueHistory()
    history.take([queue(drops=50), queue("clsact", 1, handle=0xFFFF_0000, parent=INGRESS)], 1500, 0)
    new = [queue("pfifo", 3, limit=(None, 9), handle=0x8001_0000)]
    event = history.take([*new, queue("clsact", 99, handle=0xFFFF_0000, parent=INGRESS)], 1500, S)
    assert event is not None
    assert event.values["drops"] == 3


# ---- neighbours ----

WANTED = frozenset({(5, "10.1.1.1"), (6, "10.1.1.1")})


def test_a_neighbour_fails_once_and_is_told_when_it_is_back() -> None:
    history = NeighbourHistory()
    rows = [NeighbourRow(5, "10.1.1.1", state) for state in (1, FAILED, 0, 1, FAILED)]
    ((key, failed),) = history.take(rows, WANTED, S)
    assert (key, failed.what) == ((5, "10.1.1.1"), "neighbour_failed")
    assert history.failed(5) == ["10.1.1.1"]
    assert history.failed(6) == []
    ((_, back),) = history.take([NeighbourRow(5, "10.1.1.1", 2)], WANTED, 3 * S)
    assert (back.what, back.values) == ("neighbour_reachable", {"down_ns": 2 * S})
    assert history.failed(5) == []
    assert history.take([NeighbourRow(5, "10.1.1.1", 2)], WANTED, 4 * S) == []


def test_neighbours_that_no_path_uses_are_not_told() -> None:
    history = NeighbourHistory()
    assert history.take([NeighbourRow(5, "10.1.1.9", FAILED), NeighbourRow(7, "10.1.1.1", FAILED)], WANTED, S) == []
    history.take([NeighbourRow(5, "10.1.1.1", FAILED)], WANTED, S)
    history.keep(frozenset())
    assert history.failed(5) == []


# ---- one interface ----


def test_counters_grow_and_start_over() -> None:
    before, now = LinkCounters(10, 20, 30, 40, 50, 60, 70, 80), LinkCounters(11, 22, 33, 4, 55, 66, 77, 88)
    assert grown(before, now) == LinkCounters(1, 2, 3, 4, 5, 6, 7, 8)


def test_events_concern_the_paths_from_before_the_carrier_went() -> None:
    path, other = (Path("h1", name, "10.9.0.2", "", "eth0") for name in ("h2", "h3"))
    interface = Interface("h1", UP, 0, 60 * S)
    interface.take_paths([path, other], 0)
    interface.take_link(lost(UP), S)
    interface.take_paths([], S)
    interface.take_paths([other], 2 * S)
    assert interface.paths == (path, other)
    interface.take_link(found(interface.row), 100 * S)
    interface.take_paths([], 100 * S)
    interface.take_paths([], 105 * S)
    assert interface.paths == (path, other)  # the routes may still come back
    interface.take_paths([], 107 * S)
    assert interface.paths == ()


def test_a_window_holds_what_was_counted_within_it() -> None:
    interface = Interface("h1", UP, 0, 60 * S)
    interface.take_link(replace(UP, sent_bytes=UP.sent_bytes + 500), S)
    link = interface.signal(["10.1.1.1"], S)
    assert (link.window.sent_bytes, link.window_ns, link.counters.sent_bytes) == (500, S, UP.sent_bytes + 500)
    assert (link.carrier, link.carrier_changes, link.failed_neighbours) == (True, 4, ["10.1.1.1"])
    interface.next_window(S)
    assert interface.signal([], S).window.sent_bytes == 0


# ---- the kernel's bytes ----


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def qdisc_body(kind: str, options: bytes) -> bytes:
    stats = attribute(3, struct.pack("=5I", 2, 3000, 11, 13, 12))
    return struct.pack("=BxxxiIII", 0, 5, 0x8001_0000, ROOT, 2) + b"".join(
        (attribute(1, kind.encode() + b"\0"), attribute(2 | 0x8000, options), attribute(7 | 0x8000, stats))
    )


def test_a_queue_is_unpacked() -> None:
    row = kernel.qdisc_of(qdisc_body("tbf", attribute(1, bytes(24) + struct.pack("=I", 65_536) + bytes(8))))
    assert row == QdiscRow(5, "tbf", 0x8001_0000, ROOT, 3000, 2, 11, 12, 13, 65_536, None)
    assert (kernel.handle_text(row.handle), kernel.parent_text(0x1_000A)) == ("8001:", "1:a")


@pytest.mark.parametrize("options", [b"", bytes(3), attribute(1, bytes(20)), attribute(9, bytes(40)), b"\xff\xff\0\0"])
def test_options_that_are_too_short_or_foreign_hold_no_limit(options: bytes) -> None:
    row = kernel.qdisc_of(qdisc_body("tbf", options))
    assert (row.limit_bytes, row.limit_packets) == (None, None)


def test_neighbours_of_other_families_are_left_out() -> None:
    body = struct.pack("=BxxxiHBB", socket.AF_INET, 5, FAILED, 0, 0) + attribute(1, bytes([10, 1, 1, 1]))
    assert kernel.neighbour_of(body) == NeighbourRow(5, "10.1.1.1", FAILED)
    assert kernel.neighbour_of(body, deleted=True) == NeighbourRow(5, "10.1.1.1", 0)
    assert kernel.neighbour_of(b"\x07" + body[1:]) is None


def test_a_bridge_that_tells_of_its_ports_tells_nothing_of_links() -> None:
    heard = Heard()
    body = struct.pack("=BxHiII", socket.AF_BRIDGE, 1, 5, 0, 0)
    heard.take(17, body)
    assert not heard
    heard.take(16, b"\0" + body[1:])
    heard.take(17, b"\0" + body[1:])
    assert (heard.changed, heard.removed) == (set(), {5})
    heard.take(16, b"\0" + body[1:])
    assert (heard.changed, heard.removed) == ({5}, {5})
