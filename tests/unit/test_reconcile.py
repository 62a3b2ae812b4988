"""A group that is not as we left it: the kernel's doing, or somebody else's."""

from __future__ import annotations

from dataclasses import replace

from steering_kit import group, path

from steering.actuators.reconcile import is_part, reconcile
from steering.plan import Member

FIRST = group({1: [path(1)], 2: [path(2)]})
ALL = group({rail: [] for rail in (1, 2, 3)})
DRAINED = replace(FIRST, current=((12, 1),))
BOTH = frozenset({11, 12})


def as_found(*current):
    members = tuple(
        replace(m, weight=dict(current)[m.nexthop_id]) for m in ALL.members if m.nexthop_id in dict(current)
    )
    return replace(FIRST, members=members, current=current, destinations=("10.9.0.7/32",), paths=())


def test_as_we_left_it():
    known, why = reconcile(FIRST, DRAINED, as_found((12, 1)), BOTH)
    assert why == ""
    assert known == replace(DRAINED, destinations=("10.9.0.7/32",))
    assert known.original == FIRST.original, "the original weights are remembered"


def test_other_weights_are_somebody_elses():
    known, why = reconcile(FIRST, DRAINED, as_found((11, 1), (12, 1)), BOTH)
    assert why.startswith(
        "somebody changed it (expected 10.2.1.1 dev rail2 weight 1; found 10.1.1.1 dev rail1 weight 1,"
    )
    assert known.current == ((11, 1), (12, 1))


def test_a_member_that_went_with_its_carrier_is_nobodys_act():
    known, why = reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}))
    assert why == ""
    assert [member.nexthop_id for member in known.members] == [12]


def test_a_member_that_was_taken_out_while_its_nexthop_is_there_is():
    assert reconcile(FIRST, FIRST, as_found((12, 1)), BOTH)[1]


def test_a_member_whose_nexthop_somebody_deleted_is_somebodys_act():
    assert reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}), frozenset({11}))[1]


def test_a_lost_member_that_can_be_used_again_is_a_member_again():
    reduced, _ = reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}))
    known, why = reconcile(FIRST, reduced, as_found((12, 1)), BOTH)
    assert why == ""
    assert known.members == FIRST.members and known.current == ((12, 1),)


def test_a_lost_member_that_is_put_back_beside_weights_of_ours_is_taken_up_again():
    three = group({rail: [] for rail in (1, 2, 3)})
    ours = replace(three, current=((11, 1), (12, 10), (13, 10)))
    reduced, why = reconcile(three, ours, as_found((12, 10), (13, 10)), frozenset({12, 13}))
    assert why == ""
    whole = as_found((11, 1), (12, 10), (13, 10))
    known, why = reconcile(three, reduced, whole, frozenset({11, 12, 13}))
    assert why == "" and known.current == whole.current
    assert reconcile(three, reduced, as_found((11, 1), (12, 9), (13, 10)), frozenset({11, 12, 13}))[1]


def test_all_that_was_in_force_is_lost_and_another_takes_its_place():
    known, why = reconcile(FIRST, DRAINED, as_found((11, 1)), frozenset({11}))
    assert why == "" and known.current == ((11, 1),)


def test_all_that_was_in_force_is_lost_and_somebody_put_something_else_in_its_place():
    foreign = replace(as_found((11, 1)), members=(Member(31, "10.3.1.1", "rail3", 1),), current=((31, 1),))
    assert reconcile(FIRST, DRAINED, foreign, frozenset({11}))[1]


def test_what_is_back_of_a_lost_target_is_part_of_it():
    assert is_part(as_found((11, 1)), FIRST) and is_part(FIRST, FIRST)
    assert not is_part(as_found((11, 1), (12, 2)), FIRST), "other weights"
    assert not is_part(as_found((12, 1), (13, 1)), FIRST), "another member"
    elsewhere = tuple(replace(member, gateway="10.2.1.77") for member in FIRST.members)
    assert not is_part(replace(FIRST, members=elsewhere), FIRST), "another way under the same number"


def test_the_weight_of_a_single_member_is_of_no_account():
    assert reconcile(FIRST, replace(FIRST, current=((12, 7),)), as_found((12, 1)), BOTH)[1] == ""


def test_a_lost_member_that_is_put_back_is_taken_up_again():
    reduced, _ = reconcile(FIRST, FIRST, as_found((12, 1)), frozenset({12}))
    known, why = reconcile(FIRST, reduced, as_found((11, 1), (12, 1)), BOTH)
    assert why == ""
    assert known.members == FIRST.members
    assert known.current == FIRST.original
