"""Tables of clocks: of all hosts against the reference, of the peers against ours, and who shares an oscillator.

Pure: a model in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, get_args

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytools import units
from pytools.figures import supports_one_way
from pytools.signals import Clock, ClockEdge, ClockState, Collocation
from pytools.views import empty_states, tables
from pytools.views.columns import Column, Listing, far, figure, little, much, named
from pytools.views.model import Model, is_silent
from pytools.views.overview import Overview, Part, kind_first

_NAMED: Final = 3  # hosts called by name in one line
_STATES: Final = get_args(ClockState)  # the worst last


def of_hosts(now_ns: int) -> Listing[Clock]:
    """One row per host: its clock against the reference's, which comes first."""
    return Listing(
        (
            figure("host", "host", str, lambda row: row.of, order=named),
            Column("offset", _offset, {"offset": far(lambda row: row.offset_ns)}),
            figure("drift\nppm", "drift", tables.ppm, lambda row: row.drift_ppb, order=far),
            figure("±", "bound", tables.bound, lambda row: row.bound_ns),
            figure("hard\n±", "hard-bound", tables.bound, lambda row: row.hard_bound_ns, spare=1),
            Column(
                "state",
                lambda row: tables.clock_state(row.state, is_silent(row, now_ns)),
                {"state": much(lambda row: _STATES.index(row.state))},
                left=True,
            ),
            figure("neigh-\nbours", "neighbours", str, lambda row: row.neighbours, spare=3, order=little),
            figure("pairs\nkept", "kept", str, lambda row: row.pairs_kept, spare=4, order=little),
            figure("pairs\nrejected", "rejected", str, lambda row: row.pairs_rejected, spare=5),
            figure("outlier\nedges", "outliers", _count, lambda row: row.outlier_edges, spare=2),
            figure("slew\nppm", "slew", tables.ppm, lambda row: row.slew_ppb, spare=6, order=far),
        ),
        lambda row: (row.of != row.reference, row.of),
    )


def _offset(row: Clock) -> str | Text:
    return Text("reference", style="bold") if row.of == row.reference else tables.offset(row.offset_ns)


def of_paths(_now_ns: int) -> Listing[ClockEdge]:
    """One row per path: the peer's clock against ours."""
    return Listing(
        (
            figure("path", "path", str, lambda row: tables.way(row.path), order=named),
            figure("offset", "offset", tables.offset, lambda row: row.offset_ns, order=far),
            figure("drift\nppm", "drift", tables.ppm, lambda row: row.drift_ppb, order=far),
            figure("sigma", "sigma", units.duration, lambda row: row.sigma_ns, spare=2),
            figure("±", "bound", tables.bound, lambda row: row.bound_ns),
            figure("hard\n±", "hard-bound", tables.bound, _hard_ns, spare=3),
            figure("RTT min", "rtt", units.duration, lambda row: row.round_trip_min_ns, spare=1),
            figure("pairs\nkept", "kept", str, lambda row: row.pairs_kept, spare=4, order=little),
            figure("pairs\nrejected", "rejected", str, lambda row: row.pairs_rejected, spare=5),
            figure("stepped", "stepped", _stepped, lambda row: row.stepped, left=True),
        ),
        lambda row: (row.path.destination, row.path.address, row.path.gateway, row.path.interface),
    )


def _stepped(stepped: bool) -> str | Text:
    return Text("stepped", style="red") if stepped else "no"


def _hard_ns(row: ClockEdge) -> int:
    """The larger of the two distances: offset ± this holds whatever the network does."""
    return max(row.hard_high_ns - row.offset_ns, row.offset_ns - row.hard_low_ns)


def references(model: Model) -> list[str]:
    """The hosts whose clock is the common one; more than one only while hosts disagree about it."""
    return sorted({clock.reference for clock in model.of(Clock).values() if clock.reference})


def _count(number: int) -> Text:
    return Text(str(number), style="yellow" if number else "")


