"""Thresholds relative to what is usual: how they are written, what is learnt, when, how fast, and what follows."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_kit import HEAD, SECOND, condition, only_fault, rule, tcp
from steering_kit import MS, group, measured, path
from support import mentions

from pytools.signals import encode
from steering.deciding import thresholds
from steering.deciding.engine import Engine
from steering.deciding.thresholds import DOUBLES_NS, ENOUGH, SPACING_NS, Learnt, learn, limits_of, unlearnt
from steering.policy.conditions_text import condition_text
from steering.policy.explanation import explain
from steering.policy.file import parse
from steering.policy.levels import DELAY, QUANTILES, SHARE, OfAbove, Usual, written
from steering.policy.schema import json_schema

US = 1_000
STEP = 200 * MS
START = 1_000 * SECOND
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def delay(above: str, clear: str = "above × 0.2"):
    return f'{{signal: queueing_delay, above: "{above}", clear_below: {clear}}}'


def usual(above: str) -> Usual:
    level = condition(delay(above)).above
    assert isinstance(level, Usual)
    return level


# ---- how they are written ----


@pytest.mark.parametrize(
    ("text", "quantile", "factor", "plus", "limits"),
    [
        ("usual p99 × 3", "p99", 3, 0, (1 * MS, 10 * MS, 10 * MS)),
        ("usual p99 x 3", "p99", 3, 0, (1 * MS, 10 * MS, 10 * MS)),
        ("usual p99*1.5", "p99", 1.5, 0, (1 * MS, 10 * MS, 10 * MS)),
        ("usual p99×3", "p99", 3, 0, (1 * MS, 10 * MS, 10 * MS)),
        ("usual p50 + 2ms", "p50", 1, 2 * MS, (1 * MS, 10 * MS, 10 * MS)),
        ("usual p90 × 2 + 500us, at least 2ms", "p90", 2, 500 * US, (2 * MS, 20 * MS, 20 * MS)),
        ("usual p99 × 3, at least 5ms, at most 40ms, until learned 8ms", "p99", 3, 0, (5 * MS, 40 * MS, 8 * MS)),
        ("usual p99 × 3 until learned 8ms at least 5ms", "p99", 3, 0, (5 * MS, 50 * MS, 8 * MS)),
    ],
)
def test_what_is_understood(text, quantile, factor, plus, limits):
    level = usual(text)
    assert (level.quantile, level.factor, level.plus) == (quantile, factor, plus)
    assert (level.at_least, level.at_most, level.until_learned) == limits
    VALIDATOR.validate(yaml.safe_load(rule(delay(text))))
    assert usual(written(level, DELAY)) == level, "what is written is read as the same"


def test_shares_are_relative_as_well():
    leaf = condition('{signal: retransmits, above: "usual p99 × 3, at least 0.02", clear_below: above × 0.1}')
    assert (leaf.above.at_least, leaf.above.at_most, leaf.above.until_learned) == (0.02, 0.2, 0.2)
    assert leaf.clear_below == OfAbove(factor=0.1)
    assert condition('{signal: loss, above: "usual p50 + 0.1, at least 0.3", clear_below: 0.1}').above.at_most == 0.9
    VALIDATOR.validate(
        yaml.safe_load(rule('{signal: ce_share, above: "usual p90 × 2, at least 0.05", clear_below: above × 0.1}'))
    )
    assert written(leaf.above, SHARE) == "usual p99 × 3, at least 0.02, at most 0.2, until learned 0.2"


@pytest.mark.parametrize(
    ("when", "key", "facts", "hint"),
    [
        (delay("usual p95 × 3"), "above", ["p50, p90, p99", "p95", '"usual p95 × 3"'], "p99"),
        (delay("usual p99"), "above", ["factor above 1", "added", '"usual p99"'], ""),
        (delay("usual p99 × 0.5"), "above", ["factor above 1", "added", '"usual p99 × 0.5"'], ""),
        (delay("usual"), "above", ['"usual p99 × 3"', '"+ 5ms"', '"at least"', '"usual"'], ""),
        (delay("usual p99 × 3, at least 3 sec"), "above",
         ["at least", "at most", "until learned", "at most once", "5ms", '"usual p99 × 3, at least 3 sec"'], ""),
        (delay("usual p99 × 3, at least 0.1"), "above", ["5ms", "0.1", '"usual p99 × 3, at least 0.1"'], ""),
        (delay("usual p99 × 3, at least 5ms, at most 5ms"), "above",
         ["at most", "more than at least", "5 ms", '"usual p99 × 3, at least 5ms, at most 5ms"'], ""),
        (delay("usual p99 × 3, at least 5ms, until learned 4ms"), "above",
         ["until learned", "from 5 ms to 50 ms", '"usual p99 × 3, at least 5ms, until learned 4ms"'], ""),
        (delay("usual p99 × 3, at least 0s"), "above",
         ["at least", "more than 0", '"usual p99 × 3, at least 0s"'], ""),
        (delay("usual p99 × 3, at least 5ms", "5ms"), "clear_below", ["less than at least", "5 ms", '"5ms"'], ""),
        (delay("5ms", "above × 1"), "clear_below",
         ['"above × 0.2"', "above 0", "below 1", '"above × 1"'], ""),
        ('{signal: loss, above: "usual p99 × 3", clear_below: 0.1}', "above",
         ['"at least"', "0.05", '"usual p99 × 3"'], ""),
        ('{signal: loss, above: "usual p99 × 3, at least 5ms", clear_below: 0.1}', "above",
         ["0.05", "5ms", '"usual p99 × 3, at least 5ms"'], ""),
        ("{signal: queueing_delay, above: usual p99 × 3, at least 5ms, clear_below: 500us}", "at least 5ms",
         ["unknown", '"at least 5ms"', "above in quotes", "comma"], ""),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(when, key, facts, hint):
    only_fault(rule(when), 5, f"rules[0].when.{key}", facts, hint)


@pytest.mark.parametrize(
    "text", ["usual p95 × 3", "usual", "usual p99 × 3, at least 3", "usual p99 × three", "above × 2", "unusual p99 × 3"]
)
def test_the_schema_refuses_it_too(text):
    assert not VALIDATOR.is_valid(yaml.safe_load(rule(delay(text))))


def test_in_words():
    leaf = condition(delay("usual p99 × 3, at least 5ms, until learned 10ms"))
    limits = ("at least 5 ms", "at most 50 ms", "10 ms until", "learnt", "more than its error")
    assert mentions(condition_text(leaf), "p50 queueing delay", "above 3 ×", "usual p99", *limits)
    said = explain(parse(rule(delay("usual p99 × 3, at least 5ms"))))
    assert mentions(said, "good again", "below 0.2 of that threshold")


# ---- what is learnt ----

LEVEL = usual("usual p99 × 3, at least 1us, at most 1s")


def after(values, quantile="p99", level=LEVEL, known=Learnt(), at_ns=START):  # noqa: B008 (frozen)
    spec = level.model_copy(update={"quantile": quantile})
    for i, value in enumerate(values):
        known = learn(spec, known, float(value), at_ns + i * STEP)
    return known


@given(st.lists(st.floats(1 * US, SECOND), min_size=ENOUGH, max_size=ENOUGH), st.sampled_from(sorted(QUANTILES)))
def test_the_first_value_is_the_quantile_itself(values, quantile):
    assert not after(values[:-1], quantile).known
    known = after(values, quantile)
    assert known.known and known.early == ()
    assert known.level == pytest.approx(np.quantile(values, QUANTILES[quantile], method="inverted_cdf"), rel=1e-9)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(0.05, 0.8), st.sampled_from(sorted(QUANTILES)))
def test_it_stays_with_the_quantile_of_what_comes(seed, sigma, quantile):
    values = np.random.default_rng(seed).lognormal(np.log(2 * MS), sigma, 12_000).clip(2 * US, SECOND)
    level = after(values, quantile).level
    share = (values <= level).mean()
    # The first 300 may overestimate a p99, which takes hours to fall; what is too low rises within minutes.
    assert 0.7 < level / np.quantile(values, QUANTILES[quantile]) < 2
    assert share == pytest.approx(QUANTILES[quantile], abs=0.06)


def test_it_follows_another_usual():
    values = np.random.default_rng(1).lognormal(np.log(1 * MS), 0.3, 3_000)
    known = after(values, "p90")
    later = 4 * np.random.default_rng(2).lognormal(np.log(1 * MS), 0.3, 40_000)
    level = after(later, "p90", known=known, at_ns=START + 10**13).level
    assert level == pytest.approx(np.quantile(later, 0.9), rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0, 10 * SECOND), st.integers(0, 10 * SECOND)), max_size=80),
    st.sampled_from(sorted(QUANTILES)),
)
def test_it_cannot_be_poisoned_fast(measurements, quantile):
    known = after([MS] * ENOUGH, quantile)
    began, at_ns = known, START + ENOUGH * STEP
    for value, pause_ns in measurements:
        at_ns += pause_ns
        known = learn(LEVEL.model_copy(update={"quantile": quantile}), known, value, at_ns)
        learning_ns = min(at_ns - began.at_ns, 2 * SECOND * known.count)
        assert known.level <= MS * 2 ** (learning_ns / DOUBLES_NS) * (1 + 1e-9)
        assert LEVEL.at_least / 10 <= known.level <= LEVEL.at_most


def test_a_measurement_stands_for_a_second_at_most():
    known = after([MS] * ENOUGH)
    late = learn(LEVEL, known, 100.0 * MS, known.at_ns + 3600 * SECOND)
    assert late.level == pytest.approx(MS * 2 ** (SECOND / DOUBLES_NS))


def test_windows_that_overlap_and_idle_ones_teach_nothing():
    level = usual("usual p99 × 3, at least 5ms")
    known = learn(level, Learnt(), 2.0 * MS, START)
    assert learn(level, known, 2.0 * MS, START + SPACING_NS - 1) is known
    assert learn(level, known, 0.4 * MS, START + SECOND) is known, "less than a tenth of at least"
    assert learn(level, known, 51.0 * MS, START + SECOND) is known, "more than at most"
    assert learn(level, known, float("nan"), START + SECOND) is known
    assert learn(level, known, 0.5 * MS, START + SECOND).count == 2


# ---- the threshold that follows ----


@pytest.mark.parametrize(
    ("known_ns", "above", "words"),
    [
        (None, 10 * MS, ("above 10 ms", "learning", "0 of 300")),
        (1 * MS, 5 * MS, ("above 5 ms", "at least", "usual p99", "1 ms")),
        (4 * MS, 12 * MS, ("above 3 ×", "usual p99", "4 ms")),
        (30 * MS, 50 * MS, ("above 50 ms", "at most", "usual p99", "30 ms")),
    ],
)
def test_the_threshold(known_ns, above, words):
    leaf = condition(delay("usual p99 × 3, at least 5ms, until learned 10ms"))
    limits = unlearnt(leaf) if known_ns is None else limits_of(leaf, Learnt(ENOUGH, START, known_ns))
    assert (limits.above, limits.clear_below) == (above, pytest.approx(above / 5)) and mentions(limits.text, *words)


def test_with_something_added():
    leaf = condition(delay("usual p50 + 2ms, at least 1ms"))
    limits = limits_of(leaf, Learnt(ENOUGH, START, 3.0 * MS))
    assert limits.above == 5 * MS and mentions(limits.text, "above", "usual p50", "3 ms", "+ 2 ms")


# ---- when a path learns ----

RELATIVE = f"""\
{HEAD}  - name: leave
    when: {delay("usual p99 × 3, at least 5ms, until learned 10ms")}
    then: {{shift: {{share: 0}}}}
    return: {{dwell: 2s, retry_after: 5s, steps: [0.5, 1.0], step: 1s}}
