"""The views: which signals each asks the agent for, which of them a frame stands for, and what it says when none come.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pytools.signals import AnySignal
from pytools.views import empty_states
from pytools.views.filters import Filters
from pytools.views.model import Model
from pytools.views.timing import is_whole_path

PATIENCE_S: Final = 5.0
_OF_FLOWS: Final = frozenset({"dst", "src", "port", "pid", "command", "interface", "path"})
# Processes are looked for once somebody listens to connections, and told a window later, of idle ones the fourth.
_OWNERS_S: Final = 2.4
_ALL_OWNERS_S: Final = 5.5
_OF_LINKS: Final = frozenset({"dst", "interface", "path"})


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
    filters: frozenset[str] = frozenset()  # those that something in it can pass
    owners_s: float | None = None  # instead of first_s where owners are asked for; None: they come at once

    def wait_s(self, filters: Filters | None) -> float:
        """How long to listen before the first frame."""
        asks_for_owners = filters is not None and (filters.pid or filters.command)
        return self.owners_s if asks_for_owners and self.owners_s is not None else self.first_s


def _cost(model: Model) -> list[AnySignal]:
    return [] if model.cost is None else [model.cost]


def _top(model: Model) -> list[AnySignal]:
    measured: list[AnySignal] = [*model.delays.values(), *model.tcp.paths.values(), *model.groups.values()]
    whole = [app for app in model.timing.apps.values() if is_whole_path(app)]
    found: list[AnySignal] = [
        *model.links.events.values(),
        *model.rdma.queue_pairs.values(),
        *_told(model.rdma.suspects),
    ]
    steering: list[AnySignal] = [*model.states.values(), *model.acts]
    return [*measured, *steering, *_cost(model), *model.timing.clocks.values(), *whole, *found]


def _told(signal: AnySignal | None) -> list[AnySignal]:
    return [] if signal is None else [signal]


def _tcp(model: Model) -> list[AnySignal]:
    return [*_told(model.tcp.host), *model.tcp.paths.values(), *model.tcp.flows.values()]


def _links(model: Model) -> list[AnySignal]:
    known = model.links
    return [*known.links.values(), *known.mtus.values(), *known.ecns.values(), *known.events.values()]


def _rdma(model: Model) -> list[AnySignal]:
    known = model.rdma
    return [*_told(known.sight), *known.queue_pairs.values(), *_told(known.suspects)]


def _busiest(model: Model) -> list[AnySignal]:
    return [*sorted(model.timing.apps.values(), key=lambda app: (not is_whole_path(app), -app.sampled))]


def _collocation(model: Model) -> list[AnySignal]:
    return [] if model.timing.collocation is None else [model.timing.collocation]


# `path_delay` comes from every agent that lives, and says why there is nothing else.
VIEWS: Final[Mapping[str, View]] = {
    "delay": View(
        frozenset({"path_delay", "path_liveness"}),
        lambda model: [*model.delays.values(), *model.liveness.values()],
        lambda model: bool(model.delays),
        filters=_OF_LINKS,
    ),
    "tcp": View(  # `self` and `tcp_host` say that the agent lives, and whether its hooks do
        frozenset({"tcp_flow", "tcp_path", "tcp_host", "self"}),
        _tcp,
        lambda model: model.cost is not None or model.tcp.host is not None,
        first_s=_OWNERS_S,
        filters=_OF_FLOWS,
        owners_s=_ALL_OWNERS_S,
    ),
    "flows": View(
        frozenset({"tcp_flow", "tcp_host", "self"}),
        lambda model: list(model.tcp.flows.values()),
        lambda model: model.cost is not None or model.tcp.host is not None,
        first_s=_OWNERS_S,
        filters=_OF_FLOWS,
        owners_s=_ALL_OWNERS_S,
    ),
    "drops": View(
        frozenset({"packet_drops", "path_delay"}),
        lambda model: _told(model.tcp.drops),
        lambda model: model.tcp.drops is not None,
        silence=empty_states.no_drops,
    ),
    "links": View(
        frozenset({"link", "link_event", "path_mtu", "path_ecn", "path_delay"}),
        _links,
        lambda model: bool(model.links.links),
        silence=empty_states.no_links,
        filters=_OF_LINKS,
    ),
    "events": View(  # an interface that is well says nothing of events, but that it is there
        frozenset({"link_event", "link", "path_delay"}),
        lambda model: list(model.links.events.values()),
        lambda model: bool(model.links.links or model.links.events),
        silence=empty_states.no_links,
        filters=_OF_LINKS,
    ),
    "rdma": View(
        frozenset({"rdma_qp", "rdma_suspects", "rdma_sight", "path_delay"}),
        _rdma,
        lambda model: model.rdma.sight is not None,
        silence=empty_states.no_rdma,
        filters=frozenset({"dst", "pid", "command", "interface", "path", "verdict"}),
    ),
    "ports": View(
        frozenset({"rdma_port", "rdma_sight", "path_delay"}),
        lambda model: list(model.rdma.ports.values()),
        lambda model: model.rdma.sight is not None,
        silence=empty_states.no_rdma,
        filters=frozenset({"interface"}),
    ),
    "suspects": View(
        frozenset({"rdma_suspects", "rdma_sight", "path_delay"}),
        lambda model: _told(model.rdma.suspects),
        lambda model: model.rdma.sight is not None,
        silence=empty_states.no_rdma,
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
        silence=empty_states.no_app_delays,
        filters=_OF_LINKS | {"src", "port"},
    ),
    "clocks": View(
        frozenset({"clock", "clock_edge", "path_delay"}),
        lambda model: list(model.timing.clocks.values()),
        lambda model: bool(model.timing.clocks),
        silence=empty_states.no_clocks,
        filters=frozenset({"host"}),
    ),
    "edges": View(
        frozenset({"clock_edge", "path_delay"}),
        lambda model: list(model.timing.edges.values()),
        lambda model: bool(model.timing.edges),
        silence=empty_states.no_edges,
        filters=_OF_LINKS | {"host"},
    ),
    "collocation": View(  # every five seconds, of which some may just have passed
        frozenset({"collocation", "clock", "clock_edge", "path_delay"}),
        _collocation,
        lambda model: model.timing.collocation is not None,
        silence=empty_states.no_collocation,
        patience_s=8.0,
    ),
    "top": View(
        frozenset(
            {
                *("path_delay", "tcp_path", "nexthop_group", "path_state", "act", "self", "clock", "app_delay"),
                *("link_event", "rdma_qp", "rdma_suspects"),
            }
        ),
        _top,
        lambda model: bool(model.delays or model.cost),
    ),
}
