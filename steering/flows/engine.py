"""Rules about flows: which are pinned where, which get another label, for how long, and why. Pure.

Signals go in by `take`; `decide` says what is wanted now, from what `health` thinks of the paths; `carried_out` is told
what became of it. A pin or a label is a lease: renewed while it is wanted, and ended by the kernel when nobody does.

Damping: a decision waits until the rates are known again after the last one for the same destination; a flow is pinned
at most `max_moves_per_flow`; nothing is moved to a path that is not healthy and measured, that is avoided itself, or
that the operator drained; of a herd each host waits its own time and moves a fraction. A path that failed is left at
once: for the flows on it none of this holds, but for where they may go. Times are CLOCK_MONOTONIC nanoseconds; one
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pytools.signals import Path, PathDelay, Signal, TcpFlow
from pytools.units import MS
from steering.deciding import health, hold_down
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.flows import returns
from steering.flows.leases import Holdings, lease_ns
from steering.flows.placing import Case, Way, ambiguous, label_act, pin_act, spread_act, stranded, ways_of
from steering.flows.plan import FlowAct, FlowPlan, Renewal, Trouble
from steering.flows.rail_rates import RailRate, RailRates, place_of
from steering.flows.rates import MEMORY_NS, FlowRate, FlowRates
from steering.flows.returns import Avoided
from steering.plan import FlowKey, Group, Target
from steering.policy.actions import FLOW_KINDS
from steering.policy.model import Policy

SETTLE_NS: Final = 400 * MS  # after a move, until rates of after it are known
STEADY_NS: Final = 600 * MS  # a rail whose rate does not come to rest is taken as it is after this
EVEN_NS: Final = 200 * MS  # between two looks whether flows are spread evenly
UNEVEN_NS: Final = 300 * MS  # they are moved if they were uneven for so long: a job opens its connections one by one
LOOK_NS: Final = 50 * MS  # between two looks at all rates, unless a path fails: flows are told of every 100 ms
SIGNALS: Final = frozenset({"tcp_flow", "path_delay"})  # what `take` looks at


class FlowEngine:
    """All flows under one policy.

    Parameters
    ----------
    seed : str
        Of this host, for labels.
    """

    def __init__(self, policy: Policy, seed: str = "") -> None:
        self.policy, self._seed = policy, seed
        # flows that are pinned or relabelled
        self.flows, self.rails, self.held = FlowRates(), RailRates(), Holdings(policy)
        # targets whose flows could not be told apart when a rule held last, and why
        self.skipped: dict[Target, str] = {}
        self._rules = [number for number, rule in enumerate(policy.rules) if rule.then.kind in FLOW_KINDS]
        self._spreads = {number for number in self._rules if policy.rules[number].then.kind == "spread"}
        self._uneven_ns: dict[tuple[Target, str, int], int] = {}  # by target, address and rule: since when
        self._even_ns = 0  # not before this is it looked whether flows are spread evenly
        self._avoided: dict[Trouble, Avoided] = {}
        self._settled_ns: dict[tuple[str, bool], int] = {}  # by destination and urgency: nothing is decided before
        self._vain_ns: dict[tuple[str, bool], int] = {}  # the same, where the last search found nothing
        self._acted_ns: dict[str, int] = {}  # by address: when flows to it were last planned
        self._look_ns = 0  # not before this are all rates looked at
        self._to_check: set[str] = set()  # destinations where flows went to a rail that was never full

    @property
    def needed(self) -> bool:
        """Whether the policy has a rule about flows at all."""
        return bool(self._rules)

    def facts(self) -> dict[str, Any]:
        """What was left out, for the operator."""
        return {"flows_skipped": self.skipped, "flows_forgotten": self.flows.forgotten}

    def take(self, signal: Signal, now: int) -> None:
        if not self._rules:
            return
        if isinstance(signal, TcpFlow):
            if not signal.namespace:  # what leaves another network namespace may have other addresses at our egress
                self.flows.take(signal)
        elif isinstance(signal, PathDelay):
            self.rails.take(signal)

    def decide(
        self, paths: Mapping[Path, PathHealth], groups: Iterable[Group], now: int, overrides: Overrides = NONE
    ) -> FlowPlan:
        """What is wanted of flows now.

        Parameters
        ----------
        paths : mapping of Path to PathHealth
            After `observe` and `advance`, with readings of all rules.
        groups : iterable of Group
            With the paths that run over their members.
        overrides : Overrides
            The operator's orders.
        """
        if not self._rules:
            return FlowPlan()
        known = {group.target: group for group in groups}
        self._observe(paths, known.values(), now)
        lives = partial(self.flows.lives, now=now)
        acts = list(self.held.releases(self._avoided, paths, known, lives, now, overrides))
        spreads = bool(self._spreads) and now >= self._even_ns
        if spreads:
            self._even_ns = now + EVEN_NS
        acting = spreads or bool(self._to_check) or any(each.acting for each in self._avoided.values())
        if acting and (spreads or now >= self._look_ns):
            self._look_ns = now + LOOK_NS
            acts += self._acts(paths, known, overrides, spreads, now)
        busy = {key for act in acts for key in act.flows}
        return FlowPlan(tuple(acts), tuple(self.held.renewals(now, busy)))

    def carried_out(self, act: FlowAct, now: int, refused: Mapping[FlowKey, str] | None = None) -> None:
        """Take note that an act was carried out, but for the flows that were refused."""
        self.held.note(act, refused or {}, now)
        # What the kernel refuses it refuses again: while the network is healthy there is no hurry.
        again = lease_ns(self.policy, act.troubles[0][1]) if refused and self._is_spread(act) else SETTLE_NS
        self._settle(act, now + again, bool(refused))

    def pretended(self, act: FlowAct, now: int) -> None:
        """Take note that an act was only told (a dry run): it is told again when a lease would have ended."""
        self._settle(act, now + max(lease_ns(self.policy, number) for _, number in act.troubles), True)

    def renewed(self, renewal: Renewal, missing: Iterable[FlowKey]) -> None:
        """Take note that leases were renewed, but for those that were there no more."""
        self.held.renewed(renewal, missing)

    def _is_spread(self, act: FlowAct) -> bool:
        return act.kind == "pin" and act.troubles[0][1] in self._spreads

    def _settle(self, act: FlowAct, until_ns: int, vain: bool) -> None:
        """Decide nothing before this for these destinations; what is urgent only if this act changed not all of it."""
        if act.kind in ("pin", "relabel"):
            for path, _ in act.troubles:
                self._settled_ns[path.destination, False] = until_ns
                if vain and act.urgent:
                    self._settled_ns[path.destination, True] = until_ns

    def _observe(self, paths: Mapping[Path, PathHealth], groups: Iterable[Group], now: int) -> None:
        """Bring what is avoided up to date; a path of no managed group is not."""
        before, self._avoided = self._avoided, {}
        for path in {path for group in groups for _, path in group.paths if path in paths}:
            for number in self._rules:
                known = before.get((path, number))
                after = returns.observe(self.policy, number, known, paths[path], now)
                if after is None:
                    continue
                self._avoided[path, number] = after
                if after.acting and not (known is not None and known.acting):
                    self._vain_ns.pop((path.destination, False), None)
                if after.acting and after.failure and not (known is not None and known.acting and known.failure):
                    self._look_ns = now
                if after.state == "returning" and known is not None and known.state == "away":
                    self.held.returns((path, number))
                    self.rails.forget(place_of(path))

    def _acts(
        self,
        paths: Mapping[Path, PathHealth],
        groups: Mapping[Target, Group],
        overrides: Overrides,
        spreads: bool,
        now: int,
    ) -> Iterator[FlowAct]:
        """What is to be done, one act per destination: what shares its rails, both families, sees what it did.

        Who was planned longest ago comes first.
        """
        self.skipped = {target: why for target, group in groups.items() if (why := ambiguous(group))}
        rates: dict[str, list[FlowRate]] = {}  # by destination
        for flow in self.flows.rates(now):
            if flow.path is not None:
                rates.setdefault(flow.path.destination, []).append(flow)
        places = {
            (self._acted_ns.get(path.address, 0), path.address, group.target, path.destination)
            for group in groups.values()
            if group.target not in self.skipped and not overrides.held(group)
            for _, path in group.paths
        }
        planned: set[str] = set()
        for _, address, target, destination in sorted(places):
            if destination in planned:
                continue
            group = groups[target]
            drained = overrides.drained(group)
            ways = ways_of(group, address, lambda path: self._open(path, paths.get(path), now), self._failed, drained)
            here = tuple(self._where(flow, group, now) for flow in rates.get(destination, ()))
            act = self._first_act(group, ways, here, spreads, now)
            if act is not None:
                planned.add(destination)
                self._acted_ns[address] = now
                yield act

    def _first_act(
        self, group: Group, ways: tuple[Way, ...], here: tuple[FlowRate, ...], spreads: bool, now: int
    ) -> FlowAct | None:
        """What the first rule wants that has something to do: the next one sees what it did."""
        for number in self._rules:
            if number in self._spreads:
                if spreads and (act := self._spread(number, group, ways, here, now)) is not None:
                    return act
                continue
            troubles = tuple((way.path, number) for way in ways if self._acts_on((way.path, number), now))
            if not troubles:
                continue
            newest = max(troubles, key=lambda trouble: self._avoided[trouble].seen_ns)
            known = self._avoided[newest]
            why = f"{newest[0]}: {known.because}"
            act = self._act(Case(self.policy, number, group, ways, troubles, why, known.seen_ns, here, now))
            if act is not None:
                return act
        return None

    def _spread(
        self, number: int, group: Group, ways: tuple[Way, ...], here: tuple[FlowRate, ...], now: int
    ) -> FlowAct | None:
        """What a rule that spreads wants, once it has wanted something for long enough."""
        scope = self.policy.rules[number].scope
        chosen = tuple(way for way in ways if way.open and way.member.weight and scope.covers(way.path))
        if len(chosen) < 2:
            return None
        which = group.target, chosen[0].path.address, number
        seen_ns = max((flow.looked_ns for flow in here), default=0)
        troubles = tuple((way.path, number) for way in chosen)
        new = (flow for flow in self.flows.new(now) if flow.path in {way.path for way in chosen})
        case = Case(self.policy, number, group, chosen, troubles, "", seen_ns, (*here, *new), now)
        if not self._settled(case):
            return None
        act = spread_act(case, self.held)
        if act is None:
            self._uneven_ns.pop(which, None)
            return None
        since = self._uneven_ns.setdefault(which, now)
        waits = max(UNEVEN_NS, hold_down.drawn(self.policy, chosen[0].path, since))
        return act if now - since >= waits else None

    def _where(self, flow: FlowRate, group: Group, now: int) -> FlowRate:
        """A flow that was just moved is where it was moved to, as long as it was not looked at there."""
        held = self.held.get("pin", flow.key)
        if held is None or held.pin is None or held.target != group.target:
            return flow
        if now - held.since_ns > SETTLE_NS and flow.looked_ns > held.since_ns:
            return flow
        moved_to = next((m.interface for m in group.members if m.nexthop_id == held.pin.nexthop_id), flow.interface)
        return replace(flow, interface=moved_to)

    def _acts_on(self, trouble: Trouble, now: int) -> bool:
        """Whether a rule holds, or held a moment ago and what was done is to be checked once."""
        known, destination = self._avoided.get(trouble), trouble[0].destination
        checks = destination in self._to_check and now >= self._settled_ns.get((destination, False), 0)
        return known is not None and (known.acting or (checks and known.state == "away"))

    def _open(self, path: Path, known: PathHealth | None, now: int) -> bool:
        if known is None or known.state != "healthy" or not known.measured or health.stale(self.policy, known, now):
            return False
        avoided = (self._avoided.get((path, number)) for number in self._rules)
        return all(each is None or each.state == "over" for each in avoided)

    def _failed(self, path: Path) -> bool:
        avoided = (self._avoided.get((path, number)) for number in self._rules)
        return any(each is not None and each.acting and each.failure for each in avoided)

    def _act(self, case: Case) -> FlowAct | None:
        if case.rule.then.kind == "relabel":
            return label_act(case, self.held, self._seed) if self._patient(case) else None
        case = replace(case, urgent=stranded(case, self.held) and self._settled(case, urgent=True))
        if not case.urgent and not (self._settled(case) and self._patient(case)):
            return None
        rails = self.rails.estimate(case.flows, [place_of(way.path) for way in case.ways], case.now)
        if not case.urgent and not self._sure(case, rails):
            return None
        self._to_check.discard(case.destination)
        act = pin_act(case, rails, self.held)
        if act is None:  # a moment later the same search would find no more
            self._vain_ns[case.destination, case.urgent] = case.now + SETTLE_NS
        if act is not None and any(way.open and rails[place_of(way.path)].how == "assumed" for way in case.ways):
            self._to_check.add(case.destination)
        return act

    # ---- damping ----

    def _settled(self, case: Case, urgent: bool = False) -> bool:
        """Whether rates of after the last act are known, and whether the last search was not in vain just now."""
        key = case.destination, urgent
        return case.now >= max(self._settled_ns.get(key, 0), self._vain_ns.get(key, 0))

    def _patient(self, case: Case) -> bool:
        """Whether every bad path has waited the time that this host has drawn."""
        return all(
            case.now - self._avoided[path, number].since_ns
            >= hold_down.drawn(self.policy, path, self._avoided[path, number].since_ns)
            for path, number in case.troubles
        )

    def _sure(self, case: Case, rails: Mapping[tuple[str, str], RailRate]) -> bool:
        """Whether it is known what the bad paths carry: every connection was looked at since, and the sum is steady."""
        for trouble in case.troubles:
            since, rail = self._avoided[trouble].since_ns, rails[place_of(trouble[0])]
            if case.now - since < STEADY_NS and not (rail.steady and rail.looked_ns - since >= MEMORY_NS // 2):
                return False
        return True
