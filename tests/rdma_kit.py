"""Real RDMA for tests in the second kernel: two Soft-RoCE devices on one cable, perftest and rping over it.

Soft-RoCE works in the first network namespace only, so both ends of the cable lie there; rules keep the packets
between them off the loopback. What one end sends passes its queue discipline and can be throttled or cut. Sizes are
bytes, times seconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import support

from pytools.kernel.rdma_class import SYSFS

Test = Literal["ib_write_bw", "ib_send_bw", "ib_read_bw"]

LIMIT_S = 20.0  # for one run, before SWERVE_SLOW_FACTOR
_FIRST_TABLE = 1000
_LOCAL_RULE = 200  # where the local table is looked up while the cable lies; usually first
_MEBI = 1 << 20


@dataclass(frozen=True)
class End:
    """One end of the cable."""

    device: str  # of RDMA
    interface: str
    address: str
    hardware_address: str
    table: int

    @property
    def gid_index(self) -> int:
        """Which of the device's addresses is the interface's IPv4 address."""
        digits = "".join(f"{int(part):02x}" for part in self.address.split("."))
        wanted = f"0000:0000:0000:0000:0000:ffff:{digits[:4]}:{digits[4:]}"
        for place in (SYSFS / self.device / "ports/1/gids").iterdir():
            with contextlib.suppress(OSError):  # an entry that is not used
                if place.read_text().strip() == wanted:
                    return int(place.name)
        raise LookupError(f"{self.device} has no GID for {self.address}")


@dataclass(frozen=True)
class Cable:
    """Two ends; the first is the client's."""

    client: End
    server: End

    def throttle(self, rate: str, burst: str = "16kb", latency: str = "50ms") -> None:
        """Let the client's end send no faster than that (words of tc: 20mbit)."""
        device = self.client.interface
        words = ["tbf", "rate", rate, "burst", burst, "latency", latency]
        support.run(["tc", "qdisc", "replace", "dev", device, "root", *words])

    def cut(self, *ends: End) -> None:
        """Lose every packet, both ways or what these ends send; the carrier stays."""
        for end in ends or (self.client, self.server):
            support.run(["tc", "qdisc", "replace", "dev", end.interface, "root", "netem", "loss", "100%"])

    def heal(self) -> None:
        """Undo `throttle` and `cut`."""
        for end in (self.client, self.server):
            support.run(["tc", "qdisc", "delete", "dev", end.interface, "root"], check=False)


def missing() -> str | None:
    """Why there can be no RDMA here; None where there can."""
    for command, package in (
        ("rdma", "iproute2"),
        ("ib_write_bw", "perftest"),
        ("rping", "rdmacm-utils"),
        ("tc", "iproute2"),
    ):
        if shutil.which(command) is None:
            return f"the command {command} (package {package})"
    if not SYSFS.exists():
        return "RDMA in the kernel (modules ib_uverbs, rdma_rxe, rdma_ucm)"
    return None


@contextlib.contextmanager
def cable(name: str = "sw") -> Iterator[Cable]:
    """Lay a cable in the calling thread's namespace; all of it is removed at the end. Skips where there is no RDMA."""
    with cables(name) as [laid]:
        yield laid


@contextlib.contextmanager
def cables(*names: str) -> Iterator[list[Cable]]:
    """Lay several, each with addresses of its own."""
    lacking = missing()
    if lacking:
        pytest.skip(f"missing: {lacking}")
    with contextlib.ExitStack() as undo:
        _ip(undo, f"rule add priority {_LOCAL_RULE} lookup local", "rule delete")
        support.run(["ip", "rule", "delete", "priority", "0"])
        undo.callback(support.run, ["ip", "rule", "add", "priority", "0", "lookup", "local"])
        yield [undo.enter_context(_cable(name, number)) for number, name in enumerate(names, 77)]


@contextlib.contextmanager
def _cable(name: str, number: int) -> Iterator[Cable]:
    ends = tuple(
        End(
            f"rxe{name}{i}",
            f"{name}{i}",
            f"10.5.{number}.{i + 1}",
            f"02:00:00:00:{number}:0{i + 1}",
            _FIRST_TABLE + 2 * number + i,
        )
        for i in (0, 1)
    )
    with contextlib.ExitStack() as undo:
        # With addresses from the start: udev gives an interface that was made without one another, some time later.
        first, second = (f"{end.interface} address {end.hardware_address}" for end in ends)
        _ip(undo, f"link add {first} type veth peer name {second}", "link delete")
        for end, other in (ends, ends[::-1]):
            _lay(undo, end, other)
        for end in ends:
            support.run(["rdma", "link", "add", end.device, "type", "rxe", "netdev", end.interface])
            undo.callback(support.run, ["rdma", "link", "delete", end.device], check=False)
        for end in ends:
            support.wait_until(functools.partial(_has_gid, end), 10, f"{end.device} has the address of {end.interface}")
        yield Cable(*ends)


def _lay(undo: contextlib.ExitStack, end: End, other: End) -> None:
    for setting, value in (("accept_local", 1), ("rp_filter", 0)):
        Path(f"/proc/sys/net/ipv4/conf/{end.interface}/{setting}").write_text(f"{value}\n")
    for line in (
        f"link set {end.interface} mtu 4200 up",
        f"address add {end.address}/24 dev {end.interface}",
        f"neighbour replace {other.address} lladdr {other.hardware_address} dev {end.interface} nud permanent",
        f"route replace {other.address} dev {end.interface} src {end.address} table {end.table}",
    ):
        support.run(["ip", *line.split()])
    # From us to the other end, whether we send (iif lo) or the connection manager asks where a packet came from.
    for interface in ("lo", end.interface):
        rule = f"from {end.address} to {other.address} iif {interface} lookup {end.table} priority 100"
        _ip(undo, f"rule add {rule}", "rule delete")


