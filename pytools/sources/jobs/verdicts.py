"""Why the steps of each job take as long as they do: collects what is known of a job in a window, and has it judged.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytools.estimators.job_evidence import Evidence, PathUse, RankUse
from pytools.estimators.job_rhythm import slowdown
from pytools.estimators.job_verdict import verdict
from pytools.ipc.bus import Published
from pytools.signals import JobSensor, JobStep, JobVerdict
from pytools.sources.jobs import gpus, paths
from pytools.sources.jobs.cpu import Cpu
from pytools.sources.jobs.gpus import Gpus
from pytools.sources.jobs.kernels import Looks, Seen
from pytools.sources.jobs.paths import Delays
from pytools.sources.jobs.processes import Member
from pytools.sources.jobs.traffic import Sum

TYPES: Final = paths.TYPES | {gpus.TAG}
_USUAL: Final = 300  # windows

Jobs = Mapping[Hashable, list[Member]]


class Verdicts:
    """The verdicts on the jobs of this host.

    Parameters
    ----------
    window_ns : int
        Length of a window.
    """

    def __init__(self, window_ns: int, proc: Path) -> None:
        self._window_ns, self._proc = window_ns, proc
        self._delays, self._cpu = Delays(window_ns), Cpu(proc)
        self._looks, self._gpus = Looks(window_ns, proc), Gpus()
        self._hung = 0  # of looks that were forgotten
        self._first: dict[Hashable, dict[int, Member]] = {}  # by job and rank: the process that counts
        self._pids: dict[Hashable, dict[int, list[int]]] = {}  # all of them
        self._used: dict[tuple[int, int], RankUse] = {}
        self._history: dict[tuple[Hashable, str], deque[float]] = {}

    def offer(self, published: Published) -> None:
        """Take a signal of TYPES."""
        if published.tag == gpus.TAG:
            self._gpus.offer(published)
        else:
            self._delays.offer(published)

    @property
    def hung(self) -> int:
        """Looks at rings that hang."""
        return self._hung + self._looks.hung

    def set_ranks(self, jobs: Jobs) -> None:
        """Say which processes are ranks, the first of each being the one that counts."""
        self._first, self._pids = {}, {}
        for job, members in jobs.items():
            first, pids = self._first.setdefault(job, {}), self._pids.setdefault(job, {})
            for each in members:
                first.setdefault(each.place.rank, each)
                pids.setdefault(each.place.rank, []).append(each.owner.pid)
        self._cpu.set_ranks(
            (each.owner.pid, each.start, rank) for first in self._first.values() for rank, each in first.items()
        )
        self._history = {key: known for key, known in self._history.items() if key[0] in jobs}

    def work(self, now_ns: int, jobs: Jobs) -> int:
        """Look at rings if that is due; says when to call again."""
        return self._looks.work(now_ns, jobs)

    def window(self, now_ns: int) -> None:
        self._used = self._cpu.window(now_ns)

    def of(
        self,
        job: Hashable,
        members: Sequence[Member],
        sums: Sequence[Sum],
        gpu_of: Mapping[int, int],
        window_ns: int,
        now_ns: int,
    ) -> JobVerdict:
        """The verdict on one job; `gpu_of` is the GPU of each rank that RAS knows."""
        first = self._first[job]
        seen = self._looks.seen(job, now_ns)
        used = paths.uses(sums, self._delays, window_ns, now_ns)
        ranks = [use for each in first.values() if (use := self._used.get((each.owner.pid, each.start))) is not None]
        missing: dict[JobSensor, str] = {}
        step = self._step(job, seen, used, sums, window_ns)
        if step is None:
            missing["rhythm"] = "no collective was recorded, and no connections send the same"
        if seen is None or seen.why:
            missing["ranks"] = "not looked at yet" if seen is None else seen.why
        if why := self._no_network(members, used, now_ns):
            missing["network"] = why
        if len(ranks) < len(first):
            missing["host"] = f"CPU waits of {len(first) - len(ranks)} of {len(first)} ranks are not known"
        own_gpus, why = self._gpus.of(self._pids[job], gpu_of, now_ns)
        if why:
            missing["gpu"] = why
        return verdict(
            Evidence(
                window_ns,
                step,
                tuple(ranks),
                self._cpu.host,
                tuple(used),
                None if seen is None else seen.late,
                tuple(own_gpus),
                missing,
            )
        )

    def _step(
        self, job: Hashable, seen: Seen | None, used: Sequence[PathUse], sums: Sequence[Sum], window_ns: int
    ) -> JobStep | None:
        """The rhythm: of the collectives if they are known, else of the connections that send the same."""
        if seen is not None and seen.steps is not None:
            found = seen.steps
            slower = self._slowdown(job, "nccl", found.duration_ns)
            bound = None if found.bound_ns is None else round(found.bound_ns)
            return JobStep("nccl", found.count, found.operations, round(found.duration_ns), bound, None, slower)
        many, typical = sum(each.connections for each in used), paths.typical(sums)
        if many < 2 or not typical:
            return None
        slower = self._slowdown(job, "tcp", window_ns / typical)
        return JobStep("tcp", many, 0, None, None, 8e9 * typical / window_ns, slower)

    def _slowdown(self, job: Hashable, source: str, now: float) -> float | None:
        known = self._history.setdefault((job, source), deque(maxlen=_USUAL))
        found = slowdown(now, known)
        known.append(now)
        return found

    def _no_network(self, members: Sequence[Member], used: Sequence[PathUse], now_ns: int) -> str:
        """Why the network is not judged as a whole; empty if it is."""
        size = members[0].place.size
        active = [each for each in used if each.connections or each.pairs]
        if not active:
            alone = size is not None and size <= len({each.place.rank for each in members})
            return "" if alone else "no connection or queue pair of its ranks was seen at work"
        unknown = [each.interface or "unknown interface" for each in active if each.path is None]
        if unknown:
            return f"traffic by {', '.join(sorted(set(unknown))[:4])} is on no measured path"
        silent = [each.name for each in active if each.path is not None and self._delays.of(each.path, now_ns) is None]
        if not silent and all(each.silent for each in used if each.path is not None):
            return "no probe of any of its paths is answered"
        return f"no recent probes of {', '.join(silent[:4])}" if silent else ""

    def forget(self) -> None:
        """Nobody listens, or there is no job: begin anew then."""
        self._looks.close()
        self._hung += self._looks.hung
        self._looks = Looks(self._window_ns, self._proc)
        self._cpu.close()
        self._delays.forget()
        self._gpus.forget()
        self._history.clear()
        self._used = {}
