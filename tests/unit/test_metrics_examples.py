"""Alert rules and dashboard: each says what to do, and asks for metrics and labels that there are.

That a real Prometheus finds data for each query is in tests/fabric/test_metrics.py.
"""

from __future__ import annotations

import re

import yaml
from metrics_queries import CONFIG, RULES, dashboard, queries, rules

from pytools.views.metrics.families import FAMILIES

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
