"""A full disk, no output at all, or one that lacks our characters: one line or none, never a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import samples
from support import ROOT, SWERVE

from pytools.signals import encode

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
        (("self", "--bogus"), "No such option '--bogus'; `swerve self --help` says what there is"),
        (("bogus",), "No such command 'bogus'; `swerve --help` says what there is"),
        (("steer", "drain"), "Missing argument 'INTERFACE|GATEWAY'; `swerve steer drain --help` says what there is"),
    ],
)
def test_what_was_typed_wrongly_is_one_line(words: tuple[str, ...], says: str) -> None:
    done = subprocess.run([*SWERVE, *words], capture_output=True, cwd=ROOT, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"swerve: {says}\n")
