"""A full disk, or no output at all, is one line or none: never a traceback."""

from __future__ import annotations

import subprocess

import pytest
from support import ROOT, SWERVE

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
