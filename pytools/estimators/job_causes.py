"""What makes the steps of a job longer, one function for each kind of cause. Pure.

A cause explains a share of the time of a step: the rank that waits longest, or the path that takes longest, holds up
all others. The share has an error; only what is left of it without the error counts (`LEAST`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from pytools import units
from pytools.estimators.job_evidence import Evidence, GpuUse, HostUse, Late, PathUse, Range, RankUse
from pytools.signals import JobCause

LEAST: Final = 0.05  # of a step; less is no cause
QUEUE_NS: Final = 1_000_000  # a queue that is longer by this than that of another path is one
SLOWER: Final = 1.3  # times: a path that takes so much longer for the same bytes is slow
_SEGMENTS: Final = 100  # sent in a window; of fewer no share is told
_RETRANSMITTED: Final = 0.01  # of the segments
_PROBES: Final = 10
_LOST: Final = 0.02  # of the probes
_TIMES: Final = 3  # as much as on the other paths
_TICK_NS: Final = 10_000_000  # a wait that lasts is counted at its end
_CLOCK_STEP_MHZ: Final = 15
_BUSY_GPU: Final = 0.3  # an idle GPU has a low clock
BRAKES: Final = frozenset({"hw_thermal", "sw_thermal", "hw_power_brake", "hw_slowdown"})
_REPLAYS: Final = 10  # of PCIe in a window; fewer are no fault


def host(ranks: Sequence[RankUse], of_host: HostUse | None, window_ns: int) -> Iterator[JobCause]:
    """The rank that got least of the processors, and what a hypervisor took."""
    much = [each for each in ranks if max(each.waited or 0.0, each.throttled or 0.0) >= LEAST]
    found = [(share, each) for each in much if (share := _withheld(each, window_ns)) is not None]
    if found:
        share, worst = max(found, key=lambda item: item[0].low)
        yield _cause("host", share, _host_reason(worst, ranks, of_host, window_ns), rank=worst.rank)
    if of_host is not None and of_host.stolen is not None and of_host.ticks > 0:
        share = _around(of_host.stolen, 2 / of_host.ticks)
        yield _cause("host", share, f"CPU steal takes {_percent(share)} of the time in which something could run")


def _withheld(use: RankUse, window_ns: int) -> Range | None:
    """The larger of what it waited and what it was throttled: a task that is throttled may be counted as waiting."""
    found = []
    if use.waited is not None:
        found.append(_around(use.waited, _TICK_NS / window_ns))
    if use.throttled:
        found.append(_around(use.throttled, use.period_ns / window_ns))
    return max(found, key=lambda each: each.low, default=None)


def _host_reason(worst: RankUse, ranks: Sequence[RankUse], of_host: HostUse | None, window_ns: int) -> str:
    waited, throttled = worst.waited or 0.0, worst.throttled or 0.0
    text = f"rank {worst.rank} waited {units.duration(round(waited * window_ns))} of {units.duration(window_ns)}"
    text += " for a CPU"
    if throttled:
        text += f"; its control group {worst.group} was throttled for {units.duration(round(throttled * window_ns))}"
    others = [each.waited for each in ranks if each is not worst and each.waited is not None]
    text += f"; the other ranks waited {units.share(median(others))} of the time" if others else ""
    if of_host is not None and of_host.pressure is not None:
        text += f"; CPU pressure (PSI) {units.share(min(of_host.pressure, 1.0))}"
    return text


def straggler(late: Late | None) -> Iterator[JobCause]:
    """The rank that the others wait for."""
    if late is not None and late.interval_ns > 0:
        share = Range(late.late_ns, late.low_ns, late.high_ns).times(1 / late.interval_ns)
        bounds = f"{units.duration(round(late.low_ns))} to {units.duration(round(late.high_ns))}"
        text = (
            f"rank {late.rank} comes {units.duration(round(late.late_ns))} ({bounds}) late to each of "
            f"{late.collectives} collectives, which are {units.duration(round(late.interval_ns))} apart"
        )
        yield _cause("straggler", share, text, rank=late.rank)


def gpu(gpus: Sequence[GpuUse], late: Sequence[JobCause]) -> Iterator[JobCause]:
    """GPUs with a lower clock than those of the other ranks, or that a brake holds; and faults of a late rank's."""
    for each in gpus:
        share, why = _slow_clock(each, gpus)
        faults = [f"{count} {name}" for name, count in each.faults.items() if count >= _least_fault(name)]
        found = next((cause for cause in late if cause.rank == each.rank), None)
        if (share is None or share.low < LEAST) and faults and found is not None:  # a count does not tell the cost
            share, why = Range(found.share, found.low, found.high), f"rank {each.rank} is late"
        if share is not None:
            text = f"GPU {each.index} of rank {each.rank}: {why}" + (f"; {', '.join(faults)}" if faults else "")
            yield _cause("gpu", share, text, rank=each.rank)


