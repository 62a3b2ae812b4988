"""`swerve policy`: check a policy file, explain it, print its schema, run it over a recording. Changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytools import directories
from pytools.cli_options import SINCE, UNTIL, Options, common, recording_of
from pytools.errors import RefusedError, SwerveError, UsageError
from steering.policy import explanation
from steering.policy import file as policy_file
from steering.policy import schema as policy_schema
from steering.policy.model import Policy

if TYPE_CHECKING:
    from steering.replay.recording import Recording

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group(epilog="Example: swerve policy check /etc/swerve/policy.yaml")
def policy() -> None:
    """Check, explain and try out policy files (docs/policy.md)."""


@policy.command(epilog="Example: swerve policy check /etc/swerve/policy.yaml")
@_FILE
@common(follows=False)
def check(options: Options, file: Path) -> int:
    """Check FILE: print each error with its line, and note what is harmful on many hosts.

    Exit code 3: invalid; 4: valid, but others can write it, or a program or secret of a hook.
    """
    try:
        policy_file.load(file, guarded=False)
    except policy_file.InvalidPolicyError as error:
        if not options.json:
            raise
        for problem in error.problems:
            fault = {"file": str(file), "line": problem.line, "where": problem.where, "what": problem.what}
            click.echo(json.dumps(fault | {"hint": problem.hint}, ensure_ascii=False))
        return error.exit_code
    found = policy_file.load(file)
    refused, missing = _hook_files(found)
    if refused:
        raise RefusedError(f"{file}: valid, but files of hooks are refused:\n" + "\n".join(refused))
    noted = explanation.notes(found) + missing
    if options.json:
        click.echo(json.dumps({"file": str(file), "valid": True, "notes": noted}))
        return 0
    click.echo(f"{file}: valid")
    for note in noted:
        click.echo(f"note: {note}")
    return 0


def _hook_files(found: Policy) -> tuple[list[str], list[str]]:
    """What is wrong with the programs, secrets and certificates that hooks use, and which are not there."""
    from steering.acting import hook_files

    refused, missing = [], []
    for name, hook in found.hooks.items():
        wrong, away = hook_files.objections(hook.options.model_dump(exclude_none=True))
        refused += [f"hooks.{name}: {each}" for each in wrong]
        missing += [f"hook {name}: {each}" for each in away]
    return refused, missing


@policy.command(epilog="Example: swerve policy explain /etc/swerve/policy.yaml")
@_FILE
@common(follows=False)
def explain(options: Options, file: Path) -> None:
    """Explain what FILE does, with the relative thresholds of each path.

    Those are as the controller of this instance has learnt, else as the recording of its agent teaches.
    """
    from steering.commands import usual

    found = policy_file.load(file, guarded=False)
    source, rows = usual.learnt(options, found)
    if options.json:
        # Durations as numbers: for other programs, nanoseconds need no parsing.
        said = {"unit": "ns", "policy": found.model_dump(by_alias=True, exclude_none=True)}
        click.echo(json.dumps(said | {"usual": [usual.row_facts(row) for row in rows]}))
        return
    click.echo(explanation.explain(found))
    for line in usual.row_lines(found, source, rows):
        click.echo(line)


@policy.command(epilog="Example: swerve policy schema > policy.schema.json")
@common(follows=False)
def schema(options: Options) -> None:
    """Print the JSON Schema of policy files, for editors and other tooling."""
    click.echo(json.dumps(policy_schema.json_schema(), indent=None if options.json else 2))


_RECORDING = click.argument(
    "recording", metavar="[RECORDING]", type=click.Path(path_type=Path, allow_dash=True), required=False
)


def _policy(text: str, required: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--policy", "file", type=click.Path(dir_okay=False, path_type=Path), required=required, help=text
    )


_HOST = click.option(
    "--host", default="", metavar="NAME", help="Select the signals of host NAME, if the recording has several."
)


@policy.command(epilog="Example: swerve policy replay recording.jsonl --policy policy.yaml --only-changes")
@_RECORDING
@_policy("Read the policy from FILE.", required=True)
@click.option("--only-changes", is_flag=True, help="Print acts and alerts only, not every change of a path's state.")
@_HOST
@SINCE
@UNTIL
@common(follows=False)
def replay(
    options: Options,
    recording: Path | None,
    file: Path,
    only_changes: bool,
    host: str,
    since: str | None,
    until: str | None,
) -> None:
    """Print what a policy would have done over RECORDING, the output of `swerve watch` (- for standard input).

    Without RECORDING, over the recording of this instance's agent, or a part of it (--since, --until).

    Runs the real engine on the times of the records. It takes recorded nexthop groups, or assumes that all paths to one
    address have weight 1. With -j states and acts are signals, and the last line is the summary.
    """
    from steering.replay import timeline
    from steering.replay.player import Player

    found = policy_file.load(file, guarded=False)
    player, records = Player(found), recorded(options, recording, host, since, until)[1](found)
    for event in player.play(records):
        if timeline.changes_something(event) or not only_changes:
            click.echo(timeline.json_of(event) if options.json else timeline.text_of(event))
    if options.json:
        click.echo(json.dumps(timeline.summary(records, player), ensure_ascii=False))
        return
    for line in timeline.summary_lines(records, player):
        click.echo(line)


@policy.command(epilog="Example: swerve policy suggest --since 2h > policy.new.yaml")
@_RECORDING
@_policy("Suggest thresholds for this policy; default: the one that `swerve steer run` finds, else one for queues.")
@_HOST
@SINCE
@UNTIL
@common(follows=False)
def suggest(
    options: Options, recording: Path | None, file: Path | None, host: str, since: str | None, until: str | None
) -> None:
    """Print a policy with thresholds from the usual values in RECORDING, and the acts that it would have caused.

    RECORDING is the output of `swerve watch`; without it, the recording of this instance's agent, or a part of it
    (--since, --until). Only the thresholds differ from the present policy. The comments above it say what was measured,
    and what both policies would have done. With -j one object: the text, the figures, the acts of both.
    """
    from steering.commands import suggest as command

    if recording is not None and str(recording) == "-":
        raise UsageError("standard input cannot be read twice", "write it to a file first")
    place, records = recorded(options, recording, host, since, until)
    found = command.suggested(place, records, file)
    click.echo(json.dumps(found.facts, ensure_ascii=False) if options.json else found.text, nl=options.json)


def recorded(
    options: Options, recording: Path | None, host: str, since: str | None, until: str | None
) -> tuple[Path, Callable[[Policy], Recording]]:
    """Where a recording is, and what opens the signals in it that a policy needs.

    Raises
    ------
    SwerveError
        If there is none.
    UsageError
        If a file is to be read in part.
    """
    from pytools.recording import files
    from pytools.recording.reader import FOR_EVER, Read
    from pytools.views import times
    from steering.replay.recording import Recording, kinds_of

    now_ns = time.time_ns()
    low, high = (
        limit if text is None else times.parse(text, now_ns) for text, limit in ((since, 0), (until, FOR_EVER))
    )
    place = recording_of(options) if recording is None else recording
    if recording is None and not place.is_dir():
        hint = "name its instance with -n, or give what `swerve watch` has written"
        raise SwerveError(
            f"no agent of instance {directories.instance(options.netns)} has recorded anything: {place}", hint
        )
    if (low, high) != (0, FOR_EVER) and not place.is_dir():
        raise UsageError(f"{place} is read as a whole", "--since and --until are for what the agent has recorded")

    def opened(policy: Policy) -> Recording:
        told = Read()
        return Recording(files.opened(place, told, low, high), told, kinds_of(policy), host)

    return place, opened
