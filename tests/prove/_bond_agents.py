"""A bond, three hosts with agents and a controller as shipped: a port that falls silent is left, and put back.

For the kernel that bonds.py boots. Only hosts share its processor that have little else to do, so times are long.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import steering_kit
import support

from pytools import directories

pytestmark = [pytest.mark.guest(only=True), pytest.mark.deadline(600)]

HOSTS = {"h1": "10.9.0.1", "h2": "10.9.0.2", "h3": "10.9.0.3"}
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 20s, takeover: 0s, stale_after: 10s, baseline_after: 60s}
bonds: {trial: 20s, retry_after: 10m}
rules:
  - name: leave-silent-path
    when: {signal: silence, missed: 10}
    then: {drain: {}}
"""


def cabled(near: str, second: str, third: str) -> None:
    """Put the first host's bond of v0 and v1, and the third host, on a bridge of the second."""
    one, two, three = (support.Namespace(each).ip for each in (near, second, third))
    two("link", "add", "br0", "address", "02:00:00:00:77:01", "type", "bridge")
    one("link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "10")
    for port in ("v0", "v1"):
        support.join(near, second, port)
        one("link", "set", "dev", port, "master", "bond0")
    support.join(third, second, "v2")
    for port in ("v0", "v1", "v2"):
        two("link", "set", "dev", port, "master", "br0", "up")
    for number, (ip, device) in enumerate(((one, "bond0"), (two, "br0"), (three, "v2")), 1):
        ip("address", "add", f"10.9.0.{number}/32", "dev", "lo")
        ip("address", "add", f"10.77.1.{number}/24", "dev", device)
        for name in ("lo", device):
            ip("link", "set", "dev", name, "up")
        for other in {1, 2, 3} - {number}:
            ip("route", "add", f"10.9.0.{other}/32", "via", f"10.77.1.{other}", "src", f"10.9.0.{number}")
    one("link", "set", "bond0", "type", "bond", "active_slave", "v0")


@contextlib.contextmanager
def agent(netns: str, name: str, folder: Path) -> Iterator[None]:
    """One as shipped, that probes all others."""
    file = folder / f"{name}.yaml"
    peers = ", ".join(f"{{name: {each}, address: {HOSTS[each]}, clock: shared}}" for each in HOSTS if each != name)
    file.write_text(f"host: {name}\npeers: [{peers}]\n")
    process = subprocess.Popen([*support.SWERVE, "agent", "-n", netns, "--config", str(file)])
    try:
        yield
    finally:
        process.terminate()
        process.wait(120)
        directories.base_delays(netns).unlink(missing_ok=True)  # kept for the next agent


def asked(netns: str, *words: str) -> object:
    """What a command says in JSON; None while nobody answers."""
    said = support.run([*support.SWERVE, *words, "-n", netns, "-j"], check=False)
    return json.loads(said.stdout) if said.returncode == 0 else None


def test_a_silent_port_is_left_and_put_back(make_namespace, tmp_path: Path) -> None:
    places = [make_namespace() for _ in HOSTS]
    cabled(*places)
    near, second = steering_kit.Host(places[0]), support.Namespace(places[1])

    def active() -> str:
        [row] = near.rows("link", "show", "bond0")
        return str(row["linkinfo"]["info_data"]["active_slave"])

    def bond() -> dict:
        told = asked(near.netns, "steer", "status")
        return next(iter(told.get("bonds", [])), {}) if isinstance(told, dict) else {}

    def passes() -> bool:
        return all(
            support.run(["ip", "netns", "exec", near.netns, "ping", "-nc1", "-W3", HOSTS[each]], check=False).returncode
            == 0
            for each in ("h2", "h3")
        )

    with contextlib.ExitStack() as stack:
        for name, netns in zip(HOSTS, places, strict=True):
            stack.enter_context(agent(netns, name, tmp_path))
        policy = steering_kit.policy_file(tmp_path, POLICY)
        controller = stack.enter_context(steering_kit.controlled(near, policy, "--apply"))
        support.wait_until(
            lambda: bond().get("paths") == 2 and not bond().get("held"), 200, "both paths are measured", 1
        )
        assert active() == "v0" and passes()
        second.ip("link", "set", "dev", "v0", "nomaster")  # its carrier stays
        began = time.monotonic()
        support.wait_until(lambda: active() == "v1", 100, "the other port is used", 0.2)
        print(f"left after {time.monotonic() - began:.1f} s")
        support.wait_until(passes, 30, "packets pass again")
        assert bond()["former"] == "v0" and "every path by v0" in bond()["because"]
        controller.end(signal.SIGTERM)
        support.wait_until(lambda: active() == "v0", 60, "the first port is used again", 0.2)
