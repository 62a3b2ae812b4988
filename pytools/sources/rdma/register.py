"""Which queue pair has which row in the estimators' arrays, and what is known of it besides its counters.

Tables that tapped processes were given have a user (`uid`). A user may have a quarter of the rows, and more while over
half of them are free: none can leave the others without. What the breakpoints see is in one table, and small.

One thread: the agent's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.signals import Owner, Path
from pytools.sources.rdma.table import Columns, Rows, Slots, Table

ROWS: Final = 4096  # queue pairs followed at most
_NONE: Final = -1


@dataclass(slots=True)
class QueuePair:
    table: Table
    slot: int
    created_ns: int
    context: int
    tgid: int
    number: int
    first_ns: int  # seen
    owner: Owner
    uid: int | None = None  # user of the process
    device: str = ""
    qp_type: str = ""
    remote: str = ""
    local: str = ""
    remote_number: int | None = None
    shared_receives: bool = False
    interface: str = ""
    path: Path | None = None
    opcodes: dict[str, int] = field(default_factory=dict)
    said: bytes = b""  # what the row said of all that
    told_ns: int = 0  # last signal


class Register:
    """Rows by table and slot; a row is free again once its queue pair was given up."""

    def __init__(self, rows: int = ROWS) -> None:
        self.pairs: dict[int, QueuePair] = {}
        self.full = 0  # queue pairs that found no row when they were first met
        self.over_share = 0  # and those whose user had its share
        self._rows = rows
        self._held: Counter[int | None] = Counter()  # rows by user
        self._free = list(range(rows - 1, -1, -1))
        self._places: dict[int, Rows] = {}  # by table
        self._identity = np.zeros((4, rows), np.uint64)
        self._unplaced: dict[int, int] = {}  # by table: queue pairs without a row
        self._given_up: dict[tuple[int, int], int] = {}  # table and slot -> created_ns, until the slot is free

    def match(self, table: Table, columns: Columns) -> tuple[Rows, Rows, list[int]]:
        """Rows of the known queue pairs of a table, and places of those in `columns` that are new.

        Returns
        -------
        rows : ndarray
            Of each place in `columns`; negative for a new one.
        new : ndarray
            Places of the new ones.
        lost : list of int
            Rows whose slot now belongs to another queue pair, or to none.
        """
        places = self._places.get(id(table))
        if places is None:
            places = self._places[id(table)] = np.full(len(table.records), _NONE, np.intp)
        rows = places[columns.slots]
        same = np.array(_identity(columns), np.uint64)
        known = rows >= 0
        known &= (self._identity[:, rows] == same).all(axis=0)
        used = np.zeros(len(places), np.bool_)
        used[columns.slots[known]] = True
        lost = places[(places >= 0) & ~used].tolist()
        rows = np.where(known, rows, _NONE)
        return rows, np.flatnonzero(~known), lost

    def worth_describing(self, table: Table, columns: Columns, new: Rows) -> Rows:
        """Of the new places those that can have a row, and those whose slot can be freed."""
        if not len(new):
            return new
        if not self._has_room(table):
            more = max(0, len(new) - self._unplaced.get(id(table), 0))
            if self._free:
                self.over_share += more
            else:
                self.full += more
            self._unplaced[id(table)] = len(new)
            return new[columns.closed[new]]
        slots, born = columns.slots[new].tolist(), columns.created_ns[new].tolist()
        over = [self._given_up.get((id(table), slot)) == when for slot, when in zip(slots, born, strict=True)]
        return new[~np.array(over, np.bool_) | columns.closed[new]]

    def add(self, pair: QueuePair) -> int | None:
        """A row for a new queue pair; None when there is none left, or when it was given up already."""
        key = (id(pair.table), pair.slot)
        if self._given_up.get(key) == pair.created_ns:
            return None
        self._given_up.pop(key, None)
        if not self._has_room(pair.table):
            return None
        self._held[_user(pair.table)] += 1
        row = self._free.pop()
        self.pairs[row] = pair
        self._places[id(pair.table)][pair.slot] = row
        self._identity[:, row] = pair.created_ns, pair.context, pair.tgid, pair.number
        return row

    def give_up(self, row: int) -> QueuePair:
        """Forget a queue pair; its slot is not looked at again before another one has it."""
        pair = self.pairs.pop(row)
        places = self._places[id(pair.table)]
        if places[pair.slot] == row:
            places[pair.slot] = _NONE
        self._given_up[id(pair.table), pair.slot] = pair.created_ns
        self._held[_user(pair.table)] -= 1
        self._free.append(row)
        return pair

    def _has_room(self, table: Table) -> bool:
        user = _user(table)
        shared = user is None or self._held[user] < self._rows // 4 or len(self._free) > self._rows // 2
        return bool(self._free) and shared

    def slots(self, table: Table) -> Slots:
        places = self._places.get(id(table))
        return np.zeros(0, np.intp) if places is None else np.flatnonzero(places >= 0)

    def leave(self, gone: int) -> None:
        """A table is gone; its rows were given up before."""
        self._places.pop(gone, None)
        self._unplaced.pop(gone, None)
        self._given_up = {key: value for key, value in self._given_up.items() if key[0] != gone}

    def rows_of(self, gone: int) -> list[int]:
        places = self._places.get(gone)
        return [] if places is None else places[places >= 0].tolist()

    def processes(self, rows: Rows) -> NDArray[np.uint64]:
        numbers: NDArray[np.uint64] = self._identity[2, rows]
        return numbers

    def tables(self) -> set[int]:
        return set(self._places)


def _user(table: Table) -> int | None:
    """Whose table it is; None for one that the kernel fills."""
    user: int | None = getattr(table, "uid", None)
    return user


def _identity(columns: Columns) -> list[NDArray[np.uint64]]:
    return [
        columns.created_ns.view(np.uint64),
        columns.context,
        columns.tgid.view(np.uint64),
        columns.qp_number.view(np.uint64),
    ]
