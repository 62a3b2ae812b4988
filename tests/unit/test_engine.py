"""The deciding half as a whole, against a made-up fabric that does anything: what must hold whatever happens.

Hypothesis drives a simulated host of three rails: rails turn bad and good, fall silent, lose their probes, the kernel
refuses acts. Time is simulated; nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise

import policy_kit as kit
import pytest
import support
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace
from steering_kit import MS, SECOND, TARGET, group, measured, path

from steering.deciding import apart
from steering.deciding import engine as engine_module
from steering.deciding.decide import decide
from steering.deciding.engine import Engine
from steering.deciding.evidence import FORGET_NS
from steering.deciding.overrides import NONE, Override, Overrides
from steering.deciding.thresholds import ENOUGH, Learnt
from steering.deciding.usual import Entry, Key
from steering.plan import weights_of
from steering.policy.file import parse

RAILS = (1, 2, 3)
ORIGINAL = weights_of({11: 1, 12: 1, 13: 1})
TICK = 100 * MS
POLICY = parse("""\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.67, stale_after: 500ms, baseline_after: 2s}
rules:
  - name: lossy
    when: {signal: loss, above: 0.5, for: 200ms, clear_below: 0.1}
    then: {shift: {share: 0}}
    return: {dwell: 2s, max_dwell: 8s, steps: [0.1, 0.5, 1.0], step: 500ms, retry_after: 60s}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 200ms, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 2s, max_dwell: 8s, steps: [0.1, 0.5, 1.0], step: 500ms, retry_after: 60s}
""")

FAILING = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: silent
    when: {signal: silence}
    then: {drain: {}}
"""

ALERT = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: sent-again
    when: {signal: retransmits, above: 0.1, clear_below: 0.01}
    then: {alert: {}}
