"""What is asked of a GPU through NVML, and how often at most. A query that fails costs only itself.

Costs on an H200: clocks, reasons, power, temperature, ECC 2 µs; PCIe replays 0.18 ms; NVLink errors 3 ms a link,
throughput 0.8 ms a link; PCIe throughput 21 ms, each direction. `nvml` is the module `pynvml` (nvidia-ml-py), which is
imported where it is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pytools.sources.gpu.readings import Readings
from pytools.units import MS

MOST_LINKS: Final = 36  # NVML_NVLINK_MAX_LINKS
_KIB: Final = 1024


@dataclass
class Query:
    """A query of one GPU."""

    name: str  # function of NVML: what a failure is reported under
    every_ns: int  # between two of them, at least
    run: Callable[[], None]  # asks, and puts the answer into the readings; raises NVML's errors


def queries(nvml: Any, gpu: Any, into: Readings) -> list[Query]:
    sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED

    def figure(function: str, name: str, *arguments: Any, times: int = 1) -> Callable[[], None]:
        return lambda: into.set({name: getattr(nvml, function)(gpu, *arguments) * times})

    def busy() -> None:
        rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
        into.set({"busy": rates.gpu, "memory_busy": rates.memory})

    def ecc(kind: int, name: str) -> Callable[[], None]:
        return lambda: into.count({name: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)})

    def plain(function: str, name: str, every_ms: int) -> Query:
        return Query(function, every_ms * MS, figure(function, name))

    def throughput(name: str, direction: int, text: str) -> Query:
        function = "nvmlDeviceGetPcieThroughput"
        return Query(f"{function}({text})", 20_000 * MS, figure(function, name, direction, times=1000))

    def processes() -> None:
        into.processes(each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu))

    return [
        Query("nvmlDeviceGetClockInfo(SM)", 200 * MS, lambda: into.sm_clock(nvml.nvmlDeviceGetClockInfo(gpu, sm))),
        Query("nvmlDeviceGetCurrentClocksEventReasons", 200 * MS, lambda: into.reasons(_reasons(nvml, gpu))),
        Query("nvmlDeviceGetClockInfo(MEM)", 1000 * MS, figure("nvmlDeviceGetClockInfo", "memory_mhz", memory)),
        Query("nvmlDeviceGetMaxClockInfo(SM)", 60_000 * MS, figure("nvmlDeviceGetMaxClockInfo", "sm_max_mhz", sm)),
        Query(
            "nvmlDeviceGetMaxClockInfo(MEM)", 60_000 * MS, figure("nvmlDeviceGetMaxClockInfo", "memory_max_mhz", memory)
        ),
        Query("nvmlDeviceGetUtilizationRates", 500 * MS, busy),
        plain("nvmlDeviceGetPowerUsage", "power_mw", 500),
        plain("nvmlDeviceGetEnforcedPowerLimit", "power_limit_mw", 1000),
        Query(
            "nvmlDeviceGetTemperature",
            500 * MS,
            figure("nvmlDeviceGetTemperature", "temperature_c", nvml.NVML_TEMPERATURE_GPU),
        ),
        Query("nvmlDeviceGetComputeRunningProcesses", 1000 * MS, processes),
        Query("nvmlDeviceGetTotalEccErrors(corrected)", 1000 * MS, ecc(corrected, "ecc_corrected")),
        Query("nvmlDeviceGetTotalEccErrors(uncorrected)", 1000 * MS, ecc(uncorrected, "ecc_uncorrected")),
        plain("nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation", 1000),
        plain("nvmlDeviceGetCurrPcieLinkWidth", "pcie_width", 1000),
        plain("nvmlDeviceGetMaxPcieLinkGeneration", "pcie_generation_max", 10_000),
        plain("nvmlDeviceGetMaxPcieLinkWidth", "pcie_width_max", 10_000),
        Query(
            "nvmlDeviceGetPcieReplayCounter",
            2000 * MS,
            lambda: into.count({"pcie_replays": nvml.nvmlDeviceGetPcieReplayCounter(gpu)}),
        ),
        throughput("pcie_sent_bytes_per_s", nvml.NVML_PCIE_UTIL_TX_BYTES, "sent"),
        throughput("pcie_received_bytes_per_s", nvml.NVML_PCIE_UTIL_RX_BYTES, "received"),
        *_links(nvml, gpu, into),
    ]


def _reasons(nvml: Any, gpu: Any) -> int:
    """The mask, under the function's name of drivers before 535 too."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))


def _links(nvml: Any, gpu: Any, into: Readings) -> list[Query]:
    counters = [
        nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
    ]
    active: dict[int, bool] = {}

    def states() -> None:
        found: dict[int, bool] = {}
        for link in range(MOST_LINKS):
            try:
                found[link] = bool(nvml.nvmlDeviceGetNvLinkState(gpu, link))
            except (nvml.NVMLError_InvalidArgument, nvml.NVMLError_NotSupported):
                if link == 0:
                    raise
                break
        active.clear()
        active.update(found)
        into.links(found)

    def errors(link: int) -> Callable[[], None]:
        def run() -> None:
            if active.get(link):
                total = sum(nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter) for counter in counters)
                into.count({f"link{link}_errors": total})

        return run

    def traffic(link: int) -> Callable[[], None]:
        fields = {
            f"link{link}_sent": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
            f"link{link}_received": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        }

        def run() -> None:
            if not active.get(link):
                return
            at_ns = time.monotonic_ns()
            found = nvml.nvmlDeviceGetFieldValues(gpu, [(field, link) for field in fields.values()])
            for each in found:
                if each.nvmlReturn != nvml.NVML_SUCCESS:
                    raise nvml.NVMLError(each.nvmlReturn)
            into.rate({name: each.value.ullVal * _KIB for name, each in zip(fields, found, strict=True)}, at_ns)

        return run

    found = [Query("nvmlDeviceGetNvLinkState", 1000 * MS, states)]
    for link in range(MOST_LINKS):
        found.append(Query(f"nvmlDeviceGetNvLinkErrorCounter({link})", 30_000 * MS, errors(link)))
        found.append(Query(f"nvmlDeviceGetFieldValues(NVLINK_THROUGHPUT, {link})", 10_000 * MS, traffic(link)))
    return found
