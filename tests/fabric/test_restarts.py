"""A dead rail gets no packet while controller and agent are restarted, killed or stopped: the proof, a few times."""

from __future__ import annotations

import json
import sys

import pytest
import support

pytestmark = pytest.mark.beside

PROOF = support.ROOT / "tests/prove/restarts.py"


@pytest.mark.deadline(240)
@pytest.mark.parametrize("counts", [("3", "0"), ("0", "1")], ids=["controller", "agent"])
def test_a_rail_that_is_known_to_be_dead_stays_left(counts: tuple[str, str]) -> None:
    support.require("bcc", "tc", "netns")
    words = [sys.executable, str(PROOF), "--restarts", counts[0], "--pauses", counts[1]]
    done = support.run(words, check=False, timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["passed"] and verdict["lost"] == 0 < verdict["datagrams"]
