"""Jobs: ranks on this host, what they send, and who is behind."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Owner, Path, Signal

Launcher = Literal["torchrun", "env", "mpi", "slurm"]
RasState = Literal["ok", "unresponsive", "absent", "invalid", "pending"]
JobCauseKind = Literal["network", "straggler", "gpu", "host", "imbalance"]
JobVerdictWord = Literal["network", "straggler", "gpu", "host", "imbalance", "healthy", "unknown"]
JobSensor = Literal["rhythm", "ranks", "network", "host", "gpu"]


class JobRank(msgspec.Struct, frozen=True):
    """One rank of a job on this host."""

    rank: int  # in the job
    owner: Owner  # its oldest process
    processes: int  # with the environment of this rank, as loaders of data
    local_rank: int | None  # among the ranks of its launcher on this host; null if unknown
    gpus: str  # CUDA_VISIBLE_DEVICES of the process; empty if unset
    gpu: int | None  # NVML index of its GPU, as RAS says; null if unknown
    pod: str  # `NAMESPACE/NAME`, or the name of the container; empty if unknown
    connections: int  # TCP
    queue_pairs: int  # RDMA


class JobPath(msgspec.Struct, frozen=True):
    """What the ranks on this host have on one path (or on an interface, when `path` is null)."""

    path: Path | None
    interface: str  # or the RDMA device; empty if unknown
    connections: int  # TCP
    queue_pairs: int  # RDMA
    sent_bytes: int  # in the window, as `received_bytes`: payload of TCP, and completed requests of RDMA
    received_bytes: int  # in order (TCP); of receives (RDMA)


class JobLag(msgspec.Struct, frozen=True):
    """A rank that has begun fewer collective operations than another of its communicator had one answer earlier."""

    rank: int | None  # in the job; null unless a communicator has all its ranks in order
    communicator: str  # hash
    communicator_rank: int  # in the communicator
    host: str  # address
    pid: int  # as the process sees itself
    behind: int  # operations


class JobStep(msgspec.Struct, frozen=True):
    """How fast a job proceeds."""

    source: Literal["nccl", "tcp"]  # collectives that the plugin recorded; bytes of connections that send the same
    steps: int  # measured (`nccl`), or connections (`tcp`)
    operations: int  # collectives in a step; 0 for `tcp`
    duration_ns: int | None  # median of a step; null for `tcp`
    duration_bound_ns: int | None  # half the width of its interval of 99 % confidence; null with less than 8 steps
    flow_bps: float | None  # what the median connection sends, bits per second; null for `nccl`
    # time of a step, or for the same bytes, divided by what is usual: the median of the last 5 minutes; null until 30
    # windows are known
    slowdown: float | None


class JobCause(msgspec.Struct, frozen=True):
    """What makes the steps of a job longer."""

    kind: JobCauseKind
    share: float  # of the time of a step that it explains
    low: float  # at least, with the error
    high: float  # at most, with the error
    rank: int | None  # in the job; null if it is of no rank
    path: Path | None
    interface: str  # of the path; empty if it is of none
    reason: str  # the measurements


class JobVerdict(msgspec.Struct, frozen=True):
    """Why the steps of a job take as long as they do, as far as this host sees."""

    verdict: JobVerdictWord  # kind of the first cause; `healthy`: all was measured, and nothing explains 5 %
    reason: str
    causes: list[JobCause]  # the first explains most; a late rank follows what makes it late
    step: JobStep | None  # null if nothing shows the rhythm
    missing: dict[JobSensor, str]  # what was not measured, and why


class Job(Signal, frozen=True, kw_only=True, tag="job"):
    """A distributed job: its ranks on this host, their traffic, what NCCL's RAS says of all its ranks, and a verdict.

    Once per long window with a subscriber.
    """

    job: str  # launcher and identifiers
    source: Launcher  # whose variables gave the ranks
    uid: int  # user
    size: int | None  # ranks on all hosts; null if unknown
    ranks: list[JobRank]  # on this host
    window_ns: int
    paths: list[JobPath]  # most bytes first
    ras: RasState  # `absent`: nobody answers at the address, or what answers is another job's
    ras_reason: str  # why it is not `ok`
    ras_ranks: int  # ranks in the latest answer
    lagging: list[JobLag]  # most operations first, at most 16; empty unless `ras` is `ok`
    why: JobVerdict | None = None  # null from an agent that gives none

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells the jobs of a host apart: two may have one name, by their first ranks here."""
        return self.job, self.uid, self.ranks[0].owner.pid if self.ranks else 0
