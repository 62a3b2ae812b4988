"""Whether those who are sent to are ready: what the ports hear of them, or their own rows where they are on this host.

Asked only for requests that take a receive, and that wait or crawl. Runs in the agent's thread.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pytools.estimators import verdicts
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.not_ready import NotReady
from pytools.sources.rdma.register import ROWS, QueuePair
from pytools.sources.rdma.table import Counters, Rows


class Receivers:
    """What is known of the other ends.

    Parameters
    ----------
    not_ready : NotReady
        The ports' counters.
    """

    def __init__(self, not_ready: NotReady) -> None:
        self._not_ready = not_ready
        self.needed = np.zeros(ROWS, np.bool_)  # posts requests that take a receive
        self._device = np.zeros(ROWS, np.intp)
        self._devices: list[str] = []
        self._peer = np.full(ROWS, -1, np.intp)

    def refresh(self, row: int, pair: QueuePair, opcodes: Counters) -> None:
        """Take in what a queue pair posts, and on which device."""
        self.needed[row] = any(int(opcodes[code]) for code in tables.NEED_RECEIVES)
        if pair.device not in self._devices:
            self._devices.append(pair.device)
        self._device[row] = self._devices.index(pair.device)

    def forget(self, row: int) -> None:
        """Start anew with a row."""
        self._peer[row] = -1

    def look(self, pairs: Mapping[int, QueuePair], now_ns: int) -> None:
        """Find the ends that are on this host, and have a base for the ports' counters."""
        ends = {(pair.local, pair.number): row for row, pair in pairs.items() if pair.local}
        for row, pair in pairs.items():
            peer = -1 if pair.remote_number is None else ends.get((pair.remote, pair.remote_number), -1)
            self._peer[row] = peer if peer >= 0 and not pairs[peer].shared_receives else -1
        for device in {pair.device for row, pair in pairs.items() if self.needed[row]}:
            self._not_ready.look(device, False, now_ns)

    def ask(
        self, rows: Rows, facts: verdicts.Facts, share: float, counters: Mapping[str, Counters], now_ns: int
    ) -> None:
        """Fill in what the facts say of receivers.

        Parameters
        ----------
        share : float
            Of the mean bandwidth: below is low.
        counters : mapping
            Of all rows, as they stood at the last reading.
        """
        slow = (facts.completed == 0) | verdicts.low(facts, share)
        suspected = facts.needs_receives & (facts.outstanding > 0) & slow
        if not suspected.any():
            return
        devices = self._device[rows]
        for index in np.unique(devices[suspected]).tolist():
            device, mine = self._devices[index], suspected & (devices == index)
            self._not_ready.look(device, True, now_ns)
            facts.not_ready[mine] = self._not_ready.grew(device)
            facts.not_ready_recently[mine] = self._not_ready.within(device, verdicts.NOT_READY_NS, now_ns)
            if not self._not_ready.counts(device):
                peer = self._peer[rows[mine]]
                taken, given = counters["receives_completed"][peer], counters["receives_posted"][peer]
                facts.starved[mine] = (peer >= 0) & (taken >= given)
