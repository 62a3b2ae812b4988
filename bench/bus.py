"""What the bus between hosts costs one agent with 7 and with 10 peers: memory, threads, processor time, delay.

Every host of a lab runs an end of the bus in its own process, on a loop that turns every 20 ms as the agent's does;
that loop's own cost, measured before the bus is opened, is taken off, and so is its memory. `talk`: every host sends
10 messages of 200 bytes a second to all others. `large`: one message of 100 kB a second instead. Delay is from
send() of one host to receive() of another that looks every millisecond.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import emit, median, note

from pytools.lab.fabric import Lab

PEERS = (7, 10)
SETTLING_S, WINDOW_S, WINDOWS = 4.0, 4.0, 3

NODE = r"""
import json, os, sys, time
setting = json.loads(sys.argv[1])
import msgspec
from pytools import config
from pytools.ipc import hosts
from pytools.kernel import netns

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def window(seconds, gap_s=0.02, every_s=0.0, size=0):
    "Turn the loop for a while; the share of a core that took, and the delays of what arrived."
    began, cpu_s, delays = time.monotonic(), time.process_time(), []
    due = began + every_s * setting["number"] / 11
    while (now := time.monotonic()) < began + seconds:
        if bus is not None:
            bus.tick(time.monotonic_ns())
            for _, payload in bus.receive("bench"):
                delays.append(time.monotonic_ns() - int(payload[:20]))
            if every_s and now >= due:
                bus.send("bench", b"%020d" % time.monotonic_ns() + bytes(size - 20))
                due += every_s
        time.sleep(gap_s)
    return (time.process_time() - cpu_s) / (time.monotonic() - began), delays

netns.enter(setting["netns"])
bus = None
window(0.2)
bare = [window(setting["window_s"])[0] for _ in range(3)]
before = resident()
peers = msgspec.convert(setting["peers"], list[config.Peer])
bus = hosts.HostBus(setting["host"], peers, config.HostBus(key_file=setting["key"]))
opened = resident()
print(json.dumps({"bare": bare, "before": before, "opened": opened}), flush=True)
for line in sys.stdin:
    share, delays = window(**json.loads(line))
    told = {"share": share, "delays": delays, "resident": resident(), "drops": bus.drops()}
    print(json.dumps(told | {"threads": len(os.listdir("/proc/self/task")), "peers": bus.confirmed()}), flush=True)
bus.close()
"""


class Nodes:
    """One end per host; the first is the one that is looked at."""

    def __init__(self, lab: Lab, key: Path) -> None:
        self._processes = []
        for host in lab.hosts:
            peers = [{"name": other.name, "address": other.service} for other in lab.hosts if other is not host]
            setting = {"netns": host.netns, "host": host.name, "number": host.number, "peers": peers}
            setting |= {"key": str(key), "window_s": WINDOW_S}
            words = [sys.executable, "-c", NODE, json.dumps(setting)]
            self._processes.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        self.first = self._read_all()

    def window(self, first: dict[str, float] | None = None, **all_of_them: float) -> dict[str, Any]:
        """Let all turn for a while; what the first says."""
        for process in self._processes:
            assert process.stdin is not None
            changed = first if first and process is self._processes[0] else {}
            process.stdin.write(json.dumps(all_of_them | changed) + "\n")
            process.stdin.flush()
        return self._read_all()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _read_all(self) -> dict[str, Any]:
        first, *_ = [self._read(process) for process in self._processes]
        return first

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(process.stdout.readline())
        return told


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        key = Path(directory, "key")
        key.touch(0o600)
        key.write_bytes(os.urandom(32))
        for peers in PEERS:
            with Lab.up(f"bench-bus-{os.getpid()}", hosts=peers + 1, rails=2, rate="none") as lab:
                nodes = Nodes(lab, key)
                try:
                    measure(nodes, peers)
                finally:
                    nodes.close()


def measure(nodes: Nodes, peers: int) -> None:
    bare = median(nodes.first["bare"])
    case = f"peers{peers}"
    before = nodes.first["before"]
    emit("bus", "memory_opened", (nodes.first["opened"] - before) / 1e6, "MB", "lower", case=case)
    settled = nodes.window(seconds=SETTLING_S)
    assert len(settled["peers"]) == peers, settled
    for name, load in (
        ("idle", {}),
        ("talk", {"every_s": 0.1, "size": 200}),
        ("large", {"every_s": 1.0, "size": 100_000}),
    ):
        told = [nodes.window(seconds=WINDOW_S, **load) for _ in range(WINDOWS)]
        note(f"{case} {name}: shares {[round(each['share'] - bare, 4) for each in told]}, loop alone {bare:.4f}")
        emit("bus", f"cpu_{name}", median([each["share"] for each in told]) - bare, "share", "lower", case=case)
        emit("bus", f"memory_{name}", (told[-1]["resident"] - before) / 1e6, "MB", "lower", case=case)
    emit("bus", "threads", told[-1]["threads"] - 1, "threads", "lower", case=case)
    note(f"{case}: dropped { ({cause: count for cause, count in told[-1]['drops'].items() if count}) }")
    delays = sorted(
        delay
        for _ in range(WINDOWS)
        for delay in nodes.window(seconds=WINDOW_S, every_s=0.1, size=200, first={"gap_s": 0.001})["delays"]
    )
    for share in (50, 99):
        emit(
            "bus", f"delay_p{share}", delays[len(delays) * share // 100] / 1e6, "ms", "lower", case=case, n=len(delays)
        )


if __name__ == "__main__":
    main()
