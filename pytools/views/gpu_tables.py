"""The table of GPUs. Pure: a model and the signals that passed the filters in, a renderable out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from pytools import units
from pytools.signals import Gpu, GpuClock
from pytools.units import UNKNOWN
from pytools.views import empty_states
from pytools.views.columns import Column, Listing, far, figure, little, much, named
from pytools.views.overview import Overview, Part, filters_first
from pytools.views.tables import alarm, number

_FAILED: Final = 6  # lines below the table
_HARMLESS: Final = frozenset({"idle", "application_clocks", "display_clocks", "sync_boost"})


def gpus(_now_ns: int) -> Listing[Gpu]:
    return Listing(
        (
            Column("GPU", lambda row: f"{row.gpu} {row.name}\n  {row.pci}", {"gpu": little(lambda row: row.gpu)}, True),
            Column("state", _state, {"state": much(lambda row: row.state != "ok")}, left=True),
            figure("busy", "busy", units.share, lambda row: row.busy),
            Column(
                "SM MHz\nlowest / max",
                lambda row: f"{number(_rounded(row.sm_mhz))}\n{number(row.sm_low_mhz)} / {number(row.sm_max_mhz)}",
                {"sm": little(lambda row: row.sm_mhz)},
            ),
            Column("slowed by", _slowed, {"slowed": much(_lowered)}, left=True),
            Column(
                "power\nlimit",
                lambda row: f"{_watts(row.power_w)}\n{_watts(row.power_limit_w)}",
                {"power": much(lambda row: row.power_w)},
                spare=2,
            ),
            figure("°C", "temperature", number, lambda row: row.temperature_c, 1),
            figure("ECC un-\ncorrected", "ecc", alarm, lambda row: row.ecc_uncorrected_total),
            Column("XID", _xids, {"xid": much(lambda row: len(row.xids))}, left=True),
            Column("PCIe\nof max", _pcie, {"pcie": much(_narrow)}, left=True, spare=3),
            figure("PCIe\nreplays", "replays", alarm, lambda row: row.pcie_replays),
            Column("NVLinks\nup / all", _links, {"links": little(lambda row: _up(row) or None)}, spare=4),
            figure("NVLink\nerrors", "link-errors", alarm, lambda row: row.link_errors),
            figure("NVLink\nsent", "sent", units.bit_rate, lambda row: _link_rate(row, "sent_bytes_per_s"), 5),
        ),
        lambda row: (row.state == "ok", row.gpu),
    )


def timers(_now_ns: int) -> Listing[GpuClock]:
    """One row per GPU whose timer is related to the host's clock."""
    return Listing(
        (
            figure("GPU", "uuid", str, lambda row: row.uuid, order=named),
            Column("timer", lambda row: row.state, left=True),
            figure("timer minus CLOCK_MONOTONIC", "offset", "{:,} ns".format, lambda row: row.offset_ns, order=far),
            figure("±", "bound", units.duration, lambda row: row.bound_ns),
            figure("hard ±", "hard", units.duration, lambda row: row.hard_bound_ns),
            Column("drift", lambda row: f"{row.drift_ppb / 1000:+.3f} ppm", {"drift": far(lambda row: row.drift_ppb)}),
            figure("round trip", "round-trip", units.duration, lambda row: row.round_trip_min_ns),
            figure("pings", "pings", number, lambda row: row.pings, order=little),
        ),
        lambda row: (row.uuid,),
    )


def complaints(row: Gpu) -> list[str]:
    """What is wrong with a GPU, in words; empty when nothing is."""
    if row.state != "ok":
        return [f"{row.state}: {row.reason}"]
    lowered = [each for each in row.clock_reasons if each.reason not in _HARMLESS]
    return [
        *(f"XID {xid}" for xid in row.xids),
        *([f"{row.ecc_uncorrected} uncorrected ECC errors"] if row.ecc_uncorrected else []),
        *([f"{row.link_errors} NVLink errors"] if row.link_errors else []),
        *([f"{row.pcie_replays} PCIe replays"] if row.pcie_replays else []),
        *([f"PCIe ×{row.pcie_width} of ×{row.pcie_width_max}"] if _narrow(row) else []),
        *(f"clock lowered by {each.reason} ({units.share(each.share)})" for each in lowered),
    ]


def _lowered(row: Gpu) -> float:
    """The share of readings at which the clock was lowered by power, heat or hardware."""
    return max((each.share for each in row.clock_reasons if each.reason not in _HARMLESS), default=0.0)


def _link_rate(row: Gpu, direction: str) -> float | None:
    """Bits per second over all NVLinks."""
    known = [rate for each in row.links if (rate := getattr(each, direction)) is not None]
    return sum(known) * 8.0 if known else None


def _state(row: Gpu) -> Text:
    return Text(row.state, style="green" if row.state == "ok" else "bold red")


def _slowed(row: Gpu) -> Text:
    lines = [f"{each.reason} {units.share(each.share)}" for each in row.clock_reasons]
    return Text("\n".join(lines) or "nothing", style="red" if _lowered(row) else "")


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _watts(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} W"


def _xids(row: Gpu) -> Text:
    return Text(", ".join(map(str, row.xids)) or "none", style="bold red" if row.xids else "")


def _pcie(row: Gpu) -> Text:
    if row.pcie_generation is None or row.pcie_width is None:
        return Text(UNKNOWN)
    text = (
        f"{row.pcie_generation}.0 ×{row.pcie_width}\n{number(row.pcie_generation_max)}.0 ×{number(row.pcie_width_max)}"
    )
    return Text(text, style="yellow" if _narrow(row) else "")


def _narrow(row: Gpu) -> bool:
    """Whether the slot has fewer lanes than it could; a lower generation is normal while idle."""
    return row.pcie_width is not None and row.pcie_width_max is not None and row.pcie_width < row.pcie_width_max


def _up(row: Gpu) -> int:
    return sum(each.active for each in row.links)


def _links(row: Gpu) -> str:
    return f"{_up(row)} / {len(row.links)}" if row.links else UNKNOWN


def _gpu_remarks(rows: Sequence[Gpu]) -> list[RenderableType]:
    """What is wrong with each, and what NVML does not give."""
    failed = sorted({f"{name}: {reason}" for row in rows for name, reason in row.failed.items()})
    others = len(failed) - _FAILED
    return [
        *(Text(f"GPU {row.gpu}: {row.state}: {row.reason}", style="red") for row in rows if row.reason),
        *(Text(f"NVML gives nothing by {each}", style="dim") for each in failed[:_FAILED]),
        *([Text(f"and nothing by {others} other queries", style="dim")] if others > 0 else []),
    ]


overview: Final = Overview(
    [
        Part(Gpu, gpus, "{host}: GPUs, over {window}{asked}", remarks=_gpu_remarks),
        Part(GpuClock, timers, "{host}: timers of the GPUs{asked}"),
    ],
    filters_first(empty_states.no_gpus),
)