"""


class Fabric:
    """A host with three rails, its kernel, and the engine that steers it."""

    def __init__(self):
        self.now = 10**12
        self.engine = Engine(POLICY)
        targets = {"10.9.0.2": (TARGET,)}
        self.engine.arrange([group({rail: [] for rail in RAILS})], lambda a: targets.get(a, ()), self.now)
        self.kernel = ORIGINAL
        self.condition = dict.fromkeys(RAILS, "good")
        self.refuses = False
        self.heard = dict.fromkeys(RAILS, 0)  # when a rail was last measured with a value
        self.told = dict.fromkeys(RAILS, 0)  # when it was last measured, answered or not
        self.log = [(self.now, ORIGINAL)]

    def run(self, ticks):
        for _ in range(ticks):
            self.tick()

    def tick(self):
        """100 ms: every rail is measured as it is, and the engine acts."""
        self.now += TICK
        for rail in RAILS:
            self._measure(rail)
        for change in self.engine.changes(self.now):
            assert change.before == self.kernel, "the engine knows what is in force"
            self._check(change)
            if self.refuses:
                self.engine.rejected(change, "refused")
                continue
            self.kernel = change.after
            self.log.append((self.now, change.after))
            self.engine.carried_out(change, self.now, change.after)

    def _measure(self, rail):
        loaded = 10 + rail in dict(self.kernel)
        value, lost = {
            "good": (0, 0),
            "bad": (20 * MS, 0),
            "bad under load": (20 * MS if loaded else 0, 0),
            "between": (3 * MS, 0),
            "uncertain": (20 * MS, 0),
            "dead": (None, 5),
            "silent": (None, 0),
        }[self.condition[rail]]
        if self.condition[rail] == "silent":
            return
        self.told[rail] = self.now
        bound = 30 * MS if self.condition[rail] == "uncertain" else 1_000
        received = 0 if value is None else 5
        self.engine.take(measured(path(rail), self.now, value, bound, lost=lost, received=received), self.now)
        if value is not None:
            self.heard[rail] = self.now

    def _check(self, change):
        assert change.after, "never an empty group"
        assert change.because
        if change.after == ORIGINAL:
            return
        before, after = (self._parts(weights) for weights in (change.before, change.after))
        for rail in RAILS:
            if after[10 + rail] > before[10 + rail] + 1e-9:
                fresh = self.now - self.heard[rail] <= POLICY.safety.stale_after
                assert fresh, f"toward rail {rail}, of which nothing is known"
        assert min(len(change.before), len(change.after)) >= 1

    @staticmethod
    def _parts(weights):
        total = sum(weight for _, weight in weights)
        found = {nexthop: weight / total for nexthop, weight in weights}
        return {10 + rail: found.get(10 + rail, 0.0) for rail in RAILS}


def state_of(engine, now, over):
    """What the engine says of a path."""
    [state] = [each for each in engine.states("h1", now, 0) if each.path == over]
    return state


class Steering(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fabric = Fabric()

    @rule(
        rail=st.sampled_from(RAILS),
        condition=st.sampled_from(["good", "bad", "bad under load", "between", "uncertain", "dead", "silent"]),
        ticks=st.integers(1, 40),
    )
    def change(self, rail, condition, ticks):
        self.fabric.condition[rail] = condition
        self.fabric.run(ticks)

    @rule(refuses=st.booleans(), ticks=st.integers(1, 10))
    def kernel_refuses(self, refuses, ticks):
        self.fabric.refuses = refuses
        self.fabric.run(ticks)

    @rule()
    def everything_heals(self):
        """However it got here: once all is well for long enough, the weights are the original ones."""
        self.fabric.condition = dict.fromkeys(RAILS, "good")
        self.fabric.refuses = False
        deadline = self.fabric.now + 80 * SECOND
        while not self.healed() and self.fabric.now < deadline:
            self.fabric.run(10)
        self.fabric.run(10)
        assert self.healed()

    def healed(self):
        states = {state.state for state in self.fabric.engine.states("h1", self.fabric.now, 0)}
        return self.fabric.kernel == ORIGINAL and states == {"healthy"}

    @rule()
    def silence(self):
        """Nothing is heard: first nothing moves, then the original weights come back."""
        self.fabric.condition = dict.fromkeys(RAILS, "silent")
        self.fabric.refuses = False
        self.fabric.run(6)
        held, first = self.fabric.kernel, min(self.fabric.told.values())
        for _ in range(2 * SECOND // TICK):
            self.fabric.tick()
            if self.fabric.now - first <= POLICY.safety.baseline_after:
                assert self.fabric.kernel == held
            assert self.fabric.kernel in (held, ORIGINAL)
        assert self.fabric.kernel == ORIGINAL

    @invariant()
    def never_empty_and_never_more_than_allowed(self):
        weights = dict(self.fabric.kernel)
        assert weights
        assert len(RAILS) - len(weights) <= 0.67 * len(RAILS)

    @invariant()
    def no_path_comes_back_twice_within_its_retry_time(self):
        for rail in RAILS:
            tried = self._returns_of(rail)
            assert all(later - earlier >= 60 * SECOND for earlier, later in pairwise(tried))

    def _returns_of(self, rail):
        """When a drained rail got its first step; getting everything back after silence is no try."""
        found = []
        for (_, before), (when, after) in pairwise(self.fabric.log):
            weights = dict(after)
            gained = 10 + rail not in dict(before) and 10 + rail in weights
            if gained and weights[10 + rail] < max(weights.values()):
                found.append(when)
        return found


Steering.TestCase.settings = settings(max_examples=15, stateful_step_count=15)
TestSteering = pytest.mark.slow(Steering.TestCase)


def test_steady_congestion_on_one_rail_leaves_the_others_alone():
    fabric = Fabric()
    fabric.run(50)
    fabric.condition[1] = "bad"
    fabric.run(600)
    assert [weights for _, weights in fabric.log] == [ORIGINAL, ((12, 1), (13, 1))]


@pytest.mark.slow
def test_congestion_that_hides_when_drained_shows_at_most_one_reversal_in_any_minute():
    fabric = Fabric()
    fabric.condition[1] = "bad under load"
    fabric.run(600 * SECOND // TICK)
    returns = [
        when for (_, before), (when, after) in pairwise(fabric.log) if 11 not in dict(before) and 11 in dict(after)
    ]
    assert 5 <= len(returns) <= 11
    assert all(later - earlier >= 60 * SECOND for earlier, later in pairwise(returns))


def drained_and_good_again():
    """Rail 1 was drained, and its dwell is nearly over."""
    fabric = Fabric()
    fabric.run(10)
    fabric.condition[1] = "bad"
    fabric.run(10)
    fabric.condition[1] = "good"
    fabric.run(15)
    assert fabric.kernel == ORIGINAL[1:]
    return fabric


def test_a_state_says_how_far_a_drained_path_is_while_it_is_measured():
    fabric = drained_and_good_again()
    why = state_of(fabric.engine, fabric.now, path(1)).reason
    assert re.fullmatch(r"good for 1\.4 s of 2 s; before: queueing delay p50 20 ms .* above 5 ms .*", why)
    fabric.now += 600 * MS
    assert state_of(fabric.engine, fabric.now, path(1)).reason.startswith("hold: stale; before: queueing delay")


def came_back_in_steps(fabric):
    steps = [weights for _, weights in fabric.log[-3:]]
    return steps == [((11, 1), (12, 10), (13, 10)), ((11, 5), (12, 10), (13, 10)), ORIGINAL]


def test_the_way_back_waits_until_it_is_carried_out():
    """While the kernel refuses, or nothing may be changed, nobody sees how a step goes."""
    fabric = drained_and_good_again()
    fabric.refuses = True
    fabric.run(100)
    fabric.refuses = False
    fabric.run(100)
    assert came_back_in_steps(fabric)


def test_the_way_back_waits_while_the_operator_holds_the_group():
    fabric = drained_and_good_again()
    fabric.engine.overrides = Overrides((Override("hold"),))
    fabric.run(100)
    assert fabric.kernel == ORIGINAL[1:]
    fabric.engine.overrides = NONE
    fabric.run(100)
    assert came_back_in_steps(fabric)


def test_the_way_back_waits_while_another_path_is_stale():
    fabric = drained_and_good_again()
    for _ in range(10):
        fabric.condition[2] = "silent"
        fabric.run(18)
        fabric.condition[2] = "good"
        fabric.run(1)
    assert came_back_in_steps(fabric)


def test_nothing_is_decided_while_all_is_well(monkeypatch):
    fabric, asked = Fabric(), []

    def counted(policy, paths, groups, *more):
        asked.extend(groups)
        return decide(policy, paths, groups, *more)

    monkeypatch.setattr(engine_module, "decide", counted)

    def decided(ticks=1):
        asked.clear()
        fabric.run(ticks)
        return len(asked)

    assert decided(10) > 0, "what was never measured before"
    assert decided(100) == 0
    fabric.condition[1] = "bad"
    assert decided() == 1
    assert decided(20) == 20 and fabric.kernel == ORIGINAL[1:]
    fabric.condition[1] = "good"
    fabric.run(100)
    assert fabric.kernel == ORIGINAL and decided(100) == 0
    fabric.condition[1], fabric.refuses = "bad", True
    fabric.run(10)
    assert fabric.engine.why_rejected(TARGET) == "refused"
    fabric.condition[1], fabric.refuses = "good", False
    assert decided() == 1
    assert (fabric.engine.why_rejected(TARGET), fabric.engine.wanted()) == ("", {TARGET: ORIGINAL})
    assert decided() == 0
    fabric.engine.overrides = Overrides((Override("drain", interface="rail2"),))
    assert decided() == 1 and fabric.kernel == ((11, 1), (13, 1))
    fabric.engine.overrides = NONE
    fabric.run(2)
    assert fabric.kernel == ORIGINAL and decided(10) == 0
    fabric.condition[3] = "silent"
    assert decided(5) == 0
    assert decided(5) == 5, "it is stale: hold"
    fabric.condition[3] = "good"
    fabric.run(2)
    fabric.engine.arrange(list(fabric.engine.groups.values()), lambda _: (TARGET,), fabric.now)
    assert decided() == 1, "the groups were read again"
    assert decided() == 0


def test_a_path_under_another_name_takes_the_place_of_the_one_before():
    """A peer was renamed: of its paths' old names nothing is heard any more."""
    fabric = Fabric()
    fabric.run(10)
    known = fabric.engine.groups[TARGET]
    renamed = {rail: replace(path(rail), destination="storage") for rail in RAILS}

    def run(ticks):
        for _ in range(ticks):
            fabric.now += TICK
            for rail, each in renamed.items():
                fabric.engine.take(measured(each, fabric.now, 20 * MS if rail == 1 else 0), fabric.now)
            for change in fabric.engine.changes(fabric.now):
                fabric.engine.carried_out(change, fabric.now, change.after)

    run(10)
    fabric.now += FORGET_NS
    run(30)
    assert fabric.engine.groups[TARGET].current == ORIGINAL, "while the old names are still known as silent"
    fabric.engine.arrange([known], lambda _: (TARGET,), fabric.now)
    run(10)
    assert set(fabric.engine.paths) == set(renamed.values())
    assert fabric.engine.groups[TARGET].current == ORIGINAL[1:]


