"""What pins and labels have in common: a lease for one flow each, in the kernel's table, that ends by itself.

Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from pytools.closing import Closing
from steering.actuators.flow_table import FlowTable, Lease
from steering.plan import FlowKey, LabelChange, Pin

Wanted = TypeVar("Wanted", Pin, LabelChange)


class Leases(Closing, Generic[Wanted]):
    """The leases of one kind in one namespace.

    Args:
        table: The kernel's table of flows; stays the caller's.
    """

    _lease: ClassVar[Lease]

    def __init__(self, table: FlowTable) -> None:
        self.table = table

    def close(self) -> None:
        """End all leases."""
        self.remove([row.flow for row in self.table.read()])

    def install(self, leases: Sequence[Wanted]) -> dict[FlowKey, str]:
        """Give flows leases, or others.

        Returns flows that were given none, and why; all others were.
        Raises RefusedError if there is no room for all that could be: none is given one then.
        Raises SwerveError if the kernel refuses.
        """
        now_ns = time.monotonic_ns()
        wanted = {each.flow: each for each in leases}
        refused = {flow: why for flow, each in wanted.items() if (why := self._refusal(each, now_ns))}
        granted = [each for flow, each in wanted.items() if flow not in refused]
        if granted:
            flows, until_ns = [each.flow for each in granted], [each.expires_ns for each in granted]
            self.table.grant(self._lease, flows, until_ns, **self._values(granted))
        return refused

    def _refusal(self, wanted: Wanted, now_ns: int) -> str:
        """Why a flow is given no such lease; empty when it is."""
        raise NotImplementedError

    def _values(self, granted: Sequence[Wanted]) -> Mapping[str, Sequence[int]]:
        raise NotImplementedError

    def renew(self, flows: Sequence[FlowKey], expires_ns: int) -> set[FlowKey]:
        """Let these leases end at another moment; returns the flows that have none."""
        return self.table.renew(self._lease, flows, [expires_ns] * len(flows))

    def remove(self, flows: Iterable[FlowKey]) -> set[FlowKey]:
        """End the leases of flows; returns those that had one."""
        return self.table.end(self._lease, flows)
