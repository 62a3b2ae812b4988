"""From which addresses of ours a peer's addresses are probed."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from pytools.kernel.leftovers import FIRST_TABLE
from pytools.kernel.netlink.routing import PROTOCOL, Address, Family, Rule
from pytools.kernel.own_addresses import nearest, with_own_routes


def address(text: str, ifindex: int, scope: int = 0) -> Address:
    family: Family = 6 if ":" in text else 4
    return Address(text, 24, family, ifindex, scope, 0)


OURS = [address("10.2.1.2", 3), address("10.1.1.2", 2), address("10.9.0.1", 1), address("fd00:1::2", 2)]


def test_addresses_that_a_rule_leads_to_a_table_of_their_own_in_the_order_of_interfaces() -> None:
    rules = [Rule(100, 4, table=102, source="10.2.1.2/32"), Rule(101, 4, table=101, source="10.1.1.0/24")]
    rules += [Rule(0, 4, table=255), Rule(32766, 4, table=254)]
    assert with_own_routes(4, rules, OURS) == ["10.1.1.2", "10.2.1.2"]
    assert with_own_routes(6, [Rule(100, 6, table=101, source="fd00:1::2/128")], OURS) == ["fd00:1::2"]


def test_rules_that_choose_by_more_or_are_swerves_do_not_count() -> None:
    source = "10.1.1.2/32"
    rules = [
        Rule(100, 4, table=101, source=source, mark=7),
        Rule(100, 4, table=101, source=source, iif="eth0"),
        Rule(100, 4, table=101, source=source, oif="eth0"),
        Rule(100, 4, "blackhole", source=source),
        Rule(100, 4, table=FIRST_TABLE, source=source, protocol=PROTOCOL),
    ]
    assert with_own_routes(4, rules, OURS) == []


def test_addresses_of_links_alone_are_not_probed_from() -> None:
    rules = [Rule(100, 6, table=101, source="fe80::/10")]
    assert with_own_routes(6, rules, [address("fe80::1", 2, scope=253)]) == []


def test_a_peer_of_one_address_is_probed_from_all_of_ours() -> None:
    assert nearest("10.9.0.2", ["10.9.0.2"], ["10.1.1.2", "10.2.1.2"]) == ["10.1.1.2", "10.2.1.2"]
    assert nearest("10.9.0.2", ["10.9.0.2"], []) == []


def test_interfaces_of_one_rail_are_paired_by_their_prefix() -> None:
    ours, theirs = [f"10.{rail}.1.2" for rail in range(1, 9)], [f"10.{rail}.2.2" for rail in range(1, 9)]
    assert [nearest(each, theirs, ours) for each in theirs] == [[each] for each in ours]


def test_where_prefixes_are_of_hosts_the_place_decides() -> None:
    ours, theirs = [f"10.0.1.{nic}" for nic in range(8, 16)], [f"10.0.2.{nic}" for nic in range(16, 24)]
    assert [nearest(each, theirs, ours) for each in theirs] == [[each] for each in ours]


@given(
    st.lists(st.ip_addresses(v=4).map(str), min_size=1, max_size=8, unique=True),
    st.lists(st.ip_addresses(v=4).map(str), max_size=8, unique=True),
)
def test_an_address_is_probed_from_those_whose_prefix_is_the_longest(theirs: list[str], ours: list[str]) -> None:
    for each in theirs:
        chosen = nearest(each, theirs, ours)
        assert set(chosen) <= set(ours)
        assert bool(chosen) == bool(ours)
        if len(theirs) > 1:

            def apart(own: str, peer: str = each) -> int:
                return (int(ipaddress.ip_address(own)) ^ int(ipaddress.ip_address(peer))).bit_length()

            assert {apart(own) for own in chosen} <= {min(map(apart, ours), default=0)}
