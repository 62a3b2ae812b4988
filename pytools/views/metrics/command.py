"""`swerve metrics`: what a running agent tells, for Prometheus; the agent may come and go meanwhile.

The main thread takes signals in lots, the server's threads read the model: one lock between them, held for a lot or for
the making of one exposition, during which signals go on being read. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from pytools import log
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.ipc.socket_files import peer
from pytools.signals import AnySignal, Self
from pytools.units import MS
from pytools.views.metrics.exposition import empty
from pytools.views.metrics.families import FAMILIES
from pytools.views.metrics.model import TYPES, Model
from pytools.views.metrics.series import expose
from pytools.views.metrics.server import Address, MetricsServer

_TURN_S: Final = 0.05  # the longest wait for signals
_LOT_S: Final = 0.005  # they come in bursts: some more follow the first at once
_WAITING: Final = 200_000  # signals read while the model was in use; with more of them the agent has to wait
_CONNECT_NS: Final = 500 * MS
_FORGET_NS: Final = 60_000 * MS
LOOK_EVERY_NS: Final = 15_000 * MS  # at what the agent costs
_LOOK_NS: Final = 5_000 * MS  # how long to wait for it
_LOOK_SIGNALS: Final = 2  # the first covers the time since the last look, the second has run times of programs
_ONCE_NS: Final = 2_500 * MS  # two long windows, and a little
_ONCE_AT_MOST_NS: Final = 8_000 * MS


class Feed:
    """Keeps a model fed by an agent that comes and goes.

    Parameters
    ----------
    lock : Lock
        Held while the model changes.
    say : callable
        Takes a line for people.
    """

    def __init__(self, path: Path, model: Model, lock: threading.Lock, say: Callable[[str], None]) -> None:
        self._path, self._model, self._lock, self._say = path, model, lock, log.without_repeats(say)
        self._client: Client | None = None
        self._look: Client | None = None
        self._agent: int | None = None  # its process
        self._missed = (0, 0)  # dropped and malformed, of connections that are over
        self._connect_ns = self._look_ns = self._look_until_ns = self._forget_ns = 0
        self._look_signals = self.looks = 0  # looks: how often it was learnt what the agent costs
        self._waiting: list[AnySignal] = []  # read, and not yet in the model

    def turn(self, now_ns: int) -> None:
        """Take what there is, without waiting; connect when it is time to."""
        if self._client is None and now_ns >= self._connect_ns:
            self._connect(now_ns)
        if self._client is not None:
            self._look_at_cost(now_ns)
            self._read(self._client)
        if now_ns >= self._forget_ns:
            self._forget_ns = now_ns + _FORGET_NS
            with self._lock:
                self._model.forget(now_ns)

    def wait(self) -> None:
        """Wait for signals, not for long."""
        poll = select.poll()
        if self._client is not None:
            poll.register(self._client, select.POLLIN)
        if poll.poll(_TURN_S * 1e3):
            time.sleep(_LOT_S)

    def close(self) -> None:
        self._end_look()
        if self._client is not None:
            self._client.close()

    def _connect(self, now_ns: int) -> None:
        self._connect_ns = now_ns + _CONNECT_NS
        try:
            client = Client(self._path, TYPES, coarse=True)
        except SwerveError as error:
            self._say(f"waiting for the agent: {error}")
            return
        agent = agent_pid(client)
        with self._lock:
            self._model.connect(now_ns, same_agent=agent == self._agent)
        self._client, self._agent, self._look_ns = client, agent, now_ns
        self._say("connected to the agent")

    def _read(self, client: Client) -> None:
        try:
            self._waiting += client.read()
        except SwerveError as error:
            self._disconnect(client, error)
            return
        if self._lock.acquire(blocking=len(self._waiting) > _WAITING):
            try:
                self._hand_over(client)
            finally:
                self._lock.release()

    def _hand_over(self, client: Client) -> None:
        self._model.take(self._waiting)
        self._waiting.clear()
        dropped, malformed = self._missed
        self._model.dropped, self._model.malformed = dropped + client.dropped, malformed + client.malformed

    def _disconnect(self, client: Client, error: SwerveError) -> None:
        self._say(f"no metrics but totals: {error}")
        with self._lock:
            self._hand_over(client)
            self._model.disconnect()
        self._missed = (self._missed[0] + client.dropped, self._missed[1] + client.malformed)
        client.close()
        self._client = None
        self._end_look()

    def _look_at_cost(self, now_ns: int) -> None:
        """Ask for `self` for a second now and then: the kernel times every program while anybody does."""
        if self._look is None:
            if now_ns < self._look_ns:
                return
            self._look_ns, self._look_until_ns = now_ns + LOOK_EVERY_NS, now_ns + _LOOK_NS
            with contextlib.suppress(SwerveError):  # the next time; that it is gone is seen where signals are read
                self._look = Client(self._path, frozenset({"self"}))
                self._look_signals = 0
            return
        try:
            signals = self._look.read()
        except SwerveError:
            self._end_look()
            return
        self._waiting += signals
        self._look_signals += sum(isinstance(each, Self) for each in signals)
        if self._look_signals >= _LOOK_SIGNALS or now_ns >= self._look_until_ns:
            self.looks += self._look_signals >= _LOOK_SIGNALS
            self._end_look()

    def _end_look(self) -> None:
        if self._look is not None:
            self._look.close()
            self._look = None


def agent_pid(client: Client) -> int:
    """The process that serves: another one is another agent, whose counters begin anew."""
    with socket.socket(fileno=os.dup(client.fileno())) as sock:
        return peer(sock)[0]


class ModelCollector(Collector):
    """What the library asks for metrics; `instance` is the name of the agent's instance."""

    def __init__(self, model: Model, lock: threading.Lock, instance: str) -> None:
        self._model, self._lock, self._instance = model, lock, instance

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(expose(self._model, time.monotonic_ns(), self._instance))

    def describe(self) -> Iterable[Metric]:
        """All that there can be, so that a scrape may ask for some by name."""
        return [empty(name) for name in FAMILIES]


