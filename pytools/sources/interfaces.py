"""Names of interfaces by index, for sources whose kernel programs know indexes only. One thread: the agent's.

An interface may be given another name while it works, and an index is used again. So all names are read anew once per
report, when the first is asked for: one dump over netlink.
"""

from __future__ import annotations

import contextlib

from pytools.errors import SwerveError
from pytools.kernel.netlink import Netlink


class Interfaces:
    """The names of one namespace's interfaces; what is gone keeps the last one it had."""

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._names: dict[int, str] = {}
        self._stale = True

    def name(self, ifindex: int) -> str:
        """The name; `if<n>` where it was gone before it was asked for, or the kernel does not tell."""
        if self._stale or ifindex not in self._names:
            with contextlib.suppress(SwerveError):  # the next time it may answer
                self._names |= {link.index: link.name for link in self._netlink.links()}
                self._stale = False
                self._names.setdefault(ifindex, f"if{ifindex}")  # gone: not to be asked for again
        return self._names.get(ifindex, f"if{ifindex}")

    def reread(self) -> None:
        """Have names read anew when the next is asked for."""
        self._stale = True
