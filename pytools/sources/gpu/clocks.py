"""The timers of this host's GPUs against CLOCK_MONOTONIC: starts the child that pings them, and fits what it reads.

The child (`pings`) makes a CUDA context on every GPU. The lines of its output are validated no further than to lengths:
it is our own. One thread, the caller's; nothing here waits.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from pytools.estimators.clocks import EdgeFit
from pytools.estimators.gpu_clocks import MEMORY_NS, Pings, fit_pings, offset, wander_of
from pytools.signals import GpuClock, header
from pytools.sources.gpu.pings import HEADER, ROW_BYTES

WINDOW_NS: Final = 4 * 10**9
EVERY_NS: Final = 10**9  # from one line of a GPU to the next
BURST_MS: Final = 100
_LOOK_NS: Final = 100_000_000
_AGAIN_NS: Final = 60 * 10**9  # until a child that ended is started again
_SILENT_NS: Final = 30 * 10**9  # a child that said nothing for so long hangs
_CHUNK: Final = 1 << 16
_MOST_BYTES: Final = 1 << 20
_COMMAND: Final = (sys.executable, "-P", "-m", "pytools.sources.gpu.pings")


class _Timer:
    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.bursts: list[Pings] = []
        self.fit: EdgeFit | None = None
        self.stepped = False
        self.stepped_ns = 0  # a step is no change of the drift: older bursts say nothing of that

    def fit_window(self) -> None:
        if not self.bursts:
            return
        newest_ns = int(self.bursts[-1][-1, 2])
        self.bursts = [each for each in self.bursts if each[0, 0] >= newest_ns - MEMORY_NS]
        rows = np.concatenate([each for each in self.bursts if each[0, 0] >= newest_ns - WINDOW_NS])
        if self.fit is not None and self.fit.epoch_ns + WINDOW_NS < rows[0, 0]:
            self.fit = None  # a long pause: the drift may be another
        steady = [each for each in self.bursts if each[0, 0] > self.stepped_ns]
        self.fit = fit_pings(rows, self.fit, wander_of(steady)) or self.fit
        self.stepped = self.fit is not None and self.fit.stepped
        if self.stepped:
            self.stepped_ns = newest_ns


class GpuClocks:
    """Relates the timers of all GPUs to CLOCK_MONOTONIC.

    Parameters
    ----------
    publish : callable
        Gets a `GpuClock` per GPU and second.
    heard : callable, optional
        Gets each burst: UUID of the GPU, CPU that pinged or `pings.ANY_CPU`, and the pings; none if it ended early.
    """

    def __init__(
        self,
        host: str,
        publish: Callable[[GpuClock], None],
        burst_ms: int = BURST_MS,
        command: tuple[str, ...] = _COMMAND,
        heard: Callable[[str, int, Pings], object] | None = None,
    ) -> None:
        self._host, self._publish, self._heard = host, publish, heard
        self._command = (*command, str(burst_ms))
        self.problem = ""  # why nothing is known
        self._child: subprocess.Popen[bytes] | None = None
        self._begin_ns = self._heard_ns = self._turn_ns = 0
        self._left = b""
        self._timers: list[_Timer] = []
        self._waiting: list[_Timer] = []

    def tick(self, now_ns: int) -> int:
        """Read what there is, and fit the GPUs whose turn it is; returns when to be called next."""
        if self._child is None:
            if now_ns < self._begin_ns:
                return self._begin_ns
            self._start(now_ns)
        self._read(now_ns)
        if self._waiting:  # one at a time: a fit takes two milliseconds
            self._tell(self._waiting.pop(0), now_ns)
        elif now_ns >= self._turn_ns:
            self._turn_ns = max(self._turn_ns + EVERY_NS, now_ns)
            self._waiting = list(self._timers)
        return now_ns + (_LOOK_NS // 10 if self._waiting else _LOOK_NS)

    @property
    def running(self) -> bool:
        """Whether the child has named the GPUs, and reads them."""
        return self._child is not None and bool(self._timers)

    @property
    def unknown(self) -> int:
        """GPUs of which there is no line yet; of those that the child has named."""
        return sum(each.fit is None for each in self._timers)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        child.kill()  # its kernels end by themselves
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver: nothing ends it
            child.wait(0.2)

    def _start(self, now_ns: int) -> None:
        self._begin_ns, self._heard_ns, self._turn_ns, self._left = now_ns + _AGAIN_NS, now_ns, now_ns + EVERY_NS, b""
        self._timers, self._waiting = [], []
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,
        )
        for stream in (self._child.stdout, self._child.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    def _read(self, now_ns: int) -> None:
        if self._child is None or self._child.stdout is None:
            return
        while chunk := self._chunk(self._child.stdout.fileno()):
            self._left += chunk
            self._heard_ns = now_ns
            if len(self._left) > _MOST_BYTES:
                break
        self._parse()
        if chunk == b"":
            self._ended()
        elif now_ns - self._heard_ns > _SILENT_NS:
            self.close()
            self.problem = f"CUDA has not answered for {_SILENT_NS // 10**9} s"

    @staticmethod
    def _chunk(descriptor: int) -> bytes | None:
        try:
            return os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return None

    def _ended(self) -> None:
        """The child has ended, or closed its output: its last line of error says why."""
        assert self._child is not None and self._child.stderr is not None
        lines = (self._chunk(self._child.stderr.fileno()) or b"").decode(errors="replace").strip().splitlines()
        self.close()
        self.problem = lines[-1] if lines else "the process that reads the GPUs' timers ended"

    def _parse(self) -> None:
        if not self._timers:
            line, newline, rest = self._left.partition(b"\n")
            if not newline:
                return
            self._timers = [_Timer(each) for each in msgspec.json.decode(line, type=list[str])]
            self._left, self.problem = rest, ""
        place = 0
        while len(self._left) - place >= HEADER.size:
            number, cpu, count = HEADER.unpack_from(self._left, place)
            end = place + HEADER.size + count * ROW_BYTES
            if end > len(self._left):
                break
            timer = self._timers[number]
            rows = np.frombuffer(self._left[place + HEADER.size : end], np.int64).reshape(-1, 3)
            if count:
                timer.bursts.append(rows)
            if self._heard is not None:
                self._heard(timer.uuid, cpu, rows)
            place = end
        self._left = self._left[place:]

    def _tell(self, timer: _Timer, now_ns: int) -> None:
        timer.fit_window()
        fit = timer.fit
        if fit is None:
            return
        line = offset(fit)
        self._publish(
            GpuClock(
                **header(self._host, now_ns),
                uuid=timer.uuid,
                **fit.line,
                window_ns=WINDOW_NS,
                hard_bound_ns=line.hard_bound_ns,
                wander_ppb_per_s=fit.wander_ppb_per_s,
                state=line.aged(now_ns).state,
                round_trip_min_ns=fit.round_trip_min_ns,
                pings=2 * fit.kept,
                stepped=timer.stepped,
            )
        )
