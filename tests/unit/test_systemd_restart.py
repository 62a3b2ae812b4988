"""Whether systemd starts a unit again, by what it says of the end and by a made-up `systemctl`."""

from __future__ import annotations

import re

import pytest
from support import ROOT

from steering.commands import undo
from steering.commands.undo import restart_expected

UNIT = "swerve-steer.service"


def ended(result, code="killed", status="KILL"):
    return {"SERVICE_RESULT": result, "EXIT_CODE": code, "EXIT_STATUS": status}


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    def make(said, code=0):
        file = tmp_path / "systemctl"
        file.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("said", "code", "comes"),
    [
        (f"412 {UNIT} restart running", 0, True),
        (f"412 {UNIT} try-restart waiting", 0, True),
        (f"412 {UNIT} stop running", 0, False),
        ("412 swerve-agent.service restart running", 0, False),
        ("", 0, False),
        ("Failed to connect to bus", 1, False),
    ],
)
def test_after_a_stop_the_queue_of_jobs_tells(systemctl, said, code, comes):
    systemctl(said, code)
    assert restart_expected(UNIT, ended("success", "exited", "0")) is comes


def test_without_systemctl_nothing_is_expected(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not restart_expected(UNIT, ended("success", "exited", "0"))


@pytest.mark.parametrize(
    ("end", "comes"),
    [
        (ended("signal"), True),
        (ended("exit-code", "exited", "1"), True),
        (ended("exit-code", "exited", "3"), False),
        (ended("timeout"), True),
        (ended("start-limit-hit"), False),
        ({}, False),
    ],
)
def test_after_a_failure_the_end_itself_tells(systemctl, end, comes):
    systemctl("must not be asked", 1)
    assert restart_expected(UNIT, end) is comes


def test_the_unit_says_the_same():
    text = (ROOT / "packaging/systemd" / UNIT).read_text()
    [for_good] = re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert set(for_good.split()) == undo.FOR_GOOD
    assert "\nRestart=on-failure\n" in text and "steer off --unless-restarted %n\n" in text
    assert " --hand-over " in text
