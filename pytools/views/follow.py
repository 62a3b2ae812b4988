"""Views that show a frame now and then: collects signals, and hands the model on at each interval.

`collect` is the only place that waits; the clock is CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.signals import AnySignal, RdmaQueuePair, TcpFlow
from pytools.views import export
from pytools.views.filters import Filters, Query
from pytools.views.model import Model, fold
from pytools.views.registry import VIEWS, View

if TYPE_CHECKING:
    from rich.console import Console

LOT_S: Final = 0.2
_AGAIN_S: Final = 0.1  # between two looks whether there is enough for a first frame


def collect(
    client: Client,
    model: Model,
    until_s: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
    filters: Filters | None = None,
) -> Model:
    """The model after everything that arrives until then.

    Parameters
    ----------
    filters : Filters, optional
        Connections and queue pairs that cannot pass them are not remembered, so that there is room for those that can.
    """
    lasting = None if filters is None else filters.lasting()
    while (left_s := until_s - clock()) > 0:
        # Short windows come a hundred times a second: take them in lots, not one by one.
        wait(min(left_s, LOT_S))
        signals = client.read()
        if lasting:
            signals = [
                each for each in signals if not isinstance(each, TcpFlow | RdmaQueuePair) or lasting.passes(each)
            ]
        model = fold(model, signals)
    return model


def paced(
    take: Callable[[float], None], enough: Callable[[], bool], first_s: float, every_s: float, count: int | None
) -> Iterator[None]:
    """When to show what is known: `count` times, `every_s` apart.

    Parameters
    ----------
    take : callable
        Takes what arrives until then.
    enough : callable
        Whether enough is known for the first time, once `first_s` are over.
    """
    due_s = time.monotonic() + first_s
    take(due_s)
    while not enough():
        take(time.monotonic() + _AGAIN_S)
    for shown in itertools.count(1):
        yield
        if shown == count:
            return
        due_s = max(due_s + every_s, time.monotonic())
        take(due_s)


def frames(
    client: Client, view: View, count: int | None, every_s: float, filters: Filters | None = None
) -> Iterator[Model]:
    """The model, `count` times, `every_s` apart; the first once every path can have been heard of.

    Raises
    ------
    SwerveError
        If nothing was heard at all.
    """
    model, started_s = Model(), time.monotonic()

    def take(until_s: float) -> None:
        nonlocal model
        model = collect(client, model, until_s, filters=filters)

    def enough() -> bool:
        if view.heard(model) or time.monotonic() - started_s <= view.patience_s:
            return view.heard(model)
        if view.silence is not None and model.at_ns:
            return True
        raise SwerveError(
            f"the agent published no {' or '.join(sorted(view.types))} within {view.patience_s:g} s",
            "`swerve self` says which of its hooks failed, and its configuration which peers it has",
        )

    for _ in paced(take, enough, view.wait_s(filters), every_s, count):
        yield model


def rows_of(kind: str, model: Model, asked: Query) -> list[AnySignal]:
    """The signals that a frame stands for: those that pass the filters, in the order asked for."""
    rows = asked.filters.select(VIEWS[kind].rows(model))
    if asked.sort is None:
        return rows
    from pytools.views import table_registry

    return table_registry.ordered(kind, rows, asked.sort, model.at_ns)


def show(
    client: Client, kind: str, count: int | None, every_s: float, as_json: bool, color: bool, asked: Query | None = None
) -> None:
    """Print frames on standard output until done, interrupted, or nobody reads."""
    asked = asked or Query()
    view, tell = VIEWS[kind], export.missed(client, sys.stderr)
    draw = _json(view, asked) if as_json else _table(kind, color, asked)
    try:
        for model in frames(client, view, count, every_s, filters=asked.filters):
            draw(rows_of(kind, model, asked), model)
            tell(False)
    finally:
        tell(True)


def show_model(kind: str, model: Model, as_json: bool, color: bool, asked: Query) -> None:
    """Print one frame of what is known already."""
    draw = _json(VIEWS[kind], asked) if as_json else _table(kind, color, asked)
    draw(rows_of(kind, model, asked), model)


def _json(view: View, asked: Query) -> Callable[[list[AnySignal], Model], None]:
    """Lines on standard output; that there is nothing, and why, is said once on standard error."""
    told = ""

    def print_lines(signals: list[AnySignal], model: Model) -> None:
        nonlocal told
        why = _why_nothing(view, asked, model) if not signals else ""
        if why and why != told:
            print(f"swerve: {why}", file=sys.stderr, flush=True)
        told = why
        export.write(signals, sys.stdout.buffer)

    return print_lines


def _why_nothing(view: View, asked: Query, model: Model) -> str:
    return asked.none_passes(model.host) or (view.silence(model) if view.silence is not None else "")


def _table(kind: str, color: bool, asked: Query) -> Callable[[list[AnySignal], Model], None]:
    from pytools.views import table_registry

    draw, out = table_registry.TABLES[kind], console(color)

    def print_frame(signals: list[AnySignal], model: Model) -> None:
        out.print(draw(model, signals, asked))
        out.file.flush()

    return print_frame


def console(color: bool) -> Console:
    """Standard output for tables: as wide as the terminal, or wide enough when it is a pipe."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 300
    return Console(no_color=not color, width=wide, highlight=False, soft_wrap=False)
