"""Weights against packets: what share of a nexthop group each path shall have, and what share was sent by it.

The kernel counts packets where it chooses a member: each forwarded one, but a connected socket of this host once for
all that it sends. TCP is therefore counted by its segments; what a connected UDP socket sends is counted by nobody.

Nanoseconds of CLOCK_MONOTONIC of the agent's host. Bounded by time: 40 s of readings of every group. One thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pytools.signals import GroupMember, NexthopGroup, Path, PathState
from pytools.units import SECOND
from pytools.views.model import Model, member_of
from pytools.views.top.rings import LONGEST_S, first_after

_READINGS: Final = 4 * LONGEST_S
_MEMBERS: Final = 1024
Carrier = tuple[int, int]  # group, nexthop


class Packets(NamedTuple):
    """What the kernel had counted of a group at a reading, since the first."""

    at_ns: int
    by_nexthop: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Share:
    """A path's part in its group."""

    member: GroupMember
    wanted_weight: int | None  # by steering; None: nobody wants any
    wanted: float | None  # share that the wanted weights give, or those of the kernel
    segments: int  # of TCP connections of this host, by this member
    chosen: int  # packets that the kernel counted when it chose this member
    sent: float | None  # share of both together; None: there were none


class Shares:
    """Readings of groups, and which member carries which path."""

    def __init__(self) -> None:
        self._readings: dict[int, deque[Packets]] = {}
        self._last: dict[int, NexthopGroup] = {}
        self._routes: object = None
        self._carriers: dict[Path, Carrier | None] = {}

    def count(self, group: NexthopGroup) -> None:
        """Packets since the last reading; the kernel counts afresh after each replacement of a group."""
        before = self._last.get(group.group_id)
        self._last[group.group_id] = group
        if before is None or group.at_ns <= before.at_ns:
            return
        then = {member.nexthop_id: member.packets for member in before.members}
        first = Packets(before.at_ns, {})
        readings = self._readings.setdefault(group.group_id, deque([first], maxlen=_READINGS))
        counted = readings[-1].by_nexthop
        if len(counted) > _MEMBERS:  # of nexthops that came and went
            counted = {each.nexthop_id: counted.get(each.nexthop_id, 0) for each in group.members}
        counted = dict(counted)
        for member in group.members:
            earlier = then.get(member.nexthop_id)
            if member.packets is not None and earlier is not None:
                more = member.packets - (earlier if member.packets >= earlier else 0)
                counted[member.nexthop_id] = counted.get(member.nexthop_id, 0) + more
        while len(readings) > 1 and readings[1].at_ns <= group.at_ns - LONGEST_S * SECOND:
            readings.popleft()  # the one before the longest horizon stays: what is in that is the difference
        readings.append(Packets(group.at_ns, counted))

    def carrier(self, model: Model, path: Path) -> Carrier | None:
        """The group and nexthop that carry a path; looked for once, until routes change."""
        self._look_at_routes(model)
        return self._carrier(model, path)

    def _look_at_routes(self, model: Model) -> None:
        routes = _routes(model)
        if routes != self._routes:
            self._routes, self._carriers = routes, {}

    def _carrier(self, model: Model, path: Path) -> Carrier | None:
        if path not in self._carriers:
            found = member_of(model, path)
            self._carriers[path] = None if found is None else (found[0], found[1].nexthop_id)
        return self._carriers[path]

    def of(self, model: Model, paths: Iterable[Path], since_ns: int, segments: Mapping[Path, int]) -> dict[Path, Share]:
        """The part of each path in its group; without those that no group carries.

        Parameters
        ----------
        since_ns : int
            Where the horizon begins.
        segments : mapping
            TCP segments that left by each path within it.
        """
        self._look_at_routes(model)
        members = {
            (group.group_id, each.nexthop_id): each
            for group in model.of(NexthopGroup).values()
            for each in group.members
        }
        wanted = {
            carrier: state.weight_wanted
            for path, state in model.of(PathState).items()
            if state.weight_wanted is not None and (carrier := self._carrier(model, path)) is not None
        }
        whole: dict[int, int] = {}
        for (group_id, nexthop_id), member in members.items():
            weight = wanted.get((group_id, nexthop_id), member.weight)
            whole[group_id] = whole.get(group_id, 0) + weight
        chosen, by_tcp = self._chosen(since_ns), self._by_carrier(model, segments)
        counted: dict[int, int] = {}
        for (group_id, _), count in (*chosen.items(), *by_tcp.items()):
            counted[group_id] = counted.get(group_id, 0) + count
        found = {}
        for path in paths:
            carrier = self._carrier(model, path)
            if carrier is not None:
                member, total = members[carrier], whole[carrier[0]]
                weight = wanted.get(carrier, member.weight)
                share = weight / total if total else None
                here, all_of_it = (by_tcp.get(carrier, 0), chosen.get(carrier, 0)), counted.get(carrier[0], 0)
                sent = sum(here) / all_of_it if all_of_it else None
                found[path] = Share(member, wanted.get(carrier), share, *here, sent)
        return found

    def _chosen(self, since_ns: int) -> dict[Carrier, int]:
        """Packets that the kernel counted, by member."""
        found: dict[Carrier, int] = {}
        for group_id, readings in self._readings.items():
            before = readings[max(0, first_after(readings, since_ns) - 1)].by_nexthop
            for nexthop_id, count in readings[-1].by_nexthop.items():
                found[group_id, nexthop_id] = count - before.get(nexthop_id, 0)
        return found

    def _by_carrier(self, model: Model, segments: Mapping[Path, int]) -> dict[Carrier, int]:
        """The same of TCP: a member carries the paths to several destinations."""
        counts: dict[Carrier, int] = {}
        for path, count in segments.items():
            carrier = self._carrier(model, path)
            if carrier is not None:
                counts[carrier] = counts.get(carrier, 0) + count
        return counts

    def clear(self) -> None:
        """Forget what was counted so far."""
        self._readings = {}

    def copy(self) -> Shares:
        """What is known now, whatever comes."""
        other = Shares()
        other._last = dict(self._last)
        other._readings = {group_id: readings.copy() for group_id, readings in self._readings.items()}
        return other


def _routes(model: Model) -> list[tuple[int, list[str], list[tuple[int, str, str]]]]:
    """What decides which member carries a path."""
    return [
        (
            group.group_id,
            group.destinations,
            [(each.nexthop_id, each.gateway, each.interface) for each in group.members],
        )
        for group in model.of(NexthopGroup).values()
    ]
