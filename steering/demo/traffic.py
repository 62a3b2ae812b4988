"""The offered load: one iperf3 pair per host, the same in every phase, and what came of it.

Every host sends to the next one. Rates are bits per second, times seconds of the wall; iperf3 is a real peer from the
distribution, run inside the hosts' namespaces.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.lab import Lab
from pytools.lab.topology import Host

WARM_UP_NS = 1_000_000_000  # connections start slowly: a phase is judged from here on
_PORT = 5201
_STREAMS = 16  # enough that the hash puts some on every rail
_WRITE_BYTES = 8192  # small writes: the rate is held by pacing them, and bursts would queue
_LONG_S = 3600
_RECEIVED = re.compile(r"bytes_received:(\d+)")


class Received(NamedTuple):
    """What one pair has received until then."""

    at_ns: int
    bytes: int


def bit_rate(before: Sequence[Received], after: Sequence[Received]) -> float:
    """What all pairs received a second: each between its own two readings, as one is read after the other."""
    return sum(
        (end.bytes - start.bytes) * 8e9 / (end.at_ns - start.at_ns) for start, end in zip(before, after, strict=True)
    )


class Load:
    """All pairs of one phase while they run; stopped by the end of the context.

    Parameters
    ----------
    rate_bit_s : int
        What every pair offers, its streams together.
    """

    def __init__(self, lab: Lab, pairs: Sequence[tuple[Host, Host]], rate_bit_s: int) -> None:
        self._lab, self._pairs, self._rate_bit_s = lab, pairs, rate_bit_s

    def __enter__(self) -> Load:
        bound = [("iperf3", "--server", "--one-off", "--bind", to.service) for _, to in self._pairs]
        self._servers = [self._lab.start(to, command) for (_, to), command in zip(self._pairs, bound, strict=True)]
        for process, (_, to) in zip(self._servers, self._pairs, strict=True):
            _wait_listening(process, to)
        self._clients = [
            self._lab.start(source, self._command(source, to), stdout=subprocess.PIPE) for source, to in self._pairs
        ]
        self.measured_from_ns = time.monotonic_ns() + WARM_UP_NS
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._clients, *self._servers]:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _command(self, source: Host, to: Host) -> list[str]:
        return [
            "iperf3",
            *("--client", to.service, "--bind", source.service, "--json", "--time", str(_LONG_S)),
            *("--bitrate", str(self._rate_bit_s // _STREAMS), "--parallel", str(_STREAMS)),
            *("--length", str(_WRITE_BYTES), "--pacing-timer", "1000"),
        ]

    @property
    def offered_bit_s(self) -> float:
        return float(self._rate_bit_s * len(self._pairs))

    def received(self) -> list[Received]:
        """What each pair's connections have received so far, by the kernel's own count, and when that was read."""
        found = []
        for _, to in self._pairs:
            report = self._lab.run(to, ["ss", "--tcp", "--info", "--no-header", "sport", "=", f":{_PORT}"])
            found.append(Received(time.monotonic_ns(), sum(int(count) for count in _RECEIVED.findall(report))))
        return found

    def broken(self) -> tuple[str, ...]:
        """Pairs whose traffic ended before its time, with iperf3's reason."""
        ended = []
        for process, (source, to) in zip(self._clients, self._pairs, strict=True):
            if process.poll() is not None:
                ended.append(f"{source.name} to {to.name}: {_reason(process)}")
        return tuple(ended)


def _reason(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    try:
        return str(json.loads(process.stdout.read())["error"])
    except (json.JSONDecodeError, KeyError):
        return f"exit code {process.returncode}"


def ring(hosts: Sequence[Host]) -> list[tuple[Host, Host]]:
    return [(host, hosts[(index + 1) % len(hosts)]) for index, host in enumerate(hosts)]


def _wait_listening(process: subprocess.Popen[str], host: Host) -> None:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if _listens(host):
            return
        if process.poll() is not None:
            break
        time.sleep(0.005)
    raise SwerveError(f"iperf3 does not listen on {host.name}", "is iperf3 installed? `make setup` does it")


def _listens(host: Host) -> bool:
    with netns.inside(host.netns), open("/proc/thread-self/net/tcp") as file:
        return any(line.split()[1].endswith(f":{_PORT:04X}") and line.split()[3] == "0A" for line in list(file)[1:])


def established_resets(host: Host) -> int:
    """Connections of a host that went from established to closed by a reset (TcpEstabResets), so far."""
    with netns.inside(host.netns), open("/proc/thread-self/net/snmp") as file:
        names, values = (line.split() for line in file if line.startswith("Tcp:"))
    return int(values[names.index("EstabResets")])


def transmitted_packets(host: Host) -> dict[str, int]:
    """Packets that left by each rail interface of a host, so far."""
    wanted = {interface.name for interface in host.interfaces}
    with netns.inside(host.netns), open("/proc/thread-self/net/dev") as file:
        rows = [line.replace(":", " ").split() for line in file if ":" in line]
    return {row[0]: int(row[10]) for row in rows if row[0] in wanted}
