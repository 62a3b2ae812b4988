"""Even spread: the planner by its invariants, and the rule on a model of a job that goes in lock step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import steering_kit as kit
from flow_world import MBIT, MS, SECOND, World, tcp_flow
from hypothesis import given
from hypothesis import strategies as st
from support import mentions

from pytools.signals import Act, AnySignal, Owner
from steering.flows.engine import FlowEngine
from steering.flows.rates import FlowRate, FlowRates
from steering.flows.spread import Unit, even, jobs
from steering.plan import Pin
from steering.policy.file import parse
from steering.replay.player import Player

POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave-congested-rail
    when: {signal: queueing_delay, above: 15ms, for: 20ms, clear_below: 8ms}
    then: {drain: {}}
    return: {dwell: 1s, retry_after: 1s, steps: [1.0], step: 1s}
  - name: even
    then: {spread: {flows: {min_rate: 1mbit}}}
"""
ALONE = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nlabels: {}\n"

# ---- the planner ----


@st.composite
def placings(draw: st.DrawFn) -> tuple[list[Unit[int]], dict[str, int]]:
    weights = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    rails = {f"rail{number}": weight for number, weight in enumerate(weights, 1)}
    where = draw(st.lists(st.sampled_from(list(rails)), max_size=40))
    return [Unit(number, rail) for number, rail in enumerate(where)], rails


def placed(units: list[Unit[int]], **options: object) -> list[Unit[int]]:
    moves = {move.key: move for move in even(units, **options)}  # type: ignore[arg-type]
    assert all(move.origin == units[key].rail != move.rail for key, move in moves.items())
    return [replace(unit, rail=moves[unit.key].rail) if unit.key in moves else unit for unit in units]


@given(placings())
def test_the_busiest_rail_has_as_little_as_can_be(case: tuple[list[Unit[int]], dict[str, int]]) -> None:
    units, weights = case
    after = Counter(unit.rail for unit in placed(units, weights=weights))
    level: Fraction = max(Fraction(after[rail], weight) for rail, weight in weights.items())
    began = Counter(unit.rail for unit in units)
    assert level <= max(Fraction(began[rail], weight) for rail, weight in weights.items())
    less = {rail: math.ceil(level * weight) - 1 for rail, weight in weights.items()}  # each busier rail one below it
    assert not units or sum(less.values()) < len(units)
    if len(set(weights.values())) == 1:
        assert max(after.values(), default=0) == math.ceil(len(units) / len(weights)), "within one flow of even"


@given(placings())
def test_no_more_moves_than_it_takes(case: tuple[list[Unit[int]], dict[str, int]]) -> None:
    units, weights = case
    before = Counter(unit.rail for unit in units)
    share = {rail: Fraction(len(units) * weight, sum(weights.values())) for rail, weight in weights.items()}
    too_many = (math.ceil(before[rail] - share[rail]) for rail in weights)
    assert len(even(units, weights)) <= sum(max(0, each) for each in too_many)


@given(placings())
def test_what_is_even_stays(case: tuple[list[Unit[int]], dict[str, int]]) -> None:
    units, weights = case
    assert even(placed(units, weights=weights), weights) == ()


@given(placings(), st.sets(st.integers(0, 39)))
def test_what_may_not_move_counts_and_stays(case: tuple[list[Unit[int]], dict[str, int]], fixed: set[int]) -> None:
    units, weights = case
    units = [replace(unit, movable=unit.key not in fixed) for unit in units]
    moves = even(units, weights)
    assert not fixed & {move.key for move in moves}
    before = Counter(unit.rail for unit in units)
    after = Counter(unit.rail for unit in placed(units, weights=weights))
    assert max(after[r] / w for r, w in weights.items()) <= max(before[r] / w for r, w in weights.items())


@pytest.mark.parametrize(
    ("counts", "weights", "moves"),
    [
        ((11, 5), (1, 1), 3),
        ((8, 8), (1, 1), 0),
        ((9, 8), (1, 1), 0),
        ((9, 7), (1, 1), 1),
        ((16, 0), (1, 1), 8),
        ((8, 8), (3, 1), 4),
        ((12, 4), (3, 1), 0),
        ((8, 8, 0), (1, 1, 1), 4),  # none is busier than of 5, 5 and 6
        ((1, 0), (1, 9), 1),  # nine times as fast there
    ],
)
def test_plans(counts: tuple[int, ...], weights: tuple[int, ...], moves: int) -> None:
    units = [Unit((rail, number), str(rail)) for rail, count in enumerate(counts) for number in range(count)]
    assert len(even(units, {str(rail): weight for rail, weight in enumerate(weights)})) == moves


