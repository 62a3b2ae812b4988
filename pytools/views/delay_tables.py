"""Tables of delays: what probes found per path, and what application packets found per path and flow.

One-way delays stand apart from queueing, which needs no common clock. Pure: a model in, a renderable out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from pytools.figures import OF_DIRECTIONS, OF_PATHS, Figure, Measure, supports_one_way
from pytools.signals import AnySignal, AppDelay, Delay, Path, PathDelay, PathLiveness, PathWay
from pytools.units import UNKNOWN, duration, share
from pytools.views.columns import Column, Listing, Order, figure, much, named
from pytools.views.empty_states import no_app_delays, no_ways
from pytools.views.filters import Query
from pytools.views.model import Model, is_whole_path
from pytools.views.overview import Overview, Part, kind_first
from pytools.views.tables import bound, clock_state, endpoint, offset, one_way_bound, way


def delays(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """Both directions of every path, a line each."""
    listing, rows = paths(model.of(PathLiveness)), [row for row in signals if isinstance(row, PathDelay)]
    title = f"{model.host}: one-way delays{_over([row.window_ns for row in rows])}"
    return listing.sheet(title, listing.ordered(rows, asked.sort))


def paths(liveness: Mapping[Path, PathLiveness]) -> Listing[PathDelay]:
    """One row per path, of two lines: there and back. It is sorted by the worse of both."""

    def lost(measure: Measure, row: PathDelay) -> Text:
        return _share(measure, row, liveness.get(row.path))

    shares = [each for each in OF_PATHS if each.unit == "share"]
    cells: list[_Cell] = [
        *((each.heading, functools.partial(_of_path, each), each) for each in OF_PATHS if each not in shares),
        ("clock", lambda row: clock_state(row.clock), None),
        *((each.heading, functools.partial(lost, each), each) for each in shares),
    ]
    return Listing(
        (
            Column("path", _ends, {"path": named(lambda row: str(row.path))}),
            Column("", lambda _row: "→\n←", left=True),
            *(column for each in OF_DIRECTIONS for column in _of_direction(each)),
            *(_pair(cells[place : place + 2]) for place in range(0, len(cells), 2)),
        ),
        lambda row: msgspec.structs.astuple(row.path),
    )


_Cell = tuple[str, Callable[[PathDelay], Text], Measure | None]


def _ends(row: PathDelay) -> str:
    path = row.path
    via = f"  via {path.gateway}" if path.gateway else f"  to {path.address}"
    below = f"\n  {underlay(row)}" if row.underlay is not None else ""
    return f"{path.destination} {path.interface}\n{via}{below}"


def underlay(row: PathDelay) -> str:
    """What carries the packets of a tunnel."""
    ways = row.underlay or []
    whole = sum(each.packets or 0 for each in ways)
    parts = [
        each.interface
        + (f" via {each.gateway}" if each.gateway else "")
        + (f" {share((each.packets or 0) / whole)}" if whole else "")
        for each in sorted(ways, key=lambda each: -(each.packets or 0))
    ]
    if not parts:
        return "over unknown ways"
    return f"over {(', ' if whole else ' or ').join(parts)}"


def _of_direction(measure: Measure) -> Iterator[Column[PathDelay]]:
    """A column for each part, and one for the error."""

    def column(
        heading: str, word: str, show: Callable[[PathDelay, Delay], str], key: _Value, spare: int
    ) -> Column[PathDelay]:
        def worse(row: PathDelay) -> float | None:
            found = [value for way in (row.forward, row.reverse) if (value := key(row, way)) is not None]
            return max(found, default=None)

        def both(row: PathDelay) -> str:
            return "\n".join(show(row, way) for way in (row.forward, row.reverse))

        return Column(heading, both, {word: much(worse)}, spare=spare)

    *_, last = parts = list(measure.exported)
    for part in parts:
        figure = Figure(measure, part)
        heading, spare = figure.name.replace(" ", "\n"), measure.spare.get(part, 0)
        yield column(heading, figure.word, functools.partial(_shown, figure), figure.value, spare)
    if measure.error:

        def error(row: PathDelay, way: Delay) -> int | None:
            known = duration(measure.value(row, way, last)) != UNKNOWN
            return measure.bound(row, way) if known else None

        heading, spare = f"{measure.heading}\n±", min(measure.spare.get(part, 0) for part in parts)
        yield column(heading, f"{Figure(measure, '').word}-error", lambda *of: bound(error(*of)), error, spare)


_Value = Callable[[PathDelay, Delay], "float | None"]


def _shown(figure: Figure, row: PathDelay, way: Delay) -> str:
    return duration(figure.value(row, way))


def _pair(cells: Sequence[_Cell]) -> Column[PathDelay]:
    """Figures of the path, one below the other."""
    measures = [measure for _, _, measure in cells if measure is not None]
    return Column(
        "\n".join(heading for heading, _, _ in cells),
        lambda row: Text("\n").join([show(row) for _, show, _ in cells]),
        {Figure(each, "").word: much(_magnitude(each)) for each in measures},
        left=len(measures) < len(cells),
        spare=max((each.spare.get("", 0) for each in measures), default=0),
    )


def _magnitude(measure: Measure) -> Callable[[PathDelay], float | None]:
    def key(row: PathDelay) -> float | None:
        value = measure.value(row, None, "")
        return None if value is None else abs(value)

    return key


def _of_path(measure: Measure, row: PathDelay) -> Text:
    """With its error where it has one; a difference is coloured when it is larger than that."""
    value, error = measure.value(row, None, ""), measure.bound(row, None)
    if measure.unit == "duration":
        return Text(duration(value))
    if value is None or error is None:
        return Text(UNKNOWN)
    return Text(f"{offset(round(value))} {bound(error)}", style="yellow" if abs(value) > error else "dim")


def _share(measure: Measure, row: PathDelay, liveness: PathLiveness | None) -> Text:
    """Of how many; of a path that is silent now, for how long: that is known before anything is lost."""
    if liveness is not None and liveness.missed > 1 and liveness.at_ns >= row.at_ns - row.window_ns:
        return Text(f"silent {duration(liveness.silent_ns)} ({liveness.missed})", style="red")
    value = measure.value(row, None, "")
    if value is None:
        return Text(UNKNOWN)
    of_it, whole = measure.counts(row)
    return Text(f"{share(value)} ({of_it}/{whole})", style="red" if of_it else "")


def _over(windows_ns: Sequence[int]) -> str:
    if not windows_ns:
        return ""
    low, high = duration(min(windows_ns)), duration(max(windows_ns))
    return f" over {low}" if low == high else f" over windows from {low} to {high}"


def app_delays(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """Delays of application packets by path, then by flow, the busiest first."""
    if not model.of(AppDelay):
        return Text(no_app_delays(model))
    apps = applications(model.at_ns).ordered((row for row in signals if isinstance(row, AppDelay)), asked.sort)
    if not apps:
        return Text(asked.none_passes(model.host))
    paths, flows = [app for app in apps if is_whole_path(app)], [app for app in apps if not is_whole_path(app)]
    title = f"{model.host}: application packets{_over([app.window_ns for app in apps])}{asked.said()}, by "
    order = ", the busiest first" if asked.sort is None else ""
    parts: list[RenderableType] = []
    if paths:
        clock = Column[AppDelay]("clock", lambda app: clock_state(app.clock), left=True, spare=1)
        parts.append(_apps("path", lambda app: f"{app.protocol} {_place(app)}", clock).sheet(f"{title}path", paths))
    if flows:
        place = Column[AppDelay]("path", _place, left=True, spare=1)
        parts.append(
            _apps("flow", _flow, place).sheet(f"{'' if paths else title}{'by ' * bool(paths)}flow{order}", flows)
        )
    return Group(*parts)


def applications(_now_ns: int) -> Listing[AppDelay]:
    """One row per path or flow."""
    return _apps("flow", _flow)


def _apps(heading: str, name: Callable[[AppDelay], str], *last: Column[AppDelay]) -> Listing[AppDelay]:
    def fact(app: AppDelay, ns: int | None) -> int | None:
        return ns if supports_one_way(app.clock) else None

    def delay(word: str, value: Callable[[AppDelay], int | None], spare: int = 0) -> Column[AppDelay]:
        order: Order[AppDelay] = much(value)
        shown = word.replace("-", "\n").replace("owd", "OWD")
        return Column(shown, lambda app: duration(value(app)), {word: order}, spare=spare)

    def counts(*words: str, spare: int = 0) -> Column[AppDelay]:
        orders: dict[str, Order[AppDelay]] = {word: much(operator.attrgetter(word)) for word in words}
        both = operator.attrgetter(*words)
        return Column("\n".join(words), lambda app: "\n".join(map(str, both(app))), orders, spare=spare)

    return Listing(
        (
            Column(heading, name, {"flow": named(name)}),
            delay("owd-p50", lambda app: fact(app, app.owd.p50_ns)),
            delay("owd-p90", lambda app: fact(app, app.owd.p90_ns), 4),
            delay("owd-p99", lambda app: fact(app, app.owd.p99_ns)),
            delay("owd-max", lambda app: fact(app, app.owd.max_ns), 5),
            Column(
                "OWD\n±",
                lambda app: one_way_bound(app.bound_ns, app.clock, app.owd.max_ns),
                {"owd-error": much(lambda app: fact(app, app.bound_ns))},
            ),
            delay("queueing-p50", lambda app: app.queueing.p50_ns, 3),
            delay("queueing-p99", lambda app: app.queueing.p99_ns),
            counts("sampled", "joined"),
            counts("ambiguous", "unmatched", spare=2),
            *last,
        ),
        lambda app: (-app.sampled, app.local, app.local_port),
    )


def _flow(app: AppDelay) -> str:
    return f"{app.protocol} {endpoint(app.local, app.local_port)}\n  → {endpoint(app.remote, app.remote_port)}"


def _place(app: AppDelay) -> str:
    if app.path is None:
        return "no measured\n  path"
    return f"{app.path.destination} {app.path.interface}" + (f"\n  via {app.path.gateway}" if app.path.gateway else "")


_WAY_STYLES: Final = {"healthy": "green", "slow": "yellow", "lossy": "yellow", "dead": "red", "unmeasured": "dim"}


def ways(_now_ns: int) -> Listing[PathWay]:
    return Listing(
        (
            figure("path", "path", str, lambda row: way(row.path), order=named),
            Column("way", way_name, {"way": named(way_name)}, left=True),
            Column("state", way_state, {"state": much(lambda row: _WORST.index(row.state))}, left=True),
            figure("queueing\np50", "queueing-p50", duration, lambda row: row.queueing_p50_ns),
            figure("±", "queueing-error", bound, lambda row: row.queueing_bound_ns),
            figure("loss", "loss", share, lambda row: row.lost / row.sent if row.sent else None),
            figure("loss\n±", "loss-error", share, lambda row: row.loss_bound, 1),
            figure("ports", "ports", str, lambda row: len(row.ports), 2),
            figure("all ways\nmet", "confidence", share, lambda row: row.confidence, 3),
        ),
        lambda row: (*msgspec.structs.astuple(row.path), row.way),
    )


_WORST: Final = tuple(_WAY_STYLES)


def way_name(row: PathWay) -> str:
    """Its number, and what names it."""
    names = [f"by {row.lower}"] if row.lower else []
    if row.router:
        names.append(f"{row.router}, hop {row.differs_at}")
    elif not names:
        names.append("the only one" if row.ways == 1 else f"port {row.ports[0]}, no router answers")
    return f"{row.way} of {row.ways}: {', '.join(names)}"


def ways_met(row: PathWay) -> str:
    """How many ways a path has, and how sure that is."""
    count = f"{row.ways} way{'' if row.ways == 1 else 's'} behind the first hop"
    if not row.confidence:
        return f"{count}, perhaps others too: routers do not answer"
    return f"{count}, with {share(row.confidence)} confidence"


def way_state(row: PathWay) -> Text:
    if row.ways == 1:
        return Text("no other to compare", "dim")
    behind = "" if row.state in ("healthy", "unmeasured") else ", hop unknown"
    if row.sick_hop is not None:
        behind = f", behind hop {row.sick_hop}"
    return Text(row.state + behind, _WAY_STYLES[row.state])


hidden_ways: Final = Overview(
    [Part(PathWay, ways, "{host}: ways behind the first hop{asked}", dims=False)], kind_first(PathWay, no_ways)
)
