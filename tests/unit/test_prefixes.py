"""Prefixes as integers, against the standard library."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.kernel.netlink import Route
from steering.actuators.prefixes import LongestPrefix, Within, key_of
from steering.actuators.route_names import hop_id, route_of, route_target

addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


@st.composite
def networks(draw):
    address = draw(addresses)
    return ipaddress.ip_network((address, draw(st.integers(0, address.max_prefixlen))), strict=False)


@given(st.lists(networks(), max_size=6), networks())
def test_what_lies_within(prefixes, one):
    expected = any(p.version == one.version and one.subnet_of(p) for p in prefixes)
    assert Within(map(str, prefixes)).holds(key_of(str(one))) is expected


@given(st.lists(networks(), max_size=8, unique=True), addresses)
def test_the_longest_prefix_is_found(prefixes, address):
    inside = [p for p in prefixes if p.version == address.version and address in p]
    expected = max(inside, key=lambda p: p.prefixlen, default=None)
    found = LongestPrefix({key_of(str(p)): p for p in prefixes}).get(str(address))
    assert found == expected


def test_what_is_no_address_is_in_no_prefix():
    assert LongestPrefix({key_of("0.0.0.0/0"): 1}).get("nonsense") is None


@pytest.mark.parametrize(
    ("kind", "route", "name"),
    [
        ("multipath", Route("10.9.2.0/24", 4, 254), "multipath:main:10.9.2.0/24"),
        ("multipath", Route("10.9.2.0/24", 4, 77, metric=50), "multipath:77:10.9.2.0/24@50"),
        ("multipath", Route("fd00:9::/64", 6, 254, metric=1024), "multipath:main:fd00:9::/64"),
        ("multipath", Route("fd00:9::/64", 6, 254, metric=1), "multipath:main:fd00:9::/64@1"),
        ("metric", Route("::/0", 6, 254, metric=1), "metric:main:::/0"),
    ],
)
def test_a_route_is_called_by_its_table_prefix_and_metric(kind, route, name):
    assert route_target(kind, route) == name
    metric = route.metric if kind == "multipath" else {4: 0, 6: 1024}[route.family]
    assert route_of(name) == (route.table, route.destination, metric)


def test_what_is_no_route_has_no_parts():
    with pytest.raises(ValueError, match="does not appear to be an IPv4 or IPv6 network"):
        route_of("multipath:main:nonsense")


def test_a_hop_has_the_same_number_everywhere_and_no_nexthop_objects():
    assert hop_id("10.1.1.1", "rail1") == hop_id("10.1.1.1", "rail1") >= 1 << 31
    assert len({hop_id("10.1.1.1", "rail1"), hop_id("10.1.1.1", "rail2"), hop_id("", "rail1")}) == 3
