"""Rules about flows: how long flows stay away from a path, and how they come back."""

from __future__ import annotations

import pytest
from flow_world import MBIT, MS, POLICY, SECOND, World
from support import mentions

from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.deciding.rule_eval import Reading
from steering.flows import returns
from steering.flows.returns import Avoided
from steering.policy.file import parse


def test_flows_come_back_in_steps_once_the_rail_has_looked_good_for_the_dwell() -> None:
    world = World([1] * 10 + [2] * 2)
    world.run(3)
    world.cut(to=4 * MBIT)
    world.run(1)
    assert world.counts() == [0, 12]
    world.cut(to=100 * MBIT)
    world.run(18)
    assert world.counts() == [0, 12], "a dwell of 20 s"
    acts = world.run(3)
    assert [(act.kind, len(act.flows)) for act in acts] == [("unpin", 1)]
    assert "is good again" in acts[0].because
    world.run(8)
    assert world.counts() == [10, 2]
    assert world.moves() == 10


def test_a_relapse_moves_them_away_again_and_doubles_the_dwell() -> None:
    world = World([1, 1, 1, 1, 2, 2, 2, 2])
    world.run(3)
    world.cut(to=4 * MBIT)
    world.run(24)
    assert world.on(1) == 0, "the one that was let go was moved away again"
    kinds = [act.kind for _, act in world.acts]
    assert kinds == ["pin", "unpin", "pin"]
    tried = world.now
    world.run(50)
    assert [act.kind for _, act in world.acts] == kinds, "retry_after is a minute"
    world.run(20)
    later = [(at, act.kind) for at, act in world.acts if at > tried]
    assert later[0][1] == "unpin"
    assert later[0][0] - next(at for at, act in world.acts if act.kind == "unpin") >= 60 * SECOND


def test_a_minute_of_steady_congestion_sees_one_try() -> None:
    world = World([1, 1, 1, 1, 2, 2, 2, 2])
    world.run(3)
    world.cut()
    world.run(60)
    assert sum(act.kind == "unpin" for _, act in world.acts) <= 1
    assert world.moves() <= 5


def test_flows_are_let_go_with_the_true_reason_when_the_path_they_left_is_not_measured_any_more() -> None:
    world = World([1, 1, 2, 2])
    world.run(3)
    world.cut()
    world.run(1)
    world.unheard = {1}
    (act,) = world.run(7)
    assert act.kind == "unpin" and mentions(act.because, str(world.paths[1]), "not measured any more")


# ---- a path under one rule, measurement by measurement ----


class Watched:
    """A path that is measured every 50 ms, and what is remembered of it under the policy's rule."""

    def __init__(self, back: str = "") -> None:
        self.policy = parse(POLICY + back, "policy.yaml")
        self.now, self.seen_ns, self.run_of_clear = 100 * SECOND, 0, 0
        self.known: Avoided | None = None
        self.last = Reading(Verdict.NONE, "nothing yet")

    def see(self, verdict: Verdict, seconds: float) -> Avoided | None:
        """Measurements of this verdict, for so long."""
        for _ in range(round(seconds * 20)):
            self.now = self.seen_ns = self.now + 50 * MS
            self.run_of_clear = self.run_of_clear + 1 if verdict is Verdict.CLEAR else 0
            self.last = Reading(verdict, str(verdict), self.now, run=self.run_of_clear or 1)
            self._look("healthy")
        return self.known

    def silence(self, seconds: float, state: str = "healthy") -> Avoided | None:
        """Nothing is heard for so long."""
        self.now += round(seconds * SECOND)
        return self._look(state)

    def _look(self, state: str) -> Avoided | None:
        seen = PathHealth(state, 0, (self.last,), seen_ns=self.seen_ns)  # type: ignore[arg-type]
        self.known = returns.observe(self.policy, 0, self.known, seen, self.now)
        return self.known


def test_a_rule_acts_on_no_measurement_that_is_stale() -> None:
    watched = Watched()
    known = watched.see(Verdict.BAD, 0.05)
    assert known is not None
    assert known.acting
    known = watched.silence(0.6)
    assert known is not None
    assert (known.state, known.acting) == ("away", False), "flows stay where they are"
    late = Watched()
    late.last = Reading(Verdict.BAD, "long ago", late.now)
    assert late.silence(0.6) is None


@pytest.mark.parametrize(
    ("before_s", "after"),
    [(1, [(18, ("away", 0)), (3, ("returning", 0))]), (21, [(1, ("returning", 0))])],
    ids=["dwell", "step"],
)
def test_silence_is_no_part_of_a_dwell_or_a_step(before_s: float, after: list[tuple[float, tuple[str, int]]]) -> None:
    watched = Watched()
    watched.see(Verdict.BAD, 0.1)
    watched.see(Verdict.CLEAR, before_s)
    watched.silence(4)
    for seconds, expected in after:
        known = watched.see(Verdict.CLEAR, seconds)
        assert known is not None
        assert (known.state, known.step) == expected


def test_a_path_that_was_not_measured_for_long_is_remembered_with_its_strikes_and_tries() -> None:
    watched = Watched()
    watched.see(Verdict.BAD, 0.1)
    tried = watched.see(Verdict.CLEAR, 21)
    relapse = watched.see(Verdict.BAD, 0.1)
    assert tried is not None
    assert relapse is not None
    assert relapse.strikes == 2
    gone = watched.silence(6, "unmeasured")
    assert gone is not None
    assert (gone.state, gone.acting, gone.strikes, gone.tried_ns) == ("over", False, 2, tried.tried_ns)
    again = watched.see(Verdict.BAD, 0.1)
    assert again is not None
    assert (again.state, again.strikes, again.tried_ns) == ("away", 3, tried.tried_ns)


def test_flows_come_back_after_so_many_good_measurements_in_a_row_as_the_rule_asks() -> None:
    watched = Watched("    return: {dwell: 1s, rise: 100}\n")
    watched.see(Verdict.BAD, 0.1)
    known = watched.see(Verdict.CLEAR, 4)
    assert known is not None
    assert known.state == "away"
    known = watched.see(Verdict.CLEAR, 2)
    assert known is not None
    assert known.state == "returning"


def test_each_flow_comes_back_when_the_path_that_it_left_is_good_again() -> None:
    """One act leaves two bad paths; one of them is mended first."""
    world = World([1] * 4 + [2] * 4 + [3], rails=4)
    world.run(3)
    world.cut(1, 4 * MBIT)
    world.cut(2, 4 * MBIT)
    (act,) = (act for act in world.run(2) if len(act.troubles) == 2)
    assert {path.interface for path in act.left if path} == {"rail1", "rail2"}
    world.cut(2, 100 * MBIT)
    world.run(40)
    away = {connection.routed for connection in world.connections if connection.rail(world.now) != connection.routed}
    assert away == {1}, "those of the rail that is still cut"
