"""A real Prometheus beside real agents: it accepts what `swerve metrics` says, and every query of ours finds data.

Two hosts with clocks of their own, TCP both ways, a congested rail and a controller that leaves it. Prometheus runs in
h1 and asks both hosts. What the hardware here does not have (queue pairs, RDMA ports, pause frames) is published to
h1's agent by hand, as a program that knows of it would.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import metrics_queries
import pytest
import samples
import steering_kit
import support
import yaml

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Pause
from steering.demo.traffic import Load

pytestmark = pytest.mark.beside

RATE, CONGESTED, LOAD_BIT_S = "40mbit", "4mbit", 12_000_000
PORT = 9090
TARGETS = 2


class Site:
    """A lab with everything that runs in it.

    Parameters
    ----------
    folder : Path
        For what Prometheus stores, and for logs.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self._folder = lab, folder
        self._hardware: Client | None = None

    def start(self, host: int, name: str, *command: str) -> subprocess.Popen[str]:
        """Start a process in a host, with a log of its own."""
        with (self._folder / f"h{host}-{name}.log").open("w") as log:
            return self.lab.start(self.lab.hosts[host - 1], command, stdout=log, stderr=log)

    def swerve(self, host: int, *words: str) -> subprocess.Popen[str]:
        """Start a command of ours in a host, about that host."""
        netns = self.lab.hosts[host - 1].netns
        return self.start(host, words[0], *support.SWERVE, *words, "-n", netns)

    def log(self, host: int, name: str) -> str:
        """What a process said."""
        return (self._folder / f"h{host}-{name}.log").read_text()

    def start_prometheus(self) -> None:
        """As the example has it, but every second, and for both hosts."""
        config = yaml.safe_load(metrics_queries.CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(metrics_queries.RULES)]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"][0]["targets"].append(f"{self.lab.hosts[1].service}:9762")
        file = self._folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        storage, address = self._folder / "data", f"127.0.0.1:{PORT}"
        self.start(
            *(1, "prometheus", "prometheus", f"--config.file={file}", f"--storage.tsdb.path={storage}"),
            f"--web.listen-address={address}",
        )

    def ask(self, what: str, **parameters: str) -> Any:
        """What Prometheus answers; None when it does not."""
        with inside(self.lab.hosts[0].netns):
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
            with contextlib.suppress(OSError):
                connection.connect()
        with contextlib.closing(connection):
            if connection.sock is None:
                return None
            connection.request("GET", f"/api/v1/{what}?{urllib.parse.urlencode(parameters)}")
            response = connection.getresponse()
            if response.status == http.client.SERVICE_UNAVAILABLE:  # it is starting
                return None
            answer = json.loads(response.read())
        assert answer["status"] == "success", (what, parameters, answer)
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """The values of a query's series now, but for those that are no number."""
        answer = self.ask("query", query=query)
        found = [] if answer is None else [float(each["value"][1]) for each in answer["result"]]
        return [each for each in found if not math.isnan(each)]

    def weights(self) -> dict[str, float]:
        """Weights of h1's nexthops by interface."""
        found = self.ask("query", query='swerve_nexthop_weight{instance="127.0.0.1:9762"}')["result"]
        return {each["metric"]["interface"]: float(each["value"][1]) for each in found}

    def alerts(self) -> set[str]:
        """Alerts that hold now, whether or not for long enough."""
        return {each["labels"]["alertname"] for each in self.ask("alerts")["alerts"]}

    def publish_hardware(self) -> None:
        """What there would be with RDMA adapters, lossless links, and routers that hash flows."""
        if self._hardware is None:
            self._hardware = Client(directories.agent_socket(self.lab.hosts[0].netns), frozenset())
        now = time.monotonic_ns()
        pauses = [Pause(priority=3, received=now // 10**6, sent=0, received_duration_us=now // 10**5)]
        for each in (
            samples.rdma_qp(at_ns=now),
            samples.rdma_qp(19, at_ns=now, verdict="dead"),
            samples.rdma_suspects(at_ns=now),
            samples.rdma_port(at_ns=now),
            samples.link(rail=9, at_ns=now, pauses=pauses),
            samples.path_way(at_ns=now),
        ):
            self._hardware.publish(each)

    def close(self) -> None:
        """Hang up."""
        if self._hardware is not None:
            self._hardware.close()


@pytest.fixture
def site(unique_name: Callable[[], str], tmp_path: Path) -> Iterator[Site]:
    support.require("bcc", "tracefs", "iperf3", "prometheus", "promtool")
    with Lab.up(unique_name(), hosts=2, rails=2, rate=RATE, clocks=11) as lab:
        for host in lab.hosts:  # TCP marks its packets as able to be marked
            support.run(["ip", "netns", "exec", host.netns, "sysctl", "-qw", "net.ipv4.tcp_ecn=1"])
        with contextlib.closing(Site(lab, tmp_path)) as made:
            yield made


def test_promtool_accepts_rules_and_configuration() -> None:
    support.require("promtool")
    support.run(["promtool", "check", "rules", metrics_queries.RULES])
    support.run(["promtool", "check", "config", metrics_queries.CONFIG])


@pytest.mark.deadline(300)
def test_every_query_returns_data(site: Site, tmp_path: Path) -> None:
    for host in (1, 2):
        site.swerve(host, "agent")
    site.swerve(1, "metrics")
    site.swerve(2, "metrics", "--listen", f"{site.lab.hosts[1].service}:9762", "--allow-remote")
    site.start_prometheus()
    support.wait_until(lambda: site.values("swerve_up") == [1.0] * TARGETS, 60, "both agents are up")

    policy = steering_kit.policy_file(tmp_path)
    site.swerve(1, "steer", "run", "--apply", "--policy", str(policy))
    healthy = 'sum(swerve_path_steering_state{state="healthy"})'
    support.wait_until(lambda: site.values(healthy) == [2.0], 60, "the controller finds both paths healthy")

    first, second = site.lab.hosts
    with Load(site.lab, [(first, second), (second, first)], LOAD_BIT_S):
        support.wait_until(lambda: site.values('swerve_app_delay_seconds{figure="p50"}'), 60, "TCP is timed")
        site.lab.congest(1, CONGESTED)
        acts = 'sum(swerve_acts_total{outcome="applied"})'
        support.wait_until(lambda: (site.values(acts) or [0])[0] >= 1, 60, "the congested rail is left")

        drained = 'max(swerve_path_steering_state{state="drained", interface="rail1"})'
        support.wait_until(lambda: site.values(drained) == [1.0], 20, "rail 1 is told to be out of use")
        support.wait_until(lambda: set(site.weights()) == {"rail2"}, 20, "what the kernel has is told")
        support.wait_until(lambda: "SwervePathDrained" in site.alerts(), 20, "the alert for it waits for its time")

        missing = metrics_queries.queries()
        deadline = time.monotonic() + 90 * support.slow_factor()
        while missing and time.monotonic() < deadline:
            site.publish_hardware()
            time.sleep(0.5)  # half of what lies between two scrapes
            missing = {where: query for where, query in missing.items() if not site.values(query)}
        assert not missing, "no data for:\n" + "\n".join(f"{where}: {query}" for where, query in missing.items())

    said = site.lab.run(first, [*support.SWERVE, "metrics", "--once", "-n", first.netns])
    checked = support.run(["promtool", "check", "metrics"], text_in=said, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    unhealthy = [each for each in site.ask("rules")["groups"] for each in each["rules"] if each["health"] != "ok"]
    assert unhealthy == []
    assert site.values("swerve_metrics_signals_dropped_total") == [0.0] * TARGETS
