"""The loop: measurements in, acts out, every act journalled first and guarded by another process.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds; `unix_ns` is for people.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools import places
from pytools.errors import SwerveError
from pytools.kernel.leftovers import switch_off
from pytools.kernel.netlink import Netlink
from pytools.signals import Act, AnySignal, PathDelay
from steering.acting import journal, messages
from steering.acting.acts_file import ActsFile
from steering.acting.flows import FlowActing
from steering.acting.lock import Lock
from steering.acting.namespace_lock import NamespaceLock
from steering.acting.standbys import StandByActing
from steering.acting.usual_file import UsualFile
from steering.acting.weights import Acting
from steering.actuators.overlay import Found, Overlay
from steering.agent_link import AgentLink
from steering.control.desk import Desk
from steering.control.site import Site
from steering.deciding.engine import Engine
from steering.flows.engine import FlowEngine
from steering.guarding import confirming
from steering.guarding.link import GuardianLink
from steering.plan import Change, Pin, Target, same, title
from steering.policy import Policy
from steering.policy.needs import signals_of

_TICK_NS: Final = 50_000_000
_SECOND_NS: Final = 1_000_000_000
_SAID_AT_ONCE: Final = 5  # of prefixes that cannot be steered
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
    probe_port: int = 862
    policy_hash: str = ""  # SHA-256 of the file
    confirm_ns: int = 0  # everything is taken back after so long, unless somebody confirms; 0 for never


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
        self._selector = selectors.DefaultSelector()
        self._stop: int | None = None  # the signal that ends us
        self._stays = False  # whether what is in force stays when we end
        self._look_ns = 0  # when all targets are looked at again
        self._unreadable = self._no_reroute = ""
        socket_path = places.agent_socket(options.netns)
        kinds = signals_of(policy)
        self._agent = AgentLink(socket_path, kinds, self._received, self._engine.forget_windows, say)
        self._host = places.instance(options.netns)
        self._refused: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def _open(self) -> None:
        self._stack.callback(self._selector.close)
        folder = journal.directory(self._options.netns)
        self._lock = self._stack.enter_context(Lock(folder / journal.LOCK_FILE, _LOCK_WAIT_S))
        self._netlink = self._stack.enter_context(Netlink())
        locks = [self._lock.fd]
        if self._options.apply:
            locks.append(self._stack.enter_context(NamespaceLock(_LOCK_WAIT_S)).fileno())
            switch_off(self._netlink)
        log = self._stack.enter_context(journal.Journal(folder / journal.FILE))
        self._acts_file = self._stack.enter_context(contextlib.closing(ActsFile(folder)))
        self._guardian: GuardianLink | None = None
        self._overlay = Overlay(self._netlink, self._policy.manage, self._options.apply)
        self._stack.callback(lambda: self._overlay.close(remove=not self._stays))
        self._acting = Acting(self._engine, self._overlay, log, lambda: self._host, self._say, self._send)
        if self._options.apply:  # the rules are deleted already, before anything that can fail
            self._acting.take_back("it was left by a controller before this one", off=lambda: None)
            self._acting.rotate()
        self.flows = FlowEngine(self._policy, places.instance(self._options.netns))
        acting = FlowActing(self.flows, self._engine, lambda: self._host, self._say, self._send)
        self._flow_acting = self._stack.enter_context(acting)
        lender = places.maps_socket(self._options.netns)
        self._standbys = StandByActing(self._policy, self._engine, lender, lambda: self._host, self._say, self._send)
        self._stack.callback(self._standbys.close)
        keeps = UsualFile(places.runtime_dir(self._options.netns), self._engine.usual, self._say)
        self._usual_file = self._stack.enter_context(keeps)
        deadline = confirming.deadline_in(self._options.confirm_ns)
        self._lock.say(confirming.facts(deadline) | self._facts())
        self._desk = self._stack.enter_context(Desk(self._site(folder), deadline))  # the operator's requests
        if self._options.apply:
            if self.flows.needed:
                self._flow_acting.open(self._options.probe_port)
            lease = self._policy.safety.lease
            self._guardian = GuardianLink(self._options.netns, lease, locks, self._say, deadline)

    def run(self) -> int:
        """Steer until SIGTERM or SIGINT; which of them came. Puts the weights back unless told to keep them.

        Raises
        ------
        SwerveError
            If not all of them could be put back.
        """
        with _signals(self._selector, self._stopping), self._stack:
            self._agent.register(self._selector)
            self._standbys.register(self._selector)
            self._selector.register(self._overlay, selectors.EVENT_READ, lambda _: self._overlay.receive())
            self._desk.register(self._selector)
            if self._guardian is not None:
                self._guardian.register(self._selector)
            if not self._options.apply:
                self._say("dry run: nothing is changed, until it is run with --apply; Ctrl-C ends it")
            try:
                while self._stop is None:
                    self._turn()
            finally:
                left = self._finish()
        if left:
            raise SwerveError(
                f"the rules cannot be deleted: {left}", "the guardian tries on: see `swerve steer status`"
            )
        return self._stop or 0

    def _turn(self) -> None:
        now = time.monotonic_ns()
        wake = now + _TICK_NS
        if self._guardian is not None:
            wake = min(wake, self._guardian.tick(now))
        self._desk.tick(now)
        if now >= self._overlay.due_ns:
            self._refresh(now)
        wake = min(wake, self._overlay.due_ns)
        self._agent.tick(now)
        if now >= self._look_ns:
            self._look_ns = now + _TICK_NS
            self._look_around()
        wake = min(wake, self._look_ns)
        self._act_on_flows(time.monotonic_ns())
        self._stand_by(time.monotonic_ns())
        for key, events in self._selector.select(max(0, wake - time.monotonic_ns()) / 1e9):
            key.data(events)

    def _look_around(self) -> None:
        """Do what time alone asks for, and tell how everything stands; what is measured is acted on as it comes."""
        self._act(self._engine.changes(time.monotonic_ns()))
        for alert in self._engine.alerts():
            self._say(f"{alert.rule}: {alert.text}" if alert.holds else f"{alert.rule}: over: {alert.text}")
            self._send(messages.alert(self._host, alert))
        self._usual_file.tick(time.monotonic_ns())
        standings = self._engine.standings(time.monotonic_ns())
        self._agent.publish_states(messages.path_state(self._host, each) for each in standings)

    def _stopping(self, number: int) -> None:
        self._stop = number

    def _received(self, signals: list[AnySignal]) -> None:
        """Digest what arrived, and change weights at once; flows have their turn right after."""
        now = time.monotonic_ns()
        touched: set[Target] = set()
        for each in signals:
            if isinstance(each, PathDelay) and each.path.source == each.host:
                self._host = each.host
            touched |= self._engine.take(each, now)
            self.flows.take(each, now)
        self._act(self._engine.changes(now, touched))

    def _act_on_flows(self, now: int) -> None:
        if self.flows.needed or self._flow_acting.is_open:
            self._flow_acting.turn(now, bool(self._desk.frozen))

    def _stand_by(self, now: int) -> None:
        """Keep the kernel's fast reroute armed; its program is loaded beside us, and may be late or missing."""
        if not self._options.apply or not self._standbys.needed or self._no_reroute:
            return
        try:
            self._flow_acting.prepare(self._options.probe_port)
        except SwerveError as error:
            self._no_reroute = str(error)
            self._say(f"no fast reroute: {error}")
            return
        may_act = not self._desk.frozen and self._guardian_lives
        self._standbys.turn(now, self._flow_acting.standbys, may_act)

    # ---- acts out ----

    def _act(self, changes: list[Change]) -> None:
        while changes := [change for change in changes if self._stands(change)]:
            why = self._refusal()
            if why or not self._options.apply:
                for change in changes:
                    self._engine.rejected(change, why) if why else self._acting.pretend(change)
                return
            done = self._acting.carry_out_all(changes, self._guarded)
            if not done.as_thought:
                self._refresh(time.monotonic_ns())
            changes = list(done.left)

    def _refusal(self) -> str:
        """Why nothing may be changed now; empty when it may."""
        if self._desk.frozen:
            return "nothing is changed while frozen"
        if self._options.apply and not self._guarded():
            return "held: there is no live guardian"
        return ""

    def _stands(self, change: Change) -> bool:
        """Whether a target is still as it was when its change was decided: another one's may have shown otherwise."""
        group = self._engine.groups.get(change.target)
        return group is not None and same(group.current, change.before)

    @property
    def _guardian_lives(self) -> bool:
        return self._guardian is not None and self._guardian.live()

    def _guarded(self) -> bool:
        """Whether somebody would undo us now. Renews the lease: many changes may be due at once."""
        self._renew()
        return self._guardian_lives

    def _renew(self) -> None:
        if self._guardian is not None:
            self._guardian.tick(time.monotonic_ns())

    def _send(self, act: Act) -> None:
        self._acts_file.write(act)
        self._report(act)
        self._agent.publish(act)

    # ---- what the operator wants ----

    def _facts(self) -> dict[str, object]:
        """What we say of ourselves to whoever finds the instance locked."""
        options = self._options
        return {"apply": options.apply, "policy": options.policy_name, "policy_hash": options.policy_hash}

    def _site(self, folder: Path) -> Site:
        return Site(
            folder=folder,
            engine=self._engine,
            apply=self._options.apply,
            host=lambda: self._host,
            say=self._say,
            send=self._send,
            act=self._act,
            take_back=self._take_back,
            pin=self._pin,
            unpin=self._flow_acting.unpin,
            pinned=self._flow_acting.pinned,
            stop=self._stopping,
            guardian=lambda: self._guardian.pid if self._guardian is not None else None,
            guarded=lambda: self._guardian_lives,
            acts_lost=lambda: self._acts_file.lost,
            missed=lambda: self._agent.missed,
            flow_facts=lambda: self.flows.facts() | self._standbys.facts(),
        )

    def _take_back(self, change: Change, name: str) -> str:
        """Carry out a change under a name; why it could not be."""
        if not self._guarded():
            return "held: there is no live guardian"
        if not self._acting.carry_out(change, name):
            self._refresh(time.monotonic_ns())
        group = self._engine.groups.get(change.target)
        done = group is not None and same(group.current, change.after)
        return "" if done else self._engine.why_rejected(change.target) or "it failed a moment ago: try again"

    def _pin(self, pin: Pin) -> str:
        """Pin a flow by hand; why it could not be."""
        if not self._flow_acting.prepare(self._options.probe_port):
            return "the kernel's part of it is still being loaded"
        self._act_on_flows(time.monotonic_ns())
        return self._flow_acting.pin(pin)

    # ---- what the kernel has ----

    def _refresh(self, now: int) -> None:
        """Read what others route, have ours follow it, and tell the engine."""
        try:
            found = self._overlay.refresh()
        except SwerveError as error:
            if self._unreadable != str(error):
                self._say(f"cannot read or follow the routes: {error}")
            self._unreadable = str(error)
            return
        self._unreadable = ""
        for text in found.events:
            self._say(text)
        self._say_refused(found)
        for target, known in self._engine.groups.items():
            group = found.groups.get(target)
            if group is None:
                self._say(f"{title(target)}: " + ("gone with its links" if target in found.lost else "gone"))
            if known.current != known.original and (group is None or group.current == group.original):
                why = "its route changed" if group is not None else "its route is gone"
                self._acting.forget(Change(target, known.current, known.original, why, ""))
        self._engine.arrange(found.groups.values(), found.targets_of, now, found.lost, found.unlinked)

    def _say_refused(self, found: Found) -> None:
        new = {prefix: why for prefix, why in found.refused.items() if self._refused.get(prefix) != why}
        fresh = [f"{prefix} is not steered: {why}" for prefix, why in new.items()]
        for text in fresh[:_SAID_AT_ONCE]:
            self._say(text)
        if len(fresh) > _SAID_AT_ONCE:
            self._say(f"and {len(fresh) - _SAID_AT_ONCE} more prefixes are not steered")
        self._refused = found.refused

    # ---- the end ----

    @property
    def _keeps(self) -> bool:
        """Whether what is in force stays when we end."""
        return self._options.keep and self._desk.confirmed

    def _finish(self) -> str:
        """Take everything back, unless it is to stay; what could not be, is left to the guardian."""
        left = ""
        if self._options.apply and not self._keeps:
            try:
                self._acting.take_back("the controller was stopped")
            except SwerveError as error:
                left = str(error)
        elif self._options.apply:
            self._stays = True
            self._say("the weights stay as they are; `swerve steer off` puts the original ones back")
        if self._guardian is not None and not left:
            self._guardian.leave()
        self._agent.close()
        return left


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
