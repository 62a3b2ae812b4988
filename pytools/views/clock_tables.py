"""Tables of clocks: of all hosts against the reference, of the peers against ours, and who shares an oscillator.

Pure: a model in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytools import units
from pytools.signals import Clock
from pytools.views import empty_states, tables
from pytools.views.model import Model
from pytools.views.sheet import Sheet
from pytools.views.timing import is_silent, references

_CLOCK_COLUMNS: Final = (
    *("host", "offset", "drift\nppm", "±", "hard\n±", "state", "neigh-\nbours"),
    *("pairs\nkept", "pairs\nrejected", "outlier\nedges", "slew\nppm"),
)
_EDGE_COLUMNS: Final = (
    *("path", "offset", "drift\nppm", "sigma", "±", "hard\n±", "RTT min", "pairs\nkept", "pairs\nrejected", "stepped"),
)


def clocks(model: Model) -> RenderableType:
    """The clock of every host against the reference's."""
    known = model.timing.clocks
    if not known:
        return Text(empty_states.no_clocks(model))
    common = references(model.timing)
    sheet = Sheet(
        f"{model.host}: clocks against {' and '.join(common)}" if common else f"{model.host}: clocks, no reference",
        _CLOCK_COLUMNS,
        left=("state",),
        spare=("slew\nppm", "pairs\nrejected", "pairs\nkept", "neigh-\nbours", "outlier\nedges", "hard\n±"),
    )
    for clock in sorted(known.values(), key=lambda each: (each.of not in common, each.of)):
        silent = is_silent(clock.at_ns, model.at_ns)
        sheet.add(
            clock.of,
            Text("reference", style="bold") if clock.of == clock.reference else tables.offset(clock.offset_ns),
            tables.ppm(clock.drift_ppb),
            tables.bound(clock.bound_ns),
            tables.bound(clock.hard_bound_ns),
            tables.clock_state(clock.state, silent),
            str(clock.neighbours),
            str(clock.pairs_kept),
            str(clock.pairs_rejected),
            _count(clock.outlier_edges),
            tables.ppm(clock.slew_ppb),
            style="dim" if silent else None,
        )
    remarks = [empty_states.no_others(model)] if len(known) == 1 else _remarks(known.values(), common)
    return Group(sheet, *(Text(each, style="dim") for each in remarks))


def _count(number: int) -> Text:
    return Text(str(number), style="yellow" if number else "")


def _remarks(known: Iterable[Clock], common: list[str]) -> list[str]:
    """What a person should know about the states in the table."""
    states = {clock.state for clock in known}
    said = []
    if len(common) > 1:
        said.append("hosts do not agree about the reference: each offset is against the one its host believes in")
    if "holdover" in states:
        said.append("holdover: not compared any more; the bound grows until it is")
    if "free_running" in states:
        said.append("free_running: compared with nobody, or just stepped: no one-way delay is given (see --edges)")
    return said


def edges(model: Model) -> RenderableType:
    """The clock of each peer against ours, path by path."""
    known = model.timing.edges
    if not known:
        return Text(empty_states.no_edges(model))
    sheet = Sheet(
        f"{model.host}: the peers' clocks against ours, by path",
        _EDGE_COLUMNS,
        left=("stepped",),
        spare=("pairs\nrejected", "pairs\nkept", "hard\n±", "sigma", "RTT min"),
    )
    for path, edge in sorted(known.items()):
        silent = is_silent(edge.at_ns, model.at_ns, edge.window_ns)
        sheet.add(
            tables.way(path),
            tables.offset(edge.offset_ns),
            tables.ppm(edge.drift_ppb),
            units.duration(edge.sigma_ns),
            tables.bound(edge.bound_ns),
            # As the larger of the two distances: offset ± this holds whatever the network does.
            tables.bound(max(edge.hard_high_ns - edge.offset_ns, edge.offset_ns - edge.hard_low_ns)),
            units.duration(edge.round_trip_min_ns),
            str(edge.pairs_kept),
            str(edge.pairs_rejected),
            Text("stepped", style="red") if edge.stepped else "no",
            style="dim" if silent else None,
        )
    return sheet


def collocation(model: Model) -> RenderableType:
    """Which hosts share an oscillator."""
    found = model.timing.collocation
    if found is None or not (found.groups or found.alone or found.unknown):
        return Text(empty_states.no_collocation(model))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("oscillator", no_wrap=True)
    table.add_column("confidence", no_wrap=True, justify="right")
    table.add_column("hosts", overflow="fold")
    for group in sorted(found.groups, key=lambda each: (-len(each.hosts), each.hosts)):
        tables.add_row(table, "shared", _confidence(group.confidence), ", ".join(group.hosts))
    if found.alone:
        tables.add_row(table, "own", "", ", ".join(found.alone))
    if found.unknown:
        tables.add_row(table, "unknown", "", ", ".join(found.unknown), style="dim")
    title = f"{found.host}: oscillators, from {units.duration(found.span_ns)} of drift history"
    if is_silent(found.at_ns, model.at_ns):
        title += f", said {units.duration(model.at_ns - found.at_ns)} ago"
    parts: list[RenderableType] = [Text(title, style="bold"), table]
    if not found.groups:
        parts.append(Text("no two hosts are known to share one", style="dim"))
    return Group(*parts, Text(""))


def _confidence(value: float) -> str:
    """A probability that is never shown as certainty."""
    return "> 99.9 %" if value >= 0.9995 else units.share(value)
