"""Proof: paths that lose packets are not dead, and one that is dead among them is found at once.

    python tests/prove/lossy_paths.py [--minutes 10] [--trials 20] [--shares 0.05,0.2,0.5] [--policies demo,failover]
        [--only lossy|dead]

Two hosts, two rails, an agent and a controller on each, as shipped. All rails lose 5, then 20, then 50 % of all
packets at random, in each direction: a listener beside the controllers must never call a path dead
(steering/deciding/failure_classifier.py says so, and as many probes are missed as a rule and the path's own limit ask
for), and no controller may act under a rule for silence. Both ends of each cable know the other's link address for
good: at 50 % all three of ARP's requests are lost often enough that a path carries nothing for seconds, and is then
dead indeed. Each policy has its share of the time. Then one rail carries nothing while the other loses 20 %: it must
be called dead within 250 ms, in every trial, counted from the last answer. Prints JSON Lines; exits with 1 unless all
of it holds. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

from _steered_lab import Steered, steered  # noqa: E402
from _verdicts import Heard  # noqa: E402

from pytools.lab import Lab  # noqa: E402
from pytools.signals import Act  # noqa: E402

MS: Final = 1_000_000
SHARES: Final = "0.05,0.2,0.5"
POLICIES: Final = {
    "demo": ROOT / "steering" / "demo" / "policy.yaml",
    "failover": ROOT / "examples" / "policies" / "failover.yaml",
}
SETTLED_S: Final = 3.0  # of loss before a cut, so that it is known
FOUND_MS: Final = 250.0
LATEST_S: Final = 3.0
ACTED_S: Final = 1.0  # after it was found: a rule waits for 400 ms of silence
BACK: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {max_drained_share: 0.5}
rules:
  - name: silent-path
    when: {signal: silence, missed: 3}
    then: {drain: {}}
    return: {dwell: 300ms, max_dwell: 300ms, retry_after: 300ms, rise: 10, steps: [1.0]}
"""  # as failover.yaml, but ready for the next trial sooner


def say(**line: Any) -> None:
    print(json.dumps({"proof": "lossy_paths", **line}), flush=True)


def for_silence(act: Act) -> bool:
    """Whether an act was made because a path was silent: the reason says what was missed."""
    return any(word in act.under for word in ("silent", "silence")) or " missed" in act.because


def hold_neighbours(lab: Lab) -> None:
    """Have every host and every rail keep the link addresses that they know."""
    for place in (*lab.hosts, *lab.rails):
        for known in json.loads(lab.run(place, ["ip", "-j", "-4", "neigh"])):
            if "lladdr" in known:
                entry = [known["dst"], "lladdr", known["lladdr"], "dev", known["dev"]]
                lab.run(place, ["ip", "neigh", "replace", *entry, "nud", "permanent"])


def lossy(made: Steered, policy: str, share: float, seconds: float) -> bool:
    """All rails lose this share for so long."""
    made.verdicts.take()
    began_ns = time.monotonic_ns()
    for rail in made.lab.rails:
        made.lab.lose(rail.number, share)
    heard: list[Heard] = []
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 10.0))
        heard.append(made.verdicts.take())
    lost = sum(made.lab.counts(rail.number)["lost_at_random"] for rail in made.lab.rails)
    made.lab.heal()
    dead = [each for part in heard for each in part.called_dead()]
    acts = [act for part in heard for act in part.acts]
    drains = [act for act in acts if for_silence(act)]
    proven = not dead and not drains
    say(
        part="lossy",
        proven=proven,
        policy=policy,
        share=share,
        seconds=round(seconds, 1),
        packets_lost=lost,
        classified=sum(part.looks for part in heard),
        with_probes_missed=sum(part.missing for part in heard),
        path_dead=len(dead),
        path_dead_below_limit=sum(len(part.dead) for part in heard) - len(dead),
        drains_for_silence=len(drains),
        other_acts=len(acts) - len(drains),
        examples=[
            *(
                f"{(each.at_ns - began_ns) / 1e9:.2f} s: {each.path}: {each.text}; limit {each.limit}"
                for each in dead[:3]
            ),
            *(f"{(act.decided_ns - began_ns) / 1e9:.2f} s: {act.under}: {act.because}" for act in acts[:3]),
        ],
    )
    return proven