def test_a_small_relief_is_not_worth_a_move() -> None:
    units = [Unit(number, "a" if number < 51 else "b") for number in range(100)]
    assert len(even(units, {"a": 1, "b": 1})) == 1
    assert even(units, {"a": 1, "b": 1}, gain=0.05) == ()


def test_of_two_rails_that_are_as_good_the_one_with_less_of_other_jobs_is_taken() -> None:
    units = [Unit(number, "a") for number in range(2)]
    weights = {"a": 1, "b": 1, "c": 1}
    assert even(units, weights, besides={"b": 5})[0].rail == "c"
    assert even(units, weights, besides={"c": 5})[0].rail == "b"


# ---- which flows count ----


def flows_of(*means: float, cgroup: str = "") -> list[FlowRate]:
    rates = FlowRates()
    for port, mean in enumerate(means):
        for at_ms in range(0, 1001, 100):
            sent = int(mean * at_ms)
            rates.take(tcp_flow(port, SECOND + at_ms * MS, kit.path(), delivered_segments=sent, segments_out=sent,
                                sent_bytes=1000 * sent, owner=Owner(cgroup=cgroup)))  # fmt: skip
    return list(rates.rates(2 * SECOND))


def test_control_connections_do_not_count_and_slow_ones_of_a_slow_rail_do() -> None:
    flows = flows_of(100, 100, 10, 1, 0)
    (job,) = jobs(flows)
    assert [flow.key.local_port for flow in job] == [0, 1, 2]
    assert jobs(flows_of(0, 0)) == []
    fastest = int(max(flow.peak_bps for flow in flows))
    assert (jobs(flows, fastest), jobs(flows, fastest + 1)) == ([job], [])


def test_each_job_is_counted_by_itself() -> None:
    backup, job = flows_of(1000, cgroup="/backup"), flows_of(10, 10, cgroup="/job")
    assert [len(each) for each in jobs([*backup, *job])] == [2, 1]


# ---- the rule ----


@dataclass
class LockStep(World):
    """A job whose connections each send the same in a step, which begins when all have, after a rest."""

    size: float = 1 * MBIT  # bits
    rest_ns: int = 100 * MS
    text: str = POLICY

    def __post_init__(self) -> None:
        super().__post_init__()
        self.left: dict[int, float] = {}
        self.steps: list[int] = []  # when each ended
        self.pause_ns = self.rest_ns
        self.queued: set[int] = set()  # rails that others fill

    def queue(self, rail: int) -> float:
        return 50.0 if rail in self.queued else 0.0

    def steer(self) -> None:
        for change in self.engine.changes(self.now):
            self.engine.carried_out(change, self.now, change.after)
        super().steer()

    def _flow(self, span_ns: int) -> None:
        end = self.now
        now = end - span_ns
        for connection in self.connections:
            connection.rate = 0.0
        while now < end:
            busy = [c for c in self.connections if self.left.get(c.port, 0) > 0]
            if not busy:
                waited = min(self.pause_ns, end - now)
                self.pause_ns, now = self.pause_ns - waited, now + waited
                if self.pause_ns == 0:
                    self.left = {c.port: self.size for c in self.connections if c.demand > self.size}
                    self.pause_ns = self.rest_ns
                continue
            on = Counter(c.rail(now) for c in busy)
            rates = {c.port: self.capacity[c.rail(now)] / on[c.rail(now)] for c in busy}
            lasts = min(end - now, *(math.ceil(self.left[c.port] / rates[c.port] * SECOND) for c in busy))
            for c in busy:
                sent = min(self.left[c.port], rates[c.port] * lasts / SECOND)
                self.left[c.port] -= sent
                c.delivered += sent / 8
                c.rate += sent * SECOND / span_ns
            now += lasts
            if not any(self.left.values()):
                self.steps.append(now)
        for c in self.connections:  # a control connection says a word now and then
            if c.demand <= self.size:
                c.rate = c.demand
                c.delivered += c.demand * span_ns / 8 / SECOND

    def step_ms(self) -> float:
        return (self.steps[-1] - self.steps[-6]) / 5 / MS


def planted(more: int = 11, fewer: int = 5, **options: object) -> LockStep:
    return LockStep([1] * more + [2] * fewer, **options)  # type: ignore[arg-type]


def test_a_job_with_a_bad_hash_is_even_within_two_seconds_and_stays_so() -> None:
    world, alone = planted(), planted(text=ALONE)
    acts = world.run(2)
    assert world.counts() == [8, 8]
    assert [(act.kind, act.under, len(act.pins)) for act in acts] == [("pin", "even", 3)]
    assert mentions(acts[0].because, "11 of 16 flows", "rail1", "8 when even")
    assert (acts[0].before, acts[0].after) != ((), ())
    assert list(dict(acts[0].before).values()) == [11, 5]
    assert list(dict(acts[0].after).values()) == [8, 8]
    assert world.run(300) == []
    assert alone.run(2) == []
    assert (alone.step_ms(), world.step_ms()) == (pytest.approx(210, abs=1), pytest.approx(180, abs=1))
    assert world.renewed > 10


