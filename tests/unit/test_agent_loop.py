"""The agent's loop: who has a turn when."""

from __future__ import annotations

import os
import selectors

from pytools.agent.scheduler import Scheduler

HOUR_NS = 3600 * 10**9


class Waiting:
    """A source that is due in an hour, unless it was woken."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self, now_ns: int) -> int:
        self.ticks += 1
        return now_ns + HOUR_NS


def test_whatever_wakes_the_agent_the_mesh_says_anew_when_it_is_due() -> None:
    mesh, other, flushed, (theirs, ours) = Waiting(), Waiting(), [], os.pipe()
    with selectors.DefaultSelector() as selector:
        scheduler = Scheduler(selector, lambda: flushed.append(mesh.ticks))
        scheduler.add(other)  # type: ignore[arg-type]
        scheduler.add(mesh, at_events=True)  # type: ignore[arg-type]
        selector.register(theirs, selectors.EVENT_READ, lambda _: os.read(theirs, 1))
        os.write(ours, b"123")
        for _ in range(3):
            scheduler.turn()
        assert (mesh.ticks, other.ticks, flushed) == (3, 1, [1, 2, 3])
        scheduler.all_due()
        os.write(ours, b"4")
        scheduler.turn()
        assert (mesh.ticks, other.ticks) == (4, 2)
    os.close(theirs)
    os.close(ours)


def test_a_source_that_may_be_late_shares_the_turn_of_another() -> None:
    """At once, 30 ms later, and after as long again."""
    late_ns = [10**9]
    turns: list[int] = []

    class Beating:
        def __init__(self, name: int, every_ns: int) -> None:
            self.name, self.every_ns = name, every_ns

        def tick(self, now_ns: int) -> int:
            turns.append(self.name)
            return now_ns + self.every_ns

    with selectors.DefaultSelector() as selector:
        scheduler = Scheduler(selector, lambda: None)
        scheduler.add(Beating(1, 1_000_000), lambda: late_ns[0])  # type: ignore[arg-type]
        scheduler.add(Beating(2, 30_000_000))  # type: ignore[arg-type]
        scheduler.turn()
        scheduler.turn()
        assert turns == [1, 2, 1, 2]
        late_ns[0] = 0
        scheduler.turn()
        scheduler.turn()
        assert turns[4:7] == [1, 2, 1]
