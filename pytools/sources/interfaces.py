"""Names of interfaces by index, for sources whose kernel programs know indexes only.

An interface may be given another name while it works, and an index is used again. So each name is read anew once per
report, when it is first asked for. One thread: the agent's, in the namespace that it measures.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable


class Interfaces:
    """The names of one namespace's interfaces; what is gone keeps the last one it had.

    Parameters
    ----------
    ask : callable
        The kernel's word for an index; raises OSError, with ENXIO where there is no such interface.
    """

    def __init__(self, ask: Callable[[int], str] = socket.if_indextoname) -> None:
        self._ask = ask
        self._names: dict[int, str] = {}
        self._read: set[int] = set()  # since the report began

    def name(self, ifindex: int) -> str:
        """The name; `if<n>` where it was gone before it was asked for, or the kernel does not tell."""
        if ifindex not in self._read:
            try:
                self._names[ifindex] = self._ask(ifindex)
                self._read.add(ifindex)
            except OSError as error:
                if error.errno == errno.ENXIO:  # gone: not to be asked for again; else the next time it may answer
                    self._read.add(ifindex)
        return self._names.get(ifindex, f"if{ifindex}")

    def reread(self) -> None:
        """Have names read anew when they are asked for next."""
        self._read.clear()