def test_an_alert_about_traffic_is_over_once_there_is_none():
    engine = Engine(parse(ALERT))
    engine.arrange([group({1: [], 2: []})], lambda _: (TARGET,), kit.T0)

    def alerts(at, segments, again):
        now = kit.T0 + at * SECOND
        engine.take(measured(path(1), now), now)
        engine.take(kit.tcp(path(1), now, segments, again), now)
        return [(each.holds, each.rule) for each in engine.alerts()]

    assert alerts(0, 1000, 0) == []
    assert alerts(1, 1000, 500) == [(True, "sent-again")]
    assert alerts(2, 1000, 500) == []
    assert alerts(3, 0, 0) == [(False, "sent-again")]


def test_only_the_shortest_window_of_a_path_counts():
    fabric = Fabric()
    fabric.run(20)
    fabric.now += TICK
    long = measured(path(1), fabric.now, 20 * MS, window_ns=SECOND)
    assert fabric.engine.take(long, fabric.now) == set()
    fabric.engine.evidence.forget_windows()
    assert fabric.engine.take(long, fabric.now) == {TARGET}


def test_a_path_of_no_managed_group_is_ignored():
    fabric = Fabric()
    assert fabric.engine.take(measured(path(1, "h9"), fabric.now, 20 * MS), fabric.now) == set()
    assert fabric.engine.take(measured(path(7), fabric.now, 20 * MS), fabric.now) == set()
    assert fabric.engine.changes(fabric.now) == []


