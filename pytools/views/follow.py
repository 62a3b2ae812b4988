"""Views that show a frame now and then: collects signals, and hands the model on at each interval.

`collect` is the only place that waits; the clock is CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytools.bus_client import Client
from pytools.errors import SwerveError
from pytools.signals import AnySignal
from pytools.views import export, silence
from pytools.views.model import Model, fold
from pytools.views.timing import is_whole_path

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PATIENCE_S: Final = 5.0
LOT_S: Final = 0.2


@dataclass(frozen=True)
class View:
    """What a view subscribes to, and when there is something to show."""

    types: frozenset[str]
    rows: Callable[[Model], list[AnySignal]]  # the signals that a frame stands for
    heard: Callable[[Model], bool]  # whether enough has arrived for a first frame
    first_s: float = 1.2  # long enough for one long window of every path
    # Why there is nothing, when an agent that lives has nothing of this kind; None: that is an error.
    silence: Callable[[Model], str] | None = None
    patience_s: float = PATIENCE_S


def _cost(model: Model) -> list[AnySignal]:
    return [] if model.cost is None else [model.cost]


def _everything(model: Model) -> list[AnySignal]:
    measured: list[AnySignal] = [*model.delays.values(), *model.tcp_paths.values(), *model.groups.values()]
    return [*measured, *model.states.values(), *model.acts, *_cost(model)]


def _top(model: Model) -> list[AnySignal]:
    whole = [app for app in model.timing.apps.values() if is_whole_path(app)]
    return [*_everything(model), *model.timing.clocks.values(), *whole]


def _busiest(model: Model) -> list[AnySignal]:
    return [*sorted(model.timing.apps.values(), key=lambda app: (not is_whole_path(app), -app.sampled))]


def _collocation(model: Model) -> list[AnySignal]:
    return [] if model.timing.collocation is None else [model.timing.collocation]


# `path_delay` comes from every agent that lives, and says why there is nothing else.
VIEWS: Final[Mapping[str, View]] = {
    "delay": View(
        frozenset({"path_delay"}),
        lambda model: list(model.delays.values()),
        lambda model: bool(model.delays),
    ),
    "tcp": View(  # no retransmission is no signal: `self` says that the agent lives, and whether its hook does
        frozenset({"tcp_flow", "tcp_path", "self"}),
        lambda model: [*model.tcp_paths.values(), *model.flows.values()],
        lambda model: model.cost is not None,
    ),
    "self": View(  # the first signal covers the time since somebody last asked; the second one covers a second
        frozenset({"self"}),
        _cost,
        lambda model: model.cost is not None,
        first_s=2.3,
    ),
    "app": View(
        frozenset({"app_delay", "path_delay"}),
        _busiest,
        lambda model: bool(model.timing.apps),
        silence=silence.no_app_delays,
    ),
    "clocks": View(
        frozenset({"clock", "clock_edge", "path_delay"}),
        lambda model: list(model.timing.clocks.values()),
        lambda model: bool(model.timing.clocks),
        silence=silence.no_clocks,
    ),
    "edges": View(
        frozenset({"clock_edge", "path_delay"}),
        lambda model: list(model.timing.edges.values()),
        lambda model: bool(model.timing.edges),
        silence=silence.no_edges,
    ),
    "collocation": View(  # every five seconds, of which some may just have passed
        frozenset({"collocation", "clock", "clock_edge", "path_delay"}),
        _collocation,
        lambda model: model.timing.collocation is not None,
        silence=silence.no_collocation,
        patience_s=8.0,
    ),
    "top": View(
        frozenset({"path_delay", "tcp_path", "nexthop_group", "path_state", "act", "self", "clock", "app_delay"}),
        _top,
        lambda model: bool(model.delays or model.cost),
    ),
}


def collect(
    client: Client,
    model: Model,
    until_s: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Model:
    """The model after everything that arrives until then."""
    while (left_s := until_s - clock()) > 0:
        # Short windows come a hundred times a second: take them in lots, not one by one.
        wait(min(left_s, LOT_S))
        model = fold(model, client.read())
    return model


def frames(
    client: Client, view: View, count: int | None, every_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Model]:
    """The model, `count` times, `every_s` apart; the first once every path can have been heard of.

    Raises
    ------
    SwerveError
        If nothing was heard at all.
    """
    started_s = clock()
    due_s = started_s + view.first_s
    model = collect(client, Model(), due_s, clock)
    while not view.heard(model):
        if clock() - started_s > view.patience_s:
            if view.silence is not None and model.at_ns:
                break
            raise SwerveError(
                f"the agent published no {' or '.join(sorted(view.types))} within {view.patience_s:g} s",
                "`swerve self` says which of its hooks failed, and its configuration which peers it has",
            )
        model = collect(client, model, clock() + 0.1, clock)
    shown = 0
    while True:
        yield model
        shown += 1
        if count is not None and shown >= count:
            return
        due_s = max(due_s + every_s, clock())
        model = collect(client, model, due_s, clock)


def show(client: Client, kind: str, count: int | None, every_s: float, as_json: bool, color: bool) -> None:
    """Print frames on standard output until done, interrupted, or nobody reads."""
    view, tell = VIEWS[kind], export.missed(client, sys.stderr)
    draw = _json(view) if as_json else _table(kind, color)
    try:
        for model in frames(client, view, count, every_s):
            draw(view.rows(model), model)
            tell()
    finally:
        tell()


def _json(view: View) -> Callable[[list[AnySignal], Model], None]:
    """Lines on standard output; that there is nothing, and why, is said once on standard error."""
    told = ""

    def print_lines(signals: list[AnySignal], model: Model) -> None:
        nonlocal told
        why = view.silence(model) if view.silence is not None and not signals else ""
        if why and why != told:
            print(f"swerve: {why}", file=sys.stderr, flush=True)
        told = why
        export.write(signals, sys.stdout.buffer)

    return print_lines


def _table(kind: str, color: bool) -> Callable[[list[AnySignal], Model], None]:
    from pytools.views import clock_tables, delay_tables, tables

    tables_of: Mapping[str, Callable[[Model], RenderableType]] = {
        "delay": delay_tables.delays,
        "app": delay_tables.app_delays,
        "clocks": clock_tables.clocks,
        "edges": clock_tables.edges,
        "collocation": clock_tables.collocation,
        "tcp": tables.retransmissions,
        "self": tables.cost,
    }
    draw, out = tables_of[kind], console(color)

    def print_frame(_signals: list[AnySignal], model: Model) -> None:
        out.print(draw(model))
        out.file.flush()

    return print_frame


def console(color: bool) -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough when it is a pipe."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200
    return Console(no_color=not color, width=wide, highlight=False, soft_wrap=False)
