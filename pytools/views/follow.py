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
from pytools.views import export
from pytools.views.model import Model, fold

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


def _cost(model: Model) -> list[AnySignal]:
    return [] if model.cost is None else [model.cost]


def _everything(model: Model) -> list[AnySignal]:
    measured: list[AnySignal] = [*model.delays.values(), *model.tcp_paths.values(), *model.groups.values()]
    return [*measured, *model.states.values(), *model.acts, *_cost(model)]


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
    "top": View(
        frozenset({"path_delay", "tcp_path", "nexthop_group", "path_state", "act", "self"}),
        _everything,
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
        if clock() - started_s > PATIENCE_S:
            raise SwerveError(
                f"the agent published no {' or '.join(sorted(view.types))} within {PATIENCE_S:g} s",
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
    draw = _json if as_json else _table(kind, color)
    view, tell = VIEWS[kind], export.missed(client, sys.stderr)
    try:
        for model in frames(client, view, count, every_s):
            draw(view.rows(model), model)
            tell()
    finally:
        tell()


def _json(signals: list[AnySignal], _model: Model) -> None:
    export.write(signals, sys.stdout.buffer)


def _table(kind: str, color: bool) -> Callable[[list[AnySignal], Model], None]:
    from pytools.views import tables

    tables_of: Mapping[str, Callable[[Model], RenderableType]] = {
        "delay": tables.delays,
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
