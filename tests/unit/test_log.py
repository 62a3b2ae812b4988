"""Log lines: one a line whatever is in them, fields that a program reads back, levels where the journal reads them."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools import log
from pytools.log import Level

_FIELD = re.compile(r' (\w+)=(?:"((?:[^"\\]|\\.)*)"|(\S+))')


def fields(line: str) -> dict[str, str]:
    """A line's fields, as somebody else would read them."""
    return {
        name: re.sub(r"\\(.)", r"\1", quoted) if plain == "" else plain for name, quoted, plain in _FIELD.findall(line)
    }


def test_words_and_fields() -> None:
    line = log.text("hook failed", {"hook": "a b", "tries": 3, "share": 0.25, "fatal": False, "since": None, "why": ""})
    assert line.startswith("hook failed ")
    assert fields(line) == {"hook": "a b", "tries": "3", "share": "0.25", "fatal": "no", "why": ""}


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(max_size=60), max_size=5))
def test_what_goes_in_comes_out_on_one_line(given_fields: dict[str, str]) -> None:
    line = log.text("event", given_fields)
    assert line.isprintable()
    shown = {name: "".join(c if c.isprintable() else " " for c in value) for name, value in given_fields.items()}
    assert fields(line) == shown


def test_a_line_is_bounded() -> None:
    assert len(log.text("event", {"why": "x" * 100_000})) == 4000


def test_levels_are_for_the_journal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(stream: str) -> str:
        with (tmp_path / "log").open("w+") as file:
            found = os.fstat(file.fileno())
            monkeypatch.setenv("JOURNAL_STREAM", stream.format(dev=found.st_dev, ino=found.st_ino))
            monkeypatch.setattr(sys, "stderr", file)
            log.event(Level.WARNING, "hook failed", hook="x")
            file.seek(0)
            return file.read()

    assert line("{dev}:{ino}") == "<4>hook failed hook=x\n"
    assert line("{dev}:1") == "hook failed hook=x\n", "another stream of the journal's, inherited"
    assert line("") == "hook failed hook=x\n"


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "no descriptor"])
def test_a_log_that_is_gone_ends_nothing(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    log.event(Level.INFO, "still here")
    closed = io.TextIOWrapper(io.BytesIO())
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    log.event(Level.INFO, "still here")


def test_a_part_begins_its_lines_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    log.logger("steer").info("%s", "100% of a \x1b line")
    log.logger().warning("gone")
    log.logger("steer").debug("too much")
    assert capsys.readouterr().err == "swerve steer: 100% of a \x1b line\nswerve: gone\n"
