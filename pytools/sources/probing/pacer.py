"""The pacer: a small process that sends the agent's probes when they are due, and does nothing else.

Run as `python -I -S pacer.py CONTROL PACKETS MEMORY PRIORITY`, the first three being descriptors: a socket to the
agent, the packet socket, and the memory that `schedule.py` fills. What is due was put there some hundred milliseconds
ahead, so probes leave on time while the agent is kept waiting; when the plan is used up, nothing is sent. It runs at
the real-time priority PRIORITY where it may: it sleeps between ticks, and a tick is a bounded number of frames.

Standard library only: it starts in 15 ms and needs 10 MB. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time

# The memory begins with words (int64): how many ticks were planned, begun and done since the start, the processor time
# that we have used, whether we wait for a plan, and how many entries follow.
PLANNED, BEGUN, DONE, CPU, WAITING, ENTRIES = range(6)
FIRST_ENTRY = 8
# The entry of tick n is entry n modulo ENTRIES: when it is due, when it is too late for it, when it began (0: it was
# left out), and groups of messages. Of each: where its headers are in the memory, how many, and how long after the
# group before it is to leave.
DUE, TOO_LATE, BEGAN, GROUPS, FIRST_GROUP = range(5)
GROUP_WORDS, MOST_GROUPS = 3, 6
ENTRY_WORDS = FIRST_GROUP + GROUP_WORDS * MOST_GROUPS

HEADER_BYTES = 64  # struct mmsghdr
RESULT_AT = 56  # in it: the agent writes 0, the kernel how many bytes were sent, and we the errno of a refusal, negated

# Over the control socket, a byte each: READY is ours, with the address of the memory here. HOLD is answered with HELD,
# and then nothing is sent until GO. A plan for a pacer that waits comes with GO, too.
READY, HOLD, HELD, GO = b"R", b"H", b"D", b"G"

_MOST_RT_US = 200_000
_PR_SET_PDEATHSIG = 1


class Pacer:
    """Works off the plan in the memory."""

    def __init__(self, control: socket.socket, packets_fd: int, memory: mmap.mmap) -> None:
        self._control, self._packets_fd = control, packets_fd
        self._sendmmsg = ctypes.CDLL(None, use_errno=True).sendmmsg
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._words = memoryview(memory).cast("q")
        self._results = memoryview(memory).cast("i")

    def run(self) -> None:
        """Until the agent goes."""
        self._control.send(READY + self._base.to_bytes(8, sys.byteorder))
        words = self._words
        alive = self._obey()  # there is no plan yet
        while alive:
            tick = words[BEGUN]
            if tick == words[PLANNED]:
                alive = self._wait()
                continue
            entry = FIRST_ENTRY + tick % words[ENTRIES] * ENTRY_WORDS
            left_ns = words[entry + DUE] - time.monotonic_ns()
            if left_ns <= 0:
                self._send_tick(tick, entry)
            elif select.select((self._control,), (), (), left_ns * 1e-9)[0]:
                alive = self._obey()

    def _wait(self) -> bool:
        """For a plan; false when the agent is gone."""
        words = self._words
        words[WAITING] = 1
        alive = words[BEGUN] != words[PLANNED] or self._obey()  # it may have come a moment ago
        words[WAITING] = 0
        return alive

    def _obey(self) -> bool:
        """Wait for a word of the agent, and do what it says; false when the agent is gone."""
        word = self._control.recv(1)
        while word == HOLD:
            self._control.send(HELD)
            word = self._control.recv(1)
        return word == GO

    def _send_tick(self, tick: int, entry: int) -> None:
        words = self._words
        began_ns = time.monotonic_ns()
        left_out = began_ns > words[entry + TOO_LATE]
        words[entry + BEGAN] = 0 if left_out else began_ns
        words[BEGUN] = tick + 1  # before the first frame: whoever sees an answer sees that its probe was sent
        at = entry + FIRST_GROUP
        for group in range(at, at if left_out else at + GROUP_WORDS * words[entry + GROUPS], GROUP_WORDS):
            headers, count, spacing_ns = words[group : group + GROUP_WORDS]
            while spacing_ns and time.monotonic_ns() < began_ns + spacing_ns:
                pass  # microseconds: no timer is as punctual
            began_ns = time.monotonic_ns()
            self._send(headers, count)
        words[CPU] = time.process_time_ns()
        words[DONE] = tick + 1

    def _send(self, headers: int, count: int) -> None:
        """Send so many messages in as few system calls as possible."""
        start = 0
        while start < count:
            first = ctypes.c_void_p(self._base + headers + start * HEADER_BYTES)
            sent = self._sendmmsg(self._packets_fd, first, count - start, socket.MSG_DONTWAIT)
            if sent > 0:
                start += sent
                continue
            code = ctypes.get_errno()  # sendmmsg stops at the first that fails, and says why only when it is the first
            self._results[(headers + start * HEADER_BYTES + RESULT_AT) // 4] = -code
            if code == errno.EAGAIN:
                return  # the socket's buffer is full; those behind keep their 0
            start += 1


def main(control_fd: int, packets_fd: int, memory_fd: int, priority: int) -> None:
    """Send what is planned until the agent goes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the agent, with which we end
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # else probes are late where others take all processors
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_RTTIME, (_MOST_RT_US, _MOST_RT_US))  # without a sleep; then we are ended
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    gc.disable()
    with contextlib.suppress(ConnectionError):
        Pacer(socket.socket(fileno=control_fd), packets_fd, mmap.mmap(memory_fd, 0)).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
