"""Clocks of lab hosts: the same integers as bpf/lib/clock.h, within their limits, there and back through a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytools.errors import UsageError
from pytools.lab import clocks, timekeeping
from pytools.lab.clocks import Step, VirtualClock, Wander, draw, offset_between
from pytools.lab.topology import Spec

SECOND = 10**9
ORIGIN = 5_000 * SECOND
END = ORIGIN + clocks.KNOTS * 2**30

wanders = st.builds(
    Wander,
    amplitude_ppb=st.floats(0, 5_000),
    period_s=st.floats(10, 10_000),
    walk_ppb=st.floats(0, 100),
    seed=st.integers(0, 2**32),
)
instants = st.integers(0, END + 100 * SECOND)


@st.composite
def virtual_clocks(draw_from: st.DrawFn) -> VirtualClock:
    times = sorted(draw_from(st.sets(st.integers(0, END // (2 * SECOND)), max_size=4)))
    sizes = st.integers(-clocks.MAX_STEP_NS, clocks.MAX_STEP_NS)
    return VirtualClock(
        offset_ns=draw_from(st.integers(-SECOND, SECOND)),
        drift_ppb=draw_from(st.floats(-50_000, 50_000)),
        wander=draw_from(wanders),
        origin_ns=draw_from(st.integers(0, 2 * ORIGIN)),
        steps=tuple(Step(2 * SECOND * each, draw_from(sizes)) for each in times),
    )


def as_the_kernel_does(clock: VirtualClock, loaded_ns: int, now: int) -> int:
    """bpf/lib/clock.h, line by line, on what was loaded at one moment; Python's integers neither wrap nor round."""
    knots = [int(knot) for knot in clock.knots()]
    offset, step = clock.loaded_at(loaded_ns)
    age = now - clock.origin_ns
    knot = age >> 30
    if now < clock.origin_ns:
        ahead = knots[0]
    elif knot >= 4095:
        ahead = knots[4095]
    else:
        ahead = knots[knot] + ((knots[knot + 1] - knots[knot]) * (age & (2**30 - 1)) >> 30)
    if now >= step.at_ns:
        ahead += step.step_ns
    return now + offset + ahead


@given(virtual_clocks(), instants)
@example(VirtualClock(drift_ppb=-50_000, origin_ns=ORIGIN), ORIGIN - 1)
@example(VirtualClock(drift_ppb=-50_000, origin_ns=ORIGIN), ORIGIN + 1)
@example(VirtualClock(drift_ppb=50_000, origin_ns=ORIGIN), END - 2**30 - 1)
@example(VirtualClock(drift_ppb=50_000, origin_ns=ORIGIN), END)
def test_a_clock_shows_what_the_kernel_computes(clock: VirtualClock, now_ns: int) -> None:
    assert int(clock.at(now_ns)) == as_the_kernel_does(clock, now_ns, now_ns)


@given(virtual_clocks(), instants, st.integers(0, SECOND))
def test_what_was_loaded_before_a_step_holds_until_long_after_it(
    clock: VirtualClock, loaded_ns: int, later_ns: int
) -> None:
    """The agent has a second or more, the least time between steps, to load the next one."""
    now_ns = loaded_ns + later_ns
    assert int(clock.at(now_ns)) == as_the_kernel_does(clock, loaded_ns, now_ns)


@given(virtual_clocks(), st.lists(instants, min_size=1, max_size=20))
def test_many_instants_at_once_give_what_each_gives_alone(clock: VirtualClock, at_ns: list[int]) -> None:
    assert clock.at(at_ns).tolist() == [int(clock.at(each)) for each in at_ns]
    assert clock.at(at_ns).dtype == np.int64


@given(virtual_clocks(), instants)
def test_the_way_back_is_the_instant_of_the_time_shown(clock: VirtualClock, now_ns: int) -> None:
    shown = int(clock.at(now_ns))
    back = int(clock.when(shown))
    if back == now_ns:
        return
    at_a_step = any(step.at_ns in (back, now_ns) for step in clock.steps)
    assert at_a_step or abs(int(clock.at(back)) - shown) <= 1
    assert back >= now_ns - 2, "of a time shown twice, the later instant is meant"


