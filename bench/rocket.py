"""Holds under incast: 16 senders answer one host at once through a shallow buffer, beside two bulk connections.

    python bench/rocket.py [--rounds 10] [--cases incast_cubic incast_bbr]

In a guest with Debian's own kernel (fq) whose time is counted in instructions (_counted_guest.py). The port towards the
asking host has 100 Mbit/s and a buffer of 12 ms. Requests come by a schedule; each is complete when all senders have
sent 32 kB. Rounds with and without holds alternate; fq is there in both. Probes, steer.c and hold_law.h are as shipped;
one process plays the agents' and controllers' part for all senders: it renews the leases; pacers send the probes.

p99_ratio
    p99 of the completion of all rounds' requests without holds, over the same with them. Bar: 2.8 (CUBIC), 2 (BBR).
drops_ratio
    Packets lost at the port with holds over those without. Bar: 0.1.
background_ratio
    What the bulk connections received with holds over without. Bar: 1 / 1.05.
replies_ratio
    What of the replies arrived within the schedule: of a full port the bulk connections get what is late here.
utilisation_ratio
    What the port sent in the time of the requests, with holds over without. Bar: 0.95.
ring_ratio
    Four all-reduces of 8 hosts in a ring (14 chunks of 32 kB each) together, with holds; peer: without. Here `ratio` is
    what counts. Bar: 0.85. Cases: ring, all hops through the port, as if each next host were in another rack;
    ring_shared, the same beside two bulk connections; ring_shallow, that with a buffer of 3 ms; ring_hop, one hop
    through it, beside four bulk connections.
fair_share
    What the first of two groups of four hosts receives, relative to half; the second group starts 1 s later, each host
    has one connection. Peer: without holds. Cases: groups, both hold, bar 0.9 to 1.1; beside_others, only the first
    holds, bar 0.8.
group_drops
    Packets lost at the port meanwhile, from the start of the first group on; peer: without holds.
alone_throughput, alone_p99
    What one bulk connection receives with the port for itself, and p99 of the replies of one sender, a reply in 100 ms
    and nothing beside it. Bars: 0.98 and 1.05 of those without holds.
longest_gap
    The longest time in which a bulk connection received nothing, while the process that renews the leases is stopped
    or killed when the first request is due: cases sigstop, sigkill; peer: without holds. The lease is 1 s.
p50, p99, rto
    Milliseconds, and retransmission timeouts of all senders, with holds; peer: without.
"""

from __future__ import annotations

import argparse
import functools
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import _counted_guest
from _common import alternating, emit, median, note
from _rocket_holds import Prober, compiled
from _rocket_traffic import Incast, Load, Played

from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab, wiring
from steering.plan import HoldLimits

SENDERS: Final = 16
RATE, BUFFER_BYTES = "100mbit", 150_000
MS: Final = 1_000_000
CUBIC: Final = Load(reply_bytes=32_000, every_ns=100 * MS, requests=15, bulk=2)
LOADS: Final = {
    "incast_cubic": CUBIC,
    "incast_bbr": replace(CUBIC, congestion="bbr"),
    "incast_dctcp": replace(CUBIC, congestion="dctcp"),
    "incast_mptcp": replace(CUBIC, protocol=socket.IPPROTO_MPTCP),
}
# Both as by default in use.
LIMITS: Final = HoldLimits(threshold_ns=MS, longest_ns=50 * MS, fresh_ns=200 * MS, floor=125_000, gain=256)
RING, CHUNK_BYTES, REDUCED = 8, 32_000, 4
SHALLOW_BYTES: Final = 37_500
RINGS: Final = {"ring": 0, "ring_shared": 2, "ring_shallow": 2, "ring_hop": 4}  # with so many bulk connections
REPLIES: Final = 40  # of one sender alone
GROUP: Final = 4
SHARES: Final = {"groups": 2 * GROUP, "beside_others": GROUP}  # so many hosts hold
SETTLE_NS, SPAN_NS = 1000 * MS, 3000 * MS
_GUEST_LIMIT_S: Final = 7200.0


