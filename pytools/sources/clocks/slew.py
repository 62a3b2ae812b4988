"""How much the host's time service speeds CLOCK_MONOTONIC up against its oscillator: read from the kernel, never set.

A time service (chrony, ntpd, systemd-timesyncd) makes the kernel run the clock faster or slower than the hardware
behind it; to compare oscillators this must be subtracted. Frequencies in parts per billion, positive when the clock
runs faster than its oscillator. Any thread; needs no privilege.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Final

READ_ONLY: Final = 0  # `modes` of struct timex: no bit set, nothing is changed
NOMINAL_TICK_US: Final = 10_000  # a hundred ticks a second, whatever the kernel's own rate
# From the kernel's <linux/timex.h>.
STA_PLL: Final = 0x0001
STA_NANO: Final = 0x2000
_SHIFT_PLL: Final = 2
_PPB_PER_TICK_US: Final = 100_000  # one microsecond in ten thousand
_FREQUENCY_UNIT: Final = 1 << 16  # of one part per million

_libc = ctypes.CDLL(None, use_errno=True)


class Timex(ctypes.Structure):
    """`struct timex` of the kernel's interface."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        # still to be worked off by the kernel's loop: nanoseconds with STA_NANO, else microseconds
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),  # parts per million, times 65,536
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),  # STA_* bits
        ("constant", ctypes.c_long),  # of that loop: what is left shrinks by 1 / 2^(2 + constant) each second
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("fraction", ctypes.c_long),
        ("tick", ctypes.c_long),  # microseconds that the clock gains per hundredth of a second
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("reserved", ctypes.c_int * 11),
    )


def slew_ppb(correction: Timex) -> float:
    """By how much the clock is run faster than its oscillator, in parts per billion.

    What an adjtime() call has left to do is not in it: the kernel shows that to writers only.
    """
    steady: float = correction.freq * 1000 / _FREQUENCY_UNIT
    steady += (correction.tick - NOMINAL_TICK_US) * _PPB_PER_TICK_US
    if not correction.status & STA_PLL:
        return steady
    left_ns = correction.offset if correction.status & STA_NANO else correction.offset * 1000
    return steady + math.ldexp(left_ns, -(_SHIFT_PLL + correction.constant))


def adjtimex(reply: Timex) -> int:
    """adjtimex(2), for reading alone: swerve never sets a clock.

    Raises
    ------
    ValueError
        If the call would change one.
    """
    if reply.modes != READ_ONLY:
        raise ValueError(f"adjtimex with modes {reply.modes:#x} would change a clock")
    result: int = _libc.adjtimex(ctypes.byref(reply))
    return result


def read(call: Callable[[Timex], int] = adjtimex) -> Timex | None:
    """The kernel's correction right now; None where the kernel does not say (a sandbox may forbid the call)."""
    reply = Timex(modes=READ_ONLY)
    return None if call(reply) < 0 else reply


def host_slew_ppb() -> float | None:
    """This host's slew right now; None where the kernel does not say."""
    correction = read()
    return None if correction is None else slew_ppb(correction)
