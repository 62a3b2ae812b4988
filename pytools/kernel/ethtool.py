"""What a network driver counts, and its speed, over the ethtool ioctl.

The names of the statistics are the driver's own; they may change with its settings, so their number is asked for each
time and the names again when it is another. Acts on interfaces of the network namespace of the thread that makes the
socket. Blocking: some drivers ask their firmware, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import socket
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

_SIOCETHTOOL: Final = 0x8946
_GET_SETTINGS, _GET_STRINGS, _GET_STATISTICS, _GET_SET_INFO = 0x01, 0x1B, 0x1D, 0x37
_SET_OF_STATISTICS: Final = 1  # ETH_SS_STATS
_NAME_BYTES: Final = 32  # ETH_GSTRING_LEN
_REQUEST = struct.Struct("=16sQ16x")  # struct ifreq: name, pointer
_SETTINGS_BYTES: Final = 44  # struct ethtool_cmd
_SPEED_LOW, _SPEED_HIGH = 12, 28  # offsets in it
_SPEED_UNKNOWN: Final = 0xFFFFFFFF


class Ethtool:
    """Asks drivers in the calling thread's network namespace."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()

    def count(self, interface: str) -> int:
        """How many statistics the driver has; 0 when it has none, or the interface is gone."""
        room = bytearray(struct.pack("=IIQI", _GET_SET_INFO, 0, 1 << _SET_OF_STATISTICS, 0))
        if not self._ask(interface, room):
            return 0
        (there,) = struct.unpack_from("=Q", room, 8)
        return int(struct.unpack_from("=I", room, 16)[0]) if there else 0

    def names(self, interface: str, count: int) -> list[str]:
        """The names of the statistics, as the driver writes them but for blanks around; empty when it will not say."""
        room = bytearray(12 + 2 * count * _NAME_BYTES)  # for the reason that `values` gives
        struct.pack_into("=III", room, 0, _GET_STRINGS, _SET_OF_STATISTICS, count)
        if not self._ask(interface, room) or struct.unpack_from("=I", room, 8)[0] != count:
            return []
        texts = (bytes(room[at : at + _NAME_BYTES]) for at in range(12, 12 + count * _NAME_BYTES, _NAME_BYTES))
        return [text.split(b"\0", 1)[0].decode(errors="replace").strip() for text in texts]

    def values(self, interface: str, count: int) -> npt.NDArray[np.uint64] | None:
        """The statistics in the order of the names; None when the driver now has another number of them."""
        # A driver may write as many as it has at that moment: room for twice as many is what keeps our memory whole.
        room = bytearray(8 + 2 * count * 8)
        struct.pack_into("=II", room, 0, _GET_STATISTICS, count)
        if not self._ask(interface, room) or struct.unpack_from("=I", room, 4)[0] != count:
            return None
        return np.frombuffer(bytes(room), np.uint64, count, 8)

    def speed_mbps(self, interface: str) -> int | None:
        """Speed of the link in Mbit/s; None while there is none, or the driver does not know."""
        room = bytearray(_SETTINGS_BYTES)
        struct.pack_into("=I", room, 0, _GET_SETTINGS)
        if not self._ask(interface, room):
            return None
        low, high = struct.unpack_from("=H", room, _SPEED_LOW)[0], struct.unpack_from("=H", room, _SPEED_HIGH)[0]
        speed = int(high << 16 | low)
        return None if speed in (0, 0xFFFF, _SPEED_UNKNOWN) else speed

    def _ask(self, interface: str, room: bytearray) -> bool:
        """Have the driver fill the room; whether it did."""
        buffer = (ctypes.c_char * len(room)).from_buffer(room)
        request = _REQUEST.pack(interface.encode(), ctypes.addressof(buffer))
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._socket.fileno(), _SIOCETHTOOL, request)
            return True
        return False
