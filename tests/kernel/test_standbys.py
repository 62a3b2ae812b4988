"""Fast reroute between two hosts: packets leave a path that the agent's table calls silent, and only those that may.

The table is a map like the agent's own, written by the test; the packets, the rails and the program are real.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pin_kit as kit
import pytest
import support
from pin_kit import FAR, Rails, Wire, compiled_once, rails, versions
from support import mentions

from pytools.errors import SwerveError
from pytools.kernel.bpf import mapped
from pytools.kernel.netns import inside
from pytools.signals import Path
from steering.actuators import flow_keys
from steering.actuators.agent_paths import AgentPaths
from steering.actuators.pins import Pins
from steering.actuators.standbys import StandBys
from steering.plan import StandBy

__all__ = ["compiled_once", "rails"]  # fixtures

LIMIT, PORT = 3, 7100
HOLD_NS = kit.SECOND


def way(rails: Rails, rail: int, version: int = 4) -> Path:
    """The path over a rail to the far host."""
    return Path("near", "far", FAR[version == 6], rails.gateway(rail, version), f"rail{rail}")


@dataclass
class Agent:
    """The maps of an agent, as it lends them."""

    settings: mapped.MappedArray
    paths: mapped.MappedArray

    def row(self, rail: int, version: int = 4) -> int:
        """Where a path is; not where a careless reader would look for it."""
        return 7 + 2 * rail + (version == 6)

    def knows(self, rails: Rails, rail: int, version: int = 4) -> None:
        """A path that answers."""
        path, record = way(rails, rail, version), self.record(rail, version)
        for field, address in (("remote", path.address), ("gateway", path.gateway)):
            record[field]["bytes"] = list(flow_keys.address(address).mapped)
        record["ifindex"], record["generation"] = rails.index(rail), 40 + rail
        record["limit"], record["answered_ns"] = LIMIT, time.monotonic_ns()

    def record(self, rail: int, version: int = 4):  # type: ignore[no-untyped-def]
        row = self.row(rail, version)
        return self.paths.records[row : row + 1]

    def silence(self, rail: int, version: int = 4) -> None:
        """Probes of a path were left unanswered, as probe.c notes it; those of the others were answered since."""
        now, record = time.monotonic_ns(), self.record(rail, version)
        record["unanswered"], record["first_ns"], record["silent_at_ns"] = LIMIT, now - 30_000_000, now - 1
        self.settings.records["silence_ns"] = now
        for other in {1, 2} - {rail}:
            self.answers(other, version)

    def answers(self, rail: int, version: int = 4) -> None:
        """A probe of a path was answered."""
        record = self.record(rail, version)
        if record["silent_at_ns"][0]:
            record["back_ns"] = time.monotonic_ns()
        record["unanswered"] = record["first_ns"] = record["silent_at_ns"] = 0
        record["answered_ns"] = time.monotonic_ns()

    def lent(self) -> dict[str, int]:
        return {"probe_settings": os.dup(self.settings.fd), "probe_paths": os.dup(self.paths.fd)}


@dataclass
class World:
    rails: Rails
    pins: Pins
    agent: Agent
    lender: AgentPaths
    standbys: StandBys

    def arm(self, *rails: int, version: int = 4, prefix: str = "") -> None:
        """Have the other rail stand by for each of these."""
        to = prefix or f"{FAR[version == 6]}/{128 if version == 6 else 32}"
        wanted = [
            StandBy(
                way(self.rails, rail, version),
                (to,),
                way(self.rails, 3 - rail, version),
                kit.GROUPS[version == 6],
                (20 if version == 6 else 10) + 3 - rail,
                "leave-dead-rail",
            )
            for rail in rails
        ]
        assert self.standbys.arm(wanted) == {}
        self.standbys.renew(kit.soon(), HOLD_NS)

    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.pins.table.counters().items() if count}


@pytest.fixture
def world(rails: Rails) -> Iterator[World]:
    with kit.pinning(rails) as pins, contextlib.ExitStack() as stack:
        table = pins.table
        layouts = table.path_record, table.settings_record
        paths = stack.enter_context(mapped.create("probe_paths", layouts[0], 4096))
        settings = stack.enter_context(mapped.create("probe_settings", layouts[1], 1))
        lender = AgentPaths(table)
        stack.callback(lender.take_back)
        standbys = StandBys(table, pins, lender)
        stack.callback(standbys.close)
        agent = Agent(settings, paths)
        for rail in (1, 2):
            for version in (4, 6):
                agent.knows(rails, rail, version)
        lender.lend(agent.lent())
        yield World(rails, pins, agent, lender, standbys)
        assert standbys.arm(()) == {}


@pytest.mark.guest(every=2)
@versions
def test_packets_leave_a_silent_path_unchanged(world: World, version: int) -> None:
    with Wire(world.rails, version) as wire:
        routed, before = wire.send()
        world.arm(routed, version=version)
        assert wire.send()[0] == routed, "while all is well"
        assert world.counted() == {}
        world.agent.silence(routed, version)
        rail, after = wire.send()
        assert rail == 3 - routed
        ip = 14 if version == 6 else 14 + 12  # IPv4: behind identifier and header checksum
        assert (after[ip:], len(after)) == (before[ip:], len(before))
        assert [wire.send()[0] for _ in range(9)] == [3 - routed] * 9
        assert world.counted() == {"redirected": 10, "rerouted": 10}
        (moved,) = world.standbys.moved()
        assert (moved.packets, moved.bytes) == (10, 10 * len(after))
        assert 0 < moved.first_ns <= moved.last_ns <= time.monotonic_ns()
        assert moved.standby.path == way(world.rails, routed, version)


def test_a_large_buffer_moves_as_the_segments_it_becomes(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(routed)
        world.agent.silence(routed)
        wire.socket.setsockopt(socket.SOL_UDP, 103, 1000)  # UDP_SEGMENT
        wire.socket.send(bytes(10_000))
        assert [len(wire.far.recv(1 << 16)) for _ in range(10)] == [1000] * 10
        assert wire.arrived()[routed] == []
        assert world.standbys.moved()[0].packets == 10


def routed_along(world: World, wire: Wire, armed: int) -> bool:
    """Whether a packet goes the way that routing has chosen for it."""
    return wire.send()[0] == armed


@pytest.mark.parametrize(
    ("why", "counted"),
    [
        ("not silent yet", {}),
        ("no alarm", {}),
        ("an alarm of long ago", {}),
        ("another path in the row", {}),
        ("a path of another interface", {}),
        ("judged no more", {}),
        ("no agent", {}),
        ("disarmed", {}),
        ("another destination", {}),
        ("the lease is over", {"unleased": 1}),
        ("both silent", {"no_standby": 1}),
        ("the other has not answered since", {"no_standby": 1}),
        ("the other leaves as many unanswered", {"no_standby": 1}),
        ("the other never answered", {"no_standby": 1}),
        ("another path in the other's row", {"no_standby": 1}),
        ("the other's neighbour is dead", {"dead": 1}),
    ],
)
def test_packets_go_as_they_are_routed(world: World, why: str, counted: dict[str, int]) -> None:  # noqa: PLR0912
    """Everything that must hold, one after the other left out."""
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        other = 3 - routed
        world.arm(routed, prefix="10.9.0.99/32" if why == "another destination" else "")
        world.agent.silence(routed)
        path, second = world.agent.record(routed), world.agent.record(other)
        match why:
            case "not silent yet":
                path["silent_at_ns"] = kit.soon()
            case "no alarm":
                world.agent.settings.records["silence_ns"] = 0
            case "an alarm of long ago":
                world.agent.settings.records["silence_ns"] = time.monotonic_ns() - 11 * kit.SECOND
            case "another path in the row":
                path["generation"] += 1
            case "a path of another interface":
                path["ifindex"] = world.rails.index(other)
            case "judged no more":
                path["limit"] = 0
            case "no agent":
                world.lender.take_back()
            case "disarmed":
                world.standbys.arm(())
            case "the lease is over":
                world.standbys.renew(time.monotonic_ns(), HOLD_NS)
            case "both silent":
                world.agent.silence(other)
                world.agent.record(routed)["unanswered"] = 2 * LIMIT
                path["silent_at_ns"], path["first_ns"] = time.monotonic_ns() - 1, 1
            case "the other has not answered since":
                second["answered_ns"] = int(path["first_ns"][0])
            case "the other leaves as many unanswered":
                second["unanswered"] = 2
            case "the other never answered":
                second["answered_ns"] = 0
            case "another path in the other's row":
                second["generation"] += 1
            case "the other's neighbour is dead":
                world.pins.table.targets["alive"] = 0
        assert wire.send()[0] == routed
        assert world.counted() == counted
        assert world.standbys.moved() == []


@pytest.mark.parametrize("doubt", [True, False], ids=["in doubt", "not in doubt"])
def test_retries_of_a_connection_leave_a_path_in_doubt(world: World, doubt: bool) -> None:
    with contextlib.ExitStack() as stack:
        near, far = connection(world, stack)
        world.arm(1)
        world.agent.silence(1)
        path = world.agent.record(1)
        path["silent_at_ns"], path["grace_ns"] = kit.soon(), 10_000_000 if doubt else 60 * kit.SECOND
        near.send(b"a")
        assert far.recv(1) == b"a"
        assert world.counted() == {}, "no retry"
        lose(world, 1)
        near.send(b"b")
        if doubt:
            assert far.recv(1) == b"b"
            support.wait_until(lambda: not timeouts(near), 20, "it is acknowledged")
            retried = world.counted()["retried"]
            assert retried >= 1
            assert world.counted() == {"redirected": retried, "retried": retried}
            far.send(b"c")
            support.wait_until(lambda: world.counted()["retried"] > retried, 20, "it acknowledges")
        else:
            support.wait_until(lambda: timeouts(near) >= 2, 20, "it times out twice")
            assert world.counted() == {}
        assert world.standbys.moved() == [], "the path is not silent"


def test_a_loss_probe_with_new_data_leaves_a_path_in_doubt(world: World) -> None:
    with contextlib.ExitStack() as stack:
        near, far = connection(world, stack)
        captures = [kit.Capture(world.rails.far, f"rail{rail}") for rail in (1, 2)]
        for each in captures:
            stack.enter_context(contextlib.closing(each))
        world.arm(1)
        world.agent.silence(1)
        path = world.agent.record(1)
        path["silent_at_ns"], path["grace_ns"] = kit.soon(), 10_000_000
        lose(world, 1)
        near.setblocking(False)
        sent = near.send(bytes(1 << 20))  # more than the window
        left = sent
        while left:
            left -= len(far.recv(left))
        lost, probes = ([int.from_bytes(each[38:42]) for each in capture.frames(PORT)] for capture in captures)
        assert lost[0] < probes[0]
        assert probes[0] not in lost, "not sent before"


def lose(world: World, rail: int) -> None:
    """Let a rail lose what the near host sends: it goes to a neighbour that is not there."""
    gateway = world.rails.gateway(rail)
    words = f"neigh replace {gateway} lladdr 02:00:00:00:00:99 nud permanent dev rail{rail}"
    world.rails.ip(*words.split())


def connection(world: World, stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection to the far host, routed over rail 1."""
    world.rails.only(1)
    with inside(world.rails.far):
        listener = stack.enter_context(socket.create_server((FAR[0], PORT)))
    near = stack.enter_context(socket.create_connection((FAR[0], PORT)))
    far = stack.enter_context(listener.accept()[0])
    far.settimeout(20 * support.slow_factor())
    return near, far


