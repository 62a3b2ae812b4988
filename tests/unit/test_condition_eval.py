"""Conditions against facts: each leaf's thresholds and errors, memory, and the logic of trees."""

from __future__ import annotations

import functools

import msgspec
import policy_kit as kit
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from policy_kit import MS, SECOND, T0, condition, rule
from steering_kit import measured, path
from support import mentions

from pytools.signals import Delay, Job, JobCause, JobPath, JobVerdict, Path, PathDelay
from steering.deciding.condition_eval import Verdict
from steering.deciding.evidence import Evidence, Facts
from steering.deciding.rule_eval import Memory, Reading, judge
from steering.policy.conditions import All, AnyOf, Condition, Not, leaves
from steering.policy.file import parse

BAD, PENDING, BETWEEN, CLEAR, NONE = Verdict.BAD, Verdict.PENDING, Verdict.BETWEEN, Verdict.CLEAR, Verdict.NONE
A, B = path(1), path(2)
NINE = ("queueing delay", "p50", "9 ms ± 1 us", "above 5 ms")


class Judge:
    """A condition on rail 1, judged after every signal."""

    def __init__(self, when: str) -> None:
        self.condition, self.evidence = condition(when), Evidence()
        self.memory: Memory = ()

    def hear(self, *signals, now: int | None = None) -> Reading:
        for signal in signals:
            self.evidence.take(signal, signal.at_ns)
        return self.at(signals[-1].at_ns if now is None else now)

    def at(self, now: int) -> Reading:
        reading, self.memory = judge(self.condition, self.evidence.facts(A), self.memory, now)
        return reading


def verdict_of(when: str, *signals) -> Verdict:
    return Judge(when).hear(*signals).verdict


# ---- the leaves ----

QUEUEING = "{signal: queueing_delay, above: 5ms, clear_below: 1ms}"


@pytest.mark.parametrize(
    ("value", "bound", "verdict"),
    [
        (5 * MS, 0, BETWEEN),
        (5 * MS + 1, 0, BAD),
        (6 * MS, 1 * MS, BETWEEN),  # it might be 5 ms
        (6 * MS + 1, 1 * MS, BAD),
        (1 * MS, 0, BETWEEN),
        (1 * MS - 1, 0, CLEAR),
        (500_000, 500_000, BETWEEN),  # it might be 1 ms
        (499_999, 500_000, CLEAR),
        (None, 0, NONE),
        (20 * MS, None, NONE),  # a value without an error decides nothing
        (5 * MS, -1 * MS, NONE),  # nor one with an error that cannot be
    ],
)
def test_an_error_never_helps_to_a_verdict(value, bound, verdict):
    assert verdict_of(QUEUEING, measured(A, T0, value, bound)) is verdict


@pytest.mark.parametrize("quantile", ["p50", "p99", "last"])
def test_each_quantile_is_its_own(quantile):
    when = f"{{signal: queueing_delay, quantile: {quantile}, above: 5ms, clear_below: 1ms}}"
    signal = measured(A, T0, 0)
    assert verdict_of(when, signal) is CLEAR
    slow = msgspec.structs.replace(signal.forward, **{f"queueing_{quantile}_ns": 20 * MS})
    assert verdict_of(when, msgspec.structs.replace(signal, forward=slow)) is BAD


@pytest.mark.parametrize(("clock", "verdict"), [("synchronised", BAD), ("holdover", NONE), ("free_running", NONE)])
def test_a_one_way_delay_needs_clocks_that_were_just_compared(clock, verdict):
    delay = Delay(samples=5, owd_min_ns=1, owd_p50_ns=9 * MS, owd_p99_ns=9 * MS, bound_ns=1000)
    signal = msgspec.structs.replace(measured(A, T0), forward=delay, clock=clock)
    assert verdict_of("{signal: one_way_delay, above: 5ms, clear_below: 1ms}", signal) is verdict
    assert verdict_of("{signal: one_way_delay, quantile: min, above: 5ms, clear_below: 1ms}", signal) is (
        CLEAR if verdict is BAD else NONE
    )


@pytest.mark.parametrize(
    ("lost", "received", "verdict"),
    [(5, 5, BETWEEN), (6, 4, BAD), (10, 0, BAD), (1, 9, BETWEEN), (0, 9, CLEAR), (0, 0, NONE), (-1, 5, NONE)],
)
def test_loss(lost, received, verdict):
    signal = measured(A, T0, lost=lost, received=received)
    assert verdict_of("{signal: loss, above: 0.5, clear_below: 0.1}", signal) is verdict


@pytest.mark.parametrize(
    ("segments", "again", "verdict", "idle"),
    [(1000, 51, BAD, False), (1000, 50, BETWEEN, False), (1000, 10, BETWEEN, False), (1000, 9, CLEAR, False),
     (99, 99, NONE, True), (0, 0, NONE, True), (100, 100, BAD, False), (100, 300, BAD, False), (1000, -1, NONE, False)],
)  # fmt: skip
def test_retransmits(segments, again, verdict, idle):
    when = Judge("{signal: retransmits, above: 0.05, clear_below: 0.01}")
    reading = when.hear(kit.tcp(A, T0, segments, again))
    assert (reading.verdict, reading.idle) == (verdict, idle)