def _least_fault(name: str) -> int:
    return _REPLAYS if "replay" in name.lower() else 1


def _slow_clock(use: GpuUse, gpus: Sequence[GpuUse]) -> tuple[Range | None, str]:
    """The share of the time that a lower clock costs, and what it is compared with."""
    clock = use.clock_mhz
    if clock is None or clock <= 0 or (use.utilization is not None and use.utilization < _BUSY_GPU):
        return None, ""
    held = sorted(name for name, share in use.throttled.items() if share > 0 and name != "idle")
    braked = max((use.throttled[name] for name in held if name in BRAKES), default=0.0)
    set_low = use.throttled.get("application_clocks", 0.0)
    others = [each.clock_mhz for each in gpus if each is not use and each.clock_mhz and not _idles(each)]
    if others:
        reference, of = median(others), "the others'"
    elif use.max_clock_mhz and (braked or set_low):
        reference, of = float(use.max_clock_mhz), "its maximum of"
    else:
        return None, ""
    if reference <= _CLOCK_STEP_MHZ:  # no clock that a busy GPU has, and less than its own error
        return None, ""
    share = Range(*(1 - (clock + step) / (reference - step) for step in (0, _CLOCK_STEP_MHZ, -_CLOCK_STEP_MHZ)))
    why = f", held by {', '.join(held)}" if held else ""
    return share, f"clock {clock} MHz, {of} {reference:.0f} MHz{why}"


def _idles(use: GpuUse) -> bool:
    return use.utilization is not None and use.utilization < _BUSY_GPU


def network(paths: Sequence[PathUse]) -> Iterator[JobCause]:
    """Paths on which packets wait or get lost more than on the other paths of the job."""
    for each in paths:
        if not (each.connections or each.pairs):
            continue
        others = [other for other in paths if other is not each]
        evidence = list(_evidence(each, others))
        shares = [each.stalled, each.troubled, _longer(each, others) or _queueing(each, others)]
        known = [share for share in shares if share is not None]
        if evidence and known:
            share = max(known, key=lambda share: share.low)
            yield _cause("network", share, f"{each.name}: {', '.join(evidence)}", path=each)


def _evidence(use: PathUse, others: Sequence[PathUse]) -> Iterator[str]:
    """What shows that a path is not as the others are."""
    if use.silent:
        yield f"none of {use.settled} probes answered"
    elif use.lost and use.settled >= _PROBES:
        lost = use.lost / use.settled
        elsewhere = _ratio(sum(o.lost for o in others), sum(o.settled for o in others))
        if lost > max(_LOST, _TIMES * elsewhere):
            yield f"{use.lost} of {use.settled} probes lost"
    reference = _reference(use, others)
    if use.queue_ns is not None and reference is not None:
        queue, bound, whose = reference
        if use.queue_ns - use.queue_bound_ns - queue - bound > QUEUE_NS:
            yield (
                f"queueing delay {units.duration(use.queue_ns)} ± {units.duration(use.queue_bound_ns)}, "
                f"{whose} {units.duration(queue)}"
            )
    if use.segments >= _SEGMENTS:
        share = use.retransmitted / use.segments
        elsewhere = _ratio(sum(o.retransmitted for o in others), sum(o.segments for o in others))
        if share > max(_RETRANSMITTED, _TIMES * elsewhere):
            yield f"{use.retransmitted:,} of {use.segments:,} segments retransmitted ({units.share(share)})"
    if use.timeouts:
        yield f"{use.timeouts} retransmission timeout{'s' if use.timeouts > 1 else ''}"
    if use.troubled is not None:
        yield use.pairs_reason


