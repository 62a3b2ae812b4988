"""Proof: a controller killed with SIGKILL in the middle of an act leaves nothing behind.

    python tests/prove/kill_controller.py [--kills 20] [--seed N]

Real namespaces, a real nexthop group, a made-up congestion. Each kill falls at a random instant after an act has
begun in the kernel. Prints JSON Lines: one per kill, then the verdict; exits with 1 if the original weights were
not back within the lease, or anything of the proof is left. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import steering_kit as kit  # noqa: E402
import support  # noqa: E402

from steering.policy import file as policy_file  # noqa: E402

LONGEST_S = 0.004  # an act takes 1 to 3 ms


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces for a host and its peer."""
    names = (f"swerve-prove{os.getpid()}a", f"swerve-prove{os.getpid()}b")
    try:
        for name in names:
            support.run(["ip", "netns", "add", name])
            support.run(["ip", "-n", name, "link", "set", "lo", "up"])
        yield names
    finally:
        for name in names:
            support.run(["ip", "netns", "delete", name], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    wanted = parser.parse_args()
    chance = random.Random(wanted.seed)
    with tempfile.TemporaryDirectory(prefix="swerve-prove-") as folder, namespaces() as (first, second):
        os.environ["SWERVE_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["SWERVE_STATE_DIR"] = f"{folder}/state"
        policy = Path(folder, "policy.yaml")
        policy.write_text(kit.POLICY)
        lease_ms = policy_file.load(policy).safety.lease / 1e6
        host = kit.two_rails(first, second)
        agent = kit.FakeAgent(host.netns)
        try:
            done = [kit.kill_mid_act(host, agent, policy, chance.uniform(0, LONGEST_S)) for _ in range(wanted.kills)]
        finally:
            agent.close()
        left = [pid for pid in support.run(["ip", "netns", "pids", first]).stdout.split() if int(pid) != os.getpid()]
    for number, each in enumerate(done, 1):
        print(json.dumps({"proof": "kill_controller", "kill": number, **dataclasses.asdict(each)}), flush=True)
    slowest = max(each.restored_ms for each in done)
    verdict = {
        "proof": "kill_controller",
        "kills": len(done),
        "seed": wanted.seed,
        "in_force_at_the_kill": sum(each.in_force for each in done),
        "restored_max_ms": slowest,
        "lease_ms": lease_ms,
        "processes_left": len(left),
        "passed": slowest <= lease_ms and not left,
    }
    print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
