"""What the controller tells the agent of paths: each once a second, and at once when more than its reason changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import samples
from support import mentions

from pytools.errors import SwerveError
from steering import agent_link
from steering.agent_link import AgentLink

SECOND = 1_000_000_000


def test_a_reason_that_counts_seconds_is_told_once_a_second(monkeypatch):
    told, clock = [], [10**12]
    agent = SimpleNamespace(publish=told.append, fileno=lambda: 0, close=lambda: None)
    monkeypatch.setattr(agent_link, "Client", lambda *_: agent)
    monkeypatch.setattr(agent_link.time, "monotonic_ns", lambda: clock[0])
    link = AgentLink(Path("/none"), frozenset(), lambda _: None, lambda: None, lambda _: None)
    link.register(SimpleNamespace(register=lambda *_: None, unregister=lambda _: None))  # type: ignore[arg-type]
    link.tick(clock[0])
    state = samples.path_state(state="drained")
    for turn in range(100):  # five seconds of turns
        link.publish_states([msgspec.structs.replace(state, reason=f"good for {turn * 50} ms of 30 s")])
        clock[0] += SECOND // 20
    assert len(told) == 5
    link.publish_states([msgspec.structs.replace(state, weight_actual=7)])
    link.publish_states([msgspec.structs.replace(state, state="returning", weight_actual=7)])
    assert [each.state for each in told[5:]] == ["drained", "returning"]


def test_acts_wait_for_the_agent_and_those_for_which_there_is_no_room_are_counted(monkeypatch):
    told, said = [], []
    agent = SimpleNamespace(publish=told.append, fileno=lambda: 0, close=lambda: None)
    monkeypatch.setattr(agent_link, "Client", lambda *_: agent)
    link = AgentLink(Path("/none"), frozenset(), lambda _: None, lambda: None, said.append)
    link.register(SimpleNamespace(register=lambda *_: None, unregister=lambda _: None))  # type: ignore[arg-type]
    acts = [msgspec.structs.replace(samples.act(), act_id=str(n)) for n in range(agent_link.MOST_WAITING + 3)]
    for act in acts:
        link.publish(act)
    link.publish(samples.path_state())
    link.tick(10**12)
    assert told == acts[3:]
    assert said[0] == "connected to the agent"
    assert len(said) == 2 and mentions(said[1], "3 acts", "without an agent", "`swerve steer history`")


def test_what_was_missed_is_counted_over_all_connections(monkeypatch):
    clients = [SimpleNamespace(fileno=lambda: 0, close=lambda: None, dropped=n, dropped_urgent=n // 2) for n in (4, 10)]
    waiting = list(clients)
    monkeypatch.setattr(agent_link, "Client", lambda *_: waiting.pop(0))
    link = AgentLink(Path("/none"), frozenset(), lambda _: None, lambda: None, lambda _: None)
    link.register(SimpleNamespace(register=lambda *_: None, unregister=lambda _: None))  # type: ignore[arg-type]
    assert link.missed == (0, 0)
    link.tick(SECOND)
    assert link.missed == (4, 2)

    def gone():
        raise SwerveError("gone")

    clients[0].read = gone
    link.poll()
    assert link.missed == (4, 2)
    link.tick(2 * SECOND)
    clients[1].dropped = 11
    assert link.missed == (15, 7)
