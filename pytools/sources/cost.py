"""What watching costs, and what was lost while watching: the `self` signal.

CPU and memory are those of the agent and its pacer; run times of kernel programs are counted by the kernel, and only
while somebody listens to this signal, because counting costs ~70 ns a hit. Runs in the agent's thread.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping

from pytools.errors import CapabilityError
from pytools.ipc.bus import Bus
from pytools.kernel.bpf import syscall
from pytools.signals import ProgramCost, Self, header
from pytools.sources.source import Source

_INTERVAL_NS = 1_000_000_000


class CostSource(Source):
    """Publishes a `Self` signal per second.

    Parameters
    ----------
    programs : mapping of str to int
        Kernel programs by name: their descriptors.
    drops : callable
        Every drop counter of the agent by name.
    failed : callable
        Kernel hooks that are not attached, with the reason.
    wire_bytes : callable
        Probe bytes sent and received so far, headers included.
    pacer : callable
        What the process that sends probes costs: processor time so far in ns, and bytes of memory.
    """

    def __init__(
        self,
        host: str,
        programs: Mapping[str, int],
        drops: Callable[[], dict[str, int]],
        failed: Callable[[], dict[str, str]],
        wire_bytes: Callable[[], int],
        pacer: Callable[[], tuple[int, int]],
        bus: Bus,
    ) -> None:
        self._host, self._programs, self._bus = host, programs, bus
        self._drops, self._failed, self._wire_bytes, self._pacer = drops, failed, wire_bytes, pacer
        self._stats_fd: int | None = None
        self._stats_refused = False
        self._before = (time.monotonic_ns(), self._cpu_s(), wire_bytes())

    def tick(self, now_ns: int) -> int:
        """Publish when somebody listens; returns when to be called next."""
        if self._bus.wanted("self"):
            self._switch_stats_on()
            self._bus.publish(self._signal(now_ns))
        elif self._stats_fd is not None:
            os.close(self._stats_fd)
            self._stats_fd = None
        return now_ns + _INTERVAL_NS

    def close(self) -> None:
        """Stop the kernel's counting of run times."""
        if self._stats_fd is not None:
            os.close(self._stats_fd)
            self._stats_fd = None

    def _switch_stats_on(self) -> None:
        if self._stats_fd is None and not self._stats_refused:
            try:
                self._stats_fd = syscall.enable_stats()
            except CapabilityError:
                self._stats_refused = True

    def _signal(self, now_ns: int) -> Self:
        before_ns, before_cpu_s, before_bytes = self._before
        cpu_s, wire_bytes = self._cpu_s(), self._wire_bytes()
        self._before = (now_ns, cpu_s, wire_bytes)
        window_ns = max(now_ns - before_ns, 1)
        return Self(
            **header(self._host, now_ns),
            cpu_share=(cpu_s - before_cpu_s) * 1e9 / window_ns,
            window_ns=window_ns,
            resident_bytes=resident_bytes() + self._pacer()[1],
            probe_bytes_per_s=float(wire_bytes - before_bytes) * 1e9 / window_ns,
            programs=[self._cost(name, fd) for name, fd in self._programs.items()],
            drops=self._drops(),
            failed=self._failed(),
        )

    def _cpu_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime + self._pacer()[0] * 1e-9

    def _cost(self, name: str, fd: int) -> ProgramCost:
        run_time_ns, runs = syscall.program_run_time(fd)
        return ProgramCost(name=name, runs=runs, run_time_ns=None if self._stats_refused else run_time_ns)


def resident_bytes(process: str = "self") -> int:
    """Memory of a process that lies in RAM now; 0 when it has ended."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
