"""What waits to be sent to one client of the bus: urgent lines overtake the others once the client is behind. Pure.

Both kinds have a queue and a bound of their own. While a client keeps up, lines leave in the order of their arrival.
"""

from __future__ import annotations

from collections import deque

_Queued = tuple[int, bytes]  # number in the order of arrival, line


class _Queue:
    def __init__(self) -> None:
        self.lines: deque[_Queued] = deque()
        self.size = 0

    def put(self, number: int, line: bytes) -> None:
        self.lines.append((number, line))
        self.size += len(line)

    def pop(self) -> _Queued:
        first = self.lines.popleft()
        self.size -= len(first[1])
        return first

    def put_back(self, first: _Queued) -> None:
        self.lines.appendleft(first)
        self.size += len(first[1])


class Outbox:
    """Lines for one client.

    Parameters
    ----------
    most_bytes : int
        How much of each kind may wait.
    chunk_bytes : int
        How much `take` gives at once; with more than that waiting a client is behind.
    """

    def __init__(self, most_bytes: int, chunk_bytes: int) -> None:
        self._most, self._chunk = most_bytes, chunk_bytes
        self._bulk, self._urgent = _Queue(), _Queue()
        self._taken: list[tuple[_Queue | None, _Queued]] = []
        self._begun = b""  # rest of a line of which the client has the beginning
        self._number = 0
        self.blocked = False  # whether the client took less than it was given

    def __bool__(self) -> bool:
        return bool(self._begun or self._urgent.lines or self._bulk.lines)

    @property
    def bulk_bytes(self) -> int:
        """How much waits that is not urgent."""
        return self._bulk.size

    @property
    def behind(self) -> bool:
        """Whether the client reads more slowly than it is told."""
        return self.blocked or self._bulk.size > self._chunk

    def fits(self, line: bytes, urgent: bool) -> bool:
        return (self._urgent if urgent else self._bulk).size + len(line) <= self._most

    def put(self, line: bytes, urgent: bool) -> None:
        """Have a line sent, newline included."""
        self._number += 1
        (self._urgent if urgent else self._bulk).put(self._number, line)

    def take(self, urgent_only: bool = False) -> bytes:
        """What is to be sent next; empty for nothing. `sent` must follow."""
        size = len(self._begun)
        if self._begun:
            self._taken.append((None, (0, self._begun)))
        urgent_first = self.behind
        while size < self._chunk and (queue := self._next(urgent_first, urgent_only)) is not None:
            first = queue.pop()
            self._taken.append((queue, first))
            size += len(first[1])
        return b"".join(line for _, (_, line) in self._taken)

    def _next(self, urgent_first: bool, urgent_only: bool) -> _Queue | None:
        urgent, bulk = self._urgent, self._bulk
        if urgent_only or not bulk.lines:
            return urgent if urgent.lines else None
        if not urgent.lines:
            return bulk
        return urgent if urgent_first or urgent.lines[0][0] < bulk.lines[0][0] else bulk

    def sent(self, count: int) -> None:
        """So many bytes of what was taken last went out; the rest waits again."""
        taken, self._taken, self._begun = self._taken, [], b""
        left: list[tuple[_Queue | None, _Queued]] = []
        for queue, (number, line) in taken:
            if count >= len(line):
                count -= len(line)
            elif count > 0 or queue is None:
                self._begun, count = line[count:], 0
            else:
                left.append((queue, (number, line)))
        for queue, first in reversed(left):
            if queue is not None:
                queue.put_back(first)
        self.blocked = bool(left or self._begun)
