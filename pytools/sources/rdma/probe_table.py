"""The rows that bpf/rdma.c writes, and the kernel's side of them: which are free, whose they are, what was lost.

One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.kernel.bpf import contract
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.bpf.mapped import MappedArray
from pytools.kernel.bpf.maps import drain, push
from pytools.kernel.rdma_class import SYSFS
from pytools.sources.rdma.table import SeenBy

TAIL_CALLS: Final = (  # enum more
    "rdma_post_more",
    "rdma_poll_more",
    "rdma_publish_more",
    "rdma_refuse_more",
    "rdma_take_back",
)


class KernelTable:
    """The rows that rdma.c writes, and the kernel's side of them."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        rows, queues = loaded.map("rdma_table"), loaded.map("rdma_queues")
        self._mapped = MappedArray(os.dup(rows.fd), rows.value)
        self._slots, self._ports = loaded.map("rdma_slots"), loaded.map("rdma_ports")
        self._queues, self._free = queues, loaded.map("rdma_free")
        self._fresh = np.zeros(1, queues.value)[0]
        more = loaded.map("rdma_more")
        for index, name in enumerate(TAIL_CALLS):
            if name in loaded.programs:
                more.update(index, loaded.programs[name])
        drain(self._free.fd)  # another table of these maps may have been there before
        for slot in range(len(self.records)):
            if self.records[slot]["state"]:
                self.free(slot)
            else:
                self.records[slot]["run_mask"] = 0
                push(self._free.fd, slot)

    @property
    def seen_by(self) -> SeenBy:
        """How its rows come about."""
        return "uprobe"

    @property
    def records(self) -> NDArray[Any]:
        return self._mapped.records

    def free(self, slot: int) -> None:
        """Forget a queue pair, whether or not its end was seen; its row serves another from now on."""
        row = self.records[slot]
        key = np.zeros(1, self._slots.key)[0]
        for name, field in (("context", "context"), ("tgid", "tgid"), ("number", "qp_number")):
            key[name] = row[field]
        if self._is_at(key, slot):
            self._slots.delete(key)
        self.records[slot] = np.zeros(1, row.dtype)[0]
        self._queues.update(slot, self._fresh)
        self._ports.update(slot, np.zeros(1, self._ports.value)[0])
        push(self._free.fd, slot)

    def _is_at(self, key: Any, slot: int) -> bool:
        """Whether the kernel still finds this row by that key; a later queue pair may have taken the name."""
        keys, slots = self._slots.read()
        return bool(np.any((keys == key) & (slots == slot)))

    def resolve_local(self, devices: Path = SYSFS) -> None:
        """Fill in the local addresses that the rows lack: the kernel side knows but their index."""
        lacking = np.flatnonzero((self.records["state"] != 0) & ~self.records["local"]["bytes"].any(axis=1))
        if not len(lacking):
            return
        slots, ports = self._ports.read()
        known = dict(zip(slots.tolist(), ports, strict=True))
        for slot in lacking.tolist():
            port = known.get(slot)
            if port is None or not port["known"]:
                continue
            device = bytes(self.records[slot]["device"]).split(b"\0")[0].decode(errors="replace")
            place = devices / device / f"ports/{port['port']}/gids/{port['gid_index']}"
            with contextlib.suppress(OSError, ValueError):
                gid = bytes.fromhex(place.read_text().strip().replace(":", ""))
                self.records[slot]["local"]["bytes"][:] = np.frombuffer(gid, np.uint8)

    def counters(self) -> dict[str, int]:
        """The programs' own counters, by name."""
        totals = self._loaded.map("rdma_counters").read_percpu_sum()
        return {name: int(total) for name, total in zip(contract.counters("rdma"), totals, strict=True)}

    def close(self) -> None:
        """Unmap; the maps are the loader's."""
        self._mapped.close()