def timeouts(connection: socket.socket) -> int:
    """In a row: tcpi_retransmits."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[2]


def test_packets_stay_away_for_the_hold_time(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(routed)
        world.agent.silence(routed)
        assert wire.send()[0] == 3 - routed
        world.agent.answers(routed)
        assert wire.send()[0] == 3 - routed, "on hold"
        world.agent.record(routed)["back_ns"] -= HOLD_NS
        assert wire.send()[0] == routed


def test_paths_that_stand_by_for_each_other_pass_no_packet_to_and_fro(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(1, 2)
        for rail in (1, 2):
            world.agent.silence(rail)
        for rail in (1, 2):
            world.agent.answers(rail)
        assert wire.send()[0] == routed, "both on hold"
        world.agent.silence(3 - routed)
        assert wire.send()[0] == routed
        world.agent.record(routed)["back_ns"] = 0
        world.agent.silence(routed)
        world.agent.answers(3 - routed)
        world.agent.record(3 - routed)["back_ns"] = 0
        assert wire.send()[0] == 3 - routed


@pytest.mark.parametrize("state", ["silent", "on hold"])
def test_a_stand_by_that_is_silent_or_on_hold_takes_packets_while_it_is_better(world: World, state: str) -> None:
    """What it takes over makes a queue there, and probes wait in it: it answers later, the dead path never."""
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(1, 2)
        world.agent.silence(3 - routed)
        if state == "on hold":
            world.agent.answers(3 - routed)
        dead = world.agent.record(routed)
        dead["unanswered"] = 2 * LIMIT + 1
        dead["silent_at_ns"], dead["first_ns"] = time.monotonic_ns() - 1, 1
        assert wire.send()[0] == 3 - routed
        assert world.counted() == {"redirected": 1, "rerouted": 1, "no_standby": 1}, "and does not send it back"
        world.agent.record(3 - routed)["answered_ns"] = 1
        assert wire.send()[0] == routed, "it has not answered since"


def test_a_flow_pinned_to_a_silent_path_goes_as_it_is_routed(world: World) -> None:
    """Sent to the pin's target it would be sent back, and so on for ever."""
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        other = 3 - routed
        world.arm(1, 2)
        assert world.pins.install([kit.pin(wire.flow, other)]) == {}
        assert wire.send()[0] == other
        world.agent.silence(other)
        assert wire.send()[0] == routed
        assert world.counted() == {"redirected": 1, "on_target": 1, "dead": 1}
        world.pins.remove([wire.flow])


