"""Why the steps of a job are slow: planted causes, one at a time and together, and what is not "healthy"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import mentions

from pytools.estimators import job_rhythm
from pytools.estimators.collectives import OPERATION
from pytools.estimators.job_causes import LEAST
from pytools.estimators.job_evidence import Evidence, GpuUse, HostUse, Late, PathUse, Range, RankUse
from pytools.estimators.job_rhythm import period, slowdown
from pytools.estimators.job_verdict import SLOW, verdict
from pytools.signals import JobStep, JobVerdict, Path

SECOND: Final = 10**9
MS: Final = 10**6
STEP: Final = JobStep("nccl", 40, 1, 25 * MS, MS, None, 1.0)
BUSY: Final = Range(0.4, 0.35, 0.45)


def rail(number: int, **changes: Any) -> PathUse:
    """A path over one of the rails, with 8 of 16 connections, and nothing wrong."""
    path = Path("h1", "h2", "10.9.0.2", f"10.{number}.1.1", f"rail{number}")
    known = PathUse(
        path,
        path.interface,
        connections=8,
        sent_bytes=80_000_000,
        busy=BUSY,
        segments=10_000,
        queue_ns=200_000,
        queue_bound_ns=5_000,
        round_trip_ns=100_000,
        settled=50,
    )
    return replace(known, **changes)


HEALTHY: Final = Evidence(
    SECOND,
    STEP,
    tuple(RankUse(rank, 0.002, 0.0) for rank in range(4)),
    HostUse(0.001, 800, 0.01),
    (rail(1), rail(2)),
)
CONGESTED: Final = rail(2, busy=Range(0.95, 0.9, 1.0), queue_ns=30 * MS, queue_bound_ns=20_000)
LATE: Final = Late(2, 5e6, 4.5e6, 5.5e6, 25e6, 64)
THROTTLED: Final = RankUse(2, 0.7, 0.7, 100 * MS, "/slurm/job_1/task_2")


def judge(**changes: Any) -> JobVerdict:
    return verdict(replace(HEALTHY, **changes))


def kinds(found: JobVerdict) -> list[str]:
    return [each.kind for each in found.causes]


def with_rank(use: RankUse) -> tuple[RankUse, ...]:
    return tuple(use if each.rank == use.rank else each for each in HEALTHY.ranks)


def test_nothing_planted_is_healthy() -> None:
    found = judge()
    assert (found.verdict, found.causes, found.missing) == ("healthy", [], {})


def test_a_congested_path_is_named_with_its_queue_and_what_it_costs() -> None:
    found = judge(paths=(rail(1), CONGESTED))
    assert kinds(found) == ["network"]
    (cause,) = found.causes
    assert (found.verdict, cause.path, cause.rank) == ("network", CONGESTED.path, None)
    assert cause.share == pytest.approx(0.55)  # 95 % of the time for what takes 40 % on the other one
    assert (cause.low, cause.high) == (pytest.approx(0.45), pytest.approx(0.65))
    assert "queueing delay 30" in found.reason and "on another path 200 µs" in found.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"retransmitted": 400}, "400 of 10,000 segments retransmitted"),
        ({"lost": 10}, "10 of 50 probes lost"),
        ({"lost": 50}, "none of 50 probes answered"),
        ({"queue_ns": 4 * MS}, "queueing delay 4"),
        ({"timeouts": 2, "stalled": Range(0.4, 0.4, 0.6)}, "2 retransmission timeouts"),
        ({"troubled": Range(0.6, 0.5, 0.7), "pairs": 4, "pairs_reason": "4 of 4 queue pairs congested"}, "4 of 4"),
    ],
)
def test_what_shows_that_a_path_is_bad(changes: dict[str, Any], said: str) -> None:
    found = judge(paths=(rail(1), rail(2, **{"busy": Range(0.9, 0.85, 0.95)} | changes)))
    assert found.verdict == "network" and said in found.reason


def test_a_path_that_takes_longer_without_a_sign_of_trouble_is_not_blamed() -> None:
    found = judge(paths=(rail(1), rail(2, busy=Range(0.95, 0.9, 1.0))))
    assert found.verdict == "healthy"


def test_a_queue_that_all_paths_have_is_the_job_s_own() -> None:
    busy = Range(0.9, 0.85, 0.95)
    found = judge(paths=(rail(1, queue_ns=30 * MS, busy=busy), rail(2, queue_ns=30 * MS, busy=busy)))
    assert found.verdict == "healthy"


def test_the_only_path_is_compared_with_what_is_usual() -> None:
    alone = rail(1, busy=Range(0.9, 0.8, 1.0), queue_ns=9 * MS)
    assert judge(paths=(alone,)).verdict == "healthy"  # nothing to compare with
    assert judge(paths=(replace(alone, usual_queue_ns=8_500_000),)).verdict == "healthy"
    found = judge(paths=(replace(alone, usual_queue_ns=MS),))
    assert found.verdict == "network" and "usually 1" in found.reason
    assert found.causes[0].share == pytest.approx(0.9 * 8 / 9.1)


def test_connections_that_hash_badly_are_named_and_not_called_a_congested_path() -> None:
    worst = rail(1, connections=11, sent_bytes=110_000_000, busy=Range(0.9, 0.85, 0.95), queue_ns=12 * MS)
    other = rail(2, connections=5, sent_bytes=50_000_000, busy=Range(0.41, 0.39, 0.43))
    found = judge(paths=(worst, other))
    assert kinds(found) == ["imbalance"] and found.causes[0].path == worst.path
    assert found.causes[0].share == pytest.approx(0.9 * 3 / 11)  # 8 instead of 11
    assert "11:5; 8 would be even" in found.reason


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"connections": 8}, {"connections": 7, "sent_bytes": 70_000_000}),  # as even as it can be
        ({"connections": 11, "sent_bytes": 110_000_000}, {"connections": 5, "sent_bytes": 50_000_000, "steered": True}),
        ({"connections": 11, "sent_bytes": 110_000_000}, {"connections": 5, "sent_bytes": 50_000_000, "lost": 50}),
        ({"connections": 11, "sent_bytes": 110_000_000, "busy": None}, {"connections": 5, "sent_bytes": 50_000_000}),
    ],
)
def test_where_an_even_placing_is_no_aim_nothing_is_uneven(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert "imbalance" not in kinds(judge(paths=(rail(1, **first), rail(2, **second))))


def test_a_late_rank_is_named_with_its_share_of_a_step() -> None:
    found = judge(late=LATE)
    (cause,) = found.causes
    assert (found.verdict, cause.kind, cause.rank, cause.path) == ("straggler", "straggler", 2, None)
    assert (cause.share, cause.low, cause.high) == (0.2, 0.18, 0.22)


def test_a_throttled_rank_is_the_host_s_and_its_lateness_follows() -> None:
    assert kinds(judge(ranks=with_rank(THROTTLED))) == ["host"]
    found = judge(ranks=with_rank(THROTTLED), late=LATE)
    assert kinds(found) == ["host", "straggler"] and found.causes[0].rank == 2
    assert mentions(found.reason, "/slurm/job_1/task_2", "throttled", "700 ms")
    # It explains less than the lateness, and still is what makes it late.
    some = replace(THROTTLED, waited=0.15, throttled=0.0)
    assert kinds(judge(ranks=with_rank(some), late=LATE)) == ["host", "straggler"]
    other = replace(THROTTLED, rank=1, waited=0.15, throttled=0.0)
    assert kinds(judge(ranks=with_rank(other), late=LATE)) == ["straggler", "host"]


def test_what_a_window_cannot_tell_from_its_edges_is_no_cause() -> None:
    assert judge(ranks=with_rank(RankUse(2, 0.05, 0.12, 100 * MS, "/a"))).verdict == "healthy"
    assert judge(host=HostUse(0.2, 8, None)).verdict == "healthy"  # 2 ticks of 8 are nothing
    found = judge(host=HostUse(0.2, 800, None))
    assert found.verdict == "host" and found.causes[0].rank is None and "steal" in found.reason


def gpus(**changes: Any) -> tuple[GpuUse, ...]:
    """Of four ranks; changes are of that of rank 2."""
    return tuple(
        replace(GpuUse(rank, rank, 1980, 1980, 0.97), **(changes if rank == 2 else {}))  # type: ignore[arg-type]
        for rank in range(4)
    )


def test_a_slow_gpu_is_named_by_its_clock_and_what_holds_it() -> None:
    assert judge(gpus=gpus()).verdict == "healthy"
    found = judge(gpus=gpus(clock_mhz=990, throttled={"hw_thermal": 1.0}), late=LATE)
    assert kinds(found) == ["gpu", "straggler"] and found.causes[0].rank == 2
    assert found.causes[0].share == pytest.approx(0.5)
    assert mentions(found.reason, "990 MHz", "others", "1980 MHz", "hw_thermal")
    assert judge(gpus=gpus(clock_mhz=345, utilization=0.0)).verdict == "healthy"  # idle


def test_the_only_gpu_is_compared_with_its_maximum_only_where_something_holds_it() -> None:
    alone = GpuUse(0, 0, 1200, 1980, 0.97)
    assert judge(gpus=(alone,)).verdict == "healthy"  # a power cap is usual
    assert judge(gpus=(replace(alone, throttled={"sw_power_cap": 1.0}),)).verdict == "healthy"
    found = judge(gpus=(replace(alone, throttled={"application_clocks": 1.0}),))
    assert found.verdict == "gpu" and mentions(found.reason, "maximum", "1980 MHz", "application_clocks")


def test_faults_of_a_gpu_count_where_its_rank_is_late() -> None:
    faulty = gpus(faults={"uncorrected ECC errors": 2, "PCIe replays": 3})
    assert judge(gpus=faulty).verdict == "healthy"
    found = judge(gpus=faulty, late=LATE)
    assert kinds(found) == ["gpu", "straggler"] and found.causes[0].share == LATE.late_ns / LATE.interval_ns
    assert found.reason.endswith("2 uncorrected ECC errors")


def test_of_two_causes_the_one_that_explains_more_counts_and_both_are_listed() -> None:
    both = judge(paths=(rail(1), CONGESTED), late=LATE)
    assert kinds(both) == ["network", "straggler"] and both.verdict == "network"
    worse = judge(paths=(rail(1), CONGESTED), late=replace(LATE, late_ns=2e7, low_ns=1.9e7, high_ns=2.1e7))
    assert kinds(worse) == ["straggler", "network"] and worse.verdict == "straggler"


@pytest.mark.parametrize("sensor", ["rhythm", "ranks", "network", "host", "gpu"])
def test_what_was_not_measured_is_said_and_is_never_healthy(sensor: str) -> None:
    found = judge(missing={sensor: "it is not there"})
    assert found.verdict == "unknown" and f"{sensor} not measured: it is not there" in found.reason
    named = judge(missing={sensor: "it is not there"}, late=LATE)
    assert named.verdict == "straggler" and named.missing == {sensor: "it is not there"}


def test_without_steps_or_with_slow_ones_that_nothing_explains_it_is_unknown() -> None:
    assert judge(step=None).verdict == "unknown" and "rhythm" in judge(step=None).missing
    slow = JobStep("nccl", 40, 1, 50 * MS, MS, None, SLOW)
    assert judge(step=slow).verdict == "unknown" and "1.25 times" in judge(step=slow).reason


def _range(first: float, second: float, third: float) -> Range:
    low, value, high = sorted((first, second, third))
    return Range(value, low, high)


SHARES = st.floats(0, 1)
PATHS = st.builds(
    rail,
    st.integers(1, 4),
    connections=st.integers(0, 20),
    sent_bytes=st.integers(0, 10**9),
    busy=st.none() | st.builds(_range, SHARES, SHARES, SHARES),
    retransmitted=st.integers(0, 10_000),
    timeouts=st.integers(0, 9),
    queue_ns=st.none() | st.integers(0, 10**8),
    usual_queue_ns=st.none() | st.integers(0, 10**8),
    lost=st.integers(0, 50),
)
EVIDENCE = st.builds(
    Evidence,
    st.just(SECOND),
    st.none() | st.just(STEP),
    st.lists(
        st.builds(RankUse, st.integers(0, 3), st.none() | SHARES, st.none() | SHARES, st.just(100 * MS)), max_size=4
    ).map(tuple),
    st.none() | st.builds(HostUse, st.none() | SHARES, st.integers(0, 10_000), st.none() | SHARES),
    st.lists(PATHS, max_size=4).map(tuple),
    st.none()
    | st.builds(
        Late, st.integers(0, 3), st.just(5e6), st.floats(0, 5e6), st.floats(5e6, 1e8), st.floats(0, 1e8), st.just(20)
    ),
    st.lists(
        st.builds(
            GpuUse,
            st.integers(0, 3),
            st.integers(0, 3),
            st.none() | st.integers(0, 2000),
            st.none() | st.integers(0, 2000),
            st.none() | SHARES,
        ),
        max_size=4,
    ).map(tuple),
    st.dictionaries(st.sampled_from(["ranks", "network", "host", "gpu"]), st.just("no"), max_size=2),
)


@pytest.mark.parametrize("other_mhz", [1, 10, 15])
def test_a_clock_below_its_own_error_is_compared_with_nothing(other_mhz: int) -> None:
    gpus = (GpuUse(0, 0, 1, None, None), GpuUse(1, 1, other_mhz, None, None))
    assert judge(gpus=gpus).causes == []


@given(EVIDENCE)
def test_whatever_is_known_the_verdict_follows_from_its_causes(evidence: Evidence) -> None:
    found = verdict(evidence)
    for each in found.causes:
        assert (
            LEAST <= each.low <= 1 and 0 <= each.low <= each.high <= 1 and each.low <= each.share + 1e-9 and each.reason
        )
    if found.causes:
        assert found.verdict == found.causes[0].kind and found.reason == found.causes[0].reason
    else:
        assert found.verdict in ("healthy", "unknown")
    assert (found.verdict == "healthy") <= (not evidence.missing and evidence.step is not None)
    assert found.missing.keys() >= evidence.missing.keys()
    assert verdict(evidence) == found


def operations(kinds: list[tuple[bytes, int]], interval_ns: int, jitter: int = 0) -> Any:
    made = np.zeros(len(kinds), OPERATION)
    made["function"], made["bytes"] = [each[0] for each in kinds], [each[1] for each in kinds]
    random = np.random.default_rng(7)
    made["start_ns"] = SECOND + np.arange(len(kinds)) * interval_ns + random.integers(0, jitter + 1, len(kinds))
    return made


def test_a_step_is_what_repeats() -> None:
    step = [(b"AllReduce", 1 << 20), (b"AllReduce", 1 << 20), (b"AllGather", 64)]
    found = job_rhythm.steps(operations(step * 20, 10 * MS, MS))
    assert found is not None and (found.operations, found.count) == (3, 19)
    assert abs(found.duration_ns - 30 * MS) <= MS and found.bound_ns is not None and 0 < found.bound_ns <= MS
    alike = job_rhythm.steps(operations([step[0]] * 5, MS))
    assert alike is not None and (alike.operations, alike.count, alike.duration_ns, alike.bound_ns) == (1, 4, MS, None)
    assert job_rhythm.steps(operations([(b"AllReduce", size) for size in range(50)], MS)) is None
    assert job_rhythm.steps(operations(step[:1], MS)) is None


def test_a_step_is_seen_within_a_sample_only() -> None:
    made = operations([(b"AllReduce", size) for size in range(30)] * 40, MS)
    made["sample"] = np.arange(len(made)) // 200
    made = made[np.arange(len(made)) % 200 < 70]  # the first 70 of 200
    found = job_rhythm.steps(made)
    assert found is not None and (found.operations, found.count, found.duration_ns) == (30, 2, 30 * MS)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(3, 6))
def test_a_pattern_that_is_repeated_is_found_no_longer_than_it_is(pattern: list[int], times: int) -> None:
    found = period(pattern * times)
    assert found is not None and found <= len(pattern)


def test_slower_than_usual_is_told_once_it_is_known_what_is_usual() -> None:
    assert slowdown(2.0, [1.0] * (job_rhythm.USUAL - 1)) is None
    assert slowdown(3.0, [1.0] * 10 + [2.0] * 25) == 1.5
    assert slowdown(3.0, [0.0] * 40) is None
