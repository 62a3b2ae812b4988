"""`swerve steer status`: what is in force and why. Changes nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from pytools import directories
from pytools.cli_options import Options, common
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.signals import PathState, encode
from steering import elapsed
from steering.acting import bond_ports, journal
from steering.acting.journal import Entry
from steering.acting.lock import holder
from steering.cli_types import clock, flow_text, weights_text
from steering.control import client, kept_orders, managed, orders
from steering.control.requests import Status
from steering.control.stop_file import StopFile
from steering.deciding.overrides import Override
from steering.guarding import confirming
from steering.plan import FlowKey, title

_STATES_S: Final = 1.3  # at most: a controller repeats every state once a second, and says of how many paths
_ANSWER_S: Final = 2.0
_LABELS: Final = 20  # shown
_CALLS: Final = ("waiting", "calls", "received", "failed", "given_up")


@click.command(epilog="Example: swerve steer status -n swerve-x-h1 -j")
@common(follows=False)
def status(options: Options) -> None:
    """Show who steers, what is in force and what is wanted, orders, and the state of each path."""
    facts = facts_of(options.netns)
    if options.json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for line in lines_of(facts):
        click.echo(line)


def facts_of(name: str | None, with_paths: bool = True) -> dict[str, Any]:
    """What is known of the controller of an instance, and of what is in force.

    Raises
    ------
    SwerveError
        If it cannot be read.
    """
    folder = directories.state_dir(name)
    held = holder(folder / journal.LOCK_FILE)
    kept_until_ns = (held or {}).get("kept_until_ns")
    if kept_until_ns is not None:
        held = None  # the controller has ended: its guardian waits for another
    facts: dict[str, Any] = {"instance": directories.instance(name), "running": held is not None}
    if kept_until_ns is not None:
        facts["kept_for_s"] = round(max(0, kept_until_ns - time.monotonic_ns()) / 1e9, 1)
    facts |= {key: held[key] for key in ("pid", "apply", "policy", "policy_hash") if held and key in held}
    facts["running_elsewhere"] = [] if held else _running(folder.parent)
    if held:
        facts["policy_changed"] = _changed(held)
        facts["confirm"] = _confirm(folder, held)
    facts["frozen"] = StopFile(folder).why()
    facts |= controller_of(folder) if held else _stored(folder)
    contents = journal.read(folder / journal.FILE)
    with netns.inside(name):
        if not held:
            facts["bond_count"] = len(bond_ports.load(directories.bond_ports(name), netns.scope()))
            facts["hooks"] = _told(directories.hook_calls(name))
        facts["in_force"], facts["rto_min_ms"] = _in_force(list(contents.in_force(netns.scope()).values()))
    facts["torn_lines"] = contents.torn
    if with_paths:
        facts["paths"] = path_states(name, facts.pop("path_count", None)) if held else []
    return facts


def _told(file: Path) -> list[dict[str, Any]]:
    """Hooks that a controller which is gone has told of something that is not over."""
    if not file.exists():
        return []
    from steering.acting.hook_calls import HookCalls

    calls = HookCalls(file, netns.scope(), lambda _: None)
    calls.load()
    return [{"hook": name, "open": 1} for name in sorted({each.hook.name for each in calls.deliveries.values()})]


def _in_force(acts: list[Entry]) -> tuple[list[dict[str, Any]], int | None]:
    """Acts and minimum RTO that are in force in the namespace that we are in: none without a rule of ours."""
    from pytools.kernel.leftovers import FAMILIES, is_our_rule
    from pytools.kernel.netlink.routes import rto_min_of
    from pytools.kernel.netlink.routing import PROTOCOL, Netlink

    with Netlink() as netlink:
        rules = [rule for family in FAMILIES for rule in netlink.rules(family) if is_our_rule(rule)]
        if not rules:
            return [], None
        routes = [each for rule in rules for each in netlink.routes(rule.family, rule.table, PROTOCOL)]
    rto_min_ms = min((ms for each in routes if (ms := rto_min_of(each.body)) is not None), default=None)
    return [
        {
            "target": each.target,
            "original": dict(each.original),
            "kernel": dict(each.after),
            "members": {str(member.nexthop_id): member.name for member in each.members},
            "because": each.because,
            "under": each.under,
            "since_unix_ns": each.unix_ns,
        }
        for each in acts
    ], rto_min_ms


def _changed(held: dict[str, Any]) -> bool | None:
    """Whether the policy file is another one than was read; None when that cannot be told."""
    if not held.get("policy_hash"):
        return None
    with contextlib.suppress(OSError):
        now = hashlib.sha256(Path(str(held.get("policy"))).read_bytes()).hexdigest()
        return now != str(held["policy_hash"])
    return None


def _confirm(folder: Path, held: dict[str, Any]) -> dict[str, Any] | None:
    deadline = confirming.pending(held)
    if deadline is None:
        return None
    left_s = round((deadline.at_ns - elapsed.now_ns()) / 1e9, 1)
    return {"state": confirming.verdict(folder / journal.FILE, deadline.run), "left_s": max(0.0, left_s)}


def controller_of(folder: Path) -> dict[str, Any]:
    """What only the controller knows."""
    try:
        return {"answers": True} | _stored(folder) | client.ask(folder, Status(), _ANSWER_S).facts
    except SwerveError as error:
        return {"answers": False, "silence": str(error)} | _stored(folder)


def _stored(folder: Path) -> dict[str, Any]:
    try:
        now = elapsed.moment()
        found = kept_orders.load(folder, now)
    except SwerveError as error:
        return {"orders": [], "orders_unreadable": str(error)}
    return {"orders": [kept_orders.as_json(order, now) for order in found.orders]}


def path_states(name: str | None, count: int | None) -> list[dict[str, Any]]:
    """What the controller thinks of each path, of so many if it is known; empty when there is no agent to ask."""
    from pytools.ipc.client import Client

    found: dict[str, dict[str, Any]] = {}
    try:
        with Client(directories.agent_socket(name), frozenset({"path_state"})) as agent:
            deadline = time.monotonic() + _STATES_S
            while len(found) != count and (left := deadline - time.monotonic()) > 0:
                state = agent.next(left)
                if isinstance(state, PathState):
                    found[str(state.path)] = json.loads(encode(state))
    except SwerveError:
        return []
    return list(found.values())


def lines_of(facts: dict[str, Any]) -> Iterator[str]:
    """The facts for people."""
    yield from about_the_controller(facts)
    if facts["frozen"]:
        yield f"FROZEN, nothing is changed: {facts['frozen']}"
    for raw in facts["orders"]:
        order = msgspec.convert({name: value for name, value in raw.items() if name != "left_s"}, Override)
        left_ns = order.left_ns(elapsed.moment())
        until = "" if left_ns is None else f" until {clock(time.time_ns() + left_ns)}"
        yield f"ordered by {order.by or '?'}: {orders.text_of(order)}{until}"
    if "orders_unreadable" in facts:
        yield f"orders: {facts['orders_unreadable']}"
    if facts.get("managed"):
        yield from managed.lines(facts["managed"])
    yield from _rto_min(facts)
    yield from _weights(facts)
    yield from _standbys(facts)
    yield from _holds(facts)
    for target, why in facts.get("flows_skipped", {}).items():
        yield f"flows of {title(target)} stay as they are: {why}"
    if forgotten := facts.get("flows_forgotten", 0):
        yield f"{forgotten} connections were forgotten to make room for others"
    for pin in facts.get("pins", []):
        by_hand = ", by hand" if pin["by_hand"] else ""
        via = pin["via"] or f"nexthop {pin['nexthop_id']}"
        yield f"pinned: {flow_text(FlowKey(**pin['flow']))} to {via} of {pin['target']}{by_hand}"
    more = facts.get("pin_count", 0) - len(facts.get("pins", []))
    if more > 0:
        yield f"and {more} more pins"
    labels = facts.get("labels", [])
    for label in labels[:_LABELS]:
        yield f"relabelled: {flow_text(FlowKey(**label['flow']))} has flow label {label['label']:#07x}"
    more = facts.get("label_count", 0) - len(labels[:_LABELS])
    if more > 0:
        yield f"and {more} more labels"
    yield from _ports(facts)
    yield from _bonds(facts)
    yield from _hooks(facts)
    for state in facts["paths"]:
        path = state["path"]
        weights = f"weight {state['weight_actual']}, wanted {state['weight_wanted']}"
        name = f"{path['source']}>{path['destination']} dev {path['interface']}"
        yield f"{name}: {state['state']}, {weights}: {state['reason']}"
    yield from _left_out(facts)


def _rto_min(facts: dict[str, Any]) -> Iterator[str]:
    """An owner's route may have one of its own, shorter than ours."""
    now, wanted = facts.get("rto_min_ms"), facts.get("rto_min_wanted_ms")
    if now is not None:
        yield f"minimum RTO of managed routes: {now} ms"
    elif wanted is not None:
        yield f"minimum RTO of managed routes: {wanted} ms is wanted{'' if facts.get('apply') else ' (dry run)'}"
    elif why := facts.get("rto_min_missing"):
        yield f"no minimum RTO is set: {why}"


