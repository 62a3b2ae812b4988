"""Other flow labels move a live IPv6 connection of iperf3 to another way inside the fabric; no switch is touched.

What moves is told by the queues of the inner ways. Hosts do not change labels by themselves here (`txrehash` is off),
so that what changes is our doing. Rates are bits per second.
"""

from __future__ import annotations

import contextlib
import subprocess
import time

import pin_kit
import pytest
import steering_kit
import support
import tcp_kit
import yaml

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab import Lab, namespaces
from pytools.signals import PathDelay
from steering.acting import acts_file
from steering.actuators.pins import Labels
from steering.demo.traffic import established_resets
from steering.plan import FlowKey, LabelChange

pytestmark = pytest.mark.beside

RATE = 8_000_000
PORT, CLIENT_PORT = 5201, 45_001
ENOUGH_BYTES = 300_000  # says where a connection goes
POLICY = """\
version: 1
manage: {destinations: ["fd00:9::/64"]}
safety: {stale_after: 3s, baseline_after: 10s}
rules:
  - name: repath
    scope: {flows: {remote: ["fd00:9::/64"]}}
    when: WHEN
    then: {relabel: {flows: {min_rate: 1mbit, at_most: 4}, lease: 10s}}
    return: {dwell: 10m}  # however long the test takes, nothing is let go in it
"""
CONGESTED = "{signal: retransmits, at_least: 20, above: 0.01, clear_below: 0.001}"


def lab_of(name, inner):
    support.require("bcc", "tc", "netns", "iperf3")
    return Lab.up(name, hosts=2, rails=2, rate="40mbit", ipv6=True, inner=inner)


def gained(lab, before):
    return {place: sent - before[place] for place, sent in support.bytes_of_inner_ways(lab).items()}


def where(lab, deadline_s=30.0):
    """The way that the connection takes from now on, and its share of all that was sent meanwhile."""
    before = support.bytes_of_inner_ways(lab)
    sent = support.wait_until(
        lambda: (each := gained(lab, before)) and max(each.values()) > ENOUGH_BYTES and each, deadline_s, "bytes go"
    )
    place = max(sent, key=sent.get)
    return place, sent[place] / sum(sent.values())


def goes(lab, wanted, what):
    """Wait until the connection takes a way that is wanted; where it goes, by its bytes since the last look."""
    return support.wait_until(lambda: (place := where(lab)[0]) and wanted(place) and place, 90, what)


def harm(lab, place, trouble):
    """One inner way towards h2 serves its connections badly, or not at all."""
    rail, way = place
    if trouble == "congested":
        lab.congest(rail, "2mbit", 12_000, toward=2, inner=way)
    else:
        lab.blackhole(rail, (1, 2), inner=way)


@contextlib.contextmanager
def connection(lab):
    """One connection of iperf3 from h1 to h2 that asks for less than any way has; it ends well, unreset."""
    first, second = lab.hosts
    for host in lab.hosts:
        namespaces.set_sysctls(host.netns, {"core/txrehash": 0})
    resets = [established_resets(host) for host in lab.hosts]
    with tcp_kit.iperf3_server(second.netns):
        words = ["iperf3", "-6", "-c", second.service6, "-B", first.service6, "--cport", str(CLIENT_PORT), "-J"]
        client = lab.start(first, [*words, "-b", str(RATE), "-t", "600", "-C", "cubic"], stdout=subprocess.PIPE)
        try:
            yield FlowKey(6, first.service6, CLIENT_PORT, second.service6, PORT)
            assert client.poll() is None, "the connection lives"
            assert str(CLIENT_PORT) in support.run(["ss", "-N", first.netns, "-Htn"]).stdout
            assert [established_resets(host) for host in lab.hosts] == resets
        finally:
            client.kill()
            client.communicate()