def test_a_member_that_was_taken_out_is_still_known_when_the_groups_are_read_again():
    fabric = Fabric()
    fabric.run(20)
    fabric.condition[1] = "bad"
    fabric.run(20)
    known = fabric.engine.groups[TARGET]
    fabric.engine.arrange([known], lambda _: (TARGET,), fabric.now)
    assert state_of(fabric.engine, fabric.now, path(1)).state == "drained"


class Several:
    """A host whose three rails carry the traffic to several others by one target, as the overlay arranges it."""

    def __init__(self, hosts, policy=POLICY):
        self.engine, self.now, self.hosts = Engine(policy), 10**12, hosts
        self.shared = group({rail: [] for rail in RAILS})
        self.queueing_ns = {}  # of (rail, host)
        self.apart = frozenset()
        self._arrange()

    def _arrange(self):
        known = {each.target: each for each in self.engine.groups.values()}
        own = {
            address: known.get(f"own:{address}")
            or dataclasses.replace(
                known.get(TARGET, self.shared), target=f"own:{address}", destinations=(f"{address}/32",), beside=TARGET
            )
            for address in self.apart
        }
        groups = [known.get(TARGET, self.shared), *own.values()]
        self.engine.arrange(groups, lambda a: (f"own:{a}" if a in self.apart else TARGET,), self.now)

    def run(self, seconds):
        acts = []
        for _ in range(int(seconds * SECOND / TICK)):
            self.now += TICK
            for rail in RAILS:
                for host in self.hosts:
                    queue = self.queueing_ns.get((rail, host), 0)
                    self.engine.take(measured(path(rail, host), self.now, queue), self.now)
            for change in self.engine.changes(self.now):
                self.engine.carried_out(change, self.now, change.after)
                acts.append(change)
            apart = self.engine.apart(self.now)
            if apart != self.apart:
                self.apart = apart
                self._arrange()
        return acts

    @property
    def weights(self):
        return {target: dict(each.current) for target, each in self.engine.groups.items()}

    def states(self, rail):
        found = {state.path: state.state for state in self.engine.states("h1", self.now, 0)}
        return [found[path(rail, host)] for host in self.hosts]


