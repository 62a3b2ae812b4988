"""Whether an order may be given. Pure; `now` is CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping

from pytools.signals import Path
from steering.deciding import health
from steering.deciding.health import PathHealth
from steering.deciding.overrides import Overrides
from steering.plan import Group, Member, title
from steering.policy import Policy


def objection(policy: Policy, paths: Mapping[Path, PathHealth], group: Group, overrides: Overrides, now: int) -> str:
    """Why a target must not be left with what these orders leave it; empty when it may."""
    ordered = overrides.drained(group)
    left = [member for member in group.members if member.nexthop_id not in ordered]
    if not left:
        return f"{title(group.target)} would be left without a nexthop"
    usable = [member for member in left if all(health.share(paths[path]) > 0 for path in _over(group, member, paths))]
    if not usable:
        bad = "; ".join(f"{path}: {paths[path].because}" for member in left for path in _over(group, member, paths))
        return f"all others of {title(group.target)} are drained ({bad})"
    measured = {path.address for m in usable for path in _over(group, m, paths) if _fresh(policy, paths[path], now)}
    wanted = {path.address for _, path in group.paths if path in paths and paths[path].state != "unmeasured"}
    if not measured:
        names = ", ".join(member.name for member in usable)
        return f"what is left of {title(group.target)} is not measured ({names}), or no longer"
    unheard = sorted(wanted - measured)
    return f"no other path to {unheard[0]} is measured" if unheard else ""


def pin_objection(
    policy: Policy, paths: Mapping[Path, PathHealth], group: Group, member: Member, remote: str, now: int
) -> str:
    """Why a flow must not be pinned to a member; empty when it may."""
    over = [path for path in _over(group, member, paths) if path.address == remote] or _over(group, member, paths)
    if not any(_fresh(policy, paths[path], now) for path in over):
        return f"{member.name} is not measured, or no longer"
    failed = next((path for path in over if paths[path].failed), None)
    return f"{failed}: {paths[failed].because}" if failed else ""


def _over(group: Group, member: Member, paths: Mapping[Path, PathHealth]) -> list[Path]:
    return [path for nexthop, path in group.paths if nexthop == member.nexthop_id and path in paths]


def _fresh(policy: Policy, path: PathHealth, now: int) -> bool:
    return path.measured and path.state != "unmeasured" and not health.stale(policy, path, now)
