"""Proof: ten minutes of bursty load below saturation move nothing: no drain, at most one move that was not needed.

    python tests/prove/bursty_load.py [--seconds 600] [--hosts 3] [--policy FILE] [--seed N]

A lab with an agent and a controller on each host. Each rail carries bursty TCP between all hosts, 40 to 60 % of every
port on average, drawn anew each 30 s. Prints JSON Lines: each act as it is made, then the verdict; exits with 1 when
the proof fails. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

from _steered_lab import steered  # noqa: E402

from pytools.lab import Lab  # noqa: E402
from pytools.signals import Act  # noqa: E402
from steering.demo.observe import Observer  # noqa: E402

POLICY: Final = ROOT / "examples" / "policies" / "congestion.yaml"
SHARES: Final = (0.4, 0.6)
STRETCH_S: Final = 30.0
RATE_BIT_S: Final = 100_000_000
MOST_MOVES: Final = 1


def say(**line: Any) -> None:
    print(json.dumps({"proof": "bursty_load", **line}), flush=True)


def weight_lost(act: Act) -> bool:
    """Whether an act takes part of a nexthop's share away, not merely gives it back."""
    before, after = (_shares(weights) for weights in (act.before, act.after))
    even = 1 / len(after)
    return any(after[name] < before[name] - 1e-9 and after[name] < even - 1e-9 for name in after)


def _shares(weights: dict[str, int]) -> dict[str, float]:
    total = sum(weights.values()) or 1
    return {name: weight / total for name, weight in weights.items()}


def run(lab: Lab, observer: Observer, seconds: float, chance: random.Random) -> tuple[list[Act], list[float], int]:
    """Load the lab for so long; the acts, the shares that the ports carried, and how often a path was suspect."""
    acts: list[Act] = []
    carried: list[float] = []
    suspects = 0
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        stretch_s = min(left, STRETCH_S)
        for rail in lab.rails:
            lab.bursts(rail.number, chance.uniform(*SHARES), chance.randrange(1 << 16))
        sent, began = lab.sent_bytes(), time.monotonic()
        while (now := time.monotonic()) < began + stretch_s:
            observer.wait_for(lambda record: bool(record.acts), min(5.0, began + stretch_s - now))
            record = observer.take()
            acts += record.acts
            suspects += sum(state.state == "suspect" for state in record.states)
            for act in record.acts:
                say(host=act.host, outcome=act.outcome, after=act.after, under=act.under, because=act.because)
        lasted_s = time.monotonic() - began
        carried += [(total - sent[port]) * 8 / lasted_s / RATE_BIT_S for port, total in lab.sent_bytes().items()]
        lab.heal()
    return acts, carried, suspects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--policy", type=Path, default=POLICY)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    wanted = parser.parse_args()
    with (
        steered(f"bursty{os.getpid()}", wanted.policy, hosts=wanted.hosts) as bursty,
        contextlib.closing(Observer(bursty.lab.hosts)) as observer,
    ):
        acts, carried, suspects = run(bursty.lab, observer, wanted.seconds, random.Random(wanted.seed))
        lived = all(process.poll() is None for process in bursty.controllers)
    made = [act for act in acts if act.outcome == "applied"]
    moves = [act for act in made if weight_lost(act)]
    drains = [act for act in moves if 0 in act.after.values()]
    verdict = {
        "policy": wanted.policy.name,
        "seconds": wanted.seconds,
        "hosts": wanted.hosts,
        "seed": wanted.seed,
        "port_load_min": round(min(carried), 3),
        "port_load_mean": round(sum(carried) / len(carried), 3),
        "port_load_max": round(max(carried), 3),
        "times_suspect": suspects,
        "acts": len(made),
        "unneeded_moves": len(moves),
        "drains": len(drains),
        "proven": lived and not drains and len(moves) <= MOST_MOVES and 0.3 < sum(carried) / len(carried) < 0.75,
    }
    say(**verdict)
    return 0 if verdict["proven"] else 1


if __name__ == "__main__":
    sys.exit(main())
