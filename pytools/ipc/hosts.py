"""The bus between hosts: signed messages between agents over zenoh, from peer to peer.

Best effort: nothing here waits for a peer, and what is lost is counted. The agent's thread signs and verifies; zenoh's
threads only move bytes, and hand them over through a bounded ring. zenoh is imported when a bus is made: an
agent without a key file never pays for it. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import stat
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pytools import config, directories
from pytools.errors import SwerveError, UsageError
from pytools.ipc.sealed import MAX_BYTES, MAX_NAME, MAX_PAYLOAD, Sealer, derived

if TYPE_CHECKING:
    import zenoh

_KEY_BYTES: Final = 32  # at least
_PROBE_KEY_BYTES: Final = 16  # of SipHash
_ARRIVED: Final = 512  # messages that wait for the agent; older ones give way, and count as lost
_QUEUE_BYTES: Final = 8 << 20  # that wait to be read, of each topic
_LEAVE_S: Final = 0.5
_POLL_NS: Final = 100_000_000  # while a peer has not proved itself
_CALM_NS: Final = 800_000_000  # else only for challenges: whoever receives looks by itself
_ADDRESSES_NS, _NO_ADDRESS_NS = 10_000_000_000, 500_000_000  # so often we look at which our addresses are
# All of zenoh's work on one thread: it moves bytes, and little else. As it comes it starts eight.
_RUNTIME: Final = (
    "(app: (worker_threads: 1), net: (handover: app), acc: (handover: app), tx: (handover: app), rx: (handover: app))"
)
_CAUSES: Final = ("malformed", "oversize", "foreign", "forged", "misdirected", "unconfirmed", "replayed", "lost")
_OURS: Final = ("unsent", "unwanted", "full", "unopened")


class HostBus:
    """Sends to, and receives from, the agents of the configured peers.

    Enter the network namespace first: zenoh's threads start here and stay in it, and a process has them once.

    Parameters
    ----------
    host : str
        Our name, as the peers' configurations have it.
    peers : sequence of Peer
        Who is believed, and where they are; several addresses of one name are one peer.
    settings : HostBus
        The port that all use, and the file with the key that all share.

    Raises
    ------
    UsageError
        If there is no key, or our own name is a peer's.
    SwerveError
        If the key is not ours alone, or the port cannot be had.
    """

    def __init__(self, host: str, peers: Sequence[config.Peer], settings: config.HostBus) -> None:
        names = dict.fromkeys(peer.name for peer in peers)
        if host in names:
            raise UsageError(
                f"host {host}: a peer has the same name", f"give each host its own ({directories.page('config.md')})"
            )
        secret = read_key(Path(settings.key_file))
        self.probe_key = derived(secret, "probes")[:_PROBE_KEY_BYTES]  # what probes are signed with
        self._host, self._names, self._port = host, tuple(names), settings.port
        self._addresses = tuple(peer.address for peer in peers)
        # One connection a pair: the name that sorts first connects, to the first address. zenoh would try any other
        # way again and again, only to find that there is a connection.
        # addresses of the peers to which this host connects; the others connect to it
        self.connects_to = tuple({peer.name: peer.address for peer in reversed(peers) if peer.name > host}.values())
        # what seals messages, and refuses those that are forged or old
        self.sealer = Sealer(host, names, derived(secret, "messages"))
        self._password = derived(secret, "connections").hex()
        self._queues: dict[str, list[tuple[str, bytes]]] = {}
        self._queued: Counter[str] = Counter()  # bytes
        self._counts: Counter[str] = Counter()
        self._session: zenoh.Session | None = None
        self._ring: Any = None
        self._publishers: dict[str, zenoh.Publisher] = {}
        self._listening: frozenset[str] = frozenset()
        self._look_ns = 0
        self._open(local_addresses(self._addresses))

    def send(self, topic: str, payload: bytes, to: str | None = None) -> None:
        """Send to one peer, or to every peer; never waits. Who is not there now does not get it.

        Raises
        ------
        UsageError
            If there is no peer of that name.
        """
        if to is not None and to not in self._names:
            raise UsageError(f"{to!r} is not a peer of {self._host}")
        if len(payload) > MAX_PAYLOAD or len(topic.encode()) > MAX_NAME:
            self.sealer.refused["oversize"] += 1
            return
        now_ns = time.monotonic_ns()
        for name in (to,) if to is not None else self._names:
            if self.sealer.confirmed(name, now_ns):
                self._put(name, self.sealer.seal(topic, payload, name))
            else:
                self._counts["unsent"] += 1

    def receive(self, topic: str) -> list[tuple[str, bytes]]:
        """What has come on a topic since the last call, as (sender, payload); only topics asked for once are kept."""
        self._take_arrived()
        messages = self._queues.get(topic, [])
        self._queues[topic] = []
        self._queued[topic] = 0
        return messages

    def confirmed(self) -> list[str]:
        """The peers that have proved lately that they live and have the key."""
        now_ns = time.monotonic_ns()
        return [name for name in self._names if self.sealer.confirmed(name, now_ns)]

    def register(self, selector: selectors.BaseSelector) -> None:
        """Nothing to wait for: what has arrived is looked at when it is time."""

    def tick(self, now_ns: int) -> int:
        """Look at what has arrived, challenge who is unknown or silent; says when to be called next."""
        self._take_arrived()
        for name, message in self.sealer.asks(now_ns):
            self._put(name, message)
        if now_ns >= self._look_ns:
            self._look_ns = now_ns + (_ADDRESSES_NS if self._session else _NO_ADDRESS_NS)
            self._follow(local_addresses(self._addresses))
        return now_ns + (_POLL_NS if len(self.confirmed()) < len(self._names) else _CALM_NS)

    def drops(self) -> dict[str, int]:
        refused = {f"host_bus_{cause}": self.sealer.refused[cause] for cause in _CAUSES}
        return refused | {f"host_bus_{cause}": self._counts[cause] for cause in _OURS}

    def close(self) -> None:
        session, self._session, self._ring = self._session, None, None
        self._publishers = {}
        if session is not None:
            # zenoh waits up to 10 s for an attempt to connect to somebody who does not answer: not we.
            leaving = threading.Thread(target=_leave, args=(session,), name="bus-leaving", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)

    def _take_arrived(self) -> None:
        if self._ring is None:
            return
        now_ns = time.monotonic_ns()
        for _ in range(_ARRIVED):  # what keeps pouring in meanwhile waits for the next turn
            if (sample := self._ring.try_recv()) is None:
                return
            self.accept(bytes(sample.payload), now_ns)

    def accept(self, raw: bytes, now_ns: int) -> None:
        """Open a message and keep what is in it; refusals are counted."""
        received, replies = self.sealer.open(raw, now_ns)
        for name, message in replies:
            self._put(name, message)
        if received is None:
            return
        queue = self._queues.get(received.topic)
        if queue is None:
            self._counts["unwanted"] += 1
        elif self._queued[received.topic] + len(received.payload) > _QUEUE_BYTES:
            self._counts["full"] += 1
        else:
            queue.append((received.sender, received.payload))
            self._queued[received.topic] += len(received.payload)

    def _put(self, to: str, message: bytes) -> None:
        publisher = self._publishers.get(to)
        if publisher is None:
            return
        import zenoh

        with contextlib.suppress(zenoh.ZError):  # the session is gone: close() was called
            publisher.put(message)

    def _follow(self, addresses: frozenset[str]) -> None:
        """Begin anew when peers may know us by an address that was not there before."""
        if addresses <= self._listening:
            return
        self.close()
        try:
            self._open(addresses | self._listening)
        except SwerveError:
            self._listening = frozenset()
            self._counts["unopened"] += 1

    def _open(self, addresses: frozenset[str]) -> None:
        if not addresses:
            return  # no way to any peer yet: tick() looks again
        os.environ.setdefault("ZENOH_RUNTIME", _RUNTIME)
        import zenoh

        settings = _settings(addresses, self.connects_to, self._port)
        try:
            with _held(f"swerve:{self._password}\n") as dictionary:
                login = {"user": "swerve", "password": self._password, "dictionary_file": dictionary}
                settings["transport"]["auth"] = {"usrpwd": login}
                self._session = zenoh.open(zenoh.Config.from_json5(json.dumps(settings)))
            self._ring = self._session.declare_subscriber(
                _key(self._host), zenoh.handlers.RingChannel(_ARRIVED), allowed_origin=zenoh.Locality.REMOTE
            )
            drop = zenoh.CongestionControl.DROP
            self._publishers = {
                name: self._session.declare_publisher(_key(name), congestion_control=drop, express=True)
                for name in self._names
            }
        except zenoh.ZError as error:
            self.close()
            raise SwerveError(
                f"bus: port {self._port} on {', '.join(sorted(addresses))}: {error}",
                f"is another program using it? bus.port names another ({directories.page('config.md')})",
            ) from None
        self._listening = addresses


def read_key(path: Path) -> bytes:
    """The secret in a key file.

    Raises
    ------
    UsageError
        If it cannot be read, or is too short.
    SwerveError
        If somebody else may read it or could have written it.
    """
    try:
        with open(path, "rb", opener=directories.without_waiting) as file:
            status = os.fstat(file.fileno())
            secret = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "make one: head -c 32 /dev/urandom | base64 >FILE") from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path}: not a file")
    if status.st_uid not in (0, os.geteuid()):
        raise SwerveError(f"{path}: belongs to user {status.st_uid}", "make it root's: chown root FILE")
    if status.st_mode & 0o077:
        raise SwerveError(f"{path}: others may read or write it", "chmod 600 FILE, and make a new key")
    if len(secret) < _KEY_BYTES:
        raise UsageError(f"{path}: {len(secret)} bytes, must be at least {_KEY_BYTES}", "make a longer one")
    return secret


def local_addresses(peers: Iterable[str]) -> frozenset[str]:
    """Our addresses on the way to these: what the kernel would send from. Sends nothing."""
    found = set()
    for address in peers:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # any port does: connecting a datagram socket sends nothing
            found.add(sock.getsockname()[0])
    return frozenset(found)


@contextlib.contextmanager
def _held(text: str) -> Iterator[str]:
    """A file with this text that lies nowhere, for as long as it is read: zenoh takes its passwords from files."""
    fd = os.memfd_create("swerve", os.MFD_CLOEXEC)
    try:
        os.write(fd, text.encode())
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _leave(session: zenoh.Session) -> None:
    import zenoh

    with contextlib.suppress(zenoh.ZError):
        session.close()  # type: ignore[no-untyped-call]


def _key(name: str) -> str:
    """Where messages to a host go."""
    return f"swerve/{urllib.parse.quote(name, safe='')}"


def _endpoint(address: str, port: int) -> str:
    ip = ipaddress.ip_address(address)
    return f"tcp/[{ip}]:{port}" if ip.version == 6 else f"tcp/{ip}:{port}"


def _settings(addresses: Iterable[str], peers: Sequence[str], port: int) -> dict[str, Any]:
    """zenoh's configuration: configured peers alone, nothing searched for, small buffers."""
    queue = {
        # Batching stays on: without it, put() has been seen to wait for ever (1.10.2).
        "batching": {"enabled": True},
        "congestion_control": {"drop": {"wait_before_drop": 0, "max_wait_before_drop_fragments": 1000}},
        "size": {"data": 16},
    }
    return {
        "mode": "peer",
        "listen": {
            "endpoints": [_endpoint(each, port) for each in sorted(addresses)],
            "exit_on_failure": True,
            "timeout_ms": 0,
        },
        "connect": {
            "endpoints": [_endpoint(each, port) for each in peers],
            "exit_on_failure": False,
            "timeout_ms": -1,  # go on in the background for ever
            "retry": {"period_init_ms": 500, "period_max_ms": 4000, "period_increase_factor": 2},
        },
        "scouting": {"delay": 0, "multicast": {"enabled": False}, "gossip": {"enabled": False}},
        "open": {"return_conditions": {"connect_scouted": False, "declares": False}},
        "transport": {
            "shared_memory": {"enabled": False},
            "unicast": {
                "qos": {"enabled": True},  # off, a connection that was once congested stays dead (1.10.2)
                "compression": {"enabled": False},
                "max_sessions": 4 * len(peers) + 16,
                "accept_timeout": 3000,  # whoever has not logged in by then is shown out
            },
            "link": {
                "protocols": ["tcp"],
                "rx": {"buffer_size": 65535, "max_message_size": MAX_BYTES + 1024},
                "tx": {"batch_size": 65535, "queue": queue},
            },
        },
    }
