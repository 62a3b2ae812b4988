"""Names of interfaces by index, for sources whose kernel programs know indexes only.

An interface may be given another name while it works, and an index is used again. So each name is read anew once per
report, when it is first asked for. One thread: the agent's, in the namespace that it measures.
"""

from __future__ import annotations

import socket
from collections.abc import Callable


class Interfaces:
    """The names of one namespace's interfaces; what is gone keeps the last one it had.

    Parameters
    ----------
    ask : callable
        The kernel's word for an index; raises OSError where there is none.
    """

    def __init__(self, ask: Callable[[int], str] = socket.if_indextoname) -> None:
        self._ask = ask
        self._names: dict[int, str] = {}
        self._read: set[int] = set()  # since the report began

    def name(self, ifindex: int) -> str:
        """The name; `if<n>` where it was gone before it was asked for, or the kernel does not tell."""
        if ifindex not in self._read:
            self._read.add(ifindex)
            try:
                self._names[ifindex] = self._ask(ifindex)
            except OSError:
                self._names.setdefault(ifindex, f"if{ifindex}")
        return self._names[ifindex]

    def reread(self) -> None:
        """Have names read anew when they are asked for next."""
        self._read.clear()
