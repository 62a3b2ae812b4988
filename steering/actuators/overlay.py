"""Our own routes above theirs: weights are changed in a table of ours, and one rule puts it in force.

While nothing is steered the table only mirrors what others route, with their weights, and no rule leads to it. The
first act gives a group other weights and adds the rule; undoing deletes the rule. Where our table has no answer the
look-up goes on to theirs. Nobody else's route, nexthop or metric is written. Times are CLOCK_MONOTONIC nanoseconds;
one thread, in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.leftovers import is_our_rule, sweep, switch_off
from pytools.kernel.netlink.monitor import NetlinkWatch
from pytools.kernel.netlink.nexthops import family_of
from pytools.kernel.netlink.routing import MAIN_TABLE, Family, Netlink, NetlinkError
from pytools.units import MS
from steering.actuators import rto_min
from steering.actuators.mirror import Mirror, Numbers, foreign_ids
from steering.actuators.objects import Objects, Table, read
from steering.actuators.overlay_memory import OverlayMemory, of_target, recalled
from steering.actuators.owners_routes import View, ViewKey, views
from steering.actuators.steered import Steered, alike, assigned
from steering.actuators.switch import Switch, TableUsers, refuse
from steering.plan import Group, Member, Target, Weights, weights_of
from steering.policy.model import Manage
from steering.prefixes import Key, LongestPrefix, key_of

_SETTLE_NS: Final = 2 * MS  # changes come in bursts: the kernel's own, and a daemon's answer to them
_SPACING: Final = 4  # readings take at most a quarter of a processor; waiting for one, or for the kernel, is free
_ANYWAY_NS: Final = 30_000 * MS
_RETRY_NS: Final = 1_000 * MS
_GONE: Final = (errno.ENOENT, errno.EINVAL, errno.ESRCH)  # a group, a hop of one, a route


@dataclass(frozen=True, slots=True)
class Found:
    groups: Mapping[Target, Group]  # members: those that can be used now; current: what is in force
    refused: Mapping[str, str]  # managed prefixes that cannot be steered, and why
    lost: frozenset[Target]  # went with their links; they may come back
    unlinked: frozenset[str]  # interfaces without a carrier
    events: tuple[str, ...]  # what was done or could not be done, for the log
    _routes: tuple[LongestPrefix[Target | None], ...] = field(repr=False)

    def targets_of(self, address: str) -> tuple[Target, ...]:
        """The targets that carry the routes to an address, one for each table that has one."""
        return tuple(target for routes in self._routes if (target := routes.get(address)) is not None)


class Overlay(Closing):
    """The overlay of one namespace.

    Parameters
    ----------
    manage : Manage
        Which prefixes are managed, and which numbers are ours.
    apply : bool
        Whether to write; else it only reads.
    memory : OverlayMemory | None
        What a controller before us has in force goes on; None: nothing of ours is left.

    Raises
    ------
    RefusedError
        If somebody else uses a table or a priority of ours, or the minimum RTO is too short for this kernel.
    """

    def __init__(self, netlink: Netlink, manage: Manage, apply: bool, memory: OverlayMemory | None = None) -> None:
        self._netlink, self._manage, self._apply = netlink, manage, apply
        self._families: tuple[Family, ...] = tuple(sorted({family_of(prefix) for prefix in manage.destinations}))
        self._alternatives = tuple((each.via, each.dev) for each in manage.alternatives)
        self._numbers = Numbers(manage.table)
        self._numbers.table((4, MAIN_TABLE, None))  # has the first one
        self.rto_min = rto_min.chosen(manage)  # the minimum RTO that our routes have
        self._mirror = Mirror(netlink, self._numbers, self.rto_min.milliseconds)
        self.held = False  # whether they stay in force without weights of ours, for that
        self._objects: Objects | None = None
        self._views: dict[ViewKey, View] = {}
        self._shut: list[View] = []  # views that cannot be steered, as others use the table that would be ours
        self._targets: dict[Target, Steered] = {}
        self._apart: frozenset[str] = frozenset()  # addresses
        self._rules = Switch(netlink, self._numbers, manage.priority)
        self._users = TableUsers(netlink, self._numbers)
        self._routes_changed = True
        self.due_ns = self._free_ns = 0  # due_ns: when to call `refresh` next
        # what could not be done, as the log was told; empty when all is well
        self.complaints: frozenset[str] = frozenset()
        if apply and memory is None:
            sweep(netlink)
        self._watch = NetlinkWatch([netlink.socket.port])
        try:
            objects = self._read()
            if memory is not None:
                self._recall(memory, objects)
            refuse(self._look(objects), self._users, objects.rules, manage.priority)
        except BaseException:
            self._watch.close()
            raise
        self._numbers.skip(foreign_ids(objects))

    def _recall(self, memory: OverlayMemory, objects: Objects) -> None:
        self._numbers.recall(memory)
        self._mirror.form = memory.form
        in_force = {(rule.family, rule.table) for rule in objects.rules if is_our_rule(rule)}
        self.held = bool(self.rto_min.milliseconds and in_force)
        ids = self._numbers.known[1]
        for each in memory.targets:
            group = objects.groups.get(ids.get(each.name, 0)) if memory.form == "object" else None
            self._targets[each.name] = recalled(each, self._place(each.view) in in_force, group, ids)
            self._apart |= {prefix.partition("/")[0] for prefix in each.prefixes if each.beside}

    @property
    def memory(self) -> OverlayMemory:
        """What a successor has to know to go on."""
        tables, ids = self._numbers.known
        manage, targets = self._manage, map(of_target, self._targets.values())
        numbers = tuple(tables.items()), tuple(ids.items())
        return OverlayMemory(manage.table, manage.priority, manage.vrfs, self._mirror.form, *numbers, tuple(targets))

    @property
    def in_force(self) -> bool:
        """Whether rules of ours are, for weights or for the minimum RTO."""
        return self.held or any(target.weights is not None and target.prefixes for target in self._targets.values())

    def close(self, remove: bool = True) -> None:
        """Stop; remove all that is ours, unless it is to stay."""
        if self._apply and remove:
            with contextlib.suppress(SwerveError):
                sweep(self._netlink)
        self._watch.close()

    # ---- news ----

    def fileno(self) -> int:
        return self._watch.fileno()

    def receive(self) -> None:
        """Take note of news; call it when the descriptor is readable."""
        news = self._watch.read()
        self._routes_changed |= news.routes
        if news.changed:
            self.due_ns = min(self.due_ns, max(time.monotonic_ns() + _SETTLE_NS, self._free_ns))

    def set_apart(self, addresses: frozenset[str]) -> bool:
        """Have a target for each of these addresses alone; whether that makes `refresh` due."""
        if addresses == self._apart:
            return False
        self._apart, self.due_ns = addresses, 0
        return True

    # ---- weights ----

    def apply(self, target: Target, wanted: Weights) -> Weights:
        """Give a target weights: those of a group first, then the rule; what others have, when the weights are theirs.

        What of ours somebody has just deleted, as systemd-networkd does when it starts, is made again first. Returns
        what is in force once the kernel has acknowledged all of it.

        Parameters
        ----------
        target : str
            One of those found.
        wanted : Weights
            By the ids of its members.

        Raises
        ------
        SwerveError
            If nothing was changed, and why.
        """
        try:
            return self._put(target, wanted)
        except NetlinkError as refusal:
            if refusal.code not in _GONE:
                raise
        self.refresh()
        self.due_ns = 0  # for those who want to know what was found
        return self._put(target, wanted)

    def _put(self, target: Target, wanted: Weights) -> Weights:
        known = self._targets.get(target)
        if known is None or not known.usable or not known.prefixes:
            raise SwerveError("it is gone")
        ways = {self._numbers.nexthop(way): way for way, _ in known.usable}
        weights = known.ordered({ways[number]: weight for number, weight in wanted if number in ways})
        if not weights:
            raise SwerveError("no hop would be left")
        before, known.weights = known.weights, None if alike(weights, known.theirs) else weights
        try:
            if known.weights is not None:
                self._mirror.reweight(target, known.weights)
                self._switch(known.view, on=True)
                self._check_vrf(known)
            else:
                if not self._steered(known.view):
                    self._switch(known.view, on=False)
                self._mirror.reweight(target, known.theirs)
        except SwerveError:
            known.weights = before
            self.due_ns = 0  # the next look makes ours as it was
            raise
        known.away -= weights.keys()
        return self._current(known)

    def hold(self) -> None:
        """Put our routes in force whatever their weights, for their minimum RTO.

        Raises
        ------
        NetlinkError
            If the kernel refuses.
        """
        self.held = True
        try:
            for key in filter(self._steered, self._views):
                self._switch(key, on=True)
        except NetlinkError:
            self.held, self.due_ns = False, 0  # the next look deletes those that were made
            raise

    def off(self) -> list[str]:
        """Delete our rules, whatever is in force; what was deleted.

        Raises
        ------
        NetlinkError
            If the kernel refuses.
        """
        deleted = switch_off(self._netlink)
        self._rules.forget()
        self.held = False
        for target in self._targets.values():
            target.weights = None
        self.due_ns = 0
        return deleted

    def _current(self, target: Steered) -> Weights:
        return weights_of((self._numbers.nexthop(way), weight) for way, weight in target.shares.items())

    def _steered(self, view: ViewKey) -> bool:
        ours = (t for t in self._targets.values() if t.view == view and t.prefixes)
        return any(self.held or target.weights is not None for target in ours)

    # ---- rules ----

    def _switch(self, key: ViewKey, on: bool) -> None:
        self._rules.put(key, self._views.get(key) if on else None)

    def _check_vrf(self, target: Steered) -> None:
        """See whether the kernel finds our table for packets of a VRF: from 5.18 to 6.14 rules do not match the device.

        Raises
        ------
        SwerveError
            If it does not; the rules are deleted again, as nobody would notice them.
        """
        device = next((each.oif for each in self._views[target.view].selectors if each.oif), "")
        link = self._objects.by_name.get(device) if self._objects is not None else None
        if link is None:
            return
        address = target.prefixes[0].destination.partition("/")[0]
        found = self._netlink.route_get(address, matched=True, oif=link.index)
        if found.table != self._numbers.table(target.view):
            self._switch(target.view, on=False)
            raise SwerveError(f"this kernel matches no rule with packets of VRF {device}", "Linux 6.15 does")

    # ---- following theirs ----

    def refresh(self) -> Found:
        """Read what others have, make ours follow it, and say what there is to steer.

        Raises
        ------
        SwerveError
            If the kernel cannot be read or written; ask again when due.
        """
        began_cpu_ns = time.thread_time_ns()
        self.due_ns = time.monotonic_ns() + _RETRY_NS
        objects = self._read()
        self._numbers.skip(foreign_ids(objects))
        found = self._look(objects)
        self._shut = [view for view in found if self._users.of(view)]
        self._views = {view.key: view for view in found if not self._users.of(view)}
        self._targets = assigned(self._targets, self._views, objects)
        for target in self._targets.values():
            target.follow(objects)
        failed = [self._users.of(view) for view in self._shut]
        failed += self._write(objects) if self._apply else []
        events = tuple(each for each in failed if each not in self.complaints)
        self.complaints = frozenset(failed)
        now = time.monotonic_ns()
        self._free_ns = now + _SPACING * (time.thread_time_ns() - began_cpu_ns)
        self.due_ns = now + (_RETRY_NS if failed else objects.lasts_ns or _ANYWAY_NS)
        return self._found(objects, events)

    def _read(self) -> Objects:
        """What there is. News is taken first: what comes later makes it due again."""
        news = self._watch.read()
        before = None if self._routes_changed or news.routes else self._objects
        self._routes_changed = True  # until it has been read
        self._objects = read(self._netlink, self._families, self._manage.vrfs, before)
        self._routes_changed = self._objects.lasts_ns is not None  # of those that expire nothing is announced
        return self._objects

    def _look(self, objects: Objects) -> list[View]:
        return views(objects, self._manage.destinations, self._manage.vrfs, self._alternatives, self._apart)

    def _write(self, objects: Objects) -> list[str]:
        """Make ours be as it shall; what could not be done."""
        form = self._mirror.form
        if form == "object" and (objects.zebra_runs or self._mirror.rewritten(objects)):
            form = "inline"  # zebra adopts the nexthop groups of others, and writes its own members into them
        for key in [key for key in self._rules.read(objects.rules, self._views) if not self._steered(key)]:
            self._switch(key, on=False)
        failed = self._mirror.follow(objects, self._views.values(), self._targets.values(), form)
        for key in {t.view for t in self._targets.values() if self._steered(t.view)}:
            self._switch(key, on=True)
            if key[0] == 6 and self._place(key) in self._mirror.made:
                self._rules.touch(key)
        return failed

    def _place(self, view: ViewKey) -> Table:
        return view[0], self._numbers.table(view)

    # ---- what there is ----

    def _found(self, objects: Objects, events: tuple[str, ...]) -> Found:
        groups, lost = {}, set()
        for name, target in self._targets.items():
            if target.usable and target.prefixes:
                groups[name] = self._group(target)
            else:
                lost.add(name)
        routes: dict[ViewKey, dict[Key, Target | None]] = {
            key: dict.fromkeys(map(key_of, view.passed_on)) for key, view in self._views.items()
        }
        for name, target in self._targets.items():
            routes.setdefault(target.view, {}).update((key_of(each.destination), name) for each in target.prefixes)
        refused = [(view, prefix, why) for view in self._views.values() for prefix, why in view.refused.items()]
        refused += [(v, each.destination, self._users.of(v)) for v in self._shut for each in v.prefixes]
        named = {p if v.name == "main" else f"{p} in table {v.name}": why for v, p, why in refused}
        unlinked = frozenset(link.name for link in objects.links.values() if not objects.carries(link.index))
        return Found(
            groups, named, frozenset(lost), unlinked, events, tuple(LongestPrefix(each) for each in routes.values())
        )

    def _group(self, target: Steered) -> Group:
        members = tuple(
            Member(self._numbers.nexthop(way), way.gateway, way.interface, weight) for way, weight in target.usable
        )
        destinations = tuple(each.destination for each in target.prefixes)
        return Group(target.name, destinations, members, self._current(target), beside=target.beside)
