"""The minimum retransmission timeout (RTO) of our routes: what this kernel can time, and what it has without us."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.errors import RefusedError
from pytools.units import MS, duration_text
from steering.policy.model import Manage

_COARSE_CLOCK: Final = 6  # CLOCK_MONOTONIC_COARSE: advances with the kernel's timer tick
_TICKS: Final = 2  # TCP_TIMEOUT_MIN: TCP sets no timer to less
_SETTING: Final = Path("/proc/sys/net/ipv4/tcp_rto_min_us")  # since Linux 6.11
_KERNELS_NS: Final = 200 * MS


@dataclass(frozen=True, slots=True)
class Chosen:
    milliseconds: int  # 0: our routes have none
    before_ms: int  # of connections without it
    why_not: str = ""  # why our routes have none though the policy names one


def chosen(manage: Manage) -> Chosen:
    """The minimum RTO that our routes have in the network namespace that we are in.

    Raises
    ------
    RefusedError
        If this kernel cannot time it.
    """
    wanted, least, before = manage.rto_min or 0, _TICKS * _tick_ns(), _setting_ns()
    if not wanted:
        return Chosen(0, before // MS)
    if wanted < least:
        raise RefusedError(
            f"manage.rto_min: {duration_text(wanted)} is less than two timer ticks of this kernel (CONFIG_HZ)",
            f"set it to {duration_text(least)} or more",
        )
    if wanted >= before:  # the route's would raise it
        return Chosen(0, before // MS, f"connections have {duration_text(before)} already (net.ipv4.tcp_rto_min_us)")
    return Chosen(wanted // MS, before // MS)


def _tick_ns() -> int:
    return round(time.clock_getres(_COARSE_CLOCK) * 1e9)


def _setting_ns() -> int:
    try:
        return int(_SETTING.read_text()) * 1_000
    except FileNotFoundError:
        return _KERNELS_NS
