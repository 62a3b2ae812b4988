"""Operations joined with their kernels, set beside each other by rank, and the rank that the others wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytools.estimators import collectives, stragglers
from pytools.estimators.collectives import FORGOTTEN_NS, OPERATION, SETTLED_NS
from pytools.estimators.stragglers import straggler
from pytools.sources.jobs.nccl.ring import COLLECTIVE, COMMUNICATOR, KERNEL, RECORD

NOW_NS = 10**15
WORLD = np.zeros(1, COMMUNICATOR)
WORLD["serial"], WORLD["hash"], WORLD["rank"], WORLD["ranks"] = 7, 99, 3, 8


def operation(number: int, channels: int = 1, stop_ns: int = NOW_NS, serial: int = 7) -> NDArray[Any]:
    row = np.zeros(1, RECORD)
    for name, value in (("id", number), ("communicator", serial), ("number", number), ("bytes", 1024)):
        row[name] = value
    row["kind"], row["channel"], row["stop_ns"], row["function"] = COLLECTIVE, channels, stop_ns, b"AllReduce"
    return row


def kernel(parent: int, begin: int, end: int, seen_ns: int = NOW_NS) -> NDArray[Any]:
    row = np.zeros(1, RECORD)
    row["kind"], row["parent"], row["communicator"] = KERNEL, parent, 7
    row["gpu_start_ns"], row["gpu_stop_ns"] = begin, end
    row["start_ns"], row["stop_ns"] = seen_ns - 500, seen_ns
    return row


def join(*records: NDArray[Any], now_ns: int = NOW_NS) -> tuple[NDArray[Any], NDArray[Any]]:
    return collectives.join(np.concatenate(records), WORLD, now_ns)


def test_an_operation_lasts_from_its_first_channel_to_its_last() -> None:
    made, rest = join(kernel(1, 100, 300), operation(1, 2), kernel(1, 90, 250), operation(2), kernel(2, 500, 501))
    assert made["duration_ns"].tolist() == [210, 1] and made["kernels"].tolist() == [2, 1]
    assert made["gpu_start_ns"].tolist() == [90, 500] and made["gpu_stop_ns"].tolist() == [300, 501]
    assert (made["hash"] == 99).all() and (made["rank"] == 3).all() and len(rest) == 0


def test_an_operation_says_of_which_sample_it_is() -> None:
    first, second = operation(1), operation(2)
    first["sample"], second["sample"] = 3 << 1, 4 << 1 | 1
    made, _ = join(first, kernel(1, 1, 2), second, kernel(2, 3, 4))
    assert made["sample"].tolist() == [3, 4] and made["sampled"].tolist() == [False, True]
    assert [collectives.summarise(each)[0].sampled for each in (made[:1], made)] == [False, True]


def test_what_is_not_whole_waits_for_the_next_records() -> None:
    made, rest = join(operation(1, 2), kernel(1, 90, 250), kernel(2, 1, 2))
    assert len(made) == 0 and len(rest) == 3
    made, rest = join(rest, kernel(1, 100, 300), operation(2))
    assert made["duration_ns"].tolist() == [210, 1] and len(rest) == 0


def test_an_operation_of_unknown_channels_is_whole_when_no_more_come() -> None:
    made, rest = join(operation(1, 0), kernel(1, 90, 250))
    assert len(made) == 0 and len(rest) == 2
    made, rest = join(rest, kernel(1, 100, 300), now_ns=NOW_NS + SETTLED_NS + 1)
    assert made["duration_ns"].tolist() == [210] and len(rest) == 0


def test_nothing_is_waited_for_without_end() -> None:
    later_ns = NOW_NS + SETTLED_NS + 1
    made, rest = join(operation(1, 2), kernel(1, 90, 250), operation(2), kernel(3, 1, 2), now_ns=later_ns)
    assert made["duration_ns"].tolist() == [160]  # fewer channels than were planned
    assert rest["id"].tolist() == [2]  # its kernel may last for long; one without an operation is given up
    assert len(join(rest, now_ns=NOW_NS + FORGOTTEN_NS + 1)[1]) == 0


def test_without_the_gpus_times_the_hosts_count() -> None:
    made, _ = join(operation(1, 2), kernel(1, 0, 0, NOW_NS - 1000), kernel(1, 90, 250))
    assert made["duration_ns"].tolist() == [1500] and made["gpu_start_ns"].tolist() == [0]


def test_an_operation_of_a_forgotten_communicator_is_left_out() -> None:
    made, rest = join(operation(1, serial=8), kernel(1, 90, 250))
    assert len(made) == 0 and len(rest) == 0


@given(st.permutations(range(12)), st.lists(st.integers(0, 12), max_size=3))
def test_the_order_and_the_cuts_make_no_difference(order: list[int], cuts: list[int]) -> None:
    all_records = [operation(each, 2) for each in range(1, 5)]
    all_records += [
        kernel(each, 100 * each + place, 100 * each + 50 - place) for each in range(1, 5) for place in (0, 1)
    ]
    rest, found = np.empty(0, RECORD), []
    for part in np.split(np.array(order), sorted(cuts)):
        made, rest = join(rest, *(all_records[each] for each in part))
        found += made.tolist()
    whole, none = join(*all_records)
    assert sorted(found) == sorted(whole.tolist()) and len(rest) == len(none) == 0


def operations(durations: NDArray[np.float64], function: bytes = b"AllReduce") -> NDArray[Any]:
    rows, ranks = durations.shape
    made = np.zeros(durations.size, OPERATION)
    made["hash"], made["function"], made["duration_ns"] = 5, function, durations.ravel()
    made["number"], made["rank"] = np.repeat(np.arange(rows), ranks), np.tile(np.arange(ranks), rows)
    made["start_ns"] = np.repeat(np.arange(rows), ranks)
    return made


def test_ranks_are_compared_in_the_collectives_that_all_have() -> None:
    durations = np.arange(12.0).reshape(4, 3)
    made = operations(durations)
    missing, twice = made[made["number"] == 1][:2], made[made["number"] == 2][:1]
    others = [operations(durations, b"Broadcast"), made[made["number"] == 0], made[made["number"] == 3][::-1]]
    ranks, table = collectives.by_rank(np.concatenate([*others, missing, twice, made[made["number"] == 2]]))[0, 5]
    assert ranks.tolist() == [0, 1, 2]
    assert table.tolist() == [durations[0].tolist(), durations[3].tolist()]


def test_the_time_between_collectives_is_known_from_a_sample() -> None:
    made = operations(np.zeros((90, 1)))
    made["start_ns"] *= 1_000
    others = made[::3].copy()
    others["function"], others["number"] = b"AllGather", np.arange(30)
    assert collectives.interval_ns(made) == pytest.approx(1_000)
    for sample in (made, made[(made["number"] % 40) < 10]):  # recorded: 0 to 9, 40 to 49, 80 to 89
        assert collectives.interval_ns(sample) == pytest.approx(1_000)
    assert collectives.interval_ns(np.concatenate([made, others])) == pytest.approx(750)
    assert collectives.interval_ns(made[:1]) == 0
    made["number"] = 0
    assert collectives.interval_ns(made) == pytest.approx(1_000)


def test_no_user_counts_for_another() -> None:
    made = operations(np.arange(12.0).reshape(4, 3))
    forged = made.copy()
    forged["user"], forged["duration_ns"] = 1000, 1e9
    found = collectives.by_rank(np.concatenate([made, forged]))
    assert found[0, 5][1].max() == 11 and found[1000, 5][1].min() == 1e9
    assert [each.user for each in collectives.summarise(np.concatenate([made, forged]))] == [0] * 3 + [1000] * 3


def durations(random: np.random.Generator, late_ns: NDArray[np.float64], count: int, work_ns: float) -> Any:
    """Kernels that end together: each begins when its rank comes, and none ends before the last has begun."""
    comes = random.exponential(5_000, (count, len(late_ns))) + late_ns
    ends = comes.max(axis=1, keepdims=True) + work_ns * random.uniform(0.9, 1.1, (count, 1))
    return ends - comes + random.uniform(0, 1_000, comes.shape)


RANKS = np.arange(8, dtype=np.int32)


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    table = np.column_stack([np.full(20, 2_006_000.0), np.full(20, 3_000.0)])
    found = straggler(np.array([0, 1], np.int32), table)
    assert found == stragglers.Straggler(1, 2_003_000, 2_003_000, 2_003_000, 1.0, 20)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_interval_holds_the_truth(ranks: int) -> None:
    random = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        late = np.zeros(ranks)
        late[ranks - 1] = 400_000
        found = straggler(RANKS[:ranks], durations(random, late, 200, 100_000))
        assert found is not None and found.rank == ranks - 1 and not found.also and found.share > 0.99
        held += (
            found.low_ns <= found.late_ns <= found.high_ns and found.low_ns - 2_000 < 400_000 < found.high_ns + 2_000
        )
    assert held >= 99


@pytest.mark.parametrize("apart", [0, 7, 100])  # how many collectives later each rank begins to record
def test_the_late_rank_is_named_from_a_sample(apart: int) -> None:
    made = operations(durations(np.random.default_rng(8), np.eye(8)[3] * 400_000, 2_000, 100_000))
    since = made["number"].astype(int) % 400 - apart * made["rank"]
    made = made[(since >= 0) & (since < 90)]
    ranks, table = collectives.by_rank(made)[0, 5]
    found = straggler(ranks, table)
    if apart == 100:
        assert len(table) == 0 and found is None  # no collective was recorded by all
        return
    assert len(table) == 5 * (90 - 7 * apart) and found is not None
    assert (found.rank, found.also, found.collectives) == (3, (), len(table))
    assert found.low_ns - 2_000 < 400_000 < found.high_ns + 2_000


def test_several_late_ranks_are_all_told() -> None:
    late = np.array([0, 0, 900_000, 0, 0, 500_000, 0, 0.0])
    found = straggler(RANKS, durations(np.random.default_rng(4), late, 100, 100_000))
    assert found is not None and (found.rank, found.also) == (2, (5,))


@pytest.mark.parametrize("work_ns", [1_000, 30_000_000])
def test_nobody_is_named_without_a_reason(work_ns: float) -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        assert straggler(RANKS, durations(random, np.zeros(8), 40, work_ns)) is None  # also while all kernels are long


def test_now_and_then_is_not_always() -> None:
    random = np.random.default_rng(6)
    table = durations(random, np.zeros(8), 200, 100_000)
    late = durations(random, np.eye(8)[2] * 50_000_000, 200, 100_000)
    table[::40] = late[::40]  # five long pauses of one rank
    assert straggler(RANKS, table) is None


def test_a_step_may_have_many_collectives() -> None:
    random = np.random.default_rng(7)
    table = durations(random, np.zeros(8), 640, 100_000)
    table[::10] = durations(random, np.eye(8)[2] * 2_000_000, 640, 100_000)[::10]
    found = straggler(RANKS, table)
    assert found is not None and found.rank == 2 and found.share == pytest.approx(0.1, abs=0.01)
    assert found.late_ns == pytest.approx(200_000, rel=0.02)  # of each collective, on average


@pytest.mark.parametrize("shape", [(0, 2), (7, 2), (100, 1), (0, 0)])
def test_too_little_names_nobody(shape: tuple[int, int]) -> None:
    assert straggler(RANKS[: shape[1]], np.full(shape, 1_000.0)) is None


@given(st.integers(2, 9), st.randoms())
def test_lateness_is_against_the_middle_of_the_others(width: int, random: Any) -> None:
    row = np.array([[random.choice([1.0, 2.0, 5.0, 9.0, 30.0]) for _ in range(width)]])
    others = [np.median(np.delete(row[0], rank)) for rank in range(width)]
    assert stragglers.lateness(row)[0].tolist() == (np.array(others) - row[0]).tolist()
