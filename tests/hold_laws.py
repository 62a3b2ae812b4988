"""The laws that the simulation of holds compares: the one in use, and On-Ramp's of pauses alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hold_world import MS

from steering.hold import law

FOREVER = 1 << 60


def limits(threshold_ns: int = MS, longest_ns: int = 50 * MS) -> law.Limits:
    """As the policy's defaults have them."""
    return law.Limits(FOREVER, 0, threshold_ns, longest_ns, 200 * MS, 125_000, 256)


@dataclass
class InUse:
    """bpf/steer/hold_law.h."""

    limits: law.Limits = field(default_factory=limits)
    state: law.State = field(default_factory=law.State)

    def sample(self, now_ns: int, sent_ns: int, queue_ns: int) -> None:
        law.sample(self.state, self.limits, now_ns, sent_ns, queue_ns)

    def release(self, now_ns: int, wire_bytes: int) -> int:
        return law.release(self.state, self.limits, now_ns, wire_bytes)


@dataclass
class OnRamp:
    """Liu et al., NSDI 2021: pause for what is above the threshold, less the pauses that the sample could not see."""

    limits: law.Limits = field(default_factory=limits)
    sent_ns: int = 0
    pause_ns: int = 0
    until_ns: int = 0

    def sample(self, now_ns: int, sent_ns: int, queue_ns: int) -> None:
        if not self.sent_ns < sent_ns <= now_ns <= sent_ns + self.limits.fresh_ns:
            return
        self.sent_ns = sent_ns
        unseen = max(0, self.until_ns - max(sent_ns, self.pause_ns))
        pause = queue_ns - self.limits.threshold_ns - unseen
        if pause > 0:
            if self.until_ns <= now_ns:
                self.pause_ns = self.until_ns = now_ns
            self.until_ns = min(self.until_ns + pause, now_ns + self.limits.longest_ns)

    def release(self, now_ns: int, wire_bytes: int) -> int:
        return self.until_ns if self.until_ns > now_ns else 0