def _standbys(facts: dict[str, Any]) -> Iterator[str]:
    if why := facts.get("standbys_missing"):
        yield f"no fast reroute: {why}"
    elif "standbys" in facts:
        yield f"fast reroute: {facts['standbys']} paths have a stand-by"


def _holds(facts: dict[str, Any]) -> Iterator[str]:
    if "holds_wanted" not in facts:
        return
    wanted = facts["holds_wanted"]
    how = (
        f"can wait along {facts['holds']} of {wanted} paths"
        if facts.get("apply")
        else f"would wait along {wanted} paths"
    )
    yield f"holds: packets {how}"
    for path, why in facts["holds_refused"].items():
        yield f"packets along {path} are not held: {why}"


def _weights(facts: dict[str, Any]) -> Iterator[str]:
    for each in facts["in_force"]:
        wanted = facts.get("wanted", {}).get(each["target"])
        pending = f", wanted {weights_text(wanted)}" if wanted else ""
        now, original = (_named(each[which], each["members"]) for which in ("kernel", "original"))
        yield (
            f"{title(each['target'])}: {weights_text(now)}{pending}"
            f" (originally {weights_text(original)}) because {each['because']} [{each['under']}]"
        )
    if not facts["in_force"]:
        others = (
            ("pin_count", "pins"),
            ("label_count", "labels"),
            ("bond_count", "ports of bonds"),
            ("standbys", "stand-bys"),
            ("holds", "holds"),
        )
        kept = [f"{facts[name]} {what}" for name, what in others if facts.get(name)]
        kept += ["the minimum RTO"] if facts.get("rto_min_ms") is not None else []
        yield f"no weights of ours are in force, but {', '.join(kept)}" if kept else "nothing of ours is in force"
    if facts["running"] and not facts.get("apply"):
        for target, wanted in facts.get("wanted", {}).items():
            yield f"{title(target)}: {weights_text(wanted)} is wanted (dry run)"