@pytest.mark.parametrize("cause", ["fast", "timeout", "tail_probe", "syn"])
def test_each_cause_is_its_own(cause):
    when = f"{{signal: retransmits, cause: {cause}, above: 0.05, clear_below: 0.01}}"
    others = dict.fromkeys({"fast", "timeout", "tail_probe", "syn"} - {cause}, 500)
    assert verdict_of(when, kit.tcp(A, T0, 2000, 1500, **others)) is CLEAR
    reading = Judge(when).hear(kit.tcp(A, T0, 2000, 500, **{cause: 500}))
    assert reading.verdict is BAD
    assert mentions(reading.text, "500 of 2000", "segments", cause, "25.00%", "above 5.00%")


def test_marks_there_and_back_are_different_facts():
    out = "{signal: ce_share, direction: out, above: 0.1, clear_below: 0.01}"
    back = "{signal: ce_share, direction: back, above: 0.1, clear_below: 0.01}"
    there, home = kit.tcp(A, T0, 1000, 0, delivered=1000, marked=200), kit.ecn(A, T0, 1000, 200)
    assert verdict_of(out, there, kit.ecn(A, T0, 1000, 0)) is BAD
    assert verdict_of(back, there, kit.ecn(A, T0, 1000, 0)) is CLEAR
    assert verdict_of(back, home, kit.tcp(A, T0, 1000, 0, delivered=1000)) is BAD
    assert verdict_of(out, home, kit.tcp(A, T0, 1000, 0, delivered=1000)) is CLEAR
    assert verdict_of(out, home) is NONE


@pytest.mark.parametrize(
    ("share", "verdicts", "expected"),
    [
        (0.01, ["dead", "ok", "ok"], BAD),
        (0.01, ["ok", "congested"], CLEAR),
        (0.01, ["unknown"], NONE),
        (0.5, ["dead", "ok", "ok"], BETWEEN),
        (0.5, ["dead", "ok", "unknown"], BAD),  # one of the two that are judged
        (1, ["dead", "dead"], BAD),
        (1, ["dead", "ok"], BETWEEN),
        (0.01, [], NONE),
    ],
)
def test_rdma(share, verdicts, expected):
    pairs = [kit.queue_pair(A, T0, number, verdict) for number, verdict in enumerate(verdicts)]
    reading = Judge(f"{{signal: rdma, verdict: dead, share: {share}}}").hear(*pairs, now=T0)
    assert reading.verdict is expected
    assert reading.idle is (expected is NONE)


@pytest.mark.parametrize(
    ("dead", "ok", "expected"),
    [
        ({1001: 1000}, {}, BAD),
        ({1001: 1000}, {1000: 1}, BETWEEN),  # the made-up pairs of one user against the only one of another
        ({1001: 1000}, {1000: 1, 1002: 1}, BETWEEN),
        ({1001: 1000, 1000: 1}, {1002: 1}, BAD),
        ({1000: 2}, {1000: 1}, BAD),
        ({1000: 1}, {1000: 1}, BETWEEN),
        ({1000: 1}, {1000: 5}, BETWEEN),
        ({1000: 2, 1001: 2}, {1000: 1, 1001: 1}, BAD),
        ({}, {1000: 1, 1001: 1}, CLEAR),
    ],
)
def test_every_user_has_one_vote_about_a_path_and_one_pair_of_many_does_not_steer(dead, ok, expected):
    judge, number = Judge("{signal: rdma, verdict: dead}"), 0
    for verdict, users in (("dead", dead), ("ok", ok)):
        for uid, pairs in users.items():
            for _ in range(pairs):
                number += 1
                reading = judge.hear(kit.queue_pair(A, T0, number, verdict, uid=uid), now=T0)
    assert reading.verdict is expected


PAIRS = [
    ("carrier_lost", "carrier_found", lambda bad, at: kit.link(A, at, carrier=not bad)),
    ("neighbour_failed", "neighbour_reachable", lambda bad, at: kit.link(A, at, failed=(A.gateway,) if bad else ())),
    ("mtu_mismatch", "mtu_agrees", lambda bad, at: kit.mtu(A, at, "mismatch" if bad else "agrees")),
    ("port_down", "port_up", lambda bad, at: kit.port(A, at, "down" if bad else "active")),
]


@pytest.mark.parametrize(("begins", "ends", "report"), PAIRS)
def test_a_state_of_the_link_lasts_until_its_opposite(begins, ends, report):
    when = Judge(f"{{signal: link, event: {begins}}}")
    reading = when.hear(kit.event(A, T0, begins))
    assert (reading.verdict, reading.failure) == (BAD, begins != "mtu_mismatch")
    for at in range(T0 + SECOND, T0 + 8 * SECOND, SECOND):
        reading = when.hear(report(True, at))
        assert (reading.verdict, reading.since_ns) == (BAD, T0)
    assert when.hear(kit.event(A, T0 + 9 * SECOND, ends)).verdict is CLEAR


