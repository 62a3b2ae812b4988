"""The flight recorder of a real agent: it has what watchers saw, also after a kill; policies are tried on it.

The agents run as the shipped unit runs one: what root may do besides is not needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import by_unit
import pytest
import support

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab import Lab
from pytools.recording import reader
from pytools.recording.reader import Read

pytestmark = pytest.mark.beside

EVERY_S = 0.2  # to read a recording takes processor time

# Far above what a machine without a free processor makes of idle rails, and well below their full queues: 80 ms.
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave
    when: {signal: queueing_delay, quantile: p50, above: 20ms, for: 40ms, clear_below: 5ms}
    then: {shift: {share: 0}}
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    settings = {"hosts": 2, "rails": 2, "rate": "100mbit", "queue_bytes": 1_000_000}
    with by_unit.agents_by_the_unit(), Lab.up(f"rec{os.getpid()}", **settings) as made:
        made.start(made.hosts[1], [*support.SWERVE, "agent", "-n", made.hosts[1].netns])  # who answers
        yield made


@contextlib.contextmanager
def agent(lab: Lab) -> Iterator[subprocess.Popen[str]]:
    """The agent of the first host."""
    host = lab.hosts[0]
    command = [*support.SWERVE, "agent", "-n", host.netns]
    process = lab.start(host, command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        support.wait_until(lambda: directories.agent_socket(host.netns).exists(), 30, "the agent serves")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(60)


def swerve(lab: Lab, *words: str) -> list[str]:
    return support.swerve(*words, "-n", lab.hosts[0].netns).stdout.splitlines()


def watched(lab: Lab, seconds: float, file: Path) -> set[str]:
    """What a watcher of everything that is recorded saw in its time."""
    kinds = ["path_delay", "path_liveness", "path_mtu", "path_ecn", "tcp_path", "tcp_host", "link", "nexthop_group"]
    words = [word for kind in kinds for word in ("--type", kind)]
    with file.open("w") as out:
        command = [*support.SWERVE, "watch", *words, "-n", lab.hosts[0].netns]
        process = subprocess.Popen(command, stdout=out)
        try:
            support.wait_until(lambda: file.stat().st_size > 0, 20, "it sees something")
            end = time.monotonic() + seconds
            support.wait_until(lambda: time.monotonic() > end, seconds + 5, "it has seen enough")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return set(file.read_text().splitlines())


def test_all_that_a_watcher_saw_is_recorded_once_and_outlives_a_kill(lab: Lab, tmp_path: Path) -> None:
    folder = directories.recording("", lab.hosts[0].netns)
    with agent(lab) as process:
        saw = watched(lab, 5, tmp_path / "watched.jsonl")
        last = max(json.loads(line)["unix_ns"] for line in saw)
        support.wait_until(lambda: newest(folder) > last, 10, "all of it is on the disk", EVERY_S)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    told = Read()
    has = [line.decode() for line in reader.lines(folder, told=told)]
    assert len(saw) > 100 and saw <= set(has)
    assert len(has) == len(set(has)) and told.broken == 0
    assert has == [line for line in swerve(lab, "replay")]
    assert any("±" in line and "rail1" in line for line in swerve(lab, "replay", "--view", "delay"))


def newest(folder: Path) -> int:
    told = Read()
    with contextlib.suppress(SwerveError):  # it has not begun
        for _ in reader.lines(folder, time.time_ns() - 60 * 10**9, told=told):
            pass
    return told.last_unix_ns


def test_a_policy_is_tried_on_what_was_recorded(lab: Lab, tmp_path: Path) -> None:
    """Congestion while nobody steered: the replay says when and why it would have left the rail."""
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    recorded = directories.recording("", lab.hosts[0].netns)
    shutil.rmtree(recorded, ignore_errors=True)  # on a starved machine the probes of other tests wait for real
    began = time.time_ns()
    since = datetime.fromtimestamp(began / 1e9 - 1).isoformat()

    def tried() -> list[dict[str, Any]]:
        words = ["policy", "replay", "--policy", str(file), "--since", since, "-j"]
        return [line for line in map(json.loads, swerve(lab, *words)) if line["type"] == "act"]

    with agent(lab):
        support.wait_until(lambda: newest(recorded) > began, 20, "it records", EVERY_S)
        lab.load(1, "130mbit", toward=2)
        support.wait_until(lambda: congested(recorded, began), 20, "congestion is recorded", EVERY_S)
        acts = support.wait_until(tried, 30, "it would have acted", 5 * EVERY_S)  # once enough of it is recorded
        lab.heal()
    assert acts[0]["under"] == "leave" and "queueing delay" in acts[0]["because"]
    assert acts[0]["after"]["10.1.1.1 dev rail1"] == 0
    assert acts[0]["unix_ns"] > began
    before = [
        json.loads(line) for line in swerve(lab, "policy", "replay", "--policy", str(file), "--until", since, "-j")
    ]
    assert not [line for line in before if line["type"] == "act"], "before that there was none"


@pytest.mark.deadline(240)
def test_thresholds_are_suggested_from_what_was_recorded(lab: Lab, tmp_path: Path) -> None:
    """A minute of health under load, then congestion: what is suggested is a policy, and leaves the congested rail."""
    present, suggested = tmp_path / "policy.yaml", tmp_path / "suggested.yaml"
    present.write_text(POLICY)
    recorded, host = directories.recording("", lab.hosts[0].netns), lab.hosts[0].netns
    shutil.rmtree(recorded, ignore_errors=True)
    began = time.time_ns()

    def suggest() -> tuple[str, subprocess.CompletedProcess[str]]:
        until = datetime.fromtimestamp(time.time()).isoformat()
        words = ["policy", "suggest", "--policy", str(present), "--until", until, "-j", "-n", host]
        return until, support.swerve(*words, check=False)

    def early() -> bool:
        done = suggest()[1]
        return done.returncode == 1 and "too little was recorded" in done.stderr and "--since" in done.stderr

    def enough() -> tuple[str, subprocess.CompletedProcess[str]] | None:
        return made if (made := suggest())[1].returncode == 0 else None

    with agent(lab), contextlib.ExitStack() as stack:
        support.wait_until(lambda: newest(recorded) > began, 20, "it records", EVERY_S)
        # While somebody reads short windows there are five a second.
        stack.enter_context(Client(directories.agent_socket(host), frozenset({"path_delay"})))
        support.wait_until(early, 20, "paths are measured", EVERY_S)
        lab.load(1, "60mbit", toward=2)
        healthy_until, done = support.wait_until(enough, 150, "enough is recorded", every_s=5)
        found = json.loads(done.stdout)
        lab.heal()
        onset = time.time_ns()
        lab.load(1, "130mbit", toward=2)
        support.wait_until(lambda: congested(recorded, onset), 20, "congestion is recorded", EVERY_S)
        lab.heal()
    suggested.write_text(found["policy"])
    (threshold,) = found["thresholds"]
    assert threshold["signal"] == "queueing_delay p50" and threshold["measurements"] >= 300
    assert threshold["above"].startswith("usual p99 × 3, at least ")
    assert acts(lab, suggested, "--until", healthy_until) == found["suggested"]["acts"]
    assert acts(lab, present, "--until", healthy_until) == found["present"]["acts"]
    beyond = [value for value in queues(recorded, onset) if value > 3 * threshold["usual_p99"]]
    # One that was left while all was well, on a busy machine, may not be back when the congestion comes.
    assert acts(lab, suggested) > 0 or len(beyond) < 10, "the congestion is left"
    lines = swerve(lab, "policy", "explain", str(suggested))
    (where,) = [
        number for number, line in enumerate(lines) if line.startswith("What is usual on each path, from the last ")
    ]
    rows = lines[where + 1 :]
    assert len(rows) == 2 and all("leave: queueing_delay p50 above " in row for row in rows)


def acts(lab: Lab, policy: Path, *words: str) -> int:
    """How many acts a replay has."""
    lines = swerve(lab, "policy", "replay", "--policy", str(policy), "-j", *words)
    return sum(json.loads(line)["type"] == "act" for line in lines)


def queues(folder: Path, since_ns: int) -> list[int]:
    """The queueing delays (p50) of all windows, in nanoseconds."""
    signals = [json.loads(line) for line in reader.lines(folder, since_ns)]
    return [each["forward"]["queueing_p50_ns"] or 0 for each in signals if each["type"] == "path_delay"]


def congested(folder: Path, since_ns: int) -> bool:
    return max(queues(folder, since_ns), default=0) > 30_000_000


def test_a_lab_leaves_no_recording_behind(lab: Lab) -> None:
    host = lab.hosts[0]
    with agent(lab):
        support.wait_until(lambda: newest_or_zero(directories.recording("", host.netns)), 20, "it records", EVERY_S)
    with Lab.up(f"rec2{os.getpid()}", hosts=2, rails=1) as other:
        directories.recording("", other.hosts[0].netns).mkdir(parents=True)
        left = directories.state_dir(other.hosts[0].netns)
    assert not left.exists()


def newest_or_zero(folder: Path) -> int:
    return newest(folder) if folder.exists() else 0
