"""GPUs: `gpu` of each, once per long window while somebody listens, and `gpu_clock` if the configuration asks for it.

While nobody listens, NVML is not opened. NVML is called in threads and CUDA in another process, so nothing of them can
hold up the agent. Times are CLOCK_MONOTONIC nanoseconds; one thread, the agent's.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.kernel.features import NVIDIA_DRIVER
from pytools.kernel.printable import printable
from pytools.signals import Gpu, GpuState, header
from pytools.sources.gpu.session import Session, Worker
from pytools.sources.source import Source

if TYPE_CHECKING:
    from pytools.sources.gpu.clocks import GpuClocks

_IDLE_NS: Final = 500_000_000  # to see that somebody listens
_AGAIN_NS: Final = 60 * 10**9  # until NVML is opened again that did not open
# Fields of the signal that are called as what was read: as it stands, and what it grew by.
_AS_READ: Final = (
    *("sm_max_mhz", "memory_mhz", "memory_max_mhz", "temperature_c", "pcie_generation", "pcie_generation_max"),
    *("pcie_width", "pcie_width_max", "pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"),
)
_GROWN: Final = ("ecc_corrected", "ecc_uncorrected", "pcie_replays")


class GpuSource(Source):
    """Publishes what NVML says of each GPU.

    Parameters
    ----------
    driver : Path, optional
        File without which there is nothing to ask.
    """

    def __init__(self, config: AgentConfig, bus: Bus, driver: Path = NVIDIA_DRIVER) -> None:
        self._host, self._bus, self._driver = config.host, bus, driver
        self._enabled, self._window_ns = config.gpu.enabled, config.windows.long_ns
        self._session: Session | None = None
        self._clocks: GpuClocks | None = None
        if config.gpu.clock:
            from pytools.sources.gpu import clocks

            self._clocks = clocks.GpuClocks(config.host, bus.publish)
        self._due_ns = self._began_ns = self._again_ns = 0

    @property
    def failed(self) -> dict[str, str]:
        """Why nothing is known of the GPUs, though there is a driver."""
        found = {}
        session = self._session
        if session is not None and not session.workers:
            problem = session.hung(time.monotonic_ns()) or session.problem
            if problem:
                found["gpu"] = printable(problem)
        if self._clocks is not None and self._clocks.problem:
            found["gpu_clock"] = printable(self._clocks.problem)
        return found

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""
        next_ns = self._clocks.tick(now_ns) if self._clocks is not None else now_ns + _IDLE_NS
        return min(next_ns, self._tick_nvml(now_ns))

    def _tick_nvml(self, now_ns: int) -> int:
        session = self._session
        if not self._enabled or not self._bus.wanted("gpu"):
            if session is not None:
                session.stop()
                if session.over:
                    self._session = None
            return now_ns + _IDLE_NS
        if session is None or session.stopped:
            if (session is None or session.over) and now_ns >= self._again_ns and self._driver.exists():
                self._session = Session()
                self._began_ns, self._due_ns = now_ns, now_ns + self._window_ns
                self._again_ns = now_ns + _AGAIN_NS
            return now_ns + _IDLE_NS
        if not session.workers and session.problem and now_ns >= self._again_ns:
            session.stop()
        if now_ns >= self._due_ns:
            window_ns, self._began_ns = now_ns - self._began_ns, now_ns
            for worker in session.workers:
                self._bus.publish(signal(self._host, worker, window_ns, now_ns))
            self._due_ns = max(self._due_ns + self._window_ns, now_ns)
        return self._due_ns

    def close(self) -> None:
        """Have the threads end, without waiting for them."""
        if self._session is not None:
            self._session.stop()
        if self._clocks is not None:
            self._clocks.close()


def signal(host: str, worker: Worker, window_ns: int, now_ns: int) -> Gpu:
    """What was read of a GPU since the last time."""
    taken, identity = worker.readings.take(), worker.identity
    hung = worker.hung(now_ns)
    state: GpuState = "hung" if hung else "lost" if worker.lost else "ok"
    figures = {} if hung else taken.figures  # what was read before the call stands no more
    figure, total = figures.get, taken.totals.get

    def scaled(name: str, by: float) -> float | None:
        value = figure(name)
        return None if value is None else value * by

    read: dict[str, Any] = {name: figure(name) for name in _AS_READ}
    read |= {name: taken.grown.get(name) for name in _GROWN}
    return Gpu(
        **header(host, now_ns),
        gpu=identity.index,
        uuid=printable(identity.uuid),
        name=printable(identity.name),
        pci=printable(identity.pci),
        window_ns=window_ns,
        state=state,
        reason=hung or worker.lost,
        processes=taken.processes,
        readings=len(taken.clocks),
        sm_mhz=sum(taken.clocks) / len(taken.clocks) if taken.clocks else None,
        sm_low_mhz=min(taken.clocks, default=None),
        clock_reasons=taken.reasons,
        busy=scaled("busy", 0.01),
        memory_busy=scaled("memory_busy", 0.01),
        power_w=scaled("power_mw", 0.001),
        power_limit_w=scaled("power_limit_mw", 0.001),
        ecc_corrected_total=total("ecc_corrected"),
        ecc_uncorrected_total=total("ecc_uncorrected"),
        xids=taken.xids,
        links=taken.links,
        failed=taken.failed,
        **read,
    )