def _ports(facts: dict[str, Any]) -> Iterator[str]:
    if why := facts.get("ports_missing"):
        yield f"no ports are chosen: {why}"
    for each in facts.get("ports", []):
        avoided = f"new connections avoid {', '.join(each['avoided'])}, " if each["avoided"] else ""
        yield f"{each['peer']}: {avoided}the way of {each['known']} local ports is known"
    if why := facts.get("subflows_missing"):
        yield f"no MPTCP subflows are replaced: {why}"
    elif found := facts.get("subflows"):
        yield f"MPTCP: the way of {found['known']} of {found['flows']} subflows is known"
    if why := facts.get("labels_missing"):
        yield f"no flow labels are chosen: {why}"
    for each in facts.get("label_ways", []):
        avoided = f"live ones avoid {', '.join(each['avoided'])}, " if each["avoided"] else ""
        known = f"the way of {each['known']} is known, a label that moves it of {each['movable']}"
        yield f"{each['address']}: {avoided}{each['flows']} connections: {known}"
    for what in ("port", "label"):
        if counts := {name: count for name, count in facts.get(f"{what}_counts", {}).items() if count}:
            yield f"{what}s: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())


def _bonds(facts: dict[str, Any]) -> Iterator[str]:
    for each in facts.get("bonds", []):
        former = f" instead of {each['former']} because {each['because']}" if each["former"] else ""
        held = f"; held: {each['held']}" if each["held"] else ""
        yield f"{each['bond']}: {each['active']} is active{former}, {each['paths']} paths over it{held}"


