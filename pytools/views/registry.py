"""The views: which signals each asks the agent for, which of them a frame stands for, and what it says when none come.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytools import signals as sig
from pytools.ipc.wire import TAGS
from pytools.views import empty_states
from pytools.views.filters import TRAITS, Filters
from pytools.views.model import Model, is_whole_path

PATIENCE_S: Final = 5.0
# Processes are looked for once somebody listens to connections, and told a window later, of idle ones the fourth.
_OWNERS_S: Final = 2.4
_ALL_OWNERS_S: Final = 5.5


@dataclass(frozen=True)
class View:
    """What a view subscribes to, and when there is something to show."""

    shows: tuple[type[Any], ...]  # kinds of signals that a frame stands for, in this order
    needs: tuple[type[Any], ...]  # a signal of any of these is enough for a first frame
    # Comes from every agent that lives, and says why there is nothing else.
    lives: tuple[type[Any], ...] = (sig.PathDelay,)
    first_s: float = 1.2  # long enough for one long window of every path
    # Why there is nothing, when an agent that lives has nothing of this kind; None: that is an error.
    silence: Callable[[Model], str] | None = None
    patience_s: float = PATIENCE_S
    owners_s: float | None = None  # instead of first_s where owners are asked for; None: they come at once
    usual: Callable[[Any], tuple[float, ...]] | None = None  # the order of rows; None: as they came

    @property
    def types(self) -> frozenset[str]:
        return frozenset(TAGS[kind] for kind in (*self.shows, *self.needs, *self.lives))

    @property
    def filters(self) -> frozenset[str]:
        """Those that something in it can pass."""
        return frozenset(name for kind in self.shows for name in TRAITS.get(kind, ()))

    def rows(self, model: Model) -> list[sig.AnySignal]:
        found: list[sig.AnySignal] = [row for kind in self.shows for row in model.of(kind).values()]
        return found if self.usual is None else sorted(found, key=self.usual)

    def heard(self, model: Model) -> bool:
        """Whether enough has arrived for a first frame."""
        return any(model.of(kind) for kind in self.needs)

    def wait_s(self, filters: Filters | None) -> float:
        """How long to listen before the first frame."""
        asks_for_owners = filters is not None and not filters.wanted.keys().isdisjoint(("pid", "command"))
        return self.owners_s if asks_for_owners and self.owners_s is not None else self.first_s


class _Top(View):
    def rows(self, model: Model) -> list[sig.AnySignal]:
        return [row for row in super().rows(model) if not isinstance(row, sig.AppDelay) or is_whole_path(row)]


VIEWS: Final[Mapping[str, View]] = {
    "delay": View((sig.PathDelay, sig.PathLiveness), (sig.PathDelay,)),
    "tcp": View(  # `self` and `tcp_host` say that the agent lives, and whether its hooks do
        (sig.TcpHost, sig.TcpPath, sig.TcpNamespace, sig.TcpFlow),
        (sig.Self, sig.TcpHost),
        (),
        first_s=_OWNERS_S,
        owners_s=_ALL_OWNERS_S,
    ),
    "flows": View((sig.TcpFlow,), (sig.Self, sig.TcpHost), (), first_s=_OWNERS_S, owners_s=_ALL_OWNERS_S),
    "drops": View((sig.PacketDrops,), (sig.PacketDrops,), silence=empty_states.no_drops),
    "links": View((sig.Link, sig.PathMtu, sig.PathEcn, sig.LinkEvent), (sig.Link,), silence=empty_states.no_links),
    # An interface that is well says nothing of events, but that it is there.
    "events": View((sig.LinkEvent,), (sig.Link, sig.LinkEvent), silence=empty_states.no_links),
    "rdma": View((sig.RdmaSight, sig.RdmaQueuePair, sig.RdmaSuspects), (sig.RdmaSight,), silence=empty_states.no_rdma),
    "ports": View((sig.RdmaPort,), (sig.RdmaSight,), silence=empty_states.no_rdma),
    "suspects": View((sig.RdmaSuspects,), (sig.RdmaSight,), silence=empty_states.no_rdma),
    # `tcp_host` says that the agent lives. Ranks need a second, their connections four windows, a lag two answers.
    "jobs": View((sig.Job,), (sig.Job, sig.TcpHost), first_s=_ALL_OWNERS_S, silence=empty_states.no_jobs),
    # NVML is opened once somebody listens; a counter has grown from its second reading on.
    "gpu": View((sig.Gpu, sig.GpuClock), (sig.Gpu, sig.TcpHost), (), first_s=3.3, silence=empty_states.no_gpus),
    # The first signal covers the time since somebody last asked; the second one covers a second.
    "self": View((sig.Self,), (sig.Self,), (), first_s=2.3),
    "app": View(
        (sig.AppDelay,),
        (sig.AppDelay,),
        silence=empty_states.no_app_delays,
        usual=lambda app: (not is_whole_path(app), -app.sampled),
    ),
    # Every five seconds.
    "ways": View((sig.PathWay,), (sig.PathWay,), silence=empty_states.no_ways, patience_s=8.0),
    "clocks": View((sig.Clock,), (sig.Clock,), (sig.PathDelay, sig.ClockEdge), silence=empty_states.no_clocks),
    "edges": View((sig.ClockEdge,), (sig.ClockEdge,), silence=empty_states.no_edges),
    "collocation": View(  # every five seconds, of which some may just have passed
        (sig.Collocation,),
        (sig.Collocation,),
        (sig.PathDelay, sig.Clock, sig.ClockEdge),
        silence=empty_states.no_collocation,
        patience_s=8.0,
    ),
    "top": _Top(
        (
            *(
                sig.PathDelay,
                sig.TcpPath,
                sig.NexthopGroup,
                sig.PathState,
                sig.HoldState,
                sig.Act,
                sig.Self,
                sig.Clock,
                sig.AppDelay,
            ),
            *(sig.LinkEvent, sig.RdmaQueuePair, sig.RdmaSuspects, sig.PathWay, sig.Gpu),
        ),
        (sig.PathDelay, sig.Self),
    ),
}
