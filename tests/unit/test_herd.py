"""A small herd under the real engine: it settles under the damped policy, and chases itself under the naive one."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from many_hosts import CUT_AFTER_S, Outcome, Scene, Second, outcome, policy, simulate

pytestmark = pytest.mark.slow

SCENE = Scene((1, 1, 1, 0.4), load=0.88, hosts=8, flows=64)
SECONDS, JUDGED_S = 28, 12


@functools.cache
def told(damped: bool) -> list[Second]:
    return simulate(policy(damped), SCENE, SECONDS)


def of(damped: bool) -> Outcome:
    return outcome(told(damped), JUDGED_S)


def test_a_damped_herd_settles_within_a_tenth_of_the_optimum() -> None:
    damped = of(True)
    assert damped.settled_s <= SECONDS - JUDGED_S - CUT_AFTER_S
    assert damped.gap <= 0.1
    assert damped.moves <= 1
    assert told(True)[-1].shares[-1] > 0.02, "what the cut rail still carries is used"


def test_a_naive_herd_chases_itself() -> None:
    naive, damped = of(False), of(True)
    assert naive.moves > 10
    assert naive.moves > 20 * damped.moves
    assert naive.queueing_ns > 2 * damped.queueing_ns


def test_nothing_is_done_before_anything_is_wrong() -> None:
    for damped in (True, False):
        before = told(damped)[:CUT_AFTER_S]
        assert sum(second.acts for second in before) == 0
        assert all(second.delivered == 1 for second in before)


def test_the_same_seed_is_the_same_herd() -> None:
    scene = Scene((1, 0.3), load=0.85, hosts=3, flows=8)
    first, second = (simulate(policy(True), scene, 8) for _ in range(2))
    assert [each.shares for each in first] == [each.shares for each in second]
    assert [each.acts for each in first] == [each.acts for each in second]


def test_rails_without_a_policy_lose_what_they_cannot_carry() -> None:
    """The simulation itself: with an engine that never acts, what gets through is what the capacities allow."""
    deaf = policy(True).model_copy(update={"rules": ()})
    scene = Scene((1, 1, 1, 0.4), load=0.88, hosts=32, flows=32, bursts=0.0)
    last = simulate(deaf, scene, CUT_AFTER_S + 3)[-1]
    offered = scene.load * sum(scene.capacities)
    on_cut = last.shares[-1] * offered
    assert on_cut > 0.4
    assert last.worst == pytest.approx(0.4 / on_cut, rel=1e-6)
    assert last.delivered == pytest.approx(1 - (on_cut - 0.4) / offered, rel=1e-6)
    assert last.queueing_ns == pytest.approx(last.shares[-1] * scene.buffer_ns, rel=0.01)
    assert last.acts == 0


def test_what_is_judged_is_the_end() -> None:
    def second(worst: float, moves: int) -> Second:
        return Second(1.0, worst, 0.0, np.array([moves, 0]), 0, (0.5, 0.5))

    rough = [second(1.0, 0)] * CUT_AFTER_S + [second(0.5, 9)] * 7 + [second(0.95, 1)] * 20
    found = outcome(rough, 20)
    assert (found.settled_s, found.moves, found.most_moves) == (7, 5.0, 10)
    assert found.gap == pytest.approx(0.05)
