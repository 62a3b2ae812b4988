"""A real NCCL job over two rails, of which one falls silent: how long its longest step takes. Needs two GPUs.

Two hosts of a lab with rails of 5 Gbit/s, a rank of the job on each with a GPU of its own, which all-reduces 32 MiB
over TCP (16 connections) again and again. Rail 1 loses everything for some seconds and is healed; the longest step from
then on is the figure of a trial, medians of all. Which connections share a rail differs from job to job, so several
jobs run one after the other, with some outages each. Probes every 5 ms.

silent_rail          swerve with a minimum RTO on the managed routes; its peer is nobody, who does nothing
silent_rail_200ms    swerve with the kernel's own minimum
controller_killed    SIGKILL for both controllers while the rail is dead, steps from then on
healthy              the median step while all is well
congested_rail       rail 1 falls to a tenth of its rate: the median step from 300 ms afterwards on, over that of a job
                     that has one rail alone; how often a controller called the rail dead, before or after, and how
                     often the kernel moved packets for a moment while its queue grew
spread               the median step of jobs that began under a policy with `then: spread`, once they were even, beside
                     that of the same jobs before; when the last of their pins was placed, after the first step; how
                     many there were of one host, at most; how many came in the seconds after that

The job runs under the Python that --torch names; NCCL_* of the environment count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from _common import compare, emit, gpus, median, note, wait_until
from _sides import LEAVES_DEAD, Side, swerve
from pyroute2 import IPRoute

from pytools.errors import SwerveError
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab
from pytools.signals import Act

MS = 1_000_000
SIZE_BYTES = 32 << 20
RATE, QUEUE_BYTES, WRITE_BYTES = "5gbit", 8_000_000, "4096 16384 524288"
OUTAGE_S, AFTER_S, QUIET_S, FIRST_S = 4.0, 3.0, 2.0, 120.0
SETTLED_S, BEFORE_S = 6.0, 1.0  # of a job that is spread: its pins are there, none may follow
SPREAD = """\
  - name: even
    scope: {flows: {protocol: tcp}}
    then: {spread: {}}
"""
CONGESTED_RATE, MOVED_S, FLOOR_S = "500mbit", 0.3, 2.0
CONGESTED = """\
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: last, above: 20ms, samples: 3, clear_below: 5ms}
    then: {shift: {share: 0}}
    return: {dwell: 5s, max_dwell: 5s, retry_after: 1s, steps: [1.0], step: 100ms}
