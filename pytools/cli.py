"""The commands that measure and show; nothing here changes the host, but for `doctor --clean`.

`commands` is mounted by the root command. Whatever a command needs is imported when it runs, so that
`swerve --help` stays quick. Errors become one line and an exit code in `run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from pytools.cli_options import Asked, LazyCommand, Options, common, filtered
from pytools.errors import SwerveError

if TYPE_CHECKING:
    from pytools.bus import Client


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


def _frames(options: Options, kind: str, asked: Asked | None = None) -> None:
    """The body of the commands that show tables: one table, or one JSON line per row, at each interval."""
    from pytools.views import follow, query
    from pytools.views.kinds import VIEWS

    wanted = query.asked_for(kind, asked.sort, asked.filters) if asked is not None else query.Query()
    with _client(options, VIEWS[kind].types) as client:
        follow.show(client, kind, options.frames, options.every_s, options.json, options.color, wanted)


def _one_of(tables: dict[str, bool]) -> str | None:
    """The option among those that each ask for another table; None when none is given."""
    given = [name for name, is_given in tables.items() if is_given]
    if len(given) > 1:
        listed = " and ".join(f"--{name}" for name in given)
        raise click.UsageError(f"{listed} are two tables: ask for one of them")
    return given[0] if given else None


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
    _frames(options, _one_of({"edges": edges, "collocation": collocation}) or "clocks")


@click.command(epilog="Example: swerve tcp -n swerve-x-h1 --dst 10.9.0.0/16 --sort srtt -i 2")
@click.option("--flows", is_flag=True, help="All connections, without the totals of the host and of its paths.")
@filtered("dst", "src", "port", "pid", "command", "interface", "path")
@common()
def tcp(options: Options, asked: Asked, flows: bool) -> None:
    """TCP by cause: what was sent again, and why, by path and by connection.

    Fast: acknowledgements showed the loss (a queue that overflows). RTO: nothing came back at all. TLP: the end of a
    burst, sent again as a probe. SYN: of the handshake. Spurious: sent again needlessly, the first had arrived (delay,
    or another order). Zero windows: the receiver does not read. CE: marked by a queue on the way. Counts of connections
    are since each began, those of paths of the last window. Details: docs/tcp.md
    """
    _frames(options, "flows" if flows else "tcp", asked)


@click.command(epilog="Example: swerve drops -n swerve-x-h1 -i 2")
@filtered()
@common()
def drops(options: Options, asked: Asked) -> None:
    """Packets that this machine's kernel dropped, by its own reasons.

    Of all its network namespaces together, forwarded packets too. Those of a TCP connection are beside it (swerve tcp
    --flows); what an interface and its queue dropped is with the interface (swerve links). Details: docs/tcp.md
    """
    _frames(options, "drops", asked)


@click.command(epilog="Example: swerve links -n swerve-x-h1 --interface rail1 -i 1")
@click.option(
    "--events", is_flag=True, help="What happened to them: carrier, flaps, full queues, sizes, marks, pauses."
)
@filtered("dst", "interface", "path")
@common()
def links(options: Options, asked: Asked, events: bool) -> None:
    """Interfaces that carry paths: carrier, rates, queues, drops, pauses, neighbours; sizes and marks of their paths.

    Rates, drops and errors are of the last window; what a queue dropped and what drivers count are totals. Details:
    docs/links.md
    """
    _frames(options, "events" if events else "links", asked)


@click.group(invoke_without_command=True, epilog="Example: swerve rdma -n swerve-x-h1 --verdict congested -i 1")
@click.option("--ports", is_flag=True, help="Ports of the devices: state, congestion notifications, losses, addresses.")
@click.option("--suspects", is_flag=True, help="Hosts and links that several queue pairs agree to be slow.")
@filtered("dst", "pid", "command", "interface", "path", "verdict")
@common()
@click.pass_context
def rdma(context: click.Context, options: Options, asked: Asked, ports: bool, suspects: bool) -> None:
    """RDMA queue pairs: what is posted, what completes, how fast, and what that means.

    The verdict of each, with its reason: congested (slow, while more and more is outstanding), slow_receiver (the other
    side has no buffers ready), dead (outstanding, nothing completes), no_demand (nothing to send), ok. Where no RDMA
    is seen it is said why. Details: docs/rdma.md
    """
    if context.invoked_subcommand is None:
        _frames(options, _one_of({"ports": ports, "suspects": suspects}) or "rdma", asked)


@rdma.command(
    epilog="Example: swerve rdma tap -- ib_write_bw -d mlx5_0 10.9.0.2",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-n", "--netns", metavar="NAME", help="The instance of this network namespace.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def tap(netns: str | None, command: Sequence[str]) -> int:
    """Run COMMAND with the tap: its queue pairs are counted without a breakpoint.

    For programs that post a lot, for whom probes would cost too much. The program sees nothing of it. Details:
    docs/rdma.md; what it costs, and when not to: docs/overhead.md
    """
    from pytools import rdma_tap

    return rdma_tap.run(list(command), netns)


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
    from pytools.views.kinds import VIEWS

    with _client(options, VIEWS["top"].types) as client:
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
    drops,
    links,
    rdma,
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
