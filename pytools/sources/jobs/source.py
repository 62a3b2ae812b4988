"""Jobs: `job` of every distributed job with ranks on this host, once per long window while somebody listens.

While nobody does, nothing is read and nobody is asked; while there is no job, only /proc is scanned. RAS is asked at
once, a second later, and then every five seconds. Whatever may block, RAS and environments, is read in threads of its
own; all else is the agent's thread. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.signals import Job, JobLag, JobPath, JobRank, header
from pytools.sources.jobs import verdicts
from pytools.sources.jobs.processes import Member, Processes
from pytools.sources.jobs.ras import Answer, Asking, Communicator, Rank, behind, endpoint, of_job
from pytools.sources.jobs.traffic import TYPES, Sum, Traffic
from pytools.sources.jobs.verdicts import Verdicts
from pytools.sources.source import Source
from pytools.sources.tcp.connections import Feed
from pytools.sources.tcp.pods import Pods, pod

_IDLE_NS: Final = 500_000_000  # to see that somebody listens
_LOOK_NS: Final = 50_000_000  # for an answer
_ASK_AGAIN_NS: Final = 10**9  # the second time
_ASK_EVERY_NS: Final = 5 * 10**9
_LATE_NS: Final = 3 * 10**9  # a question open for so long: unresponsive
_MOST_JOBS: Final = 256
_MOST_ASKED: Final = 16  # at a time
_MOST_LAGGING: Final = 16

Where = tuple[int, str]  # network namespace, and NCCL_RAS_ADDR


@dataclass(frozen=True, slots=True)
class _Known:
    """What is the same in each window while the members of a job are."""

    by_rank: Mapping[int, list[Member]]
    own_pids: Mapping[int, set[int]]
    pods: Mapping[int, str]  # by rank
    places: Mapping[Where, Member]

    @classmethod
    def of(cls, members: Iterable[Member]) -> _Known:
        by_rank: dict[int, list[Member]] = {}
        for each in members:
            by_rank.setdefault(each.place.rank, []).append(each)
        own_pids = {rank: {each.own_pid for each in found} for rank, found in by_rank.items()}
        pods = {rank: pod(found[0].owner.cgroup) for rank, found in by_rank.items()}
        return cls(by_rank, own_pids, pods, _places(members))


class JobSource(Source):
    """Looks for ranks, joins them with their traffic, and asks RAS.

    Parameters
    ----------
    feed : Feed
        Where TCP connections come from while there are ranks.
    """

    def __init__(self, config: AgentConfig, bus: Bus, feed: Feed, proc: Path = Path("/proc")) -> None:
        self._host, self._bus, self._feed = config.host, bus, feed
        self._window_ns = config.windows.long_ns
        self._netns = os.stat("/proc/thread-self/ns/net").st_ino
        self._processes = Processes(0 if _follows_all(config, self._netns) else self._netns, proc)
        self._pods = Pods()
        self._traffic = Traffic()
        self._verdicts = Verdicts(config.windows.long_ns, proc)
        self._questions: dict[Where, _Question] = {}
        self._jobs: Mapping[Hashable, list[Member]] = {}  # those that the traffic knows
        self._known: dict[Hashable, _Known] = {}
        self._listens = False
        self._due_ns = self._began_ns = 0
        self._too_many = 0

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""
        if not self._bus.wanted("job"):
            self._rest()
            return now_ns + _IDLE_NS
        if not self._listens:
            self._listens = True
            self._began_ns, self._due_ns = now_ns, now_ns + self._window_ns
        next_ns = self._processes.work(now_ns)
        if self._jobs:
            next_ns = min(next_ns, self._verdicts.work(now_ns, self._jobs))
        for question in self._questions.values():
            next_ns = min(next_ns, question.work(now_ns))
        if now_ns >= self._due_ns:
            self._publish(now_ns)
            self._due_ns = max(self._due_ns + self._window_ns, now_ns)
        return min(next_ns, self._due_ns)

    def drops(self) -> dict[str, int]:
        """What was not looked at, by reason."""
        found = self._processes
        return {
            "jobs_environ_too_long": found.refused,
            "jobs_environ_unreadable": found.unreadable,
            "jobs_looks_hung": found.hung + self._verdicts.hung,
            "jobs_too_many": found.too_many + self._traffic.too_many + self._too_many,
        }

    def close(self) -> None:
        """Listen no more, and wait for no answer."""
        self._rest()

    def _rest(self) -> None:
        if self._listens:
            self._listens = False
            self._set_jobs({})
        for question in self._questions.values():
            question.give_up()
        self._questions.clear()

    def _set_jobs(self, jobs: Mapping[Hashable, list[Member]]) -> None:
        """Follow the ranks of these; without any ask for no other signals, which cost something to make."""
        if jobs and not self._jobs:
            self._bus.add(self, TYPES, self._traffic.offer)
            self._feed.reader = self._traffic.take
            self._bus.add(self._verdicts, verdicts.TYPES, self._verdicts.offer)
        self._traffic.set_ranks(jobs)
        self._verdicts.set_ranks(jobs)
        if self._jobs and not jobs:
            self._feed.reader = None
            self._bus.remove(self)
            self._bus.remove(self._verdicts)
            self._traffic.forget()
            self._verdicts.forget()
        self._jobs, self._known = jobs, {job: _Known.of(members) for job, members in jobs.items()}

    def _publish(self, now_ns: int) -> None:
        jobs = self._processes.ranks()
        if jobs is not self._jobs:
            self._set_jobs(jobs)
        used: dict[Hashable, list[Sum]] = {}
        for each in self._traffic.window(now_ns):
            used.setdefault(each.where[0], []).append(each)
        window_ns, self._began_ns = now_ns - self._began_ns, now_ns
        if jobs:
            self._verdicts.window(now_ns)
        asked: set[Where] = set()
        self._too_many += max(0, len(jobs) - _MOST_JOBS)
        for key, members in itertools.islice(jobs.items(), _MOST_JOBS):
            question = None
            for where, member in self._known[key].places.items():
                asked.add(where)
                question = self._ask(where, member, now_ns) or question
                if question is None or not question.nobody:
                    break
            sums = used.get(key, [])
            self._bus.publish(self._signal(key, members, sums, question, window_ns, now_ns))
        for gone in self._questions.keys() - asked:
            self._questions.pop(gone).give_up()

    def _ask(self, where: Where, member: Member, now_ns: int) -> _Question | None:
        if where not in self._questions:
            if len(self._questions) >= _MOST_ASKED:
                self._too_many += 1
                return None
            elsewhere = where[0] not in (0, self._netns)
            self._questions[where] = question = _Question(where[1], member.owner.pid if elsewhere else None)
            question.work(now_ns)
        return self._questions[where]

    def _signal(
        self,
        key: Hashable,
        members: list[Member],
        sums: list[Sum],
        question: _Question | None,
        window_ns: int,
        now_ns: int,
    ) -> Job:
        known = self._known[key]
        pids = known.own_pids
        answer = Answer("absent", "no RAS: NCCL_RAS_ENABLE is 0, or NCCL_RAS_ADDR is no address")
        lagging: list[JobLag] = []
        if question is not None:
            answer = question.answer_about(set().union(*pids.values()), now_ns)
        everyone = of_job(answer.communicators, members[0].place.size, pids)
        if question is not None and answer.state == "ok":
            lagging = _lags(question.before, answer.communicators, everyone)
        gpu_of = {rank: found.nvml_dev for rank, found in everyone.items() if rank in pids and found.nvml_dev >= 0}
        return Job(
            **header(self._host, now_ns),
            job=members[0].place.job,
            source=members[0].place.source,
            uid=members[0].uid,
            size=members[0].place.size,
            ranks=[self._rank(key, found, gpu_of.get(rank), now_ns) for rank, found in known.by_rank.items()],
            window_ns=window_ns,
            paths=_paths(sums),
            ras=answer.state,
            ras_reason=answer.reason,
            ras_ranks=max((len(each.ranks) for each in answer.communicators), default=0),
            lagging=lagging,
            why=self._verdicts.of(key, members, sums, gpu_of, window_ns, now_ns),
        )

    def _rank(self, job: Hashable, found: list[Member], gpu: int | None, now_ns: int) -> JobRank:
        first = found[0]
        connections, queue_pairs = self._traffic.held(job, first.place.rank)
        return JobRank(
            rank=first.place.rank,
            owner=first.owner,
            processes=len(found),
            local_rank=first.place.local_rank,
            gpus=first.place.gpus,
            gpu=gpu,
            pod=self._pods.name(self._known[job].pods[first.place.rank], first.owner.container, now_ns),
            connections=connections,
            queue_pairs=queue_pairs,
        )


class _Question:
    """What RAS answers at one address: the latest answer, and the one before."""

    def __init__(self, address: str, inside: int | None) -> None:
        self._where, self._inside = endpoint(address), inside
        self._asking: Asking | None = None
        self._due_ns = 0
        self._answer: Answer | None = None
        self.before: list[Communicator] = []  # of the answer before the latest

    def work(self, now_ns: int) -> int:
        """Take an answer, and ask again when it is time; says when that may be."""
        if self._asking is not None and self._asking.answer is not None:
            first = self._answer is None
            self.before = [] if self._answer is None else self._answer.communicators
            self._answer, self._asking = self._asking.answer, None
            self._due_ns = now_ns + (_ASK_AGAIN_NS if first else _ASK_EVERY_NS)
        if self._asking is None and self._where is not None and now_ns >= self._due_ns:
            self._asking = Asking(self._where, self._inside)
        return now_ns + _LOOK_NS if self._asking is not None else self._due_ns

    @property
    def nobody(self) -> bool:
        return self._answer is not None and self._answer.state == "absent"

    def answer_about(self, pids: set[int], now_ns: int) -> Answer:
        """The latest answer, if it is about a job with one of these processes."""
        if self._asking is not None and now_ns - self._asking.began_ns > _LATE_NS:
            return Answer("unresponsive", "RAS has not answered yet")
        if self._answer is None:
            return Answer("pending")
        found = self._answer
        if (found.state == "ok" or found.communicators) and not any(
            rank.pid in pids for each in found.communicators for rank in each.ranks
        ):
            return Answer("absent", "what answers there is RAS of another job, or has no communicator yet")
        return found

    def give_up(self) -> None:
        """Let the thread end."""
        if self._asking is not None:
            self._asking.give_up()


def _follows_all(config: AgentConfig, netns: int) -> bool:
    """Whether processes of all network namespaces count, as with TCP connections."""
    if config.tcp.namespaces == "auto":
        try:
            return os.stat("/proc/1/ns/net").st_ino == netns
        except OSError:  # not ours to see, as processes of others then
            return False
    return config.tcp.namespaces == "all"


def _places(members: Iterable[Member]) -> dict[Where, Member]:
    """Where the RAS of a job may be asked, and a process there; in each network namespace one of its ranks listens."""
    found: dict[Where, Member] = {}
    for each in members:
        ras = each.place.ras
        if ras is not None and (each.netns, ras) not in found and endpoint(ras) is not None:
            found[each.netns, ras] = each
    return found


def _paths(sums: Iterable[Sum]) -> list[JobPath]:
    """Those with the most bytes first."""
    found = [JobPath(*each.where[1:], each.connections, len(each.pairs), each.sent, each.received) for each in sums]
    return sorted(found, key=lambda each: (-each.sent_bytes - each.received_bytes, each.interface))


def _lags(before: list[Communicator], now: list[Communicator], everyone: dict[int, Rank]) -> list[JobLag]:
    """Ranks that are behind, by their number in the job where that is known."""
    numbers = {(rank.host, rank.pid): number for number, rank in everyone.items()}
    found = [
        JobLag(
            rank=numbers.get((rank.host, rank.pid)),
            communicator=communicator.hash,
            communicator_rank=rank.rank,
            host=rank.host,
            pid=rank.pid,
            behind=operations,
        )
        for communicator, rank, operations in behind(before, now)
    ]
    return found[:_MOST_LAGGING]
