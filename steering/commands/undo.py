"""`swerve steer undo`: put the original weights back, or take the last acts back."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from pytools import places
from pytools.cli_options import Options, common
from pytools.errors import RefusedError
from pytools.kernel import attach, netns
from pytools.kernel.netlink import Netlink
from pytools.signals import Act
from steering.acting import journal, settle, taking_back, telling, undoing
from steering.acting.lock import Lock, holder, holder_pidfd
from steering.actuators.registry import Actuators
from steering.commands import disk, orders
from steering.control import client
from steering.control.requests import MOST_UNDONE, Undo
from steering.words import Duration

_STOP_S: Final = 10.0
_SECOND_NS: Final = 1_000_000_000


@click.command(epilog="Example: swerve steer undo 1 --hold 30m -n swerve-x-h1")
@click.argument("number", type=click.IntRange(1, MOST_UNDONE), required=False)
@click.option(
    "--hold",
    "hold_ns",
    type=Duration(0),
    default=600 * _SECOND_NS,
    metavar="DURATION",
    help="So long a running controller leaves what it took back as it is (10m; 0s for not at all).",
)
@click.option("--stop", is_flag=True, help="Without NUMBER: stop a running controller first.")
@common(follows=False)
def undo(options: Options, number: int | None, hold_ns: int, stop: bool) -> int:
    """Put the original weights back; with NUMBER take only so many acts back, the last one first.

    Without NUMBER it is refused while a controller runs (it would steer again), unless it is told to stop it. With it a
    running controller takes its acts back itself, and holds their targets for a while, so that it does not steer again
    at once.
    """
    if number is not None and stop:
        raise click.UsageError("--stop takes everything back: it has no NUMBER")
    folder = places.state_dir(options.netns)
    if number is not None:
        return _undo_last(options, folder, number, hold_ns)
    if options.netns:
        netns.enter(options.netns)
    done, began_ns = Undone(), time.monotonic_ns()
    with disk.told(folder):
        if (folder / journal.LOCK_FILE).exists():  # else nobody ever steered here
            stopped = stop and _stop_controller(folder / journal.LOCK_FILE)
            _settle(done, folder, _STOP_S if stopped else orders.LOCK_S)
    _say_undone(options, done)
    why = "the operator took everything back"
    telling.tell(options.netns, telling.taken_back([*done.settled, *done.regained], why, began_ns))
    return 1 if any(each.outcome.kind in ("failed", "uncertain") for each in done.settled) else 0


@dataclass(slots=True)
class Undone:
    """What `steer undo` did."""

    settled: Sequence[settle.Settled] = ()
    regained: Sequence[settle.Regained] = ()
    told: Sequence[str] = ()  # of those, in words
    swept: Sequence[str] = ()


def _settle(done: Undone, folder: Path, wait_s: float) -> None:
    """Put original weights back, make again what our acts let go, and remove what else is ours."""
    with (
        Lock(folder / journal.LOCK_FILE, wait_s),
        journal.Journal(folder / journal.FILE) as log,
        Netlink() as netlink,
    ):
        actuators = Actuators(netlink)
        try:
            done.settled = settle.settle(log, actuators, journal.scope(), "command")
            done.regained, done.told = settle.regain(log, actuators, journal.scope(), "command")
        finally:  # also when the disk is full: nobody keeps the backup routes up to date any more
            done.swept = [*actuators.sweep(), *attach.clean(attach.STEERING)]


def _undo_last(options: Options, folder: Path, number: int, hold_ns: int) -> int:
    """Take acts back through the controller, or here when none runs."""
    try:
        lines, code = client.ask(folder, Undo(number, hold_ns)).lines, 0
    except client.NotRunningError:
        if options.netns:
            netns.enter(options.netns)
        acts: list[Act] = []
        try:
            with (
                disk.told(folder),
                Lock(journal.directory(options.netns) / journal.LOCK_FILE, orders.LOCK_S),
                journal.Journal(folder / journal.FILE) as log,
                Netlink() as netlink,
            ):
                done = undoing.undo_last(log, Actuators(netlink), journal.scope(), number, acts.append)
        finally:
            telling.tell(options.netns, acts)
        lines, code = [each.text for each in done] or ["nothing to undo"], taking_back.exit_code(done)
    orders.say(options, lines)
    return code


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


def _say_undone(options: Options, done: Undone) -> None:
    if options.json:
        for what in done.swept:
            click.echo(json.dumps({"removed": what}))
        for each in done.settled:
            facts = {"target": each.target, "outcome": each.outcome.kind, "why": each.outcome.why}
            click.echo(json.dumps(facts | {"weights": dict(each.outcome.weights)}))
        for again in done.regained:
            facts = {"target": again.group.target, "outcome": "made_again", "why": again.why}
            click.echo(json.dumps(facts | {"weights": dict(again.group.current)}))
        return
    lines = [*(each.text for each in done.settled), *done.told, *(f"removed {what}" for what in done.swept)]
    click.echo("\n".join(lines) or "nothing to undo")