@pytest.mark.parametrize("trouble", ["congested", "blackholed"])
def test_another_label_takes_a_live_connection_off_a_bad_inner_way(unique_name, trouble):
    with lab_of(unique_name(), 2) as lab, connection(lab) as flow:
        bad, share = where(lab)
        assert share > 0.95, "one connection takes one way"
        harm(lab, bad, trouble)
        with pin_kit.table(lab.hosts[0].netns) as table, Labels(table) as labels:
            assert table.attach([interface.index for interface in lab.hosts[0].interfaces]) == {}
            good = relabelled_off(lab, labels, flow, bad)
            assert good[0] == bad[0], "the same rail: nothing but the label changed"
            before = support.bytes_of_inner_ways(lab)
            support.wait_until(lambda: gained(lab, before)[good] > 2 * ENOUGH_BYTES, 30, "it goes on there")
            sent = gained(lab, before)
            assert sent[good] > 0.95 * sum(sent.values())
            (state,) = labels.read().values()
            assert state.relabelled > 2 * ENOUGH_BYTES // 1500
            lab.heal()
        goes(lab, lambda place: place == bad, "without our label it goes as it went before")


def relabelled_off(lab, labels, flow, bad):
    """Draw labels until one leads elsewhere; each has a chance of one half."""
    for label in range(1, 20):
        before = support.bytes_of_inner_ways(lab)
        assert labels.install([LabelChange(flow, label, pin_kit.soon())]) == {}
        limit = time.monotonic() + 6 * support.slow_factor()
        while time.monotonic() < limit:
            sent = gained(lab, before)
            place = max(sent, key=sent.get)
            if place != bad and sent[place] > ENOUGH_BYTES:
                return place
            time.sleep(0.05)
    return pytest.fail("no label led elsewhere")


@contextlib.contextmanager
def agents(lab, folder):
    """The agents of both hosts; probes by several source ports meet all inner ways. Gives h1's measured IPv6 paths."""
    running = []
    for host in lab.hosts:
        file = directories.default_config(host.netns)
        settings = yaml.safe_load(file.read_text())
        settings["probe"] |= {"interval": "40ms", "flows": 16}
        settings["windows"] = settings.get("windows", {}) | {"short": "400ms"}
        file.write_text(yaml.safe_dump(settings))
        with (folder / f"{host.name}.log").open("w") as log:
            running.append(lab.start(host, [*support.SWERVE, "agent", "-n", host.netns], stdout=log, stderr=log))
    first = lab.hosts[0].netns

    def served():
        with contextlib.suppress(SwerveError):
            return Client(directories.agent_socket(first), frozenset({"path_delay"}))
        return None

    with support.wait_until(served, 60, "the agent of h1 serves") as agent:
        paths = set()

        def measured():
            paths.update(each.path for each in agent.read() if isinstance(each, PathDelay) and ":" in each.path.address)
            return paths

        yield measured
        assert [each.poll() for each in running] == [None, None]


@pytest.mark.deadline(300)
def test_the_controller_relabels_what_an_inner_way_serves_badly(unique_name, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY.replace("WHEN", CONGESTED))
    policy.chmod(0o600)
    with lab_of(unique_name(), 4) as lab, agents(lab, tmp_path) as measured, connection(lab):
        host = steering_kit.Host(lab.hosts[0].netns)
        with steering_kit.controlled(host, policy, "--apply") as controller:
            support.wait_until(
                lambda: controller.guardian() or controller.process.poll() is not None, 60, "the controller runs"
            )
            assert controller.process.poll() is None, controller.process.stderr.read()
            support.wait_until(lambda: len(measured()) == 2, 60, "both paths over IPv6 are measured")
            bad, _ = where(lab)
            harm(lab, bad, "congested")
            good = goes(lab, lambda place: place != bad, "the connection leaves the bad way")
            assert good[0] == bad[0], "the same rail: nothing but the label changed"
            acts = [act for _, act in acts_file.read(directories.state_dir(host.netns)) if act.outcome == "applied"]
            assert {(act.actuator, act.under) for act in acts} == {("label", "repath")}
            assert steering_kit.Host(host.netns).ours() == 0
            shown = support.swerve("steer", "status", "-n", host.netns).stdout
            assert "no weights of ours are in force, but 1 labels" in shown and "relabelled: tcp:[fd00:9::" in shown
            assert controller.end() == 0
        lab.heal()
        goes(lab, lambda place: place == bad, "without a controller it goes as it went before")
