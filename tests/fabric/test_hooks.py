"""A controller with hooks is killed: its successor, its guardian or `swerve steer off` ends what was told, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import steering_kit as kit
import support
from steering_kit import EVEN, MS, controlled, steered

from pytools import directories

pytestmark = pytest.mark.beside

KEEPING = kit.POLICY.replace("takeover: 0s", "takeover: 15s")
APPENDS = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


@dataclass
class Receiver:
    """A program that keeps what it was told, and a policy that calls it."""

    folder: Path

    @property
    def told(self) -> list[tuple[str, str, str]]:
        """Status, occurrence and reason of each event."""
        file = self.folder / "told"
        events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [(each["status"], each["id"], each["because"]) for each in events]

    def policy(self, text: str) -> Path:
        words = json.dumps(["-c", APPENDS, str(self.folder / "told")])
        hook = f"hooks: {{page: {{exec: {{program: /usr/bin/python3, arguments: {words}}}}}}}\nrules:"
        return kit.policy_file(
            self.folder, text.replace("rules:", hook).replace("{shift: {share: 0}}", "{drain: {}, notify: [page]}")
        )

    def hears(self, status: str) -> None:
        support.wait_until(lambda: self.told and self.told[-1][0] == status, 20, f"{status} is told")


@pytest.fixture
def receiver(tmp_path):
    tmp_path.chmod(0o700)
    return Receiver(tmp_path)


def test_a_successor_ends_what_a_killed_controller_has_told(host, agent, receiver):
    policy = receiver.policy(KEEPING)
    with controlled(host, policy, "--apply") as first:
        steered(host, agent)
        receiver.hears("firing")
        assert "20 ms" in receiver.told[0][2]
        first.kill()
        first.process.wait(10)
        with controlled(host, policy, "--apply") as second:
            support.wait_until(second.guardian, 20, "a successor is there")
            agent.queueing_ns[1] = 0
            receiver.hears("resolved")
            assert host.weights() == EVEN, "after the path is back"
            agent.queueing_ns[1] = 20 * MS
            receiver.hears("firing")
            support.swerve("steer", "off", "-n", host.netns)
    ids = [each[1] for each in receiver.told]
    assert [each[0] for each in receiver.told] == ["firing", "firing", "resolved", "firing", "resolved"]
    assert len(set(ids[:3])) == len(set(ids[3:])) == 1 and ids[0] != ids[3]
    assert not directories.hook_calls(host.netns).exists()


def test_a_guardian_without_a_successor_ends_it(host, agent, receiver):
    with controlled(host, receiver.policy(kit.POLICY), "--apply") as controller:
        steered(host, agent)
        receiver.hears("firing")
        controller.kill()
        receiver.hears("resolved")
    assert [each[0] for each in receiver.told] == ["firing", "resolved"]
    assert receiver.told[-1][2].startswith("the controller died")
    assert not directories.hook_calls(host.netns).exists()
