"""What the kernel has of the managed targets: read when it changed, kept whole across carrier losses, backed up.

The controller asks `refresh` whenever `due_ns` says so; the descriptor tells when that has changed. Readings are spaced
by four times what they take, so that a table that never rests costs a fifth of a processor at most. Times are
CLOCK_MONOTONIC nanoseconds; one thread, in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, Self

from pytools.errors import SwerveError
from pytools.kernel.leftovers import sweep
from pytools.kernel.netlink import Netlink
from pytools.kernel.netlink_watch import Heard, NetlinkWatch
from steering.actuators import remaking, restore, topology
from steering.actuators.backup import Backups
from steering.actuators.memory_file import MemoryFile
from steering.actuators.objects import Objects, read
from steering.actuators.prefixes import LongestPrefix, Within, key_of
from steering.actuators.reconcile import is_part, only_lost_members, reconcile
from steering.actuators.restore import Memory
from steering.actuators.route_names import group_number, route_of
from steering.actuators.topology import Topology
from steering.actuators.weighted import present
from steering.plan import Group, Target, Weights, kind_of, same

KINDS: Final = frozenset({"nexthop_group", "multipath", "metric"})
_MS: Final = 1_000_000
_SETTLE_NS: Final = 2 * _MS  # changes come in bursts: the kernel's own, and a daemon's answer to them
_SPACING: Final = 4
_ANYWAY_NS: Final = 30_000 * _MS
_RETRY_NS: Final = 1_000 * _MS


@dataclass(frozen=True, slots=True)
class View:
    """What there is to steer now."""

    groups: Mapping[Target, Group]  # members: those that can be used now; current: what is in force
    first: Mapping[Target, Group]  # each target as it was before us; of the lost ones, too
    refused: Mapping[Target, str]  # carry a managed route but must be left alone, and why
    manual: Mapping[Target, str]  # somebody else changed them since the last time, and how
    lost: frozenset[Target]  # gone with their links; they come back
    told: tuple[str, ...]  # what was done or could not be done, for the log
    _routes: LongestPrefix[Target | None] = field(repr=False)

    def target_of(self, address: str) -> Target | None:
        """Which target the route to an address is, of ours or another; None if it is none."""
        return self._routes.get(address)


class Keeper:
    """Keeps the managed targets of one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's, who makes all changes of weights through it.
    managed : iterable of str
        Prefixes.
    keep : bool
        Whether to make again what went with a link, and backup routes; else it only reads.
    file : MemoryFile, optional
        Where to remember what went with a link, for a successor.
    kinds : set of str
        Of targets that may be steered.
    backup : bool
        Whether to have backup routes.
    in_force : mapping of Target to sequence of Weights, optional
        What a predecessor's acts may have left each target with.
    """

    def __init__(
        self,
        netlink: Netlink,
        managed: Iterable[str],
        keep: bool,
        file: MemoryFile | None = None,
        kinds: AbstractSet[str] = KINDS,
        backup: bool = True,
        in_force: Mapping[Target, Sequence[Weights]] | None = None,
    ) -> None:
        self._netlink, self._managed, self._keep = netlink, tuple(managed), keep
        self._kinds, self._backup = kinds, backup
        self._watch = NetlinkWatch([netlink.socket.port])
        self._backups = Backups(netlink)
        self._file = file if keep else None
        self._memory = self._file.load().narrowed(self._steers) if self._file else Memory()
        self._guarded = self._memory  # what has backups: the same, and what somebody else has of our drains
        self._drained: dict[Target, Weights] = {}  # those, as we left them
        self._in_force = dict(in_force or {})
        self._inherited = self._memory.first  # not yet compared with what the kernel has
        self._first: dict[Target, Group] = dict(self._inherited)
        self._heard = Heard(changed=True, missed=True)
        self._objects: Objects | None = None  # as last read
        self._requests = 0  # of ours that had changed routes by then
        self._again = False  # there was news while we read
        self._told_lost: frozenset[int] = frozenset()  # nexthops that the caller knows to be gone
        self._due_ns = self._free_ns = 0
        self._complaints: frozenset[str] = frozenset()
        if keep:
            sweep(netlink)

    def _steers(self, first: Group) -> bool:
        """Whether a target that a predecessor steered is one of ours."""
        within = Within(self._managed)
        inside = all(within.holds(key_of(prefix)) for prefix in first.destinations)
        return inside and kind_of(first.target) in self._kinds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable when something has changed."""
        return self._watch.fileno()

    def heard(self) -> None:
        """Take note of what was told; call it when the descriptor is readable."""
        if self._hear():
            self._due_ns = min(self._due_ns, max(time.monotonic_ns() + _SETTLE_NS, self._free_ns))

    def _hear(self) -> bool:
        news = self._watch.read()
        self._heard = self._heard.then(news)
        return news.changed

    @property
    def due_ns(self) -> int:
        """When to call `refresh` next."""
        return self._due_ns

    def refresh(
        self, known: Mapping[Target, Group], manual: AbstractSet[Target] = frozenset(), frozen: bool = False
    ) -> View:
        """Read the kernel, make again what is missing, and say what there is.

        Parameters
        ----------
        known : mapping of Target to Group
            What we believe to be in force, as of the last time and our own acts since.
        manual : set of Target
            Those that were called somebody else's before: they are only looked at.
        frozen : bool
            Only read this time, and take note of what goes.

        Raises
        ------
        SwerveError
            If the kernel cannot be read; ask again when due.
        """
        began = time.monotonic_ns()
        self._due_ns = began + _RETRY_NS
        self._again = False
        self._in_force |= {target: (group.current,) for target, group in known.items()}
        found, heard = self._read()
        groups, changed = self._compare(found, known, manual, heard.nexthops)
        told: list[str] = []
        complaints: list[str] = []
        if self._keep:
            self._remember(found, manual | changed.keys(), heard)
        if self._keep and not frozen:
            # What the caller does not know to be gone, from us or a predecessor, waits until it has been told, so that
            # whoever undoes finds it noted that it is no member: it is not to look like somebody's act later.
            news = self._memory.lost_nexthops - self._told_lost
            self._again |= bool(news)
            told, complaints = remaking.make_again(self._netlink, self._memory, found.objects, news)
            if told:
                found, heard = self._read()
                known = {target: group for target, group in groups.items() if target in known}
                groups, meanwhile = self._compare(found, known, manual | changed.keys(), heard.nexthops)
                changed |= meanwhile
                self._remember(found, manual | changed.keys(), heard)
            if self._backup:
                complaints += self._backups.keep(self._guarded, found.objects)
        if self._file is not None:
            self._file.save(self._memory, began)
        told += [each for each in complaints if each not in self._complaints]
        self._complaints = frozenset(complaints)
        self._told_lost = self._memory.lost_nexthops
        view = self._view(found, groups, changed, told)
        self._first = {
            target: first
            for target, first in self._first.items()
            if target in groups or target in view.lost or target in self._guarded.lost
        }
        self._in_force.clear()
        self._plan(began)
        return view

    def close(self, remove: bool = True) -> None:
        """Stop; remove the backup routes, unless the weights stay as they are."""
        if self._keep and remove:
            with contextlib.suppress(SwerveError):
                self._backups.remove()
        self._watch.close()

    # ---- reading ----

    def _read(self) -> tuple[Topology, Heard]:
        """What there is, and what was deleted to make it so.

        The news is read after the tables: what is missing there was told by then. What was told and is still there
        was deleted after it was read, and is kept for the next time.
        """
        self._hear()
        requests = self._netlink.route_requests
        told = self._heard.route_news or self._heard.missed or requests != self._requests
        objects = read(self._netlink, None if told else self._objects)
        self._requests = requests
        late = self._hear()
        heard, self._again = self._heard, self._again or late
        routes = {(route.table, route.destination, route.metric) for route in objects.routes} if heard.routes else set()
        still = heard.nexthops & (objects.nexthops.keys() | objects.groups.keys())
        self._heard = Heard(nexthops=still, routes=heard.routes & routes, route_news=late and heard.route_news)
        self._objects = objects
        found = topology.arrange(objects, self._managed, self._first.values())
        return replace(found, groups={t: g for t, g in found.groups.items() if kind_of(t) in self._kinds}), heard

    def _compare(
        self,
        found: Topology,
        known: Mapping[Target, Group],
        manual: AbstractSet[Target],
        deleted: frozenset[int],
    ) -> tuple[dict[Target, Group], dict[Target, str]]:
        """The targets as they are, and those of them that somebody else changed."""
        groups, changed = {}, {}
        for target, group in found.groups.items():
            first = self._first.setdefault(target, group)
            usable = found.usable(first)
            inherited = self._inherited.pop(target, None)
            changed_unseen = inherited is not None and not same(group.current, present(first.original, usable))
            made_by_hand = target in self._guarded.lost and (
                target not in self._memory.lost or not is_part(group, first)  # we make no manual one again
            )
            if changed_unseen or made_by_hand:
                first = self._first[target] = group  # somebody changed it while nobody watched, or made it himself
                usable = found.usable(first)
                self._drained.pop(target, None)
            if target not in known or target in manual:
                members = tuple(member for member in first.members if member.nexthop_id in usable)
                groups[target] = replace(group, members=members, origin=first.origin)
                continue
            acts = deleted if kind_of(target) == "nexthop_group" else frozenset()
            groups[target], why = reconcile(first, known[target], group, usable, acts)
            if why:
                changed[target] = why
                if kind_of(target) == "nexthop_group":
                    self._drained[target] = known[target].current
        nexthops = found.objects.nexthops.keys()
        self._drained = {
            target: left
            for target, left in self._drained.items()
            if target not in groups or only_lost_members(left, groups[target].current, nexthops)
        }
        return groups, changed

    def _view(self, found: Topology, groups: dict[Target, Group], changed: dict[Target, str], told: list[str]) -> View:
        lost = frozenset(self._memory.lost) - groups.keys()
        routes = found.routes
        if lost:
            gone = {key_of(prefix): target for target in lost for prefix in self._first[target].destinations}
            routes = LongestPrefix(gone | dict(routes.values))
        return View(groups, dict(self._first), found.refused, changed, lost, tuple(told), routes)

    def _plan(self, began: int) -> None:
        now = time.monotonic_ns()
        self._free_ns = now + _SPACING * (now - began)
        self._due_ns = now + (_RETRY_NS if self._complaints else _ANYWAY_NS)
        if self._again:
            self._due_ns = max(now + _SETTLE_NS, self._free_ns)

    # ---- keeping ----

    def _remember(self, found: Topology, manual: AbstractSet[Target], heard: Heard) -> None:
        """Take note of what is ours to keep: what is there and not refused, or is not there at all.

        A target that is somebody else's is not, but if he only deleted a nexthop of it, its drained ones are still
        out by our act: it keeps its backup.
        """
        there = [
            first
            for target, first in self._first.items()
            if target in found.groups or not _is_there(target, found.objects)
        ]
        drained = [first for first in there if first.target in self._drained]
        ours = [first for first in there if first.target not in manual | self._drained.keys()]
        guarded_before = self._guarded
        self._memory = self._guarded = restore.remember(self._memory, ours, found.objects, heard, self._in_force)
        if drained:
            guarded = [*ours, *drained]
            self._guarded = restore.remember(guarded_before, guarded, found.objects, heard, self._in_force)


def _is_there(target: Target, objects: Objects) -> bool:
    if kind_of(target) == "nexthop_group":
        return group_number(target) in objects.groups
    _, prefix, metric = route_of(target)
    return any((route.destination, route.metric) == (prefix, metric) for route in objects.routes)
