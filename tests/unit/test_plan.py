"""Plans, differences and integer weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steering_kit import TARGET, group, path

from steering.plan import (
    MAX_WEIGHT,
    Change,
    canonical,
    kind_of,
    nexthop_group,
    overlay_target,
    scaled,
    title,
    weights_of,
)


def test_weights_have_one_form():
    assert weights_of({12: 3, 11: 0, 10: 1}) == ((10, 1), (12, 3))


def test_a_change_moves_something_when_its_weights_are_not_there_yet():
    assert Change("a", ((11, 1), (12, 1)), ((11, 1),), "why", "rule").moves
    assert not Change("b", ((21, 1),), ((21, 1),), "", "").moves
    assert not Change("b", ((21, 1),), ((21, 5),), "", "").moves, "the weight of a single hop is of no account"


@pytest.mark.parametrize(
    ("original", "share", "expected"),
    [
        ({11: 1, 12: 1}, {}, {11: 1, 12: 1}),
        ({11: 1, 12: 1}, {11: 0.0}, {12: 1}),
        ({11: 1, 12: 1}, {11: 0.1}, {11: 1, 12: 10}),
        ({11: 1, 12: 1}, {11: 0.5}, {11: 5, 12: 10}),
        ({11: 1, 12: 1}, {11: 0.25}, {11: 25, 12: 100}),
        ({11: 1, 12: 1}, {11: 0.001}, {11: 1, 12: 256}),
        ({11: 100, 12: 100}, {11: 0.5}, {11: 50, 12: 100}),
        ({11: 256, 12: 128}, {}, {11: 256, 12: 128}),
        ({11: 200, 12: 100}, {11: 0.001}, {11: 1, 12: 256}),
    ],
)
def test_shares_become_weights(original, share, expected):
    found = scaled(weights_of(original), share)
    assert found == weights_of(expected)


@given(
    st.dictionaries(st.integers(1, 50), st.integers(1, 256), min_size=1, max_size=8),
    st.dictionaries(st.integers(1, 50), st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.333, 0.5, 1.0]), max_size=8),
)
def test_weights_are_what_a_kernel_takes_and_in_proportion(original, share):
    share = {nexthop: value for nexthop, value in share.items() if nexthop in original}
    found = dict(scaled(weights_of(original), share))
    exact = {nexthop: weight * share.get(nexthop, 1.0) for nexthop, weight in original.items()}
    assert set(found) == {nexthop for nexthop, value in exact.items() if value > 0}
    assert all(weight >= 1 for weight in found.values())
    if found:
        top = max(exact, key=lambda nexthop: exact[nexthop])
        for nexthop, weight in found.items():
            assert abs(weight - max(1.0, exact[nexthop] * found[top] / exact[top])) <= 1.0
        assert max(found.values()) <= MAX_WEIGHT


def test_a_path_leaves_by_the_member_with_its_gateway_and_interface():
    known = group({1: [], 2: []})
    assert known.member(path(1)) == 11
    assert known.member(path(2)) == 12
    assert known.member(path(3)) is None
    assert known.target == TARGET


def test_names_for_people_include_those_left_out():
    known = group({1: [], 2: []})
    assert known.named(((12, 5),)) == {"10.1.1.1 dev rail1": 0, "10.2.1.1 dev rail2": 5}


def test_addresses_have_one_spelling():
    assert canonical("FD00:0:0::1") == "fd00::1"
    assert canonical("") == ""
    assert canonical("nonsense") == "nonsense"


@pytest.mark.parametrize(
    ("target", "kind", "said"),
    [
        (nexthop_group(102), "nexthop_group", "nexthop group 102"),
        (overlay_target("main", "10.9.2.0/24"), "overlay", "routes to 10.9.2.0/24"),
        (overlay_target("77", "fd00:9::/64"), "overlay", "routes to fd00:9::/64 in table 77"),
        ("novelty:1", "novelty", "novelty:1"),
    ],
)
def test_a_target_says_its_kind_and_has_a_name_for_people(target, kind, said):
    assert (kind_of(target), title(target)) == (kind, said)
