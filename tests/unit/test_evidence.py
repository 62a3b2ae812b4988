"""What is known: the newest fact of every subject, whoever publishes whatever."""

from __future__ import annotations

import msgspec
import policy_kit as kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import MS, SECOND, T0
from steering_kit import measured, path

from pytools.signals import Path, PathDelay
from steering.deciding import evidence
from steering.deciding.evidence import Evidence

A, B, ELSEWHERE = path(1), path(2), path(1, "h3")


def taken(*signals) -> Evidence:
    found = Evidence()
    for signal in signals:
        found.take(signal, signal.at_ns)
    return found


def test_a_path_has_all_that_is_known_of_it():
    told = (
        measured(A, T0), kit.liveness(A, T0), kit.liveness(B, T0), kit.liveness(ELSEWHERE, T0), kit.tcp(A, T0, 5),
        kit.ecn(A, T0, 5, 1), kit.mtu(A, T0, "agrees"), kit.link(A, T0), kit.port(A, T0, "active"),
        kit.queue_pair(A, T0, 1, "ok"), kit.queue_pair(B, T0, 2, "ok"), kit.event(A, T0, "flap"),
        kit.event(B, T0, "carrier_lost"), kit.event(ELSEWHERE, T0, "mtu_mismatch"),
    )  # fmt: skip
    found = taken(*told)
    facts = found.facts(A)
    assert (facts.delay, facts.liveness, facts.siblings) == (told[0], told[1], (told[2],))
    assert (facts.tcp, facts.ecn, facts.mtu, facts.link) == told[4:8]
    assert (facts.ports, facts.queue_pairs, facts.events) == ((told[8],), (told[9],), (told[11],))
    assert set(found.paths) == {A, B, ELSEWHERE}
    assert found.refused == 0


def test_the_newest_counts():
    found = taken(measured(A, T0, 5), measured(A, T0 + 2, 7))
    assert found.take(measured(A, T0 + 1, 6), T0 + 2) == ()
    assert found.facts(A).delay.forward.queueing_p50_ns == 7
    assert found.refused == 1


def test_the_shorter_window_counts_unless_it_is_heard_no_more():
    found = taken(measured(A, T0, window_ns=100 * MS))
    assert found.take(measured(A, T0 + 1, window_ns=SECOND), T0 + 1) == ()
    assert found.facts(A).delay.window_ns == 100 * MS
    assert found.take(measured(A, T0 + 10 * SECOND, window_ns=SECOND), T0 + 10 * SECOND) == (A,)
    found.forget_windows()
    assert found.facts(A).delay is None


def test_who_is_to_be_judged_again():
    found = taken(measured(A, T0), measured(B, T0), measured(ELSEWHERE, T0), kit.liveness(B, T0))
    assert found.take(measured(A, T0 + 1), T0 + 1) == (A,)
    assert set(found.take(kit.liveness(A, T0 + 1), T0 + 1)) == {A, B}  # B's silence is judged by A's answers
    assert set(found.take(kit.link(A, T0 + 1), T0 + 1)) == {A, ELSEWHERE}
    assert set(found.take(kit.event(A, T0 + 1, "carrier_lost", []), T0 + 1)) == {A, ELSEWHERE}
    assert found.take(kit.event(A, T0 + 1, "mtu_mismatch"), T0 + 1) == (A,)
    assert found.take(kit.event(A, T0 + 1, "gid_changed", []), T0 + 1) == ()


def test_a_queue_pair_moves_and_closes():
    found = taken(kit.queue_pair(A, T0, 1, "ok"), kit.queue_pair(A, T0, 2, "ok"))
    assert set(found.take(kit.queue_pair(B, T0 + 1, 1, "dead"), T0 + 1)) == {A, B}
    assert [pair.qp_number for pair in found.facts(A).queue_pairs] == [2]
    assert found.take(kit.queue_pair(B, T0 + 2, 1, "dead", closed=True), T0 + 2) == (B,)
    assert found.facts(B).queue_pairs == ()
    assert found.take(kit.queue_pair(None, T0 + 2, 2, "ok"), T0 + 2) == (A,)
    assert found.facts(A).queue_pairs == ()


