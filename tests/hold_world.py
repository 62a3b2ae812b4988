"""Hosts that send through one queue, and hold packets by a law: a simulation, exact to the byte and the nanosecond.

Each host has an interface of its own rate. All packets, probes too, pass one first-in first-out queue of a fixed size
in bytes, which drops what does not fit. Connections follow CUBIC as in RFC 9438 (without HyStart) with selective
acknowledgments, the loss rule of three packets, tail loss probes, and Linux's least retransmission timeout of 200 ms.
A connection never has more than four packets below it on its own host, as TCP small queues have it. `kind="rate"`
sends by the largest rate of acknowledgment instead and has no answer to loss: a rough BBR. Times are nanoseconds;
seeded.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pytools.sources.probing import held_paths

MS: Final = 1_000_000
SECOND: Final = 1_000_000_000
PACKET: Final = 1514
PROBE: Final = 128
BELOW: Final = 4  # packets of a connection below it
LEAST_RTO: Final = 200 * MS
TICK: Final = 4 * MS


class Law(Protocol):
    """What a host knows of one destination."""

    def sample(self, now_ns: int, sent_ns: int, queue_ns: int) -> object:
        """Take in what a probe found."""

    def release(self, now_ns: int, wire_bytes: int) -> int:
        """When a packet may leave; 0: at once."""


class World:
    """Events in the order of their times."""

    def __init__(self, seed: int) -> None:
        self.now, self.random = 0, random.Random(seed)
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: int, do: Callable[..., None], *arguments: Any) -> None:
        """Have something done at a time that has not passed."""
        assert time >= self.now
        self._count += 1
        heapq.heappush(self._events, (time, self._count, do, arguments))

    def run(self, until: int) -> None:
        """Do all that comes before `until`."""
        while self._events and self._events[0][0] < until:
            self.now, _, do, arguments = heapq.heappop(self._events)
            do(*arguments)
        self.now = until


@dataclass
class Queue:
    """The bottleneck: bytes a second, room in bytes, and what it did."""

    world: World
    rate: int
    room: int
    passed: int = 0
    dropped: int = 0
    offered: int = 0
    longest: int = 0
    _free: int = 0
    _held: deque[tuple[int, int]] = field(default_factory=deque)
    _bytes: int = 0

    def enter(self, size: int) -> int | None:
        """When a packet that comes now has passed; None: dropped."""
        now = self.world.now
        while self._held and self._held[0][0] <= now:
            self._bytes -= self._held.popleft()[1]
        self.offered += 1
        if self._bytes + size > self.room:
            self.dropped += 1
            return None
        self._free = max(self._free, now) + size * SECOND // self.rate
        self._held.append((self._free, size))
        self._bytes += size
        self.passed += size
        self.longest = max(self.longest, self._bytes)
        return self._free


@dataclass
class Net:
    """The same for all hosts: propagation to the queue and on, the way back, and how hosts probe."""

    world: World
    queue: Queue
    line: int = 1_250_000_000
    there_ns: int = 50_000
    back_ns: int = 50_000
    every_ns: int = held_paths.LEAST_NS
    apart_bytes: int = held_paths.APART_BYTES
    most_ns: int = held_paths.MOST_NS
    late_ns: int = 0  # answers come this much later
    error_ns: Callable[[int, int], int] = lambda host, now: 0


class Host:
    """An interface, a law (or none), and its probes."""

    def __init__(self, net: Net, number: int, law: Law | None) -> None:
        self.net, self.number, self.law, self.world = net, number, law, net.world
        self._free = self._sent_bytes = self._probed_bytes = 0
        self._probed_ns = -net.most_ns
        self.held_packets = 0
        self.held_ns = 0
        if law:
            self.world.at(self.world.random.randrange(net.every_ns), self._probe)

    def send(self, size: int, arrived: Callable[[], None], left: Callable[[], None]) -> None:
        """Hold a packet as the law says, then send it."""
        self._sent_bytes += size
        at = self.law.release(self.world.now, size) if self.law else 0
        if at:
            self.held_packets += 1
            self.held_ns += at - self.world.now
            self.world.at(at, self._transmit, size, arrived, left)
        else:
            self._transmit(size, arrived, left)

    def _transmit(self, size: int, arrived: Callable[[], None], left: Callable[[], None]) -> None:
        self._free = max(self._free, self.world.now) + size * SECOND // self.net.line
        self.world.at(self._free, left)
        self.world.at(self._free + self.net.there_ns // 2, self._reach, size, arrived)

    def _reach(self, size: int, arrived: Callable[[], None]) -> None:
        passed = self.net.queue.enter(size)
        if passed is not None:
            self.world.at(passed + self.net.there_ns // 2, arrived)

    def _probe(self) -> None:
        """Send one if enough bytes were sent since the last, or that is long ago (pacer.c)."""
        sent = self.world.now
        self.world.at(sent + self.net.every_ns, self._probe)
        few = self._sent_bytes - self._probed_bytes < self.net.apart_bytes
        if few and sent < self._probed_ns + self.net.most_ns:
            return
        self._probed_bytes, self._probed_ns = self._sent_bytes, sent
        self._transmit(PROBE, lambda: self._answer(sent), lambda: None)

    def _answer(self, sent: int) -> None:
        least = self.net.there_ns // 2 * 2 + PROBE * SECOND // self.net.line + PROBE * SECOND // self.net.queue.rate
        queueing = max(0, self.world.now - sent - least + self.net.error_ns(self.number, self.world.now))
        self.world.at(self.world.now + self.net.back_ns + self.net.late_ns, self._take, sent, queueing)

    def _take(self, sent: int, queueing: int) -> None:
        assert self.law
        self.law.sample(self.world.now, sent, queueing)


class Flow:
    """One connection: sends what it is given, in packets."""

    def __init__(self, host: Host, kind: str = "cubic", most_window: int = 4096) -> None:
        self.host, self.world, self.kind, self.most_window = host, host.world, kind, most_window
        self.delivered = self.timeouts = self.resent = 0
        self._window, self._threshold = 10.0, 1e9
        self._to_send = self._next = self._below = 0
        self._out: dict[int, tuple[int, int]] = {}  # packet: when it was sent, in which order; oldest first
        self._lost: deque[int] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()  # told when so many packets have arrived
        self._received: set[int] = set()
        self._order = self._newest = self._recover = 0
        self._most, self._since = 0.0, -1
        self._rtt, self._varied, self._backoff, self._alarm = MS, MS // 2, 0, 0  # as the handshake has found it
        self._least_rtt = 0
        self._rates: deque[tuple[int, float]] = deque()
        self._acked: deque[int] = deque()

    def give(self, size: int, done: Callable[[], None] | None = None) -> None:
        """Have `size` bytes sent; `done` is called when the receiver has them all."""
        self._to_send += -(-size // 1448)
        if done:
            self._waiting.append((self._to_send, done))
        self._push()

    def _push(self) -> None:
        while self._below < BELOW and len(self._out) < min(int(self._window), self.most_window):
            if self._lost:
                packet = self._lost.popleft()
                if packet in self._received:
                    continue
                self.resent += 1
            elif self._next < self._to_send:
                packet, self._next = self._next, self._next + 1
            else:
                return
            self._transmit(packet)
            self._arm()

    def _transmit(self, packet: int) -> None:
        self._order += 1
        order, sent = self._order, self.world.now
        self._out[packet] = (sent, order)
        self._below += 1
        self.host.send(PACKET, lambda: self._arrive(packet, order, sent), self._leave)

    def _leave(self) -> None:
        self._below -= 1
        self._push()

    def _arrive(self, packet: int, order: int, sent: int) -> None:
        if packet not in self._received:
            self._received.add(packet)
            self.delivered += 1
            while self._waiting and self.delivered >= self._waiting[0][0]:
                self._waiting.popleft()[1]()
        self.world.at(self.world.now + self.host.net.back_ns, self._acknowledged, packet, order, sent)

    def _acknowledged(self, packet: int, order: int, sent: int) -> None:
        known = self._out.get(packet)
        if known is None or known[1] != order:
            return
        del self._out[packet]
        now, rtt = self.world.now, self.world.now - sent
        self._varied = (3 * self._varied + abs(self._rtt - rtt)) // 4
        self._rtt = (7 * self._rtt + rtt) // 8
        self._least_rtt = min(self._least_rtt or rtt, rtt)
        self._backoff = 0
        self._newest = max(self._newest, order)
        self._grow(now)
        for other, (_, its) in list(self._out.items()):
            if its > self._newest - 3:
                break
            self._lose(other, its)
        self._arm()
        self._push()

    def _lose(self, packet: int, order: int) -> None:
        del self._out[packet]
        self._lost.append(packet)
        if order > self._recover and self.kind == "cubic":
            self._recover = self._order
            self._most, self._since = self._window, self.world.now
            self._threshold = self._window = max(2.0, self._window * 0.7)

    def _grow(self, now: int) -> None:
        if self.kind == "rate":
            self._acked.append(now)
            while self._acked[0] < now - max(self._least_rtt, MS):
                self._acked.popleft()
            rate = len(self._acked) / max(self._least_rtt, MS)
            while self._rates and self._rates[-1][1] <= rate:
                self._rates.pop()
            self._rates.append((now, rate))
            while self._rates[0][0] < now - 10 * self._rtt:
                self._rates.popleft()
            self._window = max(4.0, 2 * self._rates[0][1] * self._least_rtt)
            return
        if len(self._out) + 1 < int(self._window) // 2:
            return  # the window is not what limits it
        if self._window < self._threshold:
            self._window += 1
            return
        if self._since < 0:
            self._most, self._since = self._window, now
        root = (self._most * 0.3 / 0.4) ** (1 / 3)
        target = 0.4 * ((now - self._since + self._rtt) / SECOND - root) ** 3 + self._most
        friendly = 9 * 0.3 / (2 - 0.3) / 3
        self._window += max(friendly, min(target - self._window, self._window / 2)) / self._window

    def _arm(self) -> None:
        self._alarm += 1
        if self._out:
            timeout = max(LEAST_RTO, self._rtt + 4 * self._varied) << min(self._backoff, 6)
            self.world.at(self.world.now + timeout, self._time_out, self._alarm)
            tail = 2 * self._rtt + (LEAST_RTO if len(self._out) == 1 else 2 * TICK)
            if not self._backoff and tail < timeout:
                self.world.at(self.world.now + tail, self._probe_tail, self._alarm)

    def _probe_tail(self, alarm: int) -> None:
        """RFC 8985: send the newest packet again, so that its acknowledgment shows what is lost."""
        if alarm == self._alarm and self._out and self._below < BELOW:
            packet = max(self._out, key=lambda number: self._out[number][1])
            del self._out[packet]
            self._transmit(packet)
            self.resent += 1

    def _time_out(self, alarm: int) -> None:
        if alarm != self._alarm or not self._out:
            return
        self.timeouts += 1
        self._backoff += 1
        self._threshold, self._window = max(2.0, self._window * 0.7), 1.0
        self._since = -1
        self._lost = deque(sorted({*self._lost, *self._out}))
        self._out.clear()
        self._recover = self._order
        self._push()
