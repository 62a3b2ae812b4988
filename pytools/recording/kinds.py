"""Which kinds of signals are recorded, and in which track."""

from __future__ import annotations

from typing import Final

NEVER: Final = frozenset({"probe_samples", "tcp_flow"})  # single probes and single connections: unbounded in number
ASIDE: Final = frozenset({"self"})  # costs something to make: recorded while somebody else asks for it
FINE_ONLY: Final = frozenset(
    {"path_liveness", "clock_edge"}
)  # many a second, as are details (pytools.ipc.wire.is_detail)
