"""The uprobes of bpf/rdma.c in tests: on this host's verbs library, or on the stand-in of tests/native."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native_build
import numpy as np
import pytest
from support import require, wait_until

from pytools.kernel.bpf.loader import Loaded, load
from pytools.sources.rdma import providers
from pytools.sources.rdma.providers import Uprobes

WRITE, SEND, SEND_WITH_IMM, READ, SWAP, FETCH_ADD = 0, 2, 3, 4, 5, 6  # enum ibv_wr_opcode
FLUSHED, RNR_SPENT = 5, 13  # enum ibv_wc_status
STALL, FAIL, REFUSE = 1, 2, 3  # enum fake_control
RESET = 0  # enum ibv_qp_state
LIVE, CLOSED = 1, 2
NONE_TIMED = 2**64 - 1
LOST = ("table_full", "faults", "too_long", "calls_lost", "unmatched", "unnamed")


class Seen:
    """The probes on the stand-in, and what they count."""

    def __init__(self, loaded: Loaded, devices: Path, strip: bool = False) -> None:
        self.uprobes = Uprobes(loaded, devices, environment=native_build.environment(strip))

    def attach(self) -> None:
        attach(self.uprobes)

    @property
    def records(self) -> Any:
        assert self.uprobes.table is not None
        return self.uprobes.table.records

    def slots(self, pid: int, number: int = 257) -> list[int]:
        """Rows of a queue pair, the newest last."""
        here = np.flatnonzero((self.records["tgid"] == pid) & (self.records["qp_number"] == number))
        return sorted(here.tolist(), key=lambda slot: int(self.records[slot]["created_ns"]))

    def row(self, pid: int, number: int = 257) -> Any:
        return self.records[self.slots(pid, number)[-1]].copy()

    def live(self) -> list[Any]:
        """All rows in use."""
        return list(self.records[self.records["state"] != 0])

    def counters(self) -> dict[str, int]:
        assert self.uprobes.table is not None
        return self.uprobes.table.counters()

    def free_all(self) -> None:
        assert self.uprobes.table is not None
        for slot in np.flatnonzero(self.records["state"]).tolist():
            self.uprobes.table.free(slot)


@contextlib.contextmanager
def programs() -> Iterator[Loaded]:
    """All programs, loaded."""
    require("root", "bcc", "tracefs")
    with load([providers.program()]) as loaded:
        assert not loaded.failed
        yield loaded


def attach(uprobes: Uprobes) -> None:
    """Work until the breakpoints are set, all of them."""

    def attached() -> bool:
        uprobes.tick(time.monotonic_ns())
        return bool(uprobes.tables())

    wait_until(attached, 20, "the probes are attached")
    assert not uprobes.failed, uprobes.failed


@contextlib.contextmanager
def attached(loaded: Loaded) -> Iterator[Uprobes]:
    """The breakpoints on this host's own verbs library."""
    with contextlib.closing(Uprobes(loaded)) as uprobes:
        attach(uprobes)
        yield uprobes


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    with programs() as loaded:
        yield loaded


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for /sys/class/infiniband."""
    place = tmp_path_factory.mktemp("infiniband")
    gids = place / "alpha0/ports/1/gids"
    gids.mkdir(parents=True)
    (gids / "1").write_text("0000:0000:0000:0000:0000:ffff:0a09:0002\n")
    return place


def prepare(app: native_build.App, depth: int = 128, signal_all: int = 0) -> None:
    """One device, one completion queue, one queue pair (257)."""
    for command in ("open alpha0", "cq 0 8192", f"qp 0 0 0 {depth} 128 {signal_all} -1"):
        app.do(command)


def sums(row: Any) -> dict[str, int]:
    """The counters that are not zero."""
    names = (
        *("posted", "posted_bytes", "completed", "completed_bytes", "completions", "signalled", "refused"),
        *("receives_posted", "receives_completed", "received_bytes", "untracked"),
    )
    return {name: int(row[name]) for name in names if row[name]}


def nonzero(counts: Any) -> dict[int, int]:
    return {int(index): int(counts[index]) for index in np.flatnonzero(counts)}
