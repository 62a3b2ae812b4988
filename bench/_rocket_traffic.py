"""Incast over a lab: one host asks many at once and waits for all replies, beside bulk connections. One thread.

Requests are sent by a schedule, whether earlier ones are complete or not, and timed from when they were due. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import functools
import itertools
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final, Self

from pytools.errors import SwerveError
from pytools.kernel.netns import inside
from pytools.lab import Host

SECOND: Final = 1_000_000_000
_REQUEST: Final = b"r"
_PORT: Final = 7000
_CHUNK: Final = bytes(1 << 16)
_DRAIN_NS: Final = 10 * SECOND


@dataclass(frozen=True)
class Load:
    """What is asked for, and what runs beside it."""

    reply_bytes: int
    every_ns: int  # between two requests
    requests: int
    bulk: int = 0  # connections that always have data, from the first senders
    congestion: str = "cubic"
    protocol: int = socket.IPPROTO_TCP
    warm_ns: int = SECOND  # bulk alone, before the first request


@dataclass
class Played:
    """What came of a load."""

    completions_ns: list[int] = field(default_factory=list)
    unfinished: int = 0
    bulk_bytes: list[int] = field(default_factory=list)  # received by each connection between first and last request
    reply_bytes: int = 0  # received meanwhile of all replies
    longest_gap_ns: int = 0  # in which a bulk connection received nothing
    span_ns: int = 0
    slowest_ns: list[int] = field(default_factory=list)  # when each sender's reply to the slowest request was complete


@dataclass
class _Reply:
    """One sender's end and the asker's end of a connection."""

    asker: socket.socket
    sender: socket.socket
    owed: int = 0
    received: int = 0
    last_ns: int = 0
    longest_gap_ns: int = 0
    done: list[int] = field(default_factory=list)  # when its reply to each request was complete


class Incast:
    """Connections between one asker and many senders, kept over several loads."""

    def __init__(self, asker: Host, senders: Sequence[Host], load: Load) -> None:
        self._load = load
        self._stack = ExitStack()
        self._poll = self._stack.enter_context(selectors.DefaultSelector())
        self._buffer = bytearray(1 << 18)
        self._replies = [self._reply(asker, sender) for sender in senders]
        self._bulks = [self._reply(asker, sender) for sender in itertools.islice(itertools.cycle(senders), load.bulk)]
        self._due: list[int] = []
        self._done: list[int] = []  # of each request, when its last reply was complete

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _reply(self, asker: Host, sender: Host) -> _Reply:
        with inside(sender.netns):
            listener = self._socket()
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((sender.service, 0))
            listener.listen()
            with inside(asker.netns):
                asking = self._socket()
            asking.settimeout(10)
            asking.bind((asker.service, 0))
            asking.connect(listener.getsockname())
            sending = self._stack.enter_context(listener.accept()[0])
        for each in (asking, sending):
            each.setblocking(False)
        return _Reply(self._stack.enter_context(asking), sending)

    def _socket(self) -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, self._load.protocol)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._load.congestion.encode())
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    # ---- one load ----

    def play(self, begun: Callable[[], None], ended: Callable[[], None]) -> Played:
        """Run the load to its end; these are called before the first request and a period after the last one."""
        load, played = self._load, Played()
        for reply in self._replies:
            self._poll.register(reply.sender, selectors.EVENT_READ, (self._asked, reply))
            self._poll.register(reply.asker, selectors.EVENT_READ, (self._replied, reply))
        self._start_bulk(self._bulks)
        begun()
        begin = time.monotonic_ns()
        bulk, replies = ([each.received for each in some] for some in (self._bulks, self._replies))
        for reply in self._bulks:
            reply.last_ns, reply.longest_gap_ns = begin, 0
        for number in range(load.requests):
            due = begin + number * load.every_ns
            self._serve(due, lambda: False)
            self._due.append(due)
            for reply in self._replies:
                with suppress(BlockingIOError):
                    reply.asker.send(_REQUEST)
        end = begin + load.requests * load.every_ns
        self._serve(end, lambda: False)
        played.span_ns = time.monotonic_ns() - begin
        ended()
        played.bulk_bytes = [reply.received - was for reply, was in zip(self._bulks, bulk, strict=True)]
        played.reply_bytes = sum(each.received for each in self._replies) - sum(replies)
        played.longest_gap_ns = max((reply.longest_gap_ns for reply in self._bulks), default=0)
        self._serve(end + _DRAIN_NS, lambda: len(self._done) == load.requests)
        played.completions_ns = [done - due for done, due in zip(self._done, self._due, strict=False)]
        played.unfinished = load.requests - len(self._done)
        slowest = max(range(len(self._done)), key=played.completions_ns.__getitem__)
        played.slowest_ns = [each.done[slowest] - self._due[slowest] for each in self._replies]
        return played

    def shares(self, settle_ns: int, span_ns: int) -> list[int]:
        """What each bulk connection receives in a time; the second half of them begins a warm-up after the first."""
        half = len(self._bulks) // 2
        for bulks in (self._bulks[:half], self._bulks[half:]):
            self._start_bulk(bulks)
        self._serve(time.monotonic_ns() + settle_ns, lambda: False)
        before = [reply.received for reply in self._bulks]
        self._serve(time.monotonic_ns() + span_ns, lambda: False)
        return [reply.received - was for reply, was in zip(self._bulks, before, strict=True)]

    def all_reduce(self, ring: Sequence[tuple[Host, Host]], chunk_bytes: int, times: int) -> list[int]:
        """Ring all-reduces beside the bulk connections, one after the other; how long each took.

        Each hop, from a host to another, carries a chunk as soon as the hop before has brought one, twice less one
        round.
        """
        self._start_bulk(self._bulks)
        hops = [self._reply(after, before) for before, after in ring]
        chunks, took = 2 * (len(ring) - 1), list[int]()
        for place, hop in enumerate(hops):
            act = functools.partial(self._passed_on, hops[(place + 1) % len(hops)], chunk_bytes, chunks)
            self._poll.register(hop.asker, selectors.EVENT_READ, (act, hop))
            self._poll.register(hop.sender, selectors.EVENT_READ, (self._send, hop))
        for _ in range(times):
            begin = time.monotonic_ns()
            for hop in hops:
                hop.received, hop.owed = 0, chunk_bytes
            for hop in hops:
                self._send(hop)
            self._serve(begin + _DRAIN_NS, lambda: all(hop.received == chunks * chunk_bytes for hop in hops))
            if any(hop.received != chunks * chunk_bytes for hop in hops):
                raise SwerveError("an all-reduce does not end")
            took.append(time.monotonic_ns() - begin)
        return took

    def _passed_on(self, following: _Reply, chunk_bytes: int, chunks: int, hop: _Reply) -> None:
        """What a host receives, but for the last chunk, it sends on, chunk by chunk."""
        before = hop.received // chunk_bytes
        self._arrived(hop)
        for number in range(before + 1, hop.received // chunk_bytes + 1):
            following.owed += chunk_bytes if number < chunks else 0
        self._send(following)

    def _start_bulk(self, bulks: Sequence[_Reply]) -> None:
        for reply in bulks:
            self._poll.register(reply.sender, selectors.EVENT_WRITE, (self._more, reply))
            self._poll.register(reply.asker, selectors.EVENT_READ, (self._arrived, reply))
        self._serve(time.monotonic_ns() + self._load.warm_ns, lambda: False)

    def _serve(self, until_ns: int, enough: Callable[[], bool]) -> None:
        while (left := until_ns - time.monotonic_ns()) > 0 and not enough():
            for key, _ in self._poll.select(left / SECOND):
                act, reply = key.data
                act(reply)

    def _asked(self, reply: _Reply) -> None:
        """It can be read, or written to."""
        with suppress(BlockingIOError):
            got = reply.sender.recv(1 << 10)
            if not got:
                raise SwerveError("a connection of the incast has ended")
            reply.owed += len(got) * self._load.reply_bytes
        self._send(reply)

    def _send(self, reply: _Reply) -> None:
        with suppress(BlockingIOError):
            while reply.owed:
                reply.owed -= reply.sender.send(_CHUNK[: reply.owed])
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if reply.owed else 0)
        key = self._poll.get_key(reply.sender)
        if key.events != events:
            self._poll.modify(reply.sender, events, key.data)

    def _replied(self, reply: _Reply) -> None:
        self._arrived(reply)
        while len(reply.done) < reply.received // self._load.reply_bytes:
            reply.done.append(time.monotonic_ns())
        while len(self._done) < min(len(each.done) for each in self._replies):
            self._done.append(time.monotonic_ns())

    def _arrived(self, reply: _Reply) -> None:
        with suppress(BlockingIOError):
            got = reply.asker.recv_into(self._buffer)
            if not got:
                raise SwerveError("a connection of the incast has ended")
            reply.received += got
            now = time.monotonic_ns()
            reply.longest_gap_ns, reply.last_ns = max(reply.longest_gap_ns, now - reply.last_ns), now

    def _more(self, reply: _Reply) -> None:
        with suppress(BlockingIOError):
            reply.sender.send(_CHUNK)
