"""Proof: over more than a minute of steady congestion, steering reverses itself at most once.

    python tests/prove/steady_congestion.py [--seconds 65]

The demo with a long congested phase: agents, controllers and real traffic on a lab. Prints one JSON line; exits with 1
when the proof fails. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from steering.demo.run import Script, lab_name, play, progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=65)
    seconds = parser.parse_args().seconds
    script = Script(name=lab_name(), settled_s=3, steady_s=seconds, returned_s=3)
    result = play(script, progress(sys.stderr, time.monotonic()))
    steered = next(phase for phase in result.phases if phase.name == "steered")
    proven = steered.reversals is not None and steered.reversals <= 1 and steered.resets == 0 and not steered.broken
    line = {
        "proof": "steady_congestion",
        "proven": proven,
        "seconds": seconds,
        "reversals": steered.reversals,
        "goodput_share": round(steered.goodput_share, 3),
        "resets": steered.resets,
    }
    print(json.dumps(line), flush=True)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
