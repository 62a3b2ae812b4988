"""A path that takes less than its interface does: told soon, to the byte, and never taken for congestion."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import support
from watching import SECOND_NS, Watcher, watchers, work_for, work_until

from pytools.config import AgentConfig, Links, Peer, Probe
from pytools.kernel import netns
from pytools.lab import Lab
from pytools.signals import LinkEvent

ADDRESSES = ("10.9.0.2", "fd00:9::2")
ODD = ("stray_replies", "stray_stamps", "foreign_replies", "malformed_replies", "malformed_requests", "reply_refused")
Bring = Callable[..., tuple[Lab, list[Watcher]]]


@contextlib.contextmanager
def bringing(unique_name: Callable[[], str]) -> Iterator[Bring]:
    """Bring up a lab of two hosts that watch each other; all paths agree when it is returned."""
    support.require("bcc", "netns", "ip")
    with contextlib.ExitStack() as closing:
        made: list[Watcher] = []

        def up(jumbo: bool = False, **changes: object) -> tuple[Lab, list[Watcher]]:
            settings = {"hosts": 2, "rails": 2, "rate": "100mbit", "ipv6": True} | changes
            lab = closing.enter_context(Lab.up(unique_name(), **settings))  # type: ignore[arg-type]
            if jumbo:
                set_mtu(lab, 9000)
            made.extend(watchers(lab))
            paths = len(made[0].mesh.paths.current)
            work_until(made, lambda: len(made[0].states()) == paths and agree(made[0]), "all paths agree")
            made[0].events.clear()
            return lab, made

        yield up
        left = [each.close() for each in made]
    assert not any(left), "close must leave no rule and no table"


@pytest.fixture
def bring(unique_name: Callable[[], str]) -> Iterator[Bring]:
    """The function that does so."""
    with bringing(unique_name) as up:
        yield up


def set_mtu(lab: Lab, mtu_bytes: int) -> None:
    ends = [(host.netns, interface.name) for host in lab.hosts for interface in host.interfaces]
    ends += [(rail.netns, port.name) for rail in lab.rails for port in rail.ports]
    for namespace, name in ends:
        support.run(["ip", "-n", namespace, "link", "set", name, "mtu", str(mtu_bytes)])


def agree(watcher: Watcher) -> bool:
    return all(each.state == "agrees" for each in watcher.states().values())


def told(watcher: Watcher, what: str, rail: str = "rail1", count: int = 2) -> Callable[[], list[LinkEvent]]:
    """The events of this kind once there are so many of this rail."""

    def ask() -> list[LinkEvent]:
        found = [event for event in watcher.events if (event.what, event.interface) == (what, rail)]
        return found if len(found) >= count else []

    return ask


def soon(event: LinkEvent, since_ns: int) -> bool:
    """Within a second where the processors are free, which they may not be."""
    return event.at_ns - since_ns <= 3 * SECOND_NS * support.slow_factor()


def test_an_interface_raised_above_its_fabric_is_told(bring: Bring) -> None:
    lab, made = bring()
    host = lab.hosts[0].netns
    support.run(["ip", "-n", host, "link", "set", "rail1", "mtu", "9000"])
    since_ns = time.monotonic_ns()
    for event in work_until(made, told(made[0], "mtu_mismatch"), "the far end of the cable takes less"):
        assert soon(event, since_ns)
        assert (event.values["interface_mtu_bytes"], event.values["works_bytes"]) == (9000, 1500)
    support.run(["ip", "-n", host, "link", "set", "rail1", "mtu", "1500"])
    work_until(made, told(made[0], "mtu_agrees"), "both agree again")


@pytest.mark.parametrize("silent", [False, True], ids=["told", "silent"])
def test_a_smaller_mtu_is_told_soon_and_so_is_its_end(bring: Bring, silent: bool) -> None:
    lab, made = bring()
    first = made[0]
    lab.mtu(1, 1400, silent)
    since_ns = time.monotonic_ns()
    events = work_until(made, told(first, "mtu_mismatch"), "the mismatch is told of both paths of the rail")
    assert sorted(event.paths[0].address for event in events) == sorted(ADDRESSES)
    for event in events:
        assert soon(event, since_ns)
        assert len(event.paths) == 1
        assert event.paths[0].interface == "rail1"
        assert event.happened_ns <= event.at_ns
        expected = {"interface_mtu_bytes": 1500, "works_bytes": 1400, "fails_bytes": 1401}
        expected |= {"forward_fails": 1, "reverse_fails": 0} | ({} if silent else {"told_bytes": 1400})
        assert event.values == expected
    for address, router in zip(ADDRESSES, ("10.1.1.1", "fd00:1:1::1"), strict=True):
        state = first.states()["rail1", address]
        assert (state.state, state.works_bytes, state.fails_bytes) == ("mismatch", 1400, 1401)
        assert (state.told_bytes, state.told_by) == ((None, "") if silent else (1400, router))
        other = first.states()["rail2", address]
        assert (other.state, other.works_bytes, other.fails_bytes, other.told_bytes) == ("agrees", 1500, None, None)
    if silent:
        assert lab.counts(1)["too_long"] > 0
    work_for(made, 1.2)
    assert len(told(first, "mtu_mismatch")()) == 2, "told once"

    lab.heal(1)
    since_ns = time.monotonic_ns()
    for event in work_until(made, told(first, "mtu_agrees"), "the end is told of both paths"):
        assert soon(event, since_ns)
    assert agree(first)
    assert {event.interface for event in first.events} == {"rail1"}
    assert lab.counts(1) == {}
    odd = {f"probe_{what}" for what in ODD}
    assert not odd & set(first.lost() | made[1].lost()), "large probes are nobody's stray, and no delay's"


@pytest.mark.parametrize(("toward", "way"), [(2, "forward"), (1, "reverse")])
def test_the_way_that_is_narrow_is_named(bring: Bring, toward: int, way: str) -> None:
    lab, made = bring(ipv6=False, rails=1)
    lab.mtu(1, 1300, silent=True, toward=toward)
    (event,) = work_until(made, told(made[0], "mtu_mismatch", count=1), "the mismatch is told")
    assert (event.values["works_bytes"], event.values[f"{way}_fails"]) == (1300, 1)
    other = "reverse" if way == "forward" else "forward"
    (seen,) = work_until(made, told(made[1], "mtu_mismatch", count=1), "the peer tells it as well")
    assert (seen.values["works_bytes"], seen.values[f"{other}_fails"]) == (1300, 1)


LOADS = {"rail1": "10.5mbit", "rail2": "14mbit", "rail3": "25mbit"}
IDLE = "rail4"


@pytest.fixture(scope="module")
def congested(unique_name: Callable[[], str]) -> Watcher:
    """Who watched rails of 10 Mbit/s under each of these loads, all for the same six seconds."""
    with bringing(unique_name) as up:
        lab, made = up(ipv6=False, rate="10mbit", rails=len(LOADS) + 1)
        for rail, load in enumerate(LOADS.values(), start=1):
            lab.load(rail, load, toward=2)
        work_for(made, 6)
    return made[0]


@pytest.mark.parametrize("rail", LOADS, ids=LOADS.values())
def test_a_congested_rail_is_no_mismatch(congested: Watcher, rail: str) -> None:
    """Most of what is large is lost there, and most of what is small is not."""
    assert congested.events == []
    told = {each.state for each in congested.mtus if each.path.interface == rail}
    assert told and told <= {"agrees", "unknown"}
    assert congested.states()[IDLE, ADDRESSES[0]].state == "agrees"


def test_a_mismatch_on_a_busy_rail_is_told_all_the_same(bring: Bring) -> None:
    lab, made = bring(ipv6=False, rate="10mbit")
    lab.load(1, "8mbit", toward=2)
    lab.mtu(1, 1400, silent=True)
    (event,) = work_until(made, told(made[0], "mtu_mismatch", count=1), "the mismatch is told")
    assert (event.values["works_bytes"], event.values["fails_bytes"]) == (1400, 1401)


def test_jumbo_frames_are_probed_in_full_at_two_packets_a_second_each_way(bring: Bring) -> None:
    lab, made = bring(jumbo=True, rate="none", ipv6=False, rails=1)
    first = made[0]
    assert first.states()["rail1", ADDRESSES[0]].works_bytes == 9000
    before, since_ns = first.mtu.wire_bytes(), time.monotonic_ns()
    work_for(made, 3)
    seconds = (time.monotonic_ns() - since_ns) / SECOND_NS
    large = 2 * (9000 + 14) + 4 * 120  # there and back, and the small ones
    assert first.mtu.wire_bytes() - before <= large * (2 * seconds + 1)
    lab.mtu(1, 8999, silent=True)
    (event,) = work_until(made, told(first, "mtu_mismatch", count=1), "a byte is missing")
    assert (event.values["works_bytes"], event.values["fails_bytes"]) == (8999, 9000)


def test_an_interface_that_takes_less_is_probed_with_less(bring: Bring) -> None:
    lab, made = bring(ipv6=False)
    support.run(["ip", "-n", lab.hosts[0].netns, "link", "set", "rail1", "mtu", "1300"])
    work_until(made, lambda: made[0].states()["rail1", ADDRESSES[0]].works_bytes == 1300, "the new size passes")
    state = made[0].states()["rail1", ADDRESSES[0]]
    assert (state.interface_mtu_bytes, state.state) == (1300, "agrees")
    assert made[0].events == []


def test_a_peer_whose_interface_takes_less_is_a_mismatch(bring: Bring) -> None:
    lab, made = bring(ipv6=False)
    support.run(["ip", "-n", lab.hosts[1].netns, "link", "set", "rail1", "mtu", "1400"])
    (event,) = work_until(made, told(made[0], "mtu_mismatch", count=1), "the mismatch is told")
    assert (event.values["works_bytes"], event.values["interface_mtu_bytes"]) == (1400, 1500)


def test_a_dead_path_is_unknown_and_no_mismatch(bring: Bring) -> None:
    lab, made = bring(ipv6=False)
    lab.blackhole(1)
    work_until(made, lambda: made[0].states()["rail1", ADDRESSES[0]].state == "unknown", "nothing is known")
    assert made[0].events == []
    lab.heal(1)
    work_until(made, lambda: agree(made[0]), "all is well again")
    assert made[0].events == []


# ---- reflectors that are not ours ----


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (lambda request: request, "agrees"),
        (lambda request: request[:64], "unknown"),
        (lambda request: request if len(request) < 200 else b"", "unknown"),
    ],
    ids=["whole", "cut short", "small ones only"],
)
def test_a_foreign_reflector_proves_sizes_by_answering_and_nothing_by_silence(
    veth_pair: tuple[str, str], answer: Callable[[bytes], bytes], state: str
) -> None:
    support.require("bcc")
    config = AgentConfig("a", [Peer("b", "10.77.0.2", "shared")], probe=Probe(timeout_ms=300), links=Links())
    with netns.inside(veth_pair[1]):
        reflector = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with reflector:
        reflector.bind(("10.77.0.2", 862))
        watcher = Watcher(veth_pair[0], config)
        try:
            seen = []

            def reflect() -> bool:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        request, back = reflector.recvfrom(10_000)
                        seen.append(len(request))
                        # Timestamps and numbers as TWAMP Light has them: the sender's packet behind our own.
                        reply = answer(request[:24] + request[:4] + request[28:])
                        if reply:
                            reflector.sendto(reply, back)
                return seen.count(1472) >= 3 and bool(watcher.mtus)

            work_until([watcher], reflect, "some rounds are over")
            assert watcher.events == []
            assert {each.state for each in watcher.mtus} <= {state, "unknown"}
            assert watcher.mtus[-1].state == state
        finally:
            assert watcher.close() == []
