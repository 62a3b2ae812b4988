"""MPTCP subflows: which way each takes is learnt, those on bad ways are replaced, every outcome told.

Nothing of it has to be undone: an MPTCP connection has its subflows whoever asked for them. One thread, in the
namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel import features
from pytools.kernel.netlink.mptcp import PathManager, Subflow
from steering.acting import messages
from steering.actuators.flow_keys import TCP
from steering.actuators.segments import Segments
from steering.flows.ports import PortEngine
from steering.flows.subflows import Create, Destroy, SubflowAsk, SubflowEngine
from steering.plan import FlowKey

_LOOK_NS: Final = 200_000_000
_MOST_IDS: Final = 255
USERSPACE: Final = "1"  # of net.mptcp.pm_type


class SubflowActing(Closing):
    """Replaces subflows on bad ways.

    Parameters
    ----------
    ports : PortEngine
        Knows ways, and which ports take which.
    every_ns : int
        Time between two segments.
    """

    def __init__(self, ports: PortEngine, every_ns: int, output: messages.Output) -> None:
        self._every_ns, self._output = every_ns, output
        self._engine = SubflowEngine(ports)
        self._stack = contextlib.ExitStack()
        self._manager: PathManager | None = None
        self._asking: Segments | None = None
        self._subflows: dict[FlowKey, Subflow] = {}
        self._ids: dict[int, int] = {}  # the last local id, by token
        self._look_ns = self._ask_ns = 0
        self.why_not = ""  # why nothing is done; empty while it is

    def close(self) -> None:
        self._stack.close()

    def turn(self, now: int) -> None:
        if self.why_not:
            return
        try:
            if self._manager is None:
                self._manager, self._asking = self._open()
            if self._asking is not None:
                self._act(self._manager, self._asking, now)
        except SwerveError as error:
            self.why_not = str(error)
            self._output.say(f"no MPTCP subflows are replaced: {error}")

    def _open(self) -> tuple[PathManager, Segments]:
        if features.setting("net.mptcp.pm_type") != USERSPACE:
            raise SwerveError("the userspace path manager is off", "sysctl net.mptcp.pm_type=1")
        return self._stack.enter_context(PathManager()), self._stack.enter_context(Segments(4))

    def _act(self, manager: PathManager, asking: Segments, now: int) -> None:
        asking.receive(now)
        if now >= self._ask_ns and (wanted := self._engine.ask(now)) is not None:
            self._ask_ns = now + self._every_ns

            def answered(router: str | None, asked: SubflowAsk = wanted) -> None:
                self._engine.answered(asked.flow, router)

            asking.ask(wanted.flow, 0, wanted.distance, wanted.interface, now, answered)
        if now < self._look_ns:
            return
        self._look_ns = now + _LOOK_NS
        self._subflows = {_key(each): each for each in manager.subflows()}
        self._engine.seen(((key, each.token, each.established) for key, each in self._subflows.items()), now)
        for wanted_now in self._engine.decide(now):
            if isinstance(wanted_now, Create):
                self._create(manager, wanted_now)
            else:
                self._destroy(manager, wanted_now, now)

    def _create(self, manager: PathManager, wanted: Create) -> None:
        old = self._subflows[wanted.flow]
        used = {each.local_id for each in self._subflows.values() if each.token == old.token}
        self._ids = {token: number for token, number in self._ids.items() if token in self._tokens()}
        last = self._ids.get(old.token, max(used))
        free = (number for step in range(_MOST_IDS) if (number := (last + step) % _MOST_IDS + 1) not in used)
        self._ids[old.token] = number = next(free, _MOST_IDS)
        if manager.create(old, wanted.port, number):
            self._engine.refused(wanted.flow)
        self._look_ns = 0

    def _tokens(self) -> set[int]:
        return {each.token for each in self._subflows.values()}

    def _destroy(self, manager: PathManager, wanted: Destroy, now: int) -> None:
        why = manager.destroy(self._subflows[wanted.flow])
        outcome: messages.Outcome = "failed" if why else "applied"
        self._output.send(messages.subflow_act(self._output.host, wanted.way, outcome, now, time.monotonic_ns(), why))

    def facts(self) -> dict[str, object]:
        return {"subflows": self._engine.facts(), "subflows_missing": self.why_not}


def _key(subflow: Subflow) -> FlowKey:
    return FlowKey(TCP, subflow.local, subflow.local_port, subflow.remote, subflow.remote_port)
