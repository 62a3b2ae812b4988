"""The loop: measurements in, acts out, every act journalled first and guarded by another process.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds; `unix_ns` is for people.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools import directories
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.leftovers import switch_off
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Act, AnySignal, PathDelay
from steering.acting import journal, messages
from steering.acting.acts_file import ActsFile
from steering.acting.background import Later
from steering.acting.bonds import BondActing
from steering.acting.change_loop import ChangeLoop
from steering.acting.holds import HoldActing
from steering.acting.hooks import HookActing
from steering.acting.memory import Succession, UsualFile
from steering.acting.packets import PacketActing
from steering.acting.rto_min import RtoMinActing
from steering.acting.weights import Acting
from steering.actuators.overlay import Overlay
from steering.agent_link import AgentLink
from steering.control.host import Site
from steering.control.managed import Managed
from steering.control.operator_api import Desk
from steering.control.stop_signals import stop_signals
from steering.deciding.engine import Engine
from steering.guarding import confirming
from steering.guarding.link import GuardianLink
from steering.guarding.takeover import Locks
from steering.plan import Change, Target, same
from steering.policy.model import Policy, signals_of

_TICK_NS: Final = 50_000_000
_STOPPED: Final = "the controller was stopped"
_HOOKS_S: Final = 5.0  # at the end, for hooks; shorter than `swerve steer off` waits for us
_LOCK_WAIT_S: Final = 2.0  # a guardian may still be undoing for the controller before us


@dataclass(frozen=True, slots=True)
class Options:
    """How to run.

    `keep` leaves the weights as they are at the end, `hand_over` leaves them to a successor when SIGTERM ends us;
    `policy_name` is said to whoever asks what runs.
    """

    netns: str | None = None
    apply: bool = False
    keep: bool = False
    hand_over: bool = False
    policy_name: str = ""
    policy_hash: str = ""  # SHA-256 of the file
    confirm_ns: int = 0  # everything is taken back after so long, unless somebody confirms; 0 for never

    @property
    def facts(self) -> dict[str, object]:
        """For whoever finds the instance locked."""
        return {"apply": self.apply, "policy": self.policy_name, "policy_hash": self.policy_hash}


class Controller:
    """Steers one namespace under one policy.

    Parameters
    ----------
    report : callable
        Takes each act, for whoever watches this process.

    Attributes
    ----------
    engine : Engine
        Decides which paths are left, by weights.
    overlay : Overlay
        Our routes in the kernel.
    packets : PacketActing
        What acts on packets and sockets.
    agent : AgentLink
        The signals of the agent, and what it is told.
    desk : Desk
        The operator's requests.

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
        self.engine = Engine(policy)
        self._selector = selectors.DefaultSelector()
        self._stop: int | None = None  # the signal that ends us
        self._stays = True  # whether what is in force stays when we end: until we run it is not ours
        self._look_ns = 0  # when all targets are looked at again
        socket_path = directories.agent_socket(options.netns)
        kinds = signals_of(policy)
        self.agent = AgentLink(socket_path, kinds, self.receive, self.engine.evidence.forget_windows, say)
        self.output = messages.Output(directories.instance(options.netns), say, self._send)
        told = directories.hook_calls(options.netns)
        self._hooks = HookActing(policy, options.apply, self.engine, told, self.output)
        self._managed = Managed(policy)
        self._stack = contextlib.ExitStack()
        try:
            self._open()
            self._rto_min = RtoMinActing(options.apply, self.engine, self.overlay, self.output)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what was opened; `run` does."""
        self._stack.close()

    def _open(self) -> None:
        self._stack.callback(self._selector.close)
        folder = journal.directory(self._options.netns)
        scope = netns.scope()
        locks = Locks(folder / journal.LOCK_FILE, _LOCK_WAIT_S, self._options.apply, scope)
        self._locks = self._stack.enter_context(locks)
        self._netlink = self._stack.enter_context(Netlink())
        memory = directories.steering_memory(self._options.netns)
        self._succession = Succession(memory, scope, self._options.apply, self._say)
        known = self._succession.take_over(self._policy.manage, self._netlink) if locks.former is not None else None
        if known is None:
            self._stays = False
            if self._options.apply or locks.former is not None:
                switch_off(self._netlink)
                self._succession.forget()  # or it outlives us if we are killed before there is a guardian
        self._later = self._stack.enter_context(Later())
        log = self._stack.enter_context(journal.Journal(folder / journal.FILE, self._later))
        self._acts_file = self._stack.enter_context(contextlib.closing(ActsFile(folder, self._later)))
        self._guardian: GuardianLink | None = None
        self.overlay = Overlay(self._netlink, self._policy.manage, self._options.apply, known)
        self._stack.callback(lambda: self.overlay.close(remove=not self._stays))
        self._acting = Acting(self.engine, self.overlay, log, self.output)
        if known is None and (self._options.apply or locks.former is not None):  # the rules are deleted already
            self._acting.note_undone("it was left by a controller before this one", time.monotonic_ns())
            self._acting.rotate()
        self._bonds = self._open_bonds(locks.former is not None, known is not None)
        self._changes = ChangeLoop(
            self.engine, self._acting, self._options.apply, self.agent.poll, self._refusal, self._acted
        )
        name, apply = self._options.netns, self._options.apply
        holds = HoldActing(self._policy, apply, self.engine, self._netlink, self.output, self.agent.publish)
        packets = PacketActing(self._policy, name, apply, self.engine, self.output, holds)
        self.packets = self._stack.enter_context(packets)
        keeps = UsualFile(directories.runtime_dir(self._options.netns), self.engine.usual, self._say)
        self._usual_file = self._stack.enter_context(keeps)
        deadline = confirming.deadline_in(self._options.confirm_ns)
        locks.lock.say(confirming.facts(deadline) | self._options.facts | {"scope": scope})
        self.desk = self._stack.enter_context(Desk(self._site(folder), deadline))  # the operator's requests
        if self._options.apply:
            self.packets.open()
            safety = self._policy.safety
            self._guardian = GuardianLink(
                self._options.netns, safety.lease, locks, self._say, deadline, safety.takeover
            )
        elif locks.former is not None:
            locks.former.done()  # a dry run keeps nothing
        self.agent.register(self._selector)
        self.packets.register(self._selector)
        self.desk.register(self._selector)
        self._selector.register(self.overlay, selectors.EVENT_READ, lambda _: self.overlay.receive())

    def _open_bonds(self, succeeds: bool, taken_over: bool) -> BondActing:
        file, apply = directories.bond_ports(self._options.netns), self._options.apply
        acting = BondActing(self._policy, apply, self.engine, self._netlink, file, self.output)
        if apply or succeeds:
            acting.begin(taken_over)
        return acting

    def run(self) -> int:
        """Steer until SIGTERM or SIGINT; which of them came. Puts the weights back unless told to keep them.

        Raises
        ------
        SwerveError
            If not all of them could be put back.
        """
        with stop_signals(self._selector, self.stop), contextlib.closing(self):
            if self._guardian is not None:
                self._guardian.register(self._selector)
            if not self._options.apply:
                self._say("dry run: nothing is changed, until it is run with --apply; Ctrl-C ends it")
            self._hooks.begin()
            try:
                while self._stop is None:
                    self.turn()
            finally:
                left = self._finish()
        if left:
            raise SwerveError(
                f"the rules cannot be deleted: {left}", "the guardian tries on: see `swerve steer status`"
            )
        return self._stop or 0

    def turn(self) -> None:
        """Do all that is due, and wait for the next to be."""
        now = time.monotonic_ns()
        wake = now + _TICK_NS
        if self._guardian is not None:
            wake = min(wake, self._guardian.tick(now))
        self.desk.tick(now)
        if now >= self.overlay.due_ns:
            self.refresh(now)
        wake = min(wake, self.overlay.due_ns)
        self.agent.tick(now)
        if now >= self._look_ns:
            self._look_ns = now + _TICK_NS
            self._look_around()
        wake = min(wake, self._look_ns)
        self.packets.turn(self.desk.look, lambda: self._guardian_lives)
        self._bonds.turn(time.monotonic_ns(), self._refusal)
        self._rto_min.turn(time.monotonic_ns(), self._refusal)
        for key, events in self._selector.select(max(0, wake - time.monotonic_ns()) / 1e9):
            key.data(events)

    def _look_around(self) -> None:
        """Do what time alone asks for, and tell how everything stands; what is measured is acted on as it comes."""
        self.act(self.engine.changes(time.monotonic_ns()))
        if self.overlay.set_apart(self.engine.apart(time.monotonic_ns())):
            self.refresh(time.monotonic_ns())
            self.act(self.engine.changes(time.monotonic_ns()))
        for alert in self.engine.alerts():
            self._say(f"{alert.rule}: {alert.text}" if alert.holds else f"{alert.rule}: over: {alert.text}")
            self._send(messages.alert(self.output.host, alert))
        self._hooks.turn(time.monotonic_ns(), bool(self.desk.look()))  # after the acts
        self._succession.tick(self.overlay, self.engine, time.monotonic_ns())
        self._usual_file.tick(time.monotonic_ns())
        self.agent.publish_states(self.engine.states(self.output.host, time.monotonic_ns(), time.time_ns()))

    def stop(self, number: int) -> None:
        """End after this turn, as by the signal of this number."""
        self._stop = number

    def receive(self, signals: list[AnySignal]) -> None:
        """Digest what arrived, and change weights at once; flows have their turn right after."""
        self.desk.look_for_sleep()
        now = time.monotonic_ns()
        touched: set[Target] = set()
        for each in signals:
            if isinstance(each, PathDelay) and each.path.source == each.host:
                self.output.host = each.host
            touched |= self.engine.take(each, now)
            self.packets.take(each, now)
        self._changes.heard(touched)

    # ---- acts out ----

    def act(self, changes: list[Change]) -> None:
        """Carry out changes, and what is wanted of their targets by then."""
        self._changes.act(changes)

    def _acted(self, as_thought: bool) -> None:
        """Keep what was changed for a successor, and look at the kernel when it is not as it was thought to be."""
        self._succession.keep(self.overlay, self.engine, time.monotonic_ns())
        if not as_thought:
            self.refresh(time.monotonic_ns())

    def _refusal(self) -> str:
        """Why nothing may be changed now; empty when it may."""
        if self.desk.look():
            return "nothing is changed while frozen"
        if self._options.apply and not self._guarded():
            return "held: there is no live guardian"
        return ""

    @property
    def _guardian_lives(self) -> bool:
        return self._guardian is not None and self._guardian.live()

    def _guarded(self) -> bool:
        """Whether somebody would undo us now. Renews the lease: many changes may be due at once."""
        if self._guardian is not None:
            self._guardian.tick(time.monotonic_ns())
        return self._guardian_lives

    def _send(self, act: Act) -> None:
        self._acts_file.write(act)
        self._report(act)
        self.agent.publish(act)

    # ---- what the operator wants ----

    def _site(self, folder: Path) -> Site:
        return Site(
            folder=folder,
            later=self._later,
            engine=self.engine,
            flows=self.packets.flows,
            apply=self._options.apply,
            output=self.output,
            act=self.act,
            take_back=self._take_back,
            stop=self.stop,
            facts=self._facts,
        )

    def _facts(self) -> dict[str, object]:
        """What we say of ourselves to whoever asks how we are."""
        missed, missed_urgent = self.agent.missed
        return {
            "guardian_pid": self._guardian.pid if self._guardian is not None else None,
            "guarded": self._guardian_lives,
            "managed": self._managed.facts(self.engine.groups),
            "acts_lost": self._acts_file.lost + self._later.lost,
            "signals_missed": missed,
            "signals_missed_urgent": missed_urgent,
            **self.packets.facts(),
            **self._bonds.facts(),
            **self._hooks.facts(),
            **self._rto_min.facts(),
        }

    def _take_back(self, change: Change, name: str) -> str:
        """Carry out a change under a name; why it could not be."""
        if why := self._refusal():
            return why
        if not self._acting.carry_out(change, name):
            self.refresh(time.monotonic_ns())
        group = self.engine.groups.get(change.target)
        done = group is not None and same(group.current, change.after)
        return "" if done else self.engine.why_rejected(change.target) or "it failed a moment ago: try again"

    # ---- what the kernel has ----

    def refresh(self, now: int) -> None:
        """Read what others route, have ours follow it, and tell the engine."""
        if self._acting.refresh(now, self._managed.take):
            self._succession.recall(self.engine, now)
            self._succession.keep(self.overlay, self.engine, now)

    # ---- the end ----

    @property
    def _keeps(self) -> bool:
        """Whether what is in force stays when we end."""
        return self._options.keep and self.desk.confirmed

    @property
    def _hands_over(self) -> bool:
        """Whether what is in force is for a successor."""
        asked = self._options.hand_over and self._stop == signal.SIGTERM and self.desk.confirmed
        there = self.overlay.in_force or self._hooks.outstanding
        return asked and there and self._guardian is not None and self._guardian.hand_over()

    def _finish(self) -> str:
        """Take everything back, unless it is to stay; what could not be, is left to the guardian."""
        left, self._stays = "", self._options.apply
        self.packets.take_back(_STOPPED)
        if self._options.apply and self._keeps:
            self._say("the weights stay as they are; `swerve steer off` puts the original ones back")
        elif self._options.apply and self._hands_over:
            self._succession.keep(self.overlay, self.engine, time.monotonic_ns())
            self._say("the weights stay as they are for a successor")
            self.agent.close()
            return ""
        elif self._options.apply:
            try:
                self._acting.take_back(_STOPPED)
                self._rto_min.over(_STOPPED)
                self._stays = False
                self._succession.forget()
                if failed := self._bonds.take_back(_STOPPED):
                    self._say(f"a port could not be put back: {failed}; `swerve steer off` tries again")
            except SwerveError as error:
                left = str(error)
        if self._guardian is not None and not left:
            self._guardian.leave()
        if not self._keeps and (late := self._hooks.take_back(_STOPPED, _HOOKS_S)):
            self._say(f"not told yet that it is over: {late}; `swerve steer off` tries again")
        self.agent.close()
        return left
