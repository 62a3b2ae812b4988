"""A lab host's clock in the kernel: stamps are what pytools.lab.clocks says, to the nanosecond."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import packets as p
import pytest
import support
from probe_kit import REDIRECTED, SENDER_PORT, TestRun, request

from pytools.config import AgentConfig
from pytools.errors import UsageError
from pytools.kernel.bpf import loader
from pytools.lab import clocks
from pytools.lab.clocks import VirtualClock, Wander
from pytools.sources.clocks.virtual_clock import VirtualClockSource
from pytools.sources.programs import probes

SECOND = 10**9
KNOT = 1 << clocks.KNOT_SHIFT
FAST = {"drift_ppb": 30_000.7, "wander": Wander(amplitude_ppb=450, seed=3)}
SLOW = {"drift_ppb": -49_999.3, "wander": Wander(amplitude_ppb=450, seed=4)}


class Stamping:
    """The lab build of probe.c, and the file of its clock."""

    def __init__(self, loaded: loader.Loaded, probes: TestRun, path: Path) -> None:
        self.loaded, self.path, self._probes = loaded, path, probes

    def stamp(self, count: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """So many stamps: when the replies came in (t4) by the machine's clock, and by the one that stamps."""
        self._probes.program.read()
        reply = self._probes.remember_probe()
        self._probes.repeat("probe_ingress", p.ipv4(p.udp(reply, p.PORT, SENDER_PORT)), count)
        records = self._probes.program.read()
        assert len(records) == count
        return records["seen_ns"].astype(np.int64), records["t4_ns"].astype(np.int64)

    def reflected(self) -> int:
        """The Receive Timestamp (t2) of a request that is answered now."""
        verdict, left = self._probes.run("probe_ingress", p.ipv4(p.udp(request())))
        assert verdict == REDIRECTED
        seconds, nanoseconds = struct.unpack_from("!II", left, 42 + 16)
        return int(seconds * SECOND + nanoseconds)

    def source(self, clock: VirtualClock) -> VirtualClockSource:
        """What loads this clock."""
        clocks.save(clock, self.path)
        return VirtualClockSource(str(self.path), self.loaded)

    def shows(self, clock: VirtualClock) -> bool:
        """Whether stamps are those of this clock."""
        seen, stamped = self.stamp()
        return bool((stamped == clock.at(seen)).all())


@pytest.fixture(scope="module")
def loaded() -> Iterator[loader.Loaded]:
    support.require("root", "bcc")
    told = AgentConfig(host="h1", peers=[], virtual_clock="somewhere")
    with loader.load([probes(told)]) as programs:
        assert programs.failed == {}
        yield programs


@pytest.fixture(scope="module")
def run(loaded: loader.Loaded, make_lasting_namespace: Callable[[], str]) -> Iterator[TestRun]:
    made = TestRun(loaded, make_lasting_namespace())
    yield made
    made.close()


@pytest.fixture
def stamping(loaded: loader.Loaded, run: TestRun, tmp_path: Path) -> Stamping:
    return Stamping(loaded, run, tmp_path / clocks.FILE)


def test_the_kernel_has_as_many_knots_as_the_lab(loaded: loader.Loaded) -> None:
    assert loaded.map("probe_clock").value["knots"].shape == (clocks.KNOTS,)


def test_an_agent_without_a_clock_stamps_with_the_machines() -> None:
    support.require("root", "bcc")
    with loader.load([probes(AgentConfig(host="h1", peers=[]))]) as programs:
        assert not programs.has_map("probe_clock")


