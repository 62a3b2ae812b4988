"""Our tables, groups and nexthops in the kernel: made as they shall be, with as few requests as it takes.

Two forms. `object`: a nexthop for each hop, a group for each target, and routes that use the group, so that one request
re-weights all its prefixes, and a hop that loses its carrier is out at once. `inline`: every route lists its hops
itself, which leaves zebra nothing to adopt. One thread; the netlink socket's namespace decides.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

from pytools.kernel.leftovers import FIRST_ID, LAST_ID, is_our_nexthop
from pytools.kernel.netlink.nexthops import group_body, nexthop_body
from pytools.kernel.netlink.routes import hop_of, mirrored, route_of, throw_route, with_rto_min
from pytools.kernel.netlink.routing import PROTOCOL, Hop, Member, Netlink, NetlinkError, Nexthop, NexthopGroup
from steering.actuators.objects import Objects, Table
from steering.actuators.overlay_memory import HopKey, OverlayMemory
from steering.actuators.owners_routes import Steerable, View, ViewKey, Way
from steering.actuators.steered import Steered
from steering.plan import Target

Form = Literal["object", "inline"]
Shares = Mapping[Way, int]
_NOT_REACHED: Final = frozenset({errno.EINVAL, errno.ENETUNREACH, errno.EHOSTUNREACH})
_GONE: Final = frozenset({errno.ENOENT, errno.ESRCH})


class Numbers:
    """Table numbers and ids of ours: the same for the same thing as long as this lives."""

    def __init__(self, first_table: int) -> None:
        self._first_table = first_table
        self._tables: dict[tuple[int, int | None], int] = {}
        self._ids: dict[HopKey | str, int] = {}
        self._next = FIRST_ID
        self._taken: frozenset[int] = frozenset()

    def table(self, view: ViewKey) -> int:
        """The table of ours above one of theirs; both families share the number."""
        return self._tables.setdefault(view[1:], self._first_table + len(self._tables))

    def nexthop(self, way: Way) -> int:
        return self._id((way.family, way.gateway, way.interface, way.onlink))

    def group(self, target: Target) -> int:
        return self._id(target)

    def skip(self, taken: Iterable[int]) -> None:
        """Leave out ids that somebody uses; what had one of them gets another."""
        self._taken = frozenset(taken)
        self._ids = {what: number for what, number in self._ids.items() if number not in self._taken}

    def recall(self, memory: OverlayMemory) -> None:
        """Go on with the numbers of a controller before us."""
        self._tables, self._ids = dict(memory.tables), dict(memory.ids)
        self._next = max((FIRST_ID - 1, *self._ids.values())) + 1

    @property
    def known(self) -> tuple[Mapping[tuple[int, int | None], int], Mapping[HopKey | str, int]]:
        """The tables and the ids so far."""
        return self._tables, self._ids

    def _id(self, what: HopKey | str) -> int:
        if what not in self._ids:
            while self._next in self._taken:
                self._next += 1
            self._ids[what] = self._next
            self._next += 1
        return self._ids[what]


class Mirror:
    """Our tables in one namespace.

    Parameters
    ----------
    numbers : Numbers
        What ours are called.
    rto_min_ms : int
        The minimum RTO of our routes, but for those whose originals have one; 0: none.
    """

    def __init__(self, netlink: Netlink, numbers: Numbers, rto_min_ms: int = 0) -> None:
        self._netlink, self._numbers, self._rto_min_ms = netlink, numbers, rto_min_ms
        self.form: Form = "object"
        self._routes: dict[Table, dict[str, bytes]] = {}  # as put
        self._groups: dict[int, dict[int, int]] = {}  # as put
        self._prefixes: dict[Target, tuple[ViewKey, Sequence[Steerable]]] = {}
        self.made: set[Table] = set()  # where routes were made when it last followed
        self._verified: Objects | None = None  # the reading after which our routes were last compared

    def rewritten(self, objects: Objects) -> bool:
        """Whether somebody put members of his own into a group of ours."""
        return any(
            number in objects.groups and not objects.groups[number].weights.keys() <= self._groups[number].keys()
            for number in self._groups
        )

    def follow(self, objects: Objects, views: Collection[View], targets: Collection[Steered], form: Form) -> list[str]:
        """Make everything as it shall be; what could not be done.

        Parameters
        ----------
        objects : Objects
            What the kernel has.
        views : collection of View
            What has to be passed on.
        """
        failed: list[str] = []
        self.made.clear()
        if form != self.form:
            self.form = form
            failed += self._put_routes({})
        usable = self._make_nexthops(objects, {way for target in targets for way, _ in target.usable}, failed)
        self._prefixes = {each.name: (each.view, each.prefixes) for each in targets if each.prefixes}
        wanted: dict[Table, dict[str, bytes]] = {}
        groups: dict[int, dict[int, int]] = {}
        for target in targets:
            able = {way: weight for way, weight in target.shares.items() if way in usable}
            if not able or not target.prefixes:
                continue
            if form == "object":
                members = {self._numbers.nexthop(way): weight for way, weight in able.items()}
                groups[self._numbers.group(target.name)] = members
            for place, bodies in self._bodies(target.name, able).items():
                wanted.setdefault(place, {}).update(bodies)
        for view in views:
            number = self._numbers.table(view.key)
            for each in view.passed_on:
                body = throw_route(each, view.family, number, PROTOCOL)
                wanted.setdefault((view.family, number), {})[each] = body
        whole = self._groups.keys() <= objects.groups.keys()  # a group that is gone took its routes along
        self._put_groups(objects, groups, failed)
        self._verify(objects, views, whole)
        failed += self._put_routes(wanted)
        self._drop_surplus(objects, {self._numbers.nexthop(way) for way in usable} if form == "object" else set())
        return failed

    def reweight(self, target: Target, shares: Shares) -> None:
        """Give a target other weights.

        Raises
        ------
        NetlinkError
            If the kernel refuses; in form `inline` some of its routes may have them already.
        """
        if self.form == "object":
            number = self._numbers.group(target)
            members = {self._numbers.nexthop(way): weight for way, weight in shares.items()}
            self._netlink.make_nexthop(_group(number, members), replace=True)
            self._groups[number] = members
            return
        for place, bodies in self._bodies(target, shares).items():
            put = self._routes.setdefault(place, {})
            refusals = self._netlink.make_routes(list(bodies.values()), replace=True)
            put.update(pair for pair, refusal in zip(bodies.items(), refusals, strict=True) if refusal is None)
            for refusal in refusals:
                if refusal is not None:
                    raise refusal

    # ---- nexthops and groups ----

    def _make_nexthops(self, objects: Objects, ways: set[Way], failed: list[str]) -> set[Way]:
        if self.form == "inline":
            return ways
        usable = set()
        for way in sorted(ways):
            number = self._numbers.nexthop(way)
            there = objects.nexthops.get(number)
            if there is not None and (there.ifindex, there.gateway or "") == (way.ifindex, way.gateway):
                usable.add(way)
                continue
            refusal = self._make_nexthop(number, way, way.onlink, there is not None)
            if refusal is not None and refusal.code in _NOT_REACHED and way.gateway and not way.onlink:
                # The owner's table alone has a route to the gateway; for nexthop objects the kernel asks the main one.
                refusal = self._make_nexthop(number, way, True, there is not None)
            if refusal is not None:  # its link has gone meanwhile
                failed.append(f"nexthop {way.gateway or way.interface}: {refusal.sentence or refusal}")
                continue
            usable.add(way)
        return usable

    def _make_nexthop(self, number: int, way: Way, onlink: bool, replace: bool) -> NetlinkError | None:
        body = nexthop_body(number, way.family, way.gateway or None, way.ifindex, onlink, PROTOCOL)
        try:
            self._netlink.make_nexthop(body, replace)
        except NetlinkError as refusal:
            return refusal
        return None

    def _put_groups(self, objects: Objects, wanted: dict[int, dict[int, int]], failed: list[str]) -> None:
        self._groups = {}
        for number, members in wanted.items():
            there = objects.groups.get(number)
            if there is None or list(there.weights.items()) != list(members.items()):  # flows depend on the order, too
                try:
                    self._netlink.make_nexthop(_group(number, members), replace=there is not None)
                except NetlinkError as refusal:
                    failed.append(f"nexthop group {number}: {refusal.sentence or refusal}")
            self._groups[number] = members

    def _drop_surplus(self, objects: Objects, nexthops: set[int]) -> None:
        gone = [
            number for number, each in objects.groups.items() if is_our_nexthop(each) and number not in self._groups
        ]
        gone += [number for number, each in objects.nexthops.items() if is_our_nexthop(each) and number not in nexthops]
        for number in gone:
            try:
                self._netlink.del_nexthop(number)
            except NetlinkError as refusal:
                if refusal.code != errno.ENOENT:
                    raise

    # ---- routes ----

    def _bodies(self, target: Target, shares: Shares) -> dict[Table, dict[str, bytes]]:
        view, prefixes = self._prefixes[target]
        family, table = view[0], self._numbers.table(view)
        over: int | list[Hop] = self._numbers.group(target)
        if self.form == "inline":  # IPv6 is without the other hops for a moment: the one that carries most comes first
            ordered = sorted(shares.items(), key=lambda pair: -pair[1])
            over = [hop_of(way.gateway, way.ifindex, family, weight, way.onlink) for way, weight in ordered]
        made = {each.destination: mirrored(each.body, each.destination, table, PROTOCOL, over) for each in prefixes}
        if self._rto_min_ms:
            made = {prefix: with_rto_min(body, self._rto_min_ms) for prefix, body in made.items()}
        return {(family, table): made}

    def _verify(self, objects: Objects, views: Collection[View], whole: bool) -> None:
        """Take note of our routes as they are: the kernel deletes them with their last hop, and others may."""
        before, self._verified = self._verified, objects
        if whole and before is not None and before.routes is objects.routes and before.shape == objects.shape:
            return
        for view in views:
            place = view.family, self._numbers.table(view.key)
            put = self._routes.get(place, {})
            there = self._netlink.routes(*place, PROTOCOL)
            self._routes[place] = {route.destination: put.get(route.destination, route.body) for route in there}

    def _put_routes(self, wanted: Mapping[Table, Mapping[str, bytes]]) -> list[str]:
        """Have these routes and no others in our tables; what could not be done."""
        failed: list[str] = []
        for place in {*wanted, *self._routes}:
            want, put = wanted.get(place, {}), self._routes.setdefault(place, {})
            surplus = [prefix for prefix in put if prefix not in want]
            refusals = self._netlink.drop_routes([route_of(put[prefix]) for prefix in surplus])
            for prefix, refusal in zip(surplus, refusals, strict=True):
                if refusal is None or refusal.code in _GONE:
                    del put[prefix]
                else:
                    failed.append(_text(prefix, refusal))
            for replace in (False, True):
                chosen = {p: body for p, body in want.items() if put.get(p) != body and (p in put) == replace}
                refusals = self._netlink.make_routes(list(chosen.values()), replace=replace)
                for (prefix, body), refusal in zip(chosen.items(), refusals, strict=True):
                    if refusal is None:
                        put[prefix] = body
                        self.made.add(place)
                        continue
                    if refusal.code in _GONE:
                        put.pop(prefix, None)
                    failed.append(_text(prefix, refusal))
        return failed


def _text(prefix: str, refusal: NetlinkError) -> str:
    return f"route {prefix}: {refusal.sentence or refusal}"


def _group(number: int, members: Mapping[int, int]) -> bytes:
    return group_body(number, [Member(member, weight) for member, weight in members.items()], PROTOCOL)


def foreign_ids(objects: Objects) -> set[int]:
    """Ids in our range that are not ours: zebra keeps nexthops that it once adopted."""
    found: list[Nexthop | NexthopGroup] = [*objects.nexthops.values(), *objects.groups.values()]
    return {each.id for each in found if FIRST_ID <= each.id <= LAST_ID and not is_our_nexthop(each)}
