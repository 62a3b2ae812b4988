"""What a view knows: of everything the newest signal, as long as it is worth showing. Pure.

Times are CLOCK_MONOTONIC nanoseconds of the agent's host. Bounded: of a kind with more than is remembered, those heard
of longest ago go first, and it is told that there were more. For people the longest window of each path is kept, so
that figures do not jump.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pytools import signals as sig
from pytools.units import SECOND

# What was not heard of for so long, or for three windows, is not vouched for: people see at once that it is silent,
SILENT_NS: Final = 5 * SECOND
SCRAPED_SILENT_NS: Final = 15 * SECOND  # but a series of Prometheus ends only when a usual scrape has missed it
FORGOTTEN_NS: Final = 60 * SECOND
_EVER: Final = 1 << 62
_LONG_OVER: Final = 3  # so many windows without another one as long: the agent has shorter ones by now

Kind = TypeVar("Kind")
FlowKey = tuple[str, int, str, int, str, str]


def flow_key(flow: sig.TcpFlow) -> FlowKey:
    """What tells connections apart: a connection that moved to another interface has two rows."""
    return (flow.local, flow.local_port, flow.remote, flow.remote_port, flow.interface, flow.namespace)


def is_whole_path(app: sig.AppDelay) -> bool:
    """Whether all flows of the path are meant."""
    return not app.local


def is_shown(window_ns: int, shown_ns: int, since_ns: int) -> bool:
    """Whether a window takes the place of the one that is shown.

    Parameters
    ----------
    window_ns, shown_ns : int
        Lengths of the new one and of the one that is shown.
    since_ns : int
        From the end of the one that is shown to the end of the new one.
    """
    return window_ns >= shown_ns or since_ns > _LONG_OVER * shown_ns


@dataclass(frozen=True)
class Kept:
    """How the signals of one kind are remembered."""

    key: Callable[[Any], Hashable]  # what tells them apart: of one key the newest is kept
    silent_ns: int = SILENT_NS
    forgotten_ns: int = _EVER  # after so long, or three windows, it goes
    most: int = _EVER  # how many are remembered
    rank: Callable[[Any], tuple[int, ...]] = lambda row: (row.at_ns,)  # of more than that, those of the lowest rank go
    replaces: Callable[[Any, Any], bool] = lambda _new, _old: True  # whether a signal takes the place of the one before


def _of_host(_row: object) -> None:
    """One for the host."""


def _of_path(row: Any) -> sig.Path:
    return row.path  # type: ignore[no-any-return]


_CLOCK_NS: Final = 10 * SECOND
# Raw samples are not among them: they are for those who do their own statistics.
KEPT: Final[dict[type, Kept]] = {
    sig.PathDelay: Kept(
        _of_path,
        silent_ns=3 * SECOND,
        replaces=lambda new, old: is_shown(new.window_ns, old.window_ns, new.at_ns - old.at_ns),
    ),
    sig.PathLiveness: Kept(_of_path),
    sig.PathState: Kept(_of_path, silent_ns=3 * SECOND),  # a controller repeats every state once a second
    sig.HoldState: Kept(_of_path, silent_ns=3 * SECOND, forgotten_ns=FORGOTTEN_NS),
    sig.PathMtu: Kept(_of_path, forgotten_ns=FORGOTTEN_NS),
    sig.PathEcn: Kept(_of_path, forgotten_ns=FORGOTTEN_NS),
    sig.PathWay: Kept(lambda row: (row.path, row.way), sig.WAY_LASTS_NS, sig.WAY_LASTS_NS),
    sig.NexthopGroup: Kept(lambda row: row.group_id),
    sig.Act: Kept(lambda row: (row.at_ns, row.actuator, row.target, row.outcome), most=50),
    sig.Self: Kept(_of_host),
    sig.AppDelay: Kept(
        lambda row: (row.path, row.protocol, row.local, row.local_port, row.remote, row.remote_port),
        forgotten_ns=3 * SECOND,
        most=4096,
        rank=lambda row: (is_whole_path(row), row.at_ns),  # paths as a whole are few, and stay
    ),
    sig.Clock: Kept(lambda row: row.of, _CLOCK_NS, FORGOTTEN_NS),
    sig.ClockEdge: Kept(_of_path, _CLOCK_NS, FORGOTTEN_NS),
    sig.Collocation: Kept(_of_host, _CLOCK_NS),
    sig.TcpHost: Kept(_of_host),
    sig.TcpNamespace: Kept(lambda row: row.netns, forgotten_ns=FORGOTTEN_NS, most=4096),
    sig.TcpPath: Kept(lambda row: (row.interface, row.path), forgotten_ns=FORGOTTEN_NS),
    sig.TcpFlow: Kept(
        flow_key,
        silent_ns=15 * SECOND,
        forgotten_ns=FORGOTTEN_NS,
        most=4096,
        # Of those heard of in one second the ones that retransmitted most stay.
        rank=lambda row: (row.at_ns // SECOND, row.retransmitted_segments),
    ),
    sig.PacketDrops: Kept(_of_host),
    sig.Link: Kept(lambda row: row.interface, forgotten_ns=FORGOTTEN_NS),
    # An event may be told again to those who come late.
    sig.LinkEvent: Kept(
        lambda row: (row.interface, row.what, row.happened_ns), most=200, rank=lambda row: (row.happened_ns,)
    ),
    sig.RdmaPort: Kept(lambda row: (row.device, row.port), forgotten_ns=FORGOTTEN_NS),
    sig.RdmaQueuePair: Kept(
        lambda row: row.key,
        forgotten_ns=FORGOTTEN_NS,
        most=4096,
        rank=lambda row: (not row.closed, row.at_ns // SECOND, row.outstanding_bytes),
    ),
    sig.RdmaSuspects: Kept(_of_host),
    sig.RdmaSight: Kept(_of_host),
    sig.Job: Kept(lambda row: row.key, forgotten_ns=15 * SECOND, most=1024),
    sig.Gpu: Kept(lambda row: row.uuid, forgotten_ns=FORGOTTEN_NS, most=256),
    sig.GpuClock: Kept(lambda row: row.uuid, forgotten_ns=FORGOTTEN_NS, most=256),
}


def key_of(row: Any) -> Hashable:
    """What tells a signal from others of its kind."""
    return KEPT[type(row)].key(row)


@dataclass(frozen=True)
class Model:
    host: str = ""
    at_ns: int = 0  # of the newest signal
    newest: Mapping[type, Mapping[Any, sig.AnySignal]] = field(default_factory=dict)
    crowded: frozenset[type] = frozenset()  # kinds of which there were more than are remembered

    def of(self, kind: type[Kind]) -> Mapping[Any, Kind]:
        """The signals of a kind by what tells them apart (`KEPT`)."""
        return self.newest.get(kind, {})  # type: ignore[return-value]

    def one(self, kind: type[Kind]) -> Kind | None:
        """The signal of a kind of which a host has one; None before it was heard of."""
        return next(iter(self.of(kind).values()), None)


def fold(model: Model, signals: Iterable[sig.AnySignal]) -> Model:
    """The model after these signals, in their order."""
    signals = list(signals)
    if not signals:
        return model
    told: defaultdict[type, list[Any]] = defaultdict(list)  # what is of one kind never meets another's
    for signal in signals:
        told[type(signal)].append(signal)
    at_ns = max(model.at_ns, *(signal.at_ns for signal in signals))
    newest: dict[type, Mapping[Any, sig.AnySignal]] = {}
    crowded: set[type] = set()
    for kind in (model.newest.keys() | told.keys()) & KEPT.keys():
        kept, rows = KEPT[kind], dict(model.of(kind))
        for signal in told[kind]:
            key = kept.key(signal)
            if key not in rows or kept.replaces(signal, rows[key]):
                rows[key] = signal
        if kept.forgotten_ns < _EVER:
            rows = {key: row for key, row in rows.items() if not _is_past(row, at_ns, kept.forgotten_ns)}
        if len(rows) > kept.most:
            rows = dict(sorted(rows.items(), key=lambda item: kept.rank(item[1]))[-kept.most :])
            crowded.add(kind)
        elif kind in model.crowded and len(rows) == kept.most:
            crowded.add(kind)
        newest[kind] = rows
    newest[sig.NexthopGroup] = _routed(newest.get(sig.NexthopGroup, {}), told[sig.NexthopGroup])
    return Model(signals[-1].host, at_ns, newest, frozenset(crowded))


def _routed(groups: Mapping[Any, Any], told: Iterable[sig.NexthopGroup]) -> dict[Any, sig.NexthopGroup]:
    """The groups that routes lead to: a route leads to one at a time, that which was told of last."""
    leads = {prefix: group.group_id for group in told for prefix in group.destinations}
    return {
        number: group
        for number, group in groups.items()
        if all(leads.get(prefix, number) == number for prefix in group.destinations)
    }


def is_over(at_ns: int, now_ns: int, after_ns: int, window_ns: int = 0) -> bool:
    """Whether something said then is older than this, and than three of its windows."""
    return now_ns - at_ns > max(after_ns, 3 * window_ns)


def _is_past(row: Any, now_ns: int, after_ns: int) -> bool:
    return is_over(row.at_ns, now_ns, after_ns, getattr(row, "window_ns", 0))


def is_silent(row: sig.AnySignal, now_ns: int) -> bool:
    """Whether the last word about something is too old to stand for now."""
    return _is_past(row, now_ns, KEPT[type(row)].silent_ns)


def member_of(model: Model, path: sig.Path) -> tuple[int, sig.GroupMember] | None:
    """The group and the member of it that carry a path, by longest prefix; None when no group does."""
    found: tuple[int, int, sig.GroupMember] | None = None
    for group in model.of(sig.NexthopGroup).values():
        length = max((match(prefix, path.address) for prefix in group.destinations), default=-1)
        if length < 0 or (found is not None and length <= found[0]):
            continue
        for member in group.members:
            if (member.interface, member.gateway) == (path.interface, path.gateway):
                found = (length, group.group_id, member)
    return None if found is None else (found[1], found[2])


@functools.lru_cache(maxsize=65536)
def match(prefix: str, address: str) -> int:
    """Length of the prefix when it covers the address, else -1."""
    inside = ipaddress.ip_address(address)
    everything = "0.0.0.0/0" if inside.version == 4 else "::/0"
    network = ipaddress.ip_network(everything if prefix == "default" else prefix, strict=False)
    return network.prefixlen if inside.version == network.version and inside in network else -1
