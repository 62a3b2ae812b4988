"""What it takes to re-weight 10,000 prefixes on one nexthop group, and to know that nobody else changed anything.

`apply` is one act of the actuator, from the look at the group to the read-back: with the kernel's default of a
notification for every route (net.ipv4.nexthop_compat_mode=1), and without. The peer is iproute2 replacing the same
10,000 prefixes as routes with two hops each, in one batch. `read` is one reading of all of it, `cpu` what watching it
costs while nothing changes. CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import DEVICE, Pair, emit, median, note, veth_pair, wait_until

from pytools.errors import SwerveError
from pytools.kernel.netlink import MAIN_TABLE, Member, Netlink, Nexthop, Route
from pytools.kernel.netlink_routes import by_nexthop, route_message
from pytools.kernel.netns import inside
from steering.actuators import topology
from steering.actuators.keeper import Keeper
from steering.actuators.nexthops import NexthopGroups
from steering.plan import Group, Weights, nexthop_group

PREFIXES = 10_000
MANAGED = ("10.9.0.0/16",)
GROUP = 102
GATEWAYS = ("10.77.0.2", "10.77.0.3")
STEPS: tuple[Weights, ...] = (((11, 1), (12, 1)), ((11, 1), (12, 10)), ((12, 1),), ((11, 5), (12, 10)))
ROUNDS = 41
PEER_ROUNDS = 5
IDLE_S = 5.0
_STATIC = 4


def main() -> None:
    with veth_pair() as pair, Netlink(pair.ends[0]) as netlink:
        group = build(netlink)
        peer_ms = median(by_iproute2(pair))
        for mode, case in ((1, "prefixes10000_compat"), (0, "prefixes10000_plain")):
            used = time.process_time()
            with compat_mode(pair, mode):
                figures = reweighted(netlink, group)
            used_ms = 1e3 * (time.process_time() - used) / (ROUNDS + 2)
            emit("reweight", "apply", median(figures), "ms", "lower", case=case, n=ROUNDS, **_peer(peer_ms))
            note(f"{case}: p95 {sorted(figures)[int(0.95 * ROUNDS)]:.3g} ms; {used_ms:.3g} ms of processor time each")
        reading(netlink)
        watching(pair, netlink)


def _peer(value_ms: float) -> dict[str, object]:
    return {"peer": "ip_batch_routes", "peer_value": value_ms}


def prefixes() -> list[str]:
    """10,000 host prefixes inside the managed one."""
    return [f"10.9.{number >> 8}.{number & 255}/32" for number in range(PREFIXES)]


def build(netlink: Netlink) -> Group:
    """The group, its two nexthops, and a route by it to every prefix."""
    index = next(link.index for link in netlink.links() if link.name == DEVICE)
    for number, gateway in zip((11, 12), GATEWAYS, strict=True):
        netlink.replace_nexthop(Nexthop(number, 4, gateway, index, _STATIC))
    netlink.replace_group(GROUP, [Member(11, 1), Member(12, 1)], _STATIC, create=True, kind="mpath")
    bodies = []
    for prefix in prefixes():
        message = route_message(Route(prefix, 4, MAIN_TABLE, nexthop_id=GROUP, protocol=_STATIC))
        message.encode()
        bodies.append(by_nexthop(bytes(message.data)[16:], GROUP, 0, _STATIC))
    if any(netlink.make_routes(bodies)):
        raise SwerveError("the routes could not be made")
    found = topology.find(netlink, MANAGED).groups[nexthop_group(GROUP)]
    if len(found.destinations) != PREFIXES:
        raise SwerveError(f"{len(found.destinations)} prefixes on the group: not what was to be measured")
    return found


@contextlib.contextmanager
def compat_mode(pair: Pair, mode: int) -> Iterator[None]:
    """The kernel's notifications for every route, switched on or off in the namespace."""
    setting = Path("/proc/sys/net/ipv4/nexthop_compat_mode")
    with inside(pair.ends[0]):
        before = setting.read_text()
        setting.write_text(str(mode))
    try:
        yield
    finally:
        with inside(pair.ends[0]):
            setting.write_text(before)


def reweighted(netlink: Netlink, group: Group) -> list[float]:
    """Milliseconds of each act."""
    actuator = NexthopGroups(netlink)
    figures = []
    now = actuator.weights(group)
    assert now is not None
    for turn in range(ROUNDS + 1):
        wanted = STEPS[(STEPS.index(now) + 1) % len(STEPS)]
        began = time.perf_counter()
        outcome = actuator.apply(group, [now], wanted)
        took = 1e3 * (time.perf_counter() - began)
        if outcome.kind != "applied":
            raise SwerveError(f"the act was not carried out: {outcome.why}")
        now = wanted
        if turn:  # the first is a warm-up
            figures.append(took)
    actuator.apply(group, [now], STEPS[0])
    return figures


def by_iproute2(pair: Pair) -> list[float]:
    """Milliseconds of `ip -batch` replacing every prefix as a route with two hops, in a table of its own."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(PEER_ROUNDS + 1):
            hops = " ".join(
                f"nexthop via {gateway} dev {DEVICE} weight {1 + turn * place}"
                for place, gateway in enumerate(GATEWAYS)
            )
            lines = [f"route replace {prefix} table 77 proto static {hops}\n" for prefix in prefixes()]
            batch = Path(folder, "batch")
            batch.write_text("".join(lines))
            began = time.perf_counter()
            subprocess.run(["ip", "-n", pair.ends[0], "-batch", batch], check=True, stdout=subprocess.DEVNULL)
            if turn:
                figures.append(1e3 * (time.perf_counter() - began))
    return figures


def reading(netlink: Netlink) -> None:
    """One reading of links, nexthops, groups and all routes, sorted into what may be steered."""
    figures = []
    for _ in range(11):
        began = time.perf_counter()
        topology.find(netlink, MANAGED)
        figures.append(1e3 * (time.perf_counter() - began))
    emit("reweight", "read", median(figures[1:]), "ms", "lower", case="prefixes10000", n=10)


def watching(pair: Pair, netlink: Netlink) -> None:
    """What a keeper uses while nobody but us changes anything, looking in as often as a controller does."""
    with compat_mode(pair, 1), inside(pair.ends[0]), Keeper(netlink, MANAGED, keep=True) as keeper:
        began = time.perf_counter()
        view = keeper.refresh({})
        note(f"first reading, and {PREFIXES} backup routes made: {time.perf_counter() - began:.2g} s")
        wait_until(lambda: len(netlink.routes(4)) >= 2 * PREFIXES, "the backup routes are there")
        known, readings = dict(view.groups), 0
        keeper.heard()
        used = time.process_time()
        began = time.perf_counter()
        while time.perf_counter() - began < IDLE_S:
            time.sleep(0.05)  # a controller's tick
            keeper.heard()
            if time.monotonic_ns() >= keeper.due_ns:
                known = dict(keeper.refresh(known).groups)
                readings += 1
        share = (time.process_time() - used) / (time.perf_counter() - began)
        emit("reweight", "cpu", share, "share", "lower", case="watch_prefixes10000", n=1)
        note(f"{readings} readings in {IDLE_S:g} s, process {os.getpid()}")


if __name__ == "__main__":
    main()
