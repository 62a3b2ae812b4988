"""MPTCP's userspace path manager (generic netlink `mptcp_pm`): further subflows of a connection, and the end of one.

Of the network namespace in which a `PathManager` is made. Works where `net.mptcp.pm_type` is 1 there (Linux 5.19); a
connection keeps the path manager that it began with. One thread per `PathManager`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pytools.closing import Closing
from pytools.kernel.netlink.generic import Family
from pytools.kernel.netlink.sockdiag import Diagnostics
from pytools.kernel.netlink.socket import attribute

_CREATE, _DESTROY = 10, 11  # MPTCP_PM_CMD_SUBFLOW_*
_LOCAL, _TOKEN, _REMOTE = 1, 4, 6  # MPTCP_PM_ATTR_*
_ADDRESS_FAMILY, _ADDRESS_ID, _ADDRESS_4, _PORT = 1, 2, 3, 5  # MPTCP_PM_ADDR_ATTR_*
_NESTED: Final = 0x8000
_ESTABLISHED: Final = 1


@dataclass(frozen=True, slots=True)
class Subflow:
    """One TCP connection of an MPTCP connection over IPv4."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    token: int  # of the MPTCP connection, on this host
    local_id: int  # of its local address there
    established: bool


class PathManager(Closing):
    """Asks for subflows.

    Raises
    ------
    SwerveError
        If the kernel has no MPTCP, or no socket diagnostics.
    """

    def __init__(self) -> None:
        self._family = Family("mptcp_pm")
        try:
            self._diagnostics = Diagnostics()
        except BaseException:
            self._family.close()
            raise

    def close(self) -> None:
        self._diagnostics.close()
        self._family.close()

    def subflows(self) -> Iterator[Subflow]:
        """All over IPv4 that send or receive.

        Raises
        ------
        SwerveError
            If the kernel refuses.
        """
        for each in self._diagnostics.sockets():
            if each.mptcp is not None and each.family == socket.AF_INET and each.remote_port:
                ends = each.local, each.local_port, each.remote, each.remote_port
                yield Subflow(*ends, *each.mptcp, each.state == _ESTABLISHED)

    def create(self, like: Subflow, port: int, local_id: int) -> str:
        """Add a subflow between the same addresses from another local port; why not, empty when it is under way."""
        return self._change(_CREATE, like, port, local_id)

    def destroy(self, subflow: Subflow) -> str:
        """End a subflow; why not, empty when it is done."""
        return self._change(_DESTROY, subflow, subflow.local_port, subflow.local_id)

    def _change(self, command: int, subflow: Subflow, port: int, local_id: int) -> str:
        local = _end(subflow.local, port) + attribute(_ADDRESS_ID, struct.pack("=B", local_id))
        body = attribute(_LOCAL | _NESTED, local) + attribute(_TOKEN, struct.pack("=I", subflow.token))
        body += attribute(_REMOTE | _NESTED, _end(subflow.remote, subflow.remote_port))
        refusal = self._family.change(command, body, "changing subflows")
        return "" if refusal is None else str(refusal)


def _end(address: str, port: int) -> bytes:
    return (
        attribute(_ADDRESS_FAMILY, struct.pack("=H", socket.AF_INET))
        + attribute(_ADDRESS_4, socket.inet_aton(address))
        + attribute(_PORT, struct.pack("=H", port))
    )
