"""What is typed: help with examples that are understood, options without sense, and output that cannot be written.

An error is one line, never a traceback."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import samples
from click.testing import CliRunner
from support import ROOT, SWERVE, mentions

from pytools.signals import encode
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


# ---- values that a type alone would take, and that no command can do anything with ----


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\nb", "x" * 81, "\udcff"])
@pytest.mark.parametrize("words", [("self",), ("agent",), ("top",), ("rdma", "tap"), ("steer", "status")])
def test_an_instance_is_named_like_a_namespace(words: tuple[str, ...], name: str) -> None:
    done = CliRunner().invoke(root, [*words, "-n", name])
    assert done.exit_code == 2 and "is not the name of a network namespace" in done.output


@pytest.mark.parametrize("words", [("self", "-i"), ("top", "-i"), ("report", "x.html", "-c")])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_seconds_come_to_an_end(words: tuple[str, ...], number: str) -> None:
    done = CliRunner().invoke(root, [*words, number])
    assert done.exit_code == 2 and "is not a number of seconds" in done.output


# ---- a full disk, no output at all, or one that lacks our characters ----

WORDS = [("schema",), ("--help",), ("policy", "schema")]


@pytest.mark.parametrize("words", WORDS)
def test_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*SWERVE, *words], stdout=full, stderr=subprocess.PIPE, cwd=ROOT, check=False, text=True)
    assert done.returncode == 1
    said = "swerve: writing the output failed: No space left on device; make room, or write it elsewhere\n"
    assert done.stderr == said


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed_are_no_fault(closed: str) -> None:
    command = " ".join(SWERVE)
    done = subprocess.run(
        ["bash", "-c", f"{command} schema {closed}"], capture_output=True, cwd=ROOT, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_standard_input_that_is_closed_has_nothing_in_it() -> None:
    command = " ".join(SWERVE)
    done = subprocess.run(
        ["bash", "-c", f"{command} replay - <&-"], capture_output=True, cwd=ROOT, check=False, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_are_lacking_become_plain_ones(tmp_path: Path, encoding: str) -> None:
    """As in a locale of that encoding; a µs must not become what could be an ms."""
    file = tmp_path / "watched.jsonl"
    file.write_bytes(b"".join(encode(each) + b"\n" for each in samples.one_of_each()))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [*SWERVE, "replay", str(file), "--view", "delay"]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert ("us" in text) == (encoding == "ascii") and "?" not in text
    assert ("->" in text) == (encoding != "utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("self", "--bogus"), ("No such option", "'--bogus'", "`swerve self --help`")),
        (("bogus",), ("No such command", "'bogus'", "`swerve --help`")),
        (("steer", "drain"), ("Missing argument", "'INTERFACE|GATEWAY'", "`swerve steer drain --help`")),
    ],
)
def test_what_was_typed_wrongly_is_one_line(words: tuple[str, ...], says: tuple[str, ...]) -> None:
    done = subprocess.run([*SWERVE, *words], capture_output=True, cwd=ROOT, check=False, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert mentions(done.stderr, "swerve", *says)