"""
GOING = 20  # steps
RANKS = 2
INTERFACE = "job0"  # NCCL takes the first address of an interface: that of `lo` would be 127.0.0.1
JOB = Path(__file__).with_name("_nccl_job.py")
NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": f"={INTERFACE}",
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "4",
}


class Job:
    """The ranks of a job; steps are those of rank 0, as (end, duration) in nanoseconds."""

    def __init__(self, stack: contextlib.ExitStack, lab: Lab, python: str, folder: Path) -> None:
        self._file = folder / "steps"
        for rank, host in enumerate(lab.hosts):
            out = stack.enter_context((self._file if rank == 0 else folder / f"steps{rank}").open("w"))
            words = [python, str(JOB), str(rank), str(RANKS), lab.hosts[0].service, str(SIZE_BYTES)]
            process = lab.start(host, words, {**os.environ, **NCCL}, stdout=out, stderr=None)
            stack.callback(_end, process)
        self.goes_on()

    def steps(self, since_ns: int = 0) -> list[tuple[int, int]]:
        """Those that ended since then."""
        rows = (line.split() for line in self._file.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return [(int(end), int(lasted)) for end, lasted in rows if int(end) >= since_ns]

    def goes_on(self) -> None:
        """Wait until it makes steps again."""
        now_ns = time.monotonic_ns()
        wait_until(lambda: len(self.steps(now_ns)) > GOING, "the job goes on", FIRST_S)

    def median_ms(self, after_s: float, for_s: float) -> float:
        """The median of the steps that begin and end in the `for_s` seconds from `after_s` seconds from now on."""
        began_ns = time.monotonic_ns() + round(after_s * 1e9)
        time.sleep(after_s + for_s)
        lasted = [each for end_ns, each in self.steps(began_ns) if end_ns - each >= began_ns]
        if not lasted:
            raise SwerveError(f"the job made no step in {for_s:g} s", "is a rail without routes?")
        return median([each / MS for each in lasted])

    def longest_ms(self, since_ns: int, until_ns: int) -> float:
        """The longest step that lasts in this time; one that has not ended counts as it is."""
        found = self.steps(since_ns)
        last_ns = found[-1][0] if found else since_ns
        lasted = [each for end_ns, each in found if end_ns - each < until_ns]
        return max([*lasted, time.monotonic_ns() - last_ns]) / MS


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()


def prepare(host: Host) -> None:
    """An interface that has the host's service address first, and buffers that the rails' queues can hold."""
    with inside(host.netns), IPRoute() as netlink:
        netlink.link("add", ifname=INTERFACE, kind="veth", peer=f"{INTERFACE}-end")
        for name in (f"{INTERFACE}-end", INTERFACE):
            [index] = netlink.link_lookup(ifname=name)
            netlink.link("set", index=index, state="up")
        netlink.addr("add", index=index, address=host.service, prefixlen=32)
        Path("/proc/sys/net/ipv4/tcp_wmem").write_text(WRITE_BYTES)


@contextlib.contextmanager
def prepared() -> Iterator[Lab]:
    """A lab for a job."""
    with Lab.up(f"nccl{os.getpid()}", hosts=RANKS, rate=RATE, queue_bytes=QUEUE_BYTES) as lab:
        for host in lab.hosts:
            prepare(host)
        yield lab


@contextlib.contextmanager
def working(lab: Lab, python: str) -> Iterator[Job]:
    """A job on it."""
    with contextlib.ExitStack() as stack:
        yield Job(stack, lab, python, Path(stack.enter_context(TemporaryDirectory())))


@contextlib.contextmanager
def running(python: str) -> Iterator[tuple[Lab, Job]]:
    """Both."""
    with prepared() as lab, working(lab, python) as job:
        yield lab, job


def trial(lab: Lab, job: Job) -> float:
    """The longest step of one outage."""
    time.sleep(QUIET_S)
    began_ns = time.monotonic_ns()
    lab.cut(1)
    time.sleep(OUTAGE_S)
    lab.heal(1)
    healed_ns = time.monotonic_ns()
    time.sleep(AFTER_S)
    return job.longest_ms(began_ns, healed_ns)


class Steered(NamedTuple):
    """What outages did to several jobs, in milliseconds."""

    longest: list[float]  # steps, of all outages
    after_kill: list[float]  # the same after the controllers were killed
    healthy: list[float]  # the median step of each job before all of it


def steered(options: argparse.Namespace, manage: str, kills: int) -> Steered:
    """Outages of jobs that begin one after the other; controllers are killed beside the last."""
    found = Steered([], [], [])
    with prepared() as lab, swerve(lab, "silence", 5, manage) as side:
        for left in reversed(range(options.silent_jobs)):
            with working(lab, options.torch) as job:
                wait_until(side.whole, "all paths are healthy", FIRST_S)
                found.healthy.append(job.median_ms(0.0, QUIET_S))
                outages = [_outage(side, job) for _ in range(options.trials)]
                found.longest.extend(outages)
                note(f"a job: healthy {found.healthy[-1]:.0f} ms, longest step {median(outages):.0f} ms in the median")
                for _ in range(0 if left else kills):
                    wait_until(side.whole, "all is well before the trial", FIRST_S)
                    found.after_kill.append(kill(side, job))
                    note(f"longest step after SIGKILL {found.after_kill[-1]:.0f} ms")
    return found


def _outage(side: Side, job: Job) -> float:
    """A trial, and what swerve did in it."""
    wait_until(side.whole, "all is well before the trial", FIRST_S)
    began_ns = time.monotonic_ns()
    longest = trial(side.lab, job)
    note(f"longest step {longest:.0f} ms")
    side.explain(began_ns)
    return longest


def kill(side: Side, job: Job) -> float:
    """The longest step after both controllers are killed beside a dead rail."""
    side.lab.cut(1)
    time.sleep(OUTAGE_S / 4)
    killed_ns = time.monotonic_ns()
    for each in side.controllers:
        each.send_signal(signal.SIGKILL)
        each.wait()
    time.sleep(QUIET_S)
    side.revive()
    time.sleep(OUTAGE_S)
    longest = job.longest_ms(killed_ns, time.monotonic_ns())
    side.heal(1)
    return longest


def congested(options: argparse.Namespace) -> tuple[list[float], int, int]:
    """Median steps on a congested rail over that on one rail, of each trial; dead rails and fast reroutes in all."""
    found: list[float] = []
    dead = rerouted = 0
    manage = f", rto_min: {options.rto_min}"
    with running(options.torch) as (lab, job), swerve(lab, "silence", 5, manage, CONGESTED) as side:
        wait_until(side.whole, "all paths are healthy", FIRST_S)
        lab.cut(1)
        floor_ms = job.median_ms(MOVED_S, FLOOR_S)
        side.heal(1)
        note(f"median step on one rail {floor_ms:.1f} ms")
        for _ in range(options.congested):
            wait_until(side.whole, "all is well before the trial", FIRST_S)
            time.sleep(QUIET_S)
            began_ns = time.monotonic_ns()
            lab.congest(1, CONGESTED_RATE)
            found.append(job.median_ms(MOVED_S, OUTAGE_S) / floor_ms)
            by_death = [each for each in side.changes(began_ns) if each.under == LEAVES_DEAD]
            rerouted += sum(each.actuator == "reroute" and each.outcome == "applied" for each in by_death)
            dead += sum(each.actuator != "reroute" or "it was silent" in each.because for each in by_death)
            note(f"median step on a congested rail {found[-1]:.3f} of that")
            side.explain(began_ns)
            side.heal(1)
    return found, dead, rerouted


class Spread(NamedTuple):
    """What became of one job whose connections were spread."""

    before_ms: float  # median step of its first second
    after_ms: float
    even_s: float  # from its first step to the last pin; 0 where its hash was even
    moves: int  # of the host that moved more
    late: int  # moves afterwards


def spread(options: argparse.Namespace) -> list[Spread]:
    """Jobs that begin while controllers run, one after the other."""
    found: list[Spread] = []
    with prepared() as lab, swerve(lab, "silence", 5, more=SPREAD) as side:
        wait_until(side.whole, "all paths are healthy", FIRST_S)
        for _ in range(options.jobs):
            began_ns = time.monotonic_ns()
            with working(lab, options.torch) as job:
                time.sleep(SETTLED_S)
                settled_ns = time.monotonic_ns()
                time.sleep(options.watched)
                steps = job.steps(began_ns)
                pins = [each for each in side.changes(began_ns) if each.actuator == "pin" and each.outcome == "applied"]
                side.explain(began_ns)
            first_ns = steps[0][0]
            placed = [each for each in pins if each.decided_ns < settled_ns]
            by_host = Counter[str]()
            for each in placed:
                by_host[each.host] += _moved(each)
            found.append(
                Spread(
                    median([lasted / MS for end_ns, lasted in steps if end_ns < first_ns + BEFORE_S * 1e9]),
                    median([lasted / MS for end_ns, lasted in steps if end_ns >= settled_ns]),
                    max(((each.acknowledged_ns or 0) - first_ns for each in placed), default=0) / 1e9,
                    max(by_host.values(), default=0),
                    sum(_moved(each) for each in pins if each.decided_ns >= settled_ns),
                )
            )
            note(str(found[-1]))
    return found


def _moved(act: Act) -> int:
    """How many flows it moved."""
    return sum(max(count - act.after.get(hop, 0), 0) for hop, count in act.before.items())


def report_spread(jobs: list[Spread]) -> None:
    before, after, even_s, moves, late = zip(*jobs, strict=True)
    compare("jobs", "step", after, before, "ms", "lower", case="spread", peer="as_hashed")
    emit("jobs", "step_ratio", max(after) / min(after), "ratio", "lower", case="spread", n=len(jobs))
    emit("jobs", "even_after", max(even_s), "s", "lower", case="spread", n=len(jobs))
    emit("jobs", "moves", max(moves), "flows", "lower", case="spread", n=len(jobs))
    emit("jobs", "late_moves", sum(late), "flows", "lower", case="spread", n=len(jobs))


def main() -> None:
    options = _options()
    if gpus(options.torch) < RANKS:
        note(f"left out: {options.torch} has no PyTorch with {RANKS} GPUs (--torch)")
        return
    if options.jobs:
        report_spread(spread(options))
    if options.congested:
        over, dead, rerouted = congested(options)
        emit("jobs", "step_ratio", median(over), "ratio", "lower", case="congested_rail", n=len(over))
        emit("jobs", "called_dead", dead, "acts", "lower", case="congested_rail", n=len(over))
        emit("jobs", "rerouted", rerouted, "acts", "lower", case="congested_rail", n=len(over))
    if not options.trials:
        return
    nobody = []
    with running(options.torch) as (lab, job):
        for _ in range(options.alone):
            nobody.append(trial(lab, job))
            note(f"nobody acts: longest step {nobody[-1]:.0f} ms")
            job.goes_on()
    ours = steered(options, f", rto_min: {options.rto_min}", options.kills)
    usual = steered(options, "", 0).longest
    compare("jobs", "step_longest", ours.longest, nobody, "ms", "lower", case="silent_rail", peer="nobody")
    emit("jobs", "step_longest", median(usual), "ms", "lower", case="silent_rail_200ms", n=len(usual))
    if killed := ours.after_kill:
        emit("jobs", "step_longest", max(killed), "ms", "lower", case="controller_killed", n=len(killed))
    emit("jobs", "step", median(ours.healthy), "ms", "lower", case="healthy", n=len(ours.healthy))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="python3", help="the Python that has PyTorch (python3)")
    parser.add_argument("--rto-min", default="10ms", help="minimum RTO, at least two timer ticks (10ms)")
    parser.add_argument("--silent-jobs", type=int, default=5, help="jobs with outages beside swerve, of each kind (5)")
    parser.add_argument("--trials", type=int, default=3, help="outages of each of them (3)")
    parser.add_argument("--alone", type=int, default=3, help="outages while nobody acts (3)")
    parser.add_argument("--kills", type=int, default=3, help="outages in which the controllers are killed (3)")
    parser.add_argument("--jobs", type=int, default=5, help="jobs whose connections are spread (5)")
    parser.add_argument("--watched", type=float, default=20.0, help="seconds that each of them is watched then (20)")
    parser.add_argument("--congested", type=int, default=20, help="times that a rail is congested (20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
