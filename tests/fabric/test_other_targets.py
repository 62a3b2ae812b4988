"""Routes without nexthop objects: a rail that is out, or stands by, is still measured, and gets its share back."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
import steering_kit as kit
import support
from steering_kit import controlled

from steering.demo.observe import Observer

POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16, "fd00:9::/64"]}
safety: {lease: 3s, max_drained_share: 0.5, stale_after: 500ms, baseline_after: 2s}
rules:
  - name: leave-silent-rail
    when: {signal: silence, missed: 3}
    then: {drain: {}}
    return: {dwell: 3s, retry_after: 3s, rise: 5, steps: [1.0], step: 100ms}
"""
STAYS_OUT_S = 4.0  # longer than unmeasured paths are believed (baseline_after), and than the dwell
FROM, TO = {4: "10.9.0.1", 6: "fd00:9::1"}, {4: "10.9.0.2/32", 6: "fd00:9::2/128"}
LAB = {"rate": "20mbit", "ipv6": True}


def ip(lab, *words):
    return support.run(["ip", "-n", lab.hosts[0].netns, *words]).stdout


def gateway(family, rail):
    return f"10.{rail}.1.1" if family == 4 else f"fd00:{rail}:1::1"


def several_hops(lab, family):
    """The route to the other host lists its hops itself."""
    hops = [word for rail in (1, 2) for word in ("nexthop", "via", gateway(family, rail), "dev", f"rail{rail}")]
    ip(lab, f"-{family}", "route", "del", TO[family])
    ip(lab, f"-{family}", "route", "add", TO[family], "src", FROM[family], *hops)


def two_metrics(lab, family):
    """Two routes to the other host, the first rail's preferred."""
    ip(lab, f"-{family}", "route", "del", TO[family])
    for rail in (1, 2):
        words = f"-{family} route add {TO[family]} via {gateway(family, rail)} metric {10 * rail} src {FROM[family]}"
        ip(lab, *words.split())


def rails(lab, family):
    """The interfaces that packets to the other host leave by now."""
    [route] = json.loads(ip(lab, "-j", f"-{family}", "route", "get", "fibmatch", TO[family].partition("/")[0]))
    return {hop["dev"] for hop in route.get("nexthops") or [route]}


BOTH, FIRST = {"rail1", "rail2"}, {"rail1"}


@pytest.mark.parametrize(
    "routes",
    [{4: (several_hops, BOTH), 6: (several_hops, BOTH)}, {4: (two_metrics, FIRST)}],
    ids=["hops-ipv4-ipv6", "metrics-ipv4"],
)
def test_a_silent_rail_is_left_stays_out_while_it_is_silent_and_returns(lab, policy, routes):
    for family, (make, _) in routes.items():
        make(lab, family)
    kit.agents(lab)
    host = kit.Host(lab.hosts[0].netns)

    def used():
        return {family: rails(lab, family) for family in routes}

    def everywhere(what):
        return dict.fromkeys(routes, what)

    whole = {family: interfaces for family, (_, interfaces) in routes.items()}
    with contextlib.closing(Observer(lab.hosts[:1])) as observer, controlled(host, policy, "--apply") as controller:

        def thought():
            found = {}
            observer.wait_for(lambda record: found.update(record.latest) or True, 0)
            by_address = {family: TO[family].partition("/")[0] for family in routes}
            return {
                family: {path.interface: each.state for (_, path), each in found.items() if path.address == address}
                for family, address in by_address.items()
            }

        healthy = everywhere({"rail1": "healthy", "rail2": "healthy"})
        support.wait_until(lambda: thought() == healthy, 30, "both rails are measured")
        lab.blackhole(1)
        support.wait_until(lambda: used() == everywhere({"rail2"}), 20, "the silent rail is left")
        end = time.monotonic() + STAYS_OUT_S
        while time.monotonic() < end:
            assert used() == everywhere({"rail2"})
            time.sleep(0.05)
        assert thought() == everywhere({"rail1": "drained", "rail2": "healthy"})
        lab.heal()
        support.wait_until(lambda: used() == whole, 30, "the rail has its share again")
        assert controller.end() == 0
    assert used() == whole
