"""GPUs: clocks and what lowers them, temperature, power, errors, PCIe, NVLink; their timers against the host's."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pytools.signals.base import ClockState, Signal

GpuState = Literal["ok", "hung", "lost"]
GPU_REASONS: Final = (  # by bit of nvmlDeviceGetCurrentClocksEventReasons
    "idle",
    "application_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clocks",
)


class GpuReason(msgspec.Struct, frozen=True):
    """A reason for the present SM clock, as NVML gives it."""

    reason: str  # one of GPU_REASONS, or `bit_N` if newer
    share: float  # of the readings in the window


class GpuLink(msgspec.Struct, frozen=True):
    """One NVLink of a GPU."""

    link: int  # NVML's number
    active: bool
    sent_bytes_per_s: int | None  # payload, between the two latest readings
    received_bytes_per_s: int | None  # as `sent_bytes_per_s`
    errors: int | None  # new in the window: replays, recoveries and CRC errors


class Gpu(Signal, frozen=True, kw_only=True, tag="gpu"):
    """A GPU of this host, read through NVML.

    Once per long window with a subscriber. A figure is null before its first reading, and if the GPU does not have it.
    Each query is repeated at an interval that depends on its cost. Counts of errors have grown by so much between the
    readings that ended in this window.
    """

    gpu: int  # NVML's index
    uuid: str  # NVIDIA's identifier of it
    name: str  # product
    pci: str  # address of the device
    window_ns: int  # of the readings
    state: GpuState  # `hung`: a call of NVML has not returned for two seconds
    reason: str  # why it is not `ok`
    processes: list[int]  # with a compute context on it, ascending
    readings: int  # of the SM clock in the window
    sm_mhz: float | None  # SM clock, mean of the readings
    sm_low_mhz: int | None  # lowest reading in the window
    sm_max_mhz: int | None  # highest SM clock of this GPU
    memory_mhz: int | None  # memory clock
    memory_max_mhz: int | None  # highest memory clock of this GPU
    clock_reasons: list[GpuReason]  # in the window, most frequent first
    busy: float | None  # share of the time during which a kernel ran, over NVML's period (below a second)
    memory_busy: float | None  # share of the time during which memory was read or written
    power_w: float | None  # drawn, at the latest reading
    power_limit_w: float | None  # in force
    temperature_c: int | None  # at the latest reading
    ecc_corrected: int | None  # new in the window
    ecc_uncorrected: int | None  # new in the window
    ecc_corrected_total: int | None  # since the driver was loaded
    ecc_uncorrected_total: int | None  # since the driver was loaded
    xids: list[int]  # XID errors in the window, at most 16
    pcie_generation: int | None  # in use; lower while idle
    pcie_generation_max: int | None  # that GPU and slot are capable of
    pcie_width: int | None  # lanes in use
    pcie_width_max: int | None  # lanes that GPU and slot are capable of
    pcie_replays: int | None  # new in the window
    pcie_sent_bytes_per_s: int | None  # over 20 ms, at the latest reading
    pcie_received_bytes_per_s: int | None  # as `pcie_sent_bytes_per_s`
    links: list[GpuLink]  # NVLinks
    failed: dict[str, str]  # NVML functions that give nothing, each with the reason

    @property
    def link_errors(self) -> int | None:
        """New errors on all NVLinks; None before a second reading."""
        known = [each.errors for each in self.links if each.errors is not None]
        return sum(known) if known else None


class GpuClock(Signal, frozen=True, kw_only=True, tag="gpu_clock"):
    """A GPU's timer (`globaltimer`) against CLOCK_MONOTONIC of its host, from pings through host memory.

    Once per second if `gpu.clock` is on, or by `swerve gpu clock`.
    """

    uuid: str  # of the GPU
    epoch_ns: int  # the time of CLOCK_MONOTONIC for which the offset is given
    window_ns: int  # of the pings
    offset_ns: int  # globaltimer minus CLOCK_MONOTONIC
    drift_ppb: float  # growth: at t the offset is offset_ns + drift_ppb * (t - epoch_ns) / 1e9
    sigma_ns: float  # standard deviation of the offset by statistics alone
    drift_sigma_ppb: float  # standard deviation of the drift
    bound_ns: int  # of the offset: statistics and the allowances for waits and asymmetry
    hard_bound_ns: int  # half of the smallest round trip, no assumption
    wander_ppb_per_s: float  # the drift changes no faster
    state: ClockState  # of the fit
    round_trip_min_ns: int  # smallest round trip in the window
    pings: int  # that the fit rests on
    stepped: bool  # the timer was stepped; the line is of the pings after it