@pytest.mark.parametrize(("begins", "ends", "report"), PAIRS)
def test_what_was_not_told_is_learnt_from_the_reports(begins, ends, report):
    when = Judge(f"{{signal: link, event: {begins}}}")
    assert when.at(T0).verdict is NONE
    assert when.hear(report(False, T0)).verdict is CLEAR
    assert when.hear(report(True, T0 + SECOND)).verdict is BAD
    assert when.hear(report(False, T0 + 2 * SECOND)).verdict is CLEAR
    assert when.at(T0 + 20 * SECOND).verdict is NONE  # nobody reports any more


def test_an_interface_that_is_removed_has_no_carrier():
    assert verdict_of("{signal: link, event: carrier_lost}", kit.event(A, T0, "removed", [])) is BAD


@pytest.mark.parametrize("word", ["flap", "queue_full", "pause_storm", "gid_changed"])
def test_an_event_without_an_opposite_holds_for_its_time(word):
    when = Judge(f"{{signal: link, event: {word}, hold: 3s}}")
    assert when.hear(kit.link(A, T0)).verdict is CLEAR
    assert when.hear(kit.event(A, T0 + SECOND, word)).verdict is BAD
    assert when.hear(kit.link(A, T0 + 4 * SECOND - 1)).verdict is BAD
    assert when.hear(kit.link(A, T0 + 4 * SECOND)).verdict is CLEAR


def test_events_of_one_path_are_not_those_of_another_over_the_same_interface():
    other = path(1, "h3")
    for word, verdict in (("mtu_mismatch", NONE), ("carrier_lost", BAD)):
        assert verdict_of(f"{{signal: link, event: {word}}}", kit.event(other, T0, word)) is verdict


SILENT = "{signal: silence, missed: 3, lasting: 0ms}"


@pytest.mark.parametrize(
    ("asked", "limit", "missed", "verdict"),
    [
        (3, None, 2, BETWEEN),
        (3, None, 3, BAD),
        (3, 2, 2, BETWEEN),  # the rule asks for more
        (3, 3, 3, BAD),
        (3, 10, 9, BETWEEN),
        (3, 10, 10, BAD),
        (12, 10, 11, BETWEEN),
        (12, 10, 12, BAD),
    ],
)
def test_a_path_is_dead_at_the_larger_of_the_limits_of_rule_and_path(asked, limit, missed, verdict):
    silent = kit.liveness(A, T0, missed, limit=limit, recent_loss=0.2)
    reading = Judge(f"{{signal: silence, missed: {asked}, lasting: 0ms}}").hear(kit.liveness(B, T0), silent)
    assert reading.verdict is verdict
    assert ("10 needed at a recent loss of 20%" in reading.text) is (limit == 10 and asked == 3 and missed < 10)


@pytest.mark.parametrize(
    ("asked", "missed", "extra", "verdict"), [(3, 4, 5, BETWEEN), (3, 4, 6, BAD), (5, 4, 6, BETWEEN), (5, 5, 5, BAD)]
)
def test_extra_probes_count_towards_the_limit_of_a_path_but_not_of_a_rule(asked, missed, extra, verdict):
    silent = kit.liveness(A, T0, missed, limit=10, recent_loss=0.2, missed_extra=extra)
    reading = Judge(f"{{signal: silence, missed: {asked}, lasting: 0ms}}").hear(kit.liveness(B, T0), silent)
    assert reading.verdict is verdict


