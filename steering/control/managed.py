"""What is managed and what is not, each with its reason and what to do about it: for the start and for `status`.

Short however many prefixes there are: targets and reasons are counted, and a few of each are named.
"""

from __future__ import annotations

import bisect
import ipaddress
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytools import directories
from steering.plan import Group, Target, title

if TYPE_CHECKING:  # `status` shows these facts, and starts sooner without
    from steering.actuators.overlay import Found
    from steering.policy.model import Policy

SAID_AT_ONCE: Final = 5  # targets or prefixes that are new
_TARGETS, _TARGETS_SAID, _HOPS, _NAMED = 20, 10, 8, 3

_ONE_HOP: Final = "one hop"
_NO_ROUTE: Final = "no route over a gateway leads to it"
_NO_DEVICE: Final = "there is no such interface"
_NO_IPV6: Final = "it relabels, and no managed target is of IPv6"
_REMEDIES: Final = (  # by a part of the reason
    (_ONE_HOP, "route it over several, or name another one in manage.alternatives"),
    ("type of service or one source", "route it without tos and from, or leave it out of manage.destinations"),
    ("encapsulates", "manage the tunnel's destination instead, or leave it out of manage.destinations"),
    ("weight > 256", "use smaller weights in the same proportion"),
    ("is used by", "set manage.table in the policy to a free number"),
    (_NO_ROUTE, "see `ip route get`; where a VRF has it, name that in manage.vrfs"),
    (_NO_DEVICE, "make it, or correct manage.vrfs or manage.alternatives"),
    (_NO_IPV6, "manage an IPv6 prefix that has several hops, or use another action"),
)