def _reference(use: PathUse, others: Sequence[PathUse]) -> tuple[int, int, str] | None:
    """The shortest queue of another path, with its error; where there is none, what is usual on this one."""
    known = [(o.queue_ns, o.queue_bound_ns) for o in others if o.queue_ns is not None and not o.silent]
    if known:
        queue, bound = min(known)
        return queue, bound, "on another path"
    return None if use.usual_queue_ns is None else (use.usual_queue_ns, 0, "usually")


def _longer(use: PathUse, others: Sequence[PathUse]) -> Range | None:
    """How much longer it has a queue than the others would for the same bytes; None if not known, or not much."""
    if use.busy is None:
        return None
    same = [o.busy.times(use.sent_bytes / o.sent_bytes) for o in others if o.busy is not None and o.sent_bytes]
    expected = median(each.value for each in same) if same and use.sent_bytes else None
    if expected is None or use.busy.value < SLOWER * expected:
        return None
    low, high = min(each.low for each in same), max(each.high for each in same)
    return Range(use.busy.value - expected, use.busy.low - high, use.busy.high - low).clipped()


def _queueing(use: PathUse, others: Sequence[PathUse]) -> Range | None:
    """How much of a round trip is a queue, while there is one; where no other path is used to compare it with."""
    reference = _reference(use, others)
    if (
        use.busy is None
        or use.queue_ns is None
        or reference is None
        or any(o.busy is not None and o.sent_bytes for o in others)
    ):
        return None
    queue, bound, _ = reference
    whole = use.queue_ns + (use.round_trip_ns or 0)
    if whole <= 0:
        return None
    longer, error = use.queue_ns - queue, use.queue_bound_ns + bound
    low, high = use.busy.low * (longer - error) / whole, use.busy.high * (longer + error) / whole
    return Range(use.busy.value * longer / whole, low, high).clipped()


def imbalance(paths: Sequence[PathUse], troubled: Sequence[JobCause]) -> Iterator[JobCause]:
    """The path that has more connections than an even placing over the paths to the same host would give it.

    Where one of them is bad or left by the controller, an even placing is no aim.
    """
    bad = {(cause.path, cause.interface) for cause in troubled if cause.low > 0}
    groups: dict[str, list[PathUse]] = {}
    for each in paths:
        if each.path is not None:
            groups.setdefault(each.path.destination, []).append(each)
    for group in groups.values():
        total, sent = sum(each.connections for each in group), sum(each.sent_bytes for each in group)
        unfit = any(each.silent or each.steered or (each.path, each.interface) in bad for each in group)
        worst = max(group, key=lambda each: each.sent_bytes)
        best = math.ceil(total / len(group))
        if len(group) < 2 or unfit or worst.busy is None or worst.connections <= best:
            continue
        saved = 1 - best * sent / total / worst.sent_bytes
        counts = ":".join(str(each.connections) for each in sorted(group, key=lambda each: -each.connections))
        text = f"{worst.connections} of {total} connections to {worst.name} ({counts}; {best} would be even)"
        yield _cause("imbalance", worst.busy.times(max(saved, 0.0)), text, path=worst)


def causes(evidence: Evidence) -> list[JobCause]:
    """All that explain something without their error, those that explain most first."""
    late = list(straggler(evidence.late))
    of_paths = list(network(evidence.paths))
    found = [
        *host(evidence.ranks, evidence.host, evidence.window_ns),
        *gpu(evidence.gpus, late),
        *late,
        *of_paths,
        *imbalance(evidence.paths, of_paths),
    ]
    return sorted((each for each in found if each.low >= LEAST), key=lambda each: (-each.share, each.reason))


def _cause(kind: str, share: Range, reason: str, rank: int | None = None, path: PathUse | None = None) -> JobCause:
    value, low, high = share.clipped()
    where = None if path is None else path.path
    interface = "" if path is None else path.interface
    return JobCause(kind, value, low, high, rank, where, interface, reason)  # type: ignore[arg-type]


def _around(value: float, error: float) -> Range:
    return Range(value, value - error, value + error).clipped()


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _percent(share: Range) -> str:
    return f"{units.share(share.value)} ({units.share(share.low)} to {units.share(share.high)})"