def _title(model: Model) -> str:
    common = " and ".join(references(model))
    return f"{{host}}: clocks{f' against {common}' if common else ', no reference'}{{asked}}"


def _remarks(model: Model, known: Sequence[Clock]) -> list[Text]:
    """What a person should know about the states in the table."""
    states = {clock.state for clock in known}
    said = []
    if known and len(model.of(Clock)) == 1:
        said = [empty_states.no_others(model)]
    else:
        if len(references(model)) > 1:
            said.append("hosts do not agree about the reference: each offset is against the one its host believes in")
        if "holdover" in states:
            said.append("holdover: not compared any more; the bound grows until it is")
        if "free_running" in states:
            said.append("free_running: compared with nobody, or just stepped: no one-way delay is given (see --edges)")
    return [Text(each, style="dim") for each in said if known]


clocks: Final = Overview([Part(Clock, of_hosts, _title)], kind_first(Clock, empty_states.no_clocks), _remarks)
edges: Final = Overview(
    [Part(ClockEdge, of_paths, "{host}: the peers' clocks against ours, by path{asked}")],
    kind_first(ClockEdge, empty_states.no_edges),
)


def collocation(model: Model) -> RenderableType:
    """Which hosts share an oscillator."""
    found = model.one(Collocation)
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
    if is_silent(found, model.at_ns):
        title += f", said {units.duration(model.at_ns - found.at_ns)} ago"
    parts: list[RenderableType] = [Text(title, style="bold"), table]
    if not found.groups:
        parts.append(Text("no two hosts are known to share one", style="dim"))
    return Group(*parts, Text(""))


def _confidence(value: float) -> str:
    return "> 99.9 %" if value >= 0.9995 else units.share(value)


# ---- the live view: the state of our clock, and one line for all ----


def own(model: Model, now_ns: int) -> Text:
    """How far this host's clock can be trusted, against which reference; empty when nothing is known."""
    clock = model.of(Clock).get(model.host)
    if clock is None:
        return Text("")
    state = tables.clock_state(clock.state, is_silent(clock, now_ns))
    line = Text("clock ").append_text(state)
    if clock.of == clock.reference:
        return line.append(", the reference")
    if clock.reference and supports_one_way(clock.state):
        line.append(f" {tables.bound(clock.bound_ns)} to {clock.reference}")
    return line


def summary(model: Model, now_ns: int) -> Text | None:
    """All clocks in one line; None when none is known."""
    worst = worst_first(model, now_ns)
    if not worst:
        return None
    common = references(model)
    line = Text(f"clocks against {' and '.join(common)}: " if common else "clocks: ", style="bold")
    silent = [clock for clock in worst if is_silent(clock, now_ns)]
    others = [clock for clock in worst if clock not in silent and clock.of != clock.reference]
    said: list[Text] = []
    for state in _STATES:
        of_state = [clock for clock in others if clock.state == state]
        if of_state:
            said.append(Text(f"{len(of_state)} ", style="not bold").append_text(tables.clock_state(of_state[0].state)))
            said[-1].append(f" ({_named(of_state)})")
    if silent:
        said.append(Text(f"{len(silent)} without signals ({_named(silent)})", style="not bold dim"))
    if not said:
        said.append(Text("nobody to compare with", style="not bold dim"))
    return line.append_text(Text(", ").join(said))


def _named(clocks: list[Clock]) -> str:
    """The worst of these by name, with their bounds."""
    names = [clock.of + ("" if clock.bound_ns is None else f" {tables.bound(clock.bound_ns)}") for clock in clocks]
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def worst_first(model: Model, now_ns: int) -> list[Clock]:
    """The clocks of all hosts, those that can be trusted least first, the reference last."""

    def rank(clock: Clock) -> tuple[bool, int, int, str]:
        silent = is_silent(clock, now_ns)
        return (not silent, -_STATES.index(clock.state), -(clock.bound_ns or 0), clock.of)

    return sorted(model.of(Clock).values(), key=rank)
