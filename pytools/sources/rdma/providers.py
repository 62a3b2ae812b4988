"""Breakpoints in the verbs providers of this host: one way in to its queue pairs (bpf/rdma.c).

Finds the providers' functions by a child process (verbs_offsets.py), again whenever a device comes or goes, and puts
the programs there. A function that cannot be found or probed costs only itself and is named in `failed`. A container
with its own copy of a library has another file: its breakpoints are set when both files are the same build. Runs in
the agent's thread; never raises where there is no RDMA, but says why. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pytools.errors import SwerveError
from pytools.kernel.bpf import uprobes
from pytools.kernel.bpf.compiler_client import Program
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.bpf.uprobes import Uprobe
from pytools.kernel.elf import build_id
from pytools.kernel.rdma_class import SYSFS, absent, listed
from pytools.sources.rdma.probe_table import TAIL_CALLS, KernelTable
from pytools.sources.rdma.table import Sight, Way
from pytools.sources.rdma.verbs_offsets import LIBRARY, LOCK_BYTES

# Verb -> programs at its entry and at its return; empty: none.
PROBES: Final[Mapping[str, tuple[str, str]]] = {
    "post_send": ("rdma_post_send", "rdma_post_send_return"),
    "post_recv": ("rdma_post_receive", "rdma_post_receive_return"),
    "post_srq_recv": ("rdma_post_srq_receive", "rdma_post_srq_receive_return"),
    "poll_cq": ("rdma_poll", "rdma_poll_return"),
    "wr_complete": ("rdma_wr_complete", "rdma_wr_complete_return"),
    "start_poll": ("rdma_start_poll", "rdma_start_poll_return"),
    "next_poll": ("rdma_next_poll", "rdma_next_poll_return"),
    "create_qp": ("rdma_create_qp", "rdma_create_qp_return"),
    "create_qp_ex": ("rdma_create_qp", "rdma_create_qp_return"),
    "modify_qp": ("rdma_modify_qp", "rdma_modify_qp_return"),
    "destroy_qp": ("rdma_destroy_qp", "rdma_destroy_qp_return"),
    "read_opcode": ("", "rdma_read_opcode_return"),
    "read_qp_num": ("", "rdma_read_qp_num_return"),
    "read_byte_len": ("", "rdma_read_byte_len_return"),
    **{
        verb: (f"rdma_{verb}", "")
        for verb in (
            *("wr_rdma_write", "wr_rdma_write_imm", "wr_send", "wr_send_imm", "wr_rdma_read", "wr_atomic_cmp_swp"),
            *("wr_atomic_fetch_add", "wr_local_inv", "wr_bind_mw", "wr_send_inv", "wr_send_tso", "wr_atomic_write"),
            *("wr_set_sge", "wr_set_sge_list", "wr_set_inline_data", "wr_set_inline_data_list", "wr_abort"),
            "end_poll",
        )
    },
}
_LOST: Final = ("table_full", "faults", "too_long", "calls_lost", "unnamed")

_LOOK_NS = 1_000_000_000
_PROCESSES_NS = 30_000_000_000
_FIND_LIMIT_NS = 20_000_000_000


def program() -> Program:
    """What the compiling child is to load for this."""
    functions = [*dict.fromkeys(name for pair in PROBES.values() for name in pair if name), *TAIL_CALLS]
    defines = {"SWERVE_LOCK_BYTES": LOCK_BYTES.get(platform.machine(), 88)}
    return Program("rdma.c", functions, defines, dict.fromkeys(functions, "uprobe"))


class Uprobes(Way):
    """The breakpoints of this host, and the table they fill.

    Parameters
    ----------
    loaded : Loaded
        With `program()` in it; stays the caller's, and has to outlive this.
    devices : Path
        Where the kernel lists RDMA devices.
    environment : mapping, optional
        For the child that opens the devices.
    """

    def __init__(
        self,
        loaded: Loaded,
        devices: Path = SYSFS,
        library: str = LIBRARY,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.failed: dict[str, str] = {}  # what could not be found or probed, and why
        self._loaded, self._devices, self._library = loaded, devices, library
        self._environment = environment
        self._probes: dict[tuple[str, int, int, str], Uprobe] = {}  # program, device and inode, offset
        self._functions: dict[str, list[tuple[str, int]]] = {}
        self.table: KernelTable | None = None  # the table, where the programs could be loaded
        self._reason = loaded.failed.get("rdma.c", "")
        self._names: frozenset[str] = frozenset()
        self._finding: subprocess.Popen[str] | None = None
        self._find_limit_ns = 0
        self._look_ns = self._processes_ns = 0
        self._processes: dict[int, str] = {}
        if not self._reason:
            self.table = KernelTable(loaded)

    def tick(self, now_ns: int) -> int:
        """Look whether devices or processes came or went; returns when to be called next."""
        if self.table is None:
            return now_ns + _LOOK_NS
        if self._finding is not None:
            self._take_findings(now_ns)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            self._look(now_ns)
            self.table.resolve_local(self._devices)
        if self._functions and now_ns >= self._processes_ns:
            self._processes_ns = now_ns + _PROCESSES_NS
            self._look_at_processes()
        return now_ns + 10_000_000 if self._finding is not None else self._look_ns

    def _look(self, now_ns: int) -> None:
        """Notice devices that came, and begin to look behind them."""
        self._reason = absent(self._devices) or uprobes.missing()
        names = frozenset(listed(self._devices)) if not self._reason else frozenset()
        if names - self._names and self._finding is None:
            self._find_limit_ns = now_ns + _FIND_LIMIT_NS
            script = Path(__file__).with_name("verbs_offsets.py")
            self._finding = subprocess.Popen(
                [sys.executable, "-I", str(script), self._library],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=None if self._environment is None else dict(self._environment),
            )
        self._names = names

    def _take_findings(self, now_ns: int) -> None:
        """Take the child's answer once it is there (far less than a pipe holds), or end it."""
        child = self._finding
        assert child is not None
        if child.poll() is None and now_ns < self._find_limit_ns:
            return
        child.kill()
        said = child.communicate()[0]
        self._finding = None
        try:
            found = json.loads(said)
        except ValueError:
            words = f"it ended with {child.returncode}" if child.returncode != -9 else "it did not end"
            self._reason = self.failed["providers"] = f"opening the RDMA devices failed: {words}"
            return
        self.failed.update((f"verbs {number}", words) for number, words in enumerate(found["problems"]))
        for verb, places in found["functions"].items():
            known = self._functions.setdefault(verb, [])
            known.extend((path, offset) for path, offset in places if (path, offset) not in known)
        self._attach(self._functions)
        if not self._probes:
            self._reason = "; ".join(found["problems"]) or "no function of a provider could be probed"

    def _attach(self, functions: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """Put the programs at these places, once each."""
        for verb, places in functions.items():
            for name, at_return in zip(PROBES.get(verb, ("", "")), (False, True), strict=True):
                for path, offset in places if name else ():
                    self._attach_one(name, path, offset, at_return)

    def _attach_one(self, name: str, path: str, offset: int, at_return: bool) -> None:
        if name not in self._loaded.programs:
            self.failed[name] = self._loaded.failed.get(name, "it was not loaded")
            return
        try:
            file = os.stat(path)
            key = (name, file.st_dev, file.st_ino, str(offset))
            if key not in self._probes:
                self._probes[key] = Uprobe(self._loaded.programs[name], path, offset, at_return)
        except (OSError, SwerveError) as error:
            if not _ended(path):
                self.failed[f"{name} in {Path(path).name}"] = str(error)

    def _look_at_processes(self) -> None:
        """Who uses the libraries: the files with breakpoints, or other files of the same build."""
        ours = {path for places in self._functions.values() for path, _ in places}
        inodes = {(stat.st_dev, stat.st_ino) for path in ours if (stat := _stat(path))}
        gone = [
            key for key, probe in self._probes.items() if _ended(probe.path)
        ]  # containers; below, others are adopted
        uprobes.close_all([self._probes.pop(key) for key in gone])
        self._processes = {}
        for pid, inode, path in users_of({Path(path).name for path in ours}):
            words = "uprobe"
            if inode not in inodes:
                words = self._adopt(f"/proc/{pid}/root{path}", path)
            if words == "uprobe":
                self._processes.setdefault(pid, words)
            else:
                self._processes[pid] = words

    def _adopt(self, reachable: str, path: str) -> str:
        """Put breakpoints into a container's copy of a library, if it is the build whose functions are known."""
        for known in {known for places in self._functions.values() for known, _ in places}:
            if Path(known).name != Path(path).name:
                continue
            wanted = build_id(known)
            if not wanted or wanted != build_id(reachable):
                return f"another build of {Path(path).name} than the host's: use the tap"
            self._attach(
                {
                    verb: [(reachable, offset) for place, offset in places if place == known]
                    for verb, places in self._functions.items()
                }
            )
            return "uprobe"
        return f"{Path(path).name} is not on the host: use the tap"

    def places(self, verb: str) -> Sequence[tuple[str, int]]:
        """Where a verb's functions lie: library and file offset, one a provider or variant."""
        return tuple(self._functions.get(verb, ()))

    def tables(self) -> Sequence[KernelTable]:
        """The table, once there is a breakpoint that fills it."""
        return [self.table] if self.table is not None and self._probes else []

    def sight(self) -> Sight:
        seen = dict(self._processes)
        if self.table is not None:
            records = self.table.records
            seen.update(dict.fromkeys(np.unique(records["tgid"][records["state"] != 0]).tolist(), "uprobe"))
        providers = sorted({path for places in self._functions.values() for path, _ in places})
        reason = "" if self._probes and not self._reason else self._reason
        hits = self.table.counters()["hits"] if self.table is not None else 0
        return Sight(reason, tuple(providers) if self._probes else (), tuple(sorted(seen.items())), hits)

    def drops(self) -> dict[str, int]:
        counters = self.table.counters() if self.table is not None else {}
        return {name: counters[name] for name in _LOST if name in counters}

    def close(self) -> None:
        if self._finding is not None:
            self._finding.kill()
            self._finding.communicate()
            self._finding = None
        uprobes.close_all(self._probes.values())
        self._probes = {}
        if self.table is not None:
            self.table.close()
            self.table = None


def _stat(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def _ended(path: str) -> bool:
    """Whether a file was reached through a process, and that has ended."""
    return path.startswith("/proc/") and _stat(path) is None


def users_of(names: set[str]) -> Iterator[tuple[int, tuple[int, int], str]]:
    """Processes that have a library of such a name mapped: process id, device and inode, path as they see it."""
    wanted = [name.encode() for name in names]
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            text = (place / "maps").read_bytes()
        except OSError:  # gone, or not ours to read
            continue
        if not any(name in text for name in wanted):
            continue
        found = set()
        for line in text.decode(errors="replace").splitlines():
            _, rights, _, device, inode, *path = line.split(maxsplit=5)
            if "x" in rights and path and Path(path[0]).name in names:
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add(((os.makedev(major, minor), int(inode)), path[0]))
        yield from ((int(place.name), inode, path) for inode, path in found)