def _hooks(facts: dict[str, Any]) -> Iterator[str]:
    for each in facts.get("hooks", []):
        counts = ", ".join(f"{each[name]} {name.replace('_', ' ')}" for name in _CALLS if each.get(name))
        limited = "; its limit is reached" if each.get("limited") else ""
        failure = f"; failed: {each['failure']}" if each.get("failure") else ""
        yield f"hook {each['hook']}: {each['open']} open{', ' * bool(counts)}{counts}{limited}{failure}"
    if lost := facts.get("notices_lost"):
        yield f"hooks missed {lost} occurrences: too many at once"


def _left_out(facts: dict[str, Any]) -> Iterator[str]:
    if facts.get("signals_refused"):
        yield f"{facts['signals_refused']} signals were refused: invalid, late, or of one path too many"
    if facts.get("signals_missed"):
        urgent = facts["signals_missed_urgent"]
        yield f"{facts['signals_missed']} signals were missed, {urgent} of them urgent: it reads too slowly"
    if facts["torn_lines"]:
        yield f"{facts['torn_lines']} torn lines in the journal"


def _running(folder: Path) -> list[str]:
    return sorted(lock.parent.name for lock in folder.glob(f"*/{journal.LOCK_FILE}") if holder(lock) is not None)


def _named(weights: dict[int, int], members: dict[str, str]) -> dict[str, int]:
    return {members.get(str(nexthop), str(nexthop)): weight for nexthop, weight in weights.items()}


def about_the_controller(facts: dict[str, Any]) -> Iterator[str]:
    """Who steers, in lines."""
    if not facts["running"]:
        beside = ", ".join(
            f"swerve steer status{directories.option_of(name)}" for name in facts.get("running_elsewhere", ())
        )
        yield f"not running (instance {facts['instance']}" + (f"; but see: {beside})" if beside else ")")
        if "kept_for_s" in facts:
            yield f"what is in force is kept for a successor, for {facts['kept_for_s']:g} s at most"
        return
    mode = "applies" if facts.get("apply") else "dry run"
    changed = ", which has changed since: restart to use it" if facts["policy_changed"] else ""
    guardian = f", guardian process {facts['guardian_pid']}" if facts.get("guardian_pid") else ""
    if guardian and not facts.get("guarded", True):
        guardian += ", which is not ready: until then nothing is changed"
    yield f"running: process {facts.get('pid', '?')}, {mode}, policy {facts.get('policy', '?')}{changed}{guardian}"
    if not facts["answers"]:
        yield f"it does not answer: {facts['silence']}"
    confirm = facts["confirm"]
    if confirm and confirm["state"] == "open":
        by = f"swerve steer confirm{directories.option_of(facts['instance'])}"
        yield f"TO BE CONFIRMED within {confirm['left_s']:g} s, or everything is undone: {by}"
    elif confirm:
        yield f"this run was {confirm['state']}"
