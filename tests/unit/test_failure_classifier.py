"""What the silence of a path means: only a dead path is a reason to leave it, and only its siblings can tell."""

from __future__ import annotations

import policy_kit as kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import MS, T0
from steering_kit import path
from support import mentions

from pytools.signals import Path
from steering.deciding.failure_classifier import classify

A, B, C = path(1), path(2), path(3)
INTERVAL = 10 * MS
FIRST = T0 - 40 * MS  # when the first missed probe of A left


def silent(over: Path = A, missed: int = 4, **fields):
    return kit.liveness(over, T0, missed, silent_ns=40 * MS, interval_ns=INTERVAL, **fields)


def answering(over: Path = B, last_ns: int = T0 - MS, at_ns: int = T0, **fields):
    return kit.liveness(over, at_ns, last_answer_ns=last_ns, interval_ns=INTERVAL, **fields)


def test_a_path_that_answers():
    assert classify(kit.liveness(A, T0), ()).cause == "answers"


def test_a_path_is_dead_when_another_to_the_same_peer_answers():
    found = classify(silent(), [answering()])
    assert found.cause == "path_dead" and mentions(found.text, "4 probes missed", f"{B} answers")


@pytest.mark.parametrize(
    ("last_ns", "cause"),
    [
        (FIRST - 1, "waiting"),
        (FIRST + 1, "waiting"),  # the peer may have sent it before it died
        (FIRST + 2 * INTERVAL, "waiting"),
        (FIRST + 2 * INTERVAL + 1, "path_dead"),
        (T0, "path_dead"),
        (T0 + 1, "waiting"),  # an answer from the future is none
        (None, "waiting"),
    ],
)
def test_the_other_path_must_have_answered_well_after_the_first_miss(last_ns, cause):
    assert classify(silent(), [answering(last_ns=last_ns)]).cause == cause


@pytest.mark.parametrize(
    ("sent_ns", "cause"), [(FIRST + INTERVAL, "waiting"), (FIRST + INTERVAL + 1, "path_dead"), (T0 + 1, "waiting")]
)
def test_where_it_is_told_the_answered_probe_must_have_left_after_the_second_miss(sent_ns, cause):
    assert classify(silent(), [answering(answered_sent_ns=sent_ns)]).cause == cause


def test_overdue_probes_that_left_in_a_burst_are_one_moment() -> None:
    """A sender that was kept from running: three probes within 15 ms at an interval of 10 tell no more than one."""
    burst = kit.liveness(A, T0, 3, silent_ns=15 * MS, interval_ns=INTERVAL)
    assert classify(burst, [answering()]).cause == "waiting"


def test_a_silence_of_unknown_length_began_after_the_last_answer():
    long = silent(last_answer_ns=T0 - 15 * MS)
    assert classify(long, [answering(last_ns=T0)]).cause == "waiting"


def test_what_was_told_of_the_other_path_before_is_not_enough():
    assert classify(silent(), [answering(last_ns=FIRST - MS, at_ns=FIRST)]).cause == "waiting"


def test_one_path_to_the_peer_cannot_be_told_from_the_peer():
    found = classify(silent(), ())
    assert found.cause == "unknown"
    assert "with one path to h2" in found.text


def test_a_peer_that_is_silent_on_every_path_and_sends_nothing_is_dead():
    others = [silent(B, last_request_ns=FIRST - MS), silent(C)]
    assert classify(silent(last_request_ns=FIRST), others).cause == "peer_dead"


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_peer_that_answers_nowhere_but_asks_has_a_broken_reflector(where):
    paths = [silent(over, last_request_ns=T0 - MS if i == where else None) for i, over in enumerate((A, B, C))]
    assert classify(paths[0], paths[1:]).cause == "probe_broken"


def test_two_dead_paths_are_both_dead_while_a_third_answers():
    assert classify(silent(A), [silent(B), answering(C)]).cause == "path_dead"
    assert classify(silent(B), [silent(A), answering(C)]).cause == "path_dead"


@pytest.mark.parametrize(
    ("request_ns", "way"),
    [(T0 - MS, "there"), (FIRST - MS, "back or both"), (None, "unknown"), (T0 + 1, "back or both")],
)
def test_which_direction_does_not_pass(request_ns, way):
    found = classify(silent(last_request_ns=request_ns), [answering()])
    assert (found.cause, found.way) == ("path_dead", way)
    assert ("still come in over it" in found.text) is (way == "there")


def test_paths_to_the_same_address_count_before_those_to_another_of_the_peer():
    """Where nobody answers on one address, another of the peer's proves nothing about the paths to the first."""
    other_family = Path("h1", "h2", "fd00:9::2", "fd00:2::1", "rail2")
    assert classify(silent(A), [silent(B), answering(other_family)]).cause == "peer_dead"
    assert classify(silent(A), [answering(other_family)]).cause == "path_dead"


@pytest.mark.parametrize(
    ("loss", "run", "cause"),
    [
        (0.0, 0, "path_dead"),
        (0.25, 0, "path_dead"),
        (0.26, 0, "waiting"),
        (0.26, 2, "waiting"),
        (0.26, 3, "path_dead"),  # three of the four probes that the other path missed
        (None, 2, "waiting"),
        (None, 3, "path_dead"),
        (-0.1, 0, "waiting"),  # no share of anything
    ],
)
def test_the_other_path_must_have_answered_nearly_all_of_its_probes(loss, run, cause):
    found = classify(silent(), [answering(recent_loss=loss, answered_run=run)])
    assert found.cause == cause
    if loss is not None and loss > 0 and cause == "waiting":
        assert mentions(found.text, "4 probes missed", f"{B} answers 74%", "too few")