@pytest.mark.parametrize(
    "options",
    [
        {"rest_ns": 900 * MS},  # most looks find it at rest
        {"size": 20 * MBIT, "rest_ns": 1500 * MS},  # a step is longer than what a mean reaches back
        {"size": 4.5 * MBIT, "rest_ns": 4 * SECOND},  # the busy rail is known by its first step, the other is not
        {"rest_ns": 0},
    ],
    ids=["long rests", "long steps", "short bursts", "no rests"],
)
def test_the_rhythm_does_not_matter(options: dict[str, object]) -> None:
    world = planted(**options)
    world.run(15)
    assert world.counts() == [8, 8]
    assert world.moves() == 3
    assert world.run(60) == []


def test_control_connections_go_where_they_like() -> None:
    world = LockStep([1] * 8 + [2] * 8 + [1] * 8, demands=dict.fromkeys(range(16, 24), 0.01 * MBIT))
    assert world.run(30) == []
    assert world.counts() == [16, 8]


def test_a_slow_rail_gets_no_more_because_its_flows_are_slow() -> None:
    world = planted(8, 8)
    world.capacity[2] = 30 * MBIT
    assert world.run(30) == []


def test_weights_say_what_is_even() -> None:
    world = planted(8, 8)
    members = tuple(replace(m, weight=3 if m.interface == "rail1" else 1) for m in world.group.members)
    group = replace(world.group, members=members, current=tuple((m.nexthop_id, m.weight) for m in members))
    world.engine.arrange([group], lambda _: (group.target,), world.now)
    world.run(5)
    assert world.counts() == [12, 4]
    assert world.moves() == 4


def test_the_operators_pins_stay_and_count() -> None:
    world = planted(16, 0)
    for connection in world.connections[:10]:
        world.flows.held.pinned_by_hand(Pin(connection.key, kit.TARGET, 11, 1 << 62))
    world.run(5)
    assert world.counts() == [10, 6]


def test_no_more_pins_than_the_rule_says() -> None:
    world = planted(16, 0, text=POLICY.replace("min_rate: 1mbit", "min_rate: 1mbit, at_most: 5"))
    world.run(30)
    assert world.counts() == [11, 5]


def test_a_fraction_of_a_herd_moves_at_a_time() -> None:
    head, rest = POLICY.split("rules:")
    world = planted(16, 0, text=f"{head}safety: {{herd: {{fraction: 0.5, jitter: 1s}}}}\nrules:{rest}")
    world.run(10)
    assert world.counts() == [8, 8]
    assert [len(act.pins) for _, act in world.acts] == [4, 2, 1, 1]


def test_a_dry_run_says_it_and_says_it_again_when_the_lease_would_have_ended() -> None:
    world = planted(dry=True)
    world.run(29)
    assert [len(act.pins) for _, act in world.acts] == [3, 3, 3]
    assert world.counts() == [11, 5]


def test_a_replay_says_what_would_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    world, heard = planted(dry=True), list[AnySignal]()
    monkeypatch.setattr(world.flows, "take", lambda signal, _: heard.append(signal))
    world.run(5)
    (act,) = [each for each in Player(parse(POLICY)).play(heard) if isinstance(each, Act)]
    assert (act.under, act.outcome) == ("even", "dry_run") and mentions(act.what, "pin 3 flows", "recorded:10.9.0.2")
    assert list(act.after.values()) == [8, 8]


def test_what_the_kernel_refuses_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, note = planted(), FlowEngine.carried_out
    monkeypatch.setattr(
        world.flows, "carried_out", lambda act, now: note(world.flows, act, now, dict.fromkeys(act.flows, "no"))
    )
    world.run(25)
    assert len(world.acts) == 3, "once in a lease"


def test_one_healthy_path_is_not_spread_over() -> None:
    world = planted()
    world.unheard.add(2)
    assert world.run(10) == []


def test_flows_go_as_they_are_routed_when_their_path_loses_weight_and_are_spread_again_later() -> None:
    world = planted()
    world.run(3)
    assert world.counts() == [8, 8]
    world.queued.add(2)
    acts = world.run(3)
    assert [(act.kind, len(act.flows)) for act in acts] == [("unpin", 3)]
    assert "has less weight" in acts[0].because
    world.queued.clear()
    world.run(30)
    assert world.counts() == [8, 8]


def test_the_end_of_a_connection_ends_its_pin() -> None:
    world = planted()
    world.run(3)
    world.connections = [c for c in world.connections if c.pinned is None]
    acts = world.run(15)
    assert sum(len(act.flows) for act in acts if act.kind == "unpin") == 3
