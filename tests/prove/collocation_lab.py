"""Proof: lab hosts that share a clock are found to share an oscillator, and no others are.

    python tests/prove/collocation_lab.py [--seconds 240] [--seed N]

Six hosts with virtual clocks and real agents: h1 and h4 share one oscillator (their offsets differ), h2 and h5 another,
h3 and h6 have one each. Follows what an agent that is not the reference says, until it has found both pairs and knows
that the other two are alone, or the time is over. Prints one JSON line; exits with 1 unless both pairs were found, and
never any other. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab import Lab, clocks
from pytools.lab.topology import Host
from pytools.signals import Collocation

HOSTS = 6
SHARED = ((1, 4), (2, 5))
START_S = 60.0

Pairs = set[tuple[str, str]]


def pairs_of(signal: Collocation) -> Pairs:
    """Every two hosts that are said to share."""
    return {pair for each in signal.groups for pair in itertools.combinations(sorted(each.hosts), 2)}


def connected(host: Host) -> Client:
    """A subscription to the agent of a host, once it serves."""
    end = time.monotonic() + START_S
    while True:
        try:
            return Client(directories.agent_socket(host.netns), frozenset({"collocation"}))
        except SwerveError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def follow(client: Client, wanted: Pairs, alone: set[str], seconds: float) -> tuple[Pairs, Collocation | None, float]:
    """Listen until everything is found: the pairs that were ever told and are none, the last word, how long it took."""
    began, false, last = time.monotonic(), set[tuple[str, str]](), None
    for signal in client.within(seconds):
        if not isinstance(signal, Collocation):
            continue
        last, told = signal, pairs_of(signal)
        false |= told - wanted
        print(
            json.dumps({"span_s": signal.span_ns / 1e9, "told": sorted(told), "alone": signal.alone}), file=sys.stderr
        )
        if told == wanted and alone <= set(signal.alone):
            break
    return false, last, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    wanted = {(f"h{one}", f"h{other}") for one, other in SHARED}
    alone = {f"h{number}" for number in range(1, HOSTS + 1)} - {name for pair in wanted for name in pair}
    drawn = clocks.draw(HOSTS, given.seed, time.monotonic_ns(), SHARED)
    with Lab.up(f"prove-collocation-{os.getpid()}", hosts=HOSTS, rails=1, clocks=drawn) as lab:
        for host in lab.hosts:
            lab.start(host, [sys.executable, "-m", "steering.cli", "agent", "-n", host.netns])
        with contextlib.closing(connected(lab.hosts[1])) as client:
            false, last, took_s = follow(client, wanted, alone, given.seconds)
    found = pairs_of(last) & wanted if last is not None else set()
    proven = found == wanted and not false
    line = {
        "proof": "collocation_lab",
        "proven": proven,
        "seed": given.seed,
        "seconds": round(took_s, 1),
        "found": sorted(found),
        "false": sorted(false),
        "confidence": [] if last is None else [round(each.confidence, 4) for each in last.groups],
        "alone": [] if last is None else last.alone,
        "unknown": [] if last is None else last.unknown,
    }
    print(json.dumps(line), flush=True)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
