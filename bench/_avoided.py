"""How many new connections land on a bad hidden way although the controller chooses their local ports.

For bench/hidden_ways.py: a lab of two hosts and one rail with four inner ways, whose agents tell `path_way`. SYNs are
counted where they enter the inner routers; `peer` is the same way's share before it was bad, when the kernel chose.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import ports_kit as kit
import steering_kit
from _common import emit, note

from pytools.lab import Lab
from pytools.lab.topology import Host
from steering.commands.status import facts_of

CONNECTIONS = 400
KEEP = 32
BAD = 2  # number of the way
POLICY = "version: 1\nmanage: {{destinations: [{address}/32]}}\nports: {{keep: {keep}, dwell: 2s}}\n"
_LIMIT_S = 300.0


def avoided(bench: str, loss: float = 0.0, suffix: str = "") -> None:
    """Emit `avoided` for a slow and for a dead way, in percent of new connections; the rail loses this share of all."""
    with Lab.up(f"bench-avoided-{os.getpid()}", hosts=2, rails=1, inner=4) as lab:
        steering_kit.agents(lab)
        _measure(bench, lab, loss, suffix)


def _measure(bench: str, lab: Lab, loss: float, suffix: str) -> None:
    client, server = lab.hosts
    with (
        kit.serving(server, [server.service]),
        kit.Ways(lab.rails[0], client) as ways,
        controller(client, POLICY.format(address=server.service, keep=KEEP)),
    ):
        _wait(client, server, lambda known, _: known >= 2 * KEEP, "ports are learnt")
        for case in ("slow", "dead"):
            if loss:
                lab.lose(1, loss)
            before = _share(ways, client, server)
            if case == "slow":
                lab.congest(1, "10mbit", 40_000, toward=2, inner=BAD)
                lab.load(1, "11mbit", toward=2, inner=BAD)
            else:
                lab.blackhole(1, inner=BAD)
            _wait(client, server, lambda _, avoided: bool(avoided), f"the {case} way is avoided")
            after = _share(ways, client, server)
            emit(
                *(bench, "avoided", after, "% of connections", "lower"),
                case=case + suffix,
                peer="unaided",
                peer_value=before,
                n=CONNECTIONS,
            )
            lab.heal()
            _wait(client, server, lambda _, avoided: not avoided, "all ways are good again")


def _share(ways: kit.Ways, client: Host, server: Host) -> float:
    ways.taken()
    kit.connect(client, server.service, CONNECTIONS)
    taken = ways.taken(server.service)
    return 100.0 * taken[BAD] / sum(taken.values())


@contextlib.contextmanager
def controller(client: Host, text: str) -> Iterator[None]:
    """Steer a host under this policy."""
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text(text)
        policy.chmod(0o600)
        command = [sys.executable, "-m", "steering.cli", "steer", "run", "-n", client.netns, "--policy", str(policy)]
        running = subprocess.Popen([*command, "--apply"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            running.terminate()
            running.wait()


def _wait(client: Host, server: Host, enough: Callable[[int, list[str]], bool], what: str) -> None:
    """Connect now and then, so that the destination is one that this host uses, until enough is known of it."""
    limit_s, peer = time.monotonic() + _LIMIT_S, f"{server.service}:{kit.SERVICE}"
    while time.monotonic() < limit_s:
        kit.connect(client, server.service, 2)
        found = facts_of(client.netns, with_paths=False).get("ports", [])
        known, avoided = next(((each["known"], each["avoided"]) for each in found if each["peer"] == peer), (0, []))
        if enough(known, avoided):
            note(what)
            return
        time.sleep(0.2)
    raise TimeoutError(f"{what}: not within {_LIMIT_S:g} s")
