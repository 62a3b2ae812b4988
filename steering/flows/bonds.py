"""When another port of an active-backup bond becomes active: all paths over the bond are bad. Pure.

Paths are judged by the policy's rules that move weights, also paths over a single hop, which no weight can move. All
measured paths over the bond must be bad at once, to two peers, or the router behind the bond must be gone: one peer may
be the cause itself. With one way to a peer nothing tells a dead path from a dead peer, so there silence counts only
together with that of another peer. A port is judged after it was active for `trial`; ports that were left wait for
`retry_after`. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pytools.signals import Path
from pytools.units import duration_text
from steering.deciding import health, transitions
from steering.deciding.engine import Engine
from steering.deciding.evidence import Facts
from steering.deciding.failure_classifier import classify
from steering.deciding.health import PathHealth
from steering.plan import Bond, BondAct, Group
from steering.policy.actions import WEIGHT_KINDS, Bonds
from steering.policy.conditions import AnyOf, LinkState, Silence, leaves
from steering.policy.model import Policy, Rule
from steering.policy.scope import inside

_MOST_TIMES: Final = 10  # retry_after, after trials that failed


class _Said(NamedTuple):
    state: Literal["bad", "good", "unknown"]
    because: str = ""
    under: str = ""
    seen_ns: int = 0


@dataclass(slots=True)
class _Kept:
    bond: Bond
    since_ns: int = 0  # when the active port became it; 0: before us
    former: int = 0  # the port before anything of ours; 0: nothing of ours is in force
    proven: bool = False  # whether what we selected was better
    barred: dict[int, int] = field(default_factory=dict)  # ports that were left, and until when
    trials: dict[int, int] = field(default_factory=dict)  # in vain, by port
    because: str = ""  # of what is in force
    held: str = ""  # why nothing is done, though all paths are bad
    paths: list[Path] = field(default_factory=list)


class BondEngine:
    """All active-backup bonds under one policy.

    Parameters
    ----------
    wanted : Bonds
        Its part about bonds.
    known : Engine
        Has the evidence, what is usual, and the operator's orders.
    """

    def __init__(self, policy: Policy, wanted: Bonds, known: Engine) -> None:
        self._policy, self._wanted, self._known = policy, wanted, known
        self._bonds: dict[str, _Kept] = {}
        self._paths: dict[Path, PathHealth] = {}

    def arrange(self, bonds: Mapping[str, Bond], over: Mapping[str, str], now: int) -> list[BondAct]:
        """Take note of the bonds, and of what leaves by which; selections of ours that others have changed since."""
        lost = []
        self._bonds = {name: self._bonds.get(name) or _Kept(bond) for name, bond in bonds.items()}
        for name, bond in bonds.items():
            kept = self._bonds[name]
            if bond.active != kept.bond.active:
                kept.since_ns = now
                if kept.former:
                    why = f"{bond.port(kept.bond.active)} was selected, but {bond.port(bond.active)} is active now: "
                    why += "the bond's monitor or somebody else selected it, and it stays"
                    lost.append(BondAct(bond, bond.active, why, "bonds", now, tuple(kept.paths), over=True))
                    kept.former = 0
            kept.bond, kept.paths = bond, []
        for path in self._known.evidence.paths:
            if path.interface in over and inside(path.address, self._policy.manage.destinations):
                self._bonds[over[path.interface]].paths.append(path)
        known = {path for kept in self._bonds.values() for path in kept.paths}
        self._paths = {path: self._paths.get(path) or health.unknown(now) for path in known}
        return lost

    def adopt(self, name: str, former: int, chosen: Collection[int]) -> bool:
        """Go on with what a controller before us selected, if that is active still."""
        kept = self._bonds.get(name)
        if kept is None or kept.bond.active not in chosen:
            return False
        kept.former, kept.proven, kept.because = former, True, "selected by a controller before this one"
        return True

    def look(self, now: int) -> None:
        """Judge the paths by what is known of them now."""
        for path, before in self._paths.items():
            facts, limits = self._known.evidence.facts(path), self._known.usual.limits(path)
            observed = transitions.observe(self._policy, before, facts, now, limits)
            self._paths[path] = transitions.advance(self._policy, observed, now)
            if path not in self._known.paths:  # else the engine itself learns from it
                self._known.usual.take(path, self._paths[path])

    def decide(self, now: int) -> list[BondAct]:
        """What is to be done now. The same again, until it is carried out or rejected."""
        return [act for kept in self._bonds.values() if kept.paths for act in self._decide(kept, now)]

    def _decide(self, kept: _Kept, now: int) -> Iterator[BondAct]:
        bond, said = kept.bond, self._say(kept, now)
        kept.held = self._known.overrides.held(Group(f"bond:{bond.name}", (), (), ()))
        if kept.held:
            return
        on_trial = kept.since_ns and now - kept.since_ns < self._wanted.trial
        if kept.former and not kept.proven and not on_trial:
            if said.state == "good":
                kept.proven = True
                kept.trials.pop(bond.active, None)
                return
            lasted = duration_text(self._wanted.trial)
            why = f"no better {lasted} after {bond.port(bond.active)} was selected: {said.because}"
            about = said.under or "bonds", said.seen_ns, tuple(kept.paths)
            yield BondAct(bond, kept.former, why, *about, over=True, failed_trial=True)
            return
        if said.state != "bad" or not bond.active:
            kept.held = said.because if said.state == "unknown" else ""
            return
        port, kept.held = self._next(kept, now)
        if on_trial:
            kept.held = f"{bond.port(bond.active)} is active for less than {duration_text(self._wanted.trial)}"
        if not kept.held:
            about = said.under, said.seen_ns, tuple(kept.paths)
            yield BondAct(bond, port, said.because, *about, over=port == kept.former)

    def _next(self, kept: _Kept, now: int) -> tuple[int, str]:
        """The port to select, or why there is none."""
        bond = kept.bond
        if bond.moves_back:
            return 0, bond.moves_back
        others = [port for port, _ in bond.ports if port != bond.active and port in bond.usable]
        if not others:
            return 0, "no other port of it is up"
        free = [port for port in others if now >= kept.barred.get(port, 0)]
        if not free:
            first = min(others, key=lambda port: kept.barred[port])
            left = duration_text(kept.barred[first] - now)
            return 0, f"{bond.port(first)} was left, and is not selected again for {left}"
        return free[0], ""

    # ---- what the paths say ----

    def _say(self, kept: _Kept, now: int) -> _Said:
        """Whether all measured paths over a bond are bad, as a rule that moves weights has it."""
        live = [path for path in kept.paths if self._paths[path].state != "unmeasured"]
        old = next((path for path in live if health.stale(self._policy, self._paths[path], now)), None)
        if not live or old is not None:
            return _Said("unknown", f"no fresh measurement of {old}" if old else "no path over it is measured")
        found = {path: self._bad(path, kept.paths, now) for path in live}
        bad = {path: each for path, each in found.items() if each is not None}
        if len(bad) < len(live):
            good = any(not self._troubled(path) for path in live if path not in bad)
            return _Said("good") if good else _Said("unknown", "no path over it is good")
        peers = sorted({path.destination for path in bad})
        first = min(bad, key=lambda path: self._paths[path].since_ns)
        under, text, _ = bad[first]
        seen_ns = max(self._paths[path].seen_ns for path in bad)
        if len(peers) < 2 and not any(own for _, _, own in bad.values()):
            return _Said("unknown", f"{first}: {text}; only {peers[0]} says so", under, seen_ns)
        where = f"{kept.bond.port(kept.bond.active)} of {kept.bond.name}"
        why = f"every path by {where}, to {', '.join(peers)}, is bad: {first}: {text}"
        return _Said("bad", why, under, seen_ns)

    def _troubled(self, path: Path) -> bool:
        known, facts = self._paths[path], self._known.evidence.facts(path)
        silent = facts.liveness is not None and facts.liveness.missed > 0
        return known.bad or not known.measured or silent

    def _bad(self, path: Path, beside: list[Path], now: int) -> tuple[str, str, bool] | None:
        """The rule under which a path is bad, the measurement, and whether this host's link to its router says so."""
        known = self._paths[path]
        if (number := health.due(self._policy, known)) is not None:
            rule, reading = self._policy.rules[number], known.readings[number]
            left = self._known.paths.get(path)
            if left and left.down and not reading.failure and now - left.since_ns < self._wanted.trial:
                return None  # its load has just been moved to other paths
            failed = any(isinstance(leaf, LinkState) and leaf.event == "neighbour_failed" for leaf in leaves(rule.when))
            return rule.name, reading.text, failed and "link" in reading.signals and bool(path.gateway)
        facts = self._known.evidence.facts(path)
        if any(each.path not in beside for each in facts.siblings):
            return None  # those tell a dead path from a dead peer
        for rule in self._policy.rules:
            if rule.then.kind in WEIGHT_KINDS and rule.scope.covers(path) and (text := _silent(rule, facts)):
                return rule.name, text, False
        return None

    # ---- what became of it ----

    def carried_out(self, act: BondAct, now: int) -> None:
        """Take note that a port was selected."""
        kept, left = self._bonds[act.bond.name], act.bond.active
        tried = kept.trials.get(left, 0) if act.failed_trial else 0
        kept.barred[left] = now + min(2**tried, _MOST_TIMES) * self._wanted.retry_after
        if act.failed_trial:
            kept.trials[left] = tried + 1
        kept.former = 0 if act.over else kept.former or left
        kept.bond = _on(kept.bond, act.port)
        kept.since_ns, kept.proven, kept.because = now, False, act.because

    def pretended(self, act: BondAct, now: int) -> None:
        """Take note that it would have been selected: that is said again later."""
        barred = dict.fromkeys((port for port, _ in act.bond.ports), now + self._wanted.retry_after)
        self._bonds[act.bond.name].barred = barred

    def rejected(self, act: BondAct, now: int) -> None:
        """Take note that it was not: it is tried again later."""
        kept = self._bonds[act.bond.name]
        if act.over:
            kept.since_ns = now
        else:
            kept.barred[act.port] = now + self._wanted.retry_after

    def facts(self) -> list[dict[str, object]]:
        return [
            {
                "bond": name,
                "active": kept.bond.port(kept.bond.active),
                "former": kept.bond.port(kept.former) if kept.former else "",
                "paths": len(kept.paths),
                "because": kept.because if kept.former else "",
                "held": kept.held,
            }
            for name, kept in self._bonds.items()
            if kept.paths
        ]


def _on(bond: Bond, port: int) -> Bond:
    return Bond(bond.index, bond.name, port, bond.ports, bond.usable, bond.moves_back)


def _silences(rule: Rule) -> Iterable[Silence]:
    parts = rule.when.any if isinstance(rule.when, AnyOf) else (rule.when,)
    return (part for part in parts if isinstance(part, Silence))


def _silent(rule: Rule, facts: Facts) -> str:
    """What is said of a silence that the rule would act on, if another way to the peer told that the path is dead."""
    live = facts.liveness
    if live is None:
        return ""
    found = classify(live, facts.siblings)
    if (
        found.cause not in ("unknown", "peer_dead") or found.way == "there"
    ):  # the peer's probes come in: is ours broken?
        return ""
    for leaf in _silences(rule):
        weight = live.missed + live.missed_extra
        if live.missed >= leaf.missed and weight >= (live.limit or 0) and live.silent_ns >= leaf.lasting:
            return found.text
    return ""
