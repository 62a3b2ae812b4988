"""IPv6 flow labels: another label makes the fabric's own ECMP choose again, without touching a switch.

Leases, like pins, in the same table: the kernel rewrites the label of each packet until its lease ends. Works only
where switches hash the label (RFC 6438); a flow may be pinned and relabelled at once. While it is relabelled, the
kernel's own change of label after a timeout is overwritten. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from steering.actuators.flow_table import FlowTable
from steering.plan import FlowKey, LabelChange

MOST: Final = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class LabelState:
    """A label as the kernel has it, and what came of it."""

    change: LabelChange
    relabelled: int  # packets that left with another label than they came with


class Labels:
    """The relabelled flows of one namespace, on the interfaces that the table is attached to.

    Parameters
    ----------
    table : FlowTable
        The kernel's table of flows; stays the caller's.
    """

    def __init__(self, table: FlowTable) -> None:
        self._table = table
        self._changed: dict[FlowKey, LabelChange] = {}

    def close(self) -> None:
        """Let all flows keep the labels that they come with."""
        self.remove(list(self._changed))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def install(self, changes: Sequence[LabelChange]) -> dict[FlowKey, str]:
        """Give flows labels, or others.

        Returns
        -------
        dict of FlowKey to str
            Flows that were given none, and why; all others were.

        Raises
        ------
        RefusedError
            If there is no room for all that could be: none is given one then.
        SwerveError
            If the kernel refuses.
        """
        now_ns = time.monotonic_ns()
        wanted = {change.flow: change for change in changes}
        refused = {flow: why for flow, change in wanted.items() if (why := self._refusal(change, now_ns))}
        granted = [change for flow, change in wanted.items() if flow not in refused]
        if granted:
            flows, until_ns = [each.flow for each in granted], [each.expires_ns for each in granted]
            self._table.grant("label_until_ns", flows, until_ns, label=[each.label for each in granted])
            self._changed.update((change.flow, change) for change in granted)
        return refused

    def _refusal(self, change: LabelChange, now_ns: int) -> str:
        if why := self._table.objection(change.flow):
            return why
        if ":" not in change.flow.remote:
            return "IPv4 has no flow labels"
        if not 0 < change.label <= MOST:
            return f"{change.label} is no flow label (1 to {MOST})"
        if change.expires_ns <= now_ns:
            return "its lease has ended already"
        return ""

    def renew(self, flows: Sequence[FlowKey], expires_ns: int) -> set[FlowKey]:
        """Let the leases of these labels end at another moment; returns the flows that have none."""
        missing = self._table.renew("label_until_ns", flows, [expires_ns] * len(flows))
        for flow in flows:
            if flow not in missing:
                self._changed[flow] = LabelChange(flow, self._changed[flow].label, expires_ns)
        return missing

    def remove(self, flows: Iterable[FlowKey]) -> set[FlowKey]:
        """Let flows keep the labels that they come with; returns those that had another."""
        asked = set(flows)
        for flow in asked:
            self._changed.pop(flow, None)
        return self._table.end("label_until_ns", asked)

    def expire(self, now_ns: int) -> set[FlowKey]:
        """Forget the labels whose leases have ended; returns their flows."""
        return self.remove([flow for flow, change in self._changed.items() if change.expires_ns <= now_ns])

    def read(self) -> dict[FlowKey, LabelState]:
        """Every label in the kernel's table, acting or not."""
        return {
            row.flow: LabelState(LabelChange(row.flow, row.label, row.label_until_ns), row.relabelled)
            for row in self._table.read()
            if row.label_until_ns
        }
