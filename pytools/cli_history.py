"""The commands that print signals as they were, or as they come: `watch`, `replay`, `report`.

Whatever a command needs is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytools.cli_options import (
    EVERY_FILTER,
    SINCE,
    UNTIL,
    Asked,
    Options,
    client_of,
    common,
    filtered,
    finite,
    recording_of,
)

if TYPE_CHECKING:
    from pytools.recording.reader import Read
    from pytools.views.history_query import Wanted
    from pytools.views.report.aggregate import Told

_TYPES = click.option(
    "--type", "types", multiple=True, metavar="TYPE", help="Select signals of this type (repeatable)."
)


@click.command(epilog="Example: swerve watch -n swerve-x-h1 --type act --type path_state --since 15m")
@_TYPES
@SINCE
@UNTIL
@filtered(*EVERY_FILTER, sort=False)
@common(without="interval")
def watch(options: Options, types: Sequence[str], since: str | None, until: str | None, asked: Asked) -> None:
    """Print each signal as a line of JSON as it arrives.

    Flushes each line, and reports on standard error how many signals a slow reader missed. With --since, prints the
    recording since then first; with --until, prints only the recording and needs no agent.
    """
    from pytools import directories
    from pytools.ipc import client as bus_client
    from pytools.recording import segments
    from pytools.recording.reader import Read
    from pytools.views import export, history_query

    if until is not None and since is None:
        raise click.UsageError("--until needs --since")
    wanted, told = _wanted(types, asked, since, until), Read()
    if since is not None and (lacking := sorted(segments.NEVER & (wanted.types or frozenset()))):
        click.echo(f"swerve: {', '.join(lacking)} is not recorded ({directories.page('recording.md')})", err=True)
    recording = None if until is None else recording_of(options)
    if recording is not None:
        lots = history_query.lots(history_query.recorded(recording, wanted, told))
        export.lines(lots, sys.stdout.buffer, options.count)
    else:
        with bus_client.LineClient(directories.agent_socket(options.netns), wanted.types) as client:
            if since is None:
                live = history_query.live(client, wanted, told)
            else:
                live = history_query.recorded_and_on(recording_of(options), client, wanted, told)
            export.lines(live, sys.stdout.buffer, options.count, export.missed(client, sys.stderr))
    _tell_of(told, recording)


@click.command(epilog="Example: swerve replay -n swerve-x-h1 --since 15m --path rail1 --view delay")
@click.argument("file", metavar="[FILE]", type=click.Path(path_type=Path, allow_dash=True), required=False)
@_TYPES
@SINCE
@UNTIL
@click.option("--view", metavar="NAME", help="Print the table of command NAME at the end of the range.")
@filtered(*EVERY_FILTER)
@common(follows=False)
def replay(
    options: Options,
    file: Path | None,
    types: Sequence[str],
    since: str | None,
    until: str | None,
    view: str | None,
    asked: Asked,
) -> None:
    """Read back the output of `swerve watch` or the recording of the agent, with the same filters.

    FILE is JSON Lines, plain or gzip, or a recording's directory; - is standard input. Without FILE it reads the
    recording of this host's agent. Prints lines unchanged, and counts invalid ones on standard error.
    """
    from pytools.recording.reader import Read
    from pytools.views import export, follow, history_query, query
    from pytools.views.filters import Query

    wanted, told = _wanted(types, asked, since, until), Read()
    recording = recording_of(options) if file is None else None
    found = history_query.of(file, recording, wanted, told)
    if view is None:
        if asked.sort is not None:
            raise click.UsageError("--sort needs --view")
        export.lines(history_query.lots(found), sys.stdout.buffer)
    else:
        kind = query.view_word(view)
        order = None if asked.sort is None else query.sort_word(kind, asked.sort)
        known = history_query.model(found, told)
        if known.host:  # else there is nothing to be seen of anybody
            follow.show_model(kind, known, options.json, options.color, Query(wanted.filters, order))
        elif file is not None:
            click.echo(f"swerve: {file}: no signal matches", err=True)
    _tell_of(told, recording)


def _wanted(types: Sequence[str], asked: Asked, since: str | None, until: str | None) -> Wanted:
    import time

    from pytools.ipc.wire import check_types
    from pytools.recording.reader import FOR_EVER
    from pytools.views import filters, history_query, times

    tags = frozenset(types) or None
    check_types(tags)
    now_ns = time.time_ns()
    since_ns = 0 if since is None else times.parse(since, now_ns)
    until_ns = FOR_EVER if until is None else times.parse(until, now_ns)
    times.check_order(since_ns, until_ns, now_ns)
    return history_query.Wanted(tags, filters.parse(**asked.filters), since_ns, until_ns)


def _tell_of(told: Read | Told, recording: Path | None) -> None:
    from pytools.views import history_query

    if told.broken:
        click.echo(f"swerve: {told.broken} lines were skipped: they are not signals of this schema", err=True)
    elif recording is not None and not told.records:
        click.echo(f"swerve: {history_query.nothing_then(recording)}", err=True)


@click.command(epilog="Example: swerve report -n swerve-x-h1 --since 03:10 --until 03:25 incident.html")
@click.argument("out", metavar="OUT.html", type=click.Path(dir_okay=False, path_type=Path, allow_dash=True))
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@SINCE
@UNTIL
@click.option(
    "-c",
    "--count",
    "live_s",
    type=click.FloatRange(min=1),
    callback=finite,
    metavar="SECONDS",
    help="Record the next SECONDS instead of reading a recording.",
)
@common(follows=False)
def report(
    options: Options, out: Path, files: tuple[Path, ...], since: str | None, until: str | None, live_s: float | None
) -> None:
    """Write an HTML report: delays between hosts, acts and their reasons, weights, retransmissions, RDMA, clocks.

    Reads the agent's recording (by default the last ten minutes), or FILES (output of `swerve watch`, plain or gzip, or
    directories of recordings, also of several hosts), or with -c the agent's next signals. The page works offline.
    Details: docs/recording.md
    """
    import time

    from pytools.views.report import gather, reading

    reading.check_out(out)
    asked = reading.asked(files, lambda: recording_of(options), since, until, live_s, time.time_ns())
    if asked.live_s is None:
        found = reading.recorded(asked)
    else:
        with client_of(options, gather.TYPES) as client:
            found = reading.live(client, asked.live_s)
    click.echo(reading.summary(found, out, reading.write(found, out), options.json), err=str(out) == "-")
    _tell_of(found.told, None if files or asked.live_s else asked.recording)
