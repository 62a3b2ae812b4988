"""The commands that measure and show; nothing here changes the host, but for `doctor --clean`.

`commands` is mounted by the root command. Whatever a command needs is imported when it runs, so that
`swerve --help` stays quick. Errors become one line and an exit code in `run`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from pytools import streams
from pytools.cli_history import replay, report, watch
from pytools.cli_options import NETNS, Asked, LazyCommand, Options, client_of, common, filtered, finite
from pytools.errors import SwerveError, not_permitted


@click.command(epilog="Example: swerve agent -n swerve-x-h1 --config agent.yaml")
@click.option(
    "--prepare",
    is_flag=True,
    help="Run the privileged setup that the sandboxed service cannot, then exit (docs/service.md).",
)
@common(follows=False)
def agent(options: Options, prepare: bool) -> None:
    """Measure and serve the results until interrupted.

    Reads FILE, else the first agent.yaml of: the instance, the working directory, ~/.config/swerve, /etc/swerve.
    """
    from pytools import config, directories, log
    from pytools.kernel.bpf.compiler_client import Compilation
    from pytools.sources import programs

    if prepare:
        from pytools.kernel import prepare as step

        click.echo("\n".join(step.run()))
        return

    def read() -> config.AgentConfig:
        found, hints = config.read(options.config or directories.default_config(options.netns))
        for hint in hints:
            log.event(log.Level.NOTICE, "configuration in an earlier spelling", hint=hint)
        return found

    settings = read()
    with Compilation(programs.all_of(settings)) as compilation:
        from pytools.agent import loop as daemon  # the child compiles meanwhile

        daemon.run(settings, options.netns, compilation, read)


def _frames(options: Options, kind: str, asked: Asked | None = None) -> None:
    """The body of the commands that show tables: one table, or one JSON line per row, at each interval."""
    from pytools.views import follow, query
    from pytools.views.kinds import VIEWS

    wanted = query.asked_for(kind, asked.sort, asked.filters) if asked is not None else query.Query()
    with client_of(options, VIEWS[kind].types) as client:
        follow.show(client, kind, options.frames, options.every_s, options.json, options.color, wanted)


def _one_of(tables: dict[str, bool]) -> str | None:
    """The option among those that each ask for another table; None when none is given."""
    given = [name for name, is_given in tables.items() if is_given]
    if len(given) > 1:
        listed = " and ".join(f"--{name}" for name in given)
        raise click.UsageError(f"{listed} are mutually exclusive: each is a table")
    return given[0] if given else None


@click.command(epilog="Example: swerve delay -n swerve-x-h1 --dst 10.9.0.0/16 --sort queueing-p99 -i 2")
@click.option("--app", is_flag=True, help="Show delays of application packets instead of probes, by path and by flow.")
@click.option("--ways", is_flag=True, help="Show the ways of each path behind its first hop, and which is bad.")
@filtered("dst", "src", "port", "interface", "path")
@common()
def delay(options: Options, asked: Asked, app: bool, ways: bool) -> None:
    """Show one-way delay, queueing and loss of every path.

    Each value has its error (±). A dash means unknown: a one-way delay needs clocks that are synchronised or in
    holdover, queueing does not. Asymmetry is the smallest forward delay minus the smallest reverse delay.
    """
    _frames(options, _one_of({"app": app, "ways": ways}) or "delay", asked)


@click.command(epilog="Example: swerve clocks -n swerve-x-h1 --edges --sort bound -i 2")
@click.option("--edges", is_flag=True, help="Show the clocks of the peers against this host's, by path.")
@click.option("--collocation", is_flag=True, help="Show which hosts share an oscillator, with the confidence.")
@filtered("host", "dst", "interface", "path")
@common()
def clocks(options: Options, asked: Asked, edges: bool, collocation: bool) -> None:
    """Show the clocks of all hosts against the reference: offset, drift, bound, state.

    ± assumes that paths are at most as asymmetric as clocks.asymmetry_share; the hard ± assumes no symmetry. swerve
    compares clocks and never sets one.
    """
    if collocation and asked.sort is not None:
        raise click.UsageError("--sort and --collocation are mutually exclusive")
    _frames(options, _one_of({"edges": edges, "collocation": collocation}) or "clocks", asked)


@click.command(epilog="Example: swerve tcp -n swerve-x-h1 --dst 10.9.0.0/16 --sort srtt -i 2")
@click.option("--flows", is_flag=True, help="Show connections only, without the totals of the host and its paths.")
@filtered("dst", "src", "port", "pid", "command", "interface", "path", "pod")
@common()
def tcp(options: Options, asked: Asked, flows: bool) -> None:
    """Show TCP retransmissions by cause, by path and by connection.

    Fast: acknowledgements showed the loss (a queue overflows). RTO: no acknowledgement arrived. TLP: a loss probe
    retransmitted the last segment. SYN: of the handshake. Spurious: needless, the original arrived late or reordered.
    Zero windows: the receiver does not read. CE: marked by a queue on the path. Connections count since each began,
    paths over the last window. Details: docs/tcp.md
    """
    _frames(options, "flows" if flows else "tcp", asked)


@click.command(epilog="Example: swerve drops -n swerve-x-h1 -i 2")
@filtered()
@common()
def drops(options: Options, asked: Asked) -> None:
    """Show packets that the kernel of this machine dropped, by reason.

    Covers all network namespaces of this machine, and forwarded packets. `swerve tcp --flows` shows the drops of each
    TCP connection, `swerve links` those of an interface and its queue. Details: docs/tcp.md
    """
    _frames(options, "drops", asked)


@click.command(epilog="Example: swerve links -n swerve-x-h1 --interface rail1 -i 1")
@click.option("--events", is_flag=True, help="Show events only: carrier, flaps, full queues, sizes, marks, pauses.")
@filtered("dst", "interface", "path")
@common()
def links(options: Options, asked: Asked, events: bool) -> None:
    """Show interfaces that carry paths: carrier, rates, queues, drops, pauses, neighbours, MTU, ECN marks.

    Rates, drops and errors cover the last window; drops of queues and counters of drivers are totals. Details:
    docs/links.md
    """
    _frames(options, "events" if events else "links", asked)


@click.group(invoke_without_command=True, epilog="Example: swerve rdma -n swerve-x-h1 --verdict congested -i 1")
@click.option("--ports", is_flag=True, help="Show ports: state, congestion notifications, losses, addresses.")
@click.option("--suspects", is_flag=True, help="Show hosts and links that bad queue pairs have in common.")
@filtered("dst", "pid", "command", "interface", "path", "verdict")
@common()
@click.pass_context
def rdma(context: click.Context, options: Options, asked: Asked, ports: bool, suspects: bool) -> None:
    """Show RDMA queue pairs: posted and completed work requests, bandwidth, verdict.

    Each queue pair has a verdict with its reason: congested (slow, with a growing backlog), slow_receiver (the peer has
    no receive buffers), dead (outstanding requests, none completes), no_demand (nothing to send), ok. If no RDMA is
    visible, the output says why. Details: docs/rdma.md
    """
    if context.invoked_subcommand is None:
        _frames(options, _one_of({"ports": ports, "suspects": suspects}) or "rdma", asked)


@rdma.command(
    epilog="Example: swerve rdma tap -- ib_write_bw -d mlx5_0 10.9.0.2",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@NETNS
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def tap(netns: str | None, command: Sequence[str]) -> int:
    """Run COMMAND with the tap, which counts its queue pairs without breakpoints.

    For programs that post so much that breakpoints would cost too much; they need no change. Details: docs/rdma.md; the
    cost, and when not to use it: docs/overhead.md
    """
    from pytools.sources.rdma import tap_command

    return tap_command.run(list(command), netns)


@click.group(invoke_without_command=True, epilog="Example: swerve jobs -n swerve-x-h1 --sort lag -i 2")
@filtered("job", "pid", "command", "dst", "interface", "path", "pod")
@common()
@click.pass_context
def jobs(context: click.Context, options: Options, asked: Asked) -> None:
    """Show distributed jobs: ranks on this host, connections, bytes by path, and which rank is behind.

    Finds ranks by the environment that torchrun, Slurm or MPI gave them, and queries NCCL's RAS on this host: a rank is
    behind when it has begun fewer collective operations than another one had a moment earlier. The first table takes
    six seconds. Details: docs/jobs.md
    """
    if context.invoked_subcommand is None:
        _frames(options, "jobs", asked)


@jobs.command(
    "watch",
    epilog="Example: swerve jobs watch -i 2 -- torchrun --nproc-per-node 8 train.py",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object per communicator and interval.")
@click.option(
    *("-i", "--interval"),
    type=click.FloatRange(min=0.2),
    callback=finite,
    default=5.0,
    metavar="SECONDS",
    help="Report every SECONDS (default: 5).",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def watch_job(as_json: bool, interval: float, command: Sequence[str]) -> int:
    """Run COMMAND with NCCL's profiler plugin, and name the rank that the others wait for.

    Reports go to standard error: per communicator, the operations, bytes and kernel durations of the ranks on this
    host. Needs no agent. Details: docs/nccl.md
    """
    from pytools.sources.jobs.nccl import watch_command

    return watch_command.run(list(command), interval, as_json)


@click.group(invoke_without_command=True, epilog="Example: swerve gpu -n swerve-x-h1 --sort temperature -i 2")
@filtered()
@common()
@click.pass_context
def gpu(context: click.Context, options: Options, asked: Asked) -> None:
    """Show GPUs: clocks and what lowers them, power, temperature, ECC and XID errors, PCIe, NVLink.

    Reads NVIDIA GPUs through NVML, each figure at an interval that depends on its cost. Needs the package nvidia-ml-py.
    Details: docs/gpu.md
    """
    if context.invoked_subcommand is None:
        _frames(options, "gpu", asked)


@gpu.command("clock", epilog="Example: swerve gpu clock -i 5 -c 3")
@click.option("-j", "--json", "as_json", is_flag=True, help="Print one JSON object per GPU and interval.")
@click.option(
    *("-i", "--interval"),
    type=click.FloatRange(min=1),
    callback=finite,
    default=5.0,
    metavar="SECONDS",
    help="Report every SECONDS (default: 5).",
)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after N reports (default: 1).")
def gpu_clock(as_json: bool, interval: float, count: int | None) -> int:
    """Relate the timers of this host's GPUs to CLOCK_MONOTONIC: offset, drift and bound of each.

    Starts a process that makes a CUDA context on every GPU and reads its timer ten times a second. Needs no agent; the
    setting gpu.clock has the agent do the same. Details: docs/gpu.md
    """
    from pytools.sources.gpu import clock_command

    return clock_command.run(interval, count or 1, as_json)


@click.command("self", epilog="Example: swerve self -n swerve-x-h1 -c 1")
@common()
def self_(options: Options) -> None:
    """Show what the agent costs, and what it lost.

    While this runs, the kernel times every BPF program (about 70 ns a packet).
    """
    _frames(options, "self")


@click.command(epilog="Example: swerve schema > signals.schema.json")
def schema() -> None:
    """Print the JSON Schema of the signals: the lines of `swerve watch`, and of commands with -j that print signals.

    What a program may rely on between versions: docs/signals.md
    """
    import json

    from pytools import schema as published

    click.echo(json.dumps(published.json_schema(), indent=2))


@click.command(epilog="Example: swerve metrics -n swerve-x-h1 --listen 127.0.0.1:9762")
@click.option("--listen", default="127.0.0.1:9762", show_default=True, metavar="ADDR:PORT", help="Listen on ADDR:PORT.")
@click.option("--allow-remote", is_flag=True, help="Allow an address that other hosts can reach.")
@click.option("--once", is_flag=True, help="Print the metrics once and exit (exit code 1 without an agent).")
@click.option("--openmetrics", is_flag=True, help="With --once, print OpenMetrics instead of Prometheus text.")
@common(follows=False)
def metrics(options: Options, listen: str, allow_remote: bool, once: bool, openmetrics: bool) -> int:
    """Serve the metrics of an agent to Prometheus; the agent may restart.

    Serves http://127.0.0.1:9762/metrics as Prometheus text, or as OpenMetrics on request. Without an agent it reports
    `swerve_up 0`. Alert rules and a dashboard are in examples/. Details: docs/metrics.md
    """
    from pytools import directories
    from pytools.views.metrics import server, serving

    if options.json or (openmetrics and not once):
        raise click.UsageError("metrics has no --json, and --openmetrics needs --once")
    agent_socket, instance = directories.readers_socket(options.netns), directories.instance(options.netns)
    if once:
        return 0 if serving.once(agent_socket, instance, sys.stdout.buffer, openmetrics) else 1
    serving.serve(agent_socket, instance, server.address_of(listen, allow_remote))
    return 0


@click.command(epilog="Example: swerve top -n swerve-x-h1")
@click.option(
    "--allow-actions", is_flag=True, help="Allow drains and pins from the view; each is confirmed by typing it."
)
@common()
def top(options: Options, allow_actions: bool) -> int:
    """Show a live view of paths, flows, links and events: delay, queueing, loss, weights, states (? lists the keys).

    Without a running agent, root measures by itself while the view is open, with the agent's configuration. In a pipe
    it prints a report, once or as -c and -i say. Details: docs/top.md
    """
    from pytools.views import actions, follow
    from pytools.views.kinds import VIEWS
    from pytools.views.top import feed, live

    if options.json:
        with client_of(options, VIEWS["top"].types) as client:
            follow.show(client, "top", options.count, options.every_s, options.json, options.color)
        return 0
    steering = actions.steering(options.netns)
    with feed.attached(options.netns, options.config) as (socket, child):
        return live.run(
            socket,
            options.count,
            options.interval_s,
            options.color,
            steering=steering,
            allow_actions=allow_actions,
            child=child,
        )


@click.command(epilog="Example: swerve doctor -n swerve-x-h1 --clean")
@click.option("--clean", is_flag=True, help="Remove what a crashed agent left in the kernel.")
@click.option(
    "--bundle",
    metavar="OUT.tar.gz",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a support bundle without secrets to OUT.tar.gz.",
)
@click.option(
    "--redact", is_flag=True, help="With --bundle, replace addresses outside the policy's prefixes with numbers."
)
@common(follows=False)
def doctor(options: Options, clean: bool, bundle: Path | None, redact: bool) -> int:
    """Check what this host can do, what is missing, what each gap costs and how to fix it.

    Exit code 5: something essential is missing.
    """
    from pytools import config, directories
    from pytools.doctor import report as room
    from pytools.sources import programs

    if clean and bundle is not None:
        raise click.UsageError("--clean and --bundle are mutually exclusive: make the bundle first")
    if redact and bundle is None:
        raise click.UsageError("--redact is for a bundle: name one with --bundle")
    if clean:
        room.print_removed(room.clean(options.netns), options.json)
        return 0
    found = config.AgentConfig("", [])
    with contextlib.suppress(SwerveError):  # a configuration that is missing or wrong is among the findings
        found = config.read(options.config or directories.default_config(options.netns))[0]
    wanted = programs.all_of(found)
    if bundle is not None:
        room.bundle(bundle, options.netns, options.config, wanted, redact, options.json)
        return 0
    return room.run(options.netns, options.config, wanted, options.json, options.color)


commands: list[click.Command] = [
    agent,
    delay,
    clocks,
    tcp,
    drops,
    links,
    rdma,
    jobs,
    gpu,
    self_,
    watch,
    replay,
    schema,
    report,
    metrics,
    top,
    doctor,
    LazyCommand("lab", "pytools.lab.cli", "lab", "Run a fabric in network namespaces, to try things on."),
]


def run(root: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, having said what went wrong in one line.

    0 ok, 1 failed at run time, 2 usage, 3 policy invalid, 4 refused, 5 privilege or kernel feature missing,
    130 interrupted.
    """
    streams.prepare()
    try:
        given = None if arguments is None else list(arguments)
        result = root.main(args=given, prog_name="swerve", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        asked = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "swerve"
        what = " ".join(error.format_message().split()).rstrip(".")
        click.echo(f"swerve: {what}; `{asked} --help` says what there is", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # whoever read us has seen enough
        streams.write_no_more()
        return 0
    except (SwerveError, OSError) as error:
        said = error if isinstance(error, SwerveError) else _in_words(error)
        click.echo(f"swerve: {said}", err=True)
        return said.exit_code


def _in_words(error: OSError) -> SwerveError:
    """What of the system's errors is nobody's fault here; another one is, and is raised again."""
    if isinstance(error, PermissionError):
        return not_permitted(error, error.filename)
    if error.errno not in streams.UNWRITABLE or error.filename is not None:
        raise error
    streams.write_no_more()
    return SwerveError(f"writing the output failed: {error.strerror}", "make room, or write it elsewhere")
