"""Every command says what it does, and its help ends with an example that its own options understand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from steering.cli import root

SHELL = re.compile(r"\s(?:>{1,2}|<|\|{1,2}|&&|;)\s.*$")


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """A command and all below it; those that are imported when used are imported."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    if isinstance(context.command, click.Group):
        for each in context.command.list_commands(context):
            below = context.command.get_command(context, each)
            assert below is not None
            yield from commands(below, each, context)


ALL = list(commands(root, "swerve"))


def examples(command: click.Command) -> list[str]:
    return re.findall(r"^\s*Examples?: (.+)$", command.epilog or "", re.MULTILINE)


def understood(line: str) -> str:
    """The path of the command that this line runs, once all its words were understood; nothing is run.

    Raises
    ------
    click.UsageError
        If a word is not understood.
    """
    words = shlex.split(SHELL.sub("", line))
    context, words = root.make_context(words[0], [], resilient_parsing=True), words[1:]
    while isinstance(context.command, click.Group) and words and not words[0].startswith("-"):
        below = context.command.get_command(context, words[0])
        if below is None:
            context.fail(f"there is no command {words[0]}")
        context = below.make_context(words[0], [], parent=context, resilient_parsing=True)
        words = words[1:]
    with context.command.make_context(context.info_name, list(words), parent=context.parent):
        return context.command_path


def test_there_are_commands() -> None:
    paths = {context.command_path for context in ALL}
    assert {"swerve", "swerve agent", "swerve lab up", "swerve rdma tap", "swerve steer drain", "swerve demo"} <= paths


@pytest.mark.parametrize("context", ALL, ids=lambda context: context.command_path)
def test_help_has_an_example_that_is_understood(
    context: click.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = examples(context.command)
    assert shown, f"{context.command_path} --help shows no example"
    monkeypatch.chdir(tmp_path)
    for line in shown:
        for name in re.findall(r"(?<= )[\w-]+\.(?:jsonl?|yaml|zst)\b", line):
            Path(name).touch()  # a file that is read is opened when the line is understood
        path = understood(line)
        assert f"{path} ".startswith(f"{context.command_path} "), f"{line!r} is an example of {path}"


@pytest.mark.parametrize("context", ALL, ids=lambda context: context.command_path)
def test_help_is_printed_with_the_example(context: click.Context) -> None:
    path = context.command_path
    shown = CliRunner().invoke(root, [*path.split()[1:], "--help"], prog_name="swerve")
    assert shown.exit_code == 0 and context.command.help
    assert shown.output.startswith(f"Usage: {path} ")
    said = "".join(shown.output.split())  # lines are folded, at hyphens too
    assert all("".join(line.split()) in said for line in examples(context.command))


@pytest.mark.parametrize(
    "line", ["swerve delay --frobnicate", "swerve steer pin", "swerve tcp --port x", "swerve la up"]
)
def test_a_wrong_example_is_seen(line: str) -> None:
    with pytest.raises(click.UsageError):
        understood(line)