@pytest.mark.parametrize(("silent_ms", "verdict"), [(61, BETWEEN), (399, BETWEEN), (400, Verdict.BAD)])
def test_a_silence_that_a_queue_may_explain_is_waited_with(silent_ms, verdict):
    silent = kit.liveness(A, T0, 3 + silent_ms // 20, silent_ns=silent_ms * MS)
    reading = Judge("{signal: silence, missed: 3}").hear(kit.liveness(B, T0), silent)
    assert reading.verdict is verdict
    assert ("a queue may hold 400 ms" in reading.text) is (verdict is BETWEEN)


def test_the_silence_of_a_path_that_never_answered_says_nothing():
    never = kit.liveness(A, T0, 50, last_answer_ns=None)
    reading = Judge(SILENT).hear(kit.liveness(B, T0), never)
    assert (reading.verdict, reading.idle) == (NONE, False)
    assert mentions(reading.text, "50 probes missed", "no probe", "ever answered")


def test_silence_counts_when_another_path_answers():
    when = Judge(SILENT)
    assert when.hear(kit.liveness(B, T0), kit.liveness(A, T0)).verdict is CLEAR
    at = T0 + 100 * MS
    assert when.hear(kit.liveness(A, at, missed=3)).verdict is BETWEEN  # B may only not have been told of yet
    reading = when.hear(kit.liveness(B, at))
    assert (reading.verdict, reading.failure, reading.since_ns) == (BAD, True, at - 30 * MS)
    assert mentions(reading.text, "3 probes missed", f"{B} answers", "30 ms")
    assert when.hear(kit.liveness(A, at + MS, missed=2, silent_ns=31 * MS)).verdict is BETWEEN


def test_answers_in_a_row_are_counted_by_the_prober():
    when = Judge(SILENT)
    assert when.hear(kit.liveness(A, T0, answered_run=7)).run == 7
    assert when.at(T0).run == 7


# ---- memory ----

LASTING = "{signal: queueing_delay, above: 5ms, clear_below: 1ms, for: 40ms}"


def test_bad_for_long_enough_is_bad():
    when = Judge(LASTING)
    verdicts = [when.hear(measured(A, T0 + i * 20 * MS, 9 * MS)).verdict for i in range(4)]
    assert verdicts == [PENDING, PENDING, BAD, BAD]


def test_bad_often_enough_is_bad():
    when = Judge("{signal: queueing_delay, above: 5ms, clear_below: 1ms, fall: 3}")
    readings = [when.hear(measured(A, T0 + i * 20 * MS, 9 * MS)) for i in range(3)]
    assert [each.verdict for each in readings] == [PENDING, PENDING, BAD]
    assert mentions(readings[1].text, *NINE, "for 20 ms", "2 in a row", "not yet 3")


# ---- samples ----

COUNTED = "{signal: queueing_delay, quantile: QUANTILE, above: 5ms, clear_below: 1ms, samples: 3}"


def windows(when, readings, every_ns=20 * MS):
    """What is said after each of these windows of 100 ms: delay and number of samples."""
    return [
        when.hear(measured(A, T0 + i * every_ns, value, received=samples))
        for i, (value, samples) in enumerate(readings)
    ]


@pytest.mark.parametrize(
    ("quantile", "samples", "verdict"),
    [("p50", 4, PENDING), ("p50", 5, BAD), ("p99", 100, PENDING), ("last", 100, PENDING)],
)
def test_one_window_shows_as_many_samples_as_its_quantile_says(quantile, samples, verdict):
    (reading,) = windows(Judge(COUNTED.replace("QUANTILE", quantile)), [(9 * MS, samples)])
    assert reading.verdict is verdict


@pytest.mark.parametrize(("samples", "verdict"), [(2, PENDING), (3, BAD)])
def test_at_the_least_delay_all_samples_count(samples, verdict):
    when = Judge("{signal: one_way_delay, quantile: min, above: 5ms, clear_below: 1ms, samples: 3}")
    delay = Delay(samples=samples, owd_min_ns=9 * MS, bound_ns=0)
    assert when.hear(replace(measured(A, T0), forward=delay)).verdict is verdict


def test_samples_of_windows_that_overlap_count_once():
    readings = windows(Judge(COUNTED.replace("QUANTILE", "p50")), [(9 * MS, 2)] * 11)
    assert [each.verdict for each in readings] == [PENDING] * 10 + [BAD]  # one each at 0, 100 and 200 ms
    assert mentions(readings[9].text, *NINE, "for 180 ms", "2 samples", "not yet in 3")


def test_of_windows_that_overlap_the_one_with_more_samples_counts():
    readings = windows(Judge(COUNTED.replace("QUANTILE", "p50")), [(9 * MS, 1), (9 * MS, 3), (9 * MS, 5), (9 * MS, 1)])
    assert [each.verdict for each in readings] == [PENDING, PENDING, BAD, BAD]


def test_last_samples_count_each_and_the_same_one_once():
    when = Judge(COUNTED.replace("QUANTILE", "last"))
    readings = windows(when, [(9 * MS, 5), (9 * MS, 5), (8 * MS, 5), (8 * MS, 5), (7 * MS, 5)])
    assert [each.verdict for each in readings] == [PENDING] * 4 + [BAD]
    assert mentions(readings[-1].text, "queueing delay", "last", "7 ms ± 1 us", "above 5 ms", "for 80 ms", "3 samples")


@pytest.mark.parametrize("between", [0, 3 * MS])
def test_samples_are_counted_without_a_break(between):
    when = Judge(COUNTED.replace("QUANTILE", "last"))
    readings = windows(when, [(9 * MS, 5), (8 * MS, 5), (between, 5), (9 * MS, 5), (8 * MS, 5)])
    assert all(each.verdict is not BAD for each in readings)
    again = windows(Judge(COUNTED.replace("QUANTILE", "last")), [(9 * MS, 5), (8 * MS, 5), (None, 0), (7 * MS, 5)])
    assert again[-1].verdict is BAD, "a window without samples is no break"


def test_overtaken_probes_are_samples():
    def late(overtaken):
        signal = replace(
            measured(A, T0, None, received=0),
            overtaken=overtaken,
            overtaken_p50_ns=9 * MS,
            overtaken_forward_p50_ns=9 * MS,
        )
        return verdict_of(COUNTED.replace("QUANTILE", "p50"), signal)

    assert (late(4), late(5)) == (PENDING, BAD)


@given(
    st.lists(st.sampled_from([0, 9]), max_size=40),
    st.lists(st.integers(1, 3), min_size=40, max_size=40),
    st.sampled_from(["p50", "p99", "last"]),
    st.integers(1, 8),
)
def test_no_more_samples_are_counted_than_there_were_probes_beyond(probes, every, quantile, asked):
    """A probe every 20 ms; windows of 100 ms that end at some of them."""
    when = Judge(COUNTED.replace("QUANTILE", quantile).replace("3", str(asked)))
    at, began = 0, None
    for step in every:
        at += step
        if at > len(probes):
            break
        window = [ms * MS + i for i, ms in enumerate(probes)][max(0, at - 5) : at]  # each has a value of its own
        ranked = sorted(window)
        figure = {"p50": ranked[len(ranked) // 2], "p99": ranked[-1], "last": window[-1]}[quantile]
        verdict = when.hear(measured(A, T0 + at * 20 * MS, figure, received=len(window))).verdict
        if verdict in (BAD, PENDING):
            began = max(0, at - 5) if began is None else began
            beyond = sum(ms == 9 for ms in probes[began:at])
            assert verdict is not BAD or beyond >= asked
        else:
            began = None


def test_a_measurement_counts_once():
    when = Judge("{signal: queueing_delay, above: 5ms, clear_below: 1ms, fall: 2}")
    first = when.hear(measured(A, T0, 9 * MS))
    assert all(when.at(T0 + i * MS) == first for i in range(100))
    assert when.hear(measured(A, T0 + 20 * MS, 9 * MS)).verdict is BAD


@pytest.mark.parametrize("between", [0, 3 * MS])
def test_one_measurement_that_is_not_bad_starts_it_again(between):
    when = Judge(LASTING)
    for i in range(10):
        value = between if i % 2 else 9 * MS
        assert when.hear(measured(A, T0 + i * 20 * MS, value)).verdict is not BAD


def no_samples(at_ns, received=0):
    """A window in which no probe was answered, or only probes of before it: an agent that was kept from running."""
    return measured(A, at_ns, None, received=received)


@pytest.mark.parametrize("received", [0, 5])
def test_a_window_without_samples_starts_nothing_again(received):
    when = Judge(LASTING)
    assert when.hear(measured(A, T0, 9 * MS)).verdict is PENDING
    assert when.hear(no_samples(T0 + 20 * MS, received)).verdict is PENDING
    assert when.hear(measured(A, T0 + 40 * MS, 9 * MS)).verdict is BAD
    reading = when.hear(no_samples(T0 + 60 * MS, received))
    assert (reading.verdict, reading.since_ns, reading.run) == (PENDING, T0, 2), "no act without a sample"
    assert mentions(reading.text, *NINE, "for 40 ms", "no sample since")
    assert when.hear(measured(A, T0 + 80 * MS, 9 * MS)).verdict is BAD


def test_a_window_without_samples_is_no_measurement():
    """It neither makes what is remembered last longer, nor counts."""
    when = Judge("{signal: queueing_delay, above: 5ms, clear_below: 1ms, fall: 3}")
    when.hear(measured(A, T0, 9 * MS))
    for at in range(T0, T0 + 500 * MS, 20 * MS):
        assert when.hear(no_samples(at + 20 * MS)).run == 1
    assert when.hear(no_samples(T0 + 501 * MS)).verdict is NONE
    assert when.hear(measured(A, T0 + 502 * MS, 9 * MS)).run == 1


def test_a_window_in_which_no_probe_was_due_does_not_end_a_loss():
    when = Judge("{signal: loss, above: 0.5, clear_below: 0.1, for: 40ms}")
    assert when.hear(measured(A, T0, lost=9, received=1)).verdict is PENDING
    assert when.hear(measured(A, T0 + 20 * MS, None, lost=0, received=0)).verdict is PENDING
    assert when.hear(measured(A, T0 + 40 * MS, lost=9, received=1)).verdict is BAD


@given(st.lists(st.sampled_from([0, 3 * MS, 9 * MS, "empty"]), max_size=60))
def test_what_is_said_after_windows_without_samples_is_as_if_they_had_not_come(values):
    when, without = Judge(LASTING), Judge(LASTING)
    for i, value in enumerate(values):
        now = T0 + i * 20 * MS
        if value == "empty":
            before = without.at(now).verdict
            assert when.hear(no_samples(now)).verdict is (PENDING if before in (BAD, PENDING) else NONE)
        else:
            got, expected = (judge.hear(measured(A, now, value)) for judge in (when, without))
            assert got == expected


def test_a_pause_starts_it_again():
    when = Judge(LASTING)
    when.hear(measured(A, T0, 9 * MS))
    assert when.hear(measured(A, T0 + 501 * MS, 9 * MS)).verdict is PENDING
    assert when.hear(measured(A, T0 + 1001 * MS, 9 * MS)).verdict is BAD  # measured within 500 ms


def test_what_is_old_says_nothing():
    when = Judge(QUEUEING)
    assert when.hear(measured(A, T0, 9 * MS)).verdict is BAD
    assert when.at(T0 + 500 * MS).verdict is BAD
    assert when.at(T0 + 500 * MS + 1).verdict is NONE


def test_long_windows_live_twice_as_long():
    when = Judge("{signal: retransmits, above: 0.05, clear_below: 0.01}")
    when.hear(kit.tcp(A, T0, 1000, 500))
    assert when.at(T0 + 2 * SECOND).verdict is BAD
    assert when.at(T0 + 2 * SECOND + 1).verdict is NONE
    # A signal that claims a window of years does not live for years.
    when.hear(msgspec.structs.replace(kit.tcp(A, T0 + SECOND, 1000, 500), window_ns=1 << 60))
    assert when.at(T0 + 200 * SECOND).verdict is NONE


def test_a_condition_that_changed_forgets():
    """Another policy's memory is of no use, and does no harm."""
    _, memory = judge(condition(LASTING), Facts(A), (), T0)
    reading, after = judge(condition(f"{{all: [{LASTING}, {QUEUEING}]}}"), Facts(A), memory, T0)
    assert reading.verdict is NONE
    assert len(after) == 2


# ---- trees ----

LOSS = "{signal: loss, above: 0.5, clear_below: 0.1}"
RANK = [CLEAR, NONE, BETWEEN, PENDING, BAD]


def facts_for(queueing: int | None, lost: int, received: int = 5) -> PathDelay:
    return measured(A, T0, queueing, lost=lost, received=received)


@pytest.mark.parametrize(
    ("tree", "queueing", "lost", "received", "expected"),
    [
        ("all", 9 * MS, 9, 1, BAD),
        ("all", 9 * MS, 0, 1, CLEAR),
        ("all", 9 * MS, 1, 5, BETWEEN),
        ("all", None, 9, 1, NONE),
        ("all", None, 0, 1, CLEAR),  # one that is clear is enough
        ("any", 9 * MS, 0, 1, BAD),
        ("any", 3 * MS, 0, 1, BETWEEN),
        ("any", 0, 0, 1, CLEAR),
        ("any", None, 0, 1, CLEAR),
        ("any", None, 0, 0, NONE),
    ],
)
def test_all_and_any(tree, queueing, lost, received, expected):
    assert verdict_of(f"{{{tree}: [{QUEUEING}, {LOSS}]}}", facts_for(queueing, lost, received)) is expected


def test_not_turns_it_round():
    not_queueing = f"{{not: {QUEUEING}}}"
    assert verdict_of(not_queueing, facts_for(9 * MS, 0)) is CLEAR
    assert verdict_of(not_queueing, facts_for(0, 0)) is BAD
    assert verdict_of(not_queueing, facts_for(3 * MS, 0)) is BETWEEN
    assert verdict_of(not_queueing, facts_for(None, 0)) is NONE
    assert verdict_of(f"{{not: {LASTING}}}", facts_for(9 * MS, 0)) is BETWEEN  # not yet bad, nor clear


def test_the_reason_is_what_made_it():
    reading = Judge(f"{{any: [{QUEUEING}, {LOSS}]}}").hear(facts_for(9 * MS, 0))
    assert mentions(reading.text, *NINE) and "loss" not in reading.text and reading.signals == ("queueing_delay",)
    reading = Judge(f"{{all: [{QUEUEING}, {LOSS}]}}").hear(facts_for(9 * MS, 9, 1))
    assert mentions(reading.text, *NINE, "loss", "9 of 10 probes", "90%", "above 50%")
    assert reading.signals == ("queueing_delay", "loss")


def test_since_when_a_tree_holds():
    both, one = (Judge(f"{{{tree}: [{QUEUEING}, {LOSS}]}}") for tree in ("all", "any"))
    for judged in (both, one):
        judged.hear(measured(A, T0, 9 * MS, lost=0))
        judged.hear(measured(A, T0 + 20 * MS, 9 * MS, lost=9, received=1))
    last = measured(A, T0 + 40 * MS, 9 * MS, lost=9, received=1)
    assert (both.hear(last).since_ns, both.at(last.at_ns).run) == (T0 + 20 * MS, 2)  # all: since the last of them
    assert (one.hear(last).since_ns, one.at(last.at_ns).run) == (T0, 3)  # any: since the first


# ---- jobs ----


def of_jobs(when: str, *jobs: Job, path: Path = A, later: int = 0) -> Reading:
    """What a condition about jobs says."""
    evidence = Evidence()
    for each in jobs:
        evidence.take(each, each.at_ns)
    found = parse(rule(when, "{alert: {}}")).rules[0].when
    assert found is not None
    return judge(found, evidence.facts(path), (), T0 + later)[0]


def job(verdict: str = "network", at: Path | None = A, low: float = 0.3, missing: tuple[str, ...] = (), **more) -> Job:
    """A job on the two paths, with one cause, of one path or of none; with `healthy` or `unknown` there is none."""
    cause = JobCause(verdict, 0.4, low, 0.5, None if at else 2, at, at.interface if at else "", "measured so")
    causes = [] if verdict in ("healthy", "unknown") else [cause, *more.pop("others", [])]
    why = JobVerdict(verdict, "so", causes, None, dict.fromkeys(missing, "not there"))
    used = [JobPath(each, each.interface, 4, 0, 1, 1) for each in (A, B)]
    return samples.job(at_ns=T0, host="h1", paths=used, why=why, **more)


LATE = JobCause("straggler", 0.2, 0.15, 0.25, 2, None, "", "rank 2 comes late")


@pytest.mark.parametrize(
    ("when", "told", "expected"),
    [
        ("{signal: job_step}", job(), BAD),
        ("{signal: job_step, cause: network}", job(), BAD),
        ("{signal: job_step, cause: network}", job(at=B), CLEAR),  # of the other path
        ("{signal: job_step, cause: host}", job("host", at=None), BAD),  # of all paths of the job
        ("{signal: job_step, cause: host}", job(), CLEAR),
        ("{signal: job_step, cause: host}", job(missing=("host",)), NONE),
        ("{signal: job_step, cause: host}", job(missing=("ranks", "gpu")), CLEAR),
        ("{signal: job_step, at_least: 0.31}", job(), CLEAR),
        ("{signal: job_step}", job("healthy"), CLEAR),
        ("{signal: job_step}", job("unknown", missing=("ranks",)), NONE),
        ("{signal: job_step, cause: network}", job("unknown", missing=("ranks",)), CLEAR),
        ("{signal: job_step, cause: straggler}", job("host", at=None, others=[LATE]), CLEAR),  # it is not the first
        ("{signal: straggler}", job("host", at=None, others=[LATE]), BAD),
        ("{signal: straggler, at_least: 0.16}", job("host", at=None, others=[LATE]), CLEAR),
        ("{signal: straggler}", job(missing=("ranks",)), NONE),
    ],
)
def test_what_is_said_of_a_job_counts_for_its_paths(when, told, expected):
    assert of_jobs(when, told).verdict is expected


def test_of_several_jobs_the_worst_counts_and_none_that_has_ended():
    worse = job(low=0.35, job="b")
    reading = of_jobs("{signal: job_step}", job(), worse, job("healthy", job="c"))
    assert reading.verdict is BAD and reading.text.startswith("job b: network explains 40% of a step (35% to 50%)")
    gone = of_jobs("{signal: job_step}", job(), later=3 * SECOND)
    assert gone.verdict is NONE and gone.idle
    old = of_jobs("{signal: job_step}", samples.job(at_ns=T0, host="h1", why=None))  # of an agent without verdicts
    assert old.verdict is NONE and not old.idle


# ---- laws ----

parsed = functools.cache(condition)  # reading YAML is most of the time otherwise
LEAVES = st.sampled_from(
    [
        QUEUEING, LASTING, LOSS, SILENT,
        "{signal: one_way_delay, above: 5ms, clear_below: 1ms}",
        "{signal: retransmits, above: 0.05, clear_below: 0.01, fall: 2}",
        "{signal: ce_share, above: 0.05, clear_below: 0.01}",
        "{signal: ce_share, direction: back, above: 0.05, clear_below: 0.01}",
        "{signal: link, event: carrier_lost}",
        "{signal: link, event: flap}",
        "{signal: rdma, verdict: congested, share: 0.5, clear_below: 0.2}",
    ]
)  # fmt: skip
TREES = st.recursive(
    LEAVES.map(parsed),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: All(all=tuple(parts)))
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: AnyOf(any=tuple(parts)))
        | inner.map(lambda part: Not(**{"not": part}))
    ),
    max_leaves=6,
)
NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    """Facts as any program may publish them: every number may be anything."""
    delay = Delay(*(draw(st.none() | NUMBERS) if i else draw(NUMBERS) for i in range(10)))
    whole = measured(A, draw(NUMBERS))
    delay_signal = msgspec.structs.replace(
        whole,
        forward=delay,
        window_ns=draw(NUMBERS),
        received=draw(NUMBERS),
        lost=draw(NUMBERS),
        overtaken_p50_ns=draw(st.none() | NUMBERS),
        overtaken_forward_p50_ns=draw(st.none() | NUMBERS),
    )
    alive = [
        kit.liveness(
            over,
            draw(NUMBERS),
            draw(NUMBERS),
            silent_ns=draw(NUMBERS),
            interval_ns=draw(NUMBERS),
            answered_run=draw(NUMBERS),
            last_answer_ns=draw(st.none() | NUMBERS),
            last_request_ns=draw(st.none() | NUMBERS),
        )
        for over in (A, B)
    ]
    maybe = st.booleans()
    return Facts(
        A,
        delay=delay_signal if draw(maybe) else None,
        liveness=alive[0] if draw(maybe) else None,
        siblings=tuple(alive[1:]) if draw(maybe) else (),
        tcp=kit.tcp(A, draw(NUMBERS), *(draw(NUMBERS) for _ in range(4))) if draw(maybe) else None,
        ecn=kit.ecn(A, draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)) if draw(maybe) else None,
        link=kit.link(A, draw(NUMBERS), draw(maybe)) if draw(maybe) else None,
        queue_pairs=tuple(
            kit.queue_pair(A, draw(NUMBERS), 1, verdict)
            for verdict in draw(st.lists(st.sampled_from(["ok", "congested", "unknown"]), max_size=3))
        ),
        events=tuple(
            kit.event(A, draw(NUMBERS), what) for what in draw(st.lists(st.sampled_from(["flap", "carrier_lost"])))
        ),
    )


