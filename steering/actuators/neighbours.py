"""Whether nexthops are alive: their neighbour entries and their links, as the kernel tells of changes.

`bpf_redirect_neigh` reports success and loses the packet when the neighbour is dead or cold, so somebody has to know
before. A thread listens, so that nothing else that a controller waits for (a disk, for one) delays it. A neighbour is
asked for before it is needed; one that has not been heard of for a while is asked again, and believed meanwhile.

Alive: the link is up and has its carrier, and the kernel believes the neighbour's link-layer address; on a tunnel that
has no such addresses (WireGuard, GRE) the link alone decides. The moment of change is the kernel's: of a neighbour
that just falls silent it is told after its own probes (3 s) have failed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from pytools.closing import Closing
from pytools.kernel.netlink import neighbours as kernel
from pytools.kernel.netlink.links import Heard, LinkMonitor, LinkRow, Tables
from pytools.kernel.netlink.routing import Netlink, NetlinkError

Hop = tuple[int, str]  # interface index, gateway in its one spelling

_AGAIN_NS: Final = 1_000_000_000  # between two requests for one neighbour
_IDLE_S: Final = 0.25


class Neighbours(Closing):
    """Watches hops in the network namespace of the thread that makes it.

    Parameters
    ----------
    changed : callable
        Told of every hop whose state has changed: the hop, and whether it is alive. Called from another thread, one
        call at a time; must be short and must not raise.
    """

    def __init__(self, changed: Callable[[Hop, bool], None]) -> None:
        self._changed = changed
        self._lock = threading.Condition()
        self._states: dict[Hop, int] = {}  # of the watched: NUD_*, 0 when there is no entry
        self._links: dict[int, LinkRow] = {}
        self._alive: dict[Hop, bool] = {}
        self._asked_ns: dict[Hop, int] = {}
        self._removed: set[int] = set()
        self.error = ""  # why nothing is watched any more, and all hops therefore count as dead
        self._closed = False
        self._monitor = LinkMonitor()
        try:
            self._netlink = Netlink()
        except BaseException:
            self._monitor.close()
            raise
        self._tables = Tables(self._netlink)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)
        self._thread.start()

    def watch(self, hops: Iterable[Hop]) -> None:
        """Watch these from now on, and no others; when it returns, their present state has been told.

        Raises
        ------
        SwerveError
            If the kernel's tables cannot be read.
        """
        with self._lock:
            wanted = set(hops)
            for gone in self._states.keys() - wanted:
                del self._states[gone]
                self._alive.pop(gone, None)
                self._asked_ns.pop(gone, None)
            if wanted - self._states.keys():
                self._states = dict.fromkeys(wanted, 0)
                self._read_all()
            self._refresh(time.monotonic_ns())

    def alive(self, hop: Hop) -> bool:
        """Whether a packet handed to this hop would leave."""
        return self._alive.get(hop, False)

    def wait_alive(self, hops: Iterable[Hop], timeout_s: float) -> bool:
        """Wait until all of these are alive; False when they are not in time."""
        wanted = list(hops)
        with self._lock:
            return self._lock.wait_for(lambda: all(self.alive(hop) for hop in wanted), timeout_s)

    def stacked(self) -> set[tuple[int, int]]:
        """Interfaces that lie on others, by index: `Tables.stacked`."""
        with self._lock:
            return self._tables.stacked()

    @property
    def some_removed(self) -> bool:
        """Whether `take_removed` has any."""
        return bool(self._removed)

    def take_removed(self) -> set[int]:
        """Watched interfaces that went since the last call; another may have come under the same index."""
        with self._lock:
            removed, self._removed = self._removed, set()
            return removed

    def close(self) -> None:
        """Watch no more; nothing is told any more when it returns."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._monitor.close()
        self._netlink.close()
        os.close(self._wake)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._monitor.fileno(), selectors.EVENT_READ)
                selector.register(self._wake, selectors.EVENT_READ)
                while not self._closed:
                    selector.select(_IDLE_S)
                    with self._lock:
                        self._take(self._monitor.read())
                        self._refresh(time.monotonic_ns())
        except Exception as error:  # whatever it was: what is not watched must not count as alive
            with self._lock:
                self.error = f"neighbours are not watched any more: {error}"
                self._states = dict.fromkeys(self._states, 0)
                self._tell()

    def _take(self, heard: Heard) -> None:
        if not heard:
            return
        watched = {index for index, _ in self._states}
        if heard.overrun:
            self._removed |= watched  # for all that is known
            self._read_all()
            return
        self._removed |= heard.removed & watched
        for index in (heard.changed | heard.removed) & watched:
            link = self._tables.link(index)
            if link is None:
                self._links.pop(index, None)
            else:
                self._links[index] = link
        for row in heard.neighbours:
            if (row.index, row.address) in self._states:
                self._states[row.index, row.address] = row.state
        self._tell()

    def _read_all(self) -> None:
        self._links = self._tables.links()
        self._states = dict.fromkeys(self._states, 0)
        for row in self._tables.neighbours():
            if (row.index, row.address) in self._states:
                self._states[row.index, row.address] = row.state
        self._tell()

    def _tell(self) -> None:
        for hop, state in self._states.items():
            link = self._links.get(hop[0])
            known = link is not None and (bool(state & kernel.BELIEVED) or not link.asks)
            alive = known and self._has_carrier(hop[0]) and not self.error
            if self._alive.get(hop) != alive:
                self._alive[hop] = alive
                self._changed(hop, alive)
                self._lock.notify_all()

    def _has_carrier(self, index: int) -> bool:
        link = self._links.get(index)
        return link is not None and link.up and link.carrier

    def _refresh(self, now_ns: int) -> None:
        """Ask for those that are not known, and again for those that have not been heard of for a while."""
        for hop, state in self._states.items():
            if not self._has_carrier(hop[0]) or now_ns - self._asked_ns.get(hop, -_AGAIN_NS) < _AGAIN_NS:
                continue
            if not self._links[hop[0]].asks:
                continue
            if not state & (kernel.STALE | kernel.DELAY) and state not in (0, kernel.FAILED):
                continue
            self._asked_ns[hop] = now_ns
            with contextlib.suppress(NetlinkError):  # an address that this interface cannot have stays dead
                if state in (0, kernel.FAILED):
                    kernel.look_for(self._netlink, *hop, known=bool(state))
                else:
                    kernel.verify(self._netlink, *hop)
