"""Interfaces, queues, neighbours and drivers' statistics as iproute2 and ethtool show them; nothing lost silently."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import support
from link_watch import kernel_link, kernel_queues, watching

from pytools.config import Links
from pytools.kernel.ethtool import Ethtool
from pytools.kernel.netlink.bonds import Bundle
from pytools.kernel.netlink.links import FAILED, LinkMonitor, Tables, handle_text, parent_text
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.signals import BondPort
from pytools.signals import Path as NetworkPath

PERMANENT = 0x80
RARELY = Links(interval_ms=60_000)  # so that nothing but the kernel's messages tells
PATH = NetworkPath("h1", "h2", "10.77.0.2", "", "v0")


@pytest.mark.guest
def test_driver_statistics_are_those_of_ethtool(veth_pair: tuple[str, str]) -> None:
    support.require("ethtool", "ping")
    first, _ = veth_pair
    support.run(["ip", "netns", "exec", first, "ping", "-n", "-c3", "-i0.01", "10.77.0.2"])
    shown = support.run(["ip", "netns", "exec", first, "ethtool", "-S", "v0"]).stdout
    theirs = {name: int(value) for name, value in re.findall(r"^ +(\S+): (\d+)$", shown, re.MULTILINE)}
    with inside(first):
        ethtool = Ethtool()
    try:
        count = ethtool.count("v0")
        values = ethtool.values("v0", count)
        assert values is not None
        ours = dict(zip(ethtool.names("v0", count), values.tolist(), strict=True))
        assert ours == theirs
        assert ours["peer_ifindex"] > 0
        assert ethtool.speed_mbps("v0") == 10_000
        assert (ethtool.count("lo"), ethtool.speed_mbps("lo")) == (0, None)
        assert (ethtool.count("nothere"), ethtool.values("nothere", 3)) == (0, None)
        assert ethtool.values("v0", count + 1) is None  # the driver has another number of them
    finally:
        ethtool.close()


@pytest.mark.guest
def test_interfaces_are_those_of_iproute2(veth_pair: tuple[str, str]) -> None:
    support.require("ping")
    first, second = veth_pair
    support.run(["ip", "netns", "exec", first, "ping", "-n", "-c3", "-i0.01", "10.77.0.2"])
    support.run(["ip", "-n", second, "link", "set", "v0", "down"])
    with Netlink(first) as netlink:
        tables = Tables(netlink)
        rows = {row.name: row for row in tables.links().values()}
        row = tables.link(rows["v0"].index)
        assert row is not None
        assert tables.link(9999) is None
        while (shown := kernel_link(first, "v0")) != (shown_again := kernel_link(first, "v0")):
            pass  # the kernel itself still tries to send: its counters are compared once they rest
        row = tables.link(row.index)
        assert row is not None
    assert shown == shown_again
    sent, received = shown["stats64"]["tx"], shown["stats64"]["rx"]
    assert (row.sent_bytes, row.sent_packets, row.sent_drops) == (sent["bytes"], sent["packets"], sent["dropped"])
    assert (row.received_bytes, row.received_packets) == (received["bytes"], received["packets"])
    assert row.sent_packets >= 3
    assert (row.index, row.mtu, row.carrier_changes) == (shown["ifindex"], shown["mtu"], sent["carrier_changes"])
    assert (row.up, row.carrier) == ("UP" in shown["flags"], "LOWER_UP" in shown["flags"]) == (True, False)
    assert row.carrier_ups + row.carrier_downs == row.carrier_changes


QUEUES = {
    "tbf": (["tbf", "rate", "1mbit", "burst", "5000", "limit", "12345"], (12_345, None)),
    "pfifo": (["pfifo", "limit", "77"], (None, 77)),
    "bfifo": (["bfifo", "limit", "54321"], (54_321, None)),
    "fq_codel": (["fq_codel", "limit", "321"], (None, 321)),
    "fq": (["fq", "limit", "222"], (None, 222)),
    "netem": (["netem", "limit", "99", "delay", "1ms"], (None, 99)),
    "sfq": (["sfq", "limit", "55"], (None, 55)),
    "red": (["red", "limit", "60000", "avpkt", "1000", "min", "10000", "max", "20000"], (60_000, None)),
    "codel": (["codel", "limit", "66"], (None, 66)),
    "pie": (["pie", "limit", "88"], (None, 88)),
}


@pytest.mark.guest
def test_limits_of_queues_are_those_they_were_made_with(veth_pair: tuple[str, str]) -> None:
    first, _ = veth_pair
    tried = []
    with Netlink(first) as netlink:
        tables = Tables(netlink)
        index = next(row.index for row in tables.links().values() if row.name == "v0")
        for kind, (words, limits) in QUEUES.items():
            support.run(["tc", "-n", first, "qdisc", "del", "dev", "v0", "root"], check=False)
            command = ["tc", "-n", first, "qdisc", "add", "dev", "v0", "root", "handle", "7:", *words]
            if support.run(command, check=False).returncode != 0:
                continue  # not in this kernel
            tried.append(kind)
            (row,) = tables.qdiscs({index})
            assert (row.kind, handle_text(row.handle), parent_text(row.parent)) == (kind, "7:", "root")
            assert (row.limit_bytes, row.limit_packets) == limits, kind
    can_load = Path("/lib/modules", os.uname().release).exists()
    assert set(tried) >= (set(QUEUES) if can_load else {"tbf", "pfifo", "bfifo"})


def test_a_tree_of_queues_is_that_of_tc(veth_pair: tuple[str, str]) -> None:
    support.require("ping")
    first, _ = veth_pair
    tc = ["tc", "-n", first]
    support.run([*tc, "qdisc", "add", "dev", "v0", "root", "handle", "1:", "htb", "default", "10"])
    support.run([*tc, "class", "add", "dev", "v0", "parent", "1:", "classid", "1:10", "htb", "rate", "10mbit"])
    support.run([*tc, "qdisc", "add", "dev", "v0", "parent", "1:10", "handle", "20:", "pfifo", "limit", "2"])
    support.run([*tc, "qdisc", "add", "dev", "v0", "clsact"])
    support.run(["ip", "netns", "exec", first, "ping", "-n", "-f", "-c500", "-s1400", "-W1", "10.77.0.2"], check=False)
    with Netlink(first) as netlink:
        tables = Tables(netlink)
        index = next(row.index for row in tables.links().values() if row.name == "v0")
        rows = tables.qdiscs({index})
    shown = kernel_queues(first, "v0")
    names = ("kind", "handle", "drops", "overlimits", "requeues")
    assert [(row.kind, handle_text(row.handle), row.drops, row.overlimits, row.requeues) for row in rows] == [
        tuple(each[name] for name in names) for each in shown
    ]
    parents = ["root" if each.get("root") else each["parent"] for each in shown]
    assert [parent_text(row.parent) for row in rows] == parents
    assert [row.is_ingress for row in rows] == [each["kind"] == "clsact" for each in shown]


@pytest.mark.guest
def test_what_happens_between_two_readings_is_not_missed(veth_pair: tuple[str, str]) -> None:
    first, second = veth_pair
    with watching(first, lambda: ["v0"], lambda: [PATH], RARELY) as work:
        for _ in range(3):
            support.run(["ip", "-n", second, "link", "set", "v0", "down"])
            support.run(["ip", "-n", second, "link", "set", "v0", "up"])
        flap = work.event("flap", "v0")
        assert flap.values["unseen"] + flap.values["flaps"] >= 3
        assert flap.paths == [PATH]


def stacked(netns: str, other: str, kind: str) -> list[str]:
    """Put interfaces above v0; their names, the one with the paths first."""
    if kind == "macvlan":
        support.ip(netns, "link add link v0 name m0 type macvlan", "link set dev m0 up")
        return ["m0"]
    support.join(netns, other, "v1")
    support.ip(other, "link set dev v1 up")
    bond(netns, "active-backup miimon 10")
    support.ip(netns, "link add link bond0 name bond0.7 type vlan id 7", "link set dev bond0.7 up")
    return ["bond0.7", "bond0"]


def bond(netns: str, mode: str) -> None:
    """Put v0 and v1 under a bond."""
    enslaved = (f"link set dev {port} {what}" for port in ("v0", "v1") for what in ("down", "master bond0"))
    support.ip(netns, f"link add bond0 type bond mode {mode}", *enslaved, "link set dev bond0 up")


BOND = pytest.param("bond", marks=pytest.mark.guest(only=True))  # the machine's own kernel has neither bonds nor VLANs


@pytest.mark.parametrize("kind", ["macvlan", BOND])
def test_what_is_below_an_interface_with_paths_is_watched(veth_pair: tuple[str, str], kind: str) -> None:
    first, second = veth_pair
    uppers = stacked(first, second, kind)
    ports = ["v0"] if kind == "macvlan" else ["v0", "v1"]
    with Netlink(first) as netlink:
        tables = Tables(netlink)
        indexes = {row.name: row.index for row in tables.links().values()}
        chain = {indexes[upper]: {indexes[lower]} for upper, lower in itertools.pairwise(uppers)}
        stack = tables.stack()
        assert stack.lowers == chain | {indexes[uppers[-1]]: {indexes[port] for port in ports}}
        bonded = {} if kind == "macvlan" else dict.fromkeys([*uppers, *ports], "bond0")
        assert stack.devices == {indexes[name]: device for name, device in bonded.items()}
    path = NetworkPath("h1", "h2", "10.77.0.2", "", uppers[0])
    with watching(first, lambda: [uppers[0]], lambda: [path], RARELY) as work:
        assert [work.link(name).upper for name in (*uppers[1:], *ports)] == [uppers[0]] * (len(uppers) - 1 + len(ports))
        assert [work.link(name).bond for name in (*uppers, *ports)] == [*bonded.values()] or not bonded
        assert work.link(uppers[0]).upper == "" and work.link(uppers[0]).paths == [path]
        support.run(["ip", "-n", second, "link", "set", "v0", "down"])
        lost = work.event("carrier_lost", "v0")
        assert lost.paths == [] and lost.detail.startswith(f"v0, below {uppers[0]}: ")
        assert indexes["v0"] not in dict(work.carriers)
        if kind == "bond":  # it works on by the other port
            assert all(work.link(name).carrier for name in uppers)
            assert work.find("carrier_lost", uppers[0]) is None
        else:
            assert work.event("carrier_lost", uppers[0]).paths == [path]


DROP = ["matchall", "action", "drop"]


@pytest.mark.guest(only=True)
def test_a_port_of_a_bond_whose_lacp_partner_goes_is_named(veth_pair: tuple[str, str]) -> None:
    ends = veth_pair
    support.join(*ends, "v1")
    for netns in ends:
        bond(netns, "802.3ad miimon 10 lacp_rate fast xmit_hash_policy layer3+4")
    path = NetworkPath("h1", "h2", "10.77.0.2", "", "bond0")
    told: list[Mapping[str, Bundle]] = []
    agreed = {"synchronization", "collecting", "distributing"}

    def watched(name: str) -> BondPort | None:
        newest = [each for each in work.links if each.interface == name]
        return newest[-1].port if newest else None

    with watching(ends[0], lambda: ["bond0"], lambda: [path], bundles=told.append) as work:

        def agree() -> bool:
            ports = [watched(name) for name in ("v0", "v1")]
            return all(each is not None and agreed <= {*each.actor} & {*each.partner} for each in ports)

        work.until(agree, "both ports have agreed with their partner")
        for name in ("v0", "v1"):
            seen = watched(name)
            assert seen is not None and seen.active and seen.status == "up" and seen.aggregator
            assert (seen.mode, seen.policy) == ("802.3ad", "layer3+4")
        assert set(told[-1]) == {"bond0"} and told[-1]["bond0"].ports == ("v0", "v1")
        for words in (["qdisc", "add", "dev", "v1", "ingress"], ["filter", "add", "dev", "v1", "ingress", *DROP]):
            support.run(["tc", "-n", ends[0], *words])
        lost = work.event("bond_port_lost", "v1")
        assert lost.detail.startswith("v1, below bond0: LACP: ") and lost.paths == []
        sick = work.link("v1")
        assert sick.carrier and sick.port is not None and lost.detail.endswith(sick.port.trouble)
        support.run(["tc", "-n", ends[0], "qdisc", "del", "dev", "v1", "ingress"])
        work.event("bond_port_found", "v1")


def test_an_overrun_is_counted_and_answered_by_reading_everything(veth_pair: tuple[str, str]) -> None:
    first, _ = veth_pair
    with watching(first, lambda: ["v0"], lambda: [PATH], RARELY, room_bytes=2048) as work:
        assert work.source.drops()["link_messages_overrun"] == 0
        support.run(["ip", "-n", first, "neigh", "replace", "10.77.0.2", "dev", "v0", "nud", "failed"])
        support.ip(first, *(f"neigh replace 10.77.0.{n} lladdr 02:00:00:00:00:{n:02x} dev v0" for n in range(3, 200)))
        support.run(["ip", "-n", first, "link", "set", "v0", "mtu", "1400"])
        assert work.event("mtu_changed", "v0").values == {"before_bytes": 1500, "after_bytes": 1400}
        assert work.event("neighbour_failed", "v0").paths == [PATH]
        assert work.source.drops()["link_messages_overrun"] >= 1


def test_neighbours_are_those_of_iproute2(veth_pair: tuple[str, str]) -> None:
    first, _ = veth_pair
    neigh = ["ip", "-n", first, "neigh", "replace"]
    support.run([*neigh, "10.77.0.9", "dev", "v0", "nud", "failed"])
    support.run([*neigh, "fd77::9", "lladdr", "02:00:00:00:00:09", "dev", "v0", "nud", "permanent"])
    with Netlink(first) as netlink:
        states = {row.address: row.state for row in Tables(netlink).neighbours()}
    assert states["10.77.0.9"] == FAILED
    assert states["fd77::9"] == PERMANENT
    shown = json.loads(support.run(["ip", "-n", first, "-j", "neigh", "show", "nud", "all", "dev", "v0"]).stdout)
    ours = {each["dst"]: each["state"] for each in shown if each["dst"] in states}
    assert (ours["10.77.0.9"], ours["fd77::9"]) == (["FAILED"], ["PERMANENT"])
    groups = {each["dst"] for each in shown if each["dst"].startswith("ff02:")}  # these come by themselves
    assert {each["dst"] for each in shown} - groups <= set(states)


def test_mtu_and_removal_are_told(veth_pair: tuple[str, str]) -> None:
    first, _ = veth_pair
    with watching(first, lambda: ["v0"], lambda: [PATH], RARELY) as work:
        index = socket.if_nametoindex("v0")
        support.run(["ip", "-n", first, "link", "set", "v0", "mtu", "9000"])
        changed = work.event("mtu_changed", "v0")
        assert (changed.values, changed.paths) == ({"before_bytes": 1500, "after_bytes": 9000}, [PATH])
        work.until(lambda: work.links and work.links[-1].mtu_bytes == 9000, "the link is shown with its new MTU")
        support.run(["ip", "-n", first, "link", "del", "v0"])
        assert work.event("removed", "v0").paths == [PATH]
        assert work.told() == [("mtu_changed", "v0"), ("carrier_lost", "v0"), ("removed", "v0")] or work.told() == [
            ("mtu_changed", "v0"),
            ("removed", "v0"),
        ]
        assert set(work.carriers) == {(index, False)}


def test_an_interface_that_comes_back_under_its_name_is_watched_anew(veth_pair: tuple[str, str]) -> None:
    first, second = veth_pair
    with watching(first, lambda: ["v0"], lambda: [PATH], Links(interval_ms=20)) as work:
        support.run(["ip", "-n", first, "link", "del", "v0"])
        work.event("removed", "v0")
        support.join(first, second, "v0")
        assert work.link("v0").up is False
        for name in (first, second):
            support.run(["ip", "-n", name, "link", "set", "v0", "up"])
        work.event("carrier_found", "v0")


def test_a_monitor_hears_of_links_addresses_and_neighbours(veth_pair: tuple[str, str]) -> None:
    first, _ = veth_pair
    with inside(first):
        monitor = LinkMonitor()
    try:
        monitor.read()  # that the link came up may be told late
        support.run(["ip", "-n", first, "address", "add", "10.78.0.1/24", "dev", "v0"])
        assert monitor.read().addresses
        support.ip(first, "neigh replace 10.77.0.9 lladdr 02:00:00:00:00:09 dev v0", "neigh del 10.77.0.9 dev v0")
        states = [(each.address, each.state) for each in monitor.read().neighbours]
        assert states[0] == ("10.77.0.9", PERMANENT)
        assert states[-1] == ("10.77.0.9", 0)
        support.run(["ip", "-n", first, "link", "set", "v0", "mtu", "1300"])
        assert monitor.read().changed
    finally:
        monitor.close()
