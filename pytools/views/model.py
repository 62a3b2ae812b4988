"""What a view knows: a fold of signals. Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.

For people the longest window of each path is kept, so that figures do not jump.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pytools.signals import (
    Act,
    AnySignal,
    GroupMember,
    NexthopGroup,
    Path,
    PathDelay,
    PathLiveness,
    PathState,
    Self,
    TcpPath,
)
from pytools.views import network, timing
from pytools.views.network import Links, Rdma, Tcp
from pytools.views.timing import Timing, is_shown

ACTS = 50


@dataclass(frozen=True)
class Model:
    """The newest of everything."""

    host: str = ""
    at_ns: int = 0  # of the newest signal
    delays: Mapping[Path, PathDelay] = field(default_factory=dict)
    liveness: Mapping[Path, PathLiveness] = field(default_factory=dict)
    groups: Mapping[int, NexthopGroup] = field(default_factory=dict)
    rates: Mapping[tuple[int, int], float] = field(default_factory=dict)  # (group, nexthop) -> packets/s
    states: Mapping[Path, PathState] = field(default_factory=dict)
    acts: tuple[Act, ...] = ()
    cost: Self | None = None
    timing: Timing = field(default_factory=Timing)
    tcp: Tcp = field(default_factory=Tcp)
    links: Links = field(default_factory=Links)
    rdma: Rdma = field(default_factory=Rdma)


def fold(model: Model, signals: Iterable[AnySignal]) -> Model:
    """The model after these signals, in their order."""
    signals = list(signals)
    if not signals:
        return model
    of_type: defaultdict[type, list[Any]] = defaultdict(list)  # what is of one type never meets another's
    for signal in signals:
        of_type[type(signal)].append(signal)

    def of(types: Iterable[type]) -> list[AnySignal]:
        return [signal for kind in types for signal in of_type[kind]]

    host, at_ns = signals[-1].host, max(model.at_ns, *(signal.at_ns for signal in signals))
    delays, groups, rates = dict(model.delays), dict(model.groups), dict(model.rates)
    for delay in of_type[PathDelay]:
        if _better(delay, delays.get(delay.path)):
            delays[delay.path] = delay
    for group in of_type[NexthopGroup]:
        rates = {key: rate for key, rate in rates.items() if key[0] != group.group_id}
        rates |= packet_rates(groups.get(group.group_id), group)
        carried = set(group.destinations)  # a route leads to one group at a time
        groups = {
            number: each
            for number, each in groups.items()
            if number == group.group_id or carried.isdisjoint(each.destinations)
        }
        groups[group.group_id] = group
    liveness = {**model.liveness, **{each.path: each for each in of_type[PathLiveness]}}
    states = {**model.states, **{each.path: each for each in of_type[PathState]}}
    acts = (*model.acts, *of_type[Act])
    cost = of_type[Self][-1] if of_type[Self] else model.cost
    return replace(  # raw samples are for those who do their own statistics
        model,
        host=host,
        at_ns=at_ns,
        delays=delays,
        liveness=liveness,
        groups=groups,
        rates=rates,
        states=states,
        acts=acts[-ACTS:],
        cost=cost,
        timing=timing.fold(model.timing, of(timing.TYPES), at_ns),
        tcp=network.fold_tcp(model.tcp, of(network.TCP_TYPES), at_ns),
        links=network.fold_links(model.links, of(network.LINK_TYPES), at_ns),
        rdma=network.fold_rdma(model.rdma, of(network.RDMA_TYPES), at_ns),
    )


def _better(new: PathDelay, old: PathDelay | None) -> bool:
    """Whether the new window shall be shown: no shorter than the old one, or that one is long over."""
    return old is None or is_shown(new.window_ns, old.window_ns, new.at_ns - old.at_ns)


def packet_rates(old: NexthopGroup | None, new: NexthopGroup) -> dict[tuple[int, int], float]:
    """Packets per second by member between two readings; the kernel counts afresh after each replace."""
    if old is None or new.at_ns <= old.at_ns:
        return {}
    before = {member.nexthop_id: member.packets for member in old.members}
    rates = {}
    for member in new.members:
        earlier = before.get(member.nexthop_id)
        if member.packets is None or earlier is None:
            continue
        counted = member.packets - earlier if member.packets >= earlier else member.packets
        rates[(new.group_id, member.nexthop_id)] = counted * 1e9 / (new.at_ns - old.at_ns)
    return rates


def member_of(model: Model, path: Path) -> tuple[int, GroupMember] | None:
    """The group and the member of it that carry a path, by longest prefix; None when no group does."""
    found: tuple[int, int, GroupMember] | None = None
    for group in model.groups.values():
        length = max((_match(prefix, path.address) for prefix in group.destinations), default=-1)
        if length < 0 or (found is not None and length <= found[0]):
            continue
        for member in group.members:
            if (member.interface, member.gateway) == (path.interface, path.gateway):
                found = (length, group.group_id, member)
    return None if found is None else (found[1], found[2])


@functools.lru_cache(maxsize=65536)
def _match(prefix: str, address: str) -> int:
    """Length of the prefix when it covers the address, else -1."""
    network = ipaddress.ip_network("0.0.0.0/0" if prefix == "default" else prefix, strict=False)
    inside = ipaddress.ip_address(address)
    return network.prefixlen if inside.version == network.version and inside in network else -1


def retransmitted(model: Model, path: Path) -> TcpPath | None:
    """TCP retransmissions on a path."""
    return model.tcp.paths.get((path.interface, path))