def test_a_flow_that_is_pinned_where_it_is_routed_leaves_a_silent_path(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(1, 2)
        assert world.pins.install([kit.pin(wire.flow, routed)]) == {}
        world.agent.silence(routed)
        assert wire.send()[0] == 3 - routed
        world.pins.remove([wire.flow])


def test_probes_stay_on_the_path_that_they_ask_about(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(routed)
        world.agent.silence(routed)
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, kit.MARK_SEND)
        assert wire.send()[0] == routed
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0)
        assert wire.send()[0] == 3 - routed


def test_the_longest_prefix_decides(world: World) -> None:
    """A destination with a path of its own is not moved because its neighbours' path is silent."""
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(routed, prefix="10.9.0.0/16")
        world.agent.silence(routed)
        assert wire.send()[0] == 3 - routed
        world.arm(routed, prefix="10.8.0.0/16")
        assert wire.send()[0] == routed


def test_what_is_armed_anew_is_counted_anew(world: World) -> None:
    with Wire(world.rails) as wire:
        routed, _ = wire.send()
        world.arm(routed)
        world.agent.silence(routed)
        wire.send()
        assert world.standbys.moved()[0].packets == 1
        world.arm(routed)
        assert world.standbys.moved()[0].packets == 1, "nothing has changed"
        world.agent.record(routed)["generation"] += 1
        world.arm(routed)
        assert world.standbys.moved() == []
        assert wire.send()[0] == 3 - routed
        assert world.standbys.moved()[0].packets == 1