class Managed:
    """What the kernel was found to have of a policy's prefixes."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        kinds = {rule.then.kind for rule in policy.rules}
        others = policy.ports or policy.labels or policy.bonds
        self._holds_alone = "hold" in kinds and kinds <= {"hold", "alert"} and not others  # which need no target
        self._found: Found | None = None
        self._left_out: list[dict[str, Any]] = []

    def take(self, found: Found) -> Iterator[str]:
        """Take note of what is there now; what there is to say: all of it at first, later what is new."""
        before, self._found = self._found, found
        if before is None or (before.groups.keys(), before.refused) != (found.groups.keys(), found.refused):
            self._left_out = self._look(found)
        if before is None:
            yield from lines(self.facts(found.groups), started=True)
            return
        fresh = [f"{title(name)}: managed now" for name in found.groups if name not in before.groups]
        yield from _some(fresh, "targets are managed now")
        fresh = [
            f"{name} is not managed: {why}" for name, why in self._unmanaged(found) if before.refused.get(name) != why
        ]
        yield from _some(fresh, "prefixes are not managed")

    def facts(self, groups: Mapping[Target, Group]) -> dict[str, Any]:
        """What is managed and what is not, for programs; `groups` as they stand now."""
        return {
            "targets": len(groups),
            "prefixes": sum(len(group.destinations) for group in groups.values()),
            "shown": [_target(group) for group in list(groups.values())[:_TARGETS]],
            "by_ports": sum(self._by_ports(*each) for each in self._found.refused.items()) if self._found else 0,
            "holds_alone": self._holds_alone,
            "not_managed": self._left_out,
        }

    def _by_ports(self, name: str, why: str) -> bool:
        """Whether local ports of new connections, or labels of live ones, are all that a prefix offers to choose."""
        wanted = self._policy.labels if ":" in name else self._policy.ports
        return wanted is not None and _ONE_HOP in why

    def _unmanaged(self, found: Found) -> Iterator[tuple[str, str]]:
        """Prefixes that rules want and cannot have, and why."""
        for name, why in () if self._holds_alone else found.refused.items():
            if not self._by_ports(name, why):
                yield name, why

    def _look(self, found: Found) -> list[dict[str, Any]]:
        why: dict[str, list[str]] = {}
        for name, reason in self._unmanaged(found):
            why.setdefault(reason, []).append(name)
        manage = self._policy.manage
        there = [each for group in found.groups.values() for each in group.destinations]
        there += [name.partition(" ")[0] for name in found.refused]
        for prefix in () if self._holds_alone else _apart(manage.destinations, there):
            why.setdefault(_NO_ROUTE, []).append(prefix)
        present = {name for _, name in socket.if_nameindex()}
        named = dict.fromkeys((*manage.vrfs, *(each.dev for each in manage.alternatives)))
        if missing := [name for name in named if name not in present]:
            why[_NO_DEVICE] = missing
        relabelling = [f"rule {rule.name}" for rule in self._policy.rules if rule.then.kind == "relabel"]
        if relabelling and found.groups and not any(":" in each for each in there):
            why[_NO_IPV6] = relabelling
        return [
            {"reason": reason, "remedy": _remedy(reason), "count": len(names), "first": names[:_NAMED]}
            for reason, names in sorted(why.items(), key=lambda pair: -len(pair[1]))
        ]


def _target(group: Group) -> dict[str, Any]:
    current, measured = dict(group.current), {nexthop for nexthop, _ in group.paths}
    return {
        "target": group.target,
        "prefixes": len(group.destinations),
        "first": list(group.destinations[:_NAMED]),
        "hop_count": len(group.members),
        "hops": [
            {
                "name": member.name,
                "weight": member.weight,  # what others gave it; 0: it stands by
                "now": current.get(member.nexthop_id, 0),
                "measured": member.nexthop_id in measured,
            }
            for member in group.members[:_HOPS]
        ],
    }


def _remedy(reason: str) -> str:
    return next((said for part, said in _REMEDIES if part in reason), f"see {directories.page('overlay.md')}")


def _apart(managed: Iterable[str], there: Collection[str]) -> list[str]:
    """The managed prefixes that neither hold one of these nor lie in one."""
    known = {ipaddress.ip_network(each) for each in there}
    first = {version: sorted(int(n.network_address) for n in known if n.version == version) for version in (4, 6)}
    found = []
    for prefix in managed:
        network = ipaddress.ip_network(prefix)
        low, high = int(network.network_address), int(network.broadcast_address)
        starts = first[network.version]
        at = bisect.bisect_left(starts, low)
        holds = at < len(starts) and starts[at] <= high
        lengths = range(network.prefixlen + 1)
        if not holds and not any(network.supernet(new_prefix=length) in known for length in lengths):
            found.append(prefix)
    return found


def _some(said: list[str], more: str) -> Iterator[str]:
    yield from said[:SAID_AT_ONCE]
    if len(said) > SAID_AT_ONCE:
        yield f"and {len(said) - SAID_AT_ONCE:,} more {more}"


def lines(facts: Mapping[str, Any], *, started: bool = False) -> Iterator[str]:
    """The same for people; at the start nothing can have been measured yet."""
    if facts["targets"]:
        yield f"managed: {_count(facts['targets'], 'target')} with {_count(facts['prefixes'], 'prefix', 'prefixes')}"
    elif facts.get("holds_alone"):
        yield "no target is needed: the rules only hold packets"
    elif not facts.get("by_ports"):
        yield "nothing is managed: no rule can move anything"
    if count := facts.get("by_ports"):
        yield f"managed by local ports or flow labels alone: {_count(count, 'prefix', 'prefixes')} with one hop"
    for each in facts["shown"][:_TARGETS_SAID]:
        yield _target_line(each, started)
    if (more := facts["targets"] - _TARGETS_SAID) > 0:
        yield f"  and {_count(more, 'more target')}"
    for each in facts["not_managed"]:
        more = each["count"] - len(each["first"])
        names = ", ".join(each["first"]) + (f" and {more:,} more" if more else "")
        yield f"not managed: {names}: {each['reason']}; {each['remedy']}"


def _target_line(each: Mapping[str, Any], started: bool) -> str:
    hops = ", ".join(
        f"{hop['name']} weight {hop['weight']}" if hop["weight"] else f"{hop['name']} stands by" for hop in each["hops"]
    )
    if (more := each["hop_count"] - len(each["hops"])) > 0:
        hops += f" and {_count(more, 'more hop')}"
    others = each["prefixes"] - 1
    also = f" and {_count(others, 'more prefix', 'more prefixes')}" if others > 0 else ""
    measured = started or any(hop["measured"] for hop in each["hops"])
    return f"  {title(each['target'])}{also}: {hops}" + ("" if measured else "; no peer of the agent is reached by it")


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"
