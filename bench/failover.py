"""A rail dies under a stream: how long until packets arrive again, here and with FRR beside it on the same lab.

A numbered UDP datagram and a small TCP segment a millisecond go from h1 to h2 over the rail that is to die. The gap is
the longest pause between two arrivals at h2, less the period. Each side (swerve on both hosts; FRR with BFD at its
default and at its fastest) gets a lab of its own, in turns. swerve probes every 20 ms unless the case says otherwise.

silent        every cable of the rail loses everything, the rail's own packets too (BFD's neighbour is the rail)
carrier       h1's cable to the rail loses its carrier
carrier_far   h2's does: h1 sees nothing, but h2's agent says so (the hosts share a cluster key)
beyond        the rail forwards nothing, but answers for itself: a neighbour one hop away notices nothing

These are of swerve alone, and are compared with FRR's figures of the silent fault in the same run:

silent_5ms, silent_1ms   the silent fault, with a probe every 5 ms and every 1 ms
stopped                  the silent fault, with a probe every 5 ms; h1's controller is stopped (SIGSTOP) before it and
                         h1's agent 20 ms after it
steal                    the rail forwards nothing, with a probe every 5 ms, under CPU steal (bench/_steal.py), which
                         begins before and ends after it. The fault is one message to the kernel, so it happens at any
                         moment; for the silent one other threads must run. The stream has a higher priority, so its
                         own pauses are not in the gap (see quiet_gap_p95)
peer_death               h2 is killed: h1 and h3 must not move anything

Failback is counted too: datagrams lost from healing until the rail carries the stream again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import signal
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import _frr
from _common import emit, median, note, wait_until
from _sides import PROBE_MS, RAILS, SIDES, SIGNALS, Side, routing, weights_of
from _steal import real_time, steal
from _stream import STREAM_PRIORITY, Stream

from pytools.errors import SwerveError
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab

MS = 1_000_000
DYING_HOSTS = 3  # where one dies there are others that live
QUIET_S, OUTAGE_S, AFTER_S = 0.5, 2.0, 0.5
STOPPED_OUTAGE_S = 1.0  # shorter than the controller's lease (3 s), or the guardian kills it
BEYOND_TRIALS = 5  # of what FRR cannot see, a few are enough
DEATH_S = 5.0
STARTS = 5
_WHOLE_S = 120.0
STEAL_LEAD_S, STOP_AFTER_S = 1.5, 0.02


@dataclass(frozen=True)
class Case:
    """What happens to a side."""

    fault: str
    probe_ms: int = PROBE_MS
    stopped: bool = False
    stolen: bool = False
    rival: str = ""  # FRR's case that it is compared with; its own, unless given


CASES = {
    "silent": Case("silent"),
    "silent_5ms": Case("silent", probe_ms=5, rival="silent"),
    "silent_1ms": Case("silent", probe_ms=1, rival="silent"),
    "carrier": Case("carrier"),
    "carrier_far": Case("carrier_far"),
    "beyond": Case("beyond"),
    "stopped": Case("silent", probe_ms=5, stopped=True, rival="silent"),
    "steal": Case("beyond", probe_ms=5, stolen=True, rival="silent"),
}
PEER_DEATH = "peer_death"


@dataclass(frozen=True)
class Trial:
    """What one outage cost. Times in ms but for the last."""

    gap: float
    stall: float  # of the TCP stream
    quiet: float  # the longest pause before: what this machine does by itself
    lost: int
    failback_lost: int
    failback_s: float
    returned: bool  # whether the stream went over the rail again


# ---- one outage ----

FAULTS: dict[str, Callable[[Lab, int], None]] = {
    "silent": lambda lab, rail: lab.cut(rail),
    "carrier": lambda lab, rail: lab.cut(rail, 1, carrier=True),
    "carrier_far": lambda lab, rail: lab.cut(rail, 2, carrier=True),
    "beyond": lambda lab, rail: lab.blackhole(rail),
}


def outage(side: Side, case: Case, rail: int, seed: int) -> Trial:
    """A stream, a fault, an end of the fault."""
    lab, source = side.lab, side.lab.hosts[0]
    with tempfile.TemporaryDirectory() as folder:
        stream = started(side, rail, Path(folder))
        with contextlib.ExitStack() as meanwhile:
            if case.stolen:
                meanwhile.enter_context(steal(seed))
                meanwhile.enter_context(real_time(STREAM_PRIORITY))  # a rail dies whoever has the CPUs
            quiet_ns = time.monotonic_ns()
            time.sleep(STEAL_LEAD_S if case.stolen else QUIET_S)
            if case.stopped:
                meanwhile.enter_context(stopped(side.controllers[0]))
            fault_ns = time.monotonic_ns()
            FAULTS[case.fault](lab, rail)
            if case.stopped:
                time.sleep(STOP_AFTER_S)
                meanwhile.enter_context(stopped(side.agents[0]))
            time.sleep(STOPPED_OUTAGE_S if case.stopped else OUTAGE_S)
        heal_ns = time.monotonic_ns()
        side.heal(rail)
        healed_ns = time.monotonic_ns()
        side.revive()
        wait_until(side.whole, f"{side.name} is whole after the trial", _WHOLE_S)
        whole_ns = time.monotonic_ns()
        sent = _sent(source, rail)
        time.sleep(AFTER_S)
        returned = _sent(source, rail) - sent > AFTER_S * 1e3 / 2
        arrived = stream.end()
    gap = arrived.pause(fault_ns - 5 * MS, heal_ns)
    side.explain(gap.since_ns)
    return Trial(
        gap.length_ms,
        arrived.stall(fault_ns - 5 * MS, heal_ns).length_ms,
        arrived.pause(quiet_ns, fault_ns - 5 * MS).length_ms,
        arrived.lost(fault_ns - 5 * MS, healed_ns),
        arrived.lost(healed_ns, time.monotonic_ns()),
        (whole_ns - healed_ns) / 1e9,
        returned,
    )


@contextlib.contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop a process while the context lasts."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def started(side: Side, rail: int, folder: Path) -> Stream:
    """A stream over a rail. While routes change, as after a false alarm, no socket may keep to one: try again."""
    source, sink = side.lab.hosts[:2]
    side.revive()
    for left in reversed(range(STARTS)):
        wait_until(side.whole, f"{side.name} is whole before the trial", _WHOLE_S)
        try:
            return Stream(side.lab, source, sink, rail, folder)
        except SwerveError:
            if not left:
                raise
            note(f"{side.name}: the routes do not hold still")
    raise AssertionError


def _sent(host: Host, rail: int) -> int:
    """Packets a host has sent over a rail."""
    with inside(host.netns):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    name = f"{host.interfaces[rail - 1].name}:"
    return next(int(line.split(":")[1].split()[9]) for line in lines if line.strip().startswith(name))


def death(side: Side) -> int:
    """Kill h2; what was moved because of it."""
    wait_until(side.whole, "all is well before the peer dies", _WHOLE_S)
    before, weights = side.acts(), [_weights(host) for host in side.lab.hosts]
    dying_ns = time.monotonic_ns()
    side.lab.kill_host(2)
    end, moved = time.monotonic() + DEATH_S, 0
    while time.monotonic() < end:
        moved = max(moved, sum(not _weights(h) <= w for h, w in zip(side.lab.hosts, weights, strict=True)))
        time.sleep(0.005)
    side.explain(dying_ns)
    return max(moved, side.acts() - before)


def _weights(host: Host) -> set[frozenset[tuple[int, int]]]:
    """What groups there are; one more with weights that another has moves nothing: an address that stands alone."""
    return {frozenset(weights.items()) for weights in weights_of(host).values()}


# ---- all of it ----


def main() -> None:
    options = _options()
    trials: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    moved: list[int] = []
    failed: list[str] = []
    labs = [each for each in planned(options) if each.side == "swerve" or _frr.available()]
    if any(name != "swerve" for name in options.sides) and not _frr.available():
        note("FRR is left out: it is not installed (apt-get install frr)")
    try:
        for turn in range(options.turns):
            for each in reversed(labs) if turn % 2 else labs:
                try:
                    with routing(each.side, options.signal, probe_ms=each.probe_ms) as made:
                        for case in each.cases:
                            _turn(made, case, turn, options, trials[each.side, case])
                except SwerveError as error:  # the other labs are worth measuring
                    failed.append(f"{each.side}, {each.probe_ms} ms: {error}")
                    note(failed[-1])
            if "swerve" in options.sides and PEER_DEATH in options.cases:
                with routing("swerve", options.signal, DYING_HOSTS) as made:
                    moved.append(death(made))
    finally:  # what was measured until then is worth telling
        report(trials, moved)
    if failed:
        raise SystemExit(f"{len(failed)} labs ended early: {'; '.join(failed)}")


@dataclass(frozen=True)
class LabPlan:
    """What is played on one lab."""

    side: str
    probe_ms: int
    cases: tuple[str, ...]


def planned(options: argparse.Namespace) -> list[LabPlan]:
    """The labs of a turn: one per side, and of swerve one per probe interval."""
    wanted = {name: CASES[name] for name in options.cases if name in CASES}
    found = []
    for side in options.sides:
        if side == "swerve":
            for probe_ms in sorted({case.probe_ms for case in wanted.values()}, reverse=True):
                cases = tuple(name for name, case in wanted.items() if case.probe_ms == probe_ms)
                found.append(LabPlan(side, probe_ms, cases))
        elif wanted:
            cases = tuple(dict.fromkeys(case.rival or name for name, case in wanted.items()))
            found.append(LabPlan(side, PROBE_MS, cases))
    return found


def _turn(side: Side, case: str, turn: int, options: argparse.Namespace, found: list[Trial]) -> None:
    """Add the trials of one kind that fall to a turn."""
    for number in range(*_share(BEYOND_TRIALS if case == "beyond" else options.trials, turn, options.turns)):
        one = outage(side, CASES[case], 1 + number % RAILS, number + 1)
        note(f"{side.name} {case}: {one}")
        found.append(one)


def _share(trials: int, turn: int, turns: int) -> tuple[int, int]:
    """Which of the trials fall to a turn."""
    return trials * turn // turns, trials * (turn + 1) // turns


def report(trials: dict[tuple[str, str], list[Trial]], moved: Sequence[int]) -> None:
    """Print the figures: ours with each peer beside it, then the peers' own."""
    for (name, case), ours in trials.items():
        if not ours:
            continue
        rival = CASES[case].rival or case
        rivals = {peer: trials[peer, rival] for peer in SIDES[1:] if name == "swerve" and trials.get((peer, rival))}
        for figure, unit, value in FIGURES:
            show = functools.partial(
                emit, "failover", figure, value(ours), unit, "lower", case=f"{name}_{case}", n=len(ours)
            )
            for peer, theirs in rivals.items():
                show(peer=peer, peer_value=value(theirs))
            if not rivals:
                show()
        if not all(each.returned for each in ours):
            note(f"{name} {case}: the stream came back to its rail in {sum(e.returned for e in ours)} of {len(ours)}")
    if moved:
        emit("failover", "moves", sum(moved), "changes", "lower", case="swerve_peer_death", n=len(moved))