def test_the_way_back_across_steps() -> None:
    forward = VirtualClock(steps=(Step(ORIGIN, 1000),))
    assert forward.when([ORIGIN - 1, ORIGIN, ORIGIN + 999, ORIGIN + 1000]).tolist() == [
        *(ORIGIN - 1, ORIGIN, ORIGIN, ORIGIN)
    ]
    back = VirtualClock(steps=(Step(ORIGIN, -1000),))
    assert back.when([ORIGIN - 1001, ORIGIN - 1000, ORIGIN - 1]).tolist() == [ORIGIN - 1001, ORIGIN, ORIGIN + 999]


def test_drift_is_what_a_clock_gains() -> None:
    clock = VirtualClock(drift_ppb=30_000, origin_ns=ORIGIN)
    assert int(clock.at(ORIGIN + 1000 * SECOND)) - ORIGIN - 1000 * SECOND == pytest.approx(30_000_000, abs=2)
    assert clock.drift_at([ORIGIN - 1, ORIGIN, ORIGIN + 500 * SECOND]) == pytest.approx([0, 30_000, 30_000], abs=1)
    assert clock.drift_at(END + SECOND) == 0


def test_drawn_clocks_wander_within_the_stated_limits() -> None:
    for clock in draw(40, 7, ORIGIN):
        gained = np.diff(clock.knots()) / (2**30 / SECOND) - clock.drift_ppb
        assert 250 < np.abs(gained).max() < 650
        changes = np.abs(np.diff(gained)) / (2**30 / SECOND)
        rounding = 2.0  # knots are whole nanoseconds
        assert 5 < np.quantile(changes, 0.99) < 10 + rounding
        assert changes.max() < 12 + rounding


def test_a_seed_draws_the_same_clocks_again_and_another_seed_others() -> None:
    assert draw(5, 1, ORIGIN) == draw(5, 1, ORIGIN)
    assert draw(5, 1, ORIGIN) != draw(5, 2, ORIGIN)
    drawn = draw(200, 3, ORIGIN)
    assert len({clock.offset_ns for clock in drawn}) == 200
    assert max(abs(clock.offset_ns) for clock in drawn) > 900_000_000
    assert 29_000 < max(abs(clock.drift_ppb) for clock in drawn) <= 30_000


def test_hosts_that_share_an_oscillator_keep_their_distance_and_others_do_not() -> None:
    first, second, third, fourth = draw(4, 1, ORIGIN, shared=[[1, 3], [2]])
    times = ORIGIN + np.arange(0, 3600, 10) * SECOND
    assert len(set(offset_between(first, third, times).tolist())) == 1
    for one, other in ((first, second), (first, fourth), (second, fourth)):
        assert len(set(offset_between(one, other, times).tolist())) > 300
    assert first.offset_ns != third.offset_ns


@pytest.mark.parametrize("shared", [[[1, 1]], [[1, 2], [2, 3]], [[0, 1]], [[1, 5]]])
def test_a_host_that_is_not_there_or_shares_twice_is_refused(shared: list[list[int]]) -> None:
    with pytest.raises(UsageError) as caught:
        draw(4, 1, ORIGIN, shared)
    assert caught.value.next_step


@given(virtual_clocks(), virtual_clocks(), instants)
def test_swapping_two_clocks_flips_their_offset(a: VirtualClock, b: VirtualClock, now_ns: int) -> None:
    assert int(offset_between(a, b, now_ns)) == -int(offset_between(b, a, now_ns))
    assert int(offset_between(a, b, now_ns)) == int(b.at(now_ns)) - int(a.at(now_ns))