@dataclass(frozen=True)
class Round:
    """What came of one load."""

    played: Played
    drops: int  # at the port towards the asking host
    sent_bytes: int
    rto: int


def main() -> None:
    options = _options()
    if options.inside:
        inner(options)
        return
    with tempfile.TemporaryDirectory(prefix="swerve-rocket-") as directory:
        shared = Path(directory)
        compiled(shared)
        words = [sys.executable, __file__, "--inside", "--rounds", str(options.rounds), "--cases", *options.cases]
        words += ["--rings", *options.rings, "--shares", *options.shares]
        words += ["--clock-error", str(options.clock_error)]
        words += ["--alone"] if options.alone else []
        words += ["--deserted"] if options.deserted else []
        _counted_guest.run(words, shared, _GUEST_LIMIT_S)


def inner(options: argparse.Namespace) -> None:
    """All of it, in the guest."""
    with Lab.up("rocket", hosts=1 + SENDERS, rails=1, rate=RATE) as lab:
        shape(lab)
        for host in lab.hosts:
            # The port loses single packets, as a switch does: no buffer holds more than one.
            _do(host, "ip link set dev rail1 gso_max_segs 1")
            _do(host, "tc qdisc replace dev rail1 root fq")
        with Prober(lab, round(options.clock_error * MS)) as prober:
            _counted_guest.settled()
            for case in options.cases:
                load = LOADS[case]
                off = functools.partial(play, lab, load)
                on = functools.partial(held, lab, load, prober)
                tell(case, *alternating(options.rounds, off, on))
            for case in options.rings:
                shape(lab, SHALLOW_BYTES if case == "ring_shallow" else BUFFER_BYTES)
                turns = functools.partial(reduce, lab, case), functools.partial(reduce, lab, case, prober)
                tell_ring(case, *alternating(options.rounds, *turns))
                shape(lab)
            for case in options.shares:
                groups = functools.partial(share, lab, case), functools.partial(share, lab, case, prober)
                tell_share(case, *alternating(options.rounds, *groups))
            if options.alone:
                tell_alone(*alternating(options.rounds, lambda: alone(lab), lambda: alone(lab, prober)))
            for number in (signal.SIGSTOP, signal.SIGKILL) if options.deserted else ():
                desert(lab, prober, number)


def shape(lab: Lab, buffer_bytes: int = BUFFER_BYTES) -> None:
    """Have the port to the asking host drop what its buffer does not take."""
    lab.congest(1, RATE, buffer_bytes, toward=1)


def desert(lab: Lab, prober: Prober, number: signal.Signals) -> None:
    """Leave the kernel alone in the middle of a load with holds."""
    load = CUBIC
    alone = play(lab, load)
    prober.hold(LIMITS)
    time.sleep(0.5)
    found = play(lab, load, lambda: prober.signal(number))
    if number == signal.SIGSTOP:
        prober.signal(signal.SIGCONT)
        note(f"held: {prober.release()}")
    gaps = [each.played.longest_gap_ns / MS for each in (found, alone)]
    show = functools.partial(emit, "rocket", case=number.name.lower(), n=1)
    show("longest_gap", gaps[0], "ms", "lower", peer="off", peer_value=gaps[1])
    show("unfinished", found.played.unfinished, "requests", "lower", peer="off", peer_value=alone.played.unfinished)


def reduce(lab: Lab, case: str, prober: Prober | None = None) -> list[int]:
    """Ring all-reduces, beside bulk connections of other hosts through the port."""
    port, *others = lab.hosts
    if case != "ring_hop":
        ring = [(each, port) for each in others[:RING]]
    else:
        hosts = lab.hosts[:RING]
        ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    if prober is not None:
        prober.hold(LIMITS)
    with Incast(port, others[RING:], replace(CUBIC, bulk=RINGS[case])) as traffic:
        took = traffic.all_reduce(ring, CHUNK_BYTES, REDUCED)
    note(f"all-reduces: {[round(each / MS) for each in took]} ms")
    if prober is not None:
        note(f"held: {prober.release()}")
    return took


