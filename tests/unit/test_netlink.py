"""Netlink messages without a kernel: what is encoded is read back, and what the kernel may answer is understood."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.errors import CapabilityError, UsageError
from pytools.kernel.netlink import nexthops as messages
from pytools.kernel.netlink import routes, tables
from pytools.kernel.netlink import socket as transport

weights = st.integers(1, messages.MAX_WEIGHT)
addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
prefixes = st.one_of(st.sampled_from(["0.0.0.0/0", "::/0", "10.9.0.2/32", "10.0.0.0/8", "fd00:9::2/128"]))


def reread(message):
    """The message as the other side would read it."""
    message["header"] = {"type": 0, "flags": 0, "sequence_number": 1, "pid": 0}
    message.encode()
    again = type(message)(bytes(message.data))
    again.decode()
    return again


def body_of(message):
    """The message as bytes, without the netlink header."""
    reread(message)
    return bytes(message.data)[16:]


@given(st.dictionaries(st.integers(1, 2**32 - 1), weights, min_size=1, max_size=32), st.booleans())
def test_a_group_is_read_back_as_it_was_written(wanted, resilient):
    kind = "resilient" if resilient else "mpath"
    members = [messages.Member(nexthop_id, weight) for nexthop_id, weight in wanted.items()]
    group = messages.group_of(reread(messages.group_message(7, members, kind, 201)))
    assert (group.id, group.kind, group.protocol, group.weights) == (7, kind, 201, wanted)
    assert group.members == tuple(members)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "at least one"),
        ([messages.Member(1, 0)], "weight 0 of nexthop 1"),
        ([messages.Member(1, 257)], "weight 257 of nexthop 1"),
        ([messages.Member(1, 1), messages.Member(1, 2)], "named twice"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_before_the_kernel_sees_it(members, words):
    with pytest.raises(UsageError, match=words):
        messages.group_message(7, members, "mpath", 201)


@pytest.mark.parametrize("width", [4, 8])
def test_packet_counts_come_in_two_widths(width):
    message = messages.group_message(7, [messages.Member(11, 9), messages.Member(12, 1)], "mpath", 0)
    entries = [
        (
            "NHA_GROUP_STATS_ENTRY",
            {
                "attrs": [
                    ("NHA_GROUP_STATS_ENTRY_ID", nexthop_id),
                    ("NHA_GROUP_STATS_ENTRY_PACKETS", packets.to_bytes(width, "little")),
                ]
            },
        )
        for nexthop_id, packets in ((12, 22), (11, 228))
    ]
    message["attrs"].append(("NHA_GROUP_STATS", {"attrs": entries}))
    group = messages.group_of(reread(message))
    assert {member.nexthop_id: member.packets for member in group.members} == {11: 228, 12: 22}


def test_a_weight_beyond_one_byte_is_read_whole():
    message = messages.group_message(7, [messages.Member(11, 1)], "mpath", 0)
    message["attrs"][1] = ("NHA_GROUP", struct.pack("=IBBH", 11, 0xE7, 0x03, 0))
    assert messages.group_of(reread(message)).weights == {11: 1000}


@given(addresses, st.integers(1, 2**31 - 1))
def test_a_nexthop_is_read_back_as_it_was_written(gateway, ifindex):
    nexthop = messages.Nexthop(11, messages.family_of(gateway), gateway, ifindex, 201)
    assert messages.nexthop_of(reread(messages.nexthop_message(nexthop))) == nexthop


@pytest.mark.parametrize(("flags", "dead"), [(0, False), (1, True), (16, True), (4, False)])
def test_a_nexthop_without_carrier_is_dead(flags, dead):
    assert messages.Nexthop(1, 4, "10.0.0.1", 1, 0, flags).dead is dead


@given(prefixes, st.sampled_from([254, 20101]), st.integers(0, 2**32 - 1), st.booleans())
def test_a_route_is_read_back_as_it_was_written(prefix, table, metric, by_id):
    family = messages.family_of(prefix)
    gateway = "fd00::1" if family == 6 else "10.0.0.1"
    way = {"nexthop_id": 101} if by_id else {"gateway": gateway, "ifindex": 3}
    route = routes.Route(prefix, family, table, metric=metric, protocol=201, **way)
    assert routes.route_of(body_of(routes.route_message(route))) == route


def test_a_route_by_nexthop_id_can_be_written_as_it_was_read():
    hops = (routes.Hop("10.1.1.1", 11, 3), routes.Hop("10.2.1.1", 12, 256))
    read = routes.Route("10.9.0.2/32", 4, 254, nexthop_id=101, hops=hops)
    written = routes.route_of(body_of(routes.route_message(read)))
    assert written == routes.Route("10.9.0.2/32", 4, 254, nexthop_id=101)


def test_the_weights_of_a_multipath_route_are_not_off_by_one():
    hops = (routes.Hop("10.1.1.1", 11, 1), routes.Hop("10.2.1.1", 12, 256))
    route = routes.Route("10.9.0.2/32", 4, 254, hops=hops)
    assert routes.route_of(body_of(routes.route_message(route))) == route


@pytest.mark.parametrize(
    "rule",
    [
        tables.Rule(5001, 4, table=20101, mark=0x5E000001, mask=0xFF000FFF, protocol=201),
        tables.Rule(100, 6, "blackhole", iif="h1", destination="fd00:9::2/128", protocol=201),
        tables.Rule(100, 4, "blackhole", iif="h1", source="10.9.0.0/24", destination="10.9.0.2/32"),
    ],
)
def test_a_rule_is_read_back_as_it_was_written(rule):
    assert tables.rule_of(body_of(tables.rule_message(rule))) == rule


def test_a_rule_like_another_selects_the_same_and_looks_elsewhere():
    theirs = tables.Rule(1000, 4, table=100, mark=5, mask=0xFF, iif="h1", source="10.9.0.0/24", protocol=4)
    body = body_of(tables.rule_message(theirs))
    ours = tables.rule_of(tables.rule_like(body, 999, 20_000, 201))
    assert ours == replace(theirs, priority=999, table=20_000, protocol=201)
    for_vrf = tables.rule_of(
        tables.rule_like(body_of(tables.rule_message(tables.Rule(1000, 6))), 999, 7, 201, oif="blue")
    )
    assert (for_vrf.oif, for_vrf.table, for_vrf.family) == ("blue", 7, 6)


@pytest.mark.parametrize(
    ("fields", "all_packets"), [({}, True), ({"mark": 1}, False), ({"source": "10.0.0.0/8"}, False)]
)
def test_whether_a_rule_holds_for_every_packet(fields, all_packets):
    body = body_of(tables.rule_message(tables.Rule(32766, 4, table=254, **fields)))
    assert tables.rule_selects_all(tables.rule_of(body)) is all_packets


def test_a_route_of_ours_keeps_what_is_no_hop():
    theirs = routes.Route(
        "10.9.0.0/16", 4, 254, gateway="10.1.1.1", ifindex=3, metric=7, protocol=4, prefsrc="10.9.0.1"
    )
    body = body_of(routes.route_message(theirs))
    hops = [routes.hop_of("10.1.1.1", 3, 4, 2), routes.hop_of("fd00::1", 4, 4, 256)]
    made = routes.route_of(routes.mirrored(body, "10.9.2.0/24", 20_000, 201, hops))
    assert made == routes.Route("10.9.2.0/24", 4, 20_000, hops=tuple(hops), protocol=201, prefsrc="10.9.0.1")
    by_object = routes.route_of(routes.mirrored(body, "0.0.0.0/0", 20_000, 201, 77))
    assert (by_object.destination, by_object.nexthop_id, by_object.hops) == ("0.0.0.0/0", 77, ())
    thrown = routes.route_of(routes.throw_route("fd00:9::/64", 6, 20_000, 201))
    assert (thrown.destination, thrown.table, thrown.kind, thrown.protocol) == ("fd00:9::/64", 20_000, 9, 201)


def test_a_minimum_rto_joins_the_metrics_of_a_route_and_replaces_none():
    bare = body_of(routes.route_message(routes.Route("10.9.0.0/16", 4, 254, gateway="10.1.1.1", ifindex=3)))
    mtu, locked = 2, 1 << 2
    metrics = transport.attribute(1, struct.pack("=I", locked)) + transport.attribute(mtu, struct.pack("=I", 1400))
    theirs = bare + transport.attribute(8, metrics)
    assert routes.rto_min_of(bare) is routes.rto_min_of(theirs) is None
    for body, lock in ((bare, 0), (theirs, locked)):
        made = routes.with_rto_min(routes.mirrored(body, "10.9.0.0/16", 20_000, 201, 77), 20)
        [held] = [value for name, value in transport.attributes(made, 12) if name == 8]
        kept = {mtu: 1400} if lock else {}
        wanted = {1: lock | 1 << 13, 13: 20} | kept  # RTAX_LOCK, RTAX_RTO_MIN
        assert {name: struct.unpack("=I", value)[0] for name, value in transport.attributes(held)} == wanted
        assert routes.rto_min_of(made) == 20 and routes.route_of(made).nexthop_id == 77
        assert routes.with_rto_min(made, 10) == made, "a route that has its own keeps it"


def refusal(code, sentence=b""):
    """An error message as the kernel sends it, its request capped to the header."""
    attributes = b""
    if sentence:
        length = 4 + len(sentence) + 1
        attributes = struct.pack("=HH", length, 1) + sentence + bytes(-length % 4 + 1)
    body = struct.pack("=i", -code) + struct.pack("=IHHII", 40, 104, 5, 1, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), 2, 0x300, 1, 0) + body


def test_a_refusal_carries_the_sentence_of_the_kernel():
    with pytest.raises(transport.NetlinkError, match="replacing nexthop group 7: Invalid nexthop id") as caught:
        transport.raise_refusal(refusal(22, b"Invalid nexthop id."), 0, 2, 0x300, "replacing nexthop group 7")
    assert caught.value.code == 22


def test_a_refusal_without_a_sentence_is_still_one():
    with pytest.raises(transport.NetlinkError, match="reading rules: No such file or directory"):
        transport.raise_refusal(refusal(2), 0, 2, 0x300, "reading rules")


def test_a_missing_privilege_is_told_apart():
    with pytest.raises(CapabilityError, match="root"):
        transport.raise_refusal(refusal(1), 0, 2, 0x300, "adding rule 5")


def test_an_acknowledgement_is_no_error():
    transport.raise_refusal(refusal(0), 0, 2, 0x300, "adding rule 5")