@pytest.mark.parametrize(
    "make",
    [
        lambda: VirtualClock(offset_ns=SECOND + 1),
        lambda: VirtualClock(offset_ns=-SECOND - 1),
        lambda: VirtualClock(drift_ppb=50_001),
        lambda: VirtualClock(drift_ppb=float("nan")),
        lambda: VirtualClock(origin_ns=-1),
        lambda: Wander(amplitude_ppb=-1),
        lambda: Wander(period_s=0),
        lambda: Wander(walk_ppb=float("inf")),
        lambda: Wander(seed=-1),
        lambda: Step(ORIGIN, clocks.MAX_STEP_NS + 1),
        lambda: Step(-1, 0),
        lambda: VirtualClock(steps=(Step(ORIGIN, 1), Step(ORIGIN + SECOND - 1, 1))),
        lambda: VirtualClock(steps=(Step(ORIGIN, 1), Step(ORIGIN - 2 * SECOND, 1))),
        lambda: VirtualClock().stepped(ORIGIN, 1).stepped(ORIGIN, 1),
        lambda: draw(2, -1, ORIGIN),
    ],
)
def test_what_does_not_fit_is_refused_with_a_next_step(make: object) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.next_step


@given(virtual_clocks())
def test_a_clock_survives_its_file(tmp_path_factory: pytest.TempPathFactory, clock: VirtualClock) -> None:
    path = tmp_path_factory.mktemp("clock") / clocks.FILE
    clocks.save(clock, path)
    assert clocks.load(path) == clock
    assert [each.name for each in path.parent.iterdir()] == [clocks.FILE]


@pytest.mark.parametrize("text", ["", "{", '{"offset_ns": "x"}', '{"colour": 1}', '{"drift_ppb": 1e6}', "[]"])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / clocks.FILE
    path.write_text(text)
    with pytest.raises(UsageError):
        clocks.load(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / clocks.FILE
    clocks.save(VirtualClock(offset_ns=1), path)

    def fails(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no"):
        clocks.save(VirtualClock(offset_ns=2), path)
    assert clocks.load(path).offset_ns == 1
    assert [each.name for each in tmp_path.iterdir()] == [clocks.FILE]


def test_a_step_is_announced_ahead_of_its_time_and_never_too_close_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    host = Spec("x").topology[0][1]
    with pytest.raises(UsageError, match="no clock of its own"):
        timekeeping.step(host, 1)
    timekeeping.file_of(host).parent.mkdir()
    clocks.save(VirtualClock(), timekeeping.file_of(host))
    monkeypatch.setattr(timekeeping.time, "monotonic_ns", lambda: ORIGIN)
    first = timekeeping.step(host, 10_000_000)
    second = timekeeping.step(host, -5)
    assert first >= ORIGIN + SECOND // 10
    assert second >= first + clocks.STEP_APART_NS
    assert timekeeping.clock_of(host).steps == (Step(first, 10_000_000), Step(second, -5))


def test_the_truth_is_shown_against_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    hosts = Spec("x", hosts=2).topology[0]
    for host, clock in zip(hosts, draw(2, 4, ORIGIN), strict=True):
        timekeeping.file_of(host).parent.mkdir()
        clocks.save(clock, timekeeping.file_of(host))
    monkeypatch.setattr(timekeeping.time, "monotonic_ns", lambda: ORIGIN + 100 * SECOND)
    shown = timekeeping.show(hosts)
    a, b = draw(2, 4, ORIGIN)
    assert shown["clocks"][0]["offset_ns"] == 0
    assert shown["clocks"][1]["offset_ns"] == int(offset_between(a, b, ORIGIN + 100 * SECOND))
    assert shown["clocks"][1]["drift_ppb"] == pytest.approx(b.drift_ppb - a.drift_ppb, abs=1000)
    assert msgspec.json.decode(msgspec.json.encode(shown)) == shown


@pytest.mark.parametrize(
    ("text", "ns"), [("10ms", 10_000_000), ("-250us", -250_000), ("1.5s", 1_500_000_000), ("7ns", 7)]
)
def test_durations_are_read(text: str, ns: int) -> None:
    assert timekeeping.parse_shift(text) == ns


@pytest.mark.parametrize("text", ["", "10", "ms", "1 ms", "1e3ns", "one"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        timekeeping.parse_shift(text)


def test_there_must_be_a_clock_for_each_host() -> None:
    with pytest.raises(UsageError, match="1 clocks for 2 hosts"):
        timekeeping.wanted(2, [VirtualClock()])
    assert timekeeping.wanted(2, None) is None
    assert len(timekeeping.wanted(3, 7) or []) == 3
