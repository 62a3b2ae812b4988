"""`swerve steer`: run a controller; see and undo what controllers did."""

from __future__ import annotations

import datetime
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click

from pytools import places
from pytools.cli_options import Options, common
from pytools.errors import RefusedError, SwerveError
from pytools.kernel import netns
from pytools.kernel.netlink import Netlink
from pytools.signals import Act, PathState, encode
from steering import journal, settle
from steering.actuators.nexthops import NexthopGroups
from steering.lock import Lock, holder, holder_pidfd

_DEFAULT_POLICY: Final = Path("/etc/swerve/policy.yaml")
_STOP_S: Final = 10.0
_GUARDIAN_S: Final = 1.0  # a guardian may be undoing just now
_STATES_S: Final = 1.3  # a controller repeats every state once a second


@click.group(epilog="Example: swerve steer run --policy policy.yaml -n swerve-x-h1")
def steer() -> None:
    """Steer by a policy; see and undo what was done (docs/steering.md)."""


@steer.command(epilog="Example: swerve steer run --apply --policy /etc/swerve/policy.yaml")
@click.option("--apply", is_flag=True, help="Change weights. Without it: a dry run that only says what it would do.")
@click.option("--keep", is_flag=True, help="At the end leave the weights as they are, not as they were found.")
@click.option(
    "--policy",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=_DEFAULT_POLICY,
    show_default=True,
    help="The policy file.",
)
@common(follows=False)
def run(options: Options, apply: bool, keep: bool, file: Path) -> int:
    """Steer until interrupted: move weights off bad paths, and back when they recover.

    Needs a running agent, and waits for one. Every act is journalled before it is made; a guardian process undoes
    them all if this one dies or hangs.
    """
    from steering import policy_file
    from steering.controller import Controller
    from steering.controller import Options as How

    policy = policy_file.load(file)
    if options.netns:
        netns.enter(options.netns)

    def say(text: str) -> None:
        print(f"swerve steer: {text}", file=sys.stderr, flush=True)

    def report(act: Act) -> None:
        line = encode(act).decode() if options.json else _act_line(act)
        print(line, flush=True)

    how = How(options.netns, apply, keep, str(file.absolute()))
    controller = Controller(policy, how, say, report)
    return 130 if controller.run() == signal.SIGINT else 0


def _act_line(act: Act) -> str:
    moved = ", ".join(f"{name} {act.before.get(name, 0)}→{weight}" for name, weight in act.after.items())
    under = f" [{act.under}]" if act.under else ""
    return f"{_clock(act.unix_ns)} {act.outcome} {act.what}: {moved} because {act.because}{under}"


def _clock(unix_ns: int) -> str:
    return datetime.datetime.fromtimestamp(unix_ns / 1e9).astimezone().isoformat(timespec="milliseconds")


@steer.command(epilog="Example: swerve steer status -n swerve-x-h1 -j")
@common(follows=False)
def status(options: Options) -> None:
    """Who steers, what is in force, and what is thought of each path."""
    folder = places.state_dir(options.netns)
    facts: dict[str, Any] = {"instance": places.instance(options.netns)}
    held = holder(folder / journal.LOCK_FILE)
    facts["running"] = held is not None
    facts |= {key: held[key] for key in ("pid", "apply", "policy") if held and key in held}
    contents = journal.read(folder / journal.FILE)
    with netns.inside(options.netns), Netlink() as netlink:
        outstanding = contents.outstanding(journal.scope())
        groups = NexthopGroups(netlink)
        facts["in_force"] = [
            {
                "group_id": each.group_id,
                "original": dict(each.original),
                "kernel": dict(groups.weights(each.group_id) or ()),
                "because": each.last.because,
                "under": each.last.under,
                "since_unix_ns": each.last.unix_ns,
            }
            for each in outstanding.values()
        ]
    facts["torn_lines"] = contents.torn
    facts["paths"] = _states(options.netns) if held else []
    if options.json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    for line in _status_lines(facts):
        click.echo(line)


def _states(name: str | None) -> list[dict[str, Any]]:
    """What the controller thinks of each path; empty when there is no agent to ask."""
    from pytools.bus_client import Client

    found: dict[str, dict[str, Any]] = {}
    try:
        with Client(places.agent_socket(name), frozenset({"path_state"})) as client:
            deadline = time.monotonic() + _STATES_S
            while (left := deadline - time.monotonic()) > 0:
                state = client.next(left)
                if isinstance(state, PathState):
                    found[str(state.path)] = json.loads(encode(state))
    except SwerveError:
        return []
    return list(found.values())


