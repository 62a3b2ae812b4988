"""Changing weights: the kernel first, then the note; every outcome published. And following what others route.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.units import SECOND
from steering.acting import journal, messages, rollback
from steering.actuators.overlay import Found, Overlay
from steering.deciding.engine import Engine
from steering.plan import Change, Group, Target, Weights, title

_RETRY_NS: Final = SECOND
_RETRY_MAX_NS: Final = 30 * SECOND
_RETRY_FAILURE_NS: Final = 50_000_000  # to leave a dead path
_RETRY_FAILURE_MAX_NS: Final = 100_000_000


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
        Learns what became of each change.
    overlay : Overlay
        Changes the kernel.
    log : Journal
        Where it is noted.
    """

    def __init__(self, engine: Engine, overlay: Overlay, log: journal.Journal, output: messages.Output) -> None:
        self._engine, self._overlay, self._journal, self._output = engine, overlay, log, output
        self._scope = netns.scope()
        self._unreadable = ""  # why the routes could not be read the last time
        self._pretended: dict[Target, Weights] = {}  # wanted weights already reported in a dry run
        self._acts: dict[Target, journal.Entry] = {}  # the last one on each target
        self._retry: dict[Target, dict[Weights, tuple[int, int]]] = {}  # when to try again, and the wait after that

    def pretend(self, change: Change) -> None:
        """Say what would be done, once."""
        now = time.monotonic_ns()
        if self._pretended.get(change.target) != change.after:
            self._pretended[change.target] = change.after
            self._publish(change, "dry_run", now)
        self._engine.carried_out(change, now)

    def carry_out(self, change: Change, name: str = "") -> bool:
        """Make a change, unless it failed a moment ago; False when the kernel is not as it was thought to be.

        The act gets a new name unless it has one already.
        """
        return self.carry_out_all([change], name=name).as_thought

    def carry_out_all(
        self, changes: Iterable[Change], look: Callable[[Change], Change | None] = lambda change: change, name: str = ""
    ) -> CarriedOut:
        """Make the changes of one decision, one by one, and note all outcomes in one write.

        Immediately before the kernel is asked for a change, `look` says what it is now: the same, another one, or None
        for none. It stops at a change that fails. The same change of a target that failed a moment ago is left out.
        """
        due = [change for change in changes if self._is_due(change)]
        notes: list[journal.Entry] = []
        as_thought, tried = True, 0
        for change in due:
            if not as_thought:
                break
            tried += 1
            seen = look(change)
            if seen is not None and self._is_due(seen):
                act_id = name or messages.act_id(seen.target)
                as_thought = self._carry_out(seen, act_id, time.monotonic_ns(), notes)
        self._note(*notes)
        return CarriedOut(as_thought, tuple(due[tried:]))

    def _is_due(self, change: Change) -> bool:
        failed = self._retry.get(change.target, {}).get(change.after)
        return failed is None or time.monotonic_ns() >= failed[0]

    def _wait(self, change: Change, now: int) -> None:
        """Try this change of this target later, and others at any time."""
        known = {after: each for after, each in self._retry.get(change.target, {}).items() if now - each[0] < each[1]}
        first, most = (_RETRY_FAILURE_NS, _RETRY_FAILURE_MAX_NS) if change.failure else (_RETRY_NS, _RETRY_MAX_NS)
        wait = min(self._retry.get(change.target, {}).get(change.after, (0, first))[1], most)
        self._retry[change.target] = known | {change.after: (now + wait, 2 * wait)}

    def _carry_out(self, change: Change, act_id: str, now: int, notes: list[journal.Entry]) -> bool:
        weights, why = change.after, ""
        try:
            weights = self._overlay.apply(change.target, change.after)
        except SwerveError as error:
            why = str(error)
        acknowledged = time.monotonic_ns()
        group = self._engine.groups[change.target]
        facts = (change.before, weights, change.because, change.under, self._scope)
        notes.append(journal.entry_now("failed" if why else "applied", act_id, group, *facts, host=self._output.host))
        if why:
            self._wait(change, now)
            self._engine.rejected(change, why)
            self._output.say(f"{title(change.target)}: {why}")
            self._publish(change, "failed", now, None, act_id, why)
            return False
        self._acts[change.target] = notes[-1]
        self._engine.carried_out(change, time.monotonic_ns(), weights)
        self._retry.pop(change.target, None)
        self._publish(change, "applied", now, acknowledged, act_id)
        return True

    def _publish(
        self,
        change: Change,
        outcome: messages.Outcome,
        decided: int,
        acknowledged: int | None = None,
        act_id: str = "",
        failure: str = "",
    ) -> None:
        group, seen = self._engine.groups[change.target], self._engine.seen(change)
        self._output.send(
            messages.act(self._output.host, group, change, outcome, seen, decided, acknowledged, act_id, failure)
        )

    def _note(self, *entries: journal.Entry) -> None:
        try:
            self._journal.write(*entries)
            why = self._journal.failure()
        except OSError as error:
            why = error.strerror or str(error)
        if why:  # it is history: what is in force is in the kernel
            self._output.say(f"the journal cannot be written: {why}")

    def take_back(self, why: str) -> None:
        """Take everything back, and note and publish it.

        Raises
        ------
        SwerveError
            If the kernel refuses.
        """
        decided = time.monotonic_ns()
        self._overlay.off()
        self.note_undone(why, decided)

    def note_undone(self, why: str, decided: int) -> None:
        """Note and publish that everything was taken back: our rules are deleted."""
        try:
            done = rollback.note(self._journal, self._scope, "controller", why)
        except OSError as error:
            self._output.say(f"the journal cannot be written: {error.strerror}")
            return
        for each in done:
            self._output.say(f"{each.text}; {why}")
            self._output.send(messages.undone(self._output.host, each, why, decided))

    def refresh(self, now: int, managed: Callable[[Found], Iterable[str]]) -> bool:
        """Have the overlay follow the routes of others, and tell the engine which targets there are.

        `managed` takes what was found, and says what there is to say about it. False when the routes cannot be read:
        everything stays as it is known.
        """
        try:
            found = self._overlay.refresh()
        except SwerveError as error:
            if self._unreadable != str(error):
                self._output.say(f"cannot read or follow the routes: {error}")
            self._unreadable = str(error)
            return False
        self._unreadable = ""
        for text in (*found.events, *managed(found)):
            self._output.say(text)
        for target, known in self._engine.groups.items():
            if target not in found.groups and not known.beside:
                gone = "gone for now, with links or hops" if target in found.lost else "gone"
                self._output.say(f"{title(target)}: {gone}")
        self.follow(found.groups)
        self._engine.arrange(found.groups.values(), found.targets_of, now, found.lost, found.unlinked)
        return True

    def follow(self, groups: Mapping[Target, Group]) -> None:
        """Note what others made of weights that are in force; to be called before the engine hears of these groups."""
        notes = []
        for target, known in self._engine.groups.items():
            group = groups.get(target)
            if known.current != known.original and (group is None or group.current == group.original):
                why = "its route changed" if group is not None else "its route is gone"
                self._acts.pop(target, None)
                notes.append(self._entry("undone", known, known.current, known.original, why))
        for target, group in groups.items():
            before = self._engine.groups.get(target)
            changed = before is None or (before.current, before.members) != (group.current, group.members)
            if changed and group.current != group.original:
                notes.append(self._still_in_force(group))
        self._note(*notes)

    def _still_in_force(self, group: Group) -> journal.Entry:
        """The act that a target's weights come from, as it is now; one that was split off another has none yet."""
        now = self._entry(
            "applied", group, group.original, group.current, "its route changed: what was left stays left"
        )
        act = self._acts.get(group.target)
        if act is not None:
            now = replace(now, act_id=act.act_id, before=act.before, because=act.because, under=act.under)
        self._acts[group.target] = now
        return now

    def _entry(self, kind: journal.Kind, group: Group, before: Weights, after: Weights, why: str) -> journal.Entry:
        name = messages.act_id(group.target)
        return journal.entry_now(kind, name, group, before, after, why, "", self._scope, host=self._output.host)

    def rotate(self) -> None:
        """Put a long journal aside."""
        self._journal.rotate()
