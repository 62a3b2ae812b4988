"""A namespace with two rails whose other ends are in it too, and the overlay on its routes.

Imported as `overlay_kit`. The test refreshes the overlay itself.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import support

from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from steering.actuators.overlay import Overlay
from steering.policy.model import Manage

PREFIX = {4: "10.9.0.2/32", 6: "fd00:9::2/128"}
PEER = {family: prefix.partition("/")[0] for family, prefix in PREFIX.items()}
MANAGED = {4: "10.9.0.0/16", 6: "fd00:9::/64"}
SERVICE = {4: "10.9.0.1", 6: "fd00:9::1"}


def gateway(family, rail):
    return f"10.{rail}.1.1" if family == 4 else f"fd00:{rail}::1"


class Host(support.Namespace):
    """A namespace with two rails, and the overlay that is tried on it."""

    def __init__(self, netns, family):
        super().__init__(netns)
        self.family, self.overlay = family, None
        self.write("net/ipv6/conf/default/accept_dad", 0)
        for rail in (1, 2):
            self.add_rail(rail)
        support.ip(netns, f"address add {SERVICE[4]}/32 dev lo", f"address add {SERVICE[6]}/128 dev lo nodad")
        support.wait_until(lambda: SERVICE[6] in self.local6(), 20, "the kernel has made the route of the new address")

    def local6(self):
        """Addresses that have their route: the kernel makes it a while after it has taken the address."""
        return {row["dst"] for row in self.rows("-6", "route", "show", "table", "local", "type", "local")}

    def add_rail(self, rail):
        ends = f"rail{rail}", f"far{rail}"
        support.ip(
            self.netns,
            f"link add {ends[0]} type veth peer name {ends[1]}",
            *(f"link set dev {end} up" for end in ends),
            f"address add 10.{rail}.1.2/24 dev rail{rail}",
            f"address add fd00:{rail}::2/64 dev rail{rail} nodad",
        )
        support.wait_for_own_routes(self.netns, *ends)

    def write(self, setting, value):
        """Set a sysctl, written as a path."""
        with inside(self.netns):
            Path("/proc/sys", setting).write_text(str(value))

    def route(self, *words):
        self.ip(f"-{self.family}", "route", *words)

    def hop(self, rail):
        return "via", gateway(self.family, rail), "dev", f"rail{rail}"

    def nexthops(self, *rails):
        return [word for rail in rails for word in ("nexthop", *self.hop(rail))]

    def rule(self, *words):
        self.ip(f"-{self.family}", "rule", *words)

    def manage(self, **more):
        return Manage.model_validate({"destinations": [MANAGED[self.family]], **more})

    def way(self, *words):
        """By which interface packets to the peer leave."""
        found = json.loads(self.ip(f"-{self.family}", "-j", "route", "get", PEER[self.family], *words))
        return found[0]["dev"]

    def source(self):
        """The source address of packets to the peer that have none yet."""
        return json.loads(self.ip(f"-{self.family}", "-j", "route", "get", PEER[self.family]))[0]["prefsrc"]

    def ways(self, *words):
        """The interfaces by which a look-up may let packets leave, as its route has them."""
        return self.ways_to(PEER[self.family], *words)

    def ways_to(self, address, *words):
        [route] = json.loads(self.ip(f"-{self.family}", "-j", "route", "get", "fibmatch", address, *words))
        return {hop["dev"] for hop in route.get("nexthops", [route])}

    def rto_min(self):
        """The minimum RTO (ms) of the route that decides about packets to the peer, and its lock."""
        words = self.ip(f"-{self.family}", "route", "get", "fibmatch", PEER[self.family]).split()
        if "rto_min" not in words:
            return []
        locked, value = words[words.index("rto_min") + 1 :][:2]
        return [locked, int(value.removesuffix("ms"))]

    def held(self, destination):
        """The interfaces of our route to a prefix."""
        rows = json.loads(self.ip(f"-{self.family}", "-j", "route", "show", "table", "20000"))
        [route] = [row for row in rows if row["dst"] == destination]
        return {hop["dev"] for hop in route.get("nexthops", [route])}

    def rules(self):
        """Our rules."""
        return [row for family in ("-4", "-6") for row in self.rows(family, "rule") if row.get("protocol") == "201"]

    def start(self, **more):
        with inside(self.netns):
            self.netlink = Netlink()
            self.overlay = Overlay(self.netlink, self.manage(**more), apply=True)
        return self.look()

    def look(self):
        return self.overlay.refresh()

    def hear(self, done):
        """Refresh as a controller would until something holds."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < 20 * support.slow_factor(), "nothing came of it"
            self.overlay.receive()
            if time.monotonic_ns() >= self.overlay.due_ns:
                self.overlay.refresh()

    def leave(self, rail, found=None):
        """Take a rail out of the only target there is."""
        [group] = (found or self.look()).groups.values()
        rest = tuple((m.nexthop_id, m.weight or 1) for m in group.members if m.interface != f"rail{rail}")
        assert self.overlay.apply(group.target, rest), "a target has weights"
        return group

    def put_back(self, group):
        assert self.overlay.apply(group.target, group.original), "a target has weights"