@given(TREES, st.lists(st.tuples(any_facts(), NUMBERS), max_size=4))
def test_whatever_is_published_the_answer_is_a_reading(tree, told):
    memory: Memory = ()
    for facts, now in told:
        reading, memory = judge(tree, facts, memory, now)
        assert reading.text
        assert len(memory) == len(list(leaves(tree)))
        assert hash(memory) is not None


def negated(node: Condition) -> Condition:
    return Not(**{"not": node})


def reading_of(tree: Condition, facts: Facts) -> Reading:
    return judge(tree, facts, (), T0)[0]


FRESH = st.builds(
    lambda queueing, lost, received, segments, again, silent: Facts(
        A,
        delay=measured(A, T0, queueing, lost=lost, received=received),
        tcp=kit.tcp(A, T0, segments, again),
        liveness=kit.liveness(A, T0, silent),
        siblings=(kit.liveness(B, T0),),
    ),
    st.sampled_from([0, 3 * MS, 9 * MS]),
    st.integers(0, 9),
    st.integers(1, 9),
    st.just(1000),
    st.sampled_from([0, 20, 500]),
    st.sampled_from([0, 2, 9]),
)
MEASURED = st.recursive(
    st.sampled_from([QUEUEING, LASTING, LOSS, SILENT, "{signal: retransmits, above: 0.05, clear_below: 0.01}"]).map(
        parsed
    ),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: All(all=tuple(parts)))
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: AnyOf(any=tuple(parts)))
    ),
    max_leaves=6,
)