def dead(made: Steered, rail: int, share: float) -> dict[str, Any]:
    """Cut one rail while all lose packets; how long until both hosts can call it dead, and act."""
    made.verdicts.take()  # of the trial before, until its rail was healed
    for each in made.lab.rails:
        made.lab.lose(each.number, share)
    time.sleep(SETTLED_S)
    before = made.verdicts.take()
    began_ns = time.monotonic_ns()
    made.lab.cut(rail)  # takes effect somewhere within, after the program is compiled
    name = f"rail{rail}"

    def found(heard: Heard) -> dict[str, int]:
        """By host, how long after the last answer."""
        times: dict[str, int] = {}
        for each in heard.dead_enough():
            if each.path.interface == name:
                times.setdefault(each.path.source, each.heard_ns - each.answered_ns)
        return times

    made.verdicts.wait_for(lambda heard: len(found(heard)) == len(made.lab.hosts), LATEST_S)
    hosts = {host.name for host in made.lab.hosts}
    made.verdicts.wait_for(lambda heard: hosts <= {act.host for act in heard.acts if for_silence(act)}, ACTED_S)
    heard = made.verdicts.take()
    times = found(heard)
    acts = [act for act in heard.acts if for_silence(act) and act.acknowledged_ns is not None]
    acted = [act.acknowledged_ns for act in acts if act.acknowledged_ns is not None]
    made.lab.heal()
    complete = len(times) == len(made.lab.hosts)
    return {
        "rail": rail,
        "found_ms": round(max(times.values()) / MS, 1) if complete else None,
        "first_ms": round(min(times.values()) / MS, 1) if times else None,
        "acted_ms": round((max(acted) - began_ns) / MS, 1) if acted else None,
        "limits": sorted({each.limit for each in heard.dead_enough()}),
        "moved_before": len(before.dead_enough()),  # loss that has just begun may look like death for some probes
        "false_before": len(before.called_dead()),
        "other_rail_dead": sum(each.path.interface != name for each in heard.dead_enough()),
    }


def prove_lossy(policies: Sequence[str], shares: Sequence[float], minutes: float) -> bool:
    proven = True
    for policy in policies:
        for share in shares:
            with steered(f"lossy{os.getpid()}", POLICIES[policy]) as made:
                hold_neighbours(made.lab)
                proven &= lossy(made, policy, share, minutes * 60 / len(policies))
    return proven


def prove_dead(trials: int, share: float, seed: int) -> bool:
    chance, found = random.Random(seed), []
    with steered(f"lossy{os.getpid()}", BACK) as made:
        hold_neighbours(made.lab)
        for _ in range(trials):
            made.wait_healthy("before the trial")
            found.append(dead(made, chance.choice((1, 2)), share))
            say(part="dead", **found[-1])
    times = sorted(each["found_ms"] for each in found if each["found_ms"] is not None)
    false = sum(each["false_before"] + each["other_rail_dead"] for each in found)
    proven = len(times) == trials and times[-1] <= FOUND_MS and not false
    median, longest = (times[len(times) // 2], times[-1]) if times else (None, None)
    said = {"trials": trials, "found": len(times), "median_ms": median, "longest_ms": longest, "false": false}
    say(part="dead", proven=proven, seed=seed, share=share, **said)
    return proven


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="Of each share of loss (default: %(default)s).")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument(
        "--shares", default=SHARES, help="Of all packets, lost in each direction (default: %(default)s)."
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="Which controllers run (default: %(default)s).")
    parser.add_argument("--dead-share", type=float, default=0.2, help="Lost by the rail that lives, in each direction.")
    parser.add_argument("--only", choices=("lossy", "dead"), help="One of both parts.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    given = parser.parse_args()
    proven = given.only == "dead" or prove_lossy(
        given.policies.split(","), [float(each) for each in given.shares.split(",")], given.minutes
    )
    if given.only != "lossy":
        proven &= prove_dead(given.trials, given.dead_share, given.seed)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