def tell_ring(case: str, off: Sequence[list[int]], on: Sequence[list[int]]) -> None:
    """The time of a round's all-reduces together."""
    totals = [median([sum(turn) / MS for turn in side]) for side in (on, off)]
    emit("rocket", "ring_ratio", totals[0], "ms", "lower", case=case, peer="off", peer_value=totals[1], n=len(on))


def share(lab: Lab, case: str, prober: Prober | None = None) -> tuple[float, int]:
    """What the first of two groups receives, relative to half, and the packets that the port lost."""
    port, *others = lab.hosts
    index = lab.rails[0].ports[0].index
    if prober is not None:
        prober.hold(LIMITS, SHARES[case])
    load = replace(CUBIC, bulk=2 * GROUP)
    with Netlink(lab.rails[0].netns) as netlink, Incast(port, others[: 2 * GROUP], load) as traffic:
        before = wiring.shapes(netlink)[index].dropped_packets
        got = traffic.shares(SETTLE_NS, SPAN_NS)
        drops = wiring.shapes(netlink)[index].dropped_packets - before
    note(f"{case}: {[round(each * 8e3 / SPAN_NS, 1) for each in got]} Mbit/s, {drops} drops")
    if prober is not None:
        note(f"held: {prober.release()}")
    return 2 * sum(got[:GROUP]) / sum(got), drops


def tell_share(case: str, off: Sequence[tuple[float, int]], on: Sequence[tuple[float, int]]) -> None:
    """The figures of two groups."""
    for place, name, unit, better in ((0, "fair_share", "ratio", "higher"), (1, "group_drops", "packets", "lower")):
        value, peer = (median([turn[place] for turn in side]) for side in (on, off))
        emit("rocket", name, value, unit, better, case=case, peer="off", peer_value=peer, n=len(on))


def alone(lab: Lab, prober: Prober | None = None) -> tuple[int, list[int]]:
    """Bytes that one bulk connection receives, and how long the replies of one sender take; nothing is beside."""
    asker, sender = lab.hosts[:2]
    if prober is not None:
        prober.hold(LIMITS, 1)
    with Incast(asker, [sender], replace(CUBIC, bulk=1)) as traffic:
        got = sum(traffic.shares(SETTLE_NS, SPAN_NS))
    with Incast(asker, [sender], replace(CUBIC, bulk=0, requests=REPLIES)) as traffic:
        took = traffic.play(lambda: None, lambda: None).completions_ns
    note(f"alone: {got * 8e3 / SPAN_NS:.1f} Mbit/s, replies {[round(each / MS, 1) for each in took]} ms")
    if prober is not None:
        note(f"held: {prober.release()}")
    return got, took


def tell_alone(off: Sequence[tuple[int, list[int]]], on: Sequence[tuple[int, list[int]]]) -> None:
    """The figures of one sender alone."""
    rates = [median([turn[0] * 8e3 / SPAN_NS for turn in side]) for side in (on, off)]
    emit("rocket", "alone_throughput", rates[0], "Mbit/s", "higher", peer="off", peer_value=rates[1], n=len(on))
    p99 = [percentile([each / MS for turn in side for each in turn[1]], 99) for side in (on, off)]
    emit("rocket", "alone_p99", p99[0], "ms", "lower", peer="off", peer_value=p99[1], n=len(on))


def held(lab: Lab, load: Load, prober: Prober) -> Round:
    """A load with holds."""
    prober.hold(LIMITS)
    try:
        return play(lab, load)
    finally:
        note(f"held: {prober.release()}")


def play(lab: Lab, load: Load, begun: Callable[[], None] = lambda: None) -> Round:
    """A load, and what the port and the senders counted meanwhile."""
    asker, senders = lab.hosts[0], lab.hosts[1:]
    index = lab.rails[0].ports[0].index
    before: list[tuple[wiring.Shape, int]] = []
    with Netlink(lab.rails[0].netns) as netlink, Incast(asker, senders, load) as incast:

        def counts() -> tuple[wiring.Shape, int]:
            return wiring.shapes(netlink)[index], sum(map(timeouts, senders))

        ended: list[wiring.Shape] = []

        def begin() -> None:
            before.append(counts())
            begun()

        played = incast.play(begin, lambda: ended.append(wiring.shapes(netlink)[index]))
        after, rto = counts()
    (shape, rto_before), sent = before[0], ended[0].sent_bytes
    found = Round(played, after.dropped_packets - shape.dropped_packets, sent - shape.sent_bytes, rto - rto_before)
    times = [each / MS for each in played.completions_ns]
    note(f"{load.congestion}: {[round(each) for each in times]} ms, {found.drops} drops, {found.rto} timeouts")
    note(f"the slowest request, by sender: {[round(each / MS) for each in played.slowest_ns]} ms")
    return found


