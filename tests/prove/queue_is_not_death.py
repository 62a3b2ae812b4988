"""Proof: a rail whose queue has just become long is called congested, and never dead.

    python tests/prove/queue_is_not_death.py [--trials 40] [--labs 10] [--seed N]

Two hosts, two rails, an agent and a controller on each. In each trial the queue of rail 1 towards h2 becomes 10 to
300 ms long, and stays so for a second: at once, by a burst into a slow port, or as the port is slowed down under a
load. Agents probe every 5 to 20 ms, drawn anew for each lab. The controllers have a rule for silence and one for
queueing delay; whose act comes first is counted. Prints JSON Lines: one per trial, then the verdict; exits with 1
unless no path was ever called dead (steering/deciding/failure_classifier.py says so, and as many probes are missed as a
rule and the path's own limit ask for), and each trial's rail was called congested. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

from _steered_lab import Steered, steered  # noqa: E402
from _verdicts import Heard  # noqa: E402

from pytools.errors import SwerveError  # noqa: E402
from pytools.kernel.netns import inside  # noqa: E402
from pytools.signals import Path as NetworkPath  # noqa: E402

MS: Final = 1_000_000
RAIL: Final = 1
RATE_BIT_S: Final = 10_000_000  # of the congested port
LOAD_BIT_S: Final = 30_000_000  # under which it is slowed down
QUEUE_MS, PROBE_MS = (10, 300), (5, 20)
HELD_S: Final = 1.0
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1472
DISCARD: Final = 9
POLICY: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.5, stale_after: 500ms}
rules:
  - name: silence
    when: {signal: silence, missed: 3}
    then: {shift: {share: 0}}
    return: {dwell: 300ms, max_dwell: 300ms, retry_after: 300ms, steps: [1.0], step: 100ms}
  - name: congestion
    when: {signal: queueing_delay, quantile: p50, above: 5ms, samples: 3, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 300ms, max_dwell: 300ms, retry_after: 300ms, steps: [1.0], step: 100ms}
"""


class Traffic:
    """UDP over the rail, from h1 to h2, to a socket that nobody reads."""

    def __init__(self, made: Steered) -> None:
        source, sink = made.lab.hosts
        ends = source.interfaces[RAIL - 1].address, sink.interfaces[RAIL - 1].address
        with inside(sink.netns):
            self._hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._hole.bind((ends[1], DISCARD))
        with inside(source.netns):
            self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self._out.bind((ends[0], 0))
        self._out.connect((ends[1], DISCARD))

    def burst(self, size: int) -> None:
        """So many bytes of frames at once."""
        for _ in range(size // FRAME_BYTES):
            self._out.send(bytes(PAYLOAD_BYTES))

    def hold(self, rate_bit_s: int, seconds: float) -> None:
        """A steady rate for a while."""
        interval = FRAME_BYTES * 8 / rate_bit_s
        due = time.monotonic()
        end = due + seconds
        while due < end:
            self._out.send(bytes(PAYLOAD_BYTES))
            due += interval
            time.sleep(max(0.0, due - time.monotonic()))

    def close(self) -> None:
        self._out.close()
        self._hole.close()


def congest(made: Steered, traffic: Traffic, how: str, queue_ms: float) -> int:
    """Let the queue become so long, and hold it; returns when it began to."""
    size = int(queue_ms * RATE_BIT_S / 8000)
    room = size + 4 * FRAME_BYTES
    if how == "burst":
        made.lab.congest(RAIL, f"{RATE_BIT_S}bit", room, toward=2)
        began_ns = time.monotonic_ns()
        traffic.burst(size)
    else:
        traffic.hold(LOAD_BIT_S, 0.2)
        made.lab.congest(RAIL, f"{RATE_BIT_S}bit", room, toward=2)
        began_ns = time.monotonic_ns()
        traffic.hold(LOAD_BIT_S, size * 8 / (LOAD_BIT_S - RATE_BIT_S))
    traffic.hold(RATE_BIT_S, HELD_S)
    return began_ns


def result(heard: Heard, began_ns: int) -> dict[str, Any]:
    """What was concluded of the rail since then."""
    rail = f"rail{RAIL}"
    congested = [each.at_ns for each in heard.congested if each.path.interface == rail and each.at_ns >= began_ns]
    acts = sorted((act for act in heard.acts if act.decided_ns >= began_ns), key=lambda act: act.decided_ns)
    return {
        "congested_ms": round((min(congested) - began_ns) / MS, 1) if congested else None,
        "first_act": acts[0].under if acts else None,
        "first_act_ms": round((acts[0].decided_ns - began_ns) / MS, 1) if acts else None,
        "dead": {f"{path}": _silences(heard, path, began_ns) for path in {each.path for each in heard.called_dead()}},
        "left_at_that": sum(not each.acted_on for each in heard.dead),
    }


def _silences(heard: Heard, path: NetworkPath, began_ns: int) -> dict[str, float]:
    """When a path was first called dead, and after which silences."""
    dead = [each for each in heard.called_dead() if each.path == path]
    return {
        "after_ms": round((dead[0].at_ns - began_ns) / MS, 1),
        "silent_ms": round(dead[0].silent_ns / MS, 1),
        "longest_ms": round(max(each.silent_ns for each in dead) / MS, 1),
        "missed": dead[0].missed,
        "limit": dead[0].limit,
    }


def trial(made: Steered, traffic: Traffic, how: str, queue_ms: float) -> dict[str, Any]:
    made.wait_healthy("before the trial")
    made.verdicts.take()
    began_ns = congest(made, traffic, how, queue_ms)
    found = result(made.verdicts.take(), began_ns)
    made.lab.heal(RAIL)
    return found


def say(**line: Any) -> None:
    print(json.dumps({"proof": "queue_is_not_death", **line}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--labs", type=int, default=10, help="Over so many labs the trials are spread.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    chance = random.Random(given.seed)
    found: list[dict[str, Any]] = []
    for number in range(given.labs):
        probe_ms = round(chance.uniform(*PROBE_MS), 1)
        trials = given.trials * (number + 1) // given.labs - given.trials * number // given.labs
        drawn = [(chance.choice(("burst", "slowed")), round(chance.uniform(*QUEUE_MS))) for _ in range(trials)]
        try:
            with steered(f"queue{os.getpid()}", POLICY, probe_ms) as made:
                traffic = Traffic(made)
                try:
                    for how, queue_ms in drawn:
                        told = trial(made, traffic, how, queue_ms)
                        found.append({"how": how, "queue_ms": queue_ms, "probe_ms": probe_ms, **told})
                        say(**found[-1])
                finally:
                    traffic.close()
        except SwerveError as error:
            say(failed=str(error), probe_ms=probe_ms)
    called_dead = [each for each in found if each["dead"]]
    silences = sorted(path["longest_ms"] for each in called_dead for path in each["dead"].values())
    congested = [each for each in found if each["congested_ms"] is not None]
    proven = len(found) == given.trials and not called_dead and len(congested) == len(found)
    say(
        proven=proven,
        seed=given.seed,
        trials=len(found),
        called_dead=len(called_dead),
        longest_silence_ms=silences[-1] if silences else None,
        called_congested=len(congested),
        first_acts=dict(collections.Counter(str(each["first_act"]) for each in found)),
        congested_ms_median=sorted(each["congested_ms"] for each in congested)[len(congested) // 2]
        if congested
        else None,
    )
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
