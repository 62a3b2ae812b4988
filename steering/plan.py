"""What is wanted, and what it takes to get there: frozen records. Pure.

A target is a set of managed prefixes that are routed over the same hops, named after the first of them and the table
that has them: `overlay:main:10.9.2.0/24`. A recorded one may be called `nexthop_group:102`. Weights are members' ids
with integer weights above 0, sorted; a member that is not named has no part. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from pytools.signals import Path, nexthop_name

Target = str
Weights = tuple[tuple[int, int], ...]

MAX_WEIGHT = 256  # what every kernel takes


def overlay_target(view: str, prefix: str) -> Target:
    """The target whose first prefix this is, in a table of others."""
    return f"overlay:{view}:{prefix}"


def nexthop_group(group_id: int) -> Target:
    return f"nexthop_group:{group_id}"


def kind_of(target: Target) -> str:
    """Which actuator a target is for."""
    return target.partition(":")[0]


def title(target: Target) -> str:
    kind, _, name = target.partition(":")
    table, _, prefix = name.partition(":")
    where = "" if table == "main" else f" in table {table}"
    return {"nexthop_group": f"nexthop group {name}", "overlay": f"routes to {prefix}{where}"}.get(kind, target)


def weights_of(pairs: Mapping[int, int] | Iterable[tuple[int, int]]) -> Weights:
    """Weights in their one form: sorted, members of weight 0 left out."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple(sorted((nexthop, weight) for nexthop, weight in items if weight > 0))


def same(one: Weights, other: Weights) -> bool:
    """Whether two weights do the same: that of a single member is of no account, and a route does not keep it."""
    return one == other or (len(one) == len(other) == 1 and one[0][0] == other[0][0])


def canonical(address: str) -> str:
    """An address in its one spelling; what is none stays as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


@dataclass(frozen=True, slots=True)
class Member:
    """One hop of a target as others have it."""

    nexthop_id: int  # the same for the same hop, as long as the controller runs
    gateway: str  # empty when on-link
    interface: str
    weight: int  # the original one; 0: it stands by

    @property
    def name(self) -> str:
        return nexthop_name(self.gateway, self.interface)


@dataclass(frozen=True, slots=True)
class Group:
    """A target that may be steered."""

    target: Target
    destinations: tuple[str, ...]  # its managed prefixes
    members: tuple[Member, ...]
    current: Weights  # what is in force now
    paths: tuple[tuple[int, Path], ...] = ()  # which measured path runs over which member
    beside: Target = ""  # carries one address only, which was taken out of this target
    witnesses: tuple[tuple[int, Path], ...] = ()  # paths of the addresses that were taken out of it, by member

    @property
    def exclusive(self) -> bool:
        """Whether some members stand by: they carry nothing as long as others may."""
        return any(member.weight == 0 for member in self.members)

    @property
    def nominal(self) -> dict[int, int]:
        """What each member counts where shares of the whole are compared."""
        most = max((member.weight for member in self.members), default=0) or 1
        return {member.nexthop_id: member.weight or most for member in self.members}

    @property
    def original(self) -> Weights:
        """The weights before we touched it."""
        return weights_of((member.nexthop_id, member.weight) for member in self.members)

    def member(self, path: Path) -> int | None:
        """The nexthop that a path leaves by; None if it is not in this group."""
        leaves = (canonical(path.gateway), path.interface)
        return next((m.nexthop_id for m in self.members if (m.gateway, m.interface) == leaves), None)

    def named(self, weights: Weights) -> dict[str, int]:
        """Weight by member name, 0 for those left out; for people."""
        found = dict(weights)
        return {member.name: found.get(member.nexthop_id, 0) for member in self.members}


@dataclass(frozen=True, slots=True, order=True)
class FlowKey:
    """A flow by its five fields, as this host sees it. Addresses in their one spelling."""

    protocol: int  # 6 TCP, 17 UDP
    local: str
    local_port: int
    remote: str
    remote_port: int


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """Where this host connects to over TCP: an IPv4 address and a port."""

    address: str
    port: int

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Pin:
    """One flow held on one member of a target, until its lease ends."""

    flow: FlowKey
    target: Target
    nexthop_id: int
    expires_ns: int


@dataclass(frozen=True, slots=True)
class StandBy:
    """Where the kernel sends the packets that are routed along a path, while that path is silent."""

    path: Path
    prefixes: tuple[str, ...]  # destinations that the path speaks for
    other: Path
    target: Target  # of which the other's nexthop is a member
    nexthop_id: int
    under: str  # name of the rule about silence


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How packets are held, as `struct swerve_hold_limits` of swerve.h has it."""

    threshold_ns: int  # the queueing that is wanted; above 0
    longest_ns: int  # no packet waits longer
    fresh_ns: int  # for how long a sample of the queue counts
    floor: int  # bytes a second that may always leave
    gain: int  # of 256: how much of the queueing above the threshold a pause is to drain


