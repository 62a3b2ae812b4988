"""The priority of agent and controller: raised where they may, left where it was chosen, never the reason to end."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

from pytools.doctor import agent
from pytools.doctor.checks import checks
from pytools.kernel import privileges
from pytools.kernel.features import Finding
from pytools.sources.probing.schedule import PRIORITY, Schedule

UNITS = [ROOT / "packaging" / "systemd" / f"swerve-{name}.service" for name in ("agent", "steer")]
ASK = (
    "import os; from pytools.kernel import privileges; why = privileges.raise_priority(); "
    "import subprocess, sys; "
    "child = subprocess.run(['/usr/bin/nice'], capture_output=True, text=True).stdout.strip(); "
    "print(os.getpriority(os.PRIO_PROCESS, 0), child, why)"
)
NOBODY = 65534


def said(nice: int, *before: str, as_nobody: bool = False) -> str:
    def prepare() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        if as_nobody:
            os.setresuid(NOBODY, NOBODY, NOBODY)

    command = [*before, sys.executable, "-c", ASK]
    environment = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, preexec_fn=prepare, env=environment, cwd="/", capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("nice", "after"), [(0, -10), (5, 5), (-3, -3), (-15, -15)])
def test_root_raises_what_nobody_chose(nice: int, after: int) -> None:
    assert said(nice) == f"{after} {after}", "what it starts has the same"


def test_who_may_not_goes_on_and_says_why() -> None:
    assert said(0, as_nobody=True) == "0 0 nice -10 refused: Permission denied"
    assert said(7, as_nobody=True) == "7 7"


def under(unit: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "under_unit.py"), str(unit), "--uid", str(NOBODY), "--"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_sets_it_and_its_filter_does_not_end_us(unit: Path, tmp_path: Path) -> None:
    assert said(0, *under(unit)) == "-10 -10"
    bare = tmp_path / unit.name
    bare.write_text(re.sub(r"^Nice=.*\n", "", unit.read_text(), flags=re.MULTILINE))
    assert said(0, *under(bare)) == "0 0 nice -10 refused: Operation not permitted"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_come_before_applications(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    assert "Nice=-10" in lines
    assert [int(line.removeprefix("CPUWeight=")) > 100 for line in lines if line.startswith("CPUWeight=")] == [True]


@pytest.mark.parametrize(
    ("nice", "pacer", "finding"),
    [
        (-10, 40, Finding(True, "process 7 at nice -10; its probes are sent at real-time priority 40")),
        (-15, 0, Finding(True, "process 7 at nice -15; its probes are sent at no real-time priority")),
        (0, 0, Finding(False, "process 7 at nice 0; its probes are sent at no real-time priority")),
        (None, 0, Finding(None, "process 7 cannot be seen from here")),
    ],
)
def test_doctor_shows_that_of_the_agent(
    monkeypatch: pytest.MonkeyPatch, nice: int | None, pacer: int, finding: Finding
) -> None:
    monkeypatch.setattr(agent, "_agent", lambda _: (7, 0))
    monkeypatch.setattr(agent.privileges, "priority_of", lambda _: nice)
    monkeypatch.setattr(agent.privileges, "pacer_priority", lambda _: pacer)
    (check,) = [each for each in checks(None, None, []) if each.name == "priority of the agent"]
    assert check.find() == finding and not check.essential


def test_the_priority_of_a_pacer_is_that_of_the_process_it_is() -> None:
    with contextlib.ExitStack() as stack:
        schedule = stack.enter_context(contextlib.closing(Schedule(stack.enter_context(socket.socket()))))
        assert privileges.pacer_priority(os.getpid()) == PRIORITY
        assert schedule.restarts == 0
    assert privileges.pacer_priority(os.getpid()) == 0


def test_doctor_asks_nothing_of_an_agent_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_agent", lambda _: None)
    (check,) = [each for each in checks(None, None, []) if each.name == "priority of the agent"]
    assert check.find() == Finding(None, "no agent runs")
