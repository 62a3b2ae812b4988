"""Local ports of new IPv4 TCP connections: connect.c and the ports it may choose, and SYNs that find out their ways.

Nothing outlives the object: the link and the maps go with the process, and a controller that hangs lets the lease end,
which the kernel looks at for each connection. Times are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace whose
connections are steered.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from pytools.closing import Closing
from pytools.errors import CapabilityError
from pytools.kernel import error_queue, netns
from pytools.kernel.bpf import cgroups, contract, syscall
from pytools.kernel.bpf.compiler_client import Program
from pytools.kernel.bpf.loader import Loaded
from steering.plan import Peer

_HOOKS: Final = {"connect_ipv4": syscall.CONNECT4, "connect_mapped": syscall.CONNECT6}
PROGRAM: Final = Program("connect.c", tuple(_HOOKS), kinds={"connect_ipv4": "connect4", "connect_mapped": "connect6"})


class Ports(Closing):
    """connect.c at work.

    Parameters
    ----------
    loaded : Loaded
        What came of `PROGRAM`; taken over.

    Raises
    ------
    CapabilityError
        If the program could not be loaded, or there is no control group to attach it to.
    SwerveError
        If the kernel refuses to attach it.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._offered: dict[Peer, tuple[int, ...]] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(loaded.close)
            if loaded.failed:
                why = "; ".join(f"{name}: {each}" for name, each in loaded.failed.items())
                raise CapabilityError(f"no port can be chosen: {why}", "`swerve doctor` says what is missing")
            self._settings = undo.enter_context(loaded.mapped("connect_settings"))
            self._ports, self._counters = loaded.map("connect_ports"), loaded.map("connect_counters")
            self._settings.records["netns_cookie"] = netns.cookie()
            for function, hook in _HOOKS.items():
                undo.enter_context(cgroups.attach(loaded.programs[function], hook))
            self._closing = undo.pop_all()

    def close(self) -> None:
        self._closing.close()

    def offer(self, wanted: Mapping[Peer, Sequence[int]]) -> None:
        """The ports of each destination from now on; the kernel chooses those of all others.

        Raises
        ------
        SwerveError
            If the kernel's table takes no more.
        """
        for peer in self._offered.keys() - wanted.keys():
            self._ports.delete(_key(peer, self._ports.key))
            del self._offered[peer]
        for peer, ports in wanted.items():
            if self._offered.get(peer) != tuple(ports):
                entry = np.zeros((), self._ports.value)
                entry["count"] = len(ports)
                entry["ports"][: len(ports)] = ports
                self._ports.update(_key(peer, self._ports.key), entry)
                self._offered[peer] = tuple(ports)

    def renew(self, until_ns: int) -> None:
        self._settings.records["until_ns"] = until_ns

    def counters(self) -> dict[str, int]:
        """What became of connections to these destinations so far, by counter."""
        return dict(zip(contract.counters("connect"), self._counters.read_percpu_sum().tolist(), strict=True))


def _key(peer: Peer, record: np.dtype[np.void]) -> np.void:
    address, port = socket.inet_aton(peer.address), struct.pack(">H", peer.port)
    key: np.void = np.frombuffer(address + port + bytes(2), record)[0]
    return key


# ---- which way a port takes ----

_WAIT_NS: Final = 800_000_000  # for the router's answer: less than until the SYN is sent again
_SETTINGS: Final = Path("/proc/sys/net/ipv4")


class Answer(NamedTuple):
    router: str | None  # where it died; None: nothing was heard
    arrived: bool = False  # at the destination: it answered


class Asking(Closing):
    """SYNs under way, each a connection of its own that dies at a router: it never reaches the destination's host."""

    def __init__(self) -> None:
        self._waiting: list[tuple[socket.socket, int, Callable[[Answer], None]]] = []

    def close(self) -> None:
        for connecting, _, _ in self._waiting:
            connecting.close()
        self._waiting = []

    def ask(self, peer: Peer, port: int, ttl: int, now: int, answered: Callable[[Answer], None]) -> bool:
        """Send a SYN from this port that lives for so many hops; False when the port is taken."""
        connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connecting.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            connecting.setsockopt(*error_queue.RECVERR[4], 1)
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connecting.bind(("", port))
            code = connecting.connect_ex((peer.address, peer.port))
        except OSError:
            connecting.close()
            return False
        if code not in (errno.EINPROGRESS, 0):
            connecting.close()
            return False
        self._waiting.append((connecting, now + _WAIT_NS, answered))
        return True

    def receive(self, now: int) -> None:
        """Take the answers that are there, and give up what was waited for long enough."""
        waiting, self._waiting = self._waiting, []
        for connecting, until_ns, answered in waiting:
            answer = _answer(connecting)
            if answer is None and now < until_ns:
                self._waiting.append((connecting, until_ns, answered))
                continue
            connecting.close()
            answered(answer or Answer(None))


def _answer(connecting: socket.socket) -> Answer | None:
    """What has been heard of a SYN by now."""
    try:
        _, ancillary, _, _ = connecting.recvmsg(0, 512, socket.MSG_ERRQUEUE)
    except OSError:
        try:
            connecting.getpeername()
        except OSError:
            refused = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
            return Answer(None, True) if refused else None
        return Answer(None, True)
    for each in ancillary:
        said = error_queue.entry(*each)
        if said is not None and said.time_exceeded and said.offender:
            return Answer(said.offender)
    return Answer(None)


def drawn_port() -> int:
    """A port that the kernel may choose for connections too, but seldom does: it prefers those of the other parity."""
    first, last = map(int, (_SETTINGS / "ip_local_port_range").read_text().split())
    reserved = set(_ranges((_SETTINGS / "ip_local_reserved_ports").read_text().strip()))
    others = [port for port in range(first + 1, last + 1, 2) if port not in reserved]
    return random.choice(others or range(first, last + 1))


def _ranges(text: str) -> Iterator[int]:
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
