"""A controller and real bonds: a port that falls silent with its carrier up is left, and put back by whoever ends.

Only the second kernel has bonds. Datagrams are exchanged over the bond; what became of them is what an agent that is
made up says it has measured.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator

import pytest
import steering_kit
import support

from pytools import directories
from pytools.kernel.netns import inside
from pytools.signals import Path
from steering.acting import acts_file

pytestmark = [pytest.mark.guest(only=True), pytest.mark.deadline(900)]

PATHS = [Path("h1", f"h{peer}", f"10.9.0.{peer}", "10.77.1.1", "bond0") for peer in (2, 3)]
# Nothing here is about speed: an emulated host may hear of nothing for seconds.
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 20s, takeover: 0s, stale_after: 10s, baseline_after: 60s}
bonds: {trial: 10s, retry_after: 10m}
rules:
  - name: leave-lossy-port
    when: {signal: loss, above: 0.5, for: 200ms, clear_below: 0.1}
    then: {drain: {}}
"""


class Bonded:
    """A host with a bond of v0 and v1 to a bridge, datagrams over it, and an agent that tells of them."""

    def __init__(self, near: str, far: str, more: contextlib.ExitStack) -> None:
        self.host, self.far = steering_kit.Host(near), support.Namespace(far)
        far_ip, near_ip = self.far.ip, self.host.ip
        far_ip("link", "add", "br0", "address", "02:00:00:00:77:01", "type", "bridge")  # else it changes with its ports
        near_ip("link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "10")
        for port in ("v0", "v1"):
            support.join(near, far, port)
            far_ip("link", "set", "dev", port, "master", "br0", "up")
            near_ip("link", "set", "dev", port, "master", "bond0")
        for ip, name, end in ((far_ip, "br0", 1), (near_ip, "bond0", 2)):
            ip("address", "add", f"10.77.1.{end}/24", "dev", name)
            ip("link", "set", "dev", name, "up")
        near_ip("route", "add", "10.9.0.0/24", "via", "10.77.1.1")
        self.ends = []
        for netns, end in ((near, 2), (far, 1)):
            with inside(netns):
                made = more.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            made.bind((f"10.77.1.{end}", 7000))
            made.settimeout(0.1 * support.slow_factor())
            self.ends.append(made)
        self.agent = more.enter_context(contextlib.closing(steering_kit.FakeAgent(near, (1,), paths=lambda _: PATHS)))
        self.sent = 0
        support.wait_until(lambda: self.ports() == {"v0", "v1"}, 30, "both ports are up")
        near_ip("link", "set", "bond0", "type", "bond", "active_slave", "v0")
        support.wait_until(self.passes, 30, "datagrams pass by the first port")

    def ports(self) -> set[str]:
        rows = self.host.rows("link", "show", "master", "bond0")
        return {row["ifname"] for row in rows if row["linkinfo"]["info_slave_data"]["mii_status"] == "UP"}

    def active(self) -> str:
        [row] = self.host.rows("link", "show", "bond0")
        return str(row["linkinfo"]["info_data"]["active_slave"])

    def passes(self) -> bool:
        """Whether a datagram passes now; the agent tells of it."""
        self.sent += 1
        word = b"%d" % self.sent
        arrived = False
        with contextlib.suppress(TimeoutError):
            self.ends[0].sendto(word, ("10.77.1.1", 7000))
            while not arrived:
                arrived = self.ends[1].recv(100) == word
        self.agent.queueing_ns[1], self.agent.lost[1] = (0, 0) if arrived else (None, 5)
        return arrived

    def silence(self, port: str) -> None:
        """Its carrier stays, what it sends and is sent goes nowhere."""
        self.far.ip("link", "set", "dev", port, "nomaster")

    def bonds(self) -> list[dict]:
        told = json.loads(support.run([*support.SWERVE, "steer", "status", "-n", self.host.netns, "-j"]).stdout)
        return told.get("bonds", [])

    def acts(self) -> list[tuple[str, dict[str, int]]]:
        told = [act for _, act in acts_file.read(directories.state_dir(self.host.netns))]
        return [(act.outcome, act.after) for act in told if act.actuator == "bond"]


@pytest.fixture
def bonded(make_namespace) -> Iterator[Bonded]:
    with contextlib.ExitStack() as more:
        yield Bonded(make_namespace(), make_namespace(), more)


@contextlib.contextmanager
def left(bonded: Bonded, folder) -> Iterator[steering_kit.Controller]:
    """A controller that has selected the second port, because the first is silent."""
    policy = steering_kit.policy_file(folder, POLICY)
    with steering_kit.controlled(bonded.host, policy, "--apply") as controller:
        support.wait_until(lambda: [each["paths"] for each in bonded.bonds()] == [2], 60, "its paths are known")
        support.wait_until(bonded.passes, 10, "and good")
        assert bonded.active() == "v0"
        bonded.silence("v0")
        support.wait_until(lambda: bonded.passes() and bonded.active() == "v1", 60, "the other port is used")
        assert bonded.acts() == [("applied", {"v0": 0, "v1": 1})]
        yield controller


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_former_port_is_put_back_by_the_controller_or_its_guardian(bonded, tmp_path, number) -> None:
    with left(bonded, tmp_path) as controller:
        controller.end(number)
        support.wait_until(lambda: bonded.active() == "v0", 30, "the first port is used again", 0.2)
        support.wait_until(controller.lock_is_free, 30, "the guardian has gone")
    assert bonded.acts()[1:] == [("undone", {"v1": 0, "v0": 1})]
    assert not directories.bond_ports(bonded.host.netns).exists()


def test_if_both_are_killed_the_port_stays_until_steer_off(bonded, tmp_path) -> None:
    with left(bonded, tmp_path) as controller:
        assert bonded.bonds()[0]["former"] == "v0"
        support.run(["kill", "-KILL", str(controller.guardian()), str(controller.process.pid)])
        support.wait_until(controller.lock_is_free, 30, "both have gone")
        assert bonded.active() == "v1"
        said = support.run([*support.SWERVE, "steer", "off", "-n", bonded.host.netns]).stdout
        assert "our choice of the port of bond0: v0 is active" in said and bonded.active() == "v0"
