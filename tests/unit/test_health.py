"""The state of one path: thresholds with errors, hysteresis, dwell and damping, silence."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import policy_kit as kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from steering_kit import MS, POLICY, SECOND, facts, measured, path
from support import mentions

from steering.deciding import health, hold_down, transitions
from steering.deciding.condition_eval import Verdict
from steering.policy.file import parse

T0 = 10**12
STEP = 20 * MS
RULES = POLICY.replace("step: 200ms", "step: 3s").replace("dwell: 1s", "dwell: 20s, max_dwell: 80s")


def shares_of(watched, measure, times):
    """When the share changed, and to what, as it is measured so often."""
    shares = []
    for _ in range(times):
        measure(STEP)
        share = health.share(watched.health)
        if not shares or shares[-1][1] != pytest.approx(share):
            shares.append((watched.now, share))
    return shares


def policy(more="", **changes):
    text = RULES
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return parse(text + more)


STEPS = ("then: {shift: {share: 0}}", "then: {shift: {share: 0.2, step: 0.3, settle: 1s}}")
SOFTEN = """\
  - name: soften
    when: {signal: queueing_delay, quantile: p50, above: 2ms, clear_below: 1ms}
    then: {shift: {share: 0.3}}
    return: {steps: [1.0]}
"""
SILENT = """\
  - name: silent-path
    when: {signal: silence, missed: 3, lasting: 0ms}
    then: {drain: {}}
    return: {dwell: 2s, steps: [1.0]}
