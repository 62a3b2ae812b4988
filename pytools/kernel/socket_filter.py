"""Classic BPF on a socket: the kernel drops what a program refuses. Standard library only."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from typing import Final

_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("=HBBI")  # struct sock_filter

LOAD_WORD, LOAD_HALF, LOAD_BYTE, EQUAL, RETURN = 0x20, 0x28, 0x30, 0x15, 0x06
ANCILLARY: Final = 0xFFFFF000  # SKF_AD_OFF: what is loaded from there on the packet does not hold
PACKET_TYPE, INTERFACE = ANCILLARY + 4, ANCILLARY + 8
ALL: Final = 0xFFFFFFFF  # to be returned: take the whole packet

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def attach(sock: socket.socket, code: Sequence[Instruction]) -> None:
    """Have the kernel run this program on everything that comes to a socket.

    Raises
    ------
    OSError
        If the kernel refuses it.
    """
    program = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(code), ctypes.addressof(program)))
