"""What is known of a job in one window, for `job_verdict.py`: frozen records. Pure.

Shares are of the window, within 0 and 1; durations are nanoseconds. None: not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pytools.signals import JobSensor, JobStep, Path


class Range(NamedTuple):
    value: float
    low: float
    high: float

    def clipped(self) -> Range:
        """Within 0 and 1."""
        return Range(*(min(max(each, 0.0), 1.0) for each in self))

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class RankUse:
    """What a rank got of the processors of its host."""

    rank: int
    waited: float | None  # its main thread could run, and did not (/proc/PID/schedstat)
    throttled: float | None  # its control group, or one above, had used up its quota; 0: there is no quota
    period_ns: int = 0  # of that quota
    group: str = ""  # the control group with the quota


@dataclass(frozen=True, slots=True)
class HostUse:
    """What the host got of its own processors."""

    stolen: float | None  # of the time in which something ran or could have run, by a hypervisor
    ticks: int  # of the kernel's clock, from which that is
    pressure: float | None  # in which some task waited for a processor (PSI)


@dataclass(frozen=True, slots=True)
class PathUse:
    """A path to a host that the job sends to, with what the job has on it."""

    path: Path | None
    interface: str
    connections: int = 0  # that send about as much as the others; control connections are left out
    sent_bytes: int = 0  # by these
    busy: Range | None = None  # in which there was a queue: as long as it takes to drain what they send
    segments: int = 0
    retransmitted: int = 0  # of these segments
    timeouts: int = 0
    stalled: Range | None = None  # of the connection that waited longest for its retransmission timer
    queue_ns: int | None = None  # median queueing delay of probes towards the peer
    queue_bound_ns: int = 0
    usual_queue_ns: int | None = None  # of the last minutes
    round_trip_ns: int | None = None  # smallest
    settled: int = 0  # probes
    lost: int = 0  # of these
    steered: bool = False  # the controller has taken load away from it, so it is no place for more
    pairs: int = 0  # queue pairs that are judged
    troubled: Range | None = None  # bandwidth missing to those that are congested or dead, where they are half of all
    pairs_reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.destination} by {self.interface}" if self.path is not None else self.interface

    @property
    def silent(self) -> bool:
        """Whether no probe was answered."""
        return self.settled >= 3 and self.lost == self.settled


@dataclass(frozen=True, slots=True)
class Late:
    """The rank that the others wait for, from the durations of kernels (`stragglers.py`)."""

    rank: int
    late_ns: float  # per collective
    low_ns: float
    high_ns: float
    interval_ns: float  # from one collective to the next
    collectives: int


@dataclass(frozen=True, slots=True)
class GpuUse:
    rank: int
    index: int
    clock_mhz: int | None
    max_clock_mhz: int | None
    utilization: float | None
    throttled: Mapping[str, float] = field(default_factory=dict)  # reason to share of the readings
    faults: Mapping[str, int] = field(default_factory=dict)  # ECC, PCIe replays, NVLink errors, XID: in the window


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything about a job in one window."""

    window_ns: int
    step: JobStep | None
    ranks: tuple[RankUse, ...] = ()
    host: HostUse | None = None
    paths: tuple[PathUse, ...] = ()
    late: Late | None = None
    gpus: tuple[GpuUse, ...] = ()
    missing: Mapping[JobSensor, str] = field(default_factory=dict)  # what was not measured, and why
