"""What `swerve watch` costs at 50,000 records a second written to a file, and whether it loses any.

    python bench/watch.py [--rate 50000] [--seconds 10]

This process is the agent's end: the real bus and its server, a record of a path's delay each, about 800 bytes. The
command runs as people run it, its output in a file, first alone, then beside a reader that has stopped reading.
`records` is what reached the file a second, `lost` what was published and is not there, `invalid` lines that are no
signal; `cpu` is the command's own share of a core, `server_cpu` that of publishing and serving.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from _common import emit, note

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import samples  # noqa: E402

from pytools import directories  # noqa: E402
from pytools.ipc.bus import Bus, Client  # noqa: E402
from pytools.ipc.server import Server  # noqa: E402
from pytools.signals import decode  # noqa: E402

LOT_S = 0.005


@dataclass(frozen=True)
class Outcome:
    records_s: float
    lost: int
    invalid: int
    cpu: float
    server_cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swerve-bench-") as folder:
        os.environ |= {"SWERVE_RUNTIME_DIR": folder, "SWERVE_STATE_DIR": folder}
        for case, stuck in (("alone", False), ("beside_stuck_reader", True)):
            found = run(Path(folder), wanted.rate, wanted.seconds, stuck)
            note(f"{case}: {found}")
            emit("watch", "records", found.records_s, "1/s", "higher", case=case)
            emit("watch", "lost", found.lost, "records", "lower", case=case)
            emit("watch", "invalid", found.invalid, "records", "lower", case=case)
            emit("watch", "cpu", found.cpu, "share", "lower", case=case)
            emit("watch", "server_cpu", found.server_cpu, "share", "lower", case=case)


def run(folder: Path, rate: int, seconds: float, stuck: bool) -> Outcome:
    """One command beside one server."""
    bus, selector, out = Bus(), selectors.DefaultSelector(), folder / "watched.jsonl"
    server = Server(bus, directories.agent_socket(None))
    server.register(selector)
    others: list[Client] = []
    with out.open("wb") as file:
        command = [sys.executable, "-m", "steering.cli", "watch", "--type", "path_delay"]
        process = subprocess.Popen(command, stdout=file, cwd=ROOT)
        try:
            while not bus.wanted("path_delay"):
                turn(selector, 0.01)
            if stuck:  # only now: before, it would be this one that wants them
                others.append(Client(directories.agent_socket(None), frozenset({"path_delay"})))
            published, cpu, server_cpu, lasted_s = publish(bus, selector, process.pid, rate, seconds)
            end = time.monotonic() + 5
            while lines_in(out) < published and time.monotonic() < end:
                turn(selector, 0.05)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(10)
            for each in others:
                each.close()
            server.close()
    return judged(out, published, cpu, server_cpu, lasted_s)


def turn(selector: selectors.BaseSelector, wait_s: float) -> None:
    """What the agent's loop does."""
    for key, mask in selector.select(wait_s):
        key.data(mask)


def publish(
    bus: Bus, selector: selectors.BaseSelector, pid: int, rate: int, seconds: float
) -> tuple[int, float, float, float]:
    """Publish evenly; how many, both processors' shares of a core, and how long it took."""
    one = samples.path_delay()
    began, published = time.monotonic(), 0
    cpu_before, own_before = cpu_of(pid), own_cpu()
    while (now := time.monotonic()) < began + seconds:
        due = int((now - began) * rate)
        while published < due:
            bus.publish(msgspec.structs.replace(one, at_ns=published))
            published += 1
            if published % 64 == 0:
                turn(selector, 0)
        turn(selector, LOT_S)
    lasted_s = time.monotonic() - began
    return published, (cpu_of(pid) - cpu_before) / lasted_s, (own_cpu() - own_before) / lasted_s, lasted_s


def judged(out: Path, published: int, cpu: float, server_cpu: float, lasted_s: float) -> Outcome:
    """Look at every line: it has to be a signal, the next one, and there once."""
    numbers, invalid = [], 0
    for line in out.read_bytes().splitlines():
        try:
            numbers.append(decode(line).at_ns)
        except msgspec.MsgspecError:
            invalid += 1
    assert numbers == sorted(set(numbers)), "a record is there twice, or out of order"
    return Outcome(len(numbers) / lasted_s, published - len(numbers), invalid, cpu, server_cpu)


def lines_in(file: Path) -> int:
    """So many newlines."""
    return file.read_bytes().count(b"\n")


def cpu_of(pid: int) -> float:
    """Processor seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu() -> float:
    """Processor seconds of this one."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
