"""steer.c's holds on packets made by hand: which wait, for how long, and what is counted.

The agent's table of paths is a map that the test writes. fq is what the kernel has or not: the program does not ask, so
here it is said to be there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import packets as p
import pin_kit as kit
import pytest
import support
from packet_runs import PacketRuns, Run

from pytools.kernel.bpf import mapped
from pytools.kernel.netlink import qdiscs
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Path
from steering.actuators import flow_keys
from steering.actuators.agent_paths import AgentPaths
from steering.actuators.holds import Holds
from steering.plan import Hold, HoldLimits

MS, SECOND = 1_000_000, 1_000_000_000
LIMITS = HoldLimits(threshold_ns=MS, longest_ns=50 * MS, fresh_ns=1000 * MS, floor=1024, gain=256)
ROW, GENERATION = 11, 3
NEAR, FAR = {4: "10.9.0.1", 6: "fd00:9::1"}, {4: "10.9.0.2", 6: "fd00:9::2"}
versions = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])


@dataclass
class World:
    holds: Holds
    paths: mapped.MappedArray
    index: int
    runs: PacketRuns
    netns: str
    sent_ns: int = 0

    def change(self, to: str) -> None:
        """Let the kernel announce another queue discipline of the interface."""
        support.run(["tc", "-n", self.netns, "qdisc", "replace", "dev", "v0", "root", to])

    def path(self, version: int = 4) -> Path:
        return Path("near", "far", FAR[version], "10.1.1.1" if version == 4 else "fd00:1::1", "v0")

    def hold(self, version: int = 4, prefix: str = "", limits: HoldLimits = LIMITS) -> Hold:
        to = prefix or f"{FAR[version]}/{32 if version == 4 else 128}"
        return Hold(self.path(version), (to,), limits, "short-queues", install=True)

    def record(self, version: int = 4):  # type: ignore[no-untyped-def]
        return self.paths.records[ROW + version : ROW + version + 1]

    def sample(self, queue_ns: int, version: int = 4) -> None:
        """A probe that left a moment ago was answered, as probe.c notes it."""
        self.sent_ns = max(self.sent_ns + 1, time.monotonic_ns() - 10_000)
        record = self.record(version)
        record["queue_ns"], record["queue_sent_ns"] = queue_ns, self.sent_ns

    def run(self, frame: bytes, mark: int = 0) -> Run:
        return self.runs.run(self.holds._table.program_fd, frame, mark, self.index)

    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.holds._table.counters().items() if count}


@pytest.fixture
def world(make_namespace: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    support.require("netns", "bcc")
    netns = make_namespace()
    support.ip(netns, "link add v0 type veth peer name v1", "link set v0 up", "link set v1 up")
    monkeypatch.setattr(qdiscs, "queues", lambda _netlink, indexes: dict.fromkeys(indexes, ("fq", "fq")))
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(kit.table(netns))
        netlink = stack.enter_context(Netlink())
        index = socket.if_nametoindex("v0")
        paths = stack.enter_context(mapped.create("probe_paths", table.path_record, 4096))
        settings = stack.enter_context(mapped.create("probe_settings", table.settings_record, 1))
        lender = AgentPaths(table)
        stack.callback(lender.take_back)
        holds = stack.enter_context(Holds(table, lender, netlink))
        made = World(holds, paths, index, PacketRuns(), netns)
        for version in (4, 6):
            record, path = made.record(version), made.path(version)
            for field, address in (("remote", path.address), ("gateway", path.gateway)):
                record[field]["bytes"] = list(flow_keys.address(address).mapped)
            record["ifindex"], record["generation"] = index, GENERATION
        lender.lend({"probe_settings": os.dup(settings.fd), "probe_paths": os.dup(paths.fd)})
        yield made
        holds.arm(())


def tcp(payload: bytes = b"", flags: int = 0x10) -> bytes:
    return struct.pack("!HHIIBBHHH", 5000, 6000, 1, 2, 5 << 4, flags, 0, 0, 0) + payload


def packet(version: int = 4, payload: bytes = bytes(500), remote: str = "", flags: int = 0x10) -> bytes:
    build = p.ipv4 if version == 4 else p.ipv6
    return build(tcp(payload, flags), NEAR[version], remote or FAR[version], protocol=p.TCP)


@pytest.mark.guest(every=2)
@versions
def test_bytes_under_a_hold_are_told_to_whoever_probes_whether_they_wait_or_not(world: World, version: int) -> None:
    told, one = world.record(version)["passed_bytes"], packet(version)
    world.holds.arm([world.hold(version)])
    world.run(one)
    assert told[0] == 0, "there is no lease"
    world.holds.renew(kit.soon())
    for number, queue_ns in enumerate((0, 5 * MS, 9 * MS), 1):
        world.sample(queue_ns, version)
        world.run(one)
        assert told[0] == number * len(one)
    world.run(packet(version, remote=NEAR[version]))
    world.run(p.ipv4(bytes(60), NEAR[4], FAR[4]) if version == 6 else p.ipv6(bytes(60), NEAR[6], FAR[6]))
    assert told[0] == 3 * len(one), "another destination"


@pytest.mark.guest(every=2)
@versions
def test_packets_wait_while_the_queue_is_long(world: World, version: int) -> None:
    assert world.holds.arm([world.hold(version, limits=dataclasses.replace(LIMITS, floor=125_000_000))]) == {}
    world.holds.renew(kit.soon())
    world.sample(MS // 2, version)
    assert world.run(packet(version)).leaves_ns == 0
    world.sample(5 * MS, version)
    before = time.monotonic_ns()
    done = world.run(packet(version))
    now = time.monotonic_ns()
    assert before < done.leaves_ns <= now + 4 * MS, "the whole excess at most"
    (held,) = world.holds.read(now)
    assert (held.packets, held.bytes, held.samples, held.above) == (1, len(packet(version)), 2, 1)
    assert 0 < held.waited_ns <= 4 * MS
    assert held.queue_ns == 5 * MS
    assert world.counted() == {"held": 1}


@pytest.mark.guest
def test_the_kernel_knows_when_a_second_of_wall_clock_time_began(world: World) -> None:
    """Renewed again where a stall came between the two clocks, here or there."""
    assert world.holds.arm([world.hold()]) == {}
    [number] = [number for _, number, _ in world.holds._held.values()]

    def agree() -> bool:
        world.holds.renew(kit.soon())
        since_ns = time.monotonic_ns() - int(world.holds._table.holds["limits"]["second_ns"][number])
        return abs((time.time_ns() - since_ns + SECOND // 2) % SECOND - SECOND // 2) < MS

    support.wait_until(agree, 20, "both clocks agree")


def test_packets_of_one_destination_leave_in_their_order(world: World) -> None:
    assert world.holds.arm([world.hold()]) == {}
    world.holds.renew(kit.soon())
    times = []
    for queue_ns in (9 * MS, 0, 0, 0, 3 * MS, 0):
        world.sample(queue_ns)
        times += [world.run(packet()).leaves_ns for _ in range(3)]
    assert times[0] > 0
    held = [each for each in times if each]
    assert held == sorted(held)
    assert times[: len(held)] == held, "none goes at once while others wait"


@pytest.mark.parametrize(
    ("why", "counted"),
    [
        ("no lease", {"hold_unleased": 1}),
        ("lease over", {"hold_unleased": 1}),
        ("maps gone", {"hold_blind": 1}),
        ("another path in the row", {"hold_blind": 1}),
        ("no sample", {"hold_blind": 1}),
        ("stale sample", {"hold_blind": 1}),
        ("short queue", {}),
        ("another destination", {}),
        ("probe of ours", {}),
        ("acknowledgement", {}),
        ("disarmed", {}),
    ],
)
@pytest.mark.guest
def test_packets_leave_at_once(world: World, why: str, counted: dict[str, int]) -> None:
    assert world.holds.arm([world.hold()]) == {}
    world.holds.renew(kit.soon())
    world.sample(9 * MS)
    frame, mark = packet(), 0
    match why:
        case "no lease":
            world.holds.renew(0)
        case "lease over":
            world.holds.renew(time.monotonic_ns())
        case "maps gone":
            world.holds._paths.take_back()
        case "another path in the row":
            world.record()["generation"] = GENERATION + 1
        case "no sample":
            world.record()["queue_sent_ns"] = 0
        case "stale sample":
            world.record()["queue_sent_ns"] = time.monotonic_ns() - LIMITS.fresh_ns - 1
        case "short queue":
            world.sample(MS)
        case "another destination":
            frame = packet(remote="10.9.0.3")
        case "probe of ours":
            mark = kit.MARK_SEND
        case "acknowledgement":
            frame = packet(payload=b"")
        case "disarmed":
            assert world.holds.arm(()) == {}
    assert world.run(frame, mark).leaves_ns == 0
    assert world.counted() == counted


@pytest.mark.guest
def test_the_end_of_a_connection_does_not_overtake_its_data(world: World) -> None:
    assert world.holds.arm([world.hold()]) == {}
    world.holds.renew(kit.soon())
    world.sample(9 * MS)
    first = world.run(packet()).leaves_ns
    assert world.run(packet(payload=b"", flags=0x11)).leaves_ns >= first > 0


@pytest.mark.guest
@pytest.mark.parametrize("lease_ns", [0, 1], ids=["given up", "over"])
def test_past_the_lease_packets_wait_for_those_that_wait_already(world: World, lease_ns: int) -> None:
    assert world.holds.arm([world.hold()]) == {}
    world.holds.renew(kit.soon())
    world.sample(40 * MS)
    first = world.run(packet()).leaves_ns
    world.holds.renew(lease_ns)
    behind = world.run(packet()).leaves_ns
    assert behind in (first, 0), "later ones do not wait longer"
    assert behind == first or time.monotonic_ns() > first
    assert world.counted() in ({"held": 2, "hold_unleased": 1}, {"held": 1, "hold_unleased": 1})
    while time.monotonic_ns() <= first:
        time.sleep(0.001)
    assert world.run(packet()).leaves_ns == 0


def test_what_cannot_be_held_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Path("near", "far", "10.9.0.77", "10.1.1.1", "v0")
    wanted = world.hold()
    refused = world.holds.arm([Hold(unknown, ("10.9.0.77/32",), LIMITS, "r"), wanted])
    assert refused.keys() == {unknown} and support.mentions(refused[unknown], "not probe", str(unknown))
    for queue, install, words in (("other", True, "somebody chose"), ("default", False, "does not say")):
        found = queue, "htb"
        monkeypatch.setattr(qdiscs, "queues", lambda _netlink, indexes, found=found: dict.fromkeys(indexes, found))
        world.change("pfifo" if install else "bfifo")
        (why,) = world.holds.arm([Hold(wanted.path, wanted.prefixes, LIMITS, "r", install)]).values()
        assert words in why
    assert world.holds.read(time.monotonic_ns()) == []
    world.holds._paths.take_back()
    refused = world.holds.arm([wanted])
    assert refused.keys() == {wanted.path} and support.mentions(refused[wanted.path], "agent", "no maps")


def test_queues_are_read_when_the_kernel_tells_of_a_change(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found, read = ("fq", "fq"), list[set[int]]()

    def queues(_netlink: Netlink, indexes: set[int]) -> dict[int, tuple[str, str]]:
        read.append(indexes)
        return dict.fromkeys(indexes, found)

    monkeypatch.setattr(qdiscs, "queues", queues)
    for _ in range(3):
        assert world.holds.arm([world.hold()]) == {}
    hooked = len(read)
    assert hooked <= 2, "once at first, and once when its own hook was told of"
    found = "other", "pfifo"
    assert world.holds.arm([world.hold()]) == {}
    assert len(read) == hooked
    world.change("pfifo")
    assert "somebody chose" in world.holds.arm([world.hold()])[world.path()]
    assert read[hooked:] == [{world.index}]
    assert world.holds.arm(()) == {}
    assert len(read) == hooked + 1


def test_a_hold_that_stays_goes_on_and_one_that_comes_back_begins_anew(world: World) -> None:
    assert world.holds.arm([world.hold(), world.hold(6)]) == {}
    world.holds.renew(kit.soon())
    world.sample(9 * MS)
    assert world.run(packet()).leaves_ns > 0
    other = HoldLimits(2 * MS, 40 * MS, LIMITS.fresh_ns, 2048, 128)
    assert world.holds.arm([world.hold(limits=other)]) == {}
    world.holds.renew(kit.soon())
    (held,) = world.holds.read(time.monotonic_ns())
    assert held.packets == 1
    assert world.holds.arm(()) == {}
    assert world.run(packet()).leaves_ns == 0
    assert world.holds.arm([world.hold()]) == {}
    (held,) = world.holds.read(time.monotonic_ns())
    assert (held.packets, held.samples, held.queue_ns) == (0, 0, None)
