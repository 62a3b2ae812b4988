"""Asks NCCL's RAS, which runs in the processes of a job, about all ranks of the job.

The protocol is that of NCCL's own client `ncclras` (NCCL 2.28.7 to 2.30.7, src/ras): lines over TCP, a handshake, and
JSON after `set format json`, at the end of which the server closes. NCCL 2.28.7 to 2.28.9 leave a comma out in the
entry of each rank that did not answer. What answers may be anybody's program: all that is read is bounded, in size and
in time, and only an address of the host itself is asked. `ask` blocks: `Asking` runs it in a thread.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.printable import printable
from pytools.signals import UNREADABLE, RasState

PORT: Final = 28028
ASK_S: Final = 8.0  # a server with silent peers answers after a second, or five more (src/ras/ras_internal.h)
_CONNECT_S: Final = 1.0
_MOST_BYTES: Final = 4 << 20  # some 7,000 ranks
_CHUNK: Final = 1 << 16
_WAKE_S: Final = 0.25  # to see that nobody wants the answer any more
_REQUESTS: Final = (  # with the beginning of the answer to each
    ("client protocol 2", "server protocol ", "what listens there is not RAS"),
    ("timeout 1", "ok", "what listens there is not RAS"),
    ("set format json", "ok", "RAS gives no JSON: NCCL is older than 2.28.7"),
)
_NO_COMMA: Final = re.compile(rb'("nvml_dev"[ ]?:[ ]?-?\d{1,9})(\s{1,64}")')


class Rank(msgspec.Struct, frozen=True):
    rank: int
    host: str = ""
    pid: int = -1
    nvml_dev: int = -1
    collective_counts: dict[str, int] = {}

    @property
    def operations(self) -> int:
        return sum(self.collective_counts.values())


class Missing(msgspec.Struct, frozen=True):
    """A rank that did not."""

    rank: int


class Communicator(msgspec.Struct, frozen=True):
    """A communicator, with the ranks that are known of it."""

    hash: str
    size: int
    secondary_hash: str = ""
    ranks: list[Rank] = []
    missing_ranks: list[Missing] = []


class Report(msgspec.Struct, frozen=True):
    communicators: list[Communicator]


@dataclass(frozen=True, slots=True)
class Answer:
    state: RasState
    reason: str = ""
    communicators: list[Communicator] = field(default_factory=list)


_decoder = msgspec.json.Decoder(Report)


def parse(text: bytes) -> Answer:
    """The answer to `verbose status` in JSON, also where the comma is missing."""
    for attempt in (text, _NO_COMMA.sub(rb"\1,\2", text)):
        try:
            report = _decoder.decode(attempt)
        except UNREADABLE as error:
            why = printable(str(error))[:200]
            continue
        found = report.communicators
        silent, ranks = max(((len(each.missing_ranks), len(each.ranks)) for each in found), default=(0, 0))
        if silent:  # a rank is in several communicators: that with the most says how many
            return Answer("unresponsive", f"{silent} of {silent + ranks} ranks did not answer RAS", found)
        return Answer("ok", "", found)
    return Answer("invalid", f"the answer is no report of RAS: {why}")


def behind(before: Sequence[Communicator], now: Sequence[Communicator]) -> list[tuple[Communicator, Rank, int]]:
    """Communicator, rank, and operations that it is behind, the most first; from two answers.

    RAS collects the counts of all ranks within milliseconds, not at one instant. So a rank counts as behind when it has
    begun fewer collective operations by now than another rank of its communicator had begun one answer earlier.
    """
    reached = {
        (each.hash, each.secondary_hash): max((rank.operations for rank in each.ranks), default=0) for each in before
    }
    found = [
        (each, rank, missing)
        for each in now
        for rank in each.ranks
        if (missing := reached.get((each.hash, each.secondary_hash), 0) - rank.operations) > 0
    ]
    return sorted(found, key=lambda item: (-item[2], item[1].rank))


def of_job(communicators: Sequence[Communicator], size: int | None, pids: Mapping[int, set[int]]) -> dict[int, Rank]:
    """The ranks of the communicator that numbers them as the job does, by number; empty if there is none.

    It has all ranks, and those of this host have the processes that they have here. A process number alone says
    nothing: on other hosts, and in containers, others have the same.
    """
    for each in communicators:
        found = {rank.rank: rank for rank in each.ranks}
        if each.size == size and all(number in found and found[number].pid in pids[number] for number in pids):
            return found
    return {}


def endpoint(address: str) -> tuple[str, int] | None:
    """Host and port of NCCL_RAS_ADDR, empty for the default; None if it is not an address or `localhost`.

    >>> endpoint(""), endpoint("[::1]:7"), endpoint("10.0.0.1:28029")
    (('localhost', 28028), ('::1', 7), ('10.0.0.1', 28029))
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        host, port = address, str(PORT)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return None
    host = host.strip("[]") or "localhost"
    if host == "localhost":
        return host, int(port)
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, host)
            return host, int(port)
    return None