"""


class Watched:
    """A path under a policy, measured every 20 ms; a drain that is due is granted unless told otherwise."""

    def __init__(self, under, grant=True):
        self.policy, self.grant = under, grant
        self.now = T0
        self.health = health.unknown(T0)
        self.log = []

    def feel(self, for_ns, **measurement):
        """Measure the same for so long."""
        for _ in range(max(1, for_ns // STEP)):
            self.now += STEP
            self.see(**measurement)
        return self.health

    def see(self, known=(), **measurement):
        """Measure once, now; more is known of the path."""
        seen = replace(facts(measured(path(), self.now, **measurement)), **dict(known))
        self.health = transitions.observe(self.policy, self.health, seen, self.now)
        self.note()

    def dead(self, for_ns, **measurement):
        """No probe is answered for so long, while another path answers; the window may still have earlier answers."""
        began = self.now
        for _ in range(max(1, for_ns // STEP)):
            self.now += STEP
            missed = (self.now - began) // (10 * MS)
            other = kit.liveness(path(2), self.now, answered_sent_ns=self.now)
            self.see({"liveness": kit.liveness(path(), self.now, missed), "siblings": (other,)}, **measurement)
        return self.health

    def silence(self, for_ns):
        """Measure nothing for so long."""
        end = self.now + for_ns
        while self.now < end:
            self.now += 50 * MS
            self.health = transitions.advance(self.policy, self.health, self.now)
            self.note()
        return self.health

    def note(self):
        if self.grant and health.due(self.policy, self.health) is not None:
            self._lower()
        if self.grant:
            self.health = transitions.in_force(self.health, self.now)
        if not self.log or self.log[-1][1] != self.health.state:
            self.log.append((self.now, self.health.state))

    def _lower(self):
        rule = self.policy.rules[health.due(self.policy, self.health)]
        share = health.wanted_share(self.policy, self.health, rule.then.share)
        self.health = transitions.lowered(self.policy, path(), self.health, share, self.now)

    @property
    def states(self):
        return [state for _, state in self.log]

    def bad(self, for_ns):
        return self.feel(for_ns, queueing_ns=20 * MS)

    def good(self, for_ns):
        return self.feel(for_ns, queueing_ns=0)


# ---- going down ----


def test_it_lasts_before_it_counts():
    watched = Watched(policy())
    watched.good(SECOND)
    assert watched.bad(STEP).state == "suspect"
    assert watched.bad(STEP).state == "suspect"
    assert watched.bad(STEP).state == "drained"  # 40 ms after the first


def test_a_short_spike_is_forgiven():
    watched = Watched(policy())
    for _ in range(50):
        watched.bad(2 * STEP)
        watched.feel(STEP, queueing_ns=4 * MS)  # not above, not clear
    assert set(watched.states) == {"healthy", "suspect"}


def test_without_a_duration_the_first_measurement_decides():
    watched = Watched(policy(now=("for: 40ms", "for: 0ms")))
    watched.good(STEP)
    assert watched.bad(STEP).state == "drained"


def test_a_drain_that_is_not_granted_leaves_it_suspect():
    watched = Watched(policy(), grant=False)
    assert watched.bad(10 * SECOND).state == "suspect"
    assert health.due(watched.policy, watched.health) == 0
    assert watched.good(STEP).state == "healthy"
    with pytest.raises(ValueError, match="not due"):
        transitions.lowered(watched.policy, path(), watched.health, 0.0, watched.now)


def test_the_reason_has_the_measurement_the_threshold_and_the_time():
    watched = Watched(policy())
    watched.bad(SECOND)
    assert mentions(watched.health.because, "queueing delay", "p50", "20 ms ± 1 us", "above 5 ms", "for 40 ms")


def test_the_first_rule_that_holds_decides_and_a_later_one_changes_nothing():
    watched = Watched(policy(more=SOFTEN))
    watched.feel(SECOND, queueing_ns=3 * MS)
    assert (watched.health.rule, health.share(watched.health)) == (1, 0.3)
    watched.bad(SECOND)
    assert (watched.health.rule, health.share(watched.health)) == (0, 0.0)
    assert watched.health.strikes == 1, "one congestion, not a relapse"
    watched.feel(SECOND, queueing_ns=3 * MS)
    assert watched.health.rule == 0


def test_a_failure_does_not_wait_behind_a_load_rule_that_waits():
    """Each host of a herd draws its own time for load; a path that dies meanwhile is left at once."""
    patient = policy(jitter=("safety: {", "safety: {herd: {jitter: 30s}, "), more=SILENT)
    watched = Watched(patient)
    watched.good(2 * SECOND)
    watched.bad(SECOND)
    assert watched.health.act_ns > watched.now + SECOND, "its time has not come"
    watched.dead(100 * MS, queueing_ns=20 * MS)
    assert (watched.health.state, watched.health.rule, health.share(watched.health)) == ("drained", 1, 0.0)


def test_a_failure_takes_over_a_path_that_a_load_rule_lowered():
    watched = Watched(policy(steps=(STEPS[0], "then: {shift: {share: 0, step: 0.3, settle: 1s}}"), more=SILENT))
    watched.bad(SECOND)
    assert (watched.health.rule, health.share(watched.health)) == (0, pytest.approx(0.7))
    watched.dead(SECOND, queueing_ns=None, lost=5, received=0)
    assert (watched.health.rule, health.share(watched.health)) == (1, 0.0)


def test_a_bad_measurement_never_raises_a_share():
    """Coming back at a tenth, it is bad under a rule that would leave it three tenths."""
    watched = Watched(policy(more=SOFTEN))
    watched.bad(2 * SECOND)
    while watched.health.state != "returning":
        watched.good(STEP)
    assert health.share(watched.health) == 0.1
    watched.feel(STEP, queueing_ns=3 * MS)
    assert (watched.health.state, watched.health.rule, health.share(watched.health)) == ("drained", 1, 0.1)


def test_ten_steps_of_a_tenth_lead_to_nothing_and_back_to_all():
    watched = Watched(policy(steps=(STEPS[0], "then: {shift: {share: 0, step: 0.1, settle: 100ms}}")))
    shares = set()
    for _ in range(100):
        shares.add(health.share(watched.bad(STEP)))
    assert sorted(shares) == [round(0.1 * n, 1) for n in range(11)]
    back = []
    while watched.health.state != "healthy":
        watched.good(STEP)
        back.append(health.share(watched.health))
    assert sorted(set(back)) == [round(0.1 * n, 1) for n in range(11)]


# ---- coming back ----


def test_it_comes_back_in_steps_once_it_was_good_for_the_dwell():
    watched = Watched(policy())
    watched.bad(SECOND)
    drained_at = watched.now
    shares = shares_of(watched, watched.good, 1600)
    assert [share for _, share in shares] == [0, 0.1, 0.5, 1.0]
    assert 20 * SECOND <= shares[1][0] - drained_at <= 20 * SECOND + 2 * STEP
    assert [later - earlier for (earlier, _), (later, _) in pairwise(shares[1:])] == [3 * SECOND] * 2
    assert watched.health.state == "healthy"


def test_between_the_thresholds_it_neither_goes_nor_comes():
    watched = Watched(policy())
    watched.feel(30 * SECOND, queueing_ns=3 * MS)
    assert watched.states == ["healthy"]
    watched.bad(SECOND)
    watched.feel(60 * SECOND, queueing_ns=3 * MS)
    assert watched.states == ["healthy", "suspect", "drained"]


def dwells_again_after(interrupt):
    watched = Watched(policy())
    watched.bad(SECOND)
    watched.good(19 * SECOND)
    interrupt(watched)
    assert watched.good(19 * SECOND).state == "drained"
    assert watched.good(2 * SECOND).state == "returning"
    return watched


def test_a_bad_measurement_starts_the_dwell_again():
    dwells_again_after(lambda watched: watched.bad(STEP))


def test_each_relapse_doubles_the_dwell_up_to_its_cap_and_health_halves_it():
    watched = Watched(policy(retry=("retry_after: 60s", "retry_after: 1ms")))
    rule = watched.policy.rules[0]
    waits = []
    for _ in range(5):
        watched.bad(SECOND)
        since = watched.now
        while watched.health.state != "returning":
            watched.good(STEP)
        waits.append(round((watched.now - since) / SECOND))
    assert waits == [20, 40, 80, 80, 80]
    strikes = watched.health.strikes
    while watched.health.state != "healthy":
        watched.good(STEP)
    for left in range(strikes - 1, -1, -1):
        wait = hold_down.dwell(rule, left + 1)
        watched.good(wait + 2 * STEP)
        assert watched.health.strikes == left


def test_steady_congestion_that_hides_when_drained_shows_at_most_one_reversal_a_minute():
    """The path looks perfect as soon as it is empty, and is bad as soon as it carries anything."""
    watched = Watched(policy(dwell=("dwell: 20s, max_dwell: 80s", "dwell: 1s, max_dwell: 2s")))
    for _ in range(600 * SECOND // STEP):
        loaded = health.share(watched.health) > 0
        watched.feel(STEP, queueing_ns=20 * MS if loaded else 0)
    returns = [when for when, state in watched.log if state == "returning"]
    assert len(returns) >= 5, "it is tried again and again"
    assert min(later - earlier for earlier, later in pairwise(returns)) >= 60 * SECOND


def test_a_path_that_answers_nothing_does_not_return():
    """Its link is back, and nobody answers over it."""
    rules = "    when: {any: [{signal: link, event: carrier_lost}, {signal: silence, missed: 3}]}\n"
    failing = parse(RULES[: RULES.index("    when:")] + rules + RULES[RULES.index("    then:") :])
    watched = Watched(failing)
    watched.good(SECOND)

    def feel(carrier, for_ns, **measurement):
        for _ in range(for_ns // STEP):
            watched.now += STEP
            watched.see({"link": kit.link(path(), watched.now, carrier=carrier)}, **measurement)
        return watched.health

    unanswered = {"queueing_ns": None, "lost": 5, "received": 0}
    assert feel(False, SECOND, **unanswered).state == "drained"
    assert feel(True, 60 * SECOND, **unanswered).state == "drained"
    assert feel(True, 19 * SECOND).state == "drained", "the dwell begins with the first answer"
    assert feel(True, 2 * SECOND).state == "returning"


def test_a_step_lasts_from_when_it_is_in_force():
    watched = Watched(policy())
    watched.bad(SECOND)
    watched.grant = False  # nothing is carried out
    assert watched.good(60 * SECOND).state == "returning"
    assert health.share(watched.health) == 0.1
    watched.grant = True
    watched.good(STEP)
    assert health.share(watched.good(2 * SECOND)) == 0.1
    assert health.share(watched.good(2 * SECOND)) == 0.5


# ---- silence ----


def test_silence_holds_then_unmeasured():
    watched = Watched(policy())
    watched.bad(SECOND)
    assert watched.silence(1_900 * MS).state == "drained"
    assert health.stale(watched.policy, watched.health, watched.now)
    assert watched.silence(300 * MS).state == "unmeasured"
    assert health.share(watched.health) == 1.0
    assert watched.good(STEP).state == "healthy"
    assert watched.health.strikes == 1, "it is remembered"


def test_time_passed_in_silence_counts_for_nothing():
    watched = dwells_again_after(lambda watched: watched.silence(SECOND))
    watched.good(1_500 * MS)
    watched.silence(SECOND)
    assert watched.health.step == 1
    watched.good(STEP)
    assert watched.health.step == 1, "a step that nobody watched is taken again"


def test_bad_before_and_after_a_silence_is_not_bad_throughout():
    watched = Watched(policy())
    watched.good(SECOND)
    watched.bad(STEP)
    watched.silence(SECOND)
    assert watched.bad(STEP).state == "suspect"
    assert watched.bad(2 * STEP).state == "drained"


@pytest.mark.parametrize("late_ns", [-600 * MS, 600 * MS])
def test_a_measurement_from_another_time_is_not_used(late_ns):
    known = transitions.observe(policy(), health.unknown(T0), facts(measured(path(), T0 + late_ns, 20 * MS)), T0)
    assert known.state == "unmeasured"


def test_an_older_measurement_changes_nothing():
    watched = Watched(policy())
    watched.good(SECOND)
    old = transitions.observe(
        watched.policy, watched.health, facts(measured(path(), watched.now - STEP, 20 * MS)), watched.now
    )
    assert old == watched.health


def test_a_path_that_answers_nothing_is_not_measured_but_not_silent():
    watched = Watched(policy())
    watched.feel(STEP)
    watched.feel(SECOND, queueing_ns=None, received=0, lost=5)
    assert watched.health.state == "healthy" and not watched.health.measured
    assert not health.stale(watched.policy, watched.health, watched.now)


def never_answered(at):
    """What is known of a path whose probes were never answered, while those of another are."""
    return replace(
        facts(measured(path(), at, None, received=0, lost=5)),
        liveness=kit.liveness(path(), at, 100, last_answer_ns=None),
        siblings=(kit.liveness(path(2), at),),
    )


def test_a_path_that_never_answered_is_neither_healthy_nor_dead():
    watched = Watched(policy(SILENT))
    for watched.now in range(T0, T0 + 10 * SECOND, STEP):
        watched.health = transitions.observe(watched.policy, watched.health, never_answered(watched.now), watched.now)
        assert (watched.health.state, watched.health.because) == ("unmeasured", health.NEVER_ANSWERED)
        assert health.due(watched.policy, watched.health) is None and not watched.health.failed
    assert watched.feel(STEP).state == "healthy"


@given(st.lists(st.sampled_from(["answer", "nothing", "never", "pause"]), max_size=40))
def test_no_path_is_healthy_before_its_first_answer(events):
    watched, answered = Watched(policy(SILENT)), False
    for event in events:
        if event == "pause":
            watched.silence(watched.policy.safety.baseline_after + SECOND)
            answered = False
        elif event == "answer":
            watched.feel(STEP)
            answered = True
        elif event == "nothing":
            watched.feel(STEP, queueing_ns=None, received=0, lost=5)
        else:
            watched.now += STEP
            seen = never_answered(watched.now)
            watched.health = transitions.observe(watched.policy, watched.health, seen, watched.now)
        assert (watched.health.state == "healthy") is answered
        assert watched.health.state in ("healthy", "unmeasured")


def left_for_dead():
    """A path that died, and was left for it."""
    watched = Watched(policy(SILENT))
    watched.feel(SECOND)
    assert watched.dead(SECOND, queueing_ns=None, received=0, lost=5).state == "drained" and watched.health.dead
    return watched


def test_a_path_that_was_dead_when_last_measured_stays_left_much_longer_than_another():
    watched, loaded = left_for_dead(), Watched(policy(SILENT))
    assert loaded.bad(SECOND).state == "drained"
    safety = watched.policy.safety
    for each in (watched, loaded):
        each.silence(safety.baseline_after + SECOND)
    assert (watched.health.state, loaded.health.state) == ("drained", "unmeasured")
    watched.silence(safety.dead_baseline_after - safety.baseline_after - 2 * SECOND)
    assert watched.health.state == "drained" and health.share(watched.health) == 0
    assert watched.silence(2 * SECOND).state == "unmeasured", "it is bounded"
    assert not watched.health.dead


def test_another_agent_does_not_make_a_dead_path_less_dead():
    """Of the new agent's probes none was ever answered: that is no evidence for a return, however often it starts."""
    watched = left_for_dead()
    for _ in range(3):
        watched.silence(7 * SECOND)
        for _ in range(100):
            watched.now += STEP
            seen = never_answered(watched.now)
            watched.health = transitions.observe(watched.policy, watched.health, seen, watched.now)
            assert watched.health.state == "drained" and watched.health.dead
    watched.feel(STEP)
    assert watched.silence(7 * SECOND).state == "drained", "answered once: not enough for a return"
    for _ in range(60 * SECOND // STEP):
        watched.now += STEP
        watched.see({"liveness": kit.liveness(path(), watched.now)})
    assert watched.health.state == "healthy" and not watched.health.dead
    assert watched.silence(7 * SECOND).state == "unmeasured", "it has come back since"


def test_a_path_that_was_never_left_is_not_kept_out_for_having_been_dead():
    watched = Watched(policy(SILENT), grant=False)
    watched.feel(SECOND)
    assert watched.dead(SECOND, queueing_ns=None, received=0, lost=5).state == "suspect" and watched.health.dead
    assert watched.silence(7 * SECOND).state == "unmeasured"


def test_never_heard_of_stays_unmeasured():
    never = health.unknown(T0)
    assert transitions.advance(policy(), never, T0 + 100 * SECOND) == never
    assert replace(never, since_ns=0).state == "unmeasured"


def test_a_path_that_got_its_weight_back_without_recovering_must_be_bad_again_to_go_down():
    watched = Watched(policy())
    watched.bad(SECOND)
    watched.health = transitions.lifted(watched.policy, watched.health, watched.now)
    assert watched.health.state == "healthy"
    assert health.share(watched.health) == 1.0
    assert watched.bad(STEP).state == "suspect"
    assert watched.bad(2 * STEP).state == "drained"
    assert watched.health.strikes == 1, "no relapse"
    healthy = Watched(policy())
    healthy.good(SECOND)
    assert transitions.lifted(healthy.policy, healthy.health, healthy.now) == healthy.health


# ---- in steps, and in herds ----


def test_a_rule_with_a_step_goes_down_in_steps_while_it_is_bad():
    watched = Watched(policy(steps=STEPS, back=("steps: [0.1, 0.5, 1.0]", "steps: [0.5, 1.0]")))
    shares = shares_of(watched, watched.bad, 5 * SECOND // STEP)
    assert [share for _, share in shares] == pytest.approx([1.0, 0.7, 0.4, 0.2])
    assert all(later - earlier >= SECOND for (earlier, _), (later, _) in pairwise(shares[1:]))
    assert watched.health.strikes == 1, "one congestion"


def test_it_stops_going_down_once_it_is_no_longer_bad():
    watched = Watched(policy(steps=STEPS, back=("steps: [0.1, 0.5, 1.0]", "steps: [0.5, 1.0]")))
    watched.bad(100 * MS)
    watched.feel(10 * SECOND, queueing_ns=3 * MS)
    assert health.share(watched.health) == pytest.approx(0.7)


def test_a_relapse_goes_back_to_the_share_that_held():
    """A rule with a step: 0.2 held, 0.5 held, 0.8 did not."""
    watched = Watched(policy(steps=STEPS, back=("steps: [0.1, 0.5, 1.0]", "steps: [0.5, 1.0]")))
    watched.bad(5 * SECOND)
    while health.share(watched.health) < 0.8:
        watched.good(STEP)
    assert health.share(watched.health) == pytest.approx(0.8)
    watched.bad(3 * STEP)
    assert (watched.health.state, health.share(watched.health)) == ("drained", pytest.approx(0.5))


def test_each_host_of_a_herd_waits_its_own_time():
    jitter = ("safety: {", "safety: {herd: {jitter: 2s}, ")
    patient = policy(jitter=jitter)
    when = [hold_down.drawn(patient, msgspec.structs.replace(path(), source=f"h{n}"), 1) for n in range(200)]
    assert 0 <= min(when) < 100 * MS
    assert 1_900 * MS < max(when) < 2 * SECOND
    watched = Watched(patient)
    watched.good(SECOND)
    began = watched.now
    while watched.health.state != "drained":
        watched.bad(STEP)
    bad_since = began + 3 * STEP  # for 40 ms
    wait = hold_down.drawn(patient, path(), bad_since)
    assert wait > STEP
    assert wait <= watched.now - bad_since < wait + STEP
    assert watched.health.lag > 0


def test_the_time_to_wait_begins_with_what_moves_something():
    """An alert that holds, and a failure, do not use up the time that a host waits before it acts on load."""
    alert = """\
  - name: say
    when: {signal: queueing_delay, above: 1ms, clear_below: 500us}
    then: {alert: {}}
"""
    jitter = ("safety: {", "safety: {herd: {jitter: 2s}, ")
    watched = Watched(policy(jitter=jitter, more=alert))
    watched.feel(11 * SECOND, queueing_ns=3 * MS)
    assert watched.health.readings[1].verdict is Verdict.BAD
    assert watched.health.act_ns is None
    watched.bad(STEP)
    watched.bad(2 * STEP)
    assert watched.health.act_ns >= watched.now
    assert watched.health.act_ns == watched.now + hold_down.drawn(watched.policy, path(), watched.now)


def test_several_good_measurements_in_a_row_before_the_first_step():
    rising = policy(back=("return: {dwell: 20s", "return: {rise: 2000, dwell: 20s"))
    watched = Watched(rising)
    watched.bad(SECOND)
    assert watched.good(30 * SECOND).state == "drained", "1500 of 2000"
    assert watched.good(11 * SECOND).state == "returning"


def told(watched):
    return hold_down.reason(watched.policy, watched.health, watched.now)


def test_while_it_waits_to_return_it_says_for_how_long_it_has_been_good():
    watched = Watched(policy())
    watched.bad(3 * STEP)
    left = watched.health.because
    assert told(watched) == left, "nothing was measured since it was left"
    watched.bad(SECOND)
    assert told(watched) == f"{left}; not good yet"
    watched.good(12 * SECOND + STEP)
    assert mentions(told(watched), "good for 12 s", "20 s", "before", left)
    watched.feel(STEP, queueing_ns=3 * MS)  # between the thresholds the time runs on
    assert told(watched).startswith("good for 12 s of 20 s; ")
    watched.bad(STEP)
    assert told(watched) == f"{left}; not good yet", "a bad measurement starts it again"
    assert watched.good(21 * SECOND).state == "returning"
    assert told(watched) == watched.health.because


def test_what_is_said_of_the_wait_is_what_is_waited_for():
    """Whatever keeps a path that was good for its dwell from returning, it says; and when nothing does it returns."""
    again = Watched(policy(retry=("dwell: 20s, max_dwell: 80s, retry_after: 60s", "dwell: 1s, retry_after: 60s")))
    again.bad(SECOND)
    again.good(2 * SECOND)
    assert again.health.state == "returning"
    again.bad(SECOND)
    again.good(10 * SECOND + STEP)
    assert told(again).startswith("good for 10 s of 2 s, not tried again for 4"), "a relapse doubles the dwell"
    again.good(50 * SECOND)
    assert again.health.state != "drained"

    rising = Watched(policy(back=("return: {dwell: 20s", "return: {rise: 2000, dwell: 20s")))
    rising.bad(SECOND)
    rising.good(30 * SECOND)
    assert told(rising).startswith("good for 30 s of 20 s, 1500 of 2000 measurements in a row; before: ")
    rising.feel(STEP, queueing_ns=3 * MS)
    assert told(rising).startswith("good for 30 s of 20 s, not clear now; ")

    herd = Watched(policy(herd=("safety: {", "safety: {herd: {jitter: 1s}, ")))
    herd.bad(5 * SECOND)
    herd.good(STEP)
    lag = herd.health.lag
    assert lag > 0
    assert told(herd).startswith(f"good for 0 ns of {20 * (1 + lag):.3g} s; ")


def test_what_the_kernel_took_away_comes_back_as_one_that_failed():
    failing = parse(
        RULES
        + """\
  - name: leave-dead-path
    when: {signal: silence, missed: 3, lasting: 0ms}
    then: {drain: {}}
    return: {dwell: 2s}
"""
    )
    watched = Watched(failing)
    watched.good(SECOND)
    gone = transitions.taken_away(failing, path(), watched.health, watched.now)
    assert (gone.state, gone.rule, health.share(gone)) == ("drained", 1, 0.0)
    assert transitions.taken_away(failing, path(), gone, watched.now) == gone
    assert transitions.taken_away(policy(), path(), watched.health, watched.now) == watched.health, (
        "no rule asks for it"
    )
    lowered = replace(gone, rule=0, share=0.9)
    gone = transitions.taken_away(failing, path(), lowered, watched.now)
    assert (gone.rule, health.share(gone), gone.strikes) == (1, 0.0, lowered.strikes), "also what was down for load"


# ---- as much evidence to return as to leave ----

DEAD = """\
  - name: dead-path
    when: {signal: silence, missed: 10, lasting: 0ms}
    then: {drain: {}}
    return: {dwell: 1s, max_dwell: 1s, retry_after: 0s, steps: [1.0], step: 100ms}
"""


def dead_first(dead=DEAD, more=""):
    """The rule for silence before the one for load, which then takes over nothing that is down."""
    return parse(RULES.replace("rules:\n", f"rules:\n{dead}") + more)


def answers(watched, for_ns, run=None, **measurement):
    """The path answers for so long: `run` in a row so far, or more and more; each window says the same."""
    began = watched.now
    for _ in range(max(1, for_ns // STEP)):
        watched.now += STEP
        count = run or (watched.now - began) // (10 * MS)
        live = kit.liveness(path(), watched.now, answered_run=count, answered_sent_ns=watched.now)
        other = kit.liveness(path(2), watched.now, answered_sent_ns=watched.now)
        watched.see({"liveness": live, "siblings": (other,)}, **measurement)
    return watched.health


def died(watched):
    answers(watched, SECOND)
    assert watched.dead(SECOND, queueing_ns=None, received=0, lost=5).state == "drained"
    return watched


def test_two_answers_in_a_row_are_not_ten_however_long_they_stand():
    watched = died(Watched(dead_first()))
    assert answers(watched, 5 * SECOND, run=2).state == "drained"
    assert mentions(told(watched), "fewer good", "bad")
    assert answers(watched, STEP, run=10).state == "returning"


def test_a_dead_path_without_a_queue_returns_by_the_dwell_of_its_own_rule():
    watched = died(Watched(dead_first()))
    assert answers(watched, 1100 * MS).state in ("returning", "healthy")


def test_a_path_left_for_silence_returns_by_the_dwell_of_the_queue_that_showed_when_it_answered():
    """The failover rule had a dwell of 1 s, and took the path back under the queue: four acts in each trial."""
    watched = died(Watched(dead_first()))
    began = watched.now
    answers(watched, 100 * MS, queueing_ns=40 * MS)
    answers(watched, 19 * SECOND)
    assert watched.health.state == "drained", watched.health.because
    assert told(watched).startswith("good for 19 s of 20 s; before: 10 probes missed")
    answers(watched, 1200 * MS)
    assert watched.health.state in ("returning", "healthy")
    assert watched.now - began > 20 * SECOND


WAITED = ("overtaken_p50_ns", "overtaken_forward_p50_ns")


def test_probes_that_were_overtaken_on_a_dead_path_are_no_queue():
    watched = died(Watched(dead_first()))
    watched.now += STEP
    signal = replace(measured(path(), watched.now), overtaken=6, **dict.fromkeys(WAITED, 60 * MS))
    seen = replace(facts(signal), liveness=kit.liveness(path(), watched.now, answered_run=2))
    watched.health = transitions.observe(watched.policy, watched.health, seen, watched.now)
    assert watched.health.also == frozenset()
    assert answers(watched, 1200 * MS).state in ("returning", "healthy")


@pytest.mark.slow
@settings(max_examples=15)  # each is minutes of a path
@given(
    st.lists(st.tuples(st.sampled_from(["dead", "slow", "good"]), st.integers(1, 40)), max_size=12),
    st.sampled_from([1, 3, 10]),
)
def test_nothing_returns_sooner_than_every_rule_it_was_bad_under_allows(phases, missed):
    watched = died(Watched(dead_first(DEAD.replace("missed: 10", f"missed: {max(missed, 2)}"))))
    last = {"dead": watched.now, "slow": None}
    for what, steps in phases:
        for _ in range(steps):
            before = watched.health
            if what == "dead":
                watched.dead(STEP, queueing_ns=None, received=0, lost=5)
                last["dead"] = watched.now
            else:
                answers(watched, 50 * STEP, run=100, queueing_ns=20 * MS if what == "slow" else 0)
                last["slow"] = watched.now if what == "slow" else last["slow"]
            if before.state == "drained" and watched.health.state in ("returning", "healthy"):
                assert what == "good"
                assert watched.now - last["dead"] >= SECOND
                assert last["slow"] is None or watched.now - last["slow"] >= 20 * SECOND
                return


@pytest.mark.parametrize(
    ("leaf", "needed"),
    [
        ("above: 5ms, clear_below: 1ms, for: 400ms", 400 * MS),
        ("above: 5ms, clear_below: 1ms, fall: 30", 29 * STEP),
        ("above: 5ms, clear_below: 1ms, samples: 30", 900 * MS),  # three a window, and windows overlap
    ],
)
def test_the_thresholds_of_any_other_rule_must_be_clear_for_as_long_as_they_must_be_bad(leaf, needed):
    other = f"  - name: other\n    when: {{signal: queueing_delay, quantile: p50, {leaf}}}\n    then: {{drain: {{}}}}\n"
    watched = died(Watched(dead_first(DEAD.replace("dwell: 1s, max_dwell: 1s", "dwell: 40ms, max_dwell: 40ms"), other)))
    began = watched.now
    while watched.health.state == "drained":
        answers(watched, STEP, run=100)
        assert watched.now - began < 5 * SECOND
    assert needed <= watched.now - began <= needed + 200 * MS
