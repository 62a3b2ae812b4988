"""Which acts come last, and what it takes to take them back one by one. Pure.

An act that takes another back is called `undo:` and that one's name, so that the next request goes on with the act
before it instead of doing it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytools.signals import Path
from steering.acting.journal import Entry
from steering.deciding.health import PathHealth
from steering.plan import Change, Group, Weights, same

_MARK = "undo:"


def undo_name(act_id: str) -> str:
    """What the act is called that takes this one back."""
    return _MARK + act_id


def last_acts(entries: Iterable[Entry], scope: str, count: int) -> list[Entry]:
    """The acts in force that were made last, the newest first."""
    made: dict[str, Entry] = {}
    for entry in entries:
        if entry.scope != scope:
            continue
        if entry.kind == "applied" and entry.act_id.startswith(_MARK):
            made.pop(entry.act_id.removeprefix(_MARK), None)
        elif entry.kind == "applied":
            made[entry.act_id] = entry
        elif entry.kind in ("undone", "released"):
            made = {name: act for name, act in made.items() if act.target != entry.target}
    return list(reversed(made.values()))[:count]


def change_back(act: Entry, group: Group, paths: Mapping[Path, PathHealth]) -> Change | str:
    """The change that takes an act back, of a target as it is now; or why there is none."""
    present = {member.nexthop_id for member in group.members}
    wanted: Weights = tuple(pair for pair in act.before if pair[0] in present)
    if not wanted:
        return "none of the nexthops it had before is left"
    if same(wanted, group.current):
        return "it has these weights already"
    # A path that gets its whole weight back is no longer what its rule made of it.
    whole = {nexthop for nexthop, weight in wanted if dict(group.original).get(nexthop) == weight}
    lifted = frozenset(p for nexthop, p in group.paths if nexthop in whole and p in paths and paths[p].down)
    because = f"the operator took back: {act.because}"
    return Change(group.target, group.current, wanted, because, "operator", lifted=lifted)