def _ip(undo: contextlib.ExitStack, line: str, reverse: str) -> None:
    words, back = line.split(), reverse.split()
    support.run(["ip", *words])
    # a link is deleted by its name alone, a rule by all that it was made of
    undo.callback(support.run, ["ip", *back, *(words[2:3] if words[0] == "link" else words[2:])], check=False)


def _has_gid(end: End) -> bool:
    with contextlib.suppress(LookupError, OSError):
        return end.gid_index >= 0
    return False


@dataclass(frozen=True)
class Report:
    """What perftest says of itself."""

    size: int
    iterations: int  # of all queue pairs together
    peak_bytes_s: float
    average_bytes_s: float


@dataclass
class Running:
    """A server and its client, started."""

    server: subprocess.Popen[str]
    client: subprocess.Popen[str]
    said: dict[str, str] = field(default_factory=dict)

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Wait until both have ended well; what they wrote is in `said`."""
        for name in ("client", "server"):
            process: subprocess.Popen[str] = getattr(self, name)
            try:
                self.said[name] = process.communicate(timeout=limit_s * support.slow_factor())[0]
            except subprocess.TimeoutExpired:
                self.kill()
                pytest.fail(f"the {name} was not done after {limit_s:g} s: {process.communicate()[0]}")
            if process.returncode != 0:
                self.kill()
                rest = {other: getattr(self, other).communicate()[0] for other in ("client", "server") if other != name}
                pytest.fail(f"the {name} failed ({process.returncode}): {self.said[name]}\n{rest}")

    def kill(self) -> None:
        """End both, whatever they are doing."""
        for process in (self.client, self.server):
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def start_perftest(
    cable: Cable,
    test: Test,
    *,
    iterations: int | None = 200,
    duration_s: int | None = None,
    size: int = 4096,
    queue_pairs: int = 1,
    extended: bool = True,
    options: Sequence[str] = (),
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start a server and, once it listens, a client.

    Parameters
    ----------
    iterations : int or None
        Messages per queue pair; None: run for `duration_s`.
    extended : bool
        Post by the extended API (perftest's choice), or by ibv_post_send.
    prefix, env
        Put before the command, and into the environment, of both.
    """
    words = [test, "-s", str(size), "-q", str(queue_pairs), "-F", "-p", str(_PORT)]
    words += ["-n", str(iterations)] if duration_s is None else ["-D", str(duration_s)]
    words += [] if extended else ["--use_old_post_send"]
    server = _start(
        [*prefix, *words, *options, "-d", cable.server.device, "-x", str(cable.server.gid_index)], env, until=_WAITING
    )
    try:
        client = _start(
            [*prefix, *words, *options, "-d", cable.client.device, "-x", str(cable.client.gid_index), "127.0.0.1"], env
        )
    except BaseException:
        server.kill()
        raise
    return Running(server, client)


def perftest(cable: Cable, test: Test, **how: object) -> tuple[Running, Report]:
    """The same, to its end. Soft-RoCE sends again after 1 s, not 67 ms: an emulated host may not answer for long."""
    running = start_perftest(cable, test, options=("--qp-timeout", "18"), **how)  # type: ignore[arg-type]
    running.wait()
    return running, report(running.said["client"])


def start_rping(
    cable: Cable, count: int, size: int = 100, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Running:
    """Start rping's server and client: `count` rounds of two sends each way, one read and one write."""
    server = _start([*prefix, "rping", "-s", "-C", str(count), "-S", str(size), "-a", cable.server.address], env)
    try:
        support.wait_until(lambda: _has_cm_listener(server.pid), 10, "rping listens")
        client_words = ["rping", "-c", "-C", str(count), "-S", str(size), "-a", cable.server.address]
        client = _start([*prefix, *client_words, "-I", cable.client.address], env)
    except BaseException:
        server.kill()
        raise
    return Running(server, client)


_PORT = 18515
_WAITING = "Waiting for client to connect"


def _has_cm_listener(pid: int) -> bool:
    """Whether the process has a connection-management identifier that listens."""
    shown = support.run(["rdma", "resource", "show", "cm_id", "pid", str(pid)], check=False).stdout
    return "LISTEN" in shown


def _start(words: Sequence[str], env: Mapping[str, str] | None, until: str = "") -> subprocess.Popen[str]:
    """Start a process, its output captured; wait until it says so."""
    process = subprocess.Popen(
        ["stdbuf", "-oL", *words] if until else list(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None
    said = ""
    while until and until not in said:
        line = process.stdout.readline()
        if not line:
            process.wait()
            pytest.fail(f"{' '.join(words)} ended before it was ready: {said}")
        said += line
    return process


_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)


def report(text: str) -> Report:
    """The last row of a client's table; MB/sec there are 2^20 bytes."""
    rows = _ROW.findall(text)
    if not rows:
        raise ValueError(f"perftest wrote no row of figures:\n{text}")
    size, iterations, peak, average, _ = rows[-1]
    return Report(int(size), int(iterations), float(peak) * _MEBI, float(average) * _MEBI)
