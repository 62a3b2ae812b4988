"""The schedule of the probes: what leaves when, in memory that is shared with the process that sends it.

The agent plans some hundred milliseconds ahead and reads the results afterwards; `pacer.c` sends. Messages lie in the
memory as sendmmsg(2) takes them. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.errors import CapabilityError, UsageError
from pytools.kernel.native import PACER
from pytools.sources.cost import resident_bytes
from pytools.sources.probing import pacer

PRIORITY: Final = 40  # SCHED_FIFO; below that of interrupt threads
MEMORY_BYTES: Final = 64 << 20  # of which only what is used is there
_PATIENCE_S: Final = 5.0
_DONE_WITHIN_NS: Final = 5_000_000
_READY: Final = struct.Struct("=cQI")  # READY, the address of the memory there, LAYOUT


class Group(NamedTuple):
    """Messages that leave together, as an entry names them."""

    headers_at: int
    messages: int
    spacing_ns: int  # after the group before


class Schedule:
    """Ticks, numbered from 0; each may be planned once, and its entry is used again `ticks` later.

    Parameters
    ----------
    packets : socket
        What messages are sent by.
    paths_fd : int
        The map probe_paths, in which the pacer sees answers that are overdue; -1: it does not look.

    Raises
    ------
    CapabilityError
        If the pacer does not start.
    """

    def __init__(self, packets: socket.socket, paths_fd: int = -1) -> None:
        self.restarts = 0
        self._packets, self._paths_fd = packets, paths_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._said = select.epoll()  # by edges: what is not taken, and the end, wake nobody twice
        self._memory_fd = os.memfd_create("swerve-probes", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, MEMORY_BYTES)
        self._memory = mmap.mmap(self._memory_fd, MEMORY_BYTES)
        self._words = np.frombuffer(self._memory, np.int64)
        self._base = self._words.ctypes.data
        self._away = 0  # how far the pacer's addresses are from ours
        self.set_ticks(1)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # ---- the process ----

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        self._said.register(ours, select.EPOLLIN | select.EPOLLET)
        fds = theirs.fileno(), self._packets.fileno(), self._memory_fd
        words = [str(PACER.ready()), *map(str, (*fds, self._paths_fd, PRIORITY))]
        passed = fds if self._paths_fd < 0 else (*fds, self._paths_fd)
        try:
            with theirs:
                self._process = subprocess.Popen(words, pass_fds=passed, stdin=subprocess.DEVNULL)
            ready = self._answer()
        except OSError as error:
            self._end()
            raise CapabilityError(
                f"the process that sends probes: {error.strerror}", "free memory or processes on this host"
            ) from None
        word, address, layout = _READY.unpack(ready) if len(ready) == _READY.size else (b"", 0, 0)
        if word != pacer.READY or layout != pacer.LAYOUT:
            self._end()
            raise CapabilityError(
                "the process that sends probes does not start", f"remove {words[0]}: the next start builds it anew"
            )
        self._away = address - self._base
        self._running = False

    def _answer(self) -> bytes:
        """What the pacer says next; nothing when it is gone, or silent for too long."""
        assert self._control is not None
        answers = select.poll()  # of any number: select(2) takes no descriptor beyond 1023
        answers.register(self._control, select.POLLIN)
        return self._control.recv(64) if answers.poll(_PATIENCE_S * 1e3) else b""

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # with which it ends
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def fileno(self) -> int:
        """For a selector: readable when the pacer has ended, or sees an answer overdue, until `hear` is called."""
        return self._said.fileno()

    def hear(self) -> bool:
        """Take what the pacer says, that an answer is overdue; False: it has ended, or did not start."""
        self._said.poll(0)
        try:
            while self._control is not None and self._control.recv(1, socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def watch(self, rows: int) -> None:
        """Let the pacer look at the first so many rows of its map."""
        self._words[pacer.ROWS] = rows

    def space(self, apart_bytes: int, apart_ns: int) -> None:
        """Leave out messages of a path along which less was sent since the one before, unless that is so long ago."""
        self._words[pacer.APART_NS], self._words[pacer.APART_BYTES] = apart_ns, apart_bytes

    @property
    def spaced_bytes(self) -> int:
        """What has been sent, in a schedule whose messages are left out like that."""
        return int(self._words[pacer.SENT_BYTES])

    def cost(self) -> tuple[int, int]:
        """Processor time that the pacer has used (ns), and its memory (bytes)."""
        used = resident_bytes(str(self._process.pid)) if self._process is not None else 0
        return int(self._words[pacer.CPU]), used

    def close(self) -> None:
        """End the pacer; no probe leaves any more."""
        self._end()
        self._said.close()
        os.close(self._memory_fd)
        del self._words
        with contextlib.suppress(BufferError):  # arrays of messages are still about: they go with the process
            self._memory.close()

    # ---- memory ----

    @contextlib.contextmanager
    def held(self) -> Iterator[tuple[int, int]]:
        """Nothing is sent inside, and the layout of the memory can change.

        Yields the first tick that has not begun and the first that was not planned; what is between is withdrawn.

        Raises
        ------
        CapabilityError
            If the pacer had to be started again and did not start.
        """
        self._hold()
        done, planned = self.done, self.planned
        self._words[pacer.PLANNED] = done
        yield done, planned

    def _hold(self) -> None:
        if not self._obeys_hold():
            self._end()
            self.restarts += 1
            self._words[pacer.DONE] = self._words[pacer.BEGUN]
            self._start()
        self._running = False

    def _obeys_hold(self) -> bool:
        if self._process is None or self._control is None:  # the last one did not start
            return False
        if not self._running:  # it waits for its first plan
            return self._process.poll() is None
        try:
            self._control.send(pacer.HOLD)
            while (answer := self._answer()) == pacer.OVERDUE:
                pass
            return answer == pacer.HELD
        except OSError:  # it has gone
            return False

    def set_ticks(self, ticks: int) -> None:
        """Have room for so many ticks ahead; only while held, as it takes all arrays back."""
        words = pacer.ENTRY_WORDS
        self._words[pacer.ENTRIES], self._ticks = ticks, ticks
        end = pacer.FIRST_ENTRY + ticks * words
        self._entries = self._words[pacer.FIRST_ENTRY : end].reshape(ticks, words)
        self.used_bytes = end * 8

    def rewind(self, used_bytes: int) -> None:
        """Take back the arrays that were made since `used_bytes` was this; only while held."""
        self.used_bytes = used_bytes

    def array(self, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        """A new array of zeros in the shared memory; it holds until the schedule is held again.

        Raises
        ------
        UsageError
            If there is no room for it.
        """
        count, dtype = int(np.prod(shape)), np.dtype(kind)
        if self.used_bytes + count * dtype.itemsize > MEMORY_BYTES:
            raise UsageError("there are too many probes to plan ahead", "lower probe.flows, or have fewer peers")
        found = np.frombuffer(self._memory, dtype, count, self.used_bytes).reshape(shape)
        found[...] = np.zeros((), dtype)
        self.used_bytes += -(-count * dtype.itemsize // 64) * 64
        return found

    def addresses(self, array: NDArray[Any]) -> NDArray[np.uint64]:
        """Where each row of an array in the shared memory lies for the pacer."""
        rows = np.arange(len(array), dtype=np.int64) * array.strides[0]
        return (array.ctypes.data + self._away + rows).astype(np.uint64)

    def group(self, headers: NDArray[Any], spacing_ns: int = 0) -> Group:
        """What an entry says of these messages, the headers of which lie in the shared memory."""
        return Group(headers.ctypes.data - self._base, len(headers), spacing_ns)

    # ---- the plan ----

    @property
    def planned(self) -> int:
        """How many ticks were planned in all."""
        return int(self._words[pacer.PLANNED])

    @property
    def done(self) -> int:
        """How many are over, sent or left out; waits a moment for one that has begun.

        Without a processor the pacer may be in the middle of one for longer: of that one nothing is known yet.
        """
        begun = int(self._words[pacer.BEGUN])
        end_ns = time.monotonic_ns() + _DONE_WITHIN_NS
        while self._words[pacer.DONE] < begun and time.monotonic_ns() < end_ns:
            os.sched_yield()
        return int(self._words[pacer.DONE])

    def began(self, ticks: NDArray[np.int64]) -> NDArray[np.int64]:
        """When these ticks began; 0: they were left out, being too late."""
        began: NDArray[np.int64] = self._entries[ticks % self._ticks, pacer.BEGAN]
        return began

    def plan(
        self, due_ns: NDArray[np.int64], too_late_ns: NDArray[np.int64], groups: Sequence[Sequence[Group]]
    ) -> None:
        """Plan more ticks.

        Parameters
        ----------
        due_ns, too_late_ns : ndarray of int64, shape (ticks,)
            When each is to begin, ascending, and from when on it is left out.
        groups : sequence
            Of each tick, what is to be sent.
        """
        first = self.planned
        for tick, due, late, wanted in zip(
            range(first, first + len(due_ns)), due_ns.tolist(), too_late_ns.tolist(), groups, strict=True
        ):
            entry = self._entries[tick % self._ticks]
            entry[pacer.DUE], entry[pacer.TOO_LATE], entry[pacer.GROUPS] = due, late, len(wanted)
            flat = [word for group in wanted for word in group]
            entry[pacer.FIRST_GROUP : pacer.FIRST_GROUP + len(flat)] = flat
        self._words[pacer.PLANNED] = first + len(due_ns)
        if not self._running or self._words[pacer.WAITING]:
            self._running = True
            with contextlib.suppress(OSError):  # it has gone
                if self._control is not None:
                    self._control.send(pacer.GO)
