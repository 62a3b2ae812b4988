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
from pytools.cli_options import LazyCommand, Options, client_of, common
from pytools.cli_tables import clocks, delay, drops, gpu, jobs, links, rdma, self_, tcp
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
@common(follows=False, without="json")
def metrics(options: Options, listen: str, allow_remote: bool, once: bool, openmetrics: bool) -> int:
    """Serve the metrics of an agent to Prometheus; the agent may restart.

    Serves http://127.0.0.1:9762/metrics as Prometheus text, or as OpenMetrics on request. Without an agent it reports
    `swerve_up 0`. Alert rules and a dashboard are in examples/. Details: docs/metrics.md
    """
    from pytools import directories
    from pytools.views.metrics import command, server

    if openmetrics and not once:
        raise click.UsageError("--openmetrics needs --once")
    agent_socket, instance = directories.readers_socket(options.netns), directories.instance(options.netns)
    if once:
        return 0 if command.once(agent_socket, instance, sys.stdout.buffer, openmetrics) else 1
    command.serve(agent_socket, instance, server.address_of(listen, allow_remote))
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
    from pytools.views.registry import VIEWS
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