def _status_lines(facts: dict[str, Any]) -> list[str]:
    if facts["running"]:
        mode = "applies" if facts.get("apply") else "dry run"
        lines = [f"running: process {facts.get('pid', '?')}, {mode}, policy {facts.get('policy', '?')}"]
    else:
        lines = ["not running"]
    for each in facts["in_force"]:
        lines.append(
            f"nexthop group {each['group_id']}: {_weights(each['kernel'])} (originally {_weights(each['original'])})"
            f" because {each['because']} [{each['under']}]"
        )
    if not facts["in_force"]:
        lines.append("all weights are the original ones")
    for state in facts["paths"]:
        path = state["path"]
        weights = f"weight {state['weight_actual']}, wanted {state['weight_wanted']}"
        lines.append(
            f"{path['source']}>{path['destination']} dev {path['interface']}: {state['state']}, {weights}: "
            f"{state['reason']}"
        )
    if facts["torn_lines"]:
        lines.append(f"{facts['torn_lines']} torn lines in the journal")
    return lines


def _weights(weights: dict[int, int]) -> str:
    return ", ".join(f"{nexthop} weight {weight}" for nexthop, weight in weights.items()) or "gone"


@steer.command(epilog="Example: swerve steer history -n swerve-x-h1 -c 20")
@common()
def history(options: Options) -> None:
    """What was done, when, and why: the journal, oldest first; with --count only the last entries."""
    if options.interval_s is not None:
        raise click.UsageError("history ends where the journal ends: it has no interval")
    contents = journal.read(places.state_dir(options.netns) / journal.FILE)
    for entry in contents.entries[-(options.count or 0) :]:
        if options.json:
            click.echo(json.dumps(asdict(entry), ensure_ascii=False))
            continue
        moved = f"{_weights(dict(entry.before))} → {_weights(dict(entry.after))}"
        under = f" [{entry.under}]" if entry.under else ""
        click.echo(
            f"{_clock(entry.unix_ns)} {entry.kind} by {entry.by}: group {entry.group_id}: {moved} "
            f"because {entry.because}{under}"
        )
    if contents.torn:
        click.echo(f"swerve steer: {contents.torn} torn lines were left out", err=True)


@steer.command(epilog="Example: swerve steer undo --stop -n swerve-x-h1")
@click.option("--stop", is_flag=True, help="Stop a running controller first.")
@common(follows=False)
def undo(options: Options, stop: bool) -> int:
    """Put the original weights back.

    Refused while a controller runs (it would steer again), unless it is told to stop it.
    """
    folder = places.state_dir(options.netns)
    if options.netns:
        netns.enter(options.netns)
    if not journal.read(folder / journal.FILE).entries:
        _say_undone(options, [])
        return 0
    stopped = stop and _stop_controller(folder / journal.LOCK_FILE)
    with (
        Lock(folder / journal.LOCK_FILE, _STOP_S if stopped else _GUARDIAN_S),
        journal.Journal(folder / journal.FILE) as log,
        Netlink() as netlink,
    ):
        settled = settle.settle(log, NexthopGroups(netlink), journal.scope(), "command")
    _say_undone(options, settled)
    return 1 if any(each.outcome.kind in ("failed", "uncertain") for each in settled) else 0


def _stop_controller(lock: Path) -> bool:
    """Ask the controller that holds the lock to end, and wait until it has; whether there was one."""
    pidfd = holder_pidfd(lock)
    if pidfd is None:
        return holder(lock) is not None
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(_STOP_S * 1e3):
            raise RefusedError("the controller did not stop", "its guardian undoes its acts if it hangs: try again")
    finally:
        os.close(pidfd)
    return True


def _say_undone(options: Options, settled: list[settle.Settled]) -> None:
    if options.json:
        for each in settled:
            facts = {"group_id": each.group_id, "outcome": each.outcome.kind, "why": each.outcome.why}
            click.echo(json.dumps(facts | {"weights": dict(each.outcome.weights)}))
        return
    for each in settled:
        click.echo(each.text)
    if not settled:
        click.echo("nothing to undo")
