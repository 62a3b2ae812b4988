"""What an act on weights takes: the switch, following what others change, and what our rule adds to a look-up.

`switch` is one act, from the call to the kernel's last acknowledgement: the first one (group and rule), further ones
(group), and of a group that carries 10,000 prefixes, with and without the kernel's notification for each of their
routes (net.ipv4.nexthop_compat_mode=1, its default). `follow` is from the withdrawal of a hop by somebody else until
our group is without it. `lookup` is what the rule adds to an unconnected UDP send to an address that is not managed,
which finds nothing in our table. CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from _common import DEVICE, Pair, emit, median, note, veth_pair

from pytools.errors import SwerveError
from pytools.kernel.netlink.routes import mirrored, route_message
from pytools.kernel.netlink.routing import MAIN_TABLE, Hop, Member, Netlink, Nexthop, Route
from pytools.kernel.netns import inside
from steering.actuators.overlay import Overlay
from steering.plan import Group, Weights
from steering.policy.model import Manage

PREFIXES = 10_000
MANAGE = Manage(destinations=("10.9.0.0/16",))
GROUP = 102
GATEWAYS = ("10.77.0.2", "10.77.0.3", "10.77.0.4")
ONE = "10.9.0.2/32"
OTHER = "10.8.0.2"  # not managed
ROUNDS = 101
FOLLOWED = 100
SENDS = 20_000
SEND_ROUNDS = 21
_STATIC = 4


def main() -> None:
    with veth_pair() as pair, Netlink(pair.ends[0]) as others, Netlink(pair.ends[0]) as netlink:
        index = next(link.index for link in netlink.links() if link.name == DEVICE)
        for gateway in GATEWAYS:  # nobody is asked for while packets are sent
            neighbour = ["neighbour", "replace", gateway, "lladdr", "02:00:00:00:00:01", "dev", DEVICE]
            subprocess.run(["ip", "-n", pair.ends[0], *neighbour], check=True)
        with one_prefix(others, index), opened(pair, netlink) as overlay:
            first, again = switched(overlay)
            emit("overlay", "switch", median(first), "ms", "lower", case="first", n=len(first))
            emit("overlay", "switch", median(again), "ms", "lower", case="again", n=len(again))
            figures = sorted(followed(overlay, others, index))
            emit("overlay", "follow_p95", figures[int(0.95 * len(figures))], "ms", "lower", n=len(figures))
            others.replace_route(Route(f"{OTHER}/32", 4, MAIN_TABLE, gateway=GATEWAYS[0], ifindex=index))
            without, with_rule = looked_up(pair, overlay)
            emit("overlay", "lookup", with_rule - without, "ns", "lower", n=SEND_ROUNDS * SENDS)
            note(f"an unconnected UDP send takes {without:.0f} ns, with the rule {with_rule:.0f} ns")
        many_prefixes(others, index)
        for mode, case in ((0, "prefixes10000"), (1, "prefixes10000_compat")):
            with compat_mode(pair, mode), opened(pair, netlink) as overlay:
                _, again = switched(overlay)
                emit("overlay", "switch", median(again), "ms", "lower", case=case, n=len(again))


@contextlib.contextmanager
def opened(pair: Pair, netlink: Netlink) -> Iterator[Overlay]:
    with inside(pair.ends[0]), Overlay(netlink, MANAGE, apply=True) as overlay:
        began = time.perf_counter()
        found = overlay.refresh()
        [group] = found.groups.values()
        prepared_ms = 1e3 * (time.perf_counter() - began)
        note(f"{len(group.destinations)} prefixes mirrored in {prepared_ms:.1f} ms")
        yield overlay


@contextlib.contextmanager
def one_prefix(others: Netlink, index: int) -> Iterator[None]:
    """A multipath route to one prefix."""
    route = over(index, GATEWAYS)
    others.replace_route(route)
    yield
    others.del_route(route)


def over(index: int, gateways: tuple[str, ...]) -> Route:
    hops = tuple(Hop(gateway, index, 1) for gateway in gateways)
    return Route(ONE, 4, MAIN_TABLE, hops=hops, protocol=_STATIC)


def many_prefixes(others: Netlink, index: int) -> None:
    """10,000 routes by one nexthop group."""
    for number, gateway in zip((11, 12, 13), GATEWAYS, strict=True):
        others.replace_nexthop(Nexthop(number, 4, gateway, index, _STATIC))
    others.replace_group(GROUP, [Member(number, 1) for number in (11, 12, 13)], _STATIC, create=True, kind="mpath")
    message = route_message(Route(ONE, 4, MAIN_TABLE, nexthop_id=GROUP, protocol=_STATIC))
    message.encode()
    body = bytes(message.data)[16:]
    prefixes = [f"10.9.{number >> 8}.{number & 255}/32" for number in range(PREFIXES)]
    if any(others.make_routes([mirrored(body, prefix, MAIN_TABLE, _STATIC, GROUP) for prefix in prefixes])):
        raise SwerveError("the routes could not be made")


def switched(overlay: Overlay) -> tuple[list[float], list[float]]:
    """Milliseconds of a first act, and of a second one while the first is in force."""
    first, again = [], []
    for turn in range(ROUNDS + 1):
        [group] = overlay.refresh().groups.values()
        for figures, wanted in ((first, group.original[1:]), (again, group.original[:2]), ([], group.original)):
            took = timed(overlay, group, wanted)
            if turn:  # the first is a warm-up
                figures.append(took)
    return first, again


def timed(overlay: Overlay, group: Group, wanted: Weights) -> float:
    began = time.perf_counter()
    overlay.apply(group.target, wanted)
    return 1e3 * (time.perf_counter() - began)


def followed(overlay: Overlay, others: Netlink, index: int) -> Iterator[float]:
    """Milliseconds from somebody's request until our group is without the hop, while ours are in force."""
    [group] = overlay.refresh().groups.values()
    timed(overlay, group, tuple((number, 1 + place) for place, (number, _) in enumerate(group.original)))
    for _ in range(FOLLOWED):
        wait(overlay, 3)
        began = time.perf_counter()
        others.replace_route(over(index, GATEWAYS[1:]))
        wait(overlay, 2)
        yield 1e3 * (time.perf_counter() - began)
        others.replace_route(over(index, GATEWAYS))
    wait(overlay, 3)
    [group] = overlay.refresh().groups.values()
    timed(overlay, group, group.original)


def wait(overlay: Overlay, members: int) -> None:
    """Go on as a controller does until the target has so many hops."""
    while True:
        left_s = (overlay.due_ns - time.monotonic_ns()) / 1e9
        if select.select([overlay], [], [], max(0.0, min(left_s, 0.05)))[0]:
            overlay.receive()
        if time.monotonic_ns() >= overlay.due_ns:
            [group] = overlay.refresh().groups.values()
            if len(group.members) == members:
                return


def looked_up(pair: Pair, overlay: Overlay) -> tuple[float, float]:
    """Nanoseconds of a send without the rule and with it, in turn."""
    [group] = overlay.refresh().groups.values()
    figures: tuple[list[float], list[float]] = ([], [])
    with inside(pair.ends[0]), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(SEND_ROUNDS):
            for place, wanted in enumerate((group.original, group.original[1:])):
                timed(overlay, group, wanted)
                began = time.perf_counter_ns()
                for _ in range(SENDS):
                    sock.sendto(b"", (OTHER, 9))
                figures[place].append((time.perf_counter_ns() - began) / SENDS)
    return statistics.median(figures[0]), statistics.median(figures[1])


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


if __name__ == "__main__":
    main()
