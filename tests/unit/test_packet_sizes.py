"""The search for the largest packet that a path takes: exact on every limit, and never fooled by congestion."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.packet_sizes import MOST_AT_ONCE, Shot, Sizes, learn, resized, shots, silence

SMALLEST = 84
Path = Callable[[Shot], bool]


def limited(forward: int, reverse: int | None = None) -> Path:
    """A path whose ways take so much each."""
    back = forward if reverse is None else reverse
    return lambda shot: shot.size <= forward and (shot.short_reply or shot.size <= back)


def step(state: Sizes, path: Path) -> Sizes:
    sent = shots(state)
    assert 0 < len(sent) <= MOST_AT_ONCE
    assert all(SMALLEST <= shot.size <= state.full for shot in sent)
    return learn(state, sent, [path(shot) for shot in sent])


def settle(state: Sizes, path: Path) -> tuple[Sizes, int]:
    """One round of watching, and all that follow it at once; how many those were."""
    state, rounds = step(state, path), 0
    while state.urgent:
        state, rounds = step(state, path), rounds + 1
        assert rounds < 20
    return state, rounds


def test_a_path_that_takes_everything_costs_one_packet_a_round() -> None:
    state = Sizes(9000, SMALLEST)
    for _ in range(5):
        assert shots(state) == (Shot(9000),)
        state, rounds = settle(state, limited(9000))
        assert (state.verdict, state.works, state.fails, rounds) == ("agrees", 9000, None, 0)


@given(full=st.integers(200, 9216), limit=st.integers(SMALLEST, 9216))
def test_every_limit_is_found_to_the_byte_in_a_few_rounds(full: int, limit: int) -> None:
    limit = min(limit, full - 1)
    state, rounds = settle(Sizes(full, SMALLEST), limited(limit))
    assert (state.verdict, state.works, state.fails) == ("mismatch", limit, limit + 1)
    assert state.narrow == "forward"
    assert rounds <= 8


def test_what_a_router_tells_shortens_the_search_and_is_not_believed() -> None:
    told, rounds = settle(replace(Sizes(9000, SMALLEST), told=1400), limited(1400))
    assert (told.works, told.fails, told.told) == (1400, 1401, 1400)
    assert rounds == 3, "one round to find it, two to be sure"
    lied_to, _ = settle(replace(Sizes(9000, SMALLEST), told=600), limited(1400))
    assert (lied_to.works, lied_to.fails) == (1400, 1401)


@pytest.mark.parametrize(("forward", "reverse", "narrow"), [(1400, 1500, "forward"), (1500, 1400, "reverse")])
def test_the_narrow_way_is_named(forward: int, reverse: int, narrow: str) -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(forward, reverse))
    assert (state.verdict, state.works, state.narrow) == ("mismatch", 1400, narrow)


def test_mending_is_seen_with_the_next_round() -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1400))
    state, rounds = settle(state, limited(1500))
    assert (state.verdict, state.works, state.fails, state.narrow, rounds) == ("agrees", 1500, None, "unknown", 0)


@pytest.mark.parametrize("limit", [1300, 1399, 1401, 1450, 1498])
def test_a_limit_that_moves_is_followed_within_two_rounds(limit: int) -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1400))
    for _ in range(2):
        assert state.verdict == "mismatch"
        state, _ = settle(state, limited(limit))
    assert (state.verdict, state.works, state.fails) == ("mismatch", limit, limit + 1)


def test_a_steady_mismatch_costs_two_packets_a_round() -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1400))
    for _ in range(6):
        assert shots(state)[0].size == 1500
        assert len(shots(state)) == 2
        state, rounds = settle(state, limited(1400))
        assert (state.verdict, rounds) == ("mismatch", 0)


def test_single_losses_are_no_limit_and_cost_one_round() -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1500))
    state = learn(state, shots(state), [False])
    assert (state.verdict, state.urgent) == ("agrees", True)
    state, rounds = settle(state, limited(1500))
    assert (state.verdict, state.works, rounds) == ("agrees", 1500, 0)


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.8, 0.95])
def test_a_queue_that_loses_the_larger_ones_more_often_is_no_limit(share: float) -> None:
    """As long as congestion is a slope; over thousands of rounds at each load."""
    random_numbers = random.Random(int(share * 100))
    verdicts = set()
    sent = 0
    for _ in range(20):
        state = Sizes(1500, SMALLEST)
        for _ in range(200):
            sent += len(shots(state))
            state = step(state, lambda shot: random_numbers.random() > share * shot.size / 1500)
            verdicts.add(state.verdict)
    assert "mismatch" not in verdicts
    assert sent < 20 * 200 * MOST_AT_ONCE


def test_where_nothing_is_found_out_searches_become_rare() -> None:
    random_numbers = random.Random(5)
    state, watched = Sizes(1500, SMALLEST), 0
    for _ in range(400):
        watched += not state.urgent
        state = step(state, lambda shot: random_numbers.random() > 0.97 * shot.size / 1500)
    assert watched > 200


@given(limit=st.integers(SMALLEST, 1499), seed=st.integers(0, 1000))
def test_one_lost_packet_in_a_hundred_does_not_hide_a_limit(limit: int, seed: int) -> None:
    random_numbers, state = random.Random(seed), Sizes(1500, SMALLEST)
    takes = limited(limit)
    for _ in range(60):
        state = step(state, lambda shot: takes(shot) and random_numbers.random() > 0.01)
    assert (state.verdict, state.works, state.fails) == ("mismatch", limit, limit + 1)


def test_a_dead_path_is_no_mismatch() -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1500))
    state = silence(state)
    assert state.verdict == "agrees", "one round may be bad luck"
    assert silence(state).verdict == "unknown"
    searching = learn(state, shots(state), [False])
    assert not silence(searching).urgent


def test_a_reflector_that_does_not_answer_every_size_says_nothing_by_its_silence() -> None:
    state = Sizes(1500, SMALLEST)
    state = learn(state, shots(state), [False], understood=False)
    assert (state.verdict, state.urgent) == ("unknown", False)
    assert learn(state, shots(state), [True], understood=False).verdict == "agrees"


def test_another_size_of_the_interface_begins_anew() -> None:
    state, _ = settle(Sizes(1500, SMALLEST), limited(1400))
    assert resized(state, 1500) is state
    smaller = resized(state, 1400)
    assert (smaller.verdict, smaller.works, shots(smaller)) == ("unknown", None, (Shot(1400),))
    assert settle(smaller, limited(1400))[0].verdict == "agrees"
