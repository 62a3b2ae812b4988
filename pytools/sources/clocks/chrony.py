"""Feeds this host's offset to a local chronyd, as samples of a SOCK reference clock. swerve itself sets no clock.

chronyd creates a Unix datagram socket and takes one `struct sock_sample` per datagram: at system time `tv` the true
time was `tv + offset`. Runs in the agent's thread and never waits; without a chronyd each sample is dropped and
counted. Nanoseconds, of CLOCK_REALTIME where a name says so.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from pytools.errors import UsageError
from pytools.signals import Clock

INTERVAL_NS: Final = 1_000_000_000
# tv (seconds, microseconds), offset in seconds, pulse, leap, padding, magic: the layout on every 64-bit system, in
# native byte order, and with 64-bit time on 32-bit ones. chronyd drops a datagram of any other length.
SAMPLE: Final = struct.Struct("=qqdiiii")
MAGIC: Final = 0x534F434B
_NO_PULSE = _NO_LEAP = _PADDING = 0
_MICROSECOND_NS, _SECOND_NS = 1000, 1_000_000_000
_PATH_BYTES = 107  # of a Unix socket's address, less the closing zero
_READINGS = 5


def correction_ns(clock: Clock, at_ns: int, ours_ns: int, reference_ns: int) -> int | None:
    """What this host's CLOCK_REALTIME lacks: the reference's minus ours at one instant.

    Parameters
    ----------
    clock : Clock
        How this host's stamping clock runs against the reference's.
    at_ns : int
        The instant, by this host's stamping clock.
    ours_ns, reference_ns : int
        CLOCK_REALTIME minus the stamping clock, on this host and on the reference. On a host without a virtual
        clock it changes only when CLOCK_REALTIME is stepped (by hand, or for a leap second).

    Returns
    -------
    int or None
        None unless the clock is synchronised, and for the reference itself: it has nobody to follow here.
    """
    if clock.state != "synchronised" or clock.of == clock.reference:
        return None
    if clock.offset_ns is None or clock.drift_ppb is None:
        return None
    ahead_ns = clock.offset_ns + round(clock.drift_ppb * 1e-9 * (at_ns - clock.epoch_ns))
    return reference_ns - ours_ns - ahead_ns


def realtime_difference_ns(
    monotonic_ns: Callable[[], int] = time.monotonic_ns, realtime_ns: Callable[[], int] = time.time_ns
) -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, from the narrowest of a few readings."""
    narrowest: tuple[int, int] | None = None
    for _ in range(_READINGS):
        before, between, after = monotonic_ns(), realtime_ns(), monotonic_ns()
        reading = after - before, between - (before + after) // 2
        narrowest = reading if narrowest is None else min(narrowest, reading)
    assert narrowest is not None
    return narrowest[1]


def encode_sample(realtime_ns: int, offset_ns: int) -> bytes:
    seconds, rest_ns = divmod(realtime_ns, _SECOND_NS)
    tv = seconds, rest_ns // _MICROSECOND_NS
    return SAMPLE.pack(*tv, offset_ns / _SECOND_NS, _NO_PULSE, _NO_LEAP, _PADDING, MAGIC)


class ChronyFeed:
    """Sends samples to the socket of one SOCK reference clock, one a second at most.

    Parameters
    ----------
    path : str
        Where chronyd makes its socket; it may come, go and come back.

    Raises
    ------
    UsageError
        If no socket can have such a path.
    """

    def __init__(self, path: str) -> None:
        if not path.startswith("/") or len(path.encode()) > _PATH_BYTES:
            raise UsageError(
                f"clocks.chrony_socket: {path!r} is no place for a socket",
                f"give the absolute path of chrony.conf's refclock line, {_PATH_BYTES} bytes at most",
            )
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._due_ns: int | None = None
        self._lost = 0
        self.sent = 0

    def send(self, now_ns: int, realtime_ns: int, offset_ns: int | None) -> bool:
        """Send a sample unless the last attempt is less than a second ago.

        Parameters
        ----------
        now_ns : int
            CLOCK_MONOTONIC, for the rate alone.
        realtime_ns : int
            This host's CLOCK_REALTIME, not older than a second: chronyd ignores samples of long ago.
        offset_ns : int or None
            What CLOCK_REALTIME lacked at that instant; None: nothing that may be said (no sample, no loss).

        Returns
        -------
        bool
            Whether a sample was handed to chronyd's socket.
        """
        if offset_ns is None or (self._due_ns is not None and now_ns < self._due_ns):
            return False
        # A grid, so that a caller with a coarse period still comes to one a second on average.
        grid_ns = now_ns if self._due_ns is None else self._due_ns
        self._due_ns = max(grid_ns, now_ns - INTERVAL_NS // 2) + INTERVAL_NS
        try:
            self._socket.sendto(encode_sample(realtime_ns, offset_ns), self._path)
        except OSError:  # not there, nobody reads, full, not allowed: the next second tries again
            self._lost += 1
            return False
        self.sent += 1
        return True

    def drops(self) -> dict[str, int]:
        """Samples that did not reach chronyd's socket."""
        return {"chrony_samples_lost": self._lost}

    def close(self) -> None:
        """Give the socket back; chronyd's own stays."""
        self._socket.close()
