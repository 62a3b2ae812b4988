"""Which rank of which job a process is, by the environment that its launcher gave it. Pure.

torchrun, Open MPI and PMIx, and Slurm name rank and size; a process may have the variables of several, of which the
innermost counts. Anybody can start a process with any environment: what is not as it should be is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pytools.kernel.printable import printable

_MOST_NAME: Final = 128  # characters
_MOST_RANKS: Final = 1 << 24
_LOCAL: Final = ("localhost", "127.", "::1")
# Innermost first: where a launcher starts another one, the ranks are those of the last.
LAYERS: Final = ("torchrun", "env", "mpi", "slurm")
_NAMES: Final = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("PMIX_RANK", "PMIX_NAMESPACE"),
        *("CUDA_VISIBLE_DEVICES", "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE", "SWERVE_NCCL_DIR"),
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, as a process has it in its environment."""

    source: Literal["torchrun", "env", "mpi", "slurm"]
    scheduler: str  # what started the outermost launcher: Slurm's job and step, or an MPI namespace; empty for none
    rendezvous: str  # where or under which name the ranks meet; empty if they have no such thing
    on_host: bool  # nobody from another network namespace can meet there
    rank: int
    size: int | None
    local_rank: int | None
    gpus: str
    ras: str | None  # NCCL_RAS_ADDR; empty: the default; None: NCCL_RAS_ENABLE=0
    rings: str = ""  # SWERVE_NCCL_DIR; empty: the default

    @property
    def job(self) -> str:
        """What the job is called."""
        return "/".join(filter(None, (self.scheduler, self.rendezvous)))


def place(environ: bytes) -> Place | None:
    """The place that an environment (/proc/PID/environ) gives a process; None for none.

    >>> found = place(b"RANK=3\\0WORLD_SIZE=8\\0MASTER_ADDR=node1\\0MASTER_PORT=29500\\0")
    >>> found.job, found.rank, found.size
    ('env:node1:29500', 3, 8)
    """
    given = _chosen(environ)
    job, step = (_digits(given.get(name, "")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    scheduler = "" if job is None else f"slurm:{job}" + ("" if step is None else f".{step}")
    found = _torch(given) or _mpi(given) or (_slurm(given) if step is not None else None)
    if found is None:
        return None
    source, rendezvous, ranks = found
    rank, size, local_rank = ranks
    if rank is None or rank >= min(size or _MOST_RANKS, _MOST_RANKS):
        return None
    if not scheduler and (namespace := given.get("PMIX_NAMESPACE", "")):
        scheduler = f"mpi:{namespace}"
    if not scheduler and not rendezvous:
        rendezvous = source
    ras = None if given.get("NCCL_RAS_ENABLE") == "0" else given.get("NCCL_RAS_ADDR", "")
    host = given.get("MASTER_ADDR", "").lower()
    on_host = bool(rendezvous) and host.startswith(_LOCAL)
    gpus = given.get("CUDA_VISIBLE_DEVICES", "")
    rings = given.get("SWERVE_NCCL_DIR", "")
    return Place(source, scheduler, rendezvous, on_host, rank, size, local_rank, gpus, ras, rings)


_Ranks = tuple[int | None, int | None, int | None]
_Found = tuple[Literal["torchrun", "env", "mpi", "slurm"], str, _Ranks]


def _torch(given: Mapping[str, str]) -> _Found | None:
    ranks = _numbers(given, "RANK", "WORLD_SIZE", "LOCAL_RANK")
    if ranks[0] is None or ranks[1] is None or not given.get("MASTER_ADDR"):
        return None
    run = given.get("TORCHELASTIC_RUN_ID")
    meeting = f"{given['MASTER_ADDR']}:{given.get('MASTER_PORT', '')}".rstrip(":")
    if run is None:
        return "env", f"env:{meeting}", ranks
    return "torchrun", f"torchrun:{meeting if run in ('', 'none') else run}", ranks  # `none` is torchrun's default


def _mpi(given: Mapping[str, str]) -> _Found | None:
    ranks = _numbers(given, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    if ranks[0] is None:
        ranks = _numbers(given, "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID")  # Slurm's own, where it is the launcher
    return None if ranks[0] is None else ("mpi", "", ranks)


def _slurm(given: Mapping[str, str]) -> _Found | None:
    ranks = _numbers(given, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    return None if ranks[0] is None else ("slurm", "", ranks)


def _numbers(given: Mapping[str, str], rank: str, size: str, local_rank: str) -> _Ranks:
    return _digits(given.get(rank, "")), _digits(given.get(size, "")), _digits(given.get(local_rank, ""))


def _digits(text: str) -> int | None:
    """A number without a sign; None for anything else."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    return number if (number := int(text)) <= 0xFFFFFFFF else None


def _chosen(environ: bytes) -> dict[str, str]:
    """The variables that matter; of one that is there twice the first, as getenv() has it."""
    found: dict[str, str] = {}
    for entry in environ.split(b"\0"):
        raw, equals, value = entry.partition(b"=")
        if not equals or len(raw) > 32:
            continue
        name = raw.decode("ascii", "replace")
        if name in _NAMES and name not in found:
            found[name] = printable(value[:_MOST_NAME].decode("utf-8", "replace"))
    return found
