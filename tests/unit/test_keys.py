"""The published lists of keys: each key of a model, with its meaning, form and default, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import keys
import pytest
import reference
import yaml
from support import ROOT

from pytools import config
from steering.policy.actions import KINDS
from steering.policy.base import Within
from steering.policy.conditions import SIGNALS
from steering.policy.schema import json_schema

BOTH = {"config.txt": keys.of_agent(), "policy.txt": keys.of_policy()}


def leaves(raw: Any, prefix: str = "") -> dict[str, Any]:
    """Key -> value of a configuration, as the list names it."""
    if isinstance(raw, dict):
        return {key: value for name, each in raw.items() for key, value in leaves(each, f"{prefix}.{name}").items()}
    if isinstance(raw, list):
        return leaves(raw[0], f"{prefix}[]")
    return {prefix.removeprefix("."): raw}


@pytest.mark.parametrize("file", BOTH)
def test_the_published_list_is_that_of_the_models(file: str) -> None:
    assert (ROOT / "docs" / file).read_text() == reference.FILES[file](), "python scripts/reference.py"


@pytest.mark.parametrize("file", BOTH)
def test_every_key_has_a_meaning_and_a_form(file: str) -> None:
    assert [each.name for each in BOTH[file] if not each.meaning] == []
    assert [each.name for each in BOTH[file] if not each.form and ".signal: " not in each.name] == []


def test_the_agents_keys_are_those_of_a_file_with_their_defaults() -> None:
    shown = {each.name: each.form for each in BOTH["config.txt"] if each.form not in ("mapping", "list, required")}
    known = leaves(config.as_file(config.AgentConfig("", [config.Peer("", "")])))
    assert shown.keys() == known.keys()
    for name, form in shown.items():
        default = re.search(r"default ([^,]+)", form)
        assert yaml.safe_load(default[1] if default else "''") == known[name], name


def test_every_key_and_every_word_of_a_policy_is_listed() -> None:
    schema = json_schema()
    names = {re.sub(r": .*|\[\]", "", each.name).rpartition(".")[2] for each in BOTH["policy.txt"]}
    forms = " ".join(each.form for each in BOTH["policy.txt"])
    for part in [schema, *schema["$defs"].values()]:
        assert part.get("properties", {}).keys() - names == set()
        for field in part.get("properties", {}).values():
            assert [word for word in field.get("enum", []) if not re.search(rf"\b{word}\b", forms)] == []
    listed = {each.name for each in BOTH["policy.txt"]}
    assert {f"rules[].when.signal: {signal}" for signal in SIGNALS} <= listed
    assert {f"rules[].then.{kind}" for kind in KINDS} <= listed


def test_limits_and_signals_are_named() -> None:
    found = {(each.name, each.signals): each.form for each in BOTH["policy.txt"]}
    assert found["safety.lease", ()] == "duration, default 3s, between 2s and 1m"
    assert found["safety.herd.jitter", ()] == "duration, default 0s, at most 1m"
    assert found["safety.max_moves_per_flow.per", ()] == "duration, default 10s, more than 0"
    assert found["rules[].then.shift.share", ()] == "number 0 to below 1, default 0"
    assert found["rules[].when.for", ()] == "duration, default 0s"
    assert found["rules[].when.quantile", ("queueing_delay",)] == "p50 or p99 or last, default p50"
    assert str(Within(10**9)) == "at least 1s"


def test_a_comment_is_behind_its_field_or_above_it(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        "class Sample:\n    first: int = 1  # behind\n    # above,\n    # in two lines\n    second: str\n\n"
        "    third: bool\n"
    )
    ((kind, fields),) = keys.classes(source)
    assert isinstance(kind, ast.ClassDef) and kind.name == "Sample"
    assert fields == {"first": ("int", "behind"), "second": ("str", "above, in two lines"), "third": ("bool", "")}