@pytest.mark.parametrize("at", [T0 + evidence.FUTURE_NS + 1, T0 - evidence.FORGET_NS - 1, -(2**62), 2**62])
def test_what_cannot_be_now_is_refused(at):
    found = Evidence()
    assert found.take(measured(A, at), T0) == ()
    assert (found.refused, list(found.paths)) == (1, [])
    assert found.take(measured(A, T0), T0) == (A,)


def test_another_hosts_paths_are_refused():
    found = Evidence()
    for signal in (
        measured(A, T0),
        kit.liveness(A, T0),
        kit.queue_pair(A, T0, 1, "ok"),
        kit.event(A, T0, "mtu_mismatch"),
    ):
        assert found.take(msgspec.structs.replace(signal, host="h9"), T0) == ()
    assert (found.refused, list(found.paths)) == (4, [])


def test_what_is_not_heard_of_is_forgotten():
    found = taken(measured(A, T0), kit.queue_pair(A, T0, 1, "ok"), kit.event(A, T0, "flap"), kit.link(A, T0))
    later = T0 + evidence.FORGET_NS + SECOND
    found.take(measured(B, later), later)
    assert list(found.paths) == [B]
    assert found.facts(A) == evidence.Facts(A)


def test_there_is_room_for_so_many_and_old_ones_make_room(monkeypatch):
    monkeypatch.setattr(evidence, "MOST", 3)
    found = Evidence()
    many = [Path("h1", f"h{i}", f"10.9.0.{i}", "10.1.1.1", "rail1") for i in range(5)]
    assert [bool(found.take(measured(each, T0), T0)) for each in many] == [True] * 3 + [False] * 2
    assert found.refused == 2
    assert found.take(measured(many[0], T0 + 1), T0 + 1)  # those known go on
    later = T0 + evidence.FORGET_NS + SECOND
    assert [bool(found.take(measured(each, later), later)) for each in many[3:]] == [True, True]


SUBJECTS = st.sampled_from([A, B, ELSEWHERE])
TIMES = st.integers(T0 - 20 * SECOND, T0 + 20 * SECOND) | st.integers(-(2**63), 2**63 - 1)


@st.composite
def signals(draw: st.DrawFn):
    over, at = draw(SUBJECTS), draw(TIMES)
    made = draw(
        st.sampled_from(
            [
                measured(over, at, window_ns=draw(st.sampled_from([100 * MS, SECOND]))),
                kit.liveness(over, at, draw(st.integers(0, 3))),
                kit.tcp(over, at, 1),
                kit.link(over, at),
                kit.queue_pair(draw(st.none() | st.just(over)), at, draw(st.integers(1, 3)), "ok", draw(st.booleans())),
                kit.event(over, at, draw(st.sampled_from(["flap", "mtu_mismatch", "carrier_lost"]))),
            ]
        )
    )
    return msgspec.structs.replace(made, host=draw(st.sampled_from(["h1", "h1", "h1", "h9"])))


@given(st.lists(signals(), max_size=40), st.integers(1, 4))
def test_whatever_comes_it_is_bounded_and_new(told, most):
    """A model: the newest accepted fact of each subject; never more subjects than there is room for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "MOST", most)
        found, now = Evidence(), T0
        for signal in told:
            before = found.refused
            judged = found.take(signal, now)
            assert not (judged and found.refused > before)
            assert all(each.source == "h1" for each in judged) or not isinstance(signal, PathDelay)
        assert len(list(found.paths)) <= most
        for over in (A, B, ELSEWHERE):
            facts = found.facts(over)
            delays = [each for each in told if isinstance(each, PathDelay) and each.path == over and each.host == "h1"]
            if facts.delay is not None:
                assert facts.delay in delays
                assert now - evidence.FORGET_NS <= facts.delay.at_ns <= now + evidence.FUTURE_NS
            assert len(facts.queue_pairs) <= most
