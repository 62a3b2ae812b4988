"""The base delays that an agent leaves to its successor: what of a file counts, and what of it is ignored."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import support

from pytools.config import Peer, Probe, Windows
from pytools.estimators.remembered_bases import RememberedBase
from pytools.signals import Path as NetworkPath
from pytools.sources.probing.base_memory import BaseMemory
from pytools.sources.probing.measurements import Measurements
from pytools.sources.probing.paths import PinnedPath

SECOND = 1_000_000_000
BEGIN_NS = 1_000 * SECOND
SCOPE = "boot/cookie:1"
PORTS = (40_000, 40_001)
ROUTE_NS = 60_000
RAIL = NetworkPath("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")


def pinned(clock: str = "shared", **other: object) -> PinnedPath:
    peer = Peer("h2", "10.9.0.2", clock)  # type: ignore[arg-type]
    return replace(PinnedPath(0, RAIL, peer, 4, 2, "10.9.0.1", None, False), **other)  # type: ignore[arg-type]


class World:
    """Agents one after another, each with the same file."""

    def __init__(self, place: Path) -> None:
        self.place, self.now_ns = place, BEGIN_NS

    def start(
        self, path: PinnedPath | None = None, scope: str = SCOPE, ports: tuple[int, ...] = PORTS, dscp: int = 0
    ) -> None:
        self.memory = BaseMemory(self.place, scope, lambda: self.now_ns)
        self.measured = Measurements("h1", Windows(), Probe(), self.memory.found)
        self.memory.keep(self.measured.bases, ports, dscp)
        if path is not None:
            self.measured.set_paths([path], self.now_ns)

    def run(self, seconds: int, queue_ns: int = 0) -> None:
        for _ in range(seconds):
            for _ in range(10):
                self.now_ns += SECOND // 10
                if len(self.measured.counts):
                    self.probe(queue_ns)
            self.measured.find_base(self.now_ns)
            self.memory.tick(self.now_ns)

    def probe(self, queue_ns: int = 0) -> None:
        stamps = np.array([[ROUTE_NS // 2 + queue_ns], [ROUTE_NS // 2]])
        now = np.array([self.now_ns])
        self.measured.add(np.zeros(1, np.intp), stamps, np.array([now, now]), now)

    def base(self) -> RememberedBase | None:
        found = list(self.measured.bases(self.now_ns))
        return found[0].base if found else None

    def learn(self, clock: str = "shared") -> None:
        self.start(pinned(clock))
        self.run(30)
        self.memory.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    tmp_path.chmod(0o700)
    return World(tmp_path / "bases.json")


def test_a_successor_begins_with_what_was_known(world: World) -> None:
    world.learn()
    known = world.base()
    assert world.place.stat().st_mode & 0o777 == 0o600
    world.start(pinned())
    assert tuple(world.memory.ports) == PORTS and world.memory.drops() == {"probe_bases_refused": 0}
    now = world.base()
    assert known is not None and now == known and known.floor_ns == ROUTE_NS and known.base_ns == (30_000, 30_000)
    world.run(60, queue_ns=17_000_000)
    (told,) = world.measured.bases(world.now_ns)
    assert told.base.floor_ns == ROUTE_NS and told.base.standing_ns == (17_000_000, 0)


@pytest.mark.parametrize("clocks", [("shared", "probed"), ("probed", "shared"), ("probed", "probed")])
def test_with_clocks_apart_round_trips_alone_are_carried_over(world: World, clocks: tuple[str, str]) -> None:
    world.learn(clocks[0])
    world.start(pinned(clocks[1]))
    known = world.base()
    assert known is not None and known.floor_ns == ROUTE_NS and known.base_ns is None


@pytest.mark.parametrize(
    "after", [pinned(ifindex=3), pinned(source="10.9.0.7"), pinned(onlink=True)], ids=["interface", "source", "on-link"]
)
def test_another_end_of_ours_is_another_route(world: World, after: PinnedPath) -> None:
    world.learn()
    world.start(after)
    known = world.base()
    assert known is not None and known.change is not None and known.change.queued


@pytest.mark.parametrize(("ports", "dscp"), [((40_000,), 0), ((1_025, 40_001), 0), (PORTS, 46)])
def test_other_probes_may_take_another_route(world: World, ports: tuple[int, ...], dscp: int) -> None:
    world.learn()
    world.start(pinned(), ports=ports, dscp=dscp)
    known = world.base()
    assert known is not None and known.change is not None


@pytest.mark.parametrize(("late_s", "changed"), [(5, False), (20, True)])
def test_a_path_that_turns_up_late_was_gone(world: World, late_s: int, changed: bool) -> None:
    """But a drained one is learned of within seconds. Until then it is kept for the next agent, too."""
    world.learn()
    world.start()
    world.run(late_s)
    kept = msgspec.json.decode(world.place.read_bytes())["paths"]
    assert [each["path"]["interface"] for each in kept] == ["rail1"]
    world.measured.set_paths([pinned()], world.now_ns)
    known = world.base()
    assert known is not None and (known.change is not None) == changed


def test_a_path_that_was_gone_at_the_end_may_be_another_route(world: World) -> None:
    world.learn()
    world.measured.set_paths([], world.now_ns)
    world.memory.close()
    world.start(pinned())
    known = world.base()
    assert known is not None and known.change is not None


def test_what_was_known_a_day_ago_is_not_known_any_more(world: World) -> None:
    world.learn()
    world.now_ns += 25 * 3600 * SECOND
    world.start(pinned())
    assert world.base() is None and world.memory.drops() == {"probe_bases_refused": 0}
    world.run(30)
    (known,) = msgspec.json.decode(world.place.read_bytes())["paths"]
    assert known["base"]["since_ns"] > BEGIN_NS + 24 * 3600 * SECOND


def refused(world: World, capfd: pytest.CaptureFixture[str], why: str, scope: str = SCOPE) -> None:
    world.start(pinned(), scope=scope)
    assert world.base() is None and world.memory.drops() == {"probe_bases_refused": 1}
    assert why in capfd.readouterr().err
    world.run(30)
    assert world.base() is not None, "an agent measures without"


def test_a_file_of_another_boot_or_namespace_is_ignored(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.learn()
    refused(world, capfd, "another boot", scope="boot/cookie:2")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_could_have_written_is_ignored(
    world: World, capfd: pytest.CaptureFixture[str], mode: int
) -> None:
    world.learn()
    world.place.chmod(mode)
    refused(world, capfd, "is writable by")


def test_a_file_of_another_user_is_ignored(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    support.require("root")
    world.learn()
    os.chown(world.place, 65534, 65534)
    refused(world, capfd, "belongs to user 65534")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\x00", b"{" * 100_000], ids=range(5))
def test_a_file_that_makes_no_sense_is_ignored(world: World, capfd: pytest.CaptureFixture[str], content: bytes) -> None:
    world.learn()
    world.place.write_bytes(content)
    refused(world, capfd, "ignored")


def test_half_a_file_is_ignored(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.learn()
    world.place.write_bytes(world.place.read_bytes()[:-40])
    refused(world, capfd, "ignored")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("floor_ns", -1),
        ("floor_ns", 1 << 62),
        ("since_ns", 1 << 61),
        ("base_ns", [1 << 63, 0]),
        ("hops", [256, 1]),
        ("standing_ns", [0]),
        ("more", 1),
    ],
)
def test_a_path_that_makes_no_sense_is_ignored(
    world: World, capfd: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    world.learn()
    contents = msgspec.json.decode(world.place.read_bytes())
    contents["paths"][0]["base"][field] = value
    world.place.write_bytes(msgspec.json.encode(contents))
    refused(world, capfd, "ignored")


def test_a_file_that_cannot_be_written_is_said_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    (world.place.parent / "bases.json.new").mkdir()
    world.start(pinned())
    world.run(40)
    assert capfd.readouterr().err.count("not kept") == 1


def test_an_agent_that_never_ran_leaves_the_file_as_it_was(world: World) -> None:
    world.learn()
    before = world.place.read_bytes()
    world.now_ns += SECOND
    world.start(pinned())
    world.memory.close()
    assert world.place.read_bytes() == before