WHOLE, LEFT = dict(ORIGINAL), {12: 1, 13: 1}


def queued(*queued, hosts=("h2", "h3", "h4")):
    """Rail 1 has had a queue towards these hosts for a second; and the acts of that second."""
    several = Several(hosts)
    assert several.run(1) == [] and several.apart == frozenset()
    several.queueing_ns = {(1, host): 20 * MS for host in queued}
    return several, several.run(1)


def test_what_one_host_says_moves_its_own_traffic_alone():
    several, acts = queued("h3")
    assert [act.target for act in acts] == ["own:10.9.0.3"]
    assert several.weights == {TARGET: WHOLE, "own:10.9.0.3": LEFT}
    assert several.states(1) == ["healthy", "drained", "healthy"]


def test_two_hosts_that_say_the_same_move_the_traffic_to_all():
    several, acts = queued("h2", "h3")
    assert [act.target for act in acts] == [TARGET] and several.apart == frozenset()
    assert several.weights == {TARGET: LEFT} and several.states(1) == ["drained", "drained", "healthy"]


def test_a_host_with_a_target_of_its_own_still_counts_as_the_second_that_says_so():
    several, _ = queued("h3")
    several.queueing_ns[1, "h2"] = 20 * MS
    acts = several.run(1)
    assert [act.target for act in acts] == [TARGET]
    assert several.weights == {TARGET: LEFT, "own:10.9.0.3": LEFT}


def test_a_second_host_that_joins_later_goes_down_with_the_first():
    several, _ = queued("h2", "h3")
    several.queueing_ns[1, "h4"] = 20 * MS
    several.run(1)
    assert several.states(1) == ["drained"] * 3


def test_when_all_others_are_well_again_only_the_one_that_is_not_stays_away():
    several, _ = queued("h2", "h3")
    assert several.weights == {TARGET: LEFT}
    several.queueing_ns.pop((1, "h2"))
    several.run(80)
    assert several.states(1) == ["healthy", "drained", "healthy"]
    assert several.weights == {TARGET: WHOLE, "own:10.9.0.3": LEFT}


def test_a_host_that_is_well_for_a_minute_is_steered_with_the_others_again():
    several, _ = queued("h3")
    several.queueing_ns.clear()
    several.run(50)
    assert several.states(1) == ["healthy"] * 3
    assert several.weights == {TARGET: WHOLE, "own:10.9.0.3": WHOLE}, "not yet a minute"
    several.run(60)
    assert several.weights == {TARGET: WHOLE} and several.apart == frozenset()


def test_where_one_host_alone_is_measured_nobody_else_is_asked():
    several, _ = queued("h2", hosts=("h2",))
    assert several.weights == {TARGET: LEFT} and several.apart == frozenset()


def test_a_moment_in_which_only_one_host_says_so_takes_nothing_apart():
    """Two hosts measure the same queue some milliseconds apart."""
    several = Several(("h2", "h3"))
    several.run(1)
    for host in several.hosts:
        several.now += MS
        for rail in RAILS:
            several.engine.take(measured(path(rail, host), several.now, 20 * MS if rail == 1 else 0), several.now)
        several.engine.changes(several.now)
        assert several.engine.apart(several.now) == frozenset()


def test_no_more_addresses_than_the_limit_are_steered_apart(monkeypatch):
    monkeypatch.setattr(apart, "_MOST", 2)
    several = Several(tuple(f"h{number}" for number in range(2, 9)))
    several.run(1)
    for rail, host in ((1, "h2"), (2, "h3"), (3, "h4")):
        several.queueing_ns[rail, host] = 20 * MS
    several.run(1)
    assert len(several.apart) == 2


