"""`swerve demo`: builds the lab, plays the phases, shows the table, and leaves nothing behind.

Progress goes to standard error; the result, a table or one JSON object, to standard output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec

from pytools import directories
from pytools.errors import SwerveError
from pytools.lab import Lab
from pytools.lab.topology import Host
from steering.control import client
from steering.control.requests import Status
from steering.deciding.thresholds import unlearnt
from steering.demo.observe import Observer, Record
from steering.demo.phases import BAD_RAIL, Phase, Stage, placed
from steering.policy.conditions import QueueingDelay
from steering.policy.file import load as load_policy

POLICY = Path(__file__).with_name("policy.yaml")
_STARTUP_S = 30.0
_RETURN_SLACK_S = 20.0


@dataclass(frozen=True)
class Script:
    steer: bool = True
    name: str = "demo"
    hosts: int = 4
    rate: str = "100mbit"
    congested_rate: str = "10mbit"
    load_bit_s: int = 60_000_000  # per host; one healthy rail can carry it
    settled_s: int = 8  # healthy, control, and congested without an act
    steady_s: int = 20  # congested with steering: shorter than the policy's dwell, unless asked otherwise
    returned_s: int = 8
    policy: Path = POLICY


class Result(msgspec.Struct, frozen=True):
    """Everything the demo found, as it is written with `--json`."""

    steered: bool
    hosts: int
    rails: int
    rate: str
    congested_rate: str
    phases: tuple[Phase, ...]
    return_s: float | None  # from healing until every path carried its full weight again


def play(script: Script, say: Callable[[str], None]) -> Result:
    """Play the script on a fresh lab.

    Raises
    ------
    SwerveError
        If the lab, an agent or a controller does not come up; nothing stays behind.
    """
    with contextlib.ExitStack() as kept:
        kept.enter_context(_terminated_like_interrupted())
        say(f"building a lab of {script.hosts} hosts and 2 rails of {script.rate}")
        lab = kept.enter_context(Lab.up(script.name, hosts=script.hosts, rails=2, rate=script.rate))
        logs = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="swerve-demo-")))
        say("starting an agent on each host")
        _start_agents(lab, logs)
        observer = kept.enter_context(contextlib.closing(Observer(lab.hosts)))
        _wait_measured(observer, lab)
        when = load_policy(script.policy).rules[0].when
        assert isinstance(when, QueueingDelay), "the demo's policy begins with a queueing delay"
        stage = Stage(lab, observer, script.load_bit_s, round(unlearnt(when).above))
        phases, return_s = _phases(script, lab, stage, observer, logs, say)
        return Result(script.steer, script.hosts, 2, script.rate, script.congested_rate, phases, return_s)


def _phases(
    script: Script, lab: Lab, stage: Stage, observer: Observer, logs: Path, say: Callable[[str], None]
) -> tuple[tuple[Phase, ...], float | None]:
    def congest() -> None:
        lab.congest(BAD_RAIL, script.congested_rate)

    interface = f"rail{BAD_RAIL}"
    settled, phases = script.settled_s, []
    say(f"healthy: {settled} s of load over both rails")
    phases.append(stage.play("healthy", settled))
    say(f"control: the same load on rail 2 alone, placed by hand, {settled} s")
    with placed(lab, interface):
        phases.append(stage.play("control", settled, idle_interface=interface))
    say(f"congested: rail {BAD_RAIL} cut to {script.congested_rate}, nobody acts, {settled} s")
    phases.append(stage.play("congested", settled, congest))
    lab.heal()
    if not script.steer:
        return tuple(phases), None
    say("starting a controller on each host")
    _start_controllers(lab, logs, observer, script.policy)
    say(f"steered: rail {BAD_RAIL} cut again, controllers act, {script.steady_s} s")
    phases.append(stage.play("steered", script.steady_s, congest, steered=True))
    say("healed: waiting until the paths have their weights back")
    lab.heal()
    return_s = _wait_returned(observer, script.policy)
    say(f"returned after {return_s:.1f} s: {script.returned_s} s of load")
    phases.append(stage.play("returned", script.returned_s))
    return tuple(phases), return_s


def _swerve(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "steering.cli", *words]


def _start_agents(lab: Lab, logs: Path) -> None:
    agents = [_start(lab, host, logs, "agent", _swerve("agent", "-n", host.netns)) for host in lab.hosts]
    deadline_s = time.monotonic() + _STARTUP_S
    for host, process in zip(lab.hosts, agents, strict=True):
        while not directories.agent_socket(host.netns).exists():
            _still_alive(process, host, "agent", logs, deadline_s)
            time.sleep(0.02)


def _start_controllers(lab: Lab, logs: Path, observer: Observer, policy: Path) -> None:
    command = ("steer", "run", "--apply", "--policy", str(policy))
    started = [_start(lab, host, logs, "controller", _swerve(*command, "-n", host.netns)) for host in lab.hosts]
    wanted = {host.name for host in lab.hosts}
    deadline_s = time.monotonic() + _STARTUP_S
    while not observer.wait_for(
        lambda heard: wanted <= {host for (host, _), state in heard.latest.items() if state.state == "healthy"}, 0.2
    ):
        for host, process in zip(lab.hosts, started, strict=True):
            _still_alive(process, host, "controller", logs, deadline_s)
    for host, process in zip(lab.hosts, started, strict=True):
        while not _guarded(host):  # until then a controller changes nothing
            _still_alive(process, host, "controller", logs, deadline_s)
            time.sleep(0.05)


def _guarded(host: Host) -> bool:
    """Whether a host's controller has a guardian that is ready."""
    try:
        return bool(client.ask(directories.state_dir(host.netns), Status()).facts.get("guarded"))
    except SwerveError:
        return False


