"""bcc's tcpretrans beside us: the distribution's own, unaltered, on the same segments retransmitted at a high rate.

It wants a kernel's headers for three structures. Where there are none it gets a tree of its own with the few members
that it reads, whose places have not changed for years; the rest of the tree is ours (pytools/kernel/bpf/compiler.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import ADDRESSES, DEVICE, Pair, cpu_s, emit, note, wait_until, whole

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.compiler_client import bpf_dir
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netns import inside
from pytools.sources.programs import TCP_EGRESS

TOOL = "tcpretrans-bpfcc"
EVERY = 5  # of the packets, one is lost
SECONDS, ROUNDS = 3, 3
READ_S = 0.1  # between two readings of our maps: ten times as often as the agent does
SOCK_H = """#include <linux/types.h>
#include <linux/socket.h>
#define AF_INET 2
#define AF_INET6 10
struct sock_common {
	u32 skc_daddr, skc_rcv_saddr, skc_hash;
	u16 skc_dport, skc_num, skc_family;
	volatile u8 skc_state;
};
struct sock { struct sock_common __sk_common; };
struct sk_buff { char before_cb[40]; char cb[48]; };
"""
TCP_H = "struct tcp_skb_cb { u32 seq; };\n"


def compare(loaded: Loaded, pair: Pair) -> None:
    """Lose many segments; say how many each of us missed and what that took of one processor."""
    rounds = []
    with whole(load([drop_every(EVERY)])) as dropper, peer() as tool, contextlib.ExitStack() as stack:
        for end in pair.ends:
            off = ["ip", "netns", "exec", end, "ethtool", "-K", DEVICE, "tso", "off", "gso", "off", "gro", "off"]
            subprocess.run(off, check=True, capture_output=True)
        with inside(pair.ends[1]):
            stack.enter_context(attach_tc(dropper.programs["drop_every"], DEVICE, "ingress"))
        with inside(pair.ends[0]):
            stack.enter_context(attach_tc(loaded.programs[TCP_EGRESS], DEVICE, "egress"))
        for _ in range(ROUNDS):
            rounds.append(one_round(loaded, pair, tool))
    kernel, ours, theirs, our_cpu, their_cpu = (sum(each) for each in zip(*rounds, strict=True))
    note(f"{kernel:.0f} segments retransmitted in {ROUNDS * SECONDS} s; we counted {ours:.0f}, tcpretrans {theirs:.0f}")
    emit("tcp", "lost", kernel - ours, "segments", "lower", peer="tcpretrans", peer_value=kernel - theirs, n=ROUNDS)
    seconds = ROUNDS * SECONDS
    emit(
        *("tcp", "cpu", 100 * our_cpu / seconds, "% of one processor", "lower"),
        peer="tcpretrans",
        peer_value=100 * their_cpu / seconds,
        n=ROUNDS,
    )


def drop_every(packets: int) -> Program:
    """A program that loses one in so many full packets."""
    return Program(str(Path(__file__).with_name("drop_every.c")), ("drop_every",), {"EVERY": packets})


def one_round(loaded: Loaded, pair: Pair, tool: Peer) -> tuple[float, float, float, float, float]:
    """Segments retransmitted, as the kernel, we and the tool have it; processor seconds of us and of the tool."""
    maps = [loaded.map(name) for name in ("tcp_flows", "tcp_paths", "tcp_interfaces", "tcp_counters")]
    program = loaded.programs[TCP_EGRESS]
    before = kernel_segments(pair), our_segments(loaded), tool.segments()
    with RunTime():
        our_s = time.thread_time() + syscall.program_run_time(program)[0] / 1e9
        their_s = tool.cpu_s()
        flow = pair.start(0, ["iperf3", "-c", ADDRESSES[1][0], "-t", str(SECONDS)])
        while flow.poll() is None:
            time.sleep(READ_S)
            for each in maps:
                each.read()
        our_s = time.thread_time() + syscall.program_run_time(program)[0] / 1e9 - our_s
        wait_until(tool.idle, "tcpretrans has printed all that it has")
        their_s = tool.cpu_s() - their_s
    after = kernel_segments(pair), our_segments(loaded), tool.segments()
    kernel, ours, theirs = (now - then for now, then in zip(after, before, strict=True))
    return kernel, ours, theirs, our_s, their_s


def kernel_segments(pair: Pair) -> int:
    """TcpRetransSegs of the sending end."""
    with inside(pair.ends[0]):
        lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def our_segments(loaded: Loaded) -> int:
    """Segments retransmitted, on all interfaces."""
    return int(loaded.map("tcp_interfaces").read()[1]["retransmitted"].sum())


class Peer:
    """The tool at work, its output in a file."""

    def __init__(self, pid: int, output: Path) -> None:
        self._pid, self._output, self._size = pid, output, 0

    def segments(self) -> int:
        """Lines about the sending end so far: the tool prints one per event."""
        return self._output.read_text().count(f" {ADDRESSES[0][0]}:")

    def cpu_s(self) -> float:
        """Processor time of the process, and of its programs in the kernel while those are timed."""
        texts = (each.read_text() for each in Path(f"/proc/{self._pid}/fdinfo").iterdir())
        in_kernel_ns = sum(int(ns) for text in texts for ns in re.findall(r"^run_time_ns:\s*(\d+)", text, re.M))
        return cpu_s(self._pid) + in_kernel_ns / 1e9

    def idle(self) -> bool:
        """Whether nothing was printed for a while."""
        time.sleep(0.5)
        before, self._size = self._size, self._output.stat().st_size
        return before == self._size


@contextlib.contextmanager
def peer() -> Iterator[Peer]:
    """Run the tool."""
    tool = shutil.which(TOOL)
    if tool is None:
        raise SwerveError(f"there is no {TOOL}", "apt-get install bpfcc-tools")
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "output")
        multiarch = sysconfig.get_config_var("MULTIARCH")
        environment = {
            **os.environ,
            "BCC_KERNEL_SOURCE": str(headers(Path(directory, "headers"))),
            "CPATH": f"/usr/include:/usr/include/{multiarch}",
            "PYTHONUNBUFFERED": "1",
        }
        with output.open("wb") as file:
            process = subprocess.Popen(
                ["/usr/bin/python3", tool, "-4"], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        try:
            wait_until(lambda: process.poll() is not None or b"LADDR" in output.read_bytes(), "tcpretrans has started")
            if process.poll() is not None:
                raise SwerveError(f"tcpretrans: {output.read_text().strip().splitlines()[-1]}")
            yield Peer(process.pid, output)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def headers(place: Path) -> Path:
    """A tree of headers as the tool wants it."""
    shutil.copytree(bpf_dir() / "include", place / "include")
    for header in Path("/usr/include/linux").glob("*.h"):
        link = place / "include" / "uapi" / "linux" / header.name
        if not link.exists():
            link.symlink_to(header)
    (place / "include" / "net").mkdir()
    (place / "include" / "net" / "sock.h").write_text(SOCK_H)
    (place / "include" / "net" / "tcp.h").write_text(TCP_H)
    return place
