"""Teams that real teamd daemons set up and look after: what is seen of them, and that they stay as they are.

For the kernel that teamd.py boots.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import watching

from pytools.config import Links
from pytools.kernel.netlink.links import Tables
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab, devices
from pytools.signals import PathLiveness
from pytools.sources.probing.measurements import RECEIVED

sys.path.append(str(support.ROOT / "tests/fabric"))
over = importlib.import_module("test_lab_over")

pytestmark = [pytest.mark.guest(only=True), pytest.mark.deadline(900)]

BALANCING = {"name": "loadbalance", "tx_hash": ["l4"]}
REBALANCING = BALANCING | {"tx_balancer": {"name": "basic", "balancing_interval": 10}}
ACTIVE_BACKUP = {"name": "activebackup"}
COUNTS = ("lb_hash_stats", "lb_port_stats", "lb_tx_hash_to_port_mapping")  # what changes by itself


class Daemons:
    """One for each team of a lab, in the place of what the lab sets itself."""

    def __init__(self, place: Path, runner: dict[str, Any]) -> None:
        self._place, self._runner = place, runner
        self.running: list[subprocess.Popen[bytes]] = []

    def balance(self, index: int) -> None:
        """Have one set up a team that has no port yet, and look after it."""
        config = {"device": socket.if_indextoname(index), "runner": self._runner, "link_watch": {"name": "ethtool"}}
        log = self._place / f"{len(self.running)}.log"
        words = ["--take-over", "--no-quit-destroy", "--usock-disable", "-p", str(log.with_suffix(".pid"))]
        with log.open("w") as to:
            command = [os.environ["SWERVE_TEST_TEAMD"], *words, "-l", "stderr", "-c", json.dumps(config)]
            self.running.append(subprocess.Popen(command, stderr=to))
        support.wait_until(lambda: "successfully started" in log.read_text(), 30, "teamd has started")

    def close(self) -> None:
        for each in self.running:
            each.terminate()
        for each in self.running:
            each.wait(30)


@contextlib.contextmanager
def looked_after(name: str, place: Path, runner: dict[str, Any]) -> Iterator[Lab]:
    """A lab whose rails are teams of daemons, all of which are there to the end."""
    with contextlib.closing(Daemons(place, runner)) as daemons, pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_balance", daemons.balance)
        with Lab.up(name, hosts=2, rate="none", ipv6=True, over="team") as lab:
            yield lab
            assert [each.poll() for each in daemons.running] == [None] * 8


def teamnl(netns: str, *words: str) -> str:
    return support.run(["ip", "netns", "exec", netns, "teamnl", *words]).stdout.strip()


def options(lab: Lab) -> list[list[str]]:
    """Those of every team of a host."""
    shown = [teamnl(lab.hosts[0].netns, each.name, "options").splitlines() for each in lab.hosts[0].interfaces]
    return [[line for line in lines if not line.strip().startswith(COUNTS)] for lines in shown]


def hashing(lab: Lab) -> set[str]:
    with inside(lab.hosts[0].netns), Netlink() as netlink:
        return {each.device for each in Tables(netlink).stack().bundles.values()}


def test_the_bad_port_of_a_balanced_team_is_named(unique_name: Callable[[], str], tmp_path: Path) -> None:
    """Of IPv6 teamd 1.32 hashes the destination's port alone: to one peer there is one way."""
    with looked_after(unique_name(), tmp_path, BALANCING) as lab:
        before = options(lab)
        assert hashing(lab) == {"rail1", "rail2"}
        over.check_probed(lab, (4, 6))
        over.check_port_named(lab, (4,))
        for version in (4, 6):
            with contextlib.closing(over.Flows(lab, version)) as flows:
                over.check_steered(lab, flows)
        assert options(lab) == before


def test_flows_that_the_daemon_moves_have_no_ways(unique_name: Callable[[], str], tmp_path: Path) -> None:
    with looked_after(unique_name(), tmp_path, REBALANCING) as lab:
        assert hashing(lab) == set()
        over.check_probed(lab, (4, 6))


def test_the_port_of_an_active_backup_team_is_the_daemons_choice(
    unique_name: Callable[[], str], tmp_path: Path
) -> None:
    with looked_after(unique_name(), tmp_path, ACTIVE_BACKUP) as lab, contextlib.ExitStack() as stack:
        netns, names = lab.hosts[0].netns, {str(200 * cable + 11): f"cable{cable}-rail1" for cable in (1, 2)}
        assert hashing(lab) == set()
        made = watching.watchers(lab, links=Links(mtu_interval_s=0))
        for each in made:
            stack.callback(each.close)
        told = made[0].bus.subscribe(frozenset({"path_liveness"}))
        missed: dict[str, int] = {}

        def silent() -> set[str]:
            missed.update((str(each.path), each.missed) for each in told.read() if isinstance(each, PathLiveness))
            return {path for path, count in missed.items() if count >= 3}

        def active() -> str:
            return names.get(teamnl(netns, "rail1", "getoption", "activeport"), "")

        def far(port: str) -> str:
            return f"{port.partition('-')[0]}-{lab.rails[0].ports[0].name}"

        def answered() -> bool:
            mesh = made[0].mesh
            counts = [mesh.measurements.counts[each.index, RECEIVED] for each in mesh.paths.current]
            return len(counts) == 4 and min(counts) >= 10 and not silent()

        watching.work_until(made, answered, "every path answers", 60)
        first = active()
        support.run(["ip", "-n", lab.rails[0].netns, "link", "set", "dev", far(first), "down"])
        watching.work_until(
            made, lambda: active() not in ("", first) and not silent(), "the daemons use the other port", 60
        )
        second, before = active(), options(lab)
        over.drop_udp(lab, far(second))
        watching.work_until(made, lambda: len(silent()) == 2, "both families are silent on rail 1", 60)
        assert all("rail1" in path for path in silent())
        assert options(lab) == before and active() == second
