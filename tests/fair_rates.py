"""Max-min fair rates of one rail by progressive filling, as the textbook has it; `steering.flows.maxmin` must agree.

Imported as `fair_rates`.
"""

from __future__ import annotations

from collections.abc import Sequence


def fair_rates(capacity: float, demands: Sequence[float]) -> list[float]:
    """The max-min fair rates of the flows of one rail, in the order of their demands: progressive filling."""
    rates = [0.0] * len(demands)
    left, rising = max(0.0, capacity), len(demands)
    for flow in sorted(range(len(demands)), key=demands.__getitem__):
        rates[flow] = min(demands[flow], left / rising)
        left -= rates[flow]
        rising -= 1
    return rates
