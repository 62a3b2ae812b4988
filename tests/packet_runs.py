"""BPF_PROG_TEST_RUN: a loaded TC program, one packet at a time, without allocating anything.

Imported as `packet_runs`. The calling thread's network namespace is the one the packets come in by. One thread.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final, NamedTuple

from pytools.kernel.bpf import syscall

UNSPEC, DROPPED, REDIRECTED = 0xFFFFFFFF, 2, 7  # what TC is told
LOOPBACK: Final = 1  # interface index that packets come in by unless another one is named
LONGEST: Final = 3000  # of a packet: the kernel's test run takes what fits into a page

_PROG_TEST_RUN: Final = 10
_ROOM: Final = 4096
_CONTEXT_BYTES: Final = 192  # struct __sk_buff
_MARK, _IFINDEX, _LEAVES, _SEGMENTS, _SEGMENT_BYTES = 8, 40, 152, 164, 176
_ATTRIBUTES: Final = struct.Struct("=4I2Q4I2Q16x")  # of the command


class Run(NamedTuple):
    """What a program made of a packet."""

    verdict: int
    frame: bytes
    mark: int
    leaves_ns: int  # skb->tstamp


class PacketRuns:
    """Runs TC programs on packets that go nowhere."""

    def __init__(self) -> None:
        self._data, self._left = (ctypes.create_string_buffer(_ROOM) for _ in range(2))
        self._context = ctypes.create_string_buffer(_CONTEXT_BYTES)
        self._command = ctypes.create_string_buffer(_ATTRIBUTES.size)
        self._places = tuple(syscall.address(each) for each in (self._data, self._left, self._context))

    def run(
        self,
        program: int,
        frame: bytes,
        mark: int = 0,
        ifindex: int = 0,
        segments: int = 0,
        segment_bytes: int = 0,
        repeat: int = 1,
    ) -> Run:
        """Run a program on one packet.

        Parameters
        ----------
        mark, ifindex : int
            Of the packet; interface 0 is the loopback.
        segments, segment_bytes : int
            How many packets GRO or GSO is said to have merged into this one; the payload of each but the last.
        repeat : int
            How often; the program must leave the packet as it is.
        """
        data, left, context = self._places
        ctypes.memmove(data, frame, len(frame))
        ctypes.memset(context, 0, _CONTEXT_BYTES)
        struct.pack_into("=I", self._context, _MARK, mark)
        struct.pack_into("=I", self._context, _IFINDEX, ifindex)
        struct.pack_into("=I", self._context, _SEGMENTS, segments)
        struct.pack_into("=I", self._context, _SEGMENT_BYTES, segment_bytes)
        sizes = (len(frame), _ROOM)
        contexts = (_CONTEXT_BYTES, _CONTEXT_BYTES, context, context)
        _ATTRIBUTES.pack_into(self._command, 0, program, 0, *sizes, data, left, repeat, 0, *contexts)
        syscall.call(_PROG_TEST_RUN, self._command, _ATTRIBUTES.size)
        _, verdict, _, size = struct.unpack_from("=4I", self._command)
        (mark,) = struct.unpack_from("=I", self._context, _MARK)
        (leaves_ns,) = struct.unpack_from("=Q", self._context, _LEAVES)
        return Run(verdict, ctypes.string_at(left, size), mark, leaves_ns)
