"""The agent's loop: who has a turn when."""

from __future__ import annotations

import os
import selectors

import pytest

from pytools.agent import loop as module
from pytools.agent.loop import Agent

HOUR_NS = 3600 * 10**9


class Waiting:
    """A source that is due in an hour, unless it was woken."""

    def __init__(self, agent: Agent, turns: int) -> None:
        self._agent, self._turns, self.ticks = agent, turns, 0

    def tick(self, now_ns: int) -> int:
        self.ticks += 1
        if self.ticks == self._turns:
            self._agent.stop()
        return now_ns + HOUR_NS


class Flushed:
    """A server of which is counted how often it is to write."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def test_whatever_wakes_the_agent_the_mesh_says_anew_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.gc, "freeze", lambda: None)
    agent, (theirs, ours) = Agent.__new__(Agent), os.pipe()
    agent._stop = agent._reload_asked = False
    mesh, other = Waiting(agent, 3), Waiting(agent, 3)
    agent._sources, agent._late_ns = [other, mesh], [0, 0]  # type: ignore[list-item]
    agent._mesh = mesh  # type: ignore[assignment]
    agent._server = server = Flushed()  # type: ignore[assignment]
    agent._readers = readers = Flushed()  # type: ignore[assignment]
    with selectors.DefaultSelector() as selector:
        agent._selector = selector
        selector.register(theirs, selectors.EVENT_READ, lambda _: os.read(theirs, 1))
        os.write(ours, b"123")
        agent.run()
    os.close(theirs)
    os.close(ours)
    assert (mesh.ticks, other.ticks, server.flushes, readers.flushes) == (3, 1, 3, 3)