def ask(where: tuple[str, int], wanted: Callable[[], bool] = lambda: True, limit_s: float = ASK_S) -> Answer:
    """Ask the server at an address of this host, in the calling thread's network namespace."""
    end_s = time.monotonic() + limit_s
    connected = False
    try:
        with _connect(where) as peer:
            connected = True
            return _conversation(_Lines(peer, wanted, end_s))
    except TimeoutError:
        return Answer("unresponsive", "RAS did not answer in time")
    except OSError as error:
        if connected:
            return Answer("unresponsive", f"RAS ended the connection: {error.strerror or error}")
        return Answer("absent", f"nothing answers at {where[0]}:{where[1]}: {error.strerror or error}")


def _conversation(lines: _Lines) -> Answer:
    """What a server answers that somebody has connected to."""
    for request, expected, otherwise in _REQUESTS:
        answer = lines.request(request)
        if not answer.lower().startswith(expected):
            return Answer("invalid", f"{otherwise} ({answer[:60]!r})")
    lines.send("verbose status")
    text = lines.rest()
    return Answer("invalid", f"the answer is larger than {_MOST_BYTES >> 20} MiB") if text is None else parse(text)


class _Lines:
    def __init__(self, peer: socket.socket, wanted: Callable[[], bool], end_s: float) -> None:
        self._peer, self._wanted, self._end_s = peer, wanted, end_s
        self._read = bytearray()

    def request(self, line: str) -> str:
        """Send a line, and return the line that comes back."""
        self.send(line)
        for _ in self._chunks():
            if b"\n" in self._read or len(self._read) > 1024:
                break
        text, _, rest = bytes(self._read).partition(b"\n")
        self._read = bytearray(rest)
        return printable(text[:200].decode("utf-8", "replace").strip())

    def send(self, line: str) -> None:
        self._peer.sendall(line.encode() + b"\n")

    def rest(self) -> bytes | None:
        """Everything until the server closes; None if that is too much."""
        for _ in self._chunks():
            if len(self._read) > _MOST_BYTES:
                return None
        return bytes(self._read)

    def _chunks(self) -> Iterator[None]:
        while True:
            left_s = self._end_s - time.monotonic()
            if left_s <= 0 or not self._wanted():
                raise TimeoutError
            self._peer.settimeout(min(left_s, _WAKE_S))
            try:
                chunk = self._peer.recv(_CHUNK)
            except TimeoutError:
                continue
            if not chunk:
                return
            self._read += chunk
            yield


def _connect(where: tuple[str, int]) -> socket.socket:
    """A connection to an address of this host, from the same address: to none of another host.

    Raises
    ------
    OSError
        If it is none of this host, or nobody listens.
    """
    host, port = where
    hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    for each in hosts:
        peer = socket.socket(socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM)
        try:
            peer.settimeout(_CONNECT_S)
            peer.bind((each, 0))
            peer.connect((each, port))
        except OSError:
            peer.close()
            if each == hosts[-1]:
                raise
        else:
            return peer
    raise AssertionError("no address")


class Asking:
    """One question under way, in a thread of its own.

    Parameters
    ----------
    where : tuple
        Host and port.
    inside : int, optional
        Process whose network namespace to ask in; None: ours.
    """

    def __init__(self, where: tuple[str, int], inside: int | None) -> None:
        self._where, self._inside = where, inside
        self._wanted = True
        self.began_ns = time.monotonic_ns()
        self.answer: Answer | None = None
        threading.Thread(target=self._run, name="swerve-ras", daemon=True).start()

    def give_up(self) -> None:
        """Let the thread end, which takes it a second at most."""
        self._wanted = False

    def _run(self) -> None:
        try:
            if self._inside is not None:
                netns.enter_of(self._inside)
            self.answer = ask(self._where, lambda: self._wanted)
        except SwerveError as error:
            self.answer = Answer("absent", str(error))
        except Exception as error:  # whatever a stranger sends must not leave the question open
            self.answer = Answer("invalid", f"{type(error).__name__}: {printable(str(error))[:200]}")
