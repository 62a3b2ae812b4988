"""Overtaken probes: silence of one path while another to the same peer answers."""

from __future__ import annotations

import numpy as np
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from support import mentions

from pytools.estimators.overtaken import half_waited, waiting
from pytools.estimators.windows import MISSING
from pytools.signals import Delay, PathDelay
from pytools.sources.probing.sessions import latest_of_others
from steering.deciding.condition_eval import Verdict
from steering.deciding.evidence import Facts
from steering.deciding.rule_eval import judge
from steering.policy.conditions import QueueingDelay

MS = 1_000_000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=20), st.integers(1, 3))
def test_latest_of_others_is_what_a_plain_loop_finds(sessions: list[tuple[int, int]], flows: int) -> None:
    path_peers = [peer for peer, _ in sessions]
    peers = np.repeat(np.array(path_peers) - 1, flows)  # peer 0 becomes none
    times = np.arange(len(peers)) * 7 % 41 + np.repeat([time for _, time in sessions], flows)
    found = latest_of_others(times.astype(np.int64), peers.astype(np.intp), flows)
    for session, peer in enumerate(peers):
        others = [
            times[other]
            for other in range(len(peers))
            if peers[other] == peer and other // flows != session // flows and peer >= 0
        ]
        assert found[session] == max(others, default=0)


@pytest.mark.parametrize(
    ("leads", "answered", "expected"),
    [
        ([30, 10, 20], 0, 20),
        ([30, 10, 20], 2, 10),  # five probes: the median is the lowest of the three that waited
        ([30, 10, 20], 3, MISSING),  # six probes: the lower median was answered
        (list(range(10, 90, 10)), 2, 30),
        ([], 0, MISSING),
    ],
)
def test_half_of_the_probes_have_waited_at_least_so_long(leads: list[int], answered: int, expected: int) -> None:
    counts, waited = half_waited(
        np.full(len(leads), 5, np.intp), np.array(leads, np.int64), np.array([answered, 0]), np.array([5, 6])
    )
    assert counts.tolist() == [len(leads), 0]
    assert waited.tolist() == [expected, MISSING]


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=9), st.lists(st.integers(0, 10**9), max_size=9))
def test_the_figure_never_exceeds_the_median_of_all(leads: list[int], answered: list[int]) -> None:
    _, waited = half_waited(
        np.zeros(len(leads), np.intp), np.array(leads), np.array([len(answered)]), np.array([0], np.intp)
    )
    everything = sorted(leads + answered)
    assert waited[0] <= everything[(len(everything) - 1) // 2]


@pytest.mark.parametrize(
    ("run", "loss", "late", "waits"),
    [
        (2, 0.005, True, False),  # once in 40,000 times
        (3, 0.005, True, True),
        (3, 0.005, False, False),  # no answer was late: loss may have begun
        (16, 0.005, False, False),
        (17, 0.005, False, True),
        (17, 0.75, False, False),  # the other paths lose as much
        (41, 0.75, False, True),
    ],
)
def test_probes_in_a_row_wait_unless_they_may_be_lost(run: int, loss: float, late: bool, waits: bool) -> None:
    assert waiting(np.array([run]), np.array([loss]), np.array([late])).tolist() == [waits]


def signal(overtaken_p50_ns: int | None, there_ns: int | None, forward: Delay) -> PathDelay:
    waited = {"overtaken_p50_ns": overtaken_p50_ns, "overtaken_forward_p50_ns": there_ns}
    late = 0 if overtaken_p50_ns is None else 3
    return samples.path_delay(forward=forward, reverse=Delay(0), clock="free_running", overtaken=late, **waited)


CONDITION = QueueingDelay.model_validate(
    {"signal": "queueing_delay", "quantile": "p50", "above": "5ms", "clear_below": "1ms"}
)
QUIET = Delay(3, queueing_p50_ns=1000, queueing_p99_ns=1000, queueing_last_ns=1000, queueing_bound_ns=400)


SLOW = Delay(3, queueing_p50_ns=9 * MS, queueing_p99_ns=9 * MS, queueing_last_ns=9 * MS, queueing_bound_ns=400)


@pytest.mark.parametrize(
    ("overtaken_p50_ns", "there_ns", "forward", "verdict"),
    [
        (20 * MS, 20 * MS, Delay(0), Verdict.BAD),
        (20 * MS, 20 * MS, QUIET, Verdict.BAD),
        (20 * MS, None, QUIET, Verdict.BETWEEN),  # which way is not known
        (20 * MS, 0, QUIET, Verdict.BETWEEN),  # on the way back
        (20 * MS, 4 * MS, Delay(0), Verdict.BETWEEN),
        (20 * MS, None, SLOW, Verdict.BAD),  # the answered ones were measured on the way there
        (4 * MS, 4 * MS, Delay(0), Verdict.BETWEEN),
        (1000, 1000, QUIET, Verdict.BETWEEN),  # a lower bound never clears a path
        (None, None, Delay(0), Verdict.NONE),  # silence alone is no congestion
        (None, None, QUIET, Verdict.CLEAR),
    ],
)
def test_overtaken_probes_count_as_waiting_on_the_way_there_alone(
    overtaken_p50_ns: int | None, there_ns: int | None, forward: Delay, verdict: Verdict
) -> None:
    told = signal(overtaken_p50_ns, there_ns, forward)
    reading = judge(CONDITION, Facts(told.path, delay=told), (), told.at_ns)[0]
    assert reading.verdict is verdict
    assert mentions(reading.text, "which way", "not known") == (verdict is Verdict.BETWEEN)