def worked_example(bad_again_ms=None):
    """The story told in docs/policy.md: when the weights changed (ms), and to what."""
    page = (support.ROOT / "docs" / "policy.md").read_text()
    engine = Engine(parse(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]))
    known = group({1: [], 2: []})
    start = 10**12
    usual = Learnt(ENOUGH, start - SECOND, 0.9 * MS)  # each rail's p99, as the page says
    figures = [Key(path(rail), "queueing_delay p50", "p99", least) for rail in (1, 2) for least in (5e6, 2e6)]
    engine.usual.restore([Entry(key, usual) for key in figures], start)
    engine.arrange([known], lambda _: (TARGET,), start)
    changes = []
    for at in range(-1000, 100_000, 20):
        now = start + at * MS
        if at >= 9_000:
            value = 20_000
        elif at >= 80:
            value = 14 * MS if at < 1_000 else 12 * MS
        else:
            value = 6 * MS if at >= 60 else 300_000
        if bad_again_ms is not None and bad_again_ms <= at < bad_again_ms + 200:
            value = 14 * MS
        engine.take(measured(path(1), now, value), now)
        engine.take(measured(path(2), now, 0), now)
        for change in engine.changes(now):
            changes.append((at, change.after))
            engine.carried_out(change, now, change.after)
    return changes


def test_the_worked_example_of_the_documentation_is_what_happens():
    assert worked_example() == [
        (60, ((12, 1),)),
        (29_000, ((11, 1), (12, 10))),
        (32_000, ((11, 5), (12, 10))),
        (35_000, ((11, 1), (12, 1))),
    ]


def test_the_relapse_in_the_documentation_is_what_happens():
    after = [when for when, _ in worked_example(bad_again_ms=33_000)]
    assert after[:3] == [60, 29_000, 32_000]
    assert after[3] == 33_000, "drained again, as soon as three probes of a window were above the threshold"
    assert after[4] == 89_000, "60 s after the last try"


def test_a_way_that_nobody_measures_is_told_of_as_one_fact():
    engine = Engine(POLICY)
    engine.arrange([group({1: [], 2: []})], lambda _: (TARGET,), kit.T0)
    engine.take(measured(path(1), kit.T0), kit.T0)
    first, later = (state_of(engine, now, path(2)) for now in (kit.T0 + MS, kit.T0 + SECOND))
    assert first == replace(later, at_ns=first.at_ns), "published each turn otherwise"
    assert (first.state, first.weight_actual, first.since_ns) == ("unmeasured", 0, kit.T0)
    engine.take(measured(path(2), kit.T0 + SECOND), kit.T0 + SECOND)
    assert state_of(engine, kit.T0 + SECOND, path(2)), "once"


def test_a_path_may_run_over_several_targets():
    """One in the main table, one in that of a source: what is bad is left in both."""
    engine, now = Engine(POLICY), 10**12
    known = [dataclasses.replace(group({1: [], 2: []}), target=f"overlay:{view}:10.9.0.2/32") for view in ("main", "7")]
    engine.arrange(known, lambda _: tuple(each.target for each in known), now)
    for _ in range(20):
        now += TICK
        for rail in (1, 2):
            engine.take(measured(path(rail), now, 20 * MS if rail == 1 else 0), now)
        for change in engine.changes(now):
            engine.carried_out(change, now, change.after)
    assert [each.current for each in engine.groups.values()] == [((12, 1),)] * 2


@pytest.mark.parametrize(("unlinked", "state"), [({"rail1"}, "drained"), (set(), "healthy")])
def test_a_hop_that_went_with_its_link_comes_back_as_one_that_was_drained(unlinked, state):
    """One that its owner withdrew comes back as it was."""
    engine, now = Engine(parse(FAILING)), 10**12
    known = group({1: [], 2: []})
    engine.arrange([known], lambda _: (TARGET,), now)
    for _ in range(10):
        now += TICK
        for rail in (1, 2):
            engine.take(measured(path(rail), now, 0), now)
        engine.changes(now)
    without = dataclasses.replace(known, members=known.members[1:], current=known.current[1:])
    engine.arrange([without], lambda _: (TARGET,), now, frozenset(), frozenset(unlinked))
    why = state_of(engine, now, path(1)).reason
    assert why.startswith("its interface has no link" if unlinked else "no managed route has this nexthop")
    engine.arrange([known], lambda _: (TARGET,), now)
    assert state_of(engine, now, path(1)).state == state
