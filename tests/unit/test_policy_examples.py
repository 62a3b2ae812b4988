"""Every policy that a page or a file shows is one, passes the schema, and is explained."""

from __future__ import annotations

import re

import jsonschema
import pytest
import support
import yaml
from click.testing import CliRunner
from policy_kit import HEAD

from steering.commands.policy import policy as command
from steering.policy.actions import KINDS
from steering.policy.conditions import SIGNALS, leaves
from steering.policy.explanation import explain
from steering.policy.file import parse
from steering.policy.schema import json_schema

PAGE = (support.ROOT / "docs" / "policy.md").read_text()
FILES = sorted((support.ROOT / "examples" / "policies").glob("*.yaml"))


def documented() -> list[str]:
    """The blocks of the page, each as a whole policy: those that are rules alone get a head."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    whole = [block if block.startswith("version:") else HEAD + re.sub("^", "  ", block, flags=re.M) for block in blocks]
    return [text.replace("[10.9.0.0/16]", '[10.9.0.0/16, "fd00:9::/64"]', 1) for text in whole]


SHOWN = [*documented(), *(file.read_text() for file in FILES)]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("text", SHOWN, ids=lambda text: re.search(r"name: ([\w-]+)", text)[1])
def test_what_is_shown_is_a_policy(text):
    policy = parse(text)
    VALIDATOR.validate(yaml.safe_load(text))
    words = explain(policy)
    for rule in policy.rules:
        assert f" {rule.name}: on a path" in words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_command_finds_nothing_wrong_with_the_files(file):
    done = CliRunner().invoke(command, ["check", str(file)], standalone_mode=False)
    first, *noted = done.output.splitlines()
    assert (done.return_value, first) == (0, f"{file}: valid")
    alone = ["leave-congested-rail", "relieve-busy-rail"] if file.stem == "congestion" else []
    rdma = ["queue-pairs-dead"] if file.stem == "rdma" else []
    assert [line.split(": ")[:2] for line in noted] == [["note", name] for name in alone + rdma]


def test_every_signal_and_every_action_is_in_an_example():
    rules = [rule for text in SHOWN for rule in parse(text).rules]
    assert {leaf.signal for rule in rules for leaf in leaves(rule.when)} == set(SIGNALS)
    assert {rule.then.kind for rule in rules} == set(KINDS)


def test_the_worked_example():
    assert [rule.name for rule in parse(documented()[0]).rules] == [
        "leave-dead-path",
        "leave-congested-rail",
        "relieve-busy-rail",
    ]


def test_the_schema_refuses_what_it_can_see():
    """Ranges, keys, words and how many actions; what needs two keys at once (clear_below) is left to `check`."""
    text = documented()[0]
    for old, new in (
        ("version: 1", "version: 2"),
        ("share: 0}", "share: 1}"),
        ("share: 0}", "shre: 0}"),
        ("5ms", "5"),
        ("p50", "p95"),
        ("queueing_delay", "queuing_delay"),
        ("then: {shift: {share: 0}}", "then: {}"),
        ("then: {shift: {share: 0}}", "then: {shift: {}, drain: {}}"),
        ("lease: 3s", "herd: {fraction: 0}"),
    ):
        assert old in text
        assert not VALIDATOR.is_valid(yaml.safe_load(text.replace(old, new))), new
