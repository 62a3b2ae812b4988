"""What a controller does about holds, and says of them, with a kernel that is made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import samples
import steering_kit as kit
from support import mentions

from pytools.errors import SwerveError
from pytools.signals import Act, HoldState, Path
from steering.acting import holds as acting
from steering.acting.holds import HoldActing
from steering.acting.messages import Output
from steering.actuators.holds import Holding
from steering.deciding.engine import Engine
from steering.deciding.evidence import Facts
from steering.deciding.health import PathHealth
from steering.deciding.transitions import observe
from steering.plan import Hold
from steering.policy.file import parse

NOW = 1_000_000_000_000
TEXT = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nrules: [{name: short, then: {hold: {qdisc: fq}}}]\n"
PATH = kit.path(1)


@dataclass
class Kernel:
    """Stands for `Holds`."""

    held: list[Hold] = field(default_factory=list)
    refused: dict[Path, str] = field(default_factory=dict)
    until_ns: int = 0
    ended: bool = False
    closed: bool = False
    error: str = ""
    why_blind: str = ""

    def arm(self, wanted: Any) -> dict[Path, str]:
        if self.error:
            raise SwerveError(self.error)
        self.held = [each for each in wanted if each.path not in self.refused]
        return dict(self.refused)

    def renew(self, until_ns: int) -> None:
        self.until_ns = until_ns

    def read(self, _now: int) -> list[Holding]:
        return [Holding(each, 3, 4500, 6_000_000, 9, 4, 2_000_000, 500_000, NOW) for each in self.held]

    def blind(self, _holding: Holding, _now: int) -> str:
        return self.why_blind

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        self.held, self.until_ns, self.ended = [], 0, True


class World:
    """A controller's holds, over a path that no group has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, apply: bool = True, text: str = TEXT) -> None:
        self.kernel, self.acts, self.states = Kernel(), list[Act](), list[HoldState]()
        monkeypatch.setattr(acting, "Holds", lambda *_: self.kernel)
        self.engine, policy = Engine(parse(text)), parse(text)
        output = Output("h1", lambda _: None, self.acts.append)
        publish = cast(Any, self.states.append)
        self.holds = HoldActing(policy, apply, self.engine, cast(Any, None), output, publish)
        self.flows: Any = SimpleNamespace(table=object(), paths=SimpleNamespace(lent=True))
        self.now = NOW

    def measure(self) -> None:
        self.engine.take(kit.measured(PATH, self.now), self.now)

    def turn(self, frozen: str = "", after_ns: int = kit.SECOND // 2) -> None:
        self.now += after_ns
        self.holds.turn(self.now, self.flows, 0, frozen)

    def outcomes(self) -> list[tuple[str, str]]:
        return [(act.outcome, act.because) for act in self.acts]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    made.measure()
    return made


def test_a_path_that_no_group_has_is_held_and_told_once(world: World) -> None:
    for _ in range(3):
        world.turn()
        world.measure()
        assert world.kernel.until_ns == world.now + kit.SECOND
    [act] = world.acts
    assert (act.actuator, act.outcome, act.target, act.under) == ("hold", "applied", f"hold:{PATH}", "short")
    assert len(world.states) == 3
    last = world.states[-1]
    assert (last.armed, last.why_not, last.queueing_ns, last.rate_bytes_per_s) == (True, "", 2_000_000, 500_000)
    assert (last.held_packets, last.held_bytes, last.waited_ns) == (3, 4500, 6_000_000)
    assert (last.samples, last.samples_above) == (9, 4)
    assert world.holds.facts() == {"holds": 1, "holds_wanted": 1, "holds_refused": {}}


def test_why_a_path_is_not_held_is_told_each_time_it_changes(world: World) -> None:
    world.kernel.refused = {PATH: "packets wait in noqueue"}
    world.turn()
    world.kernel.refused, world.kernel.error = {}, "no such program"
    world.turn()
    world.kernel.error = ""
    world.turn()
    outcomes, (first, second, third) = zip(*world.outcomes(), strict=True)
    assert outcomes == ("failed", "failed", "applied")
    assert mentions(first, "policy", "failed", "packets wait in noqueue")
    assert mentions(second, "policy", "failed", "no such program")
    assert mentions(third, "policy") and "failed" not in third
    assert [(each.armed, each.why_not) for each in world.states] == [
        (False, "packets wait in noqueue"),
        (False, "no such program"),
        (True, ""),
    ]


def test_what_was_armed_is_not_renewed_when_the_kernel_refuses(world: World) -> None:
    world.turn()
    assert world.kernel.until_ns > world.now
    world.kernel.error = "no such program"
    for _ in range(2):
        world.turn()
        assert world.kernel.until_ns == 0
        world.turn(after_ns=kit.SECOND // 1000)  # before anything is planned again
        assert world.kernel.until_ns == 0
    world.kernel.error = ""
    world.turn()
    assert world.kernel.until_ns == world.now + kit.SECOND


def test_an_agent_that_restarts_is_no_failed_act(world: World) -> None:
    world.turn()
    world.flows.paths.lent, world.kernel.refused = False, {PATH: "the agent has lent no maps"}
    world.turn()
    assert [(each.armed, each.why_not) for each in world.states[1:]] == [(False, "the agent has lent no maps")]
    world.flows.paths.lent, world.kernel.refused = True, {}
    world.turn()
    assert [act.outcome for act in world.acts] == ["applied"]


def test_frozen_nothing_is_held_and_nothing_armed(world: World) -> None:
    world.turn("nothing is changed while frozen")
    assert world.kernel.held == [] and world.kernel.until_ns == 0 and world.acts == []
    world.turn()
    world.turn("there is no live guardian")
    assert world.kernel.until_ns == 0
    assert (world.states[-1].armed, world.states[-1].why_not) == (True, "there is no live guardian")


def test_while_the_kernel_knows_nothing_of_the_queue_the_state_says_why(world: World) -> None:
    world.kernel.why_blind = "the clocks"
    world.turn()
    assert (world.states[-1].armed, world.states[-1].why_not) == (True, "the clocks")


def test_it_ends_with_what_is_measured_and_with_the_controller(world: World) -> None:
    world.turn()
    world.turn(after_ns=world.engine.policy.safety.baseline_after)
    outcome, because = world.outcomes()[-1]
    assert outcome == "undone" and mentions(because, "not measured any more")
    assert not world.states[-1].armed and mentions(world.states[-1].why_not, "not measured any more")
    assert world.kernel.held == []
    world.measure()
    world.turn()
    world.holds.take_back("the controller was stopped")
    [(applied, because), undone] = world.outcomes()[2:]
    assert applied == "applied" and mentions(because, "policy") and undone == ("undone", "the controller was stopped")
    assert world.kernel.ended and world.kernel.closed and not world.states[-1].armed


def test_a_dry_run_says_what_it_would_hold_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, apply=False)
    world.measure()
    world.turn()
    world.turn()
    assert [act.outcome for act in world.acts] == ["dry_run"]
    assert world.kernel == Kernel()
    assert world.states
    assert all(not each.armed and mentions(each.why_not, "dry run") for each in world.states)
    assert world.holds.facts() == {"holds": 0, "holds_wanted": 1, "holds_refused": {}}
    world.holds.take_back("the controller was stopped")
    assert len(world.acts) == 1


def test_only_paths_from_this_host_are_held(world: World) -> None:
    other = Path("h2", "h1", "10.9.0.1", "10.1.1.2", "rail1")
    world.engine.take(msgspec.structs.replace(kit.measured(other, NOW), host="h1"), NOW)
    world.turn()
    assert [each.path for each in world.kernel.held] == [PATH]


MARKED = """version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: marked
    when:
      any:
        - {signal: ce_share, above: 0.05, clear_below: 0.01}
        - {signal: retransmits, above: 0.05, clear_below: 0.01}
    then: {hold: {threshold: 2ms, dwell: 5s}}
  - {name: elsewhere, scope: {destinations: [10.9.7.0/24]}, then: {hold: {}}}
"""


def test_with_a_condition_a_path_is_held_while_it_is_true_and_for_its_dwell(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, text=MARKED)

    def turn(marks: int) -> list[Hold]:
        world.measure()
        marked = samples.tcp_path(
            at_ns=world.now, in_window=0, path=PATH, delivered_ce_segments=marks, delivered_segments=1000
        )
        world.engine.take(marked, world.now)
        world.turn()
        return world.kernel.held

    assert turn(0) == turn(30) == [], "below"
    [held] = turn(80)
    assert (held.path, held.under, held.limits.threshold_ns) == (PATH, "marked", 2_000_000)
    assert mentions(held.because, "80 of 1000", "marked", "5.00%")
    assert turn(30), "neither true nor clear"
    last = world.now
    while world.now < last + 5 * kit.SECOND:
        assert turn(0)
    assert turn(0) == turn(0) == []
    assert [act.outcome for act in world.acts] == ["applied", "undone"]
    assert mentions(world.acts[-1].because, "condition", "over")
    assert turn(90)
    assert [act.outcome for act in world.acts] == ["applied", "undone", "applied"]


@pytest.mark.parametrize(("then", "state"), [("hold: {}", "healthy"), ("drain: {}", "suspect")])
def test_a_condition_of_a_hold_makes_no_path_suspect(then: str, state: str) -> None:
    head = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nrules:\n"
    when = "{signal: ce_share, above: 0.05, clear_below: 0.01, for: 10s}"
    policy = parse(f"{head}  - {{name: marked, when: {when}, then: {{{then}}}}}\n")
    marked = samples.tcp_path(at_ns=NOW, path=PATH, delivered_ce_segments=5000)
    known = PathHealth("healthy", NOW - kit.SECOND, answered=True)
    facts = Facts(PATH, delay=kit.measured(PATH, NOW), tcp=marked)
    assert observe(policy, known, facts, NOW).state == state
