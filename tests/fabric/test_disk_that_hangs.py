"""A disk that does not answer: acts go on, the lease is kept, nothing is killed; what was done is written afterwards.
A controller that dies meanwhile is undone.

The state directory is on a file system of its own (a file, by a loop device), which is frozen: every write to it waits.
"""

from __future__ import annotations

import contextlib
import subprocess
import time

import pytest
import steering_kit as kit
import support
from steering_kit import EVEN, MS, STEERED, controlled, path

from pytools import directories
from steering.acting import journal

pytestmark = pytest.mark.beside

FROZEN_S = 10.0  # several leases


class Disk:
    """A file system that can be frozen."""

    def __init__(self, folder):
        self.image, self.root = folder / "image", folder / "disk"
        self.root.mkdir()
        with self.image.open("wb") as file:
            file.truncate(32 << 20)
        support.run(["mkfs.ext4", "-q", str(self.image)])
        support.run(["mount", "-o", "loop", str(self.image), str(self.root)])

    @contextlib.contextmanager
    def frozen(self):
        support.run(["fsfreeze", "--freeze", str(self.root)])
        try:
            yield
        finally:
            support.run(["fsfreeze", "--unfreeze", str(self.root)])

    def close(self):
        subprocess.run(["fsfreeze", "--unfreeze", str(self.root)], check=False, capture_output=True)
        support.run(["umount", str(self.root)])


@pytest.fixture
def disk(tmp_path, monkeypatch):
    made = Disk(tmp_path)
    try:
        monkeypatch.setenv("SWERVE_STATE_DIR", str(made.root / "state"))
        yield made
    finally:
        made.close()


@pytest.fixture
def steered(make_namespace, tmp_path, disk):
    """A host whose controller is ready, and its agent."""
    host = kit.two_rails(make_namespace(), make_namespace())
    agent = kit.FakeAgent(host.netns)
    try:
        with controlled(host, kit.policy_file(tmp_path), "--apply") as controller:
            support.wait_until(
                lambda: (
                    controller.guardian() and agent.states.get(path(1)) and agent.states[path(1)].state == "healthy"
                ),
                30,
                "the controller is ready",
            )
            yield host, agent, controller
    finally:
        agent.close()


def test_a_disk_that_hangs_holds_up_no_act_and_kills_nobody(steered, disk):
    host, agent, controller = steered
    guardian = controller.guardian()
    with disk.frozen():
        began = time.monotonic()
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: host.weights() == STEERED, 20, "the rail is left")
        agent.queueing_ns[1] = 0
        support.wait_until(lambda: host.weights() == EVEN, 60, "and is taken back")
        while time.monotonic() - began < FROZEN_S:
            assert controller.process.poll() is None and controller.guardian() == guardian
            time.sleep(0.1)
    file = directories.state_dir(host.netns) / journal.FILE
    support.wait_until(lambda: len(journal.read(file).entries) >= 2, 20, "what was done is written")
    assert {entry.kind for entry in journal.read(file).entries} == {"applied"}
    assert controller.end() == 0


def test_a_controller_that_dies_while_the_disk_hangs_is_undone(steered, disk):
    host, agent, controller = steered
    with disk.frozen():
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: host.weights() == STEERED, 20, "the rail is left")
        controller.process.kill()
        support.wait_until(lambda: host.ours() == 0 and host.weights() == EVEN, 20, "it is undone")
