"""Jobs: ranks on this host, what they send, and who is behind."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Owner, Path, Signal

Launcher = Literal["torchrun", "env", "mpi", "slurm"]
RasState = Literal["ok", "unresponsive", "absent", "invalid", "pending"]


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


class Job(Signal, frozen=True, kw_only=True, tag="job"):
    """A distributed job: its ranks on this host, their traffic, and what NCCL's RAS says of all its ranks.

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