def test_what_the_agent_does_not_probe_has_no_stand_by(world: World) -> None:
    unknown = Path("near", "far", "10.9.0.77", world.rails.gateway(1), "rail1")
    known = way(world.rails, 2)
    refused = world.standbys.arm([StandBy(unknown, ("10.9.0.77/32",), known, kit.GROUPS[0], 12, "r")])
    assert refused.keys() == {unknown} and mentions(refused[unknown], "not probe", str(unknown))
    refused = world.standbys.arm([StandBy(known, ("10.9.0.77/32",), known, kit.GROUPS[0], 99, "r")])
    assert refused.keys() == {known} and mentions(refused[known], "nexthop 99")


def test_maps_of_another_layout_are_refused(world: World) -> None:
    with inside(world.rails.near), mapped.create("probe_paths", world.pins.table.path_record, 17) as other:
        lent = world.agent.lent() | {"probe_paths": os.dup(other.fd)}
        with pytest.raises(SwerveError):
            world.lender.lend(lent)
    assert not world.lender.lent


def test_ten_thousand_prefixes(world: World) -> None:
    path, other = way(world.rails, 1), way(world.rails, 2)
    prefixes = tuple(f"10.{200 + i // 256}.{i % 256}.0/24" for i in range(10_000))
    wanted = [StandBy(path, prefixes, other, kit.GROUPS[0], 12, "r")]
    assert world.standbys.arm(wanted) == {}
    keys, _ = world.pins.table.prefixes.read()
    assert len(keys) == 10_000
    assert world.standbys.arm(()) == {}
    keys, _ = world.pins.table.prefixes.read()
    assert len(keys) == 0
