"""A pytest plugin for the guest: one JSON line per test as soon as it is decided, so that a guest that dies mid-way
still tells what had passed. The file is named by SWERVE_GUEST_RESULTS.
"""

from __future__ import annotations

import json
import os

import pytest


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down the phases that decide: the call, and a set-up or tear-down that did not pass."""
    if report.when != "call" and report.passed:
        return
    line = {
        "test": report.nodeid,
        "outcome": report.outcome,
        "words": report.longreprtext if report.failed else "",
        "why": report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else "",
        "captured": "\n".join(text for _, text in report.sections) if report.failed else "",
    }
    with open(os.environ["SWERVE_GUEST_RESULTS"], "a", encoding="utf-8") as results:
        results.write(json.dumps(line) + "\n")
