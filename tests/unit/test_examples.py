"""The examples that are shipped: alert rules and dashboard ask for what there is, and policies are valid.

That a real Prometheus finds data for each query is in tests/fabric/test_metrics.py."""

from __future__ import annotations

import re

import jsonschema
import pytest
import support
import yaml
from click.testing import CliRunner
from metrics_queries import CONFIG, RULES, dashboard, queries, rules
from policy_kit import HEAD

from pytools.figures import RULED
from pytools.views.metrics.families import FAMILIES
from steering.commands.policy import policy as command
from steering.policy.actions import KINDS
from steering.policy.conditions import MEASURED, SIGNALS, leaves
from steering.policy.explanation import explain
from steering.policy.file import parse
from steering.policy.schema import json_schema

# ---- alert rules and dashboard ----

SUFFIX = re.compile(r"_(bucket|count|sum)$")

OURS = re.compile(r"\b(swerve_\w+)(?:\{([^}]*)\})?")

OF_PROMETHEUS = {"instance", "job", "le"}


def labels_of(name: str) -> set[str]:
    return set(FAMILIES[name if name in FAMILIES else SUFFIX.sub("", name)].labels) | OF_PROMETHEUS


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 20
    for rule in rules():
        assert re.fullmatch(r"Swerve[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+[sm]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "next_step"}
        assert all(len(text) > 30 for text in rule["annotations"].values()), rule["alert"]


def test_what_alerts_say_names_labels_that_their_query_keeps() -> None:
    for rule in rules():
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        names = [name for name, _ in OURS.findall(rule["expr"])]
        known = labels_of(names[0]) if names else OF_PROMETHEUS
        assert used <= known, rule["alert"]


def test_every_query_asks_for_metrics_and_labels_that_exist() -> None:
    found = queries()
    assert len(found) > 80
    for where, query in found.items():
        assert "$" not in query, where
        for name, selector in OURS.findall(query):
            assert name in FAMILIES or FAMILIES[SUFFIX.sub("", name)].kind == "histogram", (where, name)
            for label in re.findall(r"(\w+)\s*(?:=~|!~|=|!=)", selector):
                assert label in labels_of(name), (where, label)
        first = next((name for name, _ in OURS.findall(query)), None)
        for listed in re.findall(r"\b(?:by|without) \(([^)]*)\)", query):
            assert first is not None and {each.strip() for each in listed.split(",")} <= labels_of(first), where


def test_every_panel_has_a_query_and_a_place_of_its_own() -> None:
    panels = dashboard()["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["type"] == "row" or panel["targets"] for panel in panels)
    for panel in panels:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            names = [name for name, _ in OURS.findall(target["expr"])]
            assert used <= (labels_of(names[0]) if names else OF_PROMETHEUS), panel["title"]


def test_the_configuration_names_the_rules_and_the_default_address() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    assert [str(CONFIG.parent / name) for name in config["rule_files"]] == [str(RULES)]
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == ["127.0.0.1:9762"]


# ---- policies ----

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


@pytest.mark.parametrize("text", SHOWN, ids=lambda text: re.findall(r"name: ([\w-]+)", text)[0])
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
    noted = [line for line in noted if not line.startswith("note: hook ")]  # their programs are on few hosts
    assert [line.split(": ")[:2] for line in noted] == [["note", name] for name in alone + rdma]


def test_every_signal_and_every_action_is_in_an_example():
    rules = [rule for text in SHOWN for rule in parse(text).rules]
    shown = {leaf.signal for rule in rules for leaf in leaves(rule.when)}
    assert shown - MEASURED.keys() == set(SIGNALS) - MEASURED.keys()
    # Conditions about figures of one unit are written alike.
    assert {each.unit for each in RULED if each.name in shown} == {each.unit for each in RULED}
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
