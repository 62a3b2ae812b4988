"""`swerve steer confirm|drain|undrain|hold|unhold|pin|unpin|freeze|thaw`: what an operator orders by hand.

Orders go to the running controller through its control socket; the stop file is made and removed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from pytools import directories
from pytools.cli_options import Options, common
from pytools.errors import SwerveError, UsageError
from steering import cli_types, elapsed
from steering.acting import journal
from steering.acting.lock import Lock
from steering.cli_types import Duration, Flow, who
from steering.control import client, kept_orders, orders, stop_file
from steering.control.requests import AnyRequest, Drain, Hold, PinFlow, Undrain, Unhold, UnpinFlow
from steering.deciding.overrides import Override, Overrides
from steering.guarding import confirming
from steering.plan import FlowKey

LOCK_S: Final = 1.0  # a guardian may be undoing just now, or somebody looks who holds the lock
_PIN_S: Final = 10.0  # until the first pin's kernel program is loaded, and a neighbour has answered
_FOR: Final = click.option(
    "--for",
    "for_ns",
    type=Duration(),
    default=0,
    metavar="DURATION",
    help="Expire the order after DURATION (default: never).",
)
_WHY: Final = click.option("--why", default="", metavar="TEXT", help="Record TEXT as the reason.")
_TO: Final = click.option("--to", default="", metavar="PREFIX", help="Apply to routes to PREFIX only.")


def _ask(options: Options, request: AnyRequest, patience_s: float = 0.0) -> None:
    reply = client.ask(directories.state_dir(options.netns), request, patience_s=patience_s)
    say(options, reply.lines)


def say(options: Options, lines: list[str]) -> None:
    """Print what was done."""
    for line in lines:
        click.echo(json.dumps({"done": line}, ensure_ascii=False) if options.json else line)


@click.command(epilog="Example: swerve steer confirm -n swerve-x-h1")
@common(follows=False)
def confirm(options: Options) -> None:
    """Confirm a controller that was started with --confirm; otherwise it undoes everything at its deadline."""
    try:
        said = confirming.confirm(directories.state_dir(options.netns), who())
    except OSError as error:
        raise SwerveError(f"it cannot be written: {error.strerror}", "nothing is confirmed") from None
    say(options, [said])


@click.command(epilog='Example: swerve steer drain rail1 --for 1h --why "new optics"')
@click.argument("leaves_by", metavar="INTERFACE|GATEWAY")
@_TO
@_FOR
@_WHY
@common(follows=False)
def drain(options: Options, leaves_by: str, to: str, for_ns: int, why: str) -> None:
    """Drain an INTERFACE or GATEWAY for maintenance.

    The order stays, whatever is measured and also after a restart, until `undrain` or the end of its time. Exit code 4:
    refused, because no measured nexthop would be left. Exit code 1: the order stands, but traffic still leaves there.
    `fe80::1%rail1` is a gateway on one interface.
    """
    _ask(options, Drain(leaves_by, to, for_ns, why))


@click.command(epilog="Example: swerve steer undrain rail1")
@click.argument("leaves_by", metavar="INTERFACE|GATEWAY")
@_TO
@common(follows=False)
def undrain(options: Options, leaves_by: str, to: str) -> None:
    """Remove a drain; the policy decides again. Without a controller, only delete the order."""
    try:
        _ask(options, Undrain(leaves_by, to))
    except client.NotRunningError:
        if to:
            raise
        _forget(options, lambda stored: orders.without_drain(stored, [], leaves_by, ""))


@click.command(epilog="Example: swerve steer hold 10.9.0.2/32 --for 10m")
@click.argument("target", default="")
@_FOR
@_WHY
@common(follows=False)
def hold(options: Options, target: str, for_ns: int, why: str) -> None:
    """Hold the weights of TARGET (its name in `status`, or a prefix that it carries); without TARGET, of all targets.

    `freeze` stops new orders as well.
    """
    _ask(options, Hold(target, for_ns, why))


@click.command(epilog="Example: swerve steer unhold 10.9.0.2/32")
@click.argument("target", default="")
@common(follows=False)
def unhold(options: Options, target: str) -> None:
    """Remove a hold. Without a controller, only delete the order."""
    try:
        _ask(options, Unhold(target))
    except client.NotRunningError:
        _forget(options, lambda stored: orders.without_hold(stored, orders.hold_named(stored, target) or target))


def _forget(options: Options, without: Callable[[Overrides], tuple[Overrides, tuple[Override, ...]]]) -> None:
    """Delete orders on disk, while no controller runs; `without` chooses which."""
    folder = journal.directory(options.netns)
    with cli_types.file_errors(folder), Lock(folder / journal.LOCK_FILE, LOCK_S):
        stored = kept_orders.load(folder, elapsed.moment())
        left, ended = without(stored)
        if not ended:
            there = ", ".join(map(orders.text_of, stored.orders))
            raise UsageError("there is no such order, and no controller runs", f"orders are: {there or 'none'}")
        kept_orders.save(folder, left)
    say(options, [f"forgotten: {orders.text_of(order)}" for order in ended])


@click.command(epilog="Example: swerve steer pin tcp:10.9.0.1:40000-10.9.0.2:5201 --via rail2 --for 10m")
@click.argument("flow", type=Flow())
@click.option("--via", required=True, metavar="INTERFACE", help="Send the flow out of this interface or gateway.")
@click.option(
    "--for", "for_ns", type=Duration(), required=True, metavar="DURATION", help="Remove the pin after DURATION."
)
@_WHY
@common(follows=False)
def pin(options: Options, flow: FlowKey, via: str, for_ns: int, why: str) -> None:
    """Pin one live FLOW to an interface, whatever the routing table says.

    The kernel ends the pin with its time or with the controller, and ignores it while the neighbour there is dead.
    """
    _ask(options, PinFlow(**asdict(flow), via=via, for_ns=for_ns, why=why), _PIN_S)


@click.command(epilog="Example: swerve steer unpin tcp:10.9.0.1:40000-10.9.0.2:5201")
@click.argument("flow", type=Flow())
@common(follows=False)
def unpin(options: Options, flow: FlowKey) -> None:
    """Remove the pin; FLOW follows the routing table again."""
    _ask(options, UnpinFlow(**asdict(flow)))


_HOST: Final = click.option("--host", is_flag=True, help="Apply to all instances of this host.")


def _stop_file(options: Options, host: bool) -> Path:
    return stop_file.places_of(directories.state_dir(options.netns))[host]


@click.command(epilog='Example: swerve steer freeze --why "switch upgrade until noon"')
@_HOST
@_WHY
@common(follows=False)
def freeze(options: Options, host: bool, why: str) -> None:
    """Stop all new acts until `thaw`; what is in force stays, and its leases are renewed.

    Creates the stop file, which any other tool may create too. When a controller ends or dies, its changes are undone
    all the same.
    """
    place = _stop_file(options, host)
    with cli_types.file_errors(place):
        stop_file.freeze(place, why)
    say(options, [f"frozen by {place}"])


@click.command(epilog="Example: swerve steer thaw")
@_HOST
@common(follows=False)
def thaw(options: Options, host: bool) -> None:
    """Remove the stop file; steering resumes."""
    place = _stop_file(options, host)
    with cli_types.file_errors(place):
        gone = stop_file.thaw(place)
    left = stop_file.StopFile(directories.state_dir(options.netns)).why()
    said = f"{place} is gone" if gone else f"{place} was not there"
    say(options, [f"{said}; still frozen: {left}" if left else said])


commands = (confirm, drain, undrain, hold, unhold, pin, unpin, freeze, thaw)
