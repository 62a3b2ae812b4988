"""A target of the overlay: whose weights hold, and how they follow the hops that others list. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steering.actuators.objects import Objects
from steering.actuators.owners_routes import ONE_HOP, Steerable, View, ViewKey, Way, Ways
from steering.plan import MAX_WEIGHT, Target, overlay_target
from steering.prefixes import key_of


@dataclass(slots=True)
class Steered:
    """A target: the prefixes of one view that have the same hops with the same weights."""

    name: Target
    view: ViewKey
    ways: Ways
    prefixes: Sequence[Steerable]
    usable: Ways = ()
    weights: dict[Way, int] | None = None  # ours; None: theirs
    away: frozenset[Way] = frozenset()  # left while ours were in force; they carry nothing until that is decided
    beside: Target = ""  # it is one address, taken out of this target

    @property
    def theirs(self) -> dict[Way, int]:
        """The weights that others gave the hops that can be used."""
        return {way: weight for way, weight in self.usable if weight}

    @property
    def shares(self) -> dict[Way, int]:
        """The weights that its group shall have."""
        return self.theirs if self.weights is None else self.weights

    def follow(self, objects: Objects) -> None:
        """Take note of the hops that can be used now: what is new joins, what is gone leaves."""
        before = {way for way, _ in self.usable}
        self.usable = tuple((way, weight) for way, weight in self.ways if objects.carries(way.ifindex))
        if self.weights is None:
            self.away = frozenset()
            return
        now = {way for way, _ in self.usable}
        self.away = (self.away | before) - now | (self.away & now)
        left = {way: weight for way, weight in self.weights.items() if way in now}
        theirs = self.theirs
        scale = max((weight / theirs[way] for way, weight in left.items() if way in theirs), default=1.0)
        for way in theirs.keys() - before - self.away:
            left[way] = min(MAX_WEIGHT, max(1, round(theirs[way] * scale)))
        # A single hop's weight matters only where they list another one that has lost its carrier and is still used.
        same = left == theirs or (alike(left, theirs) and len(self.usable) == len(self.ways))
        self.weights = self.ordered(left) if left and not same else None

    def ordered(self, weights: Mapping[Way, int]) -> dict[Way, int]:
        """Weights in the order in which others list the hops: where a flow goes depends on it."""
        return {way: weights[way] for way, _ in self.usable if way in weights}


def alike(one: Mapping[Way, int], other: Mapping[Way, int]) -> bool:
    """Whether weights do the same: that of a single hop is of no account (`plan.same`)."""
    return one == other or (len(one) == 1 and one.keys() == other.keys())


def assigned(old: Mapping[Target, Steered], views: Mapping[ViewKey, View], objects: Objects) -> dict[Target, Steered]:
    """Give every set of hops its target: the one that most of its prefixes had before, else one of its own.

    A target is always named after one of its prefixes, or one that was taken out of it, so that no two ask for the
    same name. An address that is steered apart has one named after itself.
    """
    before = {(t.view, each.destination): t for t in old.values() if not t.beside for each in t.prefixes}
    found: dict[Target, Steered] = {}

    def keep(name: Target, view: ViewKey, ways: Ways, prefixes: Sequence[Steerable], parent: Steered | None) -> Steered:
        known = old.get(name) or Steered(name, view, ways, prefixes)
        if parent is not None and parent is not known:  # split off: what was taken down stays down
            known.usable, known.weights, known.away = parent.usable, parent.weights, parent.away
        known.ways, known.prefixes = ways, prefixes
        found[name] = known
        return known

    for key, view in views.items():
        sets: dict[Ways, list[Steerable]] = {}
        apart: list[Steerable] = []
        for each in view.prefixes:
            (apart if each.within else sets.setdefault(each.ways, [])).append(each)
        names: dict[Ways, Target] = {}
        for ways, prefixes in sorted(sets.items(), key=lambda pair: -len(pair[1])):
            votes = Counter(before[place].name for each in prefixes if (place := (key, each.destination)) in before)
            parent = old[votes.most_common(1)[0][0]] if votes else None
            out = [each for each in apart if each.within == each.destination and each.ways == ways]
            inherits = parent is not None and _is_named_after(parent.name, view.name, [*prefixes, *out])
            names[ways] = parent.name if parent is not None and inherits else _name_of(view.name, prefixes)
            keep(names[ways], key, ways, prefixes, parent)
        for each in apart:
            name = overlay_target(view.name, each.destination.partition("/")[0])
            known = keep(name, key, each.ways, (each,), old.get(name) or before.get((key, each.within)))
            known.beside = names.get(each.ways, name)
    for name, known in old.items():
        if name not in found and _may_return(known, views.get(known.view), objects):
            known.prefixes, known.weights = (), None
            found[name] = known
    return found


def _may_return(target: Steered, view: View | None, objects: Objects) -> bool:
    """Whether it went with its links, or with all hops but one, as when a DHCP client takes another address."""
    if not all(objects.carries(way.ifindex) for way, _ in target.ways):
        return True
    if view is None:
        return False
    named_after = target.name.removeprefix(overlay_target(view.name, ""))
    return view.refused.get(named_after) == ONE_HOP


def _is_named_after(name: Target, view: str, prefixes: Sequence[Steerable]) -> bool:
    """Whether a target's name is that of one of these prefixes."""
    return any(name == overlay_target(view, each.destination) for each in prefixes)


def _name_of(view: str, prefixes: Sequence[Steerable]) -> Target:
    """A target's name: that of its first prefix. It is the same after a restart."""
    return overlay_target(view, min(prefixes, key=lambda each: key_of(each.destination)).destination)
