"""Which acts come last, and what it takes to take them back one by one. Pure.

An act that takes another back is called `undo:` and that one's name, so that the next request goes on with the act
before it instead of doing it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytools.signals import Path
from steering.acting.journal import Entry
from steering.plan import Change, Group, Weights, same, title

if TYPE_CHECKING:
    from steering.deciding.health import PathHealth

_MARK = "undo:"


@dataclass(frozen=True, slots=True)
class TakenBack:
    act: Entry
    why: str = ""  # why it was not taken back; empty when it was
    tried: bool = True  # False: there was nothing that could be tried

    @property
    def text(self) -> str:
        return f"{title(self.act.target)}: {self.why or 'taken back'}; was because {self.act.because}"


def undo_name(act_id: str) -> str:
    """What the act is called that takes this one back."""
    return _MARK + act_id


def last_acts(entries: Iterable[Entry], scope: str) -> list[Entry]:
    """The acts in force, the newest first."""
    made: dict[str, Entry] = {}
    for entry in entries:
        if entry.scope != scope:
            continue
        if entry.kind == "applied" and entry.act_id.startswith(_MARK):
            made.pop(entry.act_id.removeprefix(_MARK), None)
        elif entry.kind == "applied":
            made[entry.act_id] = entry
        elif entry.kind == "undone":
            made = {name: act for name, act in made.items() if act.target != entry.target}
    return list(reversed(made.values()))


def take_back(acts: Iterable[Entry], count: int, one: Callable[[Entry], TakenBack]) -> list[TakenBack]:
    """Take so many acts back, by `one`. What cannot be taken back does not count: what is older stays in reach."""
    done: list[TakenBack] = []
    for act in acts:
        if sum(each.tried for each in done) >= count:
            break
        done.append(one(act))
    return done


def exit_code(done: Collection[TakenBack]) -> int:
    """0 when something was taken back, and all that was tried; 1 otherwise."""
    tried = [each for each in done if each.tried]
    return int(any(each.why for each in tried) or (bool(done) and not tried))


def change_back(
    act: Entry, group: Group, paths: Mapping[Path, PathHealth], drained: Collection[int] = ()
) -> Change | str:
    """The change that takes an act back, of a target as it is now; or why there is none.

    What the operator ordered out of use (`drained`) stays so.
    """
    present = {member.nexthop_id for member in group.members}
    before: Weights = tuple(pair for pair in act.before if pair[0] in present)
    wanted: Weights = tuple(pair for pair in before if pair[0] not in drained)
    if not before:
        return "none of the nexthops it had before is left"
    if wanted != before and (not wanted or same(wanted, group.current)):
        return "an order keeps it so: see `swerve steer undrain`"
    if same(wanted, group.current):
        return "it has these weights already"
    # A path that gets its whole weight back is no longer what its rule made of it.
    whole = {nexthop for nexthop, weight in wanted if dict(group.original).get(nexthop) == weight}
    lifted = frozenset(p for nexthop, p in group.paths if nexthop in whole and p in paths and paths[p].down)
    because = f"the operator took back: {act.because}"
    return Change(group.target, group.current, wanted, because, "operator", lifted=lifted)
