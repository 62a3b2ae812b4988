"""The phases of the demo, one after the other, and the figures of each.

Detection is timed from the return of the command that made the fault to the publishing of the first signal that shows
it; acting from there to the kernel's acknowledgement. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from pytools.kernel.leftovers import is_our_nexthop
from pytools.kernel.netlink.nexthops import Member
from pytools.kernel.netlink.routing import Netlink
from pytools.lab import Lab
from pytools.signals import Act, PathDelay
from steering.demo import traffic
from steering.demo.observe import Observer, Record, in_use

BAD_RAIL = 1
_RESETS = "resets"


class Phase(msgspec.Struct, frozen=True):
    """The figures of one phase, all hosts together."""

    name: str
    duration_s: float
    offered_bit_s: float
    goodput_bit_s: float
    goodput_share: float
    owd_p99_ns: float | None  # of probes on paths in use; None when more than 1 % were lost
    probes: int
    resets: int
    packets: dict[str, int]  # by rail
    broken: tuple[str, ...] = ()
    detect_ms: float | None = None  # the slowest host
    act_ms: float | None = None  # the slowest host, from its signal to the kernel's acknowledgement
    onset_to_act_ms: float | None = None
    reversals: int | None = None
    acts: tuple[Act, ...] = ()


class Stage:
    """A lab with traffic and an observer: each host offers `rate_bit_s` to the next."""

    def __init__(self, lab: Lab, observer: Observer, rate_bit_s: int, threshold_ns: int) -> None:
        self.lab, self.observer = lab, observer
        self._rate_bit_s, self._threshold_ns = rate_bit_s, threshold_ns
        self.pairs = traffic.ring(lab.hosts)

    def play(
        self,
        name: str,
        duration_s: int,
        onset: Callable[[], None] | None = None,
        idle_interface: str | None = None,
        steered: bool = False,
    ) -> Phase:
        """Offer the load for a while; `onset` is called when its warm-up is over."""
        with traffic.Load(self.lab, self.pairs, self._rate_bit_s) as load:
            time.sleep(max(0.0, (load.measured_from_ns - time.monotonic_ns()) / 1e9))
            self.observer.take()
            before = self._counters()
            received = load.received()
            if onset is not None:
                onset()
            from_ns = time.monotonic_ns()
            time.sleep(duration_s)
            to_ns = time.monotonic_ns()
            goodput_bit_s = traffic.bit_rate(received, load.received())
            counted = self._counters()
            counted.subtract(before)
            broken = load.broken()
        record = self.observer.take()
        delays = in_use(record, idle_interface, from_ns, to_ns)
        phase = Phase(
            name=name,
            duration_s=(to_ns - from_ns) / 1e9,
            offered_bit_s=load.offered_bit_s,
            goodput_bit_s=goodput_bit_s,
            goodput_share=goodput_bit_s / load.offered_bit_s,
            owd_p99_ns=p99(delays),
            probes=len(delays),
            resets=counted.pop(_RESETS),
            packets=dict(sorted(counted.items())),
            broken=broken,
        )
        return self._with_steering(phase, record, from_ns) if steered else phase

    def _counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for host in self.lab.hosts:
            total.update(traffic.transmitted_packets(host))
            total[_RESETS] += traffic.established_resets(host)
        return total

    def _with_steering(self, phase: Phase, record: Record, onset_ns: int) -> Phase:
        detected = {source.name: self._detected_ns(record, source.name, to.name, onset_ns) for source, to in self.pairs}
        acted = {source.name: first_act_ns(record.acts, source.name, f"rail{BAD_RAIL}") for source, _ in self.pairs}
        both = [(detected[name], acted[name]) for name in detected]
        complete = all(seen is not None for seen, _ in both)
        return msgspec.structs.replace(
            phase,
            detect_ms=max((seen - onset_ns) / 1e6 for seen, _ in both if seen) if complete else None,
            act_ms=max(((done - seen) / 1e6 for seen, done in both if seen and done), default=None),
            onset_to_act_ms=max((done - onset_ns) / 1e6 for _, done in both if done)
            if all(done is not None for _, done in both)
            else None,
            reversals=reversals(record.acts),
            acts=tuple(record.acts),
        )

    def _detected_ns(self, record: Record, source: str, destination: str, onset_ns: int) -> int | None:
        times = [
            signal.at_ns
            for signal in record.delays
            if signal.host == source
            and signal.path.destination == destination
            and signal.path.interface == f"rail{BAD_RAIL}"
            and signal.at_ns >= onset_ns
            and shown_ns(signal) > self._threshold_ns
        ]
        return min(times, default=None)


def shown_ns(signal: PathDelay) -> int:
    """The longest wait on the way there that a signal shows; the last sample may be one of after the queue."""
    forward = signal.forward
    shown = forward.queueing_last_ns, forward.queueing_p50_ns, signal.overtaken_forward_p50_ns
    return max(each or 0 for each in shown)


def p99(delays_ns: np.ndarray) -> float | None:
    """The 99th percentile (nearest rank), or None when it is a lost probe or nothing was measured."""
    if len(delays_ns) == 0:
        return None
    value = float(np.percentile(delays_ns, 99, method="inverted_cdf"))
    return value if np.isfinite(value) else None


def first_act_ns(acts: Sequence[Act], host: str, interface: str) -> int | None:
    """When the kernel had acknowledged the first act of a host that took weight from an interface."""
    times = [
        act.acknowledged_ns
        for act in acts
        if act.host == host
        and act.outcome == "applied"
        and act.acknowledged_ns is not None
        and any(act.after.get(hop, 0) < weight for hop, weight in act.before.items() if hop.endswith(interface))
    ]
    return min(times, default=None)


def reversals(acts: Sequence[Act]) -> int:
    """How often weight that had been given back to a path was taken away again; of the target with the most."""
    worst = 0
    for key in {(act.host, act.what) for act in acts}:
        lowered: Counter[str] = Counter()
        for act in acts:
            if (act.host, act.what) == key and act.outcome == "applied":
                lowered.update(nexthop for nexthop, weight in act.after.items() if weight == 0 < act.before[nexthop])
        worst = max(worst, max(lowered.values(), default=0) - 1)
    return max(worst, 0)


@contextlib.contextmanager
def placed(lab: Lab, interface: str) -> Iterator[None]:
    """All load on one rail, by hand, while the context lasts: every group without its member on `interface`."""
    before: list[tuple[str, int, tuple[Member, ...]]] = []
    try:
        for host in lab.hosts:
            with Netlink(host.netns) as netlink:
                index = next(link.index for link in netlink.links() if link.name == interface)
                off = {hop.id for hop in netlink.nexthops() if hop.ifindex == index}
                for group in (each for each in netlink.groups() if not is_our_nexthop(each)):
                    before.append((host.netns, group.id, group.members))
                    left = [member for member in group.members if member.nexthop_id not in off]
                    netlink.replace_group(group.id, left)
        yield
    finally:
        for namespace, number, members in before:
            with Netlink(namespace) as netlink:
                netlink.replace_group(number, members)
