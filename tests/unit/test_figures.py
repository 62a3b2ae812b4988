"""The catalogue of figures: its entries are fields of the record, and everything that is made of them has them all."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT

from pytools.estimators.delays import jitter
from pytools.estimators.windows import MISSING
from pytools.figures import MEASURES, OF_DIRECTIONS, Figure, Measure
from pytools.signals import Delay, PathDelay
from pytools.views import table_registry
from pytools.views.metrics.families import FAMILIES
from steering.deciding.condition_eval import Verdict, measure
from steering.deciding.evidence import Facts
from steering.deciding.thresholds import ENOUGH, Learnt, Limits, limits_of
from steering.policy.conditions import MEASURED, AnyLeaf

LISTING = table_registry.LISTINGS["delay"][PathDelay](0)
SHOWN = [Figure(each, part) for each in MEASURES for part in each.exported]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda each: each.name)
def test_every_entry_is_of_the_record_and_documented(measure: Measure) -> None:
    fields = {each.name: each for each in msgspec.structs.fields(Delay if measure.of_direction else PathDelay)}
    named = [*measure.parts.values(), *(field for field, _ in measure.errors.values())]
    assert set(named) | ({measure.rest} if measure.rest else set()) <= fields.keys()
    page = (ROOT / "docs" / "signals.txt").read_text()
    assert all(f"\n    {name}: " in page for name in named)
    assert {measure.family, *measure.errors} <= FAMILIES.keys()


@pytest.mark.parametrize("figure", SHOWN, ids=lambda each: each.name)
def test_the_table_is_sorted_by_every_figure(figure: Figure) -> None:
    word = figure.word if figure.measure.of_direction else Figure(figure.measure, "").word
    calm, empty = samples.path_delay(1), samples.path_delay(3, clock="free_running")
    nothing: dict[str, None] = dict.fromkeys(
        each.measure.parts[each.part] for each in SHOWN if each.measure.of_direction
    )
    way = msgspec.structs.replace(empty.forward, **nothing)
    empty = msgspec.structs.replace(
        empty, forward=way, reverse=way, round_trip_min_ns=None, received=0, lost=0, asymmetry_ns=None
    )
    calm = msgspec.structs.replace(calm, asymmetry_ns=1)
    if figure.measure.of_direction:  # the worse direction counts, here the one back
        worse = msgspec.structs.replace(calm.reverse, **{figure.field: 10**9})
        bad = msgspec.structs.replace(calm, path=samples.path(2), reverse=worse)
    else:
        bad = msgspec.structs.replace(calm, path=samples.path(2), **{figure.field: 10**9})
    assert word in LISTING.words()
    assert LISTING.ordered([empty, calm, bad], word) == [bad, calm, empty]


def test_free_clocks_give_no_figure_that_needs_two() -> None:
    delay = samples.path_delay(clock="free_running")
    known = {
        each.name for each in OF_DIRECTIONS if each.value(delay, delay.forward, next(iter(each.parts))) is not None
    }
    assert known == {each.name for each in OF_DIRECTIONS if not each.compared}


@given(st.lists(st.lists(st.none() | st.integers(0, 10**8), min_size=0, max_size=80), min_size=2, max_size=2))
def test_jitter_is_the_recurrence_of_rfc_3550_over_the_samples_there_are(ways: list[list[int | None]]) -> None:
    width = max(map(len, ways))
    came = np.array([[[MISSING if each is None else each for each in [*way[::-1], *[None] * (width - len(way))]]]
                     for way in ways], np.int64).reshape(2, 1, width)  # fmt: skip
    found = jitter(came, (came != MISSING).sum(axis=-1))
    for way, value in zip(ways, found[:, 0].tolist(), strict=True):
        known = [each for each in way if each is not None]
        told = 0.0
        for before, after in itertools.pairwise(known):
            told += (abs(after - before) - told) / 16
        pairs = len(known) - 1
        assert value == MISSING if pairs < 1 else value == pytest.approx(told / (1 - (15 / 16) ** pairs), abs=1)


def test_a_policy_goes_by_jitter_with_a_figure_and_by_what_is_usual() -> None:
    leaf = MEASURED["jitter"].model_validate({"signal": "jitter", "above": "5ms", "clear_below": "1ms"})
    usual = MEASURED["jitter"].model_validate(
        {"signal": "jitter", "above": "usual p99 × 3, at least 2ms, until learned 4ms", "clear_below": "above × 0.2"}
    )

    def verdict(of: AnyLeaf, jitter_ms: float, limits: Limits | None = None) -> Verdict:
        way = Delay(5, jitter_ns=round(jitter_ms * 1e6), jitter_bound_ns=100_000)
        return measure(of, Facts(samples.path(), samples.path_delay(forward=way)), samples.AT_NS, 10**9, limits).verdict

    assert [verdict(leaf, ms) for ms in (5.2, 5.05, 2, 0.8)] == [
        Verdict.BAD, Verdict.BETWEEN, Verdict.BETWEEN, Verdict.CLEAR
    ]  # fmt: skip
    assert [verdict(usual, ms) for ms in (4.2, 3.9)] == [Verdict.BAD, Verdict.BETWEEN]
    taught = Learnt(ENOUGH, 1, 3e6)  # 3 ms are usual: nine of them are jitter
    assert [verdict(usual, ms, limits_of(usual, taught)) for ms in (9.2, 8.9, 1.6)] == [
        Verdict.BAD, Verdict.BETWEEN, Verdict.CLEAR
    ]  # fmt: skip
