"""`swerve steer off` and `undo`: delete our rules, or take the last acts back."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click

from pytools import directories, owned_files
from pytools.cli_options import Options, common
from pytools.errors import RefusedError
from pytools.kernel import netns
from pytools.kernel.bpf import attach
from pytools.kernel.leftovers import sweep, switch_off
from pytools.kernel.netlink.routing import Netlink
from pytools.units import SECOND
from steering import cli_types
from steering.acting import acts_file, bond_ports, hooks, journal, messages, rollback
from steering.acting.lock import holder, holder_pidfd
from steering.cli_types import Duration
from steering.commands import orders
from steering.control import client
from steering.control.requests import MOST_UNDONE, Undo
from steering.guarding import abandoned
from steering.guarding.takeover import Locks

_ANSWER_S: Final = 5.0
_RESTARTS: Final = ("restart", "try-restart")
# As in packaging/systemd/swerve-steer.service: with these it is not started again.
FOR_GOOD: Final = frozenset({"2", "3", "4", "5"})


def restart_expected(unit: str, environment: Mapping[str, str]) -> bool:
    """Whether a unit that has just ended will be started again; False where that cannot be told.

    Parameters
    ----------
    environment : mapping of str to str
        What systemd says of the end: `SERVICE_RESULT`, `EXIT_CODE`, `EXIT_STATUS`.
    """
    result = environment.get("SERVICE_RESULT", "")
    if result == "success":
        return _restart_queued(unit)
    if result in ("", "start-limit-hit"):
        return False
    return not (environment.get("EXIT_CODE") == "exited" and environment.get("EXIT_STATUS") in FOR_GOOD)


def _restart_queued(unit: str) -> bool:
    words = ["systemctl", "list-jobs", "--no-legend", "--plain", "--no-pager", unit]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    jobs = [line.split() for line in done.stdout.splitlines()]
    return any(len(job) >= 3 and job[1] == unit and job[2] in _RESTARTS for job in jobs)


_STOP_S: Final = 10.0
_HOOKS_S: Final = 12.0


@click.command(epilog="Example: swerve steer off -n swerve-x-h1")
@click.option(
    "--unless-restarted",
    "unit",
    metavar="UNIT",
    help="Do nothing if systemd restarts UNIT and a guardian keeps what is in force; for ExecStopPost=.",
)
@common(follows=False)
def off(options: Options, unit: str | None) -> int:
    """Delete the rules of steering at once, then end the controller and remove its objects from the kernel."""
    guarded = holder(directories.state_dir(options.netns) / journal.LOCK_FILE) is not None
    if unit and guarded and restart_expected(unit, os.environ):
        click.echo(f"{unit} is restarted: what is in force is kept for it")
        return 0
    return take_back(options, stop=True)


@click.command(epilog="Example: swerve steer guard")
@common(follows=False)
def guard(options: Options) -> int:
    """Undo what stays in force when a controller and its guardian are killed together, as with their container.

    Run it beside the controller, in another container. It checks twice a second whether one of the two is left. After
    SIGTERM it waits until both have ended. Do not use it with `steer run --keep`. Needs CAP_NET_ADMIN.
    """
    if options.netns:
        netns.enter(options.netns)
    return 130 if abandoned.guard(options.netns, abandoned.stopped) == signal.SIGINT else 0


@click.command(epilog="Example: swerve steer undo 1 --hold 30m -n swerve-x-h1")
@click.argument("number", type=click.IntRange(1, MOST_UNDONE), required=False)
@click.option(
    "--hold",
    "hold_ns",
    type=Duration(0),
    default=600 * SECOND,
    metavar="DURATION",
    help="With NUMBER, hold the targets for DURATION (default 10m; 0s: do not).",
)
@click.option("--stop", is_flag=True, help="Without NUMBER, stop a running controller first.")
@common(follows=False)
def undo(options: Options, number: int | None, hold_ns: int, stop: bool) -> int:
    """Restore the original weights; with NUMBER, undo only the last NUMBER acts.

    Without NUMBER it needs --stop while a controller runs, which would steer again, and does the same as `swerve steer
    off`. With NUMBER the running controller undoes its acts and holds their targets, so that it does not repeat them.
    """
    if number is None:
        return take_back(options, stop)
    if stop:
        raise click.UsageError("--stop and NUMBER are mutually exclusive")
    orders.say(options, client.ask(directories.state_dir(options.netns), Undo(number, hold_ns)).lines)
    return 0


def take_back(options: Options, stop: bool) -> int:
    """Take everything back; with `stop` whoever steers."""
    folder = directories.state_dir(options.netns)
    if options.netns:
        netns.enter(options.netns)
    began_ns, lock = time.monotonic_ns(), folder / journal.LOCK_FILE
    done: Sequence[rollback.Undone] = ()
    swept: Sequence[str] = ()
    ports: Sequence[bond_ports.Restored] = ()
    untold: Sequence[str] = ()
    with Netlink() as netlink, cli_types.file_errors(folder):
        if stop:
            swept = switch_off(netlink)  # first of all: files and processes can wait
        if lock.exists():  # else nobody ever steered here
            stopped = stop and _stop_controller(lock)
            wait_s, scope = _STOP_S if stopped else orders.LOCK_S, netns.scope()
            with Locks(lock, wait_s, False, scope) as locks, journal.Journal(folder / journal.FILE) as log:
                why = "the operator took everything back"
                deleted = switch_off(netlink)
                done = rollback.note(log, scope, "command", why)
                owned_files.remove(directories.steering_memory(options.netns))
                swept = [*swept, *deleted, *sweep(netlink), *attach.clean(attach.STEERING)]
                if locks.former is not None:
                    locks.former.done()
                ports = bond_ports.restore(netlink, directories.bond_ports(options.netns), scope, why)
                acts = [messages.bond_restored(directories.instance(options.netns), each) for each in ports]
                told, untold = hooks.undo(options.netns, why, _HOOKS_S)
                acts += told
                acts_file.write_now(folder, acts)
                messages.tell(options.netns, [*acts, *(messages.undone("", each, why, began_ns) for each in done)])
                swept = [*swept, *(f"our choice of the port of {each.text}" for each in ports if not each.failure)]
                swept = [*swept, *(f"{each.what}: {each.because}" for each in told if each.outcome == "undone")]
    _say_undone(options, done, swept)
    failed = [*(each.text for each in ports if each.failure), *untold]
    for text in failed:
        click.echo(f"swerve steer: {text}", err=True)
    return int(bool(failed))


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


def _say_undone(options: Options, done: Sequence[rollback.Undone], swept: Sequence[str]) -> None:
    if options.json:
        for what in swept:
            click.echo(json.dumps({"removed": what}))
        for each in done:
            facts = {"target": each.last.target, "outcome": "applied", "why": "", "weights": dict(each.last.original)}
            click.echo(json.dumps(facts))
        return
    lines = [*(each.text for each in done), *(f"removed {what}" for what in swept)]
    click.echo("\n".join(lines) or "nothing to undo")
