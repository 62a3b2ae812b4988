"""IPv6 flow labels: another label makes the fabric's own ECMP choose again, without touching a switch.

Leases, like pins, in the same table: the kernel rewrites the label of each packet until its lease ends. Works only
where switches hash the label (RFC 6438); a flow may be pinned and relabelled at once. While it is relabelled, the
kernel's own change of label after a timeout is overwritten. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steering.actuators.flow_leases import Leases
from steering.plan import FlowKey, LabelChange

MOST: Final = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class LabelState:
    """A label as the kernel has it, and what came of it."""

    change: LabelChange
    relabelled: int  # packets that left with another label than they came with


class Labels(Leases[LabelChange]):
    """The relabelled flows of one namespace, on the interfaces that the table is attached to."""

    _lease = "label_until_ns"

    def _values(self, granted: Sequence[LabelChange]) -> Mapping[str, Sequence[int]]:
        return {"label": [each.label for each in granted]}

    def _refusal(self, wanted: LabelChange, now_ns: int) -> str:
        if why := self._table.objection(wanted.flow):
            return why
        if ":" not in wanted.flow.remote:
            return "IPv4 has no flow labels"
        if not 0 < wanted.label <= MOST:
            return f"{wanted.label} is no flow label (1 to {MOST})"
        if wanted.expires_ns <= now_ns:
            return "its lease has ended already"
        return ""

    def read(self) -> dict[FlowKey, LabelState]:
        """Every label in the kernel's table, acting or not."""
        return {
            row.flow: LabelState(LabelChange(row.flow, row.label, row.label_until_ns), row.relabelled)
            for row in self._table.read()
            if row.label_until_ns
        }
