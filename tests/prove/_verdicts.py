"""What clients of running agents can conclude of their paths: which are dead, which are congested, and what is done.

A thread reads the agents' sockets, as a controller does, and classifies each path with its siblings as soon as it is
told of. Times are CLOCK_MONOTONIC nanoseconds, which all hosts of a lab share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pytools.lab import Host
from pytools.signals import Act, AnySignal, Path, PathDelay, PathLiveness, PathState
from steering.deciding.failure_classifier import classify
from steering.demo.observe import AgentListener
from steering.policy.conditions import Silence

RULE: Final = Silence(signal="silence")  # by its defaults; a path's own limit may be larger
CONGESTED_NS: Final = 5_000_000
_TYPES: Final = frozenset({"path_liveness", "path_delay", "path_state", "act"})


class Dead(NamedTuple):
    """A path that was called dead."""

    at_ns: int  # when its agent looked
    heard_ns: int
    path: Path
    silent_ns: int
    missed: int  # with what extra probes add
    limit: int  # how many had to be missed before a rule acts
    text: str
    answered_ns: int  # when its last answer came: no later than whatever killed it

    @property
    def acted_on(self) -> bool:
        """Whether a rule for silence would act: the path is called dead."""
        return self.enough and self.silent_ns >= RULE.lasting

    @property
    def enough(self) -> bool:
        """Whether it is no chance any more: the kernel moves packets, but it may be a queue."""
        return self.missed >= max(RULE.missed, self.limit)


class Congested(NamedTuple):
    """A path over which probes waited."""

    at_ns: int
    path: Path


@dataclass
class Heard:
    """What was concluded, in the order in which it was heard."""

    dead: list[Dead] = field(default_factory=list)
    congested: list[Congested] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    looks: int = 0  # how often a path was classified
    missing: int = 0  # how often with a probe unanswered

    def called_dead(self) -> list[Dead]:
        """Those on which a rule would act."""
        return [each for each in self.dead if each.acted_on]

    def dead_enough(self) -> list[Dead]:
        """Those whose packets the kernel moves."""
        return [each for each in self.dead if each.enough]


class Verdicts(AgentListener[Heard]):
    """Classifies paths."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._live: dict[Path, PathLiveness] = {}
        self._states: dict[Path, PathState] = {}
        super().__init__(hosts, _TYPES, Heard())

    def _hear(self, signals: Sequence[AnySignal]) -> None:
        now_ns, told = time.monotonic_ns(), []
        for signal in signals:
            if isinstance(signal, PathLiveness):
                self._live[signal.path] = signal
                told.append(signal)
            elif isinstance(signal, PathDelay):
                if max(signal.forward.queueing_p50_ns or 0, signal.overtaken_forward_p50_ns or 0) > CONGESTED_NS:
                    self._heard.congested.append(Congested(signal.at_ns, signal.path))
            elif isinstance(signal, PathState) and signal.host == signal.path.source:
                self._states[signal.path] = signal
            elif isinstance(signal, Act) and signal.outcome == "applied":
                self._heard.acts.append(signal)
        for live in told:
            self._classify(live, now_ns)

    def _classify(self, live: PathLiveness, now_ns: int) -> None:
        ends = live.path.source, live.path.destination
        siblings = [
            each for path, each in self._live.items() if (path.source, path.destination) == ends and path != live.path
        ]
        found = classify(live, siblings)
        self._heard.looks += 1
        self._heard.missing += live.missed > 0
        if found.cause == "path_dead":
            facts = (
                live.path,
                live.silent_ns,
                live.missed + live.missed_extra,
                live.limit or 0,
                found.text,
                live.last_answer_ns or 0,
            )
            self._heard.dead.append(Dead(live.at_ns, now_ns, *facts))

    def states(self) -> dict[Path, PathState]:
        """What the controllers said last of their own paths."""
        with self._lock:
            return dict(self._states)

    def _next(self) -> Heard:
        return Heard()
