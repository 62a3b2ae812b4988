"""`swerve policy`: check a policy file, explain it, print its schema. Changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pytools.cli_options import Options, common
from steering import policy as model
from steering import policy_file

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))


@click.group(epilog="Example: swerve policy check /etc/swerve/policy.yaml")
def policy() -> None:
    """Check and explain policy files (docs/policy.md)."""


@policy.command(epilog="Example: swerve policy check /etc/swerve/policy.yaml")
@_FILE
@common(follows=False)
def check(options: Options, file: Path) -> int:
    """Say what is wrong with FILE, every fault with its line.

    Exit code 3 when it is invalid, 4 when it is valid but others could write it.
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
    policy_file.load(file)
    if options.json:
        click.echo(json.dumps({"file": str(file), "valid": True}))
    else:
        click.echo(f"{file}: valid")
    return 0


@policy.command(epilog="Example: swerve policy explain /etc/swerve/policy.yaml")
@_FILE
@common(follows=False)
def explain(options: Options, file: Path) -> None:
    """Say in words what FILE would do."""
    found = policy_file.load(file, guarded=False)
    if options.json:
        # Durations as numbers: for other programs, nanoseconds need no parsing.
        click.echo(json.dumps({"unit": "ns", "policy": found.model_dump(by_alias=True)}))
    else:
        click.echo(model.explain(found))


@policy.command(epilog="Example: swerve policy schema > policy.schema.json")
@common(follows=False)
def schema(options: Options) -> None:
    """Print the JSON Schema of policy files, for editors and other tooling."""
    click.echo(json.dumps(model.json_schema(), indent=None if options.json else 2))
