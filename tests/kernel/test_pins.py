"""Pins between two hosts: where packets go and what they look like there, who sees them, and when a target is alive."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pin_kit as kit
import pytest
import support
from pin_kit import Rails, Wire, compiled_once, rails, versions

from pytools.errors import RefusedError
from pytools.kernel.bpf import attach, loader, syscall
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netlink.links import LinkMonitor
from pytools.kernel.netns import inside
from steering.actuators.neighbours import Neighbours
from steering.actuators.pins import Pins, PinTarget
from steering.plan import FlowKey, Pin

__all__ = ["compiled_once", "rails"]  # fixtures

UDP_SEGMENT = 103  # SOL_UDP
mechanisms = pytest.mark.parametrize("force_clsact", [False, True], ids=["first choice", "clsact"])


def other(rail: int) -> int:
    return 3 - rail


def mac(netns: str, interface: str) -> bytes:
    link = json.loads(support.run(["ip", "-n", netns, "-j", "link", "show", interface]).stdout)[0]
    return bytes.fromhex(link["address"].replace(":", ""))


def offloads_off(rails: Rails) -> None:
    support.require("ethtool")
    for netns in (rails.near, rails.far):
        for rail in (1, 2):
            features = ["tx", "off", "rx", "off", "tso", "off", "gso", "off", "gro", "off"]
            support.run(["ip", "netns", "exec", netns, "ethtool", "-K", f"rail{rail}", *features])


# ---- where packets go ----


@pytest.mark.guest(every=3)
@mechanisms
@versions
def test_a_pinned_packet_is_the_same_on_the_other_rail(rails: Rails, version: int, force_clsact: bool) -> None:
    """With nothing offloaded: every checksum is in the packet, and the far application checks it."""
    offloads_off(rails)
    with kit.pinning(rails, force_clsact) as pins, Wire(rails, version) as wire:
        routed, before = wire.send()
        assert pins.install([kit.pin(wire.flow, other(routed))]) == {}
        rail, after = wire.send()
        assert rail == other(routed)
        assert after[:6] == mac(rails.far, f"rail{rail}")
        assert after[6:12] == mac(rails.near, f"rail{rail}")
        ip = 14 if version == 6 else 14 + 12  # IPv4: behind identifier and header checksum
        assert after[ip:] == before[ip:], "addresses, ports, checksum and payload"
        assert after[14 + 8] == before[14 + 8], "TTL, or the last byte of what is the hop limit's word"
        assert pins.table.counters()["redirected"] == 1
        (state,) = pins.read().values()
        assert (state.packets, state.bytes) == (1, len(after))
        assert pins.remove([wire.flow]) == {wire.flow}
        assert wire.send()[0] == routed
        assert pins.read() == {}


@versions
def test_a_pin_to_where_routing_goes_changes_nothing(rails: Rails, version: int) -> None:
    with kit.pinning(rails) as pins, Wire(rails, version) as wire:
        routed, _ = wire.send()
        pins.install([kit.pin(wire.flow, routed)])
        assert [wire.send()[0] for _ in range(5)] == [routed] * 5
        assert pins.read()[wire.flow].packets == 5
        moved = {name: value for name, value in pins.table.counters().items() if value}
        assert moved == {"on_target": 5}


def test_only_the_pinned_flow_moves(rails: Rails) -> None:
    with kit.pinning(rails) as pins, Wire(rails) as one, Wire(rails, 4, 7001) as two, Wire(rails, 6, 7002) as three:
        routed = [wire.send()[0] for wire in (one, two, three)]
        pins.install([kit.pin(one.flow, other(routed[0]))])
        assert [wire.send()[0] for wire in (one, two, three)] == [other(routed[0]), routed[1], routed[2]]


@pytest.mark.parametrize(("version", "gateway"), [(6, "link local"), (4, "link local")], ids=["ipv6", "ipv4 over ipv6"])
def test_a_link_local_gateway(rails: Rails, version: int, gateway: str) -> None:
    """The second is RFC 5549: IPv4 packets by an IPv6 neighbour."""
    with kit.pinning(rails) as pins, Wire(rails, version) as wire:
        routed, _ = wire.send()
        rail = other(routed)
        shown = json.loads(support.run(["ip", "-n", rails.far, "-j", "-6", "address", "show", f"rail{rail}"]).stdout)
        (address,) = (each["local"] for each in shown[0]["addr_info"] if each["scope"] == "link")
        target = PinTarget(99, rails.index(rail), address, True, "metric:main:somewhere")
        assert pins.targets([target]) == {}
        assert pins.wait_alive(10 * support.slow_factor())
        assert pins.install([Pin(wire.flow, target.target, 99, kit.soon())]) == {}
        pins.targets([target, PinTarget(98, rails.index(routed), rails.gateway(routed, version))])
        assert wire.send()[0] == rail


@versions
def test_what_is_larger_than_the_target_takes_goes_as_it_is_routed(rails: Rails, version: int) -> None:
    """A datagram by its length, a buffer that segmentation offload cuts by the length of its segments."""
    headers = (28, 48)[version == 6]
    with kit.pinning(rails) as pins, Wire(rails, version) as wire:
        routed, _ = wire.send()
        narrow = other(routed)
        for netns in (rails.near, rails.far):
            support.run(["ip", "-n", netns, "link", "set", f"rail{narrow}", "mtu", "1400"])
        pins.install([kit.pin(wire.flow, narrow)])
        assert wire.send(bytes(1400 - headers))[0] == narrow
        assert wire.send(bytes(1401 - headers))[0] == routed
        assert pins.table.counters()["too_large"] == 1
        for size, rail in ((1400 - headers, narrow), (1401 - headers, routed)):
            wire.socket.setsockopt(socket.SOL_UDP, UDP_SEGMENT, size)
            wire.socket.send(bytes(10 * size))
            assert [len(wire.far.recv(1 << 16)) for _ in range(10)] == [size] * 10
            found = wire.arrived()
            assert found[other(rail)] == []
            assert sum(len(frame) for frame in found[rail]) >= 10 * size
        assert pins.table.counters()["too_large"] == 11
        assert pins.read()[wire.flow].packets == 11


@versions
def test_headers_behind_the_linear_part_are_found(rails: Rails, version: int) -> None:
    """A large frame sent raw, of which nothing but the Ethernet header lies where programs look first."""
    for netns in (rails.near, rails.far):
        support.ip(netns, *(f"link set rail{rail} mtu 9000" for rail in (1, 2)))
    with kit.pinning(rails) as pins, Wire(rails, version) as wire:
        routed, frame = wire.send(bytes(8000))
        rail = other(routed)
        pins.install([kit.pin(wire.flow, rail)])
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
            raw.bind((f"rail{routed}", {4: 0x0800, 6: 0x86DD}[version]))
            raw.setsockopt(263, 15, 1)  # SOL_PACKET, PACKET_VNET_HDR
            raw.send(struct.pack("=BBHHHH", 0, 0, 14, 0, 0, 0) + frame)
        found = support.wait_until(lambda: wire.arrived()[rail], 20, "it arrives on the other rail")
        assert [len(each) for each in found] == [len(frame)]
        assert pins.table.counters()["unreadable"] == 0


def test_a_packet_with_its_tag_beside_it_stays(rails: Rails) -> None:
    """As those of a VLAN interface pass the one that it lies on: moved, they would lose their VLAN or come round."""
    push = loader.Program(str(Path(__file__).with_name("push_tag.c")), ("push_tag",))
    with kit.pinning(rails) as pins, Wire(rails) as wire, loader.load([push]) as loaded:
        routed, _ = wire.send()
        pins.install([kit.pin(wire.flow, other(routed))])
        with attach.attach_tc(loaded.programs["push_tag"], f"rail{routed}", "egress", role=attach.STEERING):
            wire.socket.send(b"tagged")
        assert len(wire.arrived()[routed]) == 1, "a capture shows it without its tag"
        assert pins.table.counters()["exempt"] == 1
        assert pins.table.counters()["redirected"] == 0
        assert wire.send()[0] == other(routed)


# ---- who sees them ----


@mechanisms
def test_observers_see_a_moved_packet_once_where_it_leaves(rails: Rails, force_clsact: bool) -> None:
    """Whether they were attached before or after. Any four programs do."""
    names = {"probe.c": ("probe_egress", "probe_ingress"), "sample.c": ("sample_egress", "sample_ingress")}
    with contextlib.ExitStack() as stack:
        programs = [loader.Program(source, functions) for source, functions in names.items()]
        loaded = stack.enter_context(loader.load(programs)).programs
        observers = {("before", 1): loaded["probe_egress"], ("before", 2): loaded["probe_ingress"]}
        observers |= {("after", 1): loaded["sample_egress"], ("after", 2): loaded["sample_ingress"]}

        def observe(when: str) -> None:
            with inside(rails.near):
                for rail in (1, 2):
                    fd = observers[when, rail]
                    stack.enter_context(attach.attach_tc(fd, f"rail{rail}", "egress", force_clsact))

        observe("before")
        pins = stack.enter_context(kit.pinning(rails, force_clsact))
        observe("after")
        with inside(rails.near):
            pins.table.mend()
        wire = stack.enter_context(Wire(rails))
        routed, _ = wire.send()
        pins.install([kit.pin(wire.flow, other(routed))])
        stack.enter_context(RunTime())
        before = {key: syscall.program_run_time(fd)[1] for key, fd in observers.items()}
        for _ in range(50):
            wire.send()
        seen = {key: syscall.program_run_time(fd)[1] - before[key] for key, fd in observers.items()}
        assert {key: runs // 50 for key, runs in seen.items()} == {
            (when, rail): int(rail == other(routed)) for when in ("before", "after") for rail in (1, 2)
        }, f"beside a neighbour's question or two: {seen}"


def filters(rails: Rails) -> str:
    shown = []
    for rail in (1, 2):
        device = ["dev", f"rail{rail}"]
        shown.append(support.run(["tc", "-n", rails.near, "qdisc", "show", *device]).stdout)
        shown.append(support.run(["tc", "-n", rails.near, "filter", "show", *device, "egress"]).stdout)
    return "".join(shown)


@mechanisms
def test_nothing_stays(rails: Rails, force_clsact: bool) -> None:
    untouched = filters(rails)
    with kit.pinning(rails, force_clsact) as pins, Wire(rails) as wire:
        routed, _ = wire.send()
        pins.install([kit.pin(wire.flow, other(routed))])
        assert wire.send()[0] == other(routed)
        assert ("swerve-steer" in filters(rails)) == (force_clsact or bool(support.slow_factor() > 1))
        pins.close()
        assert wire.send()[0] == routed
    assert filters(rails) == untouched


@pytest.mark.guest(thorough=True)
def test_a_clsact_filter_that_a_crash_left_is_removed_by_the_next_start(rails: Rails) -> None:
    untouched = filters(rails)
    code = "import sys, time; sys.path[:0] = sys.argv[1:]; import pin_kit\n"
    code += f"rails = pin_kit.Rails({rails.near!r}, {rails.far!r}, 2)\n"
    code += "with pin_kit.pinning(rails, True): print('ready', flush=True); time.sleep(600)"
    tests = str(support.ROOT / "tests")
    with subprocess.Popen([sys.executable, "-c", code, str(support.ROOT), tests], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGKILL)
    assert filters(rails).count("swerve-steer") == 2
    with inside(rails.near):
        assert attach.clean() == [], "an agent's clean-up leaves the controller's alone"
    with kit.table(rails.near, force_clsact=True) as table:
        assert filters(rails).count("swerve-steer") == 0
        assert table.attach([rails.index(1)]) == {}
        assert filters(rails).count("swerve-steer") == 1
    with inside(rails.near):
        assert attach.clean(attach.STEERING) == []
    assert filters(rails).replace("qdisc clsact ffff: parent ffff:fff1 \n", "") == untouched


# ---- when a target is alive ----


@pytest.fixture
def pins(rails: Rails) -> Iterator[Pins]:
    with kit.pinning(rails) as made:
        yield made


def state(rails: Rails, rail: int, version: int = 4) -> str:
    """Of a gateway, as iproute2 calls it."""
    shown = json.loads(rails.ip("-j", "neighbour", "show", rails.gateway(rail, version), "dev", f"rail{rail}"))
    return str(shown[0]["state"][0]) if shown else "none"


def is_alive(pins: Pins, rail: int, version: int = 4) -> bool:
    return pins.alive(*((kit.GROUPS[0], 10 + rail) if version == 4 else (kit.GROUPS[1], 20 + rail)))


@versions
def test_neighbours_are_asked_for_before_a_packet_needs_them(rails: Rails, version: int) -> None:
    assert state(rails, 1, version) == state(rails, 2, version) == "none"
    with kit.pinning(rails):
        assert (state(rails, 1, version), state(rails, 2, version)) == ("REACHABLE", "REACHABLE")


@versions
def test_a_stale_neighbour_is_asked_again_and_believed_meanwhile(rails: Rails, pins: Pins, version: int) -> None:
    rails.ip("neighbour", "change", rails.gateway(1, version), "dev", "rail1", "nud", "stale")
    assert is_alive(pins, 1, version)
    support.wait_until(lambda: state(rails, 1, version) == "REACHABLE", 10, "it has answered")
    assert is_alive(pins, 1, version)


@pytest.mark.guest
@versions
def test_a_failed_neighbour_is_dead_until_it_answers(rails: Rails, version: int) -> None:
    """It is asked at once, so all changes are written down."""
    told: list[tuple[tuple[int, str], bool]] = []
    hops = {rail: (rails.index(rail), rails.gateway(rail, version)) for rail in (1, 2)}
    with inside(rails.near), Neighbours(lambda hop, alive: told.append((hop, alive))) as neighbours:
        neighbours.watch(hops.values())
        assert neighbours.wait_alive(hops.values(), 10 * support.slow_factor())
        told.clear()
        rails.ip("neighbour", "change", hops[1][1], "dev", "rail1", "nud", "failed")
        support.wait_until(lambda: len(told) >= 2, 10, "it failed, was asked again, and answered")
        assert told == [(hops[1], False), (hops[1], True)]


@versions
def test_a_neighbour_that_does_not_answer_stays_dead(rails: Rails, pins: Pins, version: int) -> None:
    address, prefix = rails.gateway(1, version), ("24", "64")[version == 6]
    support.run(["ip", "-n", rails.far, "address", "delete", f"{address}/{prefix}", "dev", "rail1"])
    rails.ip("neighbour", "change", address, "dev", "rail1", "nud", "failed")
    support.wait_until(lambda: not is_alive(pins, 1, version), 20, "it is dead")
    assert is_alive(pins, 2, version)
    assert is_alive(pins, 1, 10 - version)
    added = ["address", "add", f"{address}/{prefix}", "dev", "rail1", *(["nodad"] if version == 6 else [])]
    support.run(["ip", "-n", rails.far, *added])
    support.wait_until(lambda: is_alive(pins, 1, version), 15, "it was asked again, and answered")


@versions
def test_a_neighbour_that_is_forgotten_is_asked_for(rails: Rails, pins: Pins, version: int) -> None:
    rails.ip("neighbour", "delete", rails.gateway(1, version), "dev", "rail1")
    support.wait_until(lambda: state(rails, 1, version) == "REACHABLE" and is_alive(pins, 1, version), 10, "it is back")


@versions
def test_a_permanent_neighbour_stays_as_it_is(rails: Rails, pins: Pins, version: int) -> None:
    address = rails.gateway(1, version)
    link_layer = mac(rails.far, "rail1").hex(":")
    rails.ip("neighbour", "replace", address, "dev", "rail1", "nud", "permanent", "lladdr", link_layer)
    pins.targets([])
    pins.targets(rails.targets())
    assert is_alive(pins, 1, version)
    assert state(rails, 1, version) == "PERMANENT"


def test_a_link_without_its_carrier_is_dead(rails: Rails, pins: Pins) -> None:
    support.run(["ip", "-n", rails.far, "link", "set", "rail1", "down"])
    support.wait_until(lambda: not is_alive(pins, 1) and not is_alive(pins, 1, 6), 20, "both families are dead")
    assert is_alive(pins, 2)
    support.run(["ip", "-n", rails.far, "link", "set", "rail1", "up"])
    support.wait_until(lambda: is_alive(pins, 1), 10, "it is alive again")


def test_a_permanent_neighbour_is_dead_without_its_link(rails: Rails, pins: Pins) -> None:
    link_layer = mac(rails.far, "rail1").hex(":")
    rails.ip("neighbour", "replace", "10.1.1.1", "dev", "rail1", "nud", "permanent", "lladdr", link_layer)
    support.run(["ip", "-n", rails.far, "link", "set", "rail1", "down"])
    support.wait_until(lambda: not is_alive(pins, 1), 20, "it is dead")


def test_an_interface_that_comes_back_under_its_index_is_steered_again(rails: Rails, pins: Pins) -> None:
    index = rails.index(1)
    with Wire(rails) as wire:
        rails.only(1)
        pins.install([kit.pin(wire.flow, 2)])
        assert wire.send()[0] == 2
        rails.ip("link", "delete", "rail1")
        support.wait_until(lambda: not is_alive(pins, 1), 20, "its target is dead")
        support.join(rails.near, rails.far, "rail1", index)
        for netns, host in ((rails.near, 2), (rails.far, 1)):
            support.ip(netns, f"address add 10.1.1.{host}/24 dev rail1", "link set rail1 up")
        rails.ip("nexthop", "add", "id", "11", "via", "10.1.1.1", "dev", "rail1")
        rails.ip("nexthop", "replace", "id", "102", "group", "11")
        rails.ip("route", "replace", "10.9.0.2", "nhid", "102", "src", "10.9.0.1")
        assert pins.outdated
        assert pins.targets([each for each in rails.targets() if "." in each.gateway]) == {}
        assert not pins.outdated
        assert pins.wait_alive(10 * support.slow_factor())
    with Wire(rails) as wire:
        assert wire.send()[0] == 1
        pins.install([kit.pin(wire.flow, 2)])
        assert wire.send()[0] == 2


@versions
def test_a_dead_target_falls_back_and_comes_back(rails: Rails, pins: Pins, version: int) -> None:
    with Wire(rails, version) as wire:
        routed, _ = wire.send()
        rail = other(routed)
        pins.install([kit.pin(wire.flow, rail)])
        assert wire.send()[0] == rail
        gone = [each for each in rails.targets() if each.nexthop_id % 10 != rail]
        dead = [PinTarget(t.nexthop_id, t.ifindex, t.gateway, False, t.target) for t in rails.targets()]
        for targets, reason in ((dead, "dead"), (gone, "missing")):
            before = pins.table.counters()[reason]
            pins.targets(targets)
            assert [wire.send()[0] for _ in range(3)] == [routed] * 3
            assert pins.table.counters()[reason] == before + 3
            assert wire.flow in pins.install([kit.pin(wire.flow, rail)])
            pins.targets(rails.targets())
            support.wait_until(lambda: is_alive(pins, rail, version), 10, "it is alive again")
            assert wire.send()[0] == rail


def test_what_the_caller_calls_dead_stays_so_though_its_neighbour_answers(rails: Rails, pins: Pins) -> None:
    first = rails.index(1)
    targets = [each for each in rails.targets() if "." in each.gateway]  # IPv6 addresses go with their link
    pins.targets([PinTarget(t.nexthop_id, t.ifindex, t.gateway, t.ifindex != first, t.target) for t in targets])
    support.run(["ip", "-n", rails.far, "link", "set", "rail1", "down"])
    support.wait_until(lambda: not pins.wait_alive(0), 20, "the neighbour is gone")
    support.run(["ip", "-n", rails.far, "link", "set", "rail1", "up"])
    assert pins.wait_alive(15 * support.slow_factor())
    assert not is_alive(pins, 1)
    assert is_alive(pins, 2)


def test_when_nobody_watches_any_more_every_target_is_dead(
    rails: Rails, pins: Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(LinkMonitor, "read", broken)
    support.wait_until(lambda: pins.error, 20, "the thread has ended")
    assert "no more descriptors" in pins.error
    assert not any(is_alive(pins, rail, version) for rail in (1, 2) for version in (4, 6))
    for targets in ([], rails.targets()):
        pins.targets(targets)
    assert not is_alive(pins, 1), "that a neighbour answers is no reason while nobody listens"


# ---- what is refused ----


def test_targets_that_cannot_be_used_are_named(rails: Rails, pins: Pins) -> None:
    unusable = {
        "loopback": (PinTarget(1, 1, "10.1.1.1"), "no Ethernet header"),
        "gone": (PinTarget(2, 9999, "10.1.1.1"), "no interface 9999"),
        "on-link": (PinTarget(3, rails.index(1), ""), "no gateway"),
        "word": (PinTarget(4, rails.index(1), "router"), "router"),
    }
    refused = pins.targets([target for target, _ in unusable.values()] + rails.targets())
    assert refused.keys() == {("", number) for number in (1, 2, 3, 4)}
    for target, why in unusable.values():
        assert why in refused[target.name]
    assert is_alive(pins, 1)


def test_an_interface_on_top_of_another_is_refused(rails: Rails, pins: Pins) -> None:
    """A packet redirected to it would come by the lower one, be redirected again, and so on until it is lost."""
    made = support.run(
        ["ip", "-n", rails.near, "link", "add", "link", "rail1", "name", "upper", "type", "macvlan"], check=False
    )
    if made.returncode != 0:
        pytest.skip("missing: macvlan")
    rails.ip("address", "add", "10.1.1.3/24", "dev", "upper")
    rails.ip("link", "set", "upper", "up")
    index = int(json.loads(rails.ip("-j", "link", "show", "upper"))[0]["ifindex"])
    upper = PinTarget(1, index, "10.1.1.1")
    refused = pins.targets([*rails.targets(), upper])
    assert refused.keys() == {upper.name} and support.mentions(refused[upper.name], "interface", "steered")
    with Wire(rails) as wire:
        rails.only(2)
        wire.send()
        without = [each for each in rails.targets() if each.ifindex != rails.index(1)]
        assert pins.targets([*without, upper]) == {}
        assert pins.wait_alive(10 * support.slow_factor())
        pins.install([Pin(wire.flow, "", 1, kit.soon())])
        assert wire.send()[0] == 1


def test_pins_that_cannot_act_are_refused_and_the_others_installed(rails: Rails, pins: Pins) -> None:
    good = kit.flow(6, 1000, 2000)
    lasting = kit.soon()
    refused = pins.install(
        [
            kit.pin(good, 1),
            Pin(kit.flow(6, 1, 2), kit.GROUPS[0], 19, lasting),
            Pin(kit.flow(6, 1, 3), "multipath:main:10.9.0.0/24", 11, lasting),
            Pin(kit.flow(6, 1, 4, 6), kit.GROUPS[0], 11, lasting),
            kit.pin(kit.flow(6, 1, 5), 1, expires_ns=time.monotonic_ns()),
            kit.pin(FlowKey(6, "10.9.0.1", 1, "ff02::1", 6), 1),
        ]
    )
    assert pins.read().keys() == {good}
    reasons = {(flow.protocol, flow.remote_port): why for flow, why in refused.items()}
    facts = {
        (6, 2): ("no nexthop 19",),
        (6, 3): ("no nexthop 11",),
        (6, 4): ("10.1.1.1", "no IPv6"),
        (6, 5): ("lease", "ended"),
        (6, 6): ("addresses", "two families"),
    }
    assert reasons.keys() == facts.keys()
    assert [why for flow, why in reasons.items() if not support.mentions(why, *facts[flow])] == []


def test_a_thousand_pins(rails: Rails, pins: Pins) -> None:
    with Wire(rails) as wire:
        routed, _ = wire.send()
        others = [kit.flow(6, port, 80, version) for port in range(1, 501) for version in (4, 6)]
        wanted = [kit.pin(each, 1) for each in others[1:]] + [kit.pin(wire.flow, other(routed))]
        assert pins.install(wanted) == {}
        assert {each.pin for each in pins.read().values()} == set(wanted)
        assert wire.send()[0] == other(routed)
        later = kit.soon(120)
        assert pins.renew([each.flow for each in wanted], later) == set()
        assert {each.pin.expires_ns for each in pins.read().values()} == {later}
        assert pins.renew([others[0]], later) == {others[0]}
        assert pins.table.sweep(later - 1) == set()
        too_many = [kit.pin(kit.flow(17, port, 80), 1) for port in range(1001, 5001)]
        with pytest.raises(RefusedError, match="4000 more flows"):
            pins.install(too_many)
        assert pins.read().keys() == {each.flow for each in wanted}
        assert pins.table.sweep(later) == {each.flow for each in wanted}
        assert pins.read() == {}
        assert wire.send()[0] == routed


def test_pins_are_replaced_under_traffic_and_no_packet_is_lost(rails: Rails, pins: Pins) -> None:
    """Every datagram arrives, and by one rail or the other, while its pin moves, ends and comes back all the time."""
    with Wire(rails) as wire:
        wire.send()
        end = threading.Event()

        def change() -> None:
            turn = 0
            while not end.is_set():
                turn += 1
                pins.install([kit.pin(wire.flow, 1 + turn % 2)])
                if turn % 5 == 0:
                    pins.remove([wire.flow])

        thread = threading.Thread(target=change)
        sent, arrived = 0, {1: 0, 2: 0}
        # Every call into the kernel gives the interpreter away; by itself the other thread then keeps it for 5 ms.
        turn_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        thread.start()
        try:
            while sent < 3000 or not all(arrived.values()):
                wire.socket.send(sent.to_bytes(4))
                assert int.from_bytes(wire.far.recv(100)) == sent
                sent += 1
                if sent % 100 == 0:
                    for rail, frames in wire.arrived().items():
                        arrived[rail] += len(frames)
        finally:
            end.set()
            thread.join()
            sys.setswitchinterval(turn_s)
        assert {name for name, value in pins.table.counters().items() if value} <= {"redirected", "on_target"}
        assert sum(arrived.values()) + sum(len(frames) for frames in wire.arrived().values()) == sent
