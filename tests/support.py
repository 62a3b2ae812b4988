"""What tests of every tier share: named requirements, waiting with a deadline, running a command.

Imported as `support` (pytest puts tests/ on the path). Deadlines are seconds of CLOCK_MONOTONIC, multiplied
by SWERVE_SLOW_FACTOR, which is set where a processor is emulated.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import itertools
import json
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pytools.kernel.netns import inside

T = TypeVar("T")
Item = TypeVar("Item", bound=pytest.Item)

_near_indexes = itertools.count(1001)  # above those that the kernel gives

ROOT = Path(__file__).resolve().parent.parent
SWERVE = [sys.executable, "-m", "steering.cli"]  # the command, as a list of arguments, from this checkout

# Before a command: another user without privileges, but for reading files: the checkout may lie in root's home.
_READING = "dac_read_search"
AS_NOBODY = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps=-all,+{_READING}"),
    *(f"--ambient-caps=-all,+{_READING}", f"--bounding-set=-all,+{_READING}"),
]

# Command -> Debian package that brings it.
COMMANDS = {
    "bird": "bird2",
    "birdc": "bird2",
    "bpftool": "bpftool",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "dhclient": "isc-dhcp-client",
    "dnsmasq": "dnsmasq-base",
    "ethtool": "ethtool",
    "gcc": "gcc",
    "ip": "iproute2",
    "iperf3": "iperf3",
    "nstat": "iproute2",
    "openssl": "openssl",
    "ping": "iputils-ping",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "ss": "iproute2",
    "tc": "iproute2",
    "tmux": "tmux",
    "tcpdump": "tcpdump",
    "vtysh": "frr",
}


def slow_factor() -> float:
    """How many times slower than usual this machine is allowed to be."""
    return float(os.environ.get("SWERVE_SLOW_FACTOR", "1"))


def mounted(kind: str, place: str) -> bool:
    """Whether a file system of this kind is mounted there."""
    rows = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return any(row[1] == place and row[2] == kind for row in rows)


def _has_bcc() -> bool:
    found = importlib.util.find_spec("bcc")  # PyPI's package of that name has no libbcc module
    return found is not None and importlib.util.find_spec("bcc.libbcc") is not None


def _has_second_kernel() -> bool:
    vng, static = Path(sys.executable).with_name("vng"), shutil.which("busybox")
    kernels = [image for image in Path("/boot").glob("vmlinuz-6.1.*-amd64") if os.access(image, os.R_OK)]
    return bool(vng.exists() and static and kernels and shutil.which("qemu-system-x86_64"))


# Capability -> (is it there, what is missing in words).
CAPABILITIES: Mapping[str, tuple[Callable[[], bool], str]] = {
    "root": (lambda: os.geteuid() == 0, "root privileges"),
    "bcc": (_has_bcc, "the distribution's bcc (package python3-bpfcc)"),
    "tracefs": (lambda: mounted("tracefs", "/sys/kernel/tracing"), "tracefs mounted on /sys/kernel/tracing"),
    "bpffs": (lambda: mounted("bpf", "/sys/fs/bpf"), "a BPF file system mounted on /sys/fs/bpf"),
    "netns": (
        lambda: Path("/proc/self/ns/net").exists() and os.geteuid() == 0 and shutil.which("ip") is not None,
        "network namespaces (CONFIG_NET_NS, root, package iproute2)",
    ),
    "second kernel": (_has_second_kernel, "a second kernel and its emulator (make setup-vm)"),
    "wheel": (
        lambda: importlib.util.find_spec("wheel") is not None and importlib.util.find_spec("setuptools") is not None,
        "the packages setuptools and wheel",
    ),
}


def missing(name: str) -> str | None:
    """What is missing for this capability or command, in words; None when it is there."""
    if name in COMMANDS:
        return None if shutil.which(name) else f"the command {name} (package {COMMANDS[name]})"
    there, words = CAPABILITIES[name]
    return None if there() else words


def require(*names: str) -> None:
    """Skip the calling test unless all these are there; the skip says what is missing.

    With SWERVE_FORBID_SKIPS=1 the test fails instead (tests/conftest.py turns every skip into a failure).
    """
    lacking = [words for name in names if (words := missing(name))]
    if lacking:
        pytest.skip("missing: " + "; ".join(lacking))


def wait_until(condition: Callable[[], T | None], deadline_s: float, what: str, every_s: float | None = None) -> T:
    """Ask again until the condition holds, and return what it returned; fail once the deadline has passed.

    Parameters
    ----------
    condition : callable
        Asked without arguments; holds when what it returns is true.
    deadline_s : float
        How long to wait, before SWERVE_SLOW_FACTOR.
    what : str
        Named in the failure: "the agent's socket appears".
    every_s : float, optional
        How long between two times. By default 10 ms or, of a condition that runs a process, ten times the processor
        time of that, up to 100 ms.
    """
    limit_s = deadline_s * slow_factor()
    end = time.monotonic() + limit_s
    while True:
        before_s = _of_children_s()
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            pytest.fail(f"waited {limit_s:g} s until {what}: it last returned {value!r}", pytrace=True)
        time.sleep(min(0.1, max(0.01, 10 * (_of_children_s() - before_s))) if every_s is None else every_s)


def _of_children_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    check: bool = True,
    timeout_s: float = 60,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text_in: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, its output captured; a failing one fails the test with what it wrote."""
    done = subprocess.run(
        [os.fspath(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout_s * slow_factor(),
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        input=text_in,
        stdin=subprocess.DEVNULL if text_in is None else None,
        check=False,
    )
    if check and done.returncode != 0:
        words = " ".join(os.fspath(part) for part in command)
        pytest.fail(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}", pytrace=True)
    return done


def swerve(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: one of its own takes a third of a second of a processor to begin."""
    from pytools import cli
    from steering.cli import root

    out, errors, codes = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO(), list[int]()
    # In a thread, with which a network namespace ends that a command enters for good.
    thread = threading.Thread(target=lambda: codes.append(cli.run(root, words)), daemon=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        thread.start()
        thread.join()
    out.seek(0)
    done = subprocess.CompletedProcess(words, codes[0], out.read(), errors.getvalue())
    if check and done.returncode != 0:
        said = f"{done.stdout}{done.stderr}"
        pytest.fail(f"swerve {' '.join(words)}: exit code {done.returncode}\n{said}", pytrace=True)
    return done


def mentions(text: str, *facts: str) -> bool:
    """Whether `text` has these figures, names and key words, each whole and in this order, whatever it says between."""
    whole = (rf"(?<![\w.])(?<!\d,){re.escape(each)}(?!\w|[.,]\d)" for each in facts)
    return re.search(".*?".join(whole), text, re.DOTALL) is not None


def not_begun(items: Sequence[Item], begun: Path) -> Iterator[Item]:
    """All tests of each file that nobody has noted in this directory when its turn comes; it is noted then."""
    for path, of_file in itertools.groupby(items, lambda item: item.path):
        try:
            (begun / "+".join(path.parts[-2:])).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from of_file


def lives(pid: int) -> bool:
    """Whether a process runs still; one that has ended stays listed until its parent asks, which may take seconds."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def socket_inodes(pid: int) -> set[str]:
    """The numbers by which /proc/net lists a process's open sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def bring_up(interface: str) -> None:
    """Set an interface of the namespace that the calling thread is in up; no process is started for it."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16sh14x", interface.encode(), 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(asking, get_flags, request), 16)
        fcntl.ioctl(asking, set_flags, struct.pack("16sh14x", interface.encode(), flags | up))


def ip(netns: str, *commands: str) -> None:
    """Give `ip` several commands at once: it is a process, of which an emulated processor starts few a second."""
    run(["ip", "-n", netns, "-batch", "-"], text_in="".join(f"{each}\n" for each in commands))


def joining(far: str, name: str, index: int | None = None) -> str:
    """The command for `ip` that joins its namespace to a far one by a veth pair, an interface of the same name in each.

    The near one has an index that is given, or that no far one gets: the kernel takes an end whose index is its peer's
    for a plain interface, and looks at its carrier only once a second.
    """
    chosen = next(_near_indexes) if index is None else index
    return f"link add {name} index {chosen} type veth peer name {name} netns {far}"


def join(near: str, far: str, name: str, index: int | None = None) -> None:
    """Join two namespaces by a veth pair (see `joining`)."""
    ip(near, joining(far, name, index))


def without_offloads(*namespaces: str, interface: str = "v0") -> None:
    """Have the kernel make every packet and its checksum in full, in each of these namespaces."""
    require("ethtool")
    for namespace in namespaces:
        run(f"ip netns exec {namespace} ethtool -K {interface} tx off rx off gso off gro off".split())


def bytes_of_inner_ways(lab: Any, host: int = 2) -> dict[tuple[int, int], int]:
    """What each way inside a lab's rails has sent towards a host, by rail and way."""
    from pytools.lab import view  # not for every test that imports this module

    return {
        (rail.number, way): sent
        for rail in lab.rails
        for (way, toward), sent in view.sent_bytes(rail.inner).items()
        if toward == host
    }


def pings(place: Any, address: str, source: str = "") -> bool:
    """Whether one ping from a host or a rail of a lab is answered within a second."""
    words = ["ping", "-n", "-c1", "-W1", *(["-I", source] if source else []), address]
    return run(["ip", "netns", "exec", place.netns, *words], check=False).returncode == 0


def wait_for_own_routes(netns: str, *interfaces: str) -> None:
    """Wait for the routes that IPv6 makes by itself: to the link-local address, which comes with the carrier, and to
    every other address of an interface. The kernel makes each a while after it has taken the address, in no order.
    """

    def addresses(table: str, address: int, interface: int, flags: int, wanted: int) -> set[tuple[str, str]]:
        with inside(netns):
            rows = [line.split() for line in Path("/proc/thread-self/net", table).read_text().splitlines()]
        return {(row[interface], row[address]) for row in rows if int(row[flags], 16) & wanted == wanted}

    def are_there() -> bool:
        taken = {each for each in addresses("if_inet6", 0, 5, 4, 0) if each[0] in interfaces}
        with_link_local = {interface for interface, address in taken if address.startswith("fe80")}
        return with_link_local == set(interfaces) and taken <= addresses("ipv6_route", 0, 9, 8, 1 << 31)  # RTF_LOCAL

    wait_until(are_there, 20, f"{', '.join(interfaces)} of {netns} have link-local addresses, and all their own routes")


class Namespace:
    """Rules, routes and nexthops of a network namespace, as `ip` shows them."""

    def __init__(self, netns: str) -> None:
        self.netns = netns

    def ip(self, *words: str) -> str:
        """Run `ip` in it."""
        return run(["ip", "-n", self.netns, *words]).stdout

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """What `ip` shows, in detail."""
        found: list[dict[str, Any]] = json.loads(self.ip("-d", "-j", *words) or "[]")
        return found

    def _listed(self, *whats: str) -> list[dict[str, Any]]:
        words = {"nexthop": ("nexthop",), "rule": ("rule",), "route": ("route", "show", "table", "all")}
        return [row for what in whats or words for family in ("-4", "-6") for row in self.rows(family, *words[what])]

    def others(self) -> list[str]:
        """Every rule, route and nexthop that is not ours, byte by byte, but for times that count down."""
        rows = [row for row in self._listed() if row.get("protocol") != "201"]
        return [json.dumps({name: value for name, value in row.items() if name != "expires"}) for row in rows]

    def ours(self, *whats: str) -> int:
        """How many rules, routes and nexthops of ours there are, or of some of these."""
        return sum(row.get("protocol") == "201" for row in self._listed(*whats))


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """None is to be had meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