@pytest.mark.parametrize(
    ("missed", "loss", "limit", "cause"),
    [
        (13, 0.36, 14, "waiting"),
        (14, 0.36, 14, "path_dead"),
        (14, 0.36, None, "waiting"),
        (48, 0.75, 48, "path_dead"),
        (100, 0.76, 48, "waiting"),  # whoever loses so much says nothing
    ],
)
def test_a_lossy_path_testifies_against_a_silence_that_its_own_loss_does_not_explain(missed, loss, limit, cause):
    long = kit.liveness(A, T0, missed, silent_ns=missed * INTERVAL, interval_ns=INTERVAL)
    assert classify(long, [answering(recent_loss=loss, limit=limit, answered_run=1)]).cause == cause


@pytest.mark.parametrize(("extra", "cause"), [(15, "waiting"), (16, "path_dead")])
def test_extra_probes_count_where_a_lossy_path_testifies(extra, cause):
    found = classify(silent(missed_extra=extra), [answering(recent_loss=0.5, limit=20, answered_run=1)])
    assert found.cause == cause


def test_one_reliable_path_is_enough():
    lossy = answering(B, recent_loss=0.5, answered_run=1)
    assert classify(silent(), [lossy, answering(C, recent_loss=0.0)]).cause == "path_dead"


@pytest.mark.parametrize(
    ("longest_ns", "cause"), [(40 * MS - 1, "path_dead"), (40 * MS, "waiting"), (None, "path_dead")]
)
def test_a_silence_no_longer_than_a_round_trip_is_a_queue(longest_ns, cause):
    found = classify(silent(longest_rtt_ns=longest_ns), [answering()])
    assert found.cause == cause
    if cause == "waiting":
        assert mentions(found.text, "4 probes missed", "within 40 ms", "round trip", "up to 40 ms")


@pytest.mark.parametrize("missed", [0, 4, 1000])
def test_a_path_that_never_answered_is_not_measured(missed):
    never = kit.liveness(A, T0, missed, last_answer_ns=None, interval_ns=INTERVAL)
    assert classify(never, [answering()]).cause == "unmeasured"
    assert classify(never, ()).cause == "unmeasured"


PEER_DIES, NEVER = "peer dies", 10**18


@given(
    st.integers(0, INTERVAL - 1),
    st.integers(0, INTERVAL - 1),
    st.integers(0, INTERVAL // 2),
    st.integers(0, INTERVAL // 2),
    st.integers(0, 200 * MS),
    st.sampled_from(["peer", "path A"]),
    st.booleans(),
)
def test_the_death_of_a_peer_is_never_taken_for_that_of_a_path(phase_a, phase_b, delay_a, delay_b, look, dies, exact):
    """Two paths with delays of their own, probed every interval; at time 0 the peer, or path A, dies."""
    now = T0 + 30 * MS + look

    def as_told(over: Path, phase: int, delay: int, dead: bool):
        sent = range(T0 - 20 * INTERVAL + phase, now + 1, INTERVAL)
        answers = [left + 2 * delay for left in sent if not (dead and left + delay >= T0)]
        last = max(at for at in answers if at <= now)
        exactly = {"answered_sent_ns": last - 2 * delay} if exact else {}
        missed = [left for left in sent if left > last and left <= now - INTERVAL]
        return kit.liveness(
            over,
            now,
            len(missed),
            silent_ns=now - missed[0] if missed else 0,
            interval_ns=INTERVAL,
            last_answer_ns=last,
            **exactly,
        )

    told = as_told(A, phase_a, delay_a, True), as_told(B, phase_b, delay_b, dies == "peer")
    causes = classify(told[0], told[1:]).cause, classify(told[1], told[:1]).cause
    if dies == "peer":
        assert "path_dead" not in causes
    else:
        assert causes[1] == "answers"
        assert told[0].missed < 3 or causes[0] == "path_dead"


TIMES = st.none() | st.integers(T0 - 200 * MS, T0 + 10 * MS)
SHARES = st.none() | st.floats(0, 1)


@given(
    st.integers(0, 20),
    st.integers(0, 200 * MS),
    st.tuples(TIMES, TIMES, st.none() | st.integers(0, 200 * MS)),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), SHARES, TIMES, TIMES), max_size=3),
)
def test_a_verdict_against_a_path_always_rests_on_all_of_its_conditions(missed, silent_ns, own, others):
    last_ns, sent_ns, longest_ns = own
    path_ = kit.liveness(
        A,
        T0,
        missed,
        silent_ns=silent_ns,
        interval_ns=INTERVAL,
        last_answer_ns=last_ns,
        answered_sent_ns=sent_ns,
        longest_rtt_ns=longest_ns,
    )
    siblings = [
        kit.liveness(
            over,
            T0,
            theirs,
            answered_run=run,
            recent_loss=loss,
            last_answer_ns=at_ns,
            answered_sent_ns=left_ns,
            interval_ns=INTERVAL,
        )
        for over, (theirs, run, loss, at_ns, left_ns) in zip((B, C, path(4)), others, strict=False)
    ]
    second_ns = max(T0 - silent_ns, last_ns or 0) + INTERVAL

    def testifies(run, loss, at_ns, left_ns):
        answered_ns = left_ns if left_ns is not None else None if at_ns is None else at_ns - INTERVAL
        after = answered_ns is not None and answered_ns > second_ns and (left_ns or at_ns) <= T0
        return after and (run >= 0.75 * missed or (loss is not None and loss <= 0.25))

    dead = (
        (last_ns is not None or sent_ns is not None)
        and missed > 0
        and silent_ns >= (missed - 1) * INTERVAL
        and (longest_ns is None or silent_ns > longest_ns)
        and any(testifies(*each[1:]) for each in others)
    )
    assert (classify(path_, siblings).cause == "path_dead") is dead
