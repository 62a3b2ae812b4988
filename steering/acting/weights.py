"""Changing weights: the intents on disk first, then the kernel, then the read-back; every outcome told.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pytools.errors import SwerveError
from pytools.signals import Act
from steering.acting import journal, messages, settle
from steering.actuators.registry import Actuators
from steering.actuators.weighted import Outcome, among
from steering.deciding.engine import Engine
from steering.plan import Change, Group, Target, Weights, same, title

_SECOND_NS: Final = 1_000_000_000
_RETRY_NS: Final = _SECOND_NS
_RETRY_MAX_NS: Final = 30 * _SECOND_NS


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """What became of the changes of one decision."""

    as_thought: bool  # False when one failed: the kernel is not as it was thought to be
    left: tuple[Change, ...]  # not tried


class Acting:
    """Carries out changes of weights, or says what would be done.

    Parameters
    ----------
    engine : Engine
        Is told what became of each change.
    actuators : Actuators
        Changes the kernel.
    log : Journal
        Has each intent on disk before the kernel is asked.
    host : callable
        Name of this host.
    say : callable
        Takes a line for the log.
    send : callable
        Takes each act, for whoever watches.
    """

    def __init__(
        self,
        engine: Engine,
        actuators: Actuators,
        log: journal.Journal,
        host: Callable[[], str],
        say: Callable[[str], None],
        send: Callable[[Act], None],
    ) -> None:
        self._engine, self._actuators, self._journal = engine, actuators, log
        self._host, self._say, self._send = host, say, send
        self._scope = journal.scope()
        self.first: dict[Target, Group] = {}  # each target before we touched it
        self._told: dict[Target, Weights] = {}  # wanted weights already reported in a dry run
        self._retry: dict[Target, tuple[int, int]] = {}  # when to try again, and the wait after that
        self._unread: dict[Target, tuple[Change, str]] = {}  # changes that may have taken effect, and their names

    # ---- one change ----

    def pretend(self, change: Change) -> None:
        """Say what would be done, once."""
        now = time.monotonic_ns()
        if self._told.get(change.target) != change.after:
            self._told[change.target] = change.after
            self._tell(change, "dry_run", now)
        self._engine.carried_out(change, now)

    def carry_out(self, change: Change, name: str = "") -> bool:
        """Make a change, unless it failed a moment ago; False when the kernel is not as it was thought to be.

        The act gets a new name unless it has one already.
        """
        return self.carry_out_all([change], name=name).as_thought

    def carry_out_all(
        self, changes: Iterable[Change], guarded: Callable[[], bool] = lambda: True, name: str = ""
    ) -> CarriedOut:
        """Make the changes of one decision: all intents in one write to disk, the kernel, all outcomes in one write.

        It stops at a change that fails, and where `guarded`, which is called between two changes, says no. The intents
        of the rest are withdrawn. A change that failed a moment ago is left out.
        """
        now = time.monotonic_ns()
        acts = [
            (change, name or messages.act_id(change.target))
            for change in changes
            if now >= self._retry.get(change.target, (0, 0))[0]
        ]
        try:
            self._journal.write(*(self._entry("intent", act_id, change, change.after) for change, act_id in acts))
        except OSError as error:
            for change, act_id in acts:
                self._failed(change, now, f"the journal cannot be written: {error.strerror}", act_id)
            return CarriedOut(True, ())
        outcomes: list[journal.Entry] = []
        as_thought, tried = True, 0
        for change, act_id in acts:
            if not as_thought or (tried and not guarded()):
                break
            tried += 1
            as_thought = self._carry_out(change, act_id, now, outcomes)
        left = acts[tried:]
        outcomes += [self._entry("failed", act_id, change, change.before) for change, act_id in left]
        self._write_quietly(*outcomes)
        return CarriedOut(as_thought, tuple(change for change, _ in left))

    def _carry_out(self, change: Change, act_id: str, now: int, outcomes: list[journal.Entry]) -> bool:
        """Have the kernel make a change whose intent is on disk; its outcome is added to those to be written."""
        try:
            outcome = self._actuators.apply(self.first[change.target], [change.before], change.after)
        except SwerveError as error:
            outcome = Outcome("failed", change.before, None, str(error))
        if outcome.kind == "applied":
            self._engine.carried_out(change, time.monotonic_ns(), outcome.weights)
            self._retry.pop(change.target, None)
            self._tell(change, "applied", now, outcome.acknowledged_ns, act_id)
            outcomes.append(self._entry("applied", act_id, change, outcome.weights))
            return True
        if outcome.kind in ("failed", "manual"):
            outcomes.append(self._entry("failed", act_id, change, change.before))
        if outcome.kind == "uncertain":
            self._unread[change.target] = change, act_id
        self._failed(change, now, outcome.why, act_id)
        return False

    def read_back(self) -> None:
        """Take note of changes that took effect although that could not be read then: they are nobody else's.

        Raises
        ------
        SwerveError
            If the kernel still cannot be read.
        """
        for target, (change, act_id) in list(self._unread.items()):
            found = self._actuators.weights(self.first[target])
            del self._unread[target]
            if found is None or target not in self._engine.groups or not same(found, change.after):
                continue
            now = time.monotonic_ns()
            self._engine.carried_out(change, now, change.after)
            self._retry.pop(target, None)
            self._tell(change, "applied", now, now, act_id)
            self._log_quietly("applied", act_id, change, change.after)

    def _failed(self, change: Change, now: int, why: str, act_id: str) -> None:
        wait = min(self._retry.get(change.target, (0, _RETRY_NS))[1], _RETRY_MAX_NS)
        self._retry[change.target] = (now + wait, 2 * wait)
        self._engine.rejected(change, why)
        self._say(f"{title(change.target)}: {why}")
        self._tell(change, "failed", now, None, act_id, why)

    def _tell(
        self,
        change: Change,
        outcome: messages.Outcome,
        decided: int,
        acknowledged: int | None = None,
        act_id: str = "",
        failure: str = "",
    ) -> None:
        group = self._engine.groups.get(change.target) or self.first[change.target]
        seen = self._engine.seen(change)
        self._send(messages.act(self._host(), group, change, outcome, seen, decided, acknowledged, act_id, failure))

    # ---- the journal ----

    def _entry(self, kind: journal.Kind, act_id: str, change: Change, weights: Weights) -> journal.Entry:
        return journal.entry_now(
            kind,
            act_id,
            self.first[change.target],
            change.before,
            weights if kind == "applied" else change.after,
            change.because,
            change.under,
            self._scope,
            host=self._host(),
        )

    def _log_quietly(self, kind: journal.Kind, act_id: str, change: Change, weights: Weights) -> None:
        self._write_quietly(self._entry(kind, act_id, change, weights))

    def _write_quietly(self, *entries: journal.Entry) -> None:
        """What is only history: without it the intent stays outstanding, which is the safe side."""
        try:
            self._journal.write(*entries)
        except OSError as error:
            self._say(f"the journal cannot be written: {error.strerror}")

    def settle(self, why: str, only: Target | None = None, alive: Callable[[], object] = lambda: None) -> None:
        """Put the original weights back everywhere, or in one target; `alive` is called before each."""
        decided = time.monotonic_ns()
        settled = settle.settle(
            self._journal,
            self._actuators,
            self._scope,
            "controller",
            lambda each: only in (None, each.target),
            alive,
        )
        for each in settled:
            self._say(f"{each.text}; {why}")
            if each.outcome.kind == "applied":
                self._send(messages.undone(self._host(), each, why, decided))

    def regain(self) -> None:
        """Make again what is gone only because of our acts; see `settle.regain`."""
        decided = time.monotonic_ns()
        done, told = settle.regain(self._journal, self._actuators, self._scope, "controller")
        for text in told:
            self._say(text)
        for each in done:
            self._send(messages.regained(self._host(), each, decided))

    def release(self, known: Group, weights: Weights, why: str) -> None:
        """Tell the guardian, through the journal, that this target is not ours to undo."""
        outstanding = self.outstanding().get(known.target)
        if outstanding is None:
            return
        change = Change(known.target, known.current, weights, why, outstanding.last.under)
        self._log_quietly("released", outstanding.last.act_id, change, weights)

    def adopt(self, groups: Iterable[Group]) -> None:
        """Note what the kernel took with a link, of what others had or of ours: whoever undoes has to expect it."""
        reduced = [group for group in groups if group.current != self.first[group.target].original]
        outstanding = self.outstanding()
        for group in reduced:
            known = outstanding.get(group.target)
            if known is None or not among(group.current, known.ours):
                before = self.first[group.target].original
                change = Change(group.target, before, group.current, "the kernel took it with its link", "")
                self._log_quietly("applied", messages.act_id(group.target), change, group.current)

    def outstanding(self) -> Mapping[Target, journal.Outstanding]:
        """What of ours may be in force."""
        return self._journal.outstanding(self._scope)

    def rotate(self) -> None:
        """Put a long journal aside once nothing in it is outstanding."""
        self._journal.rotate(self._scope)
