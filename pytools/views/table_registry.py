"""Which table each view is drawn as, and by which columns its rows can be sorted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType

from pytools.signals import AnySignal, AppDelay, DropReason, PathDelay, ProgramCost, RdmaQueuePair, Suspect
from pytools.views import (
    clock_tables,
    delay_tables,
    gpu_tables,
    job_tables,
    link_tables,
    rdma_tables,
    tables,
    tcp_columns,
    tcp_tables,
)
from pytools.views.columns import Listing
from pytools.views.filters import Query
from pytools.views.model import Model
from pytools.views.overview import Overview

Draw = Callable[[Model, Sequence[AnySignal], Query], RenderableType]
TABLES: Final[Mapping[str, Draw]] = {
    "delay": delay_tables.delays,
    "app": delay_tables.app_delays,
    "ways": delay_tables.hidden_ways,
    "clocks": clock_tables.clocks,
    "edges": clock_tables.edges,
    "collocation": lambda model, _signals, _asked: clock_tables.collocation(model),
    "self": tables.cost,
    "tcp": tcp_tables.overview,
    "flows": tcp_tables.connections,
    "drops": tcp_tables.drops,
    "links": link_tables.overview,
    "events": link_tables.happenings,
    "rdma": rdma_tables.overview,
    "ports": rdma_tables.port_table,
    "suspects": rdma_tables.suspect_table,
    "jobs": job_tables.overview,
    "gpu": gpu_tables.overview,
}
# View -> kind of row -> its columns, at a time. A row is a signal, or a part of one.
LISTINGS: Final[Mapping[str, Mapping[type, Callable[[int], Listing[Any]]]]] = {
    **{
        view: {part.kind: part.listing for part in table.parts if part.sorts}
        for view, table in TABLES.items()
        if isinstance(table, Overview)
    },
    "delay": {PathDelay: lambda _now_ns: delay_tables.paths({})},
    "app": {AppDelay: delay_tables.applications},
    "drops": {DropReason: tcp_columns.reasons},
    "self": {ProgramCost: lambda _now_ns: tables.PROGRAMS, tuple: lambda _now_ns: tables.COUNTERS},
    "rdma": {RdmaQueuePair: rdma_tables.queue_pairs},
    "suspects": {Suspect: rdma_tables.suspects},
}


def ordered(kind: str, rows: Sequence[AnySignal], word: str, now_ns: int) -> list[AnySignal]:
    """The signals of a view by a column; kinds stay together, in the order in which they came."""
    by_kind: dict[type, list[AnySignal]] = {}
    for row in rows:
        by_kind.setdefault(type(row), []).append(row)
    listings = LISTINGS[kind]
    return [
        row
        for each, same in by_kind.items()
        for row in (listings[each](now_ns).ordered(same, word) if each in listings else same)
    ]