@pytest.mark.parametrize("steps", [(), ((-10, 3_000_007),), ((-10, -9_999_999), (-7, 5), (60, 77))], ids=len)
@pytest.mark.parametrize("offset_ns", [-clocks.MAX_OFFSET_NS, 0, clocks.MAX_OFFSET_NS])
@pytest.mark.parametrize("rate", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("age_ns", [-5 * SECOND, 0, 700 * SECOND, (clocks.KNOTS - 1) * KNOT, 10_000 * SECOND])
def test_stamps_are_what_the_lab_says(
    stamping: Stamping, age_ns: int, rate: dict[str, object], offset_ns: int, steps: tuple[tuple[int, int], ...]
) -> None:
    now_ns = time.monotonic_ns()
    clock = VirtualClock(
        offset_ns=offset_ns,
        origin_ns=max(0, now_ns - age_ns),  # a machine may have started more recently
        steps=tuple(clocks.Step(now_ns + seconds * SECOND, step_ns) for seconds, step_ns in steps),
        **rate,  # type: ignore[arg-type]
    )
    stamping.source(clock)
    seen, stamped = stamping.stamp(2000)
    assert stamped.tolist() == clock.at(seen).tolist()
    assert len(set((stamped - seen).tolist())) >= (2 if age_ns == 700 * SECOND else 1)


@pytest.mark.parametrize("offset_ns", [0, 7, clocks.MAX_OFFSET_NS])
def test_replies_carry_the_clock_too(stamping: Stamping, offset_ns: int) -> None:
    clock = VirtualClock(offset_ns=offset_ns)
    stamping.source(clock)
    before_ns = time.monotonic_ns()
    received_ns = stamping.reflected()
    between = clock.at(np.array([before_ns, time.monotonic_ns()]))
    assert between[0] <= received_ns <= between[1]


@pytest.mark.guest(thorough=True)  # no kernel decides what is added to a stamp
def test_a_step_acts_at_its_very_instant(stamping: Stamping) -> None:
    clock = VirtualClock(offset_ns=5, origin_ns=time.monotonic_ns(), **FAST)  # type: ignore[arg-type]
    source = stamping.source(clock)
    source.tick(time.monotonic_ns())
    at_ns = time.monotonic_ns() + int(SECOND * support.slow_factor() / 2)
    clock = clock.stepped(at_ns, 10_000_000)
    clocks.save(clock, stamping.path)
    source.tick(time.monotonic_ns())

    def past(instant_ns: int) -> bool:
        seen, stamped = stamping.stamp(500)
        assert stamped.tolist() == clock.at(seen).tolist()
        return bool(seen[-1] > instant_ns)

    # Around the step only: an emulated processor has a quarter of a minute to get here, and others need it.
    soon_ns = at_ns - int(SECOND * support.slow_factor() / 20)
    assert past(0)
    support.wait_until(lambda: time.monotonic_ns() > soon_ns, 10, "the step is near", every_s=0.05)
    support.wait_until(lambda: past(at_ns), 10, "the step has passed", every_s=0)
    assert source.drops() == {"virtual_clock_unreadable": 0, "virtual_clock_refused": 0, "virtual_clock_late": 0}


def test_several_steps_follow_each_other(stamping: Stamping) -> None:
    now_ns = time.monotonic_ns()
    clock = VirtualClock(origin_ns=now_ns)
    for number in range(3):
        clock = clock.stepped(now_ns + number * 3 * SECOND // 2, (number + 1) * 1_000_000)
    source = stamping.source(clock)
    due_ns = 0

    def past() -> bool:
        nonlocal due_ns
        if (now_ns := time.monotonic_ns()) >= due_ns:
            due_ns = source.tick(now_ns)
        assert stamping.shows(clock)
        return now_ns > clock.steps[-1].at_ns + SECOND // 10

    support.wait_until(past, 10, "all steps have passed", every_s=0.002)
    assert source.drops()["virtual_clock_late"] == 0


def test_a_step_that_is_told_too_late_is_made_and_counted(stamping: Stamping) -> None:
    clock = VirtualClock(origin_ns=time.monotonic_ns())
    source = stamping.source(clock)
    clock = clock.stepped(time.monotonic_ns() - 1, 10_000_000)
    clocks.save(clock, stamping.path)
    source.tick(time.monotonic_ns())
    assert stamping.shows(clock)
    assert source.drops()["virtual_clock_late"] == 1
    source.tick(time.monotonic_ns())
    assert source.drops()["virtual_clock_late"] == 1


def test_steps_from_before_the_agent_are_not_late(stamping: Stamping) -> None:
    now_ns = time.monotonic_ns()
    clock = VirtualClock(origin_ns=0, steps=(clocks.Step(1, 7), clocks.Step(now_ns // 2 + SECOND, 5)))
    source = stamping.source(clock)
    assert stamping.shows(clock)
    assert source.drops()["virtual_clock_late"] == 0


@pytest.mark.guest
def test_a_new_file_is_loaded_by_the_next_look(stamping: Stamping) -> None:
    first, second = VirtualClock(offset_ns=1000), VirtualClock(offset_ns=-1000)
    source = stamping.source(first)
    now_ns = time.monotonic_ns()
    assert now_ns < source.tick(now_ns) <= now_ns + SECOND // 10
    assert stamping.shows(first)
    clocks.save(second, stamping.path)
    assert stamping.shows(first)
    source.tick(time.monotonic_ns())
    assert stamping.shows(second)


@pytest.mark.parametrize("broken", [b"", b"{", b'{"offset_ns": 5000000000}', b'{"colour": 1}', None])
def test_a_broken_file_leaves_the_clock_as_it_was_and_is_counted_once(stamping: Stamping, broken: bytes | None) -> None:
    clock = VirtualClock(offset_ns=1000)
    source = stamping.source(clock)
    if broken is None:
        stamping.path.unlink()
    else:
        stamping.path.write_bytes(broken)
        os.utime(stamping.path, ns=(1, 1))  # two writes within one tick of the kernel's clock carry the same time
    source.tick(time.monotonic_ns())
    source.tick(time.monotonic_ns())
    assert stamping.shows(clock)
    assert source.drops()["virtual_clock_unreadable"] == 1
    mended = msgspec.structs.replace(clock, offset_ns=2000)
    clocks.save(mended, stamping.path)
    source.tick(time.monotonic_ns())
    assert stamping.shows(mended)
    source.close()


def test_without_a_clock_in_the_file_nothing_begins(stamping: Stamping) -> None:
    with pytest.raises(UsageError) as caught:
        VirtualClockSource(str(stamping.path), stamping.loaded)
    assert str(stamping.path) in caught.value.what
    assert caught.value.next_step
