"""A group that is not as we left it: the kernel's doing, or somebody else's."""

from __future__ import annotations

from dataclasses import replace

from steering_kit import group, path

from steering.reconcile import reconcile

FIRST = group({1: [path(1)], 2: [path(2)]})
DRAINED = replace(FIRST, current=((12, 1),))
BOTH = frozenset({11, 12})


def as_found(*current):
    members = tuple(
        replace(m, weight=dict(current)[m.nexthop_id]) for m in FIRST.members if m.nexthop_id in dict(current)
    )
    return replace(FIRST, members=members, current=current, destinations=("10.9.0.7/32",), paths=())


def test_as_we_left_it():
    known, why = reconcile(FIRST, DRAINED, as_found((12, 1)), BOTH)
    assert why == ""
    assert known == replace(DRAINED, destinations=("10.9.0.7/32",))
    assert known.original == FIRST.original, "the original weights are remembered"


def test_other_weights_are_somebody_elses():
    known, why = reconcile(FIRST, DRAINED, as_found((11, 1), (12, 1)), BOTH)
    assert "somebody changed the group (expected 12 weight 1; found 11 weight 1, 12 weight 1)" in why
    assert known.current == ((11, 1), (12, 1))


def test_a_member_that_went_with_its_carrier_is_nobodys_act():
    known, why = reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}))
    assert why == ""
    assert [member.nexthop_id for member in known.members] == [12]


def test_a_member_that_was_taken_out_while_its_nexthop_is_there_is():
    assert reconcile(FIRST, FIRST, as_found((12, 1)), BOTH)[1]


def test_a_lost_member_that_is_put_back_is_taken_up_again():
    reduced, _ = reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}))
    known, why = reconcile(FIRST, reduced, as_found((11, 1), (12, 1)), BOTH)
    assert why == ""
    assert known.members == FIRST.members
    assert known.current == FIRST.original
