"""Which table each view is drawn as, and by which columns its rows can be sorted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType

from pytools.signals import (
    AnySignal,
    AppDelay,
    Clock,
    ClockEdge,
    DropReason,
    Gpu,
    GpuClock,
    Job,
    Link,
    LinkEvent,
    PathDelay,
    PathEcn,
    PathMtu,
    PathWay,
    RdmaPort,
    RdmaQueuePair,
    Suspect,
    TcpFlow,
    TcpNamespace,
    TcpPath,
)
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
from pytools.views.model import Model
from pytools.views.query import Query

Draw = Callable[[Model, Sequence[AnySignal], Query], RenderableType]


def _whole(draw: Callable[[Model], RenderableType]) -> Draw:
    return lambda model, _signals, _asked: draw(model)


TABLES: Final[Mapping[str, Draw]] = {
    "delay": delay_tables.delays,
    "app": delay_tables.app_delays,
    "ways": delay_tables.hidden_ways,
    "clocks": clock_tables.clocks,
    "edges": clock_tables.edges,
    "collocation": _whole(clock_tables.collocation),
    "self": _whole(tables.cost),
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
    "delay": {PathDelay: lambda _now_ns: delay_tables.paths({})},
    "app": {AppDelay: delay_tables.applications},
    "ways": {PathWay: delay_tables.ways},
    "clocks": {Clock: clock_tables.of_hosts},
    "edges": {ClockEdge: clock_tables.of_paths},
    "tcp": {TcpPath: tcp_columns.paths, TcpNamespace: tcp_columns.namespaces, TcpFlow: tcp_columns.flows},
    "flows": {TcpFlow: tcp_columns.flows},
    "drops": {DropReason: tcp_columns.reasons},
    "links": {Link: link_tables.links, PathMtu: link_tables.mtus, PathEcn: link_tables.ecns},
    "events": {LinkEvent: link_tables.events},
    "rdma": {RdmaQueuePair: rdma_tables.queue_pairs},
    "ports": {RdmaPort: rdma_tables.ports},
    "suspects": {Suspect: rdma_tables.suspects},
    "jobs": {Job: job_tables.jobs},
    "gpu": {Gpu: gpu_tables.gpus, GpuClock: gpu_tables.timers},
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
