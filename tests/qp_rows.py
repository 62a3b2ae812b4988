"""Synthetic queue pairs: tables laid out as bpf/swerve.h declares them, and a hand that writes rows as applications do.

Times are nanoseconds, amounts bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import ROOT

from pytools.kernel.bpf.contract import constant
from pytools.signals import Owner
from pytools.sources.rdma.register import QueuePair
from pytools.sources.rdma.table import CLOSED, FREE, LIVE, NO_QP, Columns, SeenBy, Table

_HEADER = (ROOT / "bpf" / "swerve.h").read_text()
_SCALARS = {"u64": "<u8", "u32": "<u4", "u16": "<u2", "u8": "u1"}
_FIELD = re.compile(r"^\s*(?:struct )?(\w+) (\w+)(?:\[(\w+)\])?;", re.MULTILINE)


def layout(struct: str) -> np.dtype[Any]:
    """A struct of swerve.h, whose fields are naturally aligned."""
    body = re.search(rf"^struct {struct} {{\n(.*?)^}};", _HEADER, re.MULTILINE | re.DOTALL)
    assert body is not None, f"swerve.h no longer declares {struct}"
    text = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.DOTALL)
    fields: list[Any] = []
    for kind, name, count in _FIELD.findall(text):
        form = "S" if kind == "char" else _SCALARS.get(kind) or layout(kind)
        length = (int(count) if count.isdigit() else constant(count)) if count else 0
        fields.append((name, f"S{length}") if kind == "char" else (name, form, (length,)) if length else (name, form))
    return np.dtype(fields, align=True)


QP = layout("swerve_qp")
TIMED = constant("SWERVE_TIMED")


@dataclass
class FakeTable:
    """A table in this process's own memory."""

    seen_by: SeenBy = "uprobe"
    rows: int = 16
    freed: list[int] = field(default_factory=list)
    records: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.records = np.zeros(self.rows, QP)

    def free(self, slot: int) -> None:
        """As the real ones: the slot may be used again."""
        self.freed.append(slot)
        self.records[slot] = np.zeros((), QP)


def queue_pair(table: Table, columns: Columns, place: int, now_ns: int) -> QueuePair:
    """What the agent takes a row for that it sees for the first time."""
    return QueuePair(
        table=table,
        slot=int(columns.slots[place]),
        created_ns=int(columns.created_ns[place]),
        context=int(columns.context[place]),
        tgid=int(columns.tgid[place]),
        number=int(columns.qp_number[place]),
        first_ns=now_ns,
        owner=Owner(1000, "", "", ""),
    )


class Sender:
    """Writes one row: posts and completes requests at the times it is told."""

    def __init__(self, table: FakeTable, slot: int, pid: int, now_ns: int, number: int = 17, opcode: int = 0) -> None:
        self.row = table.records[slot : slot + 1]
        self.opcode = opcode
        self.waiting: list[tuple[int, int, int]] = []  # number, posted, bytes
        self.set(
            tgid=pid,
            qp_number=number,
            context=4096,
            remote_qp_number=NO_QP,
            qp_type=2,
            device=b"mlx5_0",
            created_ns=now_ns,
            run_mask=15,
        )
        self.set(state=LIVE)

    def set(self, **values: Any) -> None:
        """Write fields."""
        for name, value in values.items():
            self.row[name] = value

    def add(self, **values: int) -> None:
        """Raise counters."""
        for name, value in values.items():
            self.row[name] += np.uint64(value)

    def post(self, at_ns: int, size: int, count: int = 1, signalled: bool = True) -> None:
        """Post requests."""
        if count <= 0:
            return
        first = int(self.row["posted"][0])
        self.waiting.extend((first + index, at_ns, size) for index in range(count))
        self.add(posted=count, posted_bytes=count * size, signalled=count * signalled)
        self.row["opcodes"][0, self.opcode] += count

    def complete(self, at_ns: int, count: int = 1, status: int = 0) -> None:
        """Complete the oldest requests."""
        done, self.waiting = self.waiting[:count], self.waiting[count:]
        if not done:
            return
        mask = int(self.row["run_mask"][0])
        for number, posted_ns, size in done:
            if (number >> 6) & mask == 0:
                self._time(number, posted_ns, at_ns, size)
        self.row["statuses"][0, status] += len(done)
        amount = sum(size for _, _, size in done)
        self.add(completed=len(done), completed_bytes=amount, completions=len(done))

    def _time(self, number: int, posted_ns: int, at_ns: int, size: int) -> None:
        place = int(self.row["timed"][0]) % TIMED
        self.row["timed_requests"][0, place] = (number, posted_ns, at_ns, size)
        self.add(timed=1)

    def close(self) -> None:
        """Destroy the queue pair."""
        self.set(state=CLOSED)


__all__ = ["CLOSED", "FREE", "LIVE", "QP", "TIMED", "FakeTable", "Sender", "constant", "layout"]
