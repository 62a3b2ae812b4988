"""Prefixes as integers, against the standard library."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from steering.prefixes import LongestPrefix, key_of

addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


@st.composite
def networks(draw):
    address = draw(addresses)
    return ipaddress.ip_network((address, draw(st.integers(0, address.max_prefixlen))), strict=False)


@given(st.lists(networks(), max_size=6), networks())
def test_what_lies_within(prefixes, one):
    around = [p for p in prefixes if p.version == one.version and one.subnet_of(p)]
    expected = max(around, key=lambda p: p.prefixlen, default=None)
    assert LongestPrefix({key_of(str(p)): p for p in prefixes}).around(key_of(str(one))) == expected


@given(st.lists(networks(), max_size=8, unique=True), addresses)
def test_the_longest_prefix_is_found(prefixes, address):
    inside = [p for p in prefixes if p.version == address.version and address in p]
    expected = max(inside, key=lambda p: p.prefixlen, default=None)
    found = LongestPrefix({key_of(str(p)): p for p in prefixes}).get(str(address))
    assert found == expected


def test_what_is_no_address_is_in_no_prefix():
    assert LongestPrefix({key_of("0.0.0.0/0"): 1}).get("nonsense") is None