@dataclass(frozen=True, slots=True)
class Hold:
    """Packets that wait at this host while the queue on their path is long."""

    path: Path
    prefixes: tuple[str, ...]  # destinations that the path speaks for
    limits: HoldLimits
    under: str  # name of the rule
    install: bool = False  # whether fq may be put on the interface
    because: str = "the policy asks for it"


@dataclass(frozen=True, slots=True)
class LabelChange:
    """Another IPv6 flow label for one flow, until its lease ends."""

    flow: FlowKey
    label: int  # 20 bits
    expires_ns: int


@dataclass(frozen=True, slots=True)
class Bond:
    """An active-backup bond as the kernel has it; ports by index."""

    index: int
    name: str
    active: int  # 0: none
    ports: tuple[tuple[int, str], ...]
    usable: frozenset[int] = frozenset()  # up, with a carrier, and up for the bond's own monitor
    moves_back: str = ""  # why the bond itself would select another port again; empty: it would not

    def port(self, index: int) -> str:
        return dict(self.ports).get(index, f"interface {index}" if index else "none")


def moves_back(primary: str) -> str:
    """Why a bond would not stay on another port than this one."""
    return f"its primary is {primary} with primary_reselect always: the bond itself would select that again"


@dataclass(frozen=True, slots=True)
class BondAct:
    """The port that a bond is to use, or uses by now without us; and why."""

    bond: Bond
    port: int
    because: str
    under: str  # name of the rule
    seen_ns: int  # the measurement behind it
    paths: tuple[Path, ...] = ()  # that leave by the bond
    over: bool = False  # nothing of ours is in force then
    failed_trial: bool = False  # what we had selected was no better


@dataclass(frozen=True, slots=True)
class Change:
    """The weights that one target shall have, and why; an act if these are others than those in force."""

    target: Target
    before: Weights  # in force when it was decided
    after: Weights
    because: str
    under: str  # names of the rules behind it
    granted: tuple[tuple[Path, float], ...] = ()  # paths that are taken down with it, if carried out, and to what share
    held: tuple[tuple[Path, str], ...] = ()  # paths that ought to be taken down but are not, and why
    lifted: frozenset[Path] = frozenset()  # paths that are down, and get their weight back without having recovered
    undecided: bool = False  # the weights stay as they are, whatever the paths' states ask for
    alone: frozenset[str] = frozenset()  # addresses of which one path is bad and no other address says so
    failure: bool = False  # whether a path that is taken down with it has failed
    paths: tuple[Path, ...] = ()  # whose states led to it

    @property
    def moves(self) -> bool:
        return not same(self.before, self.after)


def scaled(original: Weights, share: Mapping[int, float]) -> Weights:
    """Integer weights in the proportion original weight times share.

    The original weights exactly where every share is 1; else the smallest round scale (1, 10, 100) that keeps the
    proportions exact, or as fine as the kernel's weights allow. A share above 0 never becomes a weight of 0.
    """
    exact = {n: Fraction(weight) * Fraction(str(share.get(n, 1.0))) for n, weight in original}
    highest = max(exact.values(), default=Fraction(0))
    for scale in (1, 10, 100):
        if highest * scale <= MAX_WEIGHT and all((value * scale).denominator == 1 for value in exact.values()):
            return weights_of((n, int(value * scale)) for n, value in exact.items())
    fine = MAX_WEIGHT / highest if highest else Fraction(0)
    return weights_of((n, max(1, round(value * fine)) if value else 0) for n, value in exact.items())
