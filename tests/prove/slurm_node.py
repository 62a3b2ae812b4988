"""Proof: a hook drains and resumes a node of Slurm itself, and leaves alone what others did to it.

    python tests/prove/slurm_node.py [--packages DIR]

Debian 12's slurmctld and scontrol are fetched with apt into a directory of its own, and not installed. The controller
runs on loopback with one node, on which no slurmd runs. Run as root, from the checkout: a program that others could
write is refused, so the directory is below /run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import _debian

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

import support  # noqa: E402

from steering.acting import hook_calls, hook_settings  # noqa: E402

PACKAGES: Final = ("slurm-client", "slurmctld", "slurm-wlm-basic-plugins")
CONFIGURATION: Final = """\
ClusterName=proof
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/pgid
SelectType=select/linear
SchedulerType=sched/builtin
NodeName=h1 NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES
"""


class Cluster:
    """A Slurm of one node, and our hook for it."""

    def __init__(self, root: Path, folder: Path) -> None:
        plugins = root / "usr/lib/x86_64-linux-gnu/slurm-wlm"
        (folder / "slurm.conf").write_text(CONFIGURATION.format(plugins=plugins, folder=folder))
        self.scontrol = folder / "scontrol"
        places = f"SLURM_CONF={folder}/slurm.conf LD_LIBRARY_PATH={plugins}"
        self.scontrol.write_text(f'#!/bin/sh\n{places} exec {root}/usr/bin/scontrol "$@"\n')
        self.scontrol.chmod(0o755)
        self.environment = dict(word.split("=", 1) for word in places.split())
        self.server = [str(root / "usr/sbin/slurmctld-wlm"), "-D"]

    @contextmanager
    def running(self) -> Iterator[None]:
        with subprocess.Popen(self.server, env=self.environment, stderr=subprocess.DEVNULL) as process:
            try:
                support.wait_until(lambda: "UP" in self.ask("ping"), 20, "slurmctld is up")
                yield
            finally:
                process.kill()

    def ask(self, *words: str) -> str:
        return subprocess.run([self.scontrol, *words], capture_output=True, text=True, check=False).stdout

    def tell(self, status: str, repeat: int = 0) -> str:
        options = json.dumps({"scontrol": str(self.scontrol)})
        hook = hook_settings.Settings("slurm", "slurm", options, 10**9, 20 * 10**9, 3, 30, 10**9)
        event = {"id": "18a-c0ffee", "status": status, "repeat": repeat, "host": "h1", "rule": "dead"}
        more = {"path": {"name": "h1>h2 dev rail1"}, "because": 'p50 6.3 ms × 3; "$(reboot)"'}
        return hook_calls.call(hook, event | more)

    @property
    def node(self) -> tuple[str, str]:
        """State and reason."""
        words = [line.strip() for line in self.ask("show", "node", "h1").splitlines()]
        state = next(word.split()[0] for word in words if word.startswith("State="))
        return state, next((word.partition(" [")[0] for word in words if word.startswith("Reason=")), "")


def prove(cluster: Cluster) -> None:
    cluster.ask("update", "NodeName=h1", "State=DOWN", "Reason=test")  # without a slurmd it is not idle by itself
    cluster.ask("update", "NodeName=h1", "State=RESUME")
    said = cluster.tell("firing")
    state, reason = cluster.node
    print(f"{said}: {state} {reason}")
    assert "DRAIN" in state and reason == "Reason=swerve 18a-c0ffee: dead: h1>h2 dev rail1: p50 6.3 ms x 3; ?$(reboot)?"
    assert cluster.tell("firing", 1) == "node h1 is drained" and cluster.node == (state, reason)
    print(f"{cluster.tell('resolved')}: {cluster.node[0]} {cluster.node[1]}")
    assert "DRAIN" not in cluster.node[0] and cluster.node[1] == ""
    cluster.tell("firing")
    cluster.ask("update", "NodeName=h1", "State=RESUME")
    print(cluster.tell("firing", 1))
    assert "DRAIN" not in cluster.node[0], "an administrator resumed it"
    cluster.ask("update", "NodeName=h1", "State=DRAIN", "Reason=disk")
    print(cluster.tell("firing"), cluster.tell("resolved"), sep="\n")
    assert "DRAIN" in cluster.node[0] and cluster.node[1] == "Reason=disk"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, help="where to keep what is fetched, or where it was kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swerve-slurm-", dir="/run") as folder:
        root = _debian.unpacked(options.packages or Path(folder), "bookworm", lambda _: PACKAGES)
        cluster = Cluster(root, Path(folder))
        with cluster.running():
            prove(cluster)
    return 0


if __name__ == "__main__":
    sys.exit(main())
