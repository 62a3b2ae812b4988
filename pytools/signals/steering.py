"""What is steered and by whom: nexthop groups, the controller's states of paths, its acts."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Path, Signal

SteeringState = Literal["healthy", "suspect", "drained", "returning", "unmeasured"]


class GroupMember(msgspec.Struct, frozen=True):
    """One nexthop of a group as the kernel has it."""

    nexthop_id: int  # of the kernel
    gateway: str  # empty if on-link
    interface: str  # by which packets leave
    weight: int  # 1 to 256
    # times the kernel selected it since the group was last replaced, once per forwarded packet, seldom per
    # connected socket; null before Linux 6.9
    packets: int | None


class NexthopGroup(Signal, frozen=True, kw_only=True, tag="nexthop_group"):
    """A nexthop group that carries routes to peers.

    Once a second with a subscriber.
    """

    group_id: int  # of the kernel
    destinations: list[str]  # prefixes that use it
    members: list[GroupMember]  # its nexthops


class PathState(Signal, frozen=True, kw_only=True, tag="path_state"):
    """The controller's state of a path.

    At each change, and once a second.
    """

    path: Path
    state: str  # healthy, suspect, drained, returning or unmeasured
    since_ns: int  # when it began
    weight_wanted: int | None  # the engine's target; null if no group carries the path
    weight_actual: int | None  # in the kernel
    reason: str  # the measurement, and the progress of a return or of learning
    under: str  # the rule; empty if none applies


class HoldState(Signal, frozen=True, kw_only=True, tag="hold_state"):
    """Packets along a path that wait at this host while the queue on the path is long.

    Twice a second while they may be held, and at the end. Counters begin with the hold.
    """

    path: Path
    threshold_ns: int  # the queueing that is wanted
    longest_ns: int  # no packet waits longer
    armed: bool  # whether the kernel holds packets when it sees fit
    why_not: str  # why it does not, or not now; empty if it does
    queueing_ns: int | None  # the newest, on the way there; null if it is not known, and nothing is held
    rate_bytes_per_s: int | None  # what leaves at most; null if all does
    held_packets: int  # that were held; segments
    held_bytes: int  # of them, with headers
    waited_ns: int  # the sum of the times that these buffers were held for
    samples: int  # of the queue that were looked at
    samples_above: int  # of these, above the threshold
    under: str  # the rule


class Act(Signal, frozen=True, kw_only=True, tag="act"):
    """One change made, wanted (dry run) or undone, or an alert.

    At once. A guardian and `swerve steer off` publish their rollbacks too, at their end, and wait at most a second
    for an agent.
    """

    act_id: str  # the same in the journal
    what: str  # as "routes to 10.9.0.2/32"
    before: dict[str, int]  # weight by nexthop; of rto_min milliseconds
    after: dict[str, int]  # as before
    because: str  # the measurement with its numbers
    under: str  # the rule
    # alert and alert_over are of alerts, the others of changes
    outcome: Literal["dry_run", "applied", "failed", "undone", "alert", "alert_over"]
    seen_ns: int  # at_ns of the signal that led to it
    decided_ns: int  # the decision
    acknowledged_ns: int | None  # the kernel's acknowledgement, null if not made; minus seen_ns it is the time to act
    target: str = ""  # as "overlay:main:10.9.0.2/32": the table of the original routes and their first prefix
    # overlay (weights), pin, label, ports, subflow, bond, reroute (by the kernel itself), rto_min, notify (a hook was
    # called), alert or operator
    actuator: str = ""
    moves: str = ""  # what such a change moves, in words
    paths: list[Path] = msgspec.field(
        default_factory=list
    )  # whose measurements led to it, or whose packets it moves or holds
