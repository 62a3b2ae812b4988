"""The loop: measurements in, acts out, every act journalled first and guarded by another process.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds; `unix_ns` is for people.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pytools import places
from pytools.errors import SwerveError
from pytools.kernel.netlink import Netlink
from pytools.signals import Act, AnySignal, PathDelay
from steering import journal, messages, settle
from steering.actuators import topology
from steering.actuators.nexthops import NexthopGroups
from steering.agent_link import AgentLink
from steering.engine import Engine
from steering.guardian_link import GuardianLink
from steering.lock import Lock
from steering.plan import Change, Group, Weights
from steering.policy import Policy
from steering.reconcile import reconcile

_TICK_NS: Final = 50_000_000
_SECOND_NS: Final = 1_000_000_000
_REFRESH_NS: Final = _SECOND_NS
_RETRY_NS: Final = _SECOND_NS
_RETRY_MAX_NS: Final = 30 * _SECOND_NS
_LOCK_WAIT_S: Final = 2.0  # a guardian may still be undoing for the controller before us


@dataclass(frozen=True, slots=True)
class Options:
    """How to run.

    `keep` leaves the weights as they are at the end; `policy_name` is said to whoever asks what runs.
    """

    netns: str | None = None
    apply: bool = False
    keep: bool = False
    policy_name: str = ""


class Controller:
    """Steers one namespace under one policy.

    Parameters
    ----------
    policy : Policy
        The policy.
    options : Options
        How to run.
    say : callable
        Takes a line for the log.
    report : callable
        Takes each act, for whoever watches this process.

    Raises
    ------
    RefusedError
        If another controller runs for this instance.
    """

    def __init__(
        self,
        policy: Policy,
        options: Options,
        say: Callable[[str], None],
        report: Callable[[Act], None] = lambda _: None,
    ) -> None:
        self._policy, self._options, self._say, self._report = policy, options, say, report
        self._engine = Engine(policy)
        self._first: dict[int, Group] = {}  # each group before we touched it
        self._selector = selectors.DefaultSelector()
        self._stop: int | None = None  # the signal that ends us
        self._dry: dict[int, Weights] = {}  # wanted weights already reported in a dry run
        self._retry: dict[int, tuple[int, int]] = {}  # group -> when to try again, and the wait after that
        self._refresh_ns = 0
        self._unreadable = ""
        socket_path = places.agent_socket(options.netns)
        self._agent = AgentLink(socket_path, self._received, self._engine.forget_windows, say)
        self._host = places.instance(options.netns)
        self._refused: dict[int, str] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        folder = journal.directory(self._options.netns)
        self._lock = self._stack.enter_context(Lock(folder / journal.LOCK_FILE, _LOCK_WAIT_S))
        self._lock.say({"apply": self._options.apply, "policy": self._options.policy_name})
        self._netlink = self._stack.enter_context(Netlink())
        self._groups = NexthopGroups(self._netlink)
        self._scope = journal.scope()
        self._journal = self._stack.enter_context(journal.Journal(folder / journal.FILE))
        self._stack.callback(self._selector.close)
        self._guardian: GuardianLink | None = None
        if self._options.apply:
            self._settle("it was left by a controller before this one")
            self._journal.rotate(self._scope)
            lease = self._policy.safety.lease
            self._guardian = GuardianLink(self._options.netns, lease, self._lock.fd, self._say)
        elif self._journal.read().outstanding(self._scope):
            self._say("an earlier controller left changes behind; `swerve steer undo` takes them back")

    def run(self) -> int:
        """Steer until SIGTERM or SIGINT; which of them came. Puts the weights back unless told to keep them."""
        with self._stack, _signals(self._selector, self._stopping):
            self._agent.register(self._selector)
            if self._guardian is not None:
                self._guardian.register(self._selector)
            try:
                while self._stop is None:
                    self._turn()
            finally:
                self._finish()
        return self._stop or 0

    def _turn(self) -> None:
        now = time.monotonic_ns()
        wake = now + _TICK_NS
        if self._guardian is not None:
            wake = min(wake, self._guardian.tick(now))
        if now >= self._refresh_ns:
            self._refresh(now)
        self._agent.tick(now)
        self._act(self._engine.changes(time.monotonic_ns()))
        standings = self._engine.standings(time.monotonic_ns())
        self._agent.publish_states(messages.path_state(self._host, each) for each in standings)
        for key, events in self._selector.select(max(0, wake - time.monotonic_ns()) / 1e9):
            key.data(events)

    def _stopping(self, number: int) -> None:
        self._stop = number

    def _received(self, signals: list[AnySignal]) -> None:
        """Digest what arrived, and act on it at once."""
        now = time.monotonic_ns()
        touched = set()
        for each in signals:
            if isinstance(each, PathDelay) and each.path.source == each.host:
                self._host = each.host
                touched.add(self._engine.take(each, now))
        self._act(self._engine.changes(now, [group_id for group_id in touched if group_id is not None]))

    # ---- acts out ----

    def _act(self, changes: list[Change]) -> None:
        for change in changes:
            now = time.monotonic_ns()
            if not self._options.apply:
                self._dry_run(change, now)
            elif now >= self._retry.get(change.group_id, (0, 0))[0]:
                self._carry_out(change, now)

    def _dry_run(self, change: Change, now: int) -> None:
        if self._dry.get(change.group_id) != change.after:
            self._dry[change.group_id] = change.after
            self._tell(change, "dry_run", now)
        self._engine.carried_out(change, now)

    def _carry_out(self, change: Change, now: int) -> None:
        if self._guardian is None or not self._guardian.live():
            self._engine.rejected(change, "held: there is no live guardian")
            return
        act_id = messages.act_id(change.group_id)
        try:
            self._log("intent", act_id, change, change.after)
        except OSError as error:
            self._failed(change, now, f"the journal cannot be written: {error.strerror}", act_id)
            return
        try:
            outcome = self._groups.apply(change.group_id, [change.before], change.after)
        except SwerveError as error:
            self._failed(change, now, str(error), act_id)
            self._log_quietly("failed", act_id, change, change.before)
            return
        if outcome.kind == "applied":
            self._engine.carried_out(change, time.monotonic_ns(), outcome.weights)
            self._retry.pop(change.group_id, None)
            self._tell(change, "applied", now, outcome.acknowledged_ns, act_id)
            self._log_quietly("applied", act_id, change, outcome.weights)
            return
        if outcome.kind in ("failed", "manual"):
            self._log_quietly("failed", act_id, change, change.before)
        self._failed(change, now, outcome.why, act_id)
        self._refresh(time.monotonic_ns())

    def _failed(self, change: Change, now: int, why: str, act_id: str) -> None:
        wait = min(self._retry.get(change.group_id, (0, _RETRY_NS))[1], _RETRY_MAX_NS)
        self._retry[change.group_id] = (now + wait, 2 * wait)
        self._engine.rejected(change, why)
        self._say(f"nexthop group {change.group_id}: {why}")
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
        group = self._engine.groups.get(change.group_id) or self._first[change.group_id]
        seen = self._engine.seen(change)
        self._send(messages.act(self._host, group, change, outcome, seen, decided, acknowledged, act_id, failure))

    def _send(self, act: Act) -> None:
        self._report(act)
        self._agent.publish(act)

    def _log(self, kind: journal.Kind, act_id: str, change: Change, weights: Weights) -> None:
        first = self._first[change.group_id]
        self._journal.write(
            journal.entry_now(
                kind,
                act_id,
                change.group_id,
                first.original,
                change.before,
                weights if kind == "applied" else change.after,
                change.because,
                change.under,
                self._scope,
                names=[(member.nexthop_id, member.name) for member in first.members],
            )
        )

    def _log_quietly(self, kind: journal.Kind, act_id: str, change: Change, weights: Weights) -> None:
        """What is only history: without it the intent stays outstanding, which is the safe side."""
        try:
            self._log(kind, act_id, change, weights)
        except OSError as error:
            self._say(f"the journal cannot be written: {error.strerror}")

    def _settle(self, why: str, only: int | None = None) -> None:
        """Put the original weights back in every group, or in one."""
        decided = time.monotonic_ns()
        settled = settle.settle(
            self._journal,
            self._groups,
            self._scope,
            "controller",
            lambda each: only in (None, each.group_id),
        )
        for each in settled:
            self._say(f"{each.text}; {why}")
            if each.outcome.kind == "applied":
                self._send(messages.undone(self._host, each, why, decided))

    # ---- what the kernel has ----

    def _refresh(self, now: int) -> None:
        self._refresh_ns = now + _REFRESH_NS
        try:
            found = topology.find(self._netlink, self._policy.manage.destinations)
        except SwerveError as error:
            if self._unreadable != str(error):
                self._say(f"cannot read the routes: {error}")
            self._unreadable = str(error)
            return
        self._unreadable = ""
        for group_id, why in found.refused.items():
            if self._refused.get(group_id) != why:
                self._say(f"nexthop group {group_id} is left alone: {why}")
        self._refused = found.refused
        groups = {}
        for group_id, group in found.groups.items():
            first = self._first.setdefault(group_id, group)
            known = self._engine.groups.get(group_id)
            if known is None or group_id in self._engine.manual:
                groups[group_id] = group if known is None else reconcile(first, known, group, frozenset())[0]
                continue
            groups[group_id], why = reconcile(first, known, group, found.nexthops)
            if why:
                self._hands_off(known, group, why)
        for group_id in self._engine.groups.keys() - groups.keys():
            self._gone(self._engine.groups[group_id])
        self._engine.arrange(groups.values(), found.group_of, now)

    def _hands_off(self, known: Group, found: Group, why: str) -> None:
        self._engine.manual[known.group_id] = why
        self._say(f"nexthop group {known.group_id}: {why}")
        self._release(known, found.current, why)

    def _gone(self, known: Group) -> None:
        self._say(f"nexthop group {known.group_id} is gone, or carries no managed route any more")
        self._first.pop(known.group_id, None)
        self._engine.manual.pop(known.group_id, None)
        if known.current != known.original:
            self._settle("it is not managed any more", known.group_id)

    def _release(self, known: Group, weights: Weights, why: str) -> None:
        """Tell the guardian, through the journal, that this group is not ours to undo."""
        outstanding = self._journal.read().outstanding(self._scope).get(known.group_id)
        if outstanding is None:
            return
        change = Change(known.group_id, known.current, weights, why, outstanding.last.under)
        self._log_quietly("released", outstanding.last.act_id, change, weights)

    # ---- the end ----

    def _finish(self) -> None:
        if self._options.apply and not self._options.keep:
            self._settle("the controller was stopped")
        elif self._options.apply:
            self._say("the weights stay as they are; `swerve steer undo` puts the original ones back")
        if self._guardian is not None:
            self._guardian.leave()
        self._agent.close()


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector, stop: Callable[[int], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT wake the selector and call `stop`, for a while."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def wake(_events: int) -> None:
        for number in ours.recv(64):
            if number in (signal.SIGTERM, signal.SIGINT):
                stop(number)

    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    selector.register(ours, selectors.EVENT_READ, wake)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(ours)
        ours.close()
        theirs.close()
