"""Families of generic netlink, which the kernel numbers when it starts: found by name, asked, and asked for changes.

Of the network namespace in which a `Family` is made. One thread per `Family`.
"""

from __future__ import annotations

import struct
from typing import Final

from pytools.closing import Closing
from pytools.kernel.netlink.socket import NetlinkError, NetlinkSocket, attribute, attributes

_NETLINK_GENERIC, _CONTROL, _GET_FAMILY = 16, 0x10, 3
_FAMILY_ID, _FAMILY_NAME = 1, 2  # CTRL_ATTR_*
_HEADER: Final = struct.Struct("=BBxx")  # struct genlmsghdr: command, version
_VERSION: Final = 1


class Family(Closing):
    """One of them.

    Raises
    ------
    SwerveError
        If the kernel has no such family.
    """

    def __init__(self, name: str) -> None:
        self._socket = NetlinkSocket(_NETLINK_GENERIC)
        try:
            body = _HEADER.pack(_GET_FAMILY, _VERSION) + attribute(_FAMILY_NAME, f"{name}\0".encode())
            answer = self._socket.get_body(body, _CONTROL, f"finding {name} of generic netlink")
            self._id: int = struct.unpack("=H", dict(attributes(answer, _HEADER.size))[_FAMILY_ID])[0]
        except BaseException:
            self._socket.close()
            raise

    def change(self, command: int, body: bytes, what: str) -> NetlinkError | None:
        """Ask for a change; its refusal."""
        [refusal] = self._socket.change_bodies([_HEADER.pack(command, _VERSION) + body], self._id, 0, what)
        return refusal

    def answers(self, command: int, body: bytes, what: str) -> list[bytes]:
        """All parts of an answer, without their headers."""
        parts = self._socket.get_bodies(_HEADER.pack(command, _VERSION) + body, self._id, what)
        return [part[_HEADER.size :] for part in parts]

    def close(self) -> None:
        self._socket.close()
