"""Proof: a rail that was congested is taken again when it is healed, and kept, although its traffic fills its queue.

    python tests/prove/healed_rail.py [--seconds 60] [--case CASE]...

Two hosts, two rails of 100 Mbit/s with queues of 64 KiB, 5.2 ms long when full, an agent and a controller on each, and
16 TCP flows that fill what they get. Rail 1 is cut to 10 Mbit/s, left, healed, and taken again; then the load goes on.

- figure: the threshold is 5 ms, which health reaches under this load
- usual: the threshold of examples/policies/congestion.yaml, three times what is usual on the path

Prints a JSON line for each case, then the verdict. The proof holds if under `usual` rail 1 is left once, while it is
cut, and never by health. How often `figure` leaves it is told for comparison. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

from _steered_lab import Steered, steered  # noqa: E402

from pytools.signals import Act  # noqa: E402
from steering.demo.observe import Observer  # noqa: E402

RAIL: Final = 1
FLOWS: Final = 16
DWELL_S, STEP_S, STEPS = 10, 2, 3
CUT_S: Final = 5
BEFORE_S: Final = 20
PATIENCE_S: Final = 90
THRESHOLDS: Final = {
    "figure": "above: 5ms, clear_below: 1ms",
    "usual": 'above: "usual p99 × 3, at least 5ms, until learned 10ms", clear_below: above × 0.2',
}
POLICY: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.5, stale_after: 2s, baseline_after: 10s}
rules:
  - name: congestion
    when: {signal: queueing_delay, quantile: p50, samples: 3, THRESHOLD}
    then: {shift: {share: 0}}
    return: {dwell: DWELL, steps: [0.1, 0.5, 1.0], step: STEP}
""".replace("DWELL", f"{DWELL_S}s").replace("STEP", f"{STEP_S}s")


def left(acts: list[Act], host: str) -> list[Act]:
    """The acts by which a host left rail 1."""
    return [
        act
        for act in acts
        if act.host == host
        and act.outcome == "applied"
        and any(weight == 0 < act.before[hop] for hop, weight in act.after.items() if hop.endswith(f"rail{RAIL}"))
    ]


def play(made: Steered, case: str, seconds: float) -> dict[str, Any]:
    """Load, cut, heal, and load on; what the first host did."""
    source, sink = made.lab.hosts
    with contextlib.closing(Observer([source])) as observer:
        made.lab.start(sink, ["iperf3", "--server", "--bind", sink.service])
        time.sleep(1)
        length = str(int(BEFORE_S + CUT_S + PATIENCE_S + seconds + 60))
        made.lab.start(source, ["iperf3", "--client", sink.service, "-P", str(FLOWS), "-t", length])
        time.sleep(BEFORE_S)
        before = len(left(observer.take().acts, source.name))
        made.lab.congest(RAIL, "10mbit")
        time.sleep(CUT_S)
        during = left(observer.take().acts, source.name)
        made.lab.heal(RAIL)
        end = time.monotonic() + PATIENCE_S
        while not made.healthy() and time.monotonic() < end:
            time.sleep(0.1)
        back, returned = time.monotonic(), made.healthy()
        returning = len(left(observer.take().acts, source.name))
        after: list[Act] = []
        first_s = None
        while time.monotonic() < back + seconds:
            time.sleep(0.5)
            after += left(observer.take().acts, source.name)
            if after and first_s is None:
                first_s = round(time.monotonic() - back, 1)
    return {
        "case": case,
        "left_by_health_before": before,
        "left_while_cut": len(during),
        "left_on_the_way_back": returning,
        "all_back": returned,
        "left_by_health_after": len(after),
        "after_s": first_s,
        "because": [act.because for act in [*during, *after]][:3],
    }


def main() -> int:
    """Play the cases."""
    parser = argparse.ArgumentParser(description="A healed rail is kept under load.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--case", action="append", choices=[*THRESHOLDS], default=[])
    given = parser.parse_args()
    holds = True
    for case in given.case or THRESHOLDS:
        policy = POLICY.replace("THRESHOLD", THRESHOLDS[case])
        with steered(f"heal{os.getpid()}", policy) as made:
            found = play(made, case, given.seconds)
        print(json.dumps(found, ensure_ascii=False), flush=True)
        by_health = found["left_by_health_before"] + found["left_on_the_way_back"] + found["left_by_health_after"]
        if case == "usual":
            holds &= found["left_while_cut"] == 1 and found["all_back"] and not by_health
    print("holds" if holds else "DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
