"""The tap in tests: its server, served by a thread as the agent's loop would, and applications that wait for a row."""

from __future__ import annotations

import selectors
import threading
import time
from pathlib import Path
from typing import Any

import native_build
import numpy as np
import rdma_probes
from support import require, wait_until

from pytools.kernel.bpf import loader
from pytools.sources.rdma.table import FREE
from pytools.sources.rdma.tap_server import TapServer, TapTable

ROWS = 512


def row_layout() -> np.dtype[Any]:
    """Layout of `struct swerve_qp`."""
    require("root", "bcc", "tracefs")
    with loader.load([loader.Program("rdma.c", ())]) as loaded:
        return loaded.map("rdma_table").value


class Agent:
    """A tap server with a thread that serves it, as the agent's loop would."""

    def __init__(self, path: Path, record: np.dtype[Any]) -> None:
        self.path, self.record = path, record
        self.server = TapServer(path, record, ROWS)
        self._selector = selectors.DefaultSelector()
        self.server.register(self._selector)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            events = self._selector.select(0.02)
            with self._lock:
                for key, mask in events:
                    key.data(mask)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.server.close()
        self._selector.close()

    def tables(self, pid: int) -> list[TapTable]:
        with self._lock:
            return [table for table in self.server.tables() if table.pid == pid]

    def tick(self, later_ns: int = 0) -> None:
        with self._lock:
            self.server.tick(time.monotonic_ns() + later_ns)

    def rows(self, pid: int) -> dict[int, Any]:
        """What is counted for each queue pair of a process that is not freed, by its number; the newest counts."""
        found = {}
        for table in self.tables(pid):
            for row in table.records[table.records["state"] != FREE].copy():
                found[int(row["qp_number"])] = row
        return found

    def every_row(self, pid: int) -> Any:
        """All rows of a process, those of queue pairs that are gone as well."""
        return np.concatenate([each.records[each.records["state"] != FREE].copy() for each in self.tables(pid)])

    def row(self, pid: int, number: int = 257) -> Any:
        return self.rows(pid)[number]

    def prepare(self, app: native_build.App, depth: int = 128) -> None:
        """Make one of each, and wait until a table is handed over, which may not be at once."""
        rdma_probes.prepare(app, depth)
        self.settle(app, 257)

    def settle(self, app: native_build.App, number: int, qp: int = 0) -> None:
        """Wait until a queue pair has its row: the tap looks for an answer whenever one is modified."""

        def there() -> bool:
            app.do(f"state {qp} 1")
            return number in self.rows(app.pid)

        wait_until(there, 20, f"queue pair {number} has a row")


def variables(library: Path, socket: Path) -> dict[str, str]:
    """The environment that has an application load the tap."""
    return {"LD_AUDIT": str(library), "SWERVE_TAP_SOCKET": str(socket)}
