"""`swerve steer`: run a controller; see and undo what controllers did.

What an order or a confirmation does not need is imported by the command that does: whoever has to be quick types those.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import click

from pytools import directories, log
from pytools.cli_options import LazyCommand, Options, common
from pytools.signals import Act, encode
from pytools.units import SECOND
from steering.cli_types import Duration, act_line
from steering.commands import orders
from steering.commands.history import history


@click.group(epilog="Example: swerve steer run --policy policy.yaml -n swerve-x-h1")
def steer() -> None:
    """Steer by a policy; show and undo acts; give orders by hand (docs/operating.md)."""


@steer.command(epilog="Example: swerve steer run --apply --policy /etc/swerve/policy.yaml")
@click.option("--apply", is_flag=True, help="Apply changes; without it, only print what would be done (a dry run).")
@click.option(
    "--confirm",
    "confirm_ns",
    type=Duration(SECOND, 86_400 * SECOND),
    default=0,
    metavar="DURATION",
    help="Undo everything and exit after DURATION, unless `swerve steer confirm` runs first.",
)
@click.option(
    "--hand-over",
    is_flag=True,
    help="On SIGTERM keep changes for a successor for safety.takeover, then undo them. For services.",
)
@click.option("--keep", is_flag=True, help="Keep the weights in force at exit.")
@click.option(
    "--policy",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read the policy from FILE; default: ./policy.yaml, ~/.config/swerve/policy.yaml, /etc/swerve/policy.yaml.",
)
@common(follows=False)
def run(options: Options, apply: bool, confirm_ns: int, hand_over: bool, keep: bool, file: Path | None) -> int:
    """Steer until interrupted: move weights off bad paths, and back when they recover.

    Needs a running agent, and waits for one. Changes weights in its own routing tables, above those of others. A
    guardian process deletes the rules that lead there if the controller dies, hangs, or is not confirmed in time.
    """
    if confirm_ns and not apply:
        raise click.UsageError("--confirm needs --apply: a dry run changes nothing")
    from pytools.kernel import netns, privileges
    from steering.controller import Controller
    from steering.controller import Options as How
    from steering.policy import file as policy_file

    file = file or directories.default_policy()
    policy = policy_file.load(file)
    if options.netns:
        netns.enter(options.netns)

    def say(text: str) -> None:
        log.logger("steer").info("%s", text)

    def report(act: Act) -> None:
        line = encode(act).decode() if options.json else act_line(act)
        print(line, flush=True)

    how = How(
        netns=options.netns,
        apply=apply,
        keep=keep,
        hand_over=hand_over,
        policy_name=str(file.absolute()),
        policy_hash=hashlib.sha256(file.read_bytes()).hexdigest(),
        confirm_ns=confirm_ns,
    )
    if refused := privileges.raise_priority():  # the guardian inherits it
        say(f"runs at the usual CPU priority: {refused}")
    if apply and os.getpid() == 1:  # no process of its namespace can kill it
        say(f"as process 1 it cannot be killed by its guardian if it hangs: {directories.page('kubernetes.md')}")
    controller = Controller(policy, how, say, report)
    return 130 if controller.run() == signal.SIGINT else 0


for _command in (
    LazyCommand(
        "status",
        "steering.commands.status",
        "status",
        "Show who steers, what is in force and what is wanted, orders, and the state of each path.",
    ),
    LazyCommand(
        "off",
        "steering.commands.undo",
        "off",
        "Delete the rules of steering at once, then end the controller and remove its objects from the kernel.",
    ),
    LazyCommand(
        "undo",
        "steering.commands.undo",
        "undo",
        "Restore the original weights; with NUMBER, undo only the last NUMBER acts.",
    ),
    LazyCommand(
        "guard",
        "steering.commands.undo",
        "guard",
        "Undo what stays in force when a controller and its guardian are killed together, as with their container.",
    ),
    history,
    *orders.commands,
):
    steer.add_command(_command)
