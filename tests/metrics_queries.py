"""The queries that we give to others, in alert rules and in a dashboard; imported as `metrics_queries`."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml
from support import ROOT

RULES: Final = ROOT / "examples" / "prometheus" / "swerve.rules.yaml"
CONFIG: Final = ROOT / "examples" / "prometheus" / "prometheus.yaml"
DASHBOARD: Final = ROOT / "examples" / "grafana" / "swerve.json"
_COMPARISON: Final = re.compile(r"\s(==|!=|>=|<=|>|<)\s[-+.\de]+$")


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    shown: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return shown


def vector(expression: str) -> str:
    """An expression without the comparison at its end: what there is to compare."""
    plain, found = _COMPARISON.subn("", expression)
    assert found == 1, f"no comparison at the end of: {expression}"
    return plain


def queries() -> dict[str, str]:
    """Every query of the rules and of the dashboard, by where it stands; variables have values."""
    found = {f"rule {rule['alert']}": vector(rule["expr"]) for rule in rules()}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['title']} {target['refId']}"] = target["expr"]
    for each in dashboard()["annotations"]["list"]:
        found[f"annotation {each['name']}"] = vector(each["expr"])
    plain = {where: query.replace("$__rate_interval", "30s") for where, query in found.items()}
    return {where: query.replace("$instance", ".*") for where, query in plain.items()}
