"""The bus: signals from the sources to whoever asked for them, in this process and over a Unix socket.

In the process a `Bus` hands each signal to its subscribers. `Server` (ipc/server.py) carries them to other
processes and carries in what those publish; `Client` (ipc/client.py) is the other end. Nothing here waits for
a slow reader: queues are bounded, and what does not fit is counted. One thread; so is each `Client`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from pytools.ipc.client import AgentGoneError, Client
from pytools.ipc.wire import TAGS, TYPES, URGENT, check_types
from pytools.signals import AnySignal, encode

__all__ = ["TYPES", "AgentGoneError", "Bus", "Client", "Subscription"]


class Published:
    """One signal on its way to several readers: encoded at most once."""

    __slots__ = ("_line", "signal", "tag")

    def __init__(self, signal: AnySignal) -> None:
        self.signal: Final = signal
        self.tag: Final = TAGS[type(signal)]
        self._line: bytes | None = None

    def line(self) -> bytes:
        """The signal as JSON, and a newline."""
        if self._line is None:
            self._line = encode(self.signal) + b"\n"
        return self._line


class Subscription:
    """A bounded queue of signals in this process; when it is full the newest are dropped, and counted.

    Urgent signals have a bound of their own: no others keep them out.
    """

    def __init__(self, capacity: int, leave: Callable[[Subscription], None]) -> None:
        self._queue: deque[AnySignal] = deque()
        self._capacity = capacity
        self._leave = leave
        self._urgent = 0  # how many wait
        self.dropped = self.dropped_urgent = 0  # urgent ones are in both

    def offer(self, published: Published) -> None:
        urgent = published.tag in URGENT
        if (self._urgent if urgent else len(self._queue) - self._urgent) >= self._capacity:
            self.dropped += 1
            self.dropped_urgent += urgent
            return
        self._urgent += urgent
        self._queue.append(published.signal)

    def read(self) -> list[AnySignal]:
        """What has arrived since the last call, oldest first."""
        signals = list(self._queue)
        self._queue.clear()
        self._urgent = 0
        return signals

    def close(self) -> None:
        self._leave(self)


class Bus:
    """Hands each published signal to those who asked for its type."""

    def __init__(self) -> None:
        self._readers: dict[object, tuple[frozenset[str] | None, Callable[[Published], None]]] = {}
        self._asked: dict[object, frozenset[str] | None] = {}  # what is made for the sake of each
        self._detailed: set[object] = set()  # who reads details, too (ipc/wire.py)
        self._by_type: dict[type, tuple[Callable[[Published], None], ...]] = {}

    def publish(self, signal: AnySignal) -> None:
        """Hand a signal on; costs one dictionary look-up when nobody wants it."""
        offers = self._by_type.get(type(signal))
        if not offers:
            return
        published = Published(signal)
        for offer in offers:
            offer(published)

    def wanted(self, type_tag: str, details: bool = False) -> bool:
        """Whether anybody would receive a signal of this type now, or is waiting for its details."""
        return any(
            types is None or type_tag in types
            for reader, types in self._asked.items()
            if not details or reader in self._detailed
        )

    def subscribe(self, types: frozenset[str] | None, capacity: int = 4096) -> Subscription:
        """Receive signals of these types (None: all) in this process; at most `capacity` wait to be read."""
        check_types(types)
        subscription = Subscription(capacity, self.remove)
        self.add(subscription, types, subscription.offer, details=True)
        return subscription

    def add(
        self,
        reader: object,
        types: frozenset[str] | None,
        offer: Callable[[Published], None],
        besides: frozenset[str] = frozenset(),
        details: bool = False,
    ) -> None:
        """Offer this reader each signal of these types, in the call of whoever publishes it.

        Parameters
        ----------
        besides : frozenset of str
            Types that it is offered only while somebody else wants them: they are not made for this reader.
        details : bool
            Whether it waits for details: sources look more often while somebody does.
        """
        self._asked[reader] = types
        (self._detailed.add if details else self._detailed.discard)(reader)
        self._readers[reader] = (None if types is None else types | besides, offer)
        self._rebuild()

    def remove(self, reader: object) -> None:
        self._asked.pop(reader, None)
        self._detailed.discard(reader)
        if self._readers.pop(reader, None) is not None:
            self._rebuild()

    def _rebuild(self) -> None:
        # A new table each time: a publish that is under way keeps the one it started with.
        self._by_type = {
            kind: tuple(offer for types, offer in self._readers.values() if types is None or tag in types)
            for kind, tag in TAGS.items()
        }
