"""Flows that the operator pinned by hand, and until when. No I/O; CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from steering.plan import FlowKey, Pin

MOST: Final = 200


@dataclass(slots=True)
class ManualPins:
    """The pins that the operator ordered."""

    _pins: dict[FlowKey, Pin] = field(default_factory=dict)

    def put(self, pin: Pin) -> None:
        """Want a pin, in place of the flow's former one."""
        self._pins[pin.flow] = pin

    def drop(self, flow: FlowKey) -> bool:
        """Want it no more; whether it was wanted."""
        return self._pins.pop(flow, None) is not None

    def full(self, flow: FlowKey, now: int) -> bool:
        """Whether there is no room for a pin of this flow."""
        return len(self.wanted(now)) >= MOST and flow not in self._pins

    def wanted(self, now: int) -> tuple[Pin, ...]:
        """Those that have not run out; the others are forgotten."""
        for flow in [flow for flow, pin in self._pins.items() if pin.expires_ns <= now]:
            del self._pins[flow]
        return tuple(self._pins.values())
