"""What a service manager hears, and when: over a path, over an abstract name, or not at all."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT, mentions

from pytools.agent.heartbeat import Heartbeat, Standing
from pytools.notify import Manager
from steering.commands import undo
from steering.commands.undo import restart_expected


class Listener:
    """A manager's end."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.sock.bind("\0" + address[1:] if address.startswith("@") else address)

    def heard(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.sock.recv(65536).decode())
            except BlockingIOError:
                return found


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "abstract":
        yield f"@swerve-{uuid.uuid4().hex}"
        return
    with tempfile.TemporaryDirectory() as room:
        yield str(Path(room) / "notify")


@pytest.fixture
def listener(address: str) -> Iterator[Listener]:
    one = Listener(address)
    yield one
    one.sock.close()


def test_every_word_arrives_as_it_is_written_down(listener: Listener, address: str) -> None:
    manager = Manager({"NOTIFY_SOCKET": address})
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    manager.ready()
    manager.alive()
    manager.status("probes 3\npaths")
    manager.reloading()
    manager.stopping()
    ready, alive, status, reloading, stopping = listener.heard()
    assert (ready, alive, status, stopping) == ("READY=1", "WATCHDOG=1", "STATUS=probes 3 paths", "STOPPING=1")
    first, second = reloading.split("\n")
    assert first == "RELOADING=1" and before <= int(second.removeprefix("MONOTONIC_USEC=")) <= before + 60_000_000


def test_a_status_is_told_when_it_changes_and_cut_when_it_is_long(listener: Listener, address: str) -> None:
    manager = Manager({"NOTIFY_SOCKET": address})
    for text in ("a", "a", "b", "a", "x" * 5000):
        manager.status(text)
    heard = listener.heard()
    assert heard[:3] == ["STATUS=a", "STATUS=b", "STATUS=a"]
    assert len(heard) == 4 and heard[3] == "STATUS=" + "x" * 1024


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "@nobody-listens-here", "vsock:2:1", "relative"])
def test_without_a_manager_nothing_happens(address: str) -> None:
    manager = Manager({"NOTIFY_SOCKET": address} if address else {})
    manager.ready()
    manager.status("x")
    manager.alive()
    manager.reloading()
    manager.stopping()
    assert manager.listens == address.startswith(("/", "@"))


def test_a_manager_that_does_not_read_holds_nothing_up(listener: Listener, address: str) -> None:
    manager = Manager({"NOTIFY_SOCKET": address})
    for number in range(5000):  # far more than the socket takes
        manager.status(str(number))
    assert 0 < len(listener.heard()) < 5000


def test_the_watchdog_is_ours_alone(address: str) -> None:
    def watched(**more: str) -> int:
        return Manager({"NOTIFY_SOCKET": address, **more}).watchdog_ns

    assert watched(WATCHDOG_USEC="2000000") == 2_000_000_000
    assert watched(WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid())) == 2_000_000_000
    assert watched(WATCHDOG_USEC="2000000", WATCHDOG_PID="1") == 0
    assert watched() == watched(WATCHDOG_USEC="soon") == watched(WATCHDOG_USEC="-1") == 0
    assert Manager({"WATCHDOG_USEC": "2000000"}).watchdog_ns == 0


class Agent:
    """What a heartbeat asks."""

    def __init__(self) -> None:
        self.now = Standing(0, 2, 0, 0, {})

    def standing(self) -> Standing:
        return self.now


def test_ready_is_said_once_something_is_attached(
    listener: Listener, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = Agent()
    agent.now = Standing(2, 1, 1, 0, {"probe_egress on rail0": "no room"})
    heart = Heartbeat(Manager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "900000"}), agent.standing, lambda: {}, 0)
    assert heart.tick(0) == 300_000_000
    watchdog, status = listener.heard()
    assert watchdog == "WATCHDOG=1" and status.startswith("STATUS=")
    assert mentions(status, "2 paths", "1 peers", "1 interfaces", "1 hooks", "not attached")
    agent.now = Standing(2, 1, 1, 1, {})
    heart.tick(1)
    *states, status = listener.heard()
    assert states == ["WATCHDOG=1", "READY=1"] and status.startswith("STATUS=")
    assert mentions(status, "2 paths", "1 peers", "1 interfaces") and "hooks" not in status
    heart.tick(2)
    assert listener.heard() == ["WATCHDOG=1"]
    said = capsys.readouterr().err
    assert 'hook failed hook="probe_egress on rail0" why="no room"\n' in said
    assert 'hook works hook="probe_egress on rail0"\n' in said and "agent ready paths=2 interfaces=1" in said


def test_nothing_to_attach_to_is_ready_too(listener: Listener, address: str) -> None:
    """A host that boots before its peers have a route must not be taken for one that failed."""
    agent = Agent()
    heart = Heartbeat(Manager({"NOTIFY_SOCKET": address}), agent.standing, lambda: {}, 0)
    assert heart.tick(0) == 1_000_000_000
    ready, status = listener.heard()
    assert ready == "READY=1" and status.startswith("STATUS=") and mentions(status, "no route", "2 peers")


def test_a_loop_that_does_not_turn_is_not_alive(listener: Listener, address: str) -> None:
    Heartbeat(Manager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "900000"}), Agent().standing, lambda: {}, 0)
    assert listener.heard() == []


def test_the_end_is_told_with_what_was_lost(
    listener: Listener, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    heart = Heartbeat(Manager({"NOTIFY_SOCKET": address}), Agent().standing, lambda: {"bus_slow": 3, "none": 0}, 0)
    heart.close()
    assert listener.heard() == ["STOPPING=1"]
    said = capsys.readouterr().err
    assert "agent stopping" in said and "bus_slow=3" in said and "none" not in said


# ---- whether systemd starts a unit again ----

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
