"""Windows of one edge with a known truth, for the tests of clocks: queues that are empty at times, noisy stamps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.clocks import EdgeFit, fit_edge
from pytools.estimators.windows import MISSING

Ints = NDArray[np.int64]
Window = tuple[Ints, Ints, Ints, Ints]
SPAN_NS = 2 * 10**9
BEGIN_NS = 5 * 10**12  # what our clock reads when the window begins


@dataclass(frozen=True)
class Case:
    """How an edge and its two clocks are; what our clock reads is the time."""

    offset_ns: int = 123_456_789  # peer minus ours when the window begins
    drift_ppb: float = 25_000.0
    forward_delay_ns: float = 5_000.0
    reverse_delay_ns: float = 5_000.0
    empty_share: float = 0.3  # of the probes find no queue
    noise_ns: float = 20.0  # of each stamp
    pairs: int = 400
    step_ns: int = 0
    step_at: float = 0.5  # of the window

    def truth(self, clock_ns: int) -> float:
        """Peer minus ours when our clock reads `clock_ns`."""
        stepped = self.step_ns * (clock_ns >= BEGIN_NS + self.step_at * SPAN_NS)
        return float(self.offset_ns + stepped + self.drift_ppb * (clock_ns - BEGIN_NS) * 1e-9)

    def window(self, seed: int) -> Window:
        """Forward and reverse as `fit_edge` takes them."""
        rng = np.random.default_rng(seed)
        forward_at, forward = self._direction(rng, 1, self.forward_delay_ns)
        reverse_at, reverse = self._direction(rng, -1, self.reverse_delay_ns)
        return forward_at, forward, reverse_at, reverse

    def _direction(self, rng: np.random.Generator, sign: int, delay_ns: float) -> tuple[Ints, Ints]:
        starts = np.sort(rng.integers(0, SPAN_NS - 10_000, self.pairs))
        at = BEGIN_NS + starts[:, None] + np.array([0, 8_000])
        # Both probes of a pair mostly wait alike; a third of the pairs do not.
        waits = rng.pareto(1.5, self.pairs) * 1_000 * (rng.random(self.pairs) > self.empty_share)
        second = np.where(rng.random(self.pairs) < 1 / 3, rng.pareto(1.5, self.pairs) * 1_000, waits)
        delays = delay_ns + np.stack([waits, second], axis=1)
        noise = rng.normal(0, np.sqrt(2) * self.noise_ns, at.shape)
        stepped = self.step_ns * (at >= BEGIN_NS + self.step_at * SPAN_NS)
        small = delays + noise + sign * self.drift_ppb * (at - BEGIN_NS) * 1e-9
        return at, np.rint(small).astype(np.int64) + sign * (self.offset_ns + stepped)


def fitted(window: Window, prior: EdgeFit | None = None) -> EdgeFit:
    """The fit of a window that has one."""
    fit = fit_edge(*window, tolerance_ns=150, asymmetry_share=0.1, prior=prior)
    assert fit is not None
    return fit


def swapped(window: Window) -> Window:
    """The same probes as the peer would tell of them, were it the owner: its stamps, the directions exchanged."""
    forward_at, forward, reverse_at, reverse = window
    return (
        np.where(reverse == MISSING, MISSING, reverse_at - reverse),  # the peer's egress stamps
        reverse,
        np.where(forward == MISSING, MISSING, forward_at + forward),  # the peer's ingress stamps
        forward,
    )
