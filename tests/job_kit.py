"""A job in lock step over a lab: two ranks on the first host, one that answers on the second; and a quota for one.

The connections are placed on the rails by their ports. A quota is a control group of version 2, or 1 where the CPU's
controller is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import support

from pytools.lab import Lab

RANK: Final = [sys.executable, str(Path(__file__).with_name("job_rank.py"))]
PORT: Final = 7500
PERIOD_US: Final = 100_000


def ports_that_hash_to(lab: Lab, wanted: Mapping[str, int], remote_port: int = PORT) -> list[int]:
    """Local ports by which so many connections take each rail."""
    near, far = lab.hosts[0], lab.hosts[1]
    left, found = dict(wanted), []
    for port in range(40_000, 41_000):
        words = ["from", near.service, "ipproto", "tcp", "sport", str(port), "dport", str(remote_port)]
        [route] = json.loads(support.run(["ip", "-n", near.netns, "-j", "route", "get", far.service, *words]).stdout)
        if left[route["dev"]] > 0:
            left[route["dev"]] -= 1
            found.append(port)
        if not any(left.values()):
            break
    return found


class LockStep:
    """The job; with `ras` the agent asks RAS about it.

    Attributes
    ----------
    pids : list of int
        Of ranks 0 and 1, which are on the first host.
    """

    def __init__(self, lab: Lab, ports: list[int], ras: bool = False) -> None:
        near, far = lab.hosts[0], lab.hosts[1]
        ranks = {
            "WORLD_SIZE": "3",
            "MASTER_ADDR": near.service,
            "MASTER_PORT": "29500",
            "NCCL_RAS_ENABLE": str(int(ras)),
        }
        where = [far.service, str(PORT)]
        self._processes = [lab.start(far, [*RANK, "answer", *where, str(len(ports))], env={**ranks, "RANK": "2"})]
        listens = ["ip", "netns", "exec", far.netns, "ss", "-H", "-tln", f"sport = :{PORT}"]
        support.wait_until(lambda: support.run(listens).stdout, 20, "the last rank listens")
        for rank in range(2):
            words = [*RANK, "step", *where, *map(str, ports[rank::2])]
            self._processes.append(lab.start(near, words, env={**ranks, "RANK": str(rank)}))
        self.pids = [each.pid for each in self._processes[1:]]

    def close(self) -> None:
        """End it."""
        for each in self._processes:
            each.kill()
            each.wait()


class Verdicts:
    """What `swerve jobs -j -i 1` says of the job, as it comes."""

    def __init__(self, netns: str) -> None:
        words = [*support.SWERVE, "jobs", "-n", netns, "-j", "-i", "1"]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.heard: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard.append(json.loads(line))

    def next(self, many: int, seconds: float = 60) -> list[dict[str, Any]]:
        """The next verdicts, each of another window; the first window may have begun before."""
        first = len(self.heard)

        def windows() -> list[dict[str, Any]]:
            found = {each["at_ns"]: each["why"] for each in self.heard[first:]}
            return list(found.values())

        support.wait_until(lambda: len(windows()) > many, seconds, "verdicts come")
        return windows()[1:]

    def until(self, condition: Any, seconds: float, what: str) -> dict[str, Any]:
        """The first verdict from now on that is so."""
        first = len(self.heard)
        found: dict[str, Any] = support.wait_until(
            lambda: next((each["why"] for each in self.heard[first:] if condition(each["why"])), None), seconds, what
        )
        return found

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._thread.join()


@contextlib.contextmanager
def quota(name: str, pid: int) -> Iterator[Any]:
    """A control group of its own for a process; gives what sets its share of a processor, None: no limit."""
    two = Path("/sys/fs/cgroup")
    one = next((each for each in (two / "cpu", two / "cpu,cpuacct") if (each / "cpu.cfs_quota_us").exists() or
                (each / "cgroup.procs").exists()), None)  # fmt: skip
    root = two if one is None else one
    if one is None and "cpu" not in (root / "cgroup.subtree_control").read_text().split():
        (root / "cgroup.subtree_control").write_text("+cpu")
    before = _group(pid, one is not None)
    folder = root / f"swerve-test-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(pid))

        def limit(share: float | None) -> None:
            given = None if share is None else round(share * PERIOD_US)
            if one is None:
                (folder / "cpu.max").write_text(f"{'max' if given is None else given} {PERIOD_US}")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(-1 if given is None else given))

        yield limit
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (root / before.lstrip("/") / "cgroup.procs").write_text(str(pid))
        support.wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20, "the control group is empty")
        folder.rmdir()


def _group(pid: int, first_version: bool) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if "cpu" in names.split(",") if first_version else number == "0":
            return path
    return "/"
