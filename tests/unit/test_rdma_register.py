"""Rows of the register: no user can leave the others without."""

from __future__ import annotations

import pytest
from qp_rows import FakeTable, Sender, queue_pair

from pytools.sources.rdma import table as tables
from pytools.sources.rdma.register import Register
from pytools.sources.rdma.table import Columns, Rows

NOW_NS = 10**15
ROWS = 64


class UserTable(FakeTable):
    """A table that a tapped process was given."""

    def __init__(self, uid: int, rows: int) -> None:
        super().__init__("tap", rows)
        self.uid = uid
        fill(self)


def fill(table: FakeTable) -> None:
    for slot in range(table.rows):
        Sender(table, slot, 1000, NOW_NS, number=slot)


def look(register: Register, table: FakeTable) -> tuple[Columns, Rows]:
    """A reading of a table; gives the places that are worth describing."""
    columns = tables.read(table.records, NOW_NS)
    _, new, _ = register.match(table, columns)
    return columns, register.worth_describing(table, columns, new)


def take(register: Register, table: FakeTable) -> list[int]:
    """A row for each queue pair of a table that can have one."""
    columns, worth = look(register, table)
    rows = (register.add(queue_pair(table, columns, place, NOW_NS)) for place in worth.tolist())
    return [row for row in rows if row is not None]


def test_a_user_alone_has_half_the_rows_and_leaves_the_others_theirs() -> None:
    register = Register(ROWS)
    greedy = [UserTable(1001, 16) for _ in range(6)]
    assert [len(take(register, each)) for each in greedy] == [16, 16, 0, 0, 0, 0]
    others = [UserTable(1002, 16), UserTable(1003, 16)]
    assert [len(take(register, each)) for each in others] == [16, 16]
    assert register.full == 0


def test_many_tables_of_one_user_leave_a_quarter_to_each_of_two_more() -> None:
    register = Register(ROWS)
    greedy = [UserTable(1001, 3) for _ in range(ROWS)]
    assert sum(len(take(register, each)) for each in greedy) == ROWS // 2
    assert [len(take(register, UserTable(uid, ROWS))) for uid in (0, 1002)] == [ROWS // 4, ROWS // 4]


def test_refusals_are_counted_once() -> None:
    register = Register(ROWS)
    taken, over = UserTable(1001, 32), UserTable(1001, 5)
    assert len(take(register, taken)) == 32
    for _ in range(3):
        assert take(register, over) == []
    assert (register.over_share, register.full) == (5, 0)


def test_rows_given_up_can_be_had_again() -> None:
    register = Register(ROWS)
    taken, waiting = UserTable(1001, 32), UserTable(1001, 32)
    rows = take(register, taken)
    assert take(register, waiting) == []
    for row in rows:
        register.give_up(row)
    assert len(take(register, waiting)) == 32


@pytest.mark.parametrize("rows", [ROWS, ROWS + 3])
def test_what_the_kernel_fills_is_nobodys_share(rows: int) -> None:
    register = Register(ROWS)
    table = FakeTable(rows=rows)
    fill(table)
    assert len(take(register, table)) == ROWS
    take(register, table)
    assert (register.full, register.over_share) == (rows - ROWS, 0)