def timeouts(host: Host) -> int:
    """TcpExtTCPTimeouts of a host."""
    with inside(host.netns):
        names, values = Path("/proc/thread-self/net/netstat").read_text().splitlines()[:2]
    return dict(zip(names.split()[1:], map(int, values.split()[1:]), strict=True))["TCPTimeouts"]


def tell(case: str, off: Sequence[Round], on: Sequence[Round]) -> None:
    """The figures of a case."""
    times = [[each / MS for turn in side for each in turn.played.completions_ns] for side in (on, off)]
    show = functools.partial(emit, "rocket", case=case, n=len(on))
    p99 = [percentile(each, 99) for each in times]
    show("p99_ratio", p99[1] / p99[0], "ratio", "higher")
    drops = [sum(turn.drops for turn in side) for side in (on, off)]
    show("drops_ratio", drops[0] / max(1, drops[1]), "ratio", "lower")
    for name, of in RATES.items():
        show(name, median(list(map(of, on))) / median(list(map(of, off))), "ratio", "higher")
    show("p99", p99[0], "ms", "lower", peer="off", peer_value=p99[1])
    show("p50", median(times[0]), "ms", "lower", peer="off", peer_value=median(times[1]))
    worst = [[max(turn.played.completions_ns) / MS for turn in side] for side in (on, off)]
    show("worst_of_round", median(worst[0]), "ms", "lower", peer="off", peer_value=median(worst[1]))
    show("worst_of_round_spread", spread(worst[0]), "ms", "lower", peer="off", peer_value=spread(worst[1]))
    rto = [float(sum(turn.rto for turn in side)) for side in (on, off)]
    show("rto", rto[0], "timeouts", "lower", peer="off", peer_value=rto[1])
    unfinished = [float(sum(turn.played.unfinished for turn in side)) for side in (on, off)]
    show("unfinished", unfinished[0], "requests", "lower", peer="off", peer_value=unfinished[1])


def background(turn: Round) -> float:
    """Bytes a second of all bulk connections."""
    return sum(turn.played.bulk_bytes) / turn.played.span_ns * 1e9


def replies(turn: Round) -> float:
    """Bytes a second of all replies."""
    return turn.played.reply_bytes / turn.played.span_ns * 1e9


def utilisation(turn: Round) -> float:
    """Bytes a second that the port sent."""
    return turn.sent_bytes / turn.played.span_ns * 1e9


RATES: Final = {"background_ratio": background, "replies_ratio": replies, "utilisation_ratio": utilisation}


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[max(0, -(-percent * len(values) // 100) - 1)]


def spread(values: Sequence[float]) -> float:
    """Between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [0.0] * 3
    return high - low


def _do(host: Host, command: str) -> None:
    with inside(host.netns):
        subprocess.run(command.split(), check=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="with and without holds, each (10)")
    parser.add_argument("--cases", nargs="*", choices=sorted(LOADS), default=["incast_cubic", "incast_bbr"])
    parser.add_argument("--rings", nargs="*", choices=sorted(RINGS), default=[], help="also ring all-reduces")
    parser.add_argument("--shares", nargs="*", choices=sorted(SHARES), default=[], help="also two groups that share")
    parser.add_argument("--alone", action="store_true", help="also one sender alone")
    parser.add_argument("--deserted", action="store_true", help="also stop, then kill, what renews the leases")
    off = "a third of the senders find queues so many ms too long, a third too short; all know the bound"
    parser.add_argument("--clock-error", type=float, default=0.0, help=off)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