@given(st.lists(MEASURED, min_size=1, max_size=3), FRESH)
def test_de_morgan_where_everything_is_measured(parts, facts):
    """not (a and b) is (not a) or (not b), and the other way round, in verdict and in since when."""
    for outer, inner in ((All, AnyOf), (AnyOf, All)):
        key, other = ("all", "any") if outer is All else ("any", "all")
        left = reading_of(negated(outer(**{key: tuple(parts)})), facts)
        right = reading_of(inner(**{other: tuple(negated(part) for part in parts)}), facts)
        assert left.verdict is right.verdict
        if left.verdict in (BAD, CLEAR):
            assert (left.since_ns, left.run) == (right.since_ns, right.run)


@given(TREES, any_facts(), st.integers(T0 - SECOND, T0 + SECOND))
def test_one_part_alone_and_twice_is_that_part(tree, facts, now):
    alone = judge(tree, facts, (), now)[0].verdict
    assert judge(All(all=(tree,)), facts, (), now)[0].verdict is alone
    assert judge(AnyOf(any=(tree, tree)), facts, (), now)[0].verdict is alone
    twice = judge(negated(negated(tree)), facts, (), now)[0].verdict
    assert twice is (BETWEEN if alone is PENDING else alone)


@given(st.lists(MEASURED, min_size=1, max_size=3), MEASURED, FRESH)
def test_more_parts_never_make_all_worse_nor_any_better(parts, more, facts):
    """Ranked from clear to bad: `all` can only fall with another part, `any` only rise (all of them measured)."""
    rank = RANK.index
    few, many = tuple(parts), (*parts, more)
    assert rank(reading_of(All(all=many), facts).verdict) <= rank(reading_of(All(all=few), facts).verdict)
    assert rank(reading_of(AnyOf(any=many), facts).verdict) >= rank(reading_of(AnyOf(any=few), facts).verdict)


@given(MEASURED, FRESH, st.integers(0, 20 * MS), st.integers(0, 10))
def test_worse_measurements_never_clear(tree, facts, slower, again):
    """Without `not`: what gets worse in every figure moves no verdict toward clear."""
    worse = replace(
        facts,
        delay=measured(
            A,
            T0,
            facts.delay.forward.queueing_p50_ns + slower,
            lost=facts.delay.lost + again,
            received=facts.delay.received,
        ),
        tcp=kit.tcp(A, T0, 1000, facts.tcp.retransmitted_segments + 50 * again),
        liveness=kit.liveness(A, T0, facts.liveness.missed + again),
    )
    assert RANK.index(reading_of(tree, worse).verdict) >= RANK.index(reading_of(tree, facts).verdict)


def test_paths_are_told_apart():
    assert isinstance(A, Path)
    evidence = Evidence()
    evidence.take(measured(B, T0, 9 * MS), T0)
    assert judge(condition(QUEUEING), evidence.facts(A), (), T0)[0].verdict is NONE
