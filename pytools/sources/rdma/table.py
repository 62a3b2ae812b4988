"""The queue pairs of one table: live memory that others write, turned into checked columns.

A table is an array of `struct swerve_qp` (bpf/swerve.h), mapped into this process and written all the while: by rdma.c
in the kernel, or by the processes that the tap was loaded into, which nobody vouches for. So a row counts only when it
makes sense, and what does not is counted and left out. Times are CLOCK_MONOTONIC nanoseconds; counters are 64 bits
wide and may wrap: differences are taken modulo 2^64. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from pytools.sources.source import Source

FREE: Final = 0  # enum swerve_qp_state
LIVE: Final = 1
CLOSED: Final = 2
NOT_TIMED: Final = 2**64 - 1  # run_mask
DEVICE_LETTERS: Final = 15  # SWERVE_DEVICE_BYTES less the zero at the end
NO_QP: Final = 2**32 - 1  # remote_qp_number
FUTURE_NS: Final = 1_000_000_000  # a time further ahead of now than that is nonsense

COUNTERS: Final = (  # in the order in which they are read: completed before posted
    *("timed", "completed", "completed_bytes", "completions", "receives_completed", "received_bytes"),
    *("posted", "posted_bytes", "signalled", "refused", "receives_posted", "untracked"),
)

SeenBy = Literal["uprobe", "tap"]
Counters = NDArray[np.uint64]
Signed = NDArray[np.int64]
Slots = NDArray[np.intp]  # places in a table
Rows = NDArray[np.intp]

OPCODES: Final = (  # enum ibv_wr_opcode
    "rdma_write",
    "rdma_write_with_imm",
    "send",
    "send_with_imm",
    "rdma_read",
    "atomic_cmp_and_swp",
    "atomic_fetch_and_add",
    "local_inv",
    "bind_mw",
    "send_with_inv",
    "tso",
    "driver1",
    "flush",
    "atomic_write",
)
STATUSES: Final = (  # enum ibv_wc_status
    "success",
    "loc_len_err",
    "loc_qp_op_err",
    "loc_eec_op_err",
    "loc_prot_err",
    "wr_flush_err",
    "mw_bind_err",
    "bad_resp_err",
    "loc_access_err",
    "rem_inv_req_err",
    "rem_access_err",
    "rem_op_err",
    "retry_exc_err",
    "rnr_retry_exc_err",
    "loc_rdd_viol_err",
    "rem_inv_rd_req_err",
    "rem_abort_err",
    "inv_eecn_err",
    "inv_eec_state_err",
    "fatal_err",
    "resp_timeout_err",
    "general_err",
    "tm_err",
)
FLUSHED: Final = STATUSES.index("wr_flush_err")
RETRIES_SPENT: Final = STATUSES.index("retry_exc_err")
NOT_READY_SPENT: Final = STATUSES.index("rnr_retry_exc_err")
NEED_RECEIVES: Final = tuple(
    OPCODES.index(name) for name in ("rdma_write_with_imm", "send", "send_with_imm", "send_with_inv")
)
QP_TYPES: Final = {2: "rc", 3: "uc", 4: "ud", 8: "raw_packet", 9: "xrc_send", 10: "xrc_recv", 0xFF: "driver"}


class Table(Protocol):
    @property
    def seen_by(self) -> SeenBy:
        """How its rows come about."""

    @property
    def records(self) -> NDArray[Any]:
        """The live mapping, of `struct swerve_qp` as compiled; only `run_mask` is written by the reader."""

    def free(self, slot: int) -> None:
        """The last of this row has been told (its queue pair or its process is gone): it may be used again."""


class Way(Source, Protocol):
    """A way in: the uprobes, or the tap; its ticks find processes and libraries that came or went."""

    def tables(self) -> Sequence[Table]:
        """The tables there are now; the same object for as long as a table lives."""

    def sight(self) -> Sight:
        """What this way sees, and what it cannot."""


@dataclass(frozen=True)
class Sight:
    reason: str = ""  # why it sees nothing at all; empty when it works
    providers: tuple[str, ...] = ()  # libraries with probes attached
    seen: tuple[tuple[int, str], ...] = ()  # process id -> "uprobe", "tap", or why it is not seen
    hits: int = 0  # of the probes, so far


class Columns(NamedTuple):
    """Rows in use that make sense, as they stood at one reading; one element of each array per row."""

    slots: Slots
    closed: NDArray[np.bool_]
    created_ns: Signed
    context: Counters
    tgid: Signed
    qp_number: Signed
    timed: Counters
    completed: Counters
    completed_bytes: Counters
    completions: Counters
    receives_completed: Counters
    received_bytes: Counters
    posted: Counters
    posted_bytes: Counters
    signalled: Counters
    refused: Counters
    receives_posted: Counters
    untracked: Counters
    garbage: int  # rows left out

    @property
    def outstanding(self) -> Signed:
        return growth(self.posted, self.completed)

    @property
    def outstanding_bytes(self) -> Signed:
        return growth(self.posted_bytes, self.completed_bytes)

    def take(self, chosen: NDArray[Any]) -> Columns:
        return Columns._make([*(column[chosen] for column in self[:-1]), self.garbage])


def growth(later: Counters, earlier: Counters) -> Signed:
    """How much counters of 64 bits grew, right also across their wrap."""
    grown: Signed = (later - earlier).view(np.int64)
    return grown


def read(records: NDArray[Any], now_ns: int, pid: int = 0, among: Slots | None = None) -> Columns:
    """Look at a table while it is written; if it is one process's, what a row says of its process does not count.

    Parameters
    ----------
    among : ndarray of int, optional
        Read these slots alone.

    Notes
    -----
    A request is counted as posted before the device is told of it and as completed afterwards; reading in the opposite
    order keeps the outstanding ones from ever being too few.
    """
    state = records["state"]
    slots = np.flatnonzero(state != FREE) if among is None else among[state[among] != FREE]

    def column(name: str) -> Counters:
        values: Counters = records[name][slots].astype(np.uint64)
        return values

    known = state[slots]
    columns = Columns(
        slots=slots,
        closed=known == CLOSED,
        created_ns=column("created_ns").view(np.int64),
        context=column("context"),
        tgid=np.full(len(slots), pid, np.int64) if pid else column("tgid").view(np.int64),
        qp_number=column("qp_number").view(np.int64),
        garbage=0,
        **{name: column(name) for name in COUNTERS},
    )
    sound = (
        (known <= CLOSED)
        & (columns.tgid > 0)
        & (columns.created_ns >= 0)
        & (columns.created_ns <= now_ns + FUTURE_NS)
        & (columns.outstanding >= 0)
        & (columns.outstanding_bytes >= 0)
    )
    if sound.all():
        return columns
    return columns.take(sound)._replace(garbage=int(np.count_nonzero(~sound)))


class Timed(NamedTuple):
    """Timed requests, of each row in the order of their numbers."""

    rows: Slots  # places in the arrays that were asked with
    number: Counters
    posted_ns: Signed
    completed_ns: Signed
    bytes: Counters
    missed: int  # written over before they could be read
    garbage: int  # that make no sense


def read_timed(records: NDArray[Any], slots: Slots, before: Counters, timed: Counters, now_ns: int) -> Timed:
    """The timed requests that came after the first `before` of some rows.

    Parameters
    ----------
    timed : ndarray of uint64
        The counter of that name, read earlier.

    Notes
    -----
    They lie in a ring that may be written over while it is copied: what could have been is left out.
    """
    kept = records.dtype["timed_requests"].shape[0]
    new = np.clip(growth(timed, before), 0, kept)
    rows = np.repeat(np.arange(len(slots)), new)
    back = np.cumsum(new)[rows] - np.arange(len(rows))  # 1: the newest of its row
    index = timed[rows] - back.astype(np.uint64)
    held = records["timed_requests"][slots[rows], (index % np.uint64(kept)).astype(np.intp)]
    after = records["timed"][slots][rows]
    whole = growth(after, index) < kept
    posted_ns, completed_ns = held["posted_ns"].view(np.int64), held["completed_ns"].view(np.int64)
    sound = (posted_ns > 0) & (posted_ns <= completed_ns) & (completed_ns <= now_ns + FUTURE_NS)
    good = whole & sound
    chosen = held[good]
    return Timed(
        rows[good],
        chosen["number"].copy(),
        chosen["posted_ns"].view(np.int64).copy(),
        chosen["completed_ns"].view(np.int64).copy(),
        chosen["bytes"].copy(),
        missed=int(np.clip(growth(timed, before) - kept, 0, None).sum()) + int(np.count_nonzero(~whole)),
        garbage=int(np.count_nonzero(whole & ~sound)),
    )


def named(counts: NDArray[Any], names: Sequence[str]) -> dict[str, int]:
    """The counts that are not zero, by name; what has no name is called other."""
    found: dict[str, int] = {}
    for index in np.flatnonzero(counts).tolist():
        name = names[index] if index < len(names) else "other"
        found[name] = found.get(name, 0) + int(counts[index])
    return found


def text(raw: bytes) -> str:
    """A name of C; what is not printable is replaced."""
    return "".join(letter if letter.isprintable() else "?" for letter in raw.split(b"\0")[0].decode(errors="replace"))