def p95(values: Sequence[float]) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _of(statistic: Callable[[Sequence[float]], float], field: str) -> Callable[[Sequence[Trial]], float]:
    return lambda trials: statistic([getattr(each, field) for each in trials])


FIGURES: tuple[tuple[str, str, Callable[[Sequence[Trial]], float]], ...] = (
    ("gap_p95", "ms", _of(p95, "gap")),
    ("gap_median", "ms", _of(median, "gap")),
    ("lost_median", "packets", _of(median, "lost")),
    ("tcp_stall_p95", "ms", _of(p95, "stall")),
    ("tcp_stall_median", "ms", _of(median, "stall")),
    ("quiet_gap_p95", "ms", _of(p95, "quiet")),
    ("failback_lost", "packets", _of(sum, "failback_lost")),
    ("failback_median", "s", _of(median, "failback_s")),
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="outages of each kind for each side (20)")
    parser.add_argument("--turns", type=int, default=4, help="how often each side gets a fresh lab for its share (4)")
    parser.add_argument("--sides", type=_words(SIDES), default=SIDES, help="comma-separated: " + ", ".join(SIDES))
    cases = (*CASES, PEER_DEATH)
    parser.add_argument("--cases", type=_words(cases), default=cases, help="comma-separated: " + ", ".join(cases))
    parser.add_argument("--signal", choices=sorted(SIGNALS), default="silence", help="what swerve goes by (silence)")
    return parser.parse_args()


def _words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(known)}")
        return found

    return parse


if __name__ == "__main__":
    main()
