"""The catalogue of figures: its entries are fields of the record, and everything that is made of them has them all."""

from __future__ import annotations

import msgspec
import pytest
import samples
from support import ROOT

from pytools.figures import MEASURES, OF_DIRECTIONS, Figure, Measure
from pytools.signals import Delay, PathDelay
from pytools.views import drawing
from pytools.views.metrics.families import FAMILIES

LISTING = drawing.LISTINGS["delay"][PathDelay](0)
SHOWN = [Figure(each, part) for each in MEASURES for part in each.exported]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda each: each.name)
def test_every_entry_is_of_the_record_and_documented(measure: Measure) -> None:
    fields = {each.name: each for each in msgspec.structs.fields(Delay if measure.of_direction else PathDelay)}
    named = [*measure.parts.values(), *(field for field, _ in measure.errors.values())]
    assert set(named) | ({measure.rest} if measure.rest else set()) <= fields.keys()
    page = (ROOT / "docs" / "signals.md").read_text()
    assert all(f"`{name}`" in page for name in named)
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
    known = {each.name for each in OF_DIRECTIONS if each.value(delay, delay.forward, "p99") is not None}
    assert known == {each.name for each in OF_DIRECTIONS if not each.compared}