"""


class World:
    """Two rails under one engine whose acts are carried out."""

    def __init__(self, text=RELATIVE):
        self.now, self.engine = START, Engine(parse(text))
        target = group({1: [], 2: []}).target
        self.engine.arrange([group({1: [], 2: []})], lambda _: (target,), self.now)
        self.states = []

    def run(self, seconds, first_ns, other_ns=20 * US, every_ns=STEP):
        for _ in range(int(seconds * SECOND / every_ns)):
            self.now += every_ns
            for rail, queueing_ns in ((1, first_ns), (2, other_ns)):
                value = queueing_ns(self.now) if callable(queueing_ns) else queueing_ns
                self.engine.take(measured(path(rail), self.now, value), self.now)
            for change in self.engine.changes(self.now):
                self.engine.carried_out(change, self.now, change.after)
            state = self.health.state
            if not self.states or self.states[-1] != state:
                self.states.append(state)

    @property
    def health(self):
        return self.engine.paths[path(1)]

    @property
    def row(self):
        return next(row for row in self.engine.usual.rows([path(1)]))


def test_it_learns_while_healthy_and_says_how_far():
    world = World()
    world.run(9, 4 * MS)
    count = world.row.learnt.count
    assert 30 <= count <= 45
    said = {each.path: each.reason for each in world.engine.states("h1", world.now, 0)}
    assert mentions(said[path(1)], "measured", "leave", "learning", f"{count} of 300")
    assert "learning" not in said[path(2)], "it is idle"
    world.run(60, 4 * MS)
    assert world.row.learnt.known and world.row.limits.above == 12 * MS
    said = {each.path: each.reason for each in world.engine.states("h1", world.now, 0)}
    assert "learning" not in said[path(1)]


def test_until_learned_holds_before():
    world = World()
    world.run(3, 9 * MS)
    assert world.health.state == "healthy"
    world.run(3, 11 * MS)
    assert world.health.state == "drained" and "above 10 ms (learning: " in world.health.because


@pytest.mark.parametrize("beyond_ns", [11 * MS, 45 * MS])
def test_it_never_learns_while_bad_drained_or_returning(beyond_ns):
    world = World()
    world.run(3, 4 * MS)
    before = world.row.learnt.count
    world.run(1, beyond_ns)
    drained = world.row.learnt
    assert world.health.state == "drained" and drained.count == before
    world.run(4, 1.5 * MS)  # it looks good, and shows what an unused rail shows
    assert world.states[-2:] == ["drained", "returning"] and world.row.learnt == drained
    world.run(10, 1.5 * MS)
    assert world.health.state == "healthy" and world.row.learnt.count > before


def test_a_second_of_health_comes_first():
    world = World()
    world.run(1, 4 * MS)
    assert world.row.learnt.count == 0


def test_nothing_beyond_the_threshold_is_learnt_by_an_alert():
    world = World(RELATIVE.replace("{shift: {share: 0}}", "{alert: {}}").split("    return")[0])
    world.run(4, 45 * MS)
    assert world.health.state == "healthy" and world.row.learnt.count == 0
    world.run(4, 9 * MS)
    assert world.row.learnt.count > 10


def test_overtaken_probes_are_a_limit_and_teach_nothing():
    world = World()
    world.run(3, 4 * MS)
    before = world.row.learnt.count
    for _ in range(20):
        world.now += STEP
        for rail in (1, 2):
            seen = measured(path(rail), world.now, 4 * MS)
            world.engine.take(seen.__class__(**{**_fields(seen), "overtaken_p50_ns": 3 * MS}), world.now)
    assert world.row.learnt.count == before


def _fields(signal):
    return {name: getattr(signal, name) for name in signal.__struct_fields__}


def test_a_creeping_queue_is_left_not_learnt():
    """From 2 ms on, 2 ms more each minute: a quantile alone follows it, always below the threshold."""
    world = World()
    world.run(90, 2 * MS)
    assert world.row.limits.above == 6 * MS
    begun = world.now
    world.run(600, lambda now: 2 * MS + (now - begun) * 2 * MS // (60 * SECOND))
    assert "drained" in world.states and world.row.learnt.level < 4 * MS


def test_a_share_is_learnt_from_traffic():
    text = rule('{signal: retransmits, above: "usual p99 × 3, at least 0.02", clear_below: above × 0.1}', "{alert: {}}")
    world = World(text)
    for _ in range(ENOUGH + 5):
        world.now += SECOND // 2
        for rail in (1, 2):
            world.engine.take(measured(path(rail), world.now, 0), world.now)
        world.engine.changes(world.now)
        world.engine.take(tcp(path(1), world.now, 1000, 15), world.now)
    assert world.row.learnt.level == pytest.approx(0.015) and world.row.limits.above == pytest.approx(0.045)


def test_what_another_controller_has_learnt_is_gone_on_with():
    world = World()
    world.run(80, 4 * MS)
    other = World()
    other.engine.usual.restore(world.engine.usual.entries(), world.now)
    assert other.row.limits.above == 12 * MS
    past = World()
    past.engine.usual.restore(world.engine.usual.entries(), START)
    assert past.row.learnt.count == 0, "of the future"


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("steering.deciding.usual.MOST", 1)
    world = World()
    world.run(5, 4 * MS, 4 * MS)
    assert len(world.engine.usual.entries()) == 1


def test_a_policy_without_relative_thresholds_learns_nothing():
    world = World(RELATIVE.replace('"usual p99 × 3, at least 5ms, until learned 10ms"', "5ms"))
    world.run(5, 4 * MS)
    assert not world.engine.usual.needed and not world.engine.usual.entries()
    assert world.engine.usual.limits(path(1)) == ()


def test_the_act_says_the_figure_and_what_was_usual():
    world = World()
    world.run(80, 4 * MS)
    world.run(1, 18 * MS)
    assert re.match(r"queueing delay p50 18 ms ± 1 us, above 3 × usual p99 \(4 ms\)", world.health.because)


def test_entries_survive_json():
    world = World()
    world.run(5, 4 * MS)
    import msgspec

    from steering.deciding.usual import Entry

    entries = world.engine.usual.entries()
    assert msgspec.json.decode(msgspec.json.encode(entries), type=list[Entry]) == entries
    assert json.loads(encode(measured(path(1), START, 0)))["type"] == "path_delay"


def test_the_constants_are_as_the_page_says():
    assert (thresholds.ENOUGH, thresholds.DOUBLES_NS, thresholds.NOTEWORTHY) == (300, 600 * SECOND, 0.1)
