"""Values of options that a type alone would take, and that no command can do anything with."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from steering.cli import root


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\nb", "x" * 81, "\udcff"])
@pytest.mark.parametrize("words", [("self",), ("agent",), ("top",), ("rdma", "tap"), ("steer", "status")])
def test_an_instance_is_named_like_a_namespace(words: tuple[str, ...], name: str) -> None:
    done = CliRunner().invoke(root, [*words, "-n", name])
    assert done.exit_code == 2 and "names no network namespace" in done.output


@pytest.mark.parametrize("words", [("self", "-i"), ("top", "-i"), ("report", "x.html", "-c")])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_seconds_come_to_an_end(words: tuple[str, ...], number: str) -> None:
    done = CliRunner().invoke(root, [*words, number])
    assert done.exit_code == 2 and "is no number of seconds" in done.output
