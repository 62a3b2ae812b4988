"""The panel of paths: one row each over the horizon, the worst first.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from rich.text import Text

from pytools import units
from pytools.figures import ONE_WAY, QUEUEING, Figure
from pytools.signals import AnySignal, AppDelay, HoldState, Path, PathDelay, PathState
from pytools.units import UNKNOWN, duration
from pytools.views import tables
from pytools.views.columns import Column, Listing, little, much, named
from pytools.views.model import is_silent, is_whole_path
from pytools.views.top.fields import Cell, Rows, field, figure
from pytools.views.top.glyphs import Glyphs
from pytools.views.top.group_traffic import Share
from pytools.views.top.rings import Direction, Figures, Ring, figures, segments, trend, trouble
from pytools.views.top.state import Known, said, since_ns

_URGENCY: Final = tuple(tables.STATE_STYLES)
SPARKS: Final = 10


@dataclass(frozen=True)
class PathRow:
    """A path over the horizon, and the newest of what is known of it."""

    path: Path
    name: str
    now_ns: int
    since_ns: int
    ring: Ring
    delay: PathDelay | None
    state: PathState | None
    hold: HoldState | None
    share: Share | None
    app: AppDelay | None

    @cached_property
    def figures(self) -> Figures:
        """It over the horizon; found when it is shown, or sorted by."""
        return figures(self.ring, self.since_ns)

    @property
    def silent(self) -> bool:
        """Whether it has not been measured for a while."""
        return self.delay is None or is_silent(self.delay, self.now_ns)

    @property
    def unsteered(self) -> bool:
        """Whether nobody stands for its state any more."""
        return self.state is not None and is_silent(self.state, self.now_ns)

    @property
    def holding(self) -> HoldState | None:
        """The hold of its packets, while there is one."""
        stands = self.hold is not None and self.hold.armed and not is_silent(self.hold, self.now_ns)
        return self.hold if stands else None

    def why(self) -> str:
        """What there is to say about it; empty when nothing is."""
        words = []
        if self.delay is not None and self.silent:
            words.append(f"not measured for {duration(self.now_ns - self.delay.at_ns)}")
        elif self.delay is not None and self.delay.overtaken_p50_ns is not None:
            words.append(f"half of the probes wait for at least {duration(self.delay.overtaken_p50_ns)}")
        if self.state is not None:
            if self.unsteered:
                words.append(f"no controller for {duration(self.now_ns - self.state.at_ns)}")
            if self.state.reason:
                words.append(said(self.state.reason, self.state.under))
        if self.holding is not None and self.holding.rate_bytes_per_s is not None:
            words.append(f"held to {units.bit_rate(8 * self.holding.rate_bytes_per_s)}")
        return "; ".join(words)


def rows(known: Known, now_ns: int, horizon_s: int, glyphs: Glyphs) -> Rows[PathRow]:
    model, since = known.model, since_ns(now_ns, horizon_s)
    paths = sorted({*known.rings, *model.of(PathDelay), *model.of(PathState)})
    short = [tables.way(path, short=True) for path in paths]
    names = short if len(set(short)) == len(short) else [tables.way(path) for path in paths]
    sent = {path: segments(ring, since) for path, ring in known.rings.items()}
    shares = known.shares.of(model, paths, since, sent)
    apps: dict[Path | None, AppDelay] = {}
    for app in model.of(AppDelay).values():  # of two protocols the one with more samples
        if is_whole_path(app) and (app.path not in apps or app.sampled > apps[app.path].sampled):
            apps[app.path] = app
    nothing = Ring()
    found = []
    for path, name in zip(paths, names, strict=True):
        ring = known.rings.get(path, nothing)
        about = model.of(PathDelay).get(path), model.of(PathState).get(path), model.of(HoldState).get(path)
        found.append(PathRow(path, name, now_ns, since, ring, *about, shares.get(path), apps.get(path)))
    return Rows(
        Listing(fields(glyphs), _rank),
        found,
        key=lambda row: row.path,
        signals=_signals,
        text=lambda row: f"{row.path} {row.path.address} {row.state.state if row.state else ''} {row.why()}",
        dim=lambda row: row.silent,
        nothing="no path has been measured yet",
    )


def _signals(row: PathRow) -> list[AnySignal]:
    return [each for each in (row.delay, row.state, row.hold) if each is not None]


def _rank(row: PathRow) -> tuple[int, float, float, Path]:
    """Worst first: by state, then by loss and queueing."""
    loss, queueing_ns = trouble(row.ring, row.since_ns)
    return _urgency(row), -loss, -queueing_ns, row.path


def _urgency(row: PathRow) -> int:
    state = row.state.state if row.state is not None else ""
    return _URGENCY.index(state) if state in _URGENCY else len(_URGENCY)


def short_time(ns: int) -> str:
    """A duration in three characters or so."""
    seconds = max(0, ns) // 1_000_000_000
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _state(row: PathRow) -> Cell:
    if row.state is None:
        return UNKNOWN
    if row.unsteered:
        return Text(f"{row.state.state}?", style="dim")
    since = short_time(row.now_ns - row.state.since_ns)
    return Text(f"{row.state.state} {since}", style=tables.STATE_STYLES.get(row.state.state, ""))


def _loss(row: PathRow) -> Cell:
    loss = row.figures.loss
    if loss is None:
        return UNKNOWN
    return Text(units.share(loss), style="red") if row.figures.lost else units.share(loss)


def _queue(value: float | None, bound: float | None) -> Cell:
    """A queueing delay; dimmed while it is no larger than its own bound."""
    small = value is None or (bound is not None and value <= bound)
    return Text(duration(value), style="dim") if small else duration(value)


def _weight(row: PathRow) -> Cell:
    """Weight in the kernel, and the wanted one where it differs."""
    state = row.state
    wanted = state.weight_wanted if state is not None else None
    actual = row.share.member.weight if row.share is not None else state.weight_actual if state is not None else None
    shown = UNKNOWN if actual is None else str(actual)
    return Text(f"{shown}→{wanted}", style="yellow") if wanted is not None and wanted != actual else shown


def _per_s(value: float | None) -> Cell:
    if value is None:
        return UNKNOWN
    text = f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"
    return Text(text, style="red") if value else text


def _app(row: PathRow) -> str:
    return UNKNOWN if row.app is None else tables.one_way(row.app.owd.p99_ns, row.app.clock)


def fields(glyphs: Glyphs) -> tuple[Column[PathRow], ...]:
    def one_way(text: str, row: PathRow) -> Cell:
        return Text(text, style="yellow") if row.figures.clock == "holdover" else text

    def delay(heading: str, of: Callable[[PathRow], Direction], figure: Figure, meaning: str) -> Column[PathRow]:
        def value(row: PathRow) -> float | None:
            return of(row).figures.get(figure)

        def show(row: PathRow) -> Cell:
            if figure.measure is QUEUEING:
                return _queue(value(row), of(row).bounds.get(QUEUEING))
            return one_way(duration(value(row)), row)

        return field(heading, 8, show, meaning, much(value))

    def error(heading: str, of: Callable[[PathRow], Direction], meaning: str) -> Column[PathRow]:
        def value(row: PathRow) -> int | None:
            return of(row).bounds.get(ONE_WAY)

        return field(heading, 9, lambda row: one_way(tables.bound(value(row)), row), meaning, much(value))

    def share(
        heading: str, value: Callable[[PathRow], float | None], meaning: str, order: Any = much
    ) -> Column[PathRow]:
        return figure(heading, 7, units.share, value, meaning, order)

    def there(row: PathRow) -> Direction:
        return row.figures.forward

    def back(row: PathRow) -> Direction:
        return row.figures.reverse

    return (
        figure("path", 24, str, lambda row: row.name, "destination and interface", named, True),
        field(
            "state",
            13,
            _state,
            "the controller's state of it, and since when; `?`: the controller is silent",
            little(lambda row: None if row.state is None else _urgency(row)),
            True,
        ),
        delay("q p99", there, Figure(QUEUEING, "p99"), "forward queueing delay, p99; dimmed if within its bound"),
        field("loss", 7, _loss, "share of probes lost, of those answered or lost", much(lambda row: row.figures.loss)),
        delay("OWD p99", there, Figure(ONE_WAY, "p99"), "forward one-way delay, p99"),
        error("±", there, "bound of the forward one-way delays"),
        field(
            "trend 40 s",
            SPARKS,
            lambda row: glyphs.spark(trend(row.ring, row.now_ns, SPARKS)),
            "forward queueing delay (p99), the worst of every 4 s, on one scale for all paths",
            left=True,
        ),
        figure(
            "retx/s", 6, _per_s, lambda row: row.figures.retransmitted_per_s, "TCP segments retransmitted per second"
        ),
        share("CE", lambda row: row.figures.marked_forward, "share of sent TCP segments acknowledged as marked (CE)"),
        field(
            "weight",
            7,
            _weight,
            "weight in the kernel; `1→9`: and the wanted one",
            little(lambda row: None if row.share is None else row.share.member.weight),
        ),
        share(
            "wanted",
            lambda row: row.share.wanted if row.share else None,
            "share of its group's packets by the wanted weights",
            little,
        ),
        share(
            "sent",
            lambda row: row.share.sent if row.share else None,
            "share of its group's packets that left by it: TCP segments, and the kernel's own count",
            little,
        ),
        delay("back p99", back, Figure(ONE_WAY, "p99"), "reverse one-way delay, p99"),
        delay("q back", back, Figure(QUEUEING, "p99"), "reverse queueing delay, p99"),
        delay("OWD p50", there, Figure(ONE_WAY, "p50"), "forward one-way delay, p50"),
        delay("back p50", back, Figure(ONE_WAY, "p50"), "reverse one-way delay, p50"),
        error("± back", back, "bound of the reverse one-way delays"),
        delay("q p50", there, Figure(QUEUEING, "p50"), "forward queueing delay, p50"),
        share("CE back", lambda row: row.figures.marked_reverse, "share of arriving packets that are marked (CE)"),
        field(
            "app p99",
            8,
            _app,
            "forward one-way delay of application packets, p99, of the last window",
            much(lambda row: row.app.owd.p99_ns if row.app else None),
        ),
        field("via", 16, lambda row: row.path.gateway or UNKNOWN, "gateway", named(lambda row: row.path.gateway), True),
        field("reason", 60, PathRow.why, "reason for the state; the selected path's is below the list", None, True, 16),
    )
