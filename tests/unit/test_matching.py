"""The join of samples, judged by slow and obvious code, and by streams whose truth is known."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators import matching
from pytools.estimators.distributions import by_group
from pytools.estimators.matching import FRESH, JOINED, SPOILED, STALE, Side, join, on_grid, positions
from pytools.estimators.windows import MISSING

TURN = 1 << 32


class Row(NamedTuple):
    flow: int
    key: int
    stream: bool
    known_ns: int
    fate: int
    pair: int = 0


def side(rows: list[Row]) -> Side:
    columns = list(zip(*rows, strict=True)) if rows else [[]] * 6
    kinds = (np.int64, np.uint64, np.bool_, np.int64, np.uint8, np.int64)
    return Side(*(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)))


def walked(rows: list[Row]) -> list[int]:
    """Positions by following each stream from sample to sample."""
    last: dict[int, int] = {}
    found = []
    for row in rows:
        place = row.key
        if row.stream and row.flow in last:
            ahead = (row.key - last[row.flow]) % TURN
            place = last[row.flow] + (ahead if ahead < TURN // 2 else ahead - TURN)
        last[row.flow] = place
        found.append(place)
    return found


def joined_slowly(near: list[Row], far: list[Row]) -> tuple[list[int], list[int], set[tuple[int, int]]]:
    fates = []
    for rows in (near, far):
        often = Counter((row.flow, place) for row, place in zip(rows, walked(rows), strict=True))
        fates.append(
            [
                SPOILED if row.fate == FRESH and often[row.flow, place] > 1 else row.fate
                for row, place in zip(rows, walked(rows), strict=True)
            ]
        )
    apart: dict[int, int] = {}
    for pair in range(1, 9):
        here, there = ([i for i, row in enumerate(rows) if row.stream and row.pair == pair] for rows in (near, far))
        if here and there:
            apart[near[here[0]].flow] = walked(far)[there[0]] - walked(near)[here[0]]
    near_names, far_names = (
        [
            (row.flow, place - shift * apart[row.flow] if row.stream and row.flow in apart else row.key)
            for row, place in zip(rows, walked(rows), strict=True)
        ]
        for rows, shift in ((near, 0), (far, 1))
    )
    pairs = set()
    for name in set(near_names + far_names):
        here, there = ([i for i, each in enumerate(names) if each == name] for names in (near_names, far_names))
        left = [near[i].known_ns for i in here if fates[0][i] == FRESH]
        for j in there:
            if left and fates[1][j] == FRESH and far[j].known_ns < min(left):
                fates[1][j] = STALE
        spoiled = any(fates[0][i] == SPOILED for i in here) or any(fates[1][j] == SPOILED for j in there)
        fresh_here = [i for i in here if fates[0][i] == FRESH]
        fresh_there = [j for j in there if fates[1][j] == FRESH]
        if len(fresh_here) == len(fresh_there) == 1 and not spoiled:
            pairs.add((fresh_here[0], fresh_there[0]))
            fates[0][fresh_here[0]] = fates[1][fresh_there[0]] = JOINED
        elif spoiled or (fresh_here and fresh_there):
            for i in fresh_here:
                fates[0][i] = SPOILED
            for j in fresh_there:
                fates[1][j] = SPOILED
    return fates[0], fates[1], pairs


def rows_of(flow: int) -> st.SearchStrategy[Row]:
    """Of one flow: even ones are streams, odd ones datagrams."""
    stream = flow % 2 == 0
    keys = st.integers(0, 7).map(lambda n: n << 29) if stream else st.sampled_from([0, 1 << 63, (1 << 64) - 1])
    fates = st.sampled_from([FRESH, FRESH, JOINED, SPOILED])
    return st.builds(Row, st.just(flow), keys, st.just(stream), st.integers(0, 3), fates, st.just(0))


sides = st.lists(st.integers(0, 2).flatmap(rows_of), max_size=12)


def paired(near: list[Row], far: list[Row]) -> tuple[list[Row], list[Row]]:
    """Number the joined ones, flow by flow, as long as there are some at both sides."""
    near, far, pair = list(near), list(far), 0
    for i, row in enumerate(near):
        partners = [
            j for j, other in enumerate(far) if other.flow == row.flow and other.fate == JOINED and not other.pair
        ]
        if row.fate == JOINED and partners and pair < 8:
            pair += 1
            near[i], far[partners[0]] = row._replace(pair=pair), far[partners[0]]._replace(pair=pair)
    return near, far


@given(sides, sides)
def test_join_is_what_slow_code_finds(near: list[Row], far: list[Row]) -> None:
    near, far = paired(near, far)
    result = join(side(near), side(far))
    near_fate, far_fate, pairs = joined_slowly(near, far)
    assert result.near_fate.tolist() == near_fate
    assert result.far_fate.tolist() == far_fate
    assert set(zip(result.near.tolist(), result.far.tolist(), strict=True)) == pairs


@pytest.mark.slow
@given(sides, sides, st.integers(1, 3))
def test_names_of_the_same_hash_are_told_apart(near: list[Row], far: list[Row], bits: int) -> None:
    near, far = paired(near, far)
    expected = join(side(near), side(far))
    with mock.patch.object(matching, "_HASH_BITS", bits):
        result = join(side(near), side(far))
    assert [column.tolist() for column in result] == [column.tolist() for column in expected]


@given(sides)
def test_positions_follow_the_stream(rows: list[Row]) -> None:
    expected = [place - (1 << 64) if place >= 1 << 63 else place for place in walked(rows)]
    assert positions(side(rows)).tolist() == expected


class Sent(NamedTuple):
    """One packet with a byte to sample: how far after the one before, what becomes of it."""

    step: int
    again: bool  # sent a second time, three packets later
    lost: bool
    lost_again: bool
    twice: bool  # the network delivers it twice


@given(st.lists(st.builds(Sent, st.integers(1, 6), *[st.booleans()] * 4), max_size=60), st.integers(0, 15))
def test_whatever_is_joined_is_the_same_transmission(sent: list[Sent], start: int) -> None:
    """Steps of 2^28 bytes, so that a stream of sixty wraps several times."""
    near: list[tuple[Row, int]] = []
    far: list[tuple[Row, int]] = []
    place, clean = start << 28, set()
    pending: list[tuple[int, int, bool]] = []  # when to send again

    def transmit(place: int, lost: bool, twice: bool) -> None:
        uid = len(near)
        row = Row(0, place % TURN, True, uid, FRESH)
        near.append((row, uid))
        if not lost:
            far.extend([(row, uid)] * (2 if twice else 1))

    for number, packet in enumerate(sent):
        place += packet.step << 28
        if not packet.again and not packet.lost and not packet.twice:
            clean.add(len(near))
        transmit(place, packet.lost, packet.twice)
        if packet.again:
            pending.append((number + 3, place, packet.lost_again))
        while pending and pending[0][0] <= number:
            _, earlier, lost = pending.pop(0)
            transmit(earlier, lost, False)
    result = join(side([row for row, _ in near]), side([row for row, _ in far]))
    pairs = [(near[i][1], far[j][1]) for i, j in zip(result.near.tolist(), result.far.tolist(), strict=True)]
    assert all(here == there for here, there in pairs)
    keys = Counter(row.key for row, _ in near)
    sure = {uid for uid in clean if keys[near[uid][0].key] == 1}
    assert sure <= {here for here, _ in pairs}
    repeated = {uid for row, uid in near if keys[row.key] > 1}
    assert not repeated & {here for here, _ in pairs}, "not to be told apart within what is remembered"


@given(sides, sides, st.permutations(range(3)))
def test_numbering_the_flows_otherwise_changes_nothing(near: list[Row], far: list[Row], order: list[int]) -> None:
    def renamed(rows: list[Row]) -> Side:
        return side([row._replace(flow=order[row.flow]) for row in rows])

    one, other = join(side(near), side(far)), join(renamed(near), renamed(far))
    assert one.near_fate.tolist() == other.near_fate.tolist()
    assert one.far_fate.tolist() == other.far_fate.tolist()


def test_nothing_joins_with_nothing() -> None:
    result = join(side([]), side([]))
    assert len(result.near) == len(result.far) == len(result.near_fate) == len(result.far_fate) == 0


def test_a_later_repetition_does_not_undo_a_join() -> None:
    stream = Row(0, 5 << 20, True, 0, JOINED)
    again = Row(0, 5 << 20, True, 9, FRESH)
    result = join(side([stream, again]), side([stream, again]))
    assert result.near_fate.tolist() == result.far_fate.tolist() == [JOINED, SPOILED]
    assert len(result.near) == 0


def test_the_same_number_a_turn_later_is_another_byte() -> None:
    keys = [(n << 28) % TURN for n in range(17)]  # the last equals the first
    near = [Row(0, key, True, n, JOINED if n < 16 else FRESH) for n, key in enumerate(keys)]
    far = [row._replace(known_ns=row.known_ns + 1) for row in near]
    result = join(side(near), side(far))
    assert (result.near.tolist(), result.far.tolist()) == ([16], [16])


def test_what_spoiled_a_byte_does_not_spoil_the_one_a_turn_later() -> None:
    keys = [(n << 28) % TURN for n in range(17)]
    near = [Row(0, key, True, n, JOINED if n < 16 else FRESH, n) for n, key in enumerate(keys)]
    far = [row._replace(known_ns=row.known_ns + 1) for row in near]
    near[0] = near[0]._replace(fate=SPOILED, pair=0)
    far[0] = near[0]._replace(known_ns=1)
    near[16] = near[16]._replace(pair=0)
    far[16] = near[16]._replace(known_ns=17)
    result = join(side(near), side(far))
    assert (result.near.tolist(), result.far.tolist()) == ([16], [16])


def test_what_arrived_before_it_left_is_of_an_earlier_turn() -> None:
    near, far = [Row(0, 7, True, 10, FRESH)], [Row(0, 7, True, 9, FRESH)]
    result = join(side(near), side(far))
    assert (result.near_fate.tolist(), result.far_fate.tolist()) == ([FRESH], [STALE])


@given(st.lists(st.integers(0, (1 << 64) - 1)), st.integers(0, 63))
def test_keys_on_a_grid_are_its_multiples(keys: list[int], rate: int) -> None:
    expected = [key % (1 << rate) == 0 for key in keys]
    assert on_grid(np.array(keys, np.uint64), rate).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-(10**15), 10**15)), max_size=60))
def test_percentiles_of_groups_are_numpys_inverted_distribution(rows: list[tuple[int, int]]) -> None:
    group, values = (np.array([row[place] for row in rows], np.int64) for place in (0, 1))
    found = by_group(values, group, 4, (1, 50, 99, 100))
    for each in range(4):
        own = values[group == each]
        assert found.counts[each] == len(own)
        if not len(own):
            assert found.minimum[each] == MISSING
            assert (found.percentiles[:, each] == MISSING).all()
            continue
        assert found.minimum[each] == own.min()
        expected = np.percentile(own, (1, 50, 99, 100), method="inverted_cdf")
        assert found.percentiles[:, each].tolist() == expected.tolist()
