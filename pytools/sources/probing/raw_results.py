"""What became of each probe, told to whoever asks for it. Times are CLOCK_MONOTONIC nanoseconds. One thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pytools.ipc.bus import Bus
from pytools.signals import ProbeSamples
from pytools.sources.probing.path_clocks import PathClocks
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.sessions import Sessions


class RawResults:
    """The `probe_samples` of one host, from when somebody first wants them."""

    def __init__(self, host: str, bus: Bus, sessions: Sessions, clocks: PathClocks) -> None:
        self._host, self._bus, self._sessions, self._clocks = host, bus, sessions, clocks
        self._wanted = False

    def publish(self, now_ns: int, paths: Sequence[PinnedPath]) -> None:
        """Tell what is new since the last call."""
        before, self._wanted = self._wanted, self._bus.wanted("probe_samples")
        if not self._wanted:
            return
        if not before:
            self._sessions.skip_results()
            return
        by_index = {pinned.index: pinned for pinned in paths}
        unix_ns = time.time_ns()
        for index, entries in self._sessions.results():
            if index not in by_index:
                continue
            seq, sent_ns, forward_ns, reverse_ns, _ = zip(*entries, strict=True)
            self._bus.publish(
                ProbeSamples(
                    host=self._host,
                    at_ns=now_ns,
                    unix_ns=unix_ns,
                    path=by_index[index].path,
                    clock=self._clocks.states(np.array([index]))[0],
                    seq=list(seq),
                    sent_ns=list(sent_ns),
                    forward_ns=list(forward_ns),
                    reverse_ns=list(reverse_ns),
                    extra=[number for number, *_, extra in entries if extra],
                )
            )
