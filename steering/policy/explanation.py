"""A policy in words: what it touches, when each rule holds, what it moves, and how a path comes back. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytools import directories
from pytools.units import duration_text, rate_text
from steering.policy.actions import WEIGHT_KINDS, Alert, AroundWays, Drain, Hold, Pin, PinFlows, Relabel, Shift, Spread
from steering.policy.conditions import leaves
from steering.policy.conditions_text import clear_text, condition_text
from steering.policy.hooks import Exec, Hook, Kubernetes, Slurm, Taint, Webhook, is_loopback
from steering.policy.model import Manage, Policy, Rule, Safety
from steering.policy.scope import Scope

_WEIGHTS_MOVE: Final = "moves new flows, and live ones whose hash then falls to another hop"


def explain(policy: Policy) -> str:
    """The policy in words, one sentence a line."""
    lines = [*_manage(policy.manage), *_safety(policy.safety), *_ways(policy), *_hooks(policy), *_order(policy)]
    for number, rule in enumerate(policy.rules, 1):
        lines += _rule(number, rule)
    return "\n".join(lines)


def _order(policy: Policy) -> Iterator[str]:
    if not policy.rules:
        return
    if all(rule.then.kind in WEIGHT_KINDS for rule in policy.rules):
        yield "The first of these rules that holds decides:"
    else:
        yield (
            "Of the rules that move weights the first that holds decides; alerts and rules about flows act beside them:"
        )


def _ways(policy: Policy) -> Iterator[str]:
    if (ports := policy.ports) is not None:
        yield (
            f"{_avoided(ports)}: new IPv4 TCP connections take one of up to {ports.keep} local ports per destination "
            f"that lead elsewhere (moves no live connection; {_lapses(ports)})."
        )
        yield f"At most every {duration_text(ports.every)} a SYN that dies at a router finds out the way of a port."
        if ports.mptcp:
            yield (
                "MPTCP connections over IPv4 with a subflow on them get one from such a port, and lose the other "
                "(stays so; only where net.mptcp.pm_type is 1)."
            )
    if (labels := policy.labels) is not None:
        yield f"{_avoided(labels)}: live IPv6 TCP connections on them get another flow label ({_lapses(labels)})."
        yield (
            f"At most every {duration_text(labels.every)} a segment that dies at a router finds out the way of a label."
        )
    if (bonds := policy.bonds) is not None:
        yield (
            "When a rule that moves weights holds on all paths over an active-backup bond, to two peers or with its "
            "neighbour failed, another port of the bond becomes active (moves all its packets; undone at the end)."
        )
        yield (
            f"If no path is better {duration_text(bonds.trial)} later, the former port is active again; a port that "
            f"was left waits {duration_text(bonds.retry_after)} or longer."
        )


def _hooks(policy: Policy) -> Iterator[str]:
    for name, hook in policy.hooks.items():
        yield (
            f"Hook {name} {_called(hook)} (counts for {duration_text(hook.lease)} and is repeated; killed after "
            f"{duration_text(hook.timeout)}, tried {_times(hook.tries)}; at most {_times(hook.limit.count)} in "
            f"{duration_text(hook.limit.per)})."
        )


def _called(hook: Hook) -> str:
    match hook.options:
        case Webhook() as web:
            return f"posts the event to {web.url}"
        case Slurm() as slurm:
            return f"drains {_node(slurm.node)} in Slurm, and resumes it when all is well"
        case Kubernetes(taint=Taint() as taint) as cluster:
            return f"taints {_node(cluster.node)} {taint.key}=swerve:{taint.effect} until all is well"
        case Kubernetes() as cluster:
            return f"sets condition {cluster.condition} of {_node(cluster.node)} until all is well"
        case Exec() as run:
            return f"runs {' '.join((run.program, *run.arguments))}"


def _node(name: str | None) -> str:
    return f"node {name}" if name else "this host's node"


def _avoided(wanted: AroundWays) -> str:
    return (
        f"Ways behind one nexthop that are {' or '.join(wanted.avoid)} are avoided until they have been good for "
        f"{duration_text(wanted.dwell)}"
    )


def _lapses(wanted: AroundWays) -> str:
    return f"lapses {duration_text(wanted.lease)} after the last renewal"


def _manage(manage: Manage) -> list[str]:
    inside = ", ".join(manage.destinations)
    lines = [f"Steers packets to {inside} by routes of its own (table {manage.table} and up); writes nobody else's."]
    if manage.alternatives:
        hops = ", ".join(f"{hop.via} dev {hop.dev}" for hop in manage.alternatives)
        lines.append(f"When every hop that the routes have is left, these carry the packets: {hops}.")
    if manage.vrfs:
        lines.append(f"Routes of these VRFs are steered as well: {', '.join(manage.vrfs)}.")
    if manage.rto_min is not None:
        lines.append(
            f"These routes are in force from the start, with a minimum TCP retransmission timeout of "
            f"{duration_text(manage.rto_min)} (moves nothing; when undone, open connections keep the timeout that they "
            "have, and new ones get the kernel's)."
        )
    return lines


def _reroute(safety: Safety) -> str:
    if not safety.reroute_hold:
        return "The kernel moves no packets by itself when a path falls silent."
    hold = duration_text(safety.reroute_hold)
    return f"Packets leave a silent path at once, by the kernel itself, until it has answered for {hold}."


def _dead(safety: Safety) -> str:
    later = f" after {duration_text(safety.takeover)}, unless a successor has taken over" if safety.takeover else ""
    return f"If the controller dies or hangs for {duration_text(safety.lease)}, everything is undone{later}."


def _safety(safety: Safety) -> list[str]:
    moves = safety.max_moves_per_flow
    lines = [
        f"At most {safety.max_drained_share:.0%} of a group's weight is taken away at once; "
        "a group keeps at least one healthy path; when every path looks bad nothing is changed.",
        f"A path without signals for {duration_text(safety.stale_after)} freezes its group; after "
        f"{duration_text(safety.baseline_after)} the group gets its original weights back, but for a path that was "
        f"left and was dead: it stays left for {duration_text(safety.dead_baseline_after)} while another one remains.",
        _reroute(safety),
        _dead(safety),
        f"One flow is pinned at most {_times(moves.count)} in {duration_text(moves.per)}; off a failed path at once.",
    ]
    if safety.herd.jitter or safety.herd.fraction < 1:
        lines.append(
            f"So that hosts do not move together, an act waits up to {duration_text(safety.herd.jitter)} and moves "
            f"{safety.herd.fraction:.0%} of the flows in question; a failure is not waited with."
        )
    if safety.herd.jitter:
        lines.append(
            "Nor do they come back together: for weights, each draws how long a path must be good before its first "
            "step, from the time named below up to twice that."
        )
    return lines


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _rule(number: int, rule: Rule) -> list[str]:
    where = _scope(rule.scope)
    if rule.when is None:
        how = "measured" if rule.then.hold is not None else "healthy"
        return [f"{number}. {rule.name}: on a path{where}, while it is {how}, {_act(rule)}."]
    if rule.then.hold is not None:
        until = f"until {duration_text(rule.then.hold.dwell)} after"
        return [f"{number}. {rule.name}: on a path{where}, when {condition_text(rule.when)}, {until}, {_act(rule)}."]
    lines = [f"{number}. {rule.name}: on a path{where}, when {condition_text(rule.when)}, {_act(rule)}."]
    back = rule.return_
    if rule.then.notify:
        lines.append(
            f"   Called then: {', '.join(rule.then.notify)}; and again when the path has been good for "
            f"{duration_text(back.dwell)} or, after relapses, up to {duration_text(back.max_dwell)}"
            f"{'' if rule.then.kind == 'alert' else ', and is back'}."
        )
    if rule.then.kind == "alert":
        return lines
    often = f" and {back.rise} good measurements in a row" if back.rise > 1 else ""
    lines += [
        f"   It is good again once {clear_text(rule.when)}. After {duration_text(back.dwell)} of that{often} "
        f"{_steps_back(rule)}.",
        f"   Each relapse doubles the wait (at most {duration_text(back.max_dwell)}), and the next try "
        f"comes no sooner than {duration_text(back.retry_after)} after the last.",
    ]
    if all(leaf.by_traffic for leaf in leaves(rule.when)):
        lines.append("   Traffic alone shows this: without any on the path, it is good when its probes are answered.")
    return lines


def _steps_back(rule: Rule) -> str:
    back, weights = rule.return_, rule.then.kind in WEIGHT_KINDS
    each, shift = duration_text(back.step), rule.then.shift
    if shift is not None and shift.step < 1:
        until = "" if len(back.steps) == 1 else f", stopping at {', '.join(f'{step:.0%}' for step in back.steps[:-1])}"
        return f"it gets its weight back, at most {shift.step:.0%} at a time{until}, each step for {each}"
    if len(back.steps) == 1:
        what = "it gets its whole weight back, and" if weights else "all of the flows are let go, and it"
        return f"{what} counts as healthy {each} later"
    share = ", ".join(f"{step:.0%}" for step in back.steps)
    if weights:
        return f"it gets {share} of its weight back, each for {each}"
    return f"{share} of the flows are let go as they are routed, each for {each}"


def _act(rule: Rule) -> str:
    match rule.then.action:
        case Drain():
            return f"it is taken out of its group ({_WEIGHTS_MOVE})"
        case Shift() as shift:
            return f"{_shift(shift)}{_steps(shift)} ({_WEIGHTS_MOVE})"
        case Hold() as hold:
            return _hold(hold)
        case Alert():
            return "it is said (moves nothing)"
        case Pin() | Spread() | Relabel() as flows:
            return _flow_act(flows, rule.scope)


def _flow_act(action: Pin | Spread | Relabel, scope: Scope) -> str:
    flows, lapses = _flows(action.flows, scope), f"lapses {duration_text(action.lease)} after the last renewal"
    match action:
        case Pin():
            return (
                f"{flows} are sent over other nexthops as long as the slowest of them gains {action.gain:.0%} (moves "
                f"these flows only, at once; {lapses})"
            )
        case Spread():
            return (
                f"{flows} that move together are placed evenly over the nexthops by their weights, if that relieves "
                f"the busiest of {action.gain:.0%} (moves these flows only, at once; {lapses})"
            )
        case Relabel():
            return (
                f"{flows} get another IPv6 flow label (moves these flows only, within the fabric where it hashes "
                f"labels; {lapses})"
            )


def _hold(hold: Hold) -> str:
    fq = "fq is put on its interface meanwhile" if hold.qdisc == "fq" else "only where its interface has fq"
    return (
        f"packets wait at this host, at most {duration_text(hold.longest)}, while they would queue for more than "
        f"{duration_text(hold.threshold)}; {rate_text(hold.floor)} per destination always pass (moves nothing; {fq}; "
        f"lapses {duration_text(hold.fresh)} after the last measurement)"
    )


def _shift(shift: Shift) -> str:
    if shift.by == "capacity":
        return "the weights become proportional to what each path was measured to carry"
    if shift.by == "headroom":
        return "the weights become proportional to what each path was measured to have to spare"
    return f"{shift.share:.0%} of its weight stays on it" if shift.share else "it is taken out of its group"


def _steps(shift: Shift) -> str:
    if shift.step == 1:
        return ""
    return f", at most {shift.step:.0%} of the original weight in one act, {duration_text(shift.settle)} between two"


def _flows(flows: PinFlows, scope: Scope) -> str:
    chosen = []
    if scope.flows.protocol != "any":
        chosen.append(scope.flows.protocol.upper())
    chosen += [
        f"{name} {', '.join(map(str, values))}"
        for name, values in (
            ("to port", scope.flows.remote_port),
            ("from port", scope.flows.local_port),
            ("to", scope.flows.remote),
            ("of", scope.processes),
            ("of control group", scope.cgroups),
        )
        if values
    ]
    which = f" ({', '.join(chosen)})" if chosen else ""
    return f"up to {flows.at_most} live flows{which} of {rate_text(flows.min_rate)} or more"


def _scope(scope: Scope) -> str:
    limits = [
        f"{name} {' or '.join(values)}"
        for name, values in (
            ("named", scope.paths),
            ("to", scope.destinations),
            ("by", scope.interfaces),
            ("via", scope.nexthops),
        )
        if values
    ]
    return f" {' '.join(limits)}" if limits else ""


def notes(policy: Policy) -> list[str]:
    """What is worth a thought about the rules that act on load, one line each. Failures have to act at once."""
    plain = [
        f"hook {name}: {hook.webhook.url} is not encrypted: who is on the way can read and forge what is sent"
        for name, hook in policy.hooks.items()
        if hook.webhook is not None and hook.webhook.url.startswith("http:") and not is_loopback(hook.webhook.url)
    ]
    return plain + [note for rule in policy.rules for note in _notes(policy, rule)]


def _notes(policy: Policy, rule: Rule) -> Iterator[str]:
    if rule.then.kind not in WEIGHT_KINDS or all(leaf.failure for leaf in leaves(rule.when)):
        return
    if rule.then.shift is None or rule.then.shift.step == 1:
        yield (
            f"{rule.name}: takes {_what(rule)} in one act; with many hosts on the same rails that oscillates "
            f"({directories.page('steering.md')}): shift: {{share: 0, step: 0.1, settle: 1s}} "
            "and safety.herd.jitter: 1s"
        )
    elif not policy.safety.herd.jitter:
        yield (
            f"{rule.name}: goes down in steps, but many hosts on the same rails take each of them at the same instant "
            f"({directories.page('steering.md')}): safety.herd.jitter: 1s"
        )


def _what(rule: Rule) -> str:
    shift = rule.then.shift
    if shift is None or shift.by == "share":
        return f"{1 - rule.then.share:.0%} of the weight" if rule.then.share else "the whole weight"
    return "all that it takes"
