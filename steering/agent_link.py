"""The controller's connection to the agent: measurements in, states and acts out, connected again when it breaks.

One thread; CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from pytools import log
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.signals import Act, AnySignal, PathState

_CONNECT_NS: Final = 500_000_000
_REPEAT_NS: Final = 1_000_000_000
MOST_WAITING: Final = 1024  # acts; more than a policy lets happen in minutes


class AgentLink:
    """A client of the agent that survives the agent.

    Parameters
    ----------
    kinds : frozenset of str
        The signals to ask for.
    received : callable
        Takes what arrives, as soon as it arrives.
    connected : callable
        Called after each new connection: the agent may be another one.
    """

    def __init__(
        self,
        path: Path,
        kinds: frozenset[str],
        received: Callable[[list[AnySignal]], None],
        connected: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._kinds, self._received, self._connected = path, kinds, received, connected
        self._say = log.without_repeats(say)
        self._selector: selectors.BaseSelector | None = None
        self._client: Client | None = None
        self._connect_ns = self._repeat_ns = 0
        self._told: dict[object, tuple[object, ...]] = {}
        self._waiting: deque[Act] = deque(maxlen=MOST_WAITING)  # the oldest go
        self._untold = 0  # acts that went so
        self._missed = (0, 0)  # over earlier connections

    @property
    def missed(self) -> tuple[int, int]:
        """Signals that we read too slowly for, and how many of them were urgent."""
        client = self._client
        now = (client.dropped, client.dropped_urgent) if client is not None else (0, 0)
        return self._missed[0] + now[0], self._missed[1] + now[1]

    def register(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def tick(self, now_ns: int) -> None:
        """Connect, if it is time to."""
        if self._client is not None or now_ns < self._connect_ns or self._selector is None:
            return
        self._connect_ns = now_ns + _CONNECT_NS
        try:
            self._client = Client(self._path, self._kinds)
        except SwerveError as error:
            self._say(f"waiting for the agent: {error}")
            return
        self._say("connected to the agent")
        self._told.clear()
        self._selector.register(self._client, selectors.EVENT_READ, self._readable)
        self._connected()
        while self._waiting and self._client is not None:
            self.publish(self._waiting.popleft())
        if self._untold:
            self._say(f"{self._untold} acts that were made without an agent are in `swerve steer history` alone")
            self._untold = 0

    def poll(self) -> None:
        """Hand on what has arrived, without waiting."""
        self._readable(0)

    def publish(self, signal: AnySignal) -> None:
        """Publish a signal; without an agent an act waits for the next, all else is dropped: it will be told anew."""
        try:
            if self._client is not None:
                self._client.publish(signal)
                return
        except SwerveError as error:
            self._disconnect(error)
        if isinstance(signal, Act):
            self._untold += len(self._waiting) == MOST_WAITING
            self._waiting.append(signal)

    def publish_states(self, states: Iterable[PathState]) -> None:
        """Publish every path's state once a second, and at once when it changed."""
        now = time.monotonic_ns()
        everything = now >= self._repeat_ns
        if everything:
            self._repeat_ns = now + _REPEAT_NS
        for state in states:
            facts = (state.state, state.since_ns, state.weight_wanted, state.weight_actual)
            if everything or self._told.get(state.path) != facts:
                self._told[state.path] = facts
                self.publish(state)

    def close(self) -> None:
        """Hand over what is still to be published, and disconnect."""
        if self._client is not None:
            self._client.close()

    def _readable(self, _events: int) -> None:
        if self._client is None:
            return
        try:
            signals = self._client.read()
        except SwerveError as error:
            self._disconnect(error)
            return
        if signals:
            self._received(signals)

    def _disconnect(self, error: SwerveError) -> None:
        self._say(f"holding: {error}")
        self._missed = self.missed
        if self._client is not None and self._selector is not None:
            self._selector.unregister(self._client)
            self._client.close()
        self._client = None
