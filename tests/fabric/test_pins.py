"""Live flows moved between the rails of a lab: without a reset, without a loss, and back by themselves.

Bytes are those of the interfaces' own counters, losses those of numbered datagrams: nothing of the product is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pin_kit as kit
import pytest
import support
from pin_kit import compiled_once, versions

from pytools.kernel.bpf import attach
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.lab.topology import group_id
from steering.actuators.pins import Labels, PinTarget
from steering.plan import FlowKey, LabelChange, Pin, nexthop_group

__all__ = ["compiled_once"]  # fixtures

TCP, UDP = 6, 17
PORT = 7777
TICKS_NS = 30_000_000  # a lease ends within two ticks of the slowest clock, and a packet on its way is on its way
LAB = {"rate": "none"}
NEEDS = ("iperf3", "ss")


def targets(lab: Lab) -> list[PinTarget]:
    near = lab.hosts[0].interfaces
    members = [(4, each.nexthop_id, each.index, each.gateway) for each in near]
    members += [(6, each.nexthop6_id, each.index, each.gateway6) for each in near]
    return [PinTarget(n, index, gateway, True, target(version)) for version, n, index, gateway in members]


def target(version: int) -> str:
    return nexthop_group(group_id(2, version))


def pin(lab: Lab, flow: FlowKey, rail: int, expires_ns: int | None = None) -> Pin:
    interface = lab.hosts[0].interfaces[rail - 1]
    version = 6 if ":" in flow.remote else 4
    nexthop = interface.nexthop6_id if version == 6 else interface.nexthop_id
    return Pin(flow, target(version), nexthop, kit.soon() if expires_ns is None else expires_ns)


def services(lab: Lab, version: int) -> tuple[str, str]:
    near, far = lab.hosts
    return (near.service, far.service) if version == 4 else (near.service6, far.service6)


def sent_bytes(lab: Lab) -> dict[int, int]:
    """What the near host has sent over each rail."""
    links = json.loads(support.run(["ip", "-n", lab.hosts[0].netns, "-j", "-s", "link"]).stdout)
    by_index = {link["ifindex"]: link["stats64"]["tx"]["bytes"] for link in links}
    return {each.rail: by_index[each.index] for each in lab.hosts[0].interfaces}


def carried(lab: Lab, at_least: int) -> dict[int, int]:
    """Bytes by rail, from now until so many have been sent."""
    before = sent_bytes(lab)

    def enough() -> dict[int, int]:
        moved = {rail: value - before[rail] for rail, value in sent_bytes(lab).items()}
        return moved if sum(moved.values()) >= at_least else {}

    return support.wait_until(enough, 20, f"{at_least} bytes have been sent")


# ---- a live connection ----


@contextlib.contextmanager
def iperf3(lab: Lab, version: int) -> Iterator[tuple[FlowKey, Callable[[], dict[str, object]]]]:
    """A transfer that runs until it is asked for its report: its flow, and the way to ask."""
    near, far = services(lab, version)
    server = lab.start(lab.hosts[1], ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    support.wait_until(lambda: "listening" in server.stdout.readline(), 10, "the server listens")
    seconds = str(int(3 * support.slow_factor()))
    command = ["iperf3", "-J", "-c", far, "-B", near, "--cport", str(PORT), "-t", seconds]
    client = lab.start(lab.hosts[0], command, stdout=subprocess.PIPE)

    def report() -> dict[str, object]:
        output, _ = client.communicate(timeout=60 * support.slow_factor())
        assert client.returncode == 0, output
        return dict(json.loads(output))

    yield FlowKey(TCP, near, PORT, far, 5201), report
    client.kill()
    server.kill()


@versions
@pytest.mark.parametrize("offloads", ["on", "off"])
def test_a_live_connection_changes_rails_and_knows_nothing_of_it(lab: Lab, version: int, offloads: str) -> None:
    if offloads == "off":
        support.require("ethtool")
        for netns, names in ((lab.hosts[0].netns, [each.name for each in lab.hosts[0].interfaces]),):
            for name in names:
                what = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"]
                support.run(["ip", "netns", "exec", netns, "ethtool", "-K", name, *what])
    piece = 20_000_000
    with kit.pinning_in(lab.hosts[0].netns, targets(lab)) as pins, iperf3(lab, version) as (flow, report):
        first = carried(lab, piece)
        routed = max(first, key=lambda rail: first[rail])
        other = 3 - routed
        for rail in (other, routed, other):
            assert pins.install([pin(lab, flow, rail)]) == {}
            moved = carried(lab, piece)
            assert moved[rail] > 0.99 * sum(moved.values()), f"pinned to {rail}: {moved}"
        drops = pins.table.counters()
        assert drops["redirected"] > 0
        unhappy = {"expired", "dead", "missing", "too_large", "exempt", "refused", "unreadable"}
        assert {name for name in unhappy if drops[name]} == set()
        pins.remove([flow])
        moved = carried(lab, piece)
        assert moved[routed] > 0.99 * sum(moved.values()), "it goes as it is routed"
        done = report()
        assert "error" not in done
        (stream,) = done["end"]["streams"]  # type: ignore[index]
        assert stream["sender"]["bytes"] > 5 * piece


@contextlib.contextmanager
def connected(lab: Lab, version: int) -> Iterator[tuple[socket.socket, socket.socket, FlowKey]]:
    """A TCP connection between the service addresses."""
    local, remote = services(lab, version)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with inside(lab.hosts[1].netns):
        server = socket.create_server((remote, PORT), family=family)
    with server, inside(lab.hosts[0].netns):
        near = socket.create_connection((remote, PORT), 10, (local, 0))
        far, _ = server.accept()
        with near, far:
            yield near, far, FlowKey(TCP, local, near.getsockname()[1], remote, PORT)


def rail_of_sending(lab: Lab, near: socket.socket, far: socket.socket, size: int = 2_000_000) -> int:
    """Send so much and have it read; the rail that carried it."""
    before = sent_bytes(lab)
    reader = threading.Thread(target=_read, args=(far, size))
    reader.start()
    near.sendall(bytes(size))
    reader.join()
    moved = {rail: value - before[rail] for rail, value in sent_bytes(lab).items()}
    ((rail, most),) = ((rail, value) for rail, value in moved.items() if value > size // 2)
    assert most > size > 20 * min(moved.values())
    return rail


def _read(end: socket.socket, size: int) -> None:
    while size > 0:
        size -= len(end.recv(1 << 20))


def test_every_packet_of_a_live_connection_carries_its_label(lab: Lab) -> None:
    """GSO super-packets are cut after they were relabelled; what arrives is looked at on the far host."""
    label = 0xBEEF5
    with contextlib.ExitStack() as stack:
        pins = stack.enter_context(kit.pinning_in(lab.hosts[0].netns, targets(lab)))
        near, far, flow = stack.enter_context(connected(lab, 6))
        with Labels(pins.table) as labels:
            rail = rail_of_sending(lab, near, far)
            support.run(["ip", "netns", "exec", lab.hosts[1].netns, "ethtool", "-K", f"rail{rail}", "gro", "off"])
            capture = kit.Capture(lab.hosts[1].netns, f"rail{rail}")
            rail_of_sending(lab, near, far, 200_000)
            assert label not in {int.from_bytes(frame[15:18]) & 0xFFFFF for frame in capture.frames(PORT)}
            assert labels.install([LabelChange(flow, label, kit.soon())]) == {}
            rail_of_sending(lab, near, far, 200_000)
            frames = capture.frames(PORT)
            assert sum(len(frame) for frame in frames) > 200_000
            assert {int.from_bytes(frame[15:18]) & 0xFFFFF for frame in frames} == {label}
            assert labels.read()[flow].relabelled >= 200_000 // 1440
            labels.remove([flow])
            rail_of_sending(lab, near, far, 200_000)
            assert label not in {int.from_bytes(frame[15:18]) & 0xFFFFF for frame in capture.frames(PORT)}
            capture.close()


# ---- numbered datagrams ----


@dataclass
class Stream:
    """Datagrams sent at a steady pace from another thread, each with its number; and what came of each."""

    lab: Lab
    version: int
    every_s: float = 0.001
    sent_ns: list[tuple[int, int]] = field(default_factory=list)  # by number: right before and right after
    received: set[int] = field(default_factory=set)
    seen: dict[int, int] = field(default_factory=dict)  # by number: the rail that it came by, as `rails` found

    def __enter__(self) -> Stream:
        local, remote = services(self.lab, self.version)
        family = socket.AF_INET if self.version == 4 else socket.AF_INET6
        with inside(self.lab.hosts[1].netns):
            self._far = socket.socket(family, socket.SOCK_DGRAM)
        self._far.setsockopt(socket.SOL_SOCKET, kit.SO_RCVBUFFORCE, 8 << 20)
        self._far.bind((remote, PORT))
        self._far.settimeout(0.02)
        with inside(self.lab.hosts[0].netns):
            self._near = socket.socket(family, socket.SOCK_DGRAM)
        self._near.bind((local, PORT))
        self._near.connect((remote, PORT))
        self.flow = FlowKey(UDP, local, PORT, remote, PORT)
        self._captures = {r: kit.Capture(self.lab.hosts[1].netns, f"rail{r}") for r in (1, 2)}
        self._end, self._all_sent = threading.Event(), threading.Event()
        self._sender, self._receiver = (threading.Thread(target=each) for each in (self._send, self._receive))
        self._sender.start()
        self._receiver.start()
        return self

    def _send(self) -> None:
        while not self._end.wait(self.every_s):
            begin = time.monotonic_ns()
            with contextlib.suppress(ConnectionRefusedError):
                self._near.send(len(self.sent_ns).to_bytes(8) + bytes(56))
            self.sent_ns.append((begin, time.monotonic_ns()))

    def _receive(self) -> None:
        last = time.monotonic()
        while True:
            try:
                self.received.add(int.from_bytes(self._far.recv(100)[:8]))
                last = time.monotonic()
            except TimeoutError:  # what is still on its way is waited for as long as any is missing
                quiet_s = time.monotonic() - last
                if self._all_sent.is_set() and (not self.lost() or quiet_s > 0.5 * support.slow_factor()):
                    return

    def stop(self) -> None:
        """Send no more, and take what is still on its way."""
        self._end.set()
        self._sender.join()
        self._all_sent.set()
        self._receiver.join()

    def lost(self) -> list[int]:
        """Numbers that never arrived, once it is stopped."""
        return [number for number in range(len(self.sent_ns)) if number not in self.received]

    def rails(self) -> dict[int, int]:
        """The rail that each number came by that was captured on the far host since the last call."""
        found = {}
        for rail, capture in self._captures.items():
            for frame in capture.frames(PORT):
                found[int.from_bytes(frame[-64:-56])] = rail
        self.seen |= found
        return found

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._near.close()
        self._far.close()
        for capture in self._captures.values():
            capture.close()


def routed_rail(stream: Stream) -> int:
    """By which it goes before anybody moves it."""
    seen: dict[int, int] = {}

    def known() -> bool:
        seen.update(stream.rails())
        return len(seen) >= 10

    support.wait_until(known, 10, "some have arrived")
    (rail,) = set(seen.values())
    return rail


def settle_quickly(lab: Lab) -> None:
    """A neighbour that does not answer fails within a second, not within forty."""
    with inside(lab.hosts[0].netns):
        for family in ("ipv4", "ipv6"):
            for interface in lab.hosts[0].interfaces:
                for name, value in (
                    ("base_reachable_time_ms", 500),
                    ("delay_first_probe_time", 1),
                    ("retrans_time_ms", 100),
                    ("gc_stale_time", 60),
                ):
                    with open(f"/proc/sys/net/{family}/neigh/{interface.name}/{name}", "w") as file:
                        file.write(str(value))


@versions
def test_moving_a_stream_loses_nothing(lab: Lab, version: int) -> None:
    with kit.pinning_in(lab.hosts[0].netns, targets(lab)) as pins, Stream(lab, version) as stream:
        first = routed_rail(stream)
        for turn in range(20):
            pins.install([pin(lab, stream.flow, 1 + (first + turn) % 2)])
            assert pins.renew([stream.flow], kit.soon()) == set()
            reached = len(stream.sent_ns) + 20
            support.wait_until(lambda reached=reached: len(stream.sent_ns) > reached, 10, "twenty more are sent")
        stream.stop()
        assert stream.lost() == []
        assert pins.table.counters()["redirected"] > 0
        assert set(stream.rails().values()) == {1, 2}


@versions
@pytest.mark.parametrize("carrier", [False, True], ids=["silent", "carrier lost"])
def test_nothing_is_lost_after_a_target_is_known_to_be_dead(lab: Lab, version: int, carrier: bool) -> None:
    """The cable of the target is cut: what is lost is one run of numbers, that ends when its death is known."""
    settle_quickly(lab)
    with kit.pinning_in(lab.hosts[0].netns, targets(lab)) as pins, Stream(lab, version) as stream:
        routed = routed_rail(stream)
        rail = 3 - routed
        wanted = pin(lab, stream.flow, rail)
        assert pins.install([wanted]) == {}
        support.wait_until(lambda: rail in stream.rails().values(), 10, "it goes over its target")
        cut_ns = time.monotonic_ns()
        lab.cut(rail, host=1, carrier=carrier)
        support.wait_until(lambda: not pins.alive(wanted.target, wanted.nexthop_id), 60, "it is dead", every_s=0.0002)
        dead_ns = time.monotonic_ns()
        reached = len(stream.sent_ns) + 500
        support.wait_until(lambda: len(stream.sent_ns) > reached, 30, "many more are sent")
        stream.stop()
        lost = stream.lost()
        assert lost or carrier, "the cut was not seen"
        if lost:
            assert lost == list(range(lost[0], lost[-1] + 1))
            assert stream.sent_ns[lost[0]][1] >= cut_ns
            assert stream.sent_ns[lost[-1]][0] <= dead_ns, "lost after the target was known to be dead"
        stream.rails()
        assert {stream.seen[n] for n, (begin, _) in enumerate(stream.sent_ns) if begin > dead_ns} == {routed}
        assert pins.table.counters()["dead"] >= 490
        lab.heal(rail)
        if not carrier:  # with its carrier the nexthop went
            support.wait_until(lambda: pins.alive(wanted.target, wanted.nexthop_id), 60, "it is alive again")


# ---- leases without anybody to renew them ----

_HOLDER = """
import sys, time
sys.path[:0] = sys.argv[1:3]
import json, pin_kit
from steering.actuators.pins import PinTarget
from steering.plan import FlowKey, Pin
told = json.loads(sys.stdin.readline())
with pin_kit.pinning_in(told["netns"], [PinTarget(*each) for each in told["targets"]], told["force_clsact"]) as pins:
    until = time.monotonic_ns() + told["lease_ns"]
    assert pins.install([Pin(FlowKey(*told["flow"]), *told["to"], until)]) == {}
    print(until, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@versions
def test_a_lease_ends_in_the_kernel(lab: Lab, version: int, number: signal.Signals) -> None:
    """Killed: the clsact filter stays, as it does on kernels without TCX. Stopped: whatever there is stays."""
    lease_ns = int(2 * kit.SECOND * support.slow_factor() ** 0.5)
    with Stream(lab, version, every_s=0.002) as stream:
        routed = routed_rail(stream)
        rail = 3 - routed
        wanted = pin(lab, stream.flow, rail)
        with holder(lab, stream.flow, wanted, lease_ns, number == signal.SIGKILL) as (process, until_ns):
            pinned_ns = time.monotonic_ns()  # making a clsact, before that, stops the device for a moment
            support.wait_until(lambda: rail in stream.rails().values(), 10, "it goes over its target")
            process.send_signal(number)
            gone_ns = time.monotonic_ns()

            def is_over() -> bool:
                stream.rails()  # a capture holds so much
                return time.monotonic_ns() > until_ns + kit.SECOND // 2

            support.wait_until(is_over, 60, "its lease is over")
            stream.stop()
            stream.rails()
        assert [n for n in stream.lost() if stream.sent_ns[n][1] > pinned_ns] == []
        pinned = [n for n, (begin, end) in enumerate(stream.sent_ns) if begin > gone_ns and end < until_ns]
        after = [n for n, (begin, _) in enumerate(stream.sent_ns) if begin > until_ns + TICKS_NS]
        assert len(pinned) > 20
        assert len(after) > 20
        assert {stream.seen[n] for n in pinned} == {rail}, "the lease holds though nobody is there"
        assert {stream.seen[n] for n in after} == {routed}, "the lease has ended though nobody ended it"
    with inside(lab.hosts[0].netns):
        attach.clean(attach.STEERING)


@contextlib.contextmanager
def holder(
    lab: Lab, flow: FlowKey, wanted: Pin, lease_ns: int, force_clsact: bool
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that pins one flow and sleeps: itself, and when its lease ends."""
    told = {
        "netns": lab.hosts[0].netns,
        "targets": [[t.nexthop_id, t.ifindex, t.gateway, t.alive, t.target] for t in targets(lab)],
        "flow": [flow.protocol, flow.local, flow.local_port, flow.remote, flow.remote_port],
        "to": [wanted.target, wanted.nexthop_id],
        "lease_ns": lease_ns,
        "force_clsact": force_clsact,
    }
    command = [sys.executable, "-c", _HOLDER, str(support.ROOT), str(support.ROOT / "tests")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        yield process, int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_a_killed_process_takes_its_pins_with_it(lab: Lab) -> None:
    """Where the kernel has TCX: at once, and nothing is lost."""
    with Stream(lab, 4) as stream:
        routed = routed_rail(stream)
        with holder(lab, stream.flow, pin(lab, stream.flow, 3 - routed), 600 * kit.SECOND, False) as (process, _):
            support.wait_until(lambda: 3 - routed in stream.rails().values(), 10, "it goes over its target")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if b"swerve-steer" in _filters(lab):
                pytest.skip("missing: TCX (kernel 6.6)")
            reached = len(stream.sent_ns) + 50

            def back() -> bool:
                return set(stream.rails().values()) == {routed}

            support.wait_until(back, 10, "it goes as it is routed")
            support.wait_until(lambda: len(stream.sent_ns) > reached, 10, "many more are sent")
            assert set(stream.rails().values()) == {routed}
        stream.stop()
        assert stream.lost() == []


def _filters(lab: Lab) -> bytes:
    shown = ""
    for interface in lab.hosts[0].interfaces:
        show = ["tc", "-n", lab.hosts[0].netns, "filter", "show", "dev", interface.name, "egress"]
        shown += support.run(show).stdout
    return shown.encode()
