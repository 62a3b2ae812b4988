"""The observer: listens to all agents of a lab, and keeps what is needed to judge a phase afterwards.

One thread of its own reads the agents' sockets. Times are CLOCK_MONOTONIC nanoseconds, which all hosts of a lab share.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab.topology import Host
from pytools.signals import Act, AnySignal, Path, PathDelay, PathState, ProbeSamples

_TYPES = frozenset({"probe_samples", "path_delay", "path_state", "act"})
_LOST_NS = np.inf
_Heard = TypeVar("_Heard")


@dataclass
class Record:
    """What was heard, in the order in which it was heard."""

    delays: list[PathDelay] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    states: list[PathState] = field(default_factory=list)
    latest: dict[tuple[str, Path], PathState] = field(default_factory=dict)  # by host; kept from one take to the next
    samples: dict[Path, list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # sent_ns, forward_ns; infinite when lost


class AgentListener(Generic[_Heard]):
    """Listens to the agents of these hosts from the moment it is made until closed.

    Parameters
    ----------
    heard : object
        What `_hear` adds to; the thread that listens may do so before this returns.
    """

    def __init__(self, hosts: Sequence[Host], types: frozenset[str], heard: _Heard) -> None:
        self._lock = threading.Lock()
        self._heard = heard
        self._stop = False
        self._failure: SwerveError | None = None
        self._clients = [Client(directories.agent_socket(host.netns), types) for host in hosts]
        self._thread = threading.Thread(target=self._listen, name="agent listener", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for client in self._clients:
                    selector.register(client, selectors.EVENT_READ, client)
                while not self._stop:
                    for key, _ in selector.select(0.1):
                        signals = key.data.read()
                        with self._lock:
                            self._hear(signals)
        except SwerveError as error:
            self._failure = error

    def _hear(self, signals: Sequence[AnySignal]) -> None:
        raise NotImplementedError

    def _next(self) -> _Heard:
        """What to add to once the present one is taken."""
        raise NotImplementedError

    def wait_for(self, condition: Callable[[_Heard], bool], timeout_s: float) -> bool:
        """Wait until what was heard since `take` fulfils a condition; whether it did in time.

        Raises
        ------
        SwerveError
            If an agent went away.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if condition(self._heard):
                    return True
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)

    def take(self) -> _Heard:
        """What was heard since the last call.

        Raises
        ------
        SwerveError
            If an agent went away.
        """
        if self._failure is not None:
            raise self._failure
        with self._lock:
            heard, self._heard = self._heard, self._next()
        return heard

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        for client in self._clients:
            client.close()


class Observer(AgentListener[Record]):
    """Keeps what is needed to judge a phase; the present states stay known from one take to the next."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        super().__init__(hosts, _TYPES, Record())

    def _hear(self, signals: Sequence[AnySignal]) -> None:
        record = self._heard
        for signal in signals:
            if isinstance(signal, ProbeSamples):
                kept = record.samples[signal.path]
                # Not the extra ones: they would let the moment of an onset count several times.
                for seq, sent_ns, forward_ns in zip(signal.seq, signal.sent_ns, signal.forward_ns, strict=True):
                    if seq not in signal.extra:
                        kept.append((sent_ns, _LOST_NS if forward_ns is None else float(forward_ns)))
            elif isinstance(signal, PathDelay):
                record.delays.append(signal)
            elif isinstance(signal, Act):
                record.acts.append(signal)
            elif isinstance(signal, PathState):
                record.states.append(signal)
                record.latest[signal.host, signal.path] = signal

    def _next(self) -> Record:
        return Record(latest=dict(self._heard.latest))


def in_use(record: Record, idle_interface: str | None, from_ns: int, to_ns: int) -> NDArray[np.float64]:
    """Forward delays of all probes that were sent on a path while it carried weight.

    Parameters
    ----------
    idle_interface : str, optional
        The interface that was taken out by hand.

    Returns
    -------
    ndarray of float64, shape (n,)
        Nanoseconds; infinite for a lost probe.
    """
    kept: list[float] = []
    for path, samples in record.samples.items():
        if path.interface == idle_interface:
            continue
        idle = idle_spans([state for state in record.states if state.path == path], to_ns)
        kept.extend(
            delay
            for sent_ns, delay in samples
            if from_ns <= sent_ns < to_ns and not any(start <= sent_ns < end for start, end in idle)
        )
    return np.array(kept)


def idle_spans(states: Sequence[PathState], to_ns: int) -> list[tuple[int, int]]:
    """When a path carried no weight in the kernel, by what its controller said of it."""
    spans, since = [], None
    for state in sorted(states, key=lambda each: each.at_ns):
        idle = state.weight_actual == 0
        if idle and since is None:
            since = state.at_ns
        elif not idle and since is not None:
            spans.append((since, state.at_ns))
            since = None
    if since is not None:
        spans.append((since, to_ns))
    return spans
