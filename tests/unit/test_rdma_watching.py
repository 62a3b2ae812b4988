"""What a reading of the tables costs: rows that have no place in the register do not make it dear."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from qp_rows import FakeTable, Sender, queue_pair

from pytools.config import Rdma
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.receivers import NotReady
from pytools.sources.rdma.register import QueuePair, Register
from pytools.sources.rdma.table import Columns, Table
from pytools.sources.rdma.watching import Watch

NOW_NS = 10**15
READ_NS = 10_000_000
SECOND_NS = 1_000_000_000
ROWS = 64


class UserTable(FakeTable):
    """A table that a tapped process of this user was given, all rows of it in use."""

    def __init__(self, uid: int, rows: int) -> None:
        super().__init__("tap", rows)
        self.uid, self.pid = uid, uid
        for slot in range(rows):
            Sender(self, slot, uid, NOW_NS, number=slot)


class World:
    """A watch whose readings are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
        self.watch = Watch(Rdma(), self.describe, NotReady(tmp_path))  # type: ignore[arg-type]
        self.watch.register = Register(ROWS)
        self.rows_read, self.now_ns = 0, NOW_NS
        plain = tables.read

        def counted(
            records: NDArray[np.void], now_ns: int, pid: int = 0, among: NDArray[np.intp] | None = None
        ) -> Columns:
            found = plain(records, now_ns, pid, among)
            self.rows_read += len(found.slots) + found.garbage
            return found

        monkeypatch.setattr(tables, "read", counted)

    def describe(self, table: Table, slot: int, columns: Columns, place: int, now_ns: int) -> QueuePair:
        assert slot == columns.slots[place]
        return queue_pair(table, columns, place, now_ns)

    def second(self, *present: FakeTable) -> int:
        """How many rows a second of readings reads."""
        before = self.rows_read
        for _ in range(SECOND_NS // READ_NS):
            self.now_ns += READ_NS
            self.watch.read(present, self.now_ns)
        return self.rows_read - before


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> World:
    return World(monkeypatch, tmp_path)


def test_rows_without_a_place_are_looked_at_four_times_a_second(world: World) -> None:
    greedy, other = UserTable(1001, 16 * ROWS), UserTable(1002, 4)
    world.second(greedy, other)
    held = len(world.watch.register.pairs)
    assert held < 16 * ROWS and len(world.watch.register.slots(other)) == 4, "the other user has its rows"
    assert world.second(greedy, other) <= 100 * held + 4 * 17 * ROWS


def test_rows_that_make_no_sense_are_looked_at_four_times_a_second(world: World) -> None:
    table = UserTable(1001, 16 * ROWS)
    table.records["completed"] = 5  # of none posted
    table.records["completed"][:2] = 0
    world.second(table)
    assert len(world.watch.register.pairs) == 2
    assert world.second(table) <= 100 * 2 + 4 * 16 * ROWS
    assert world.watch.drops["rdma_garbage"] == 16 * ROWS - 2, "counted once"


def test_what_was_left_out_is_met_once_it_makes_sense(world: World) -> None:
    table = UserTable(1001, 4)
    table.records["completed"][1:] = 5
    world.second(table)
    assert len(world.watch.register.pairs) == 1
    table.records["completed"][1:] = 0
    world.second(table)
    assert len(world.watch.register.pairs) == 4


def test_many_new_queue_pairs_are_all_met_at_once(world: World) -> None:
    """They are described some at a time, at each reading."""
    table = UserTable(1001, ROWS // 4)
    for _ in range(2):
        world.now_ns += READ_NS
        world.watch.read([table], world.now_ns)
    assert len(world.watch.register.pairs) == ROWS // 4
