"""How fast the processor's time stamp counter runs, which an emulated processor has, too.

A guest's kernel measures it against a timer when it boots. Where the guest has no processor meanwhile, it comes to
another figure, and its clock runs several times too fast ever after: it is told instead. x86-64 alone; kHz.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Callable

_READ = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
_APART_S = 0.2
_TRIES = 20


@functools.cache
def frequency_khz() -> int:
    """Its frequency, to some millionths."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(_READ)
        place = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(place))
        first, first_ns = _both(read)
        time.sleep(_APART_S)
        last, last_ns = _both(read)
        del place
    return round((last - first) * 10**6 / (last_ns - first_ns))


def _both(read: Callable[[], int]) -> tuple[int, int]:
    """The counter and CLOCK_MONOTONIC at the same moment: of several looks the one that took the shortest."""
    looks = [(time.monotonic_ns(), read(), time.monotonic_ns()) for _ in range(_TRIES)]
    began_ns, counter, ended_ns = min(looks, key=lambda look: look[2] - look[0])
    return counter, (began_ns + ended_ns) // 2