def serve(path: Path, instance: str, address: Address) -> None:
    """Serve metrics until SIGTERM or an interrupt.

    Raises
    ------
    SwerveError
        If the address cannot be had.
    """
    model, lock, stop = Model(), threading.Lock(), threading.Event()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)  # what this process costs
    registry.register(ModelCollector(model, lock, instance))

    def refused() -> None:
        with lock:
            model.refused += 1

    def paused() -> None:
        with lock:
            model.paused += 1

    with (
        contextlib.closing(Feed(path, model, lock, _say)) as feed,
        contextlib.closing(MetricsServer(address, registry, refused, paused)) as server,
        _on_term(stop.set),
    ):
        _say(f"metrics of {instance} at {server.url}")
        while not stop.is_set():
            feed.turn(time.monotonic_ns())
            feed.wait()


def once(path: Path, instance: str, out: BinaryIO, as_openmetrics: bool) -> bool:
    """Write one exposition; whether there was an agent that told something. Why there was none is said."""
    model, lock, said = Model(), threading.Lock(), list[str]()
    registry = CollectorRegistry()
    registry.register(ModelCollector(model, lock, instance))
    with contextlib.closing(Feed(path, model, lock, said.append)) as feed:
        began_ns = now_ns = time.monotonic_ns()
        feed.turn(now_ns)
        while model.connected and now_ns - began_ns < _ONCE_AT_MOST_NS:
            if feed.looks and now_ns - began_ns >= _ONCE_NS:
                break
            feed.wait()
            now_ns = time.monotonic_ns()
            feed.turn(now_ns)
        out.write((openmetrics.generate_latest if as_openmetrics else generate_latest)(registry))
        out.flush()
    if model.connected and not model.signals:
        said.append(f"the agent at {path} says nothing; `swerve self` and `swerve doctor` say what is wrong")
    heard = model.connected and bool(model.signals)
    if not heard:
        _say(said[-1].removeprefix("waiting for the agent: "))
    return heard


def _say(text: str) -> None:
    log.logger().info("%s", text)


@contextlib.contextmanager
def _on_term(stop: Callable[[], None]) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
