"""The rule for one moment, and how verdicts stand and change. Facts are made by hand; no queue pair is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytools.estimators import verdicts
from pytools.estimators.verdicts import (
    CONGESTED,
    DEAD,
    FROZEN_NS,
    NAMES,
    NO_DEMAND,
    OK,
    SLOW_RECEIVER,
    UNKNOWN,
    Facts,
    Limits,
    Verdicts,
    rule,
)

MS = 1_000_000
LIMITS = Limits(0.5, 2.0, 50 * MS, 200 * MS)
ROW = np.array([0])
CALM: dict[str, Any] = {
    "outstanding": 16,
    "outstanding_bytes": 16 << 20,
    "due": True,
    "posted": 100,
    "completed": 100,
    "completed_ever": 5000,
    "drained": True,
    "waited_ns": 0,
    "watched_ns": 0,
    "idle_ns": 0,
    "bandwidth_bps": 100e9,
    "settled_bps": 100e9,
    "mean_bps": 100e9,
    "mean_outstanding_bytes": float(16 << 20),
    "needs_receives": False,
    "not_ready": 0,
    "not_ready_recently": False,
    "starved": False,
    "spent_answer": 0,
    "spent_ready": 0,
    "succeeded": True,
}


def facts(**changes: Any) -> Facts:
    return Facts(**{name: np.array([value]) for name, value in {**CALM, **changes}.items()})


SLOW = {"bandwidth_bps": 30e9, "settled_bps": 30e9}
QUEUED = {"outstanding": 80, "outstanding_bytes": 80 << 20}
STALLED = {"completed": 0, "succeeded": False}


@pytest.mark.parametrize(
    ("verdict", "changes"),
    [
        (OK, {}),
        (OK, SLOW),  # drained: whatever was outstanding was done
        (OK, QUEUED),  # as fast as ever
        (OK, {**SLOW, "outstanding": 4, "outstanding_bytes": 4 << 20, "drained": False}),  # less demand
        (OK, {**SLOW, **QUEUED, "mean_bps": np.nan}),  # nothing to compare with
        (CONGESTED, {**SLOW, **QUEUED}),
        (CONGESTED, {**SLOW, "drained": False}),  # the queue is full, and stays so
        (OK, {**SLOW, "drained": False, "outstanding": 1}),  # one at a time: the application waits for each
        (CONGESTED, {**SLOW, **QUEUED, "outstanding_bytes": 2**62, "mean_outstanding_bytes": 2.0**60}),
        (NO_DEMAND, {**STALLED, "outstanding": 0, "outstanding_bytes": 0, "posted": 0, "idle_ns": 100 * MS}),
        (OK, {**STALLED, "outstanding": 0, "outstanding_bytes": 0, "posted": 0, "idle_ns": 99 * MS}),
        (UNKNOWN, {"completed_ever": 0, "outstanding": 0, "idle_ns": 10_000 * MS}),  # never busy
        (UNKNOWN, {"completed_ever": 7}),
        (DEAD, {**STALLED, "watched_ns": 200 * MS}),
        (OK, {**STALLED, "watched_ns": 199 * MS, "waited_ns": 900 * MS}),
        (OK, {**STALLED, "watched_ns": 900 * MS, "due": False}),  # none of them asks for a completion
        (DEAD, {"spent_answer": 1}),
        (SLOW_RECEIVER, {"spent_ready": 1}),
        (SLOW_RECEIVER, {**STALLED, "watched_ns": 900 * MS, "needs_receives": True, "not_ready_recently": True}),
        (DEAD, {**STALLED, "watched_ns": 900 * MS, "not_ready_recently": True}),  # writes take no receive
        (SLOW_RECEIVER, {**SLOW, **QUEUED, "needs_receives": True, "not_ready_recently": True}),
        (OK, {"needs_receives": True, "not_ready_recently": True}),  # it happens, and costs nothing
        (SLOW_RECEIVER, {**STALLED, "needs_receives": True, "starved": True}),
    ],
)
def test_the_rule(verdict: int, changes: dict[str, Any]) -> None:
    assert NAMES[int(rule(facts(**changes), LIMITS)[0])] == NAMES[verdict]


class Story:
    """Readings every 10 ms of one row."""

    def __init__(self) -> None:
        self.verdicts = Verdicts(1, LIMITS)
        self.now_ns = 1000 * MS
        self.verdicts.forget(ROW, self.now_ns)
        self.changes: list[tuple[str, int]] = []

    def __call__(self, ms: int, each: Callable[[int], Facts] | Facts) -> str:
        for index in range(ms // 10):
            self.now_ns += 10 * MS
            if self.verdicts.update(ROW, each(index) if callable(each) else each, self.now_ns)[0]:
                self.changes.append((self.name, self.now_ns // MS))
        return self.name

    @property
    def name(self) -> str:
        return NAMES[int(self.verdicts.verdict[0])]


def test_congestion_is_told_after_two_readings_and_a_quarter_of_the_mean() -> None:
    story = Story()
    assert story(100, facts()) == "ok"
    began_ms = story.now_ns // MS
    assert story(20, facts(**SLOW, **QUEUED)) == "ok"
    assert story(30, facts(**SLOW, **QUEUED)) == "congested"
    assert story.changes[-1][1] - began_ms <= 50
    assert story.verdicts.since_ns[0] // MS == began_ms + 10  # when the data first said so


def test_verdicts_do_not_flap_when_figures_lie_about_the_line() -> None:
    story = Story()
    story(100, facts())
    story(100, facts(**SLOW, **QUEUED))
    story(2000, lambda index: facts(bandwidth_bps=(45e9, 55e9)[index % 2], **QUEUED))
    assert [name for name, _ in story.changes] == ["ok", "congested"]
    story(2000, lambda index: facts(**(SLOW if index % 2 else {}), **QUEUED))  # every other reading is fine
    assert [name for name, _ in story.changes] == ["ok", "congested"]
    assert story(100, facts()) == "ok"


def test_one_slow_reading_is_nothing() -> None:
    story = Story()
    story(100, facts())
    story(2000, lambda index: facts(**(SLOW | QUEUED if index % 2 else {})))
    assert [name for name, _ in story.changes] == ["ok"]


def test_a_failed_request_stands_until_one_succeeds() -> None:
    story = Story()
    story(100, facts())
    gone = {**STALLED, "outstanding": 0, "outstanding_bytes": 0, "posted": 0}
    assert story(10, facts(**{**STALLED, "spent_answer": 1})) == "dead"
    assert story(5000, facts(**gone, idle_ns=5000 * MS)) == "dead"
    assert story(10, facts()) == "ok"
    assert story(10, facts(**{**STALLED, "spent_ready": 2})) == "slow_receiver"
    assert story(5000, facts(**gone, idle_ns=5000 * MS)) == "slow_receiver"
    assert story(70, facts()) == "ok"


def test_what_is_wrong_does_not_become_the_mean_before_a_minute() -> None:
    story = Story()
    story(100, facts())
    assert not story.verdicts.unusual(ROW, story.now_ns)[0]
    story(100, facts(**SLOW, **QUEUED))
    assert story.verdicts.unusual(ROW, story.now_ns)[0]
    assert not story.verdicts.unusual(ROW, story.now_ns + FROZEN_NS)[0]


def test_rows_are_judged_by_themselves() -> None:
    both = Facts(*(np.concatenate(pair) for pair in zip(facts(), facts(**SLOW, **QUEUED), strict=True)))
    many = Verdicts(8, LIMITS)
    for at_ms in range(10, 60, 10):
        many.update(np.array([6, 2]), both, at_ms * MS)
    assert [NAMES[int(verdict)] for verdict in many.verdict[[6, 2, 0]]] == ["ok", "congested", "unknown"]


@pytest.mark.parametrize(
    ("verdict", "changes", "words"),
    [
        (OK, {}, "100.0 Gbit/s, 100 % of its recent mean"),
        (
            CONGESTED,
            {**SLOW, **QUEUED},
            "30.0 Gbit/s, 30 % of its recent mean, while 80.0 MiB wait: 5.0 times the mean",
        ),
        (CONGESTED, SLOW, "its queue stays full"),
        (CONGESTED, {**SLOW, "mean_outstanding_bytes": 0.0}, "usually nothing does"),
        (NO_DEMAND, {"idle_ns": 123 * MS}, "nothing posted for 123 ms"),
        (
            DEAD,
            {"waited_ns": 250 * MS, "watched_ns": 200 * MS},
            "16 requests (16.0 MiB) wait, none was completed for 250 ms",
        ),
        (DEAD, {"spent_answer": 1}, "retry_exc_err"),
        (SLOW_RECEIVER, {"not_ready": 7}, "'receiver not ready' 7 times"),
        (SLOW_RECEIVER, {"starved": True}, "has no receive posted"),
        (SLOW_RECEIVER, {"spent_ready": 1}, "rnr_retry_exc_err"),
        (UNKNOWN, {"completed_ever": 3, "bandwidth_bps": np.nan}, "only 3 requests"),
    ],
)
def test_reasons_say_the_figures(verdict: int, changes: dict[str, Any], words: str) -> None:
    assert words in verdicts.reason(verdict, facts(**changes))
