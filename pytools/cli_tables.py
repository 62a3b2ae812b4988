"""The commands that show tables, one kind of signal each, and those beside them that watch one process.

Whatever a command needs is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from pytools.cli_options import NETNS, Asked, Options, client_of, common, filtered, report_every


def _frames(options: Options, kind: str, asked: Asked) -> None:
    """The body of the commands that show tables: one table, or one JSON line per row, at each interval."""
    from pytools.views import follow, query
    from pytools.views.registry import VIEWS

    wanted = query.asked_for(kind, asked.sort, asked.filters)
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


@click.command(epilog="Example: swerve drops -n swerve-x-h1 --reason qdisc -i 2")
@filtered("reason")
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
@report_every(0.2)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def watch_job(as_json: bool, interval: float, command: Sequence[str]) -> int:
    """Run COMMAND with NCCL's profiler plugin, and name the rank that the others wait for.

    Reports go to standard error: per communicator, the operations, bytes and kernel durations of the ranks on this
    host. Needs no agent. Details: docs/nccl.md
    """
    from pytools.sources.jobs.nccl import watch_command

    return watch_command.run(list(command), interval, as_json)


@click.group(invoke_without_command=True, epilog="Example: swerve gpu -n swerve-x-h1 --sort temperature -i 2")
@filtered("gpu", "pid")
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
@report_every(1)
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after N reports (default: 1).")
def gpu_clock(as_json: bool, interval: float, count: int | None) -> int:
    """Relate the timers of this host's GPUs to CLOCK_MONOTONIC: offset, drift and bound of each.

    Starts a process that makes a CUDA context on every GPU and reads its timer ten times a second. Needs no agent; the
    setting gpu.clock has the agent do the same. Details: docs/gpu.md
    """
    from pytools.sources.gpu import clock_command

    return clock_command.run(interval, count or 1, as_json)


@click.command("self", epilog="Example: swerve self -n swerve-x-h1 --sort per-run")
@filtered()
@common()
def self_(options: Options, asked: Asked) -> None:
    """Show what the agent costs, and what it lost.

    While this runs, the kernel times every BPF program (about 70 ns a packet).
    """
    _frames(options, "self", asked)
