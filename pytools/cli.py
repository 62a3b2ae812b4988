"""The commands that measure and show; nothing here changes the host, but for `doctor --clean`.

`commands` is mounted by the root command. Whatever a command needs is imported when it runs, so that
`swerve --help` stays quick. Errors become one line and an exit code in `run`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytools.errors import SwerveError

if TYPE_CHECKING:
    from pytools.bus import Client

_DEFAULT_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Options:
    """What every command understands."""

    json: bool = False
    interval_s: float | None = None
    count: int | None = None
    netns: str | None = None
    config: Path | None = None
    color: bool = True

    @property
    def frames(self) -> int | None:
        """How many times to show: once, unless an interval or a count was given; None without end."""
        if self.count is not None:
            return self.count
        return 1 if self.interval_s is None else None

    @property
    def every_s(self) -> float:
        """The interval, given or not."""
        return _DEFAULT_INTERVAL_S if self.interval_s is None else self.interval_s


def common(follows: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that all commands share, as one argument `options`.

    Parameters
    ----------
    follows : bool
        Whether the command can go on showing (`--interval`, `--count`).
    """
    listed = [
        click.option("-j", "--json", is_flag=True, help="JSON, one object per line."),
        click.option("-n", "--netns", metavar="NAME", help="The instance of this network namespace."),
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Configuration of the agent (read by agent and doctor).",
        ),
        click.option("--no-color", is_flag=True, help="No colour (also: environment NO_COLOR)."),
    ]
    if follows:
        listed[1:1] = [
            click.option(
                "-i",
                "--interval",
                type=click.FloatRange(min=0.05),
                metavar="SECONDS",
                help="Show again every so often, until interrupted.",
            ),
            click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after so many."),
        ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_options(
            *,
            json: bool,
            netns: str | None,
            config: Path | None,
            no_color: bool,
            interval: float | None = None,
            count: int | None = None,
            **rest: Any,
        ) -> Any:
            color = not (no_color or os.environ.get("NO_COLOR"))
            return function(Options(json, interval, count, netns, config, color), **rest)

        for option in reversed(listed):
            with_options = option(with_options)
        return with_options

    return decorate


class LazyCommand(click.Command):
    """A command that lives in another module, which is imported when the command is used."""

    def __init__(self, name: str, module: str, attribute: str, help: str) -> None:
        super().__init__(name, help=help)
        self._module, self._attribute = module, attribute

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Let the real command parse its arguments; it is then the one that runs."""
        command: click.Command = getattr(importlib.import_module(self._module), self._attribute)
        return command.make_context(info_name, args, parent, **extra)


def _client(options: Options, types: frozenset[str] | None) -> Client:
    from pytools import places
    from pytools.bus_client import Client

    return Client(places.agent_socket(options.netns), types)


@click.command(epilog="Example: swerve agent -n swerve-x-h1 --config agent.yaml")
@common(follows=False)
def agent(options: Options) -> None:
    """Measure, and serve what was measured, until interrupted.

    Reads FILE, else agent.yaml of the instance, else /etc/swerve/agent.yaml.
    """
    from pytools import config, places
    from pytools.kernel.compiling import Compilation
    from pytools.sources import programs

    settings = config.load(options.config or places.default_config(options.netns))
    with Compilation(programs.all_of(settings)) as compilation:
        from pytools import agent as daemon  # the child compiles meanwhile

        daemon.run(settings, options.netns, compilation)


def _frames(options: Options, kind: str) -> None:
    """The body of the commands that show tables: one table, or one JSON line per row, at each interval."""
    from pytools.views import follow

    with _client(options, follow.VIEWS[kind].types) as client:
        follow.show(client, kind, options.frames, options.every_s, options.json, options.color)


@click.command(epilog="Example: swerve delay -n swerve-x-h1 -i 2")
@click.option("--app", is_flag=True, help="Delays of application packets instead of probes: by path, then by flow.")
@common()
def delay(options: Options, app: bool) -> None:
    """One-way delays, queueing and loss of every path.

    Each value stands beside its error (±). A dash is what is not known: a one-way delay needs clocks that are
    synchronised, or in holdover after they were; queueing needs neither. Asymmetry is what the smallest delay there has
    more than the smallest one back.
    """
    _frames(options, "app" if app else "delay")


@click.command(epilog="Example: swerve clocks -n swerve-x-h1 --edges -i 2")
@click.option("--edges", is_flag=True, help="Clocks of the peers against this host's, by path: what is measured here.")
@click.option("--collocation", is_flag=True, help="Which hosts share an oscillator, and how sure that is.")
@common()
def clocks(options: Options, edges: bool, collocation: bool) -> None:
    """Clocks of all hosts against the reference: offset, drift, bound, state.

    ± holds under the stated allowance for asymmetric paths (clocks.asymmetry_share), the hard ± whatever the network
    does. swerve compares clocks and sets none.
    """
    if edges and collocation:
        raise click.UsageError("--edges and --collocation are two tables: ask for one of them")
    _frames(options, "edges" if edges else "collocation" if collocation else "clocks")


@click.command(epilog="Example: swerve tcp -n swerve-x-h1 -j -c 10")
@common()
def tcp(options: Options) -> None:
    """TCP retransmissions by path, and by flow."""
    _frames(options, "tcp")


@click.command("self", epilog="Example: swerve self -n swerve-x-h1 -c 1")
@common()
def self_(options: Options) -> None:
    """What the agent costs, and what it lost.

    While this runs, the kernel times every BPF program (about 70 ns a packet).
    """
    _frames(options, "self")


@click.command(epilog="Example: swerve watch -n swerve-x-h1 --type act --type path_state")
@click.option("--type", "types", multiple=True, metavar="TYPE", help="Only this type (may be repeated).")
@common()
def watch(options: Options, types: Sequence[str]) -> None:
    """Print every signal as one line of JSON, as it comes.

    The line is flushed at once. Signals missed because the reader was slow are counted on standard error.
    """
    from pytools.views import export

    if options.interval_s is not None:
        raise click.UsageError("watch prints as it comes: it has no interval")
    with _client(options, frozenset(types) or None) as client:
        export.watch(client, sys.stdout.buffer, sys.stderr, options.count)


@click.command(epilog="Example: swerve top -n swerve-x-h1")
@common()
def top(options: Options) -> None:
    """Live view of paths: delay, queueing, loss, retransmissions, weights, clocks, and why (q quits)."""
    from pytools.views import follow
    from pytools.views import top as live

    with _client(options, follow.VIEWS["top"].types) as client:
        if options.json:
            follow.show(client, "top", options.count, options.every_s, options.json, options.color)
        else:
            live.run(client, options.count, options.every_s, options.color)


@click.command(epilog="Example: swerve doctor -n swerve-x-h1 --clean")
@click.option("--clean", is_flag=True, help="Remove what a crashed agent left in the kernel.")
@common(follows=False)
def doctor(options: Options, clean: bool) -> int:
    """What this host can do, what is missing, what each gap costs, and how to mend it.

    Exit code 5 when something essential is missing.
    """
    from pytools.config import AgentConfig
    from pytools.sources import programs
    from pytools.sources.probing import paths
    from pytools.views import doctor as room

    if clean:
        room.print_removed(room.clean(options.netns, paths.clean), options.json)
        return 0
    wanted = programs.all_of(AgentConfig("", []))
    return room.run(options.netns, options.config, wanted, options.json, options.color)


commands: list[click.Command] = [
    agent,
    delay,
    clocks,
    tcp,
    self_,
    watch,
    top,
    doctor,
    LazyCommand("lab", "pytools.lab.cli", "lab", "A fabric in network namespaces, to try things on."),
]


def run(root: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, having said what went wrong in one line.

    0 ok, 1 failed at run time, 2 usage, 3 policy invalid, 4 refused, 5 privilege or kernel feature missing,
    130 interrupted.
    """
    try:
        given = None if arguments is None else list(arguments)
        result = root.main(args=given, prog_name="swerve", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SwerveError as error:
        click.echo(f"swerve: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # whoever read us has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
