"""The root of the `swerve` command: everything that measures, and the commands that decide and act.

Heavy modules are imported by the command that needs them, so that `swerve --help` and `swerve delay` stay quick.
"""

from __future__ import annotations

import importlib
import sys
from typing import cast

import click

from pytools import cli as reading
from pytools.cli_options import LazyCommand
from pytools.views import actions


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: swerve doctor",
)
@click.version_option(package_name="swerve")
@click.pass_context
def root(context: click.Context) -> None:
    """Measure where packets wait between the hosts of a cluster, and move traffic away from there.

    Without a command, run `swerve status`.

    Exit codes: 0 ok, 1 failed, 2 usage error, 3 policy invalid, 4 refused by a safety guard, 5 privilege or kernel
    feature missing, 130 interrupted.

    Pages such as docs/tcp.md are in the sources; the Debian package has them in /usr/share/doc/swerve.
    """
    if context.invoked_subcommand is None:
        status = root.commands["status"]
        with status.make_context("status", [], parent=context) as inner:
            inner.command.invoke(inner)


for _command in (
    *reading.commands,
    LazyCommand(
        "status", "steering.commands.overview", "status", "Show the state of this host: agent, paths, clocks, steering."
    ),
    LazyCommand("policy", "steering.commands.policy", "policy", "Check, explain and try out policy files."),
    LazyCommand("cache", "steering.commands.cache", "cache", "List, export and import compiled kernel programs."),
    LazyCommand(
        "steer", "steering.commands.steer", "steer", "Steer by a policy; show and undo acts; give orders by hand."
    ),
    LazyCommand(
        "demo",
        "steering.demo.command",
        "demo",
        "Run a demo in network namespaces: congest a rail and steer traffic away from it.",
    ),
):
    root.add_command(_command)


@actions.register
def _steering(netns: str | None) -> actions.Steering:
    return cast(actions.Steering, importlib.import_module("steering.commands.from_view").Orders(netns))


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(reading.run(root))


if __name__ == "__main__":
    main()
