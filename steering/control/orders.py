"""From what an operator says to orders. Pure; durations are nanoseconds, 0 for without end."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from pytools.errors import UsageError
from steering.deciding.overrides import Moment, Override, Overrides
from steering.plan import Group, Member, Target, canonical, title


def _place(leaves_by: str) -> tuple[str, str]:
    """Gateway and interface in `rail1`, `10.1.1.1` or `fe80::1%rail1`; empty for any, but not both.

    Raises
    ------
    UsageError
        If it names nothing.
    """
    if not leaves_by:
        raise UsageError("no interface and no gateway is named", "like rail1, 10.1.1.1 or fe80::1%rail1")
    address, percent, interface = leaves_by.partition("%")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return "", leaves_by
    return canonical(address), interface if percent else ""


def _members(group: Group, leaves_by: str) -> list[Member]:
    gateway, interface = _place(leaves_by)
    return [m for m in group.members if interface in ("", m.interface) and gateway in ("", m.gateway)]


def carries(group: Group, prefix: str) -> bool:
    """Whether a target carries routes to (part of) a prefix; to any when it is empty.

    Raises
    ------
    UsageError
        If it is no prefix.
    """
    if not prefix:
        return True
    try:
        wanted = ipaddress.ip_network(prefix)
    except ValueError as error:
        raise UsageError(f"not a prefix: {error}", "like 10.9.2.0/24") from None
    found = (ipaddress.ip_network(destination) for destination in group.destinations)
    return any(each.version == wanted.version and each.overlaps(wanted) for each in found)


def to_drain(
    groups: Iterable[Group], leaves_by: str, prefix: str, for_ns: int, now: Moment, by: str, why: str
) -> tuple[Override, ...]:
    """The orders that take an interface or a gateway out of use.

    Raises
    ------
    UsageError
        If nothing that is steered leaves by it.
    """
    known = list(groups)
    places = sorted({(m.interface, m.gateway) for g in known for m in g.members})
    chosen = [group for group in known if carries(group, prefix)]
    found = {(m.interface, group.target) for group in chosen for m in _members(group, leaves_by)}
    if not found:
        to = f" to {prefix}" if prefix else ""
        there = ", ".join(f"{gateway} dev {name}" if gateway else name for name, gateway in places)
        raise UsageError(f"nothing that is steered{to} leaves by {leaves_by}", f"it leaves by: {there or 'nothing'}")
    gateway = _place(leaves_by)[0]
    wanted = sorted(found) if prefix else sorted({(interface, "") for interface, _ in found})
    made = (Override("drain", interface, gateway, target, by=by, why=why) for interface, target in wanted)
    return tuple(order.lasting(for_ns, now) for order in made)


def with_orders(overrides: Overrides, fresh: Iterable[Override]) -> Overrides:
    """All orders with these; one about the same thing takes the place of the former."""
    added = tuple(fresh)
    about = {_about(order) for order in added}
    return Overrides((*(order for order in overrides.orders if _about(order) not in about), *added))


def _about(order: Override) -> tuple[str, ...]:
    return order.kind, order.interface, order.gateway, order.target


def without_drain(
    overrides: Overrides, groups: Iterable[Group], leaves_by: str, prefix: str
) -> tuple[Overrides, tuple[Override, ...]]:
    """The orders without such drains, and which those were."""
    gateway, interface = _place(leaves_by)
    targets = {group.target for group in groups if carries(group, prefix)} if prefix else None
    ended = tuple(
        order
        for order in overrides.orders
        if order.kind == "drain"
        and interface in ("", order.interface)
        and gateway in ("", canonical(order.gateway))
        and (targets is None or order.target in targets)
    )
    return _without(overrides, ended), ended


def without_hold(overrides: Overrides, target: Target) -> tuple[Overrides, tuple[Override, ...]]:
    """The orders without those that hold a target (empty: all of them), and which those were."""
    ended = tuple(order for order in overrides.orders if order.kind == "hold" and order.target == target)
    return _without(overrides, ended), ended


def hold_named(overrides: Overrides, name: str) -> Target | None:
    """The held target that a person means, there or not; None if none is called so, as by a prefix that it carried."""
    held = (order.target for order in overrides.orders if order.kind == "hold")
    return next((target for target in held if _called(target, name)), None)


def held_as_long(overrides: Overrides, target: Target, for_ns: int, now: Moment) -> bool:
    """Whether orders hold a target for so long already, or longer."""
    return any(
        order.kind == "hold"
        and order.target in ("", target)
        and ((left := order.left_ns(now)) is None or left >= for_ns)
        for order in overrides.orders
    )


def _called(target: Target, name: str) -> bool:
    wanted = f"nexthop_group:{name}" if name.isdecimal() else name
    return wanted in ((target, title(target)) if target else ("",))


def _without(overrides: Overrides, ended: tuple[Override, ...]) -> Overrides:
    return Overrides(tuple(order for order in overrides.orders if order not in ended))


def target_named(groups: Iterable[Group], name: str) -> Target:
    """The target that a person means: by its name, its title, a nexthop group's number, a prefix that it carries.

    Raises
    ------
    UsageError
        If it is none, or several.
    """
    known = list(groups)
    if not name:
        return ""
    found = [group.target for group in known if _called(group.target, name) or name in group.destinations]
    if len(found) != 1:
        there = ", ".join(sorted(group.target for group in known)) or "nothing"
        raise UsageError(f"{'several targets are' if found else 'no target is'} called {name}", f"steered are: {there}")
    return found[0]


def member_for(groups: Iterable[Group], remote: str, via: str) -> tuple[Group, Member]:
    """The target that carries routes to an address, and its member at an interface or gateway.

    Raises
    ------
    UsageError
        If there is none.
    """
    try:
        address = ipaddress.ip_address(remote)
    except ValueError:
        raise UsageError(f"{remote} is not an address", "like 10.9.0.2") from None
    best: tuple[int, Group] | None = None
    for group in groups:
        for network in map(ipaddress.ip_network, group.destinations):
            if address in network and (best is None or network.prefixlen > best[0]):
                best = network.prefixlen, group
    if best is None:
        raise UsageError(f"no target that is steered carries a route to {remote}", "see `manage` in the policy")
    found = _members(best[1], via)
    if len(found) != 1:
        there = ", ".join(member.name for member in best[1].members)
        raise UsageError(f"{title(best[1].target)} has {len(found)} nexthops by {via}", f"it has: {there}")
    return best[1], found[0]


def text_of(order: Override) -> str:
    """An order in words, without its end."""
    if order.kind == "hold":
        what = f"hold {order.target or 'everything'}"
    else:
        place = f"{order.gateway} dev {order.interface}" if order.gateway else order.interface
        what = f"drain {place}" + (f" in {order.target}" if order.target else "")
    return what + (f" ({order.why})" if order.why else "")