def _start(lab: Lab, host: Host, logs: Path, role: str, command: list[str]) -> subprocess.Popen[str]:
    with _log(logs, host, role).open("w") as log:
        return lab.start(host, command, stdout=log, stderr=log)


def _log(logs: Path, host: Host, role: str) -> Path:
    return logs / f"{host.name}-{role}.log"


def _still_alive(process: subprocess.Popen[str], host: Host, role: str, logs: Path, deadline_s: float) -> None:
    if process.poll() is None and time.monotonic() < deadline_s:
        return
    lines = _log(logs, host, role).read_text().strip().splitlines()
    why = lines[-1] if lines else "no word of why"
    raise SwerveError(f"the {role} of {host.name} did not come up: {why}", "`swerve doctor` says what is missing")


def _wait_measured(observer: Observer, lab: Lab) -> None:
    paths = len(lab.hosts) * (len(lab.hosts) - 1) * len(lab.rails)

    def measured(heard: Record) -> bool:
        return len({delay.path for delay in heard.delays if delay.forward.samples}) >= paths

    if not observer.wait_for(measured, _STARTUP_S):
        raise SwerveError("not all paths were measured in time", "`swerve doctor` says what is missing")


def _wait_returned(observer: Observer, policy_file: Path) -> float:
    start_s = time.monotonic()
    back = load_policy(policy_file).rules[0].return_
    patience_s = (back.dwell * 4 + back.step * len(back.steps)) / 1e9 + _RETURN_SLACK_S

    def returned(heard: Record) -> bool:
        return all(
            state.state == "healthy" and state.weight_actual == state.weight_wanted for state in heard.latest.values()
        )

    if not observer.wait_for(returned, patience_s):
        raise SwerveError(f"the paths did not come back within {patience_s:.0f} s of healing")
    return time.monotonic() - start_s


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM unwinds like an interrupt does, so that the lab is taken down."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def progress(stream: IO[str], started_s: float) -> Callable[[str], None]:
    """A function that writes one line per step, with the time since the start."""

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {line}", file=stream, flush=True)

    return say


def lab_name() -> str:
    """A name that no other demo on this machine uses now."""
    return f"demo{os.getpid()}"
