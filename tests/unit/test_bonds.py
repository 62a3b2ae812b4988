"""When another port of a bond is selected, and when the former one is put back: by made-up measurements and bonds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from policy_kit import event, liveness
from steering_kit import MS, SECOND, measured
from support import mentions

from pytools.errors import SwerveError
from pytools.signals import Path
from steering.acting import bond_ports, messages
from steering.acting.bond_ports import Selected
from steering.actuators import bonds
from steering.deciding.engine import Engine
from steering.deciding.health import PathHealth
from steering.deciding.overrides import Override, Overrides
from steering.flows.bonds import BondEngine
from steering.guarding import guardian
from steering.plan import Bond
from steering.policy.file import parse

T0, STEP = 10**12, 20 * MS
FIRST, SECOND_PORT, THIRD = 11, 12, 13
BOND = Bond(5, "bond0", FIRST, ((FIRST, "eth0"), (SECOND_PORT, "eth1")), frozenset({FIRST, SECOND_PORT}))
POLICY = parse("""\
version: 1
manage: {destinations: [10.9.0.0/16]}
bonds: {trial: 2s, retry_after: 10s}
rules:
  - name: dead
    when: {any: [{signal: silence}, {signal: link, event: neighbour_failed}]}
    then: {drain: {}}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}
    then: {drain: {}}
""")


def to(peer: int, interface: str = "bond0", gateway: str = "10.1.1.1") -> Path:
    return Path("h1", f"h{peer}", f"10.9.0.{peer}", gateway, interface)


class World:
    """A bond, the paths over it, and whoever carries out what is decided."""

    def __init__(self, *paths: Path, bond: Bond = BOND) -> None:
        self.known, self.bond, self.now = Engine(POLICY), bond, T0
        self.engine = BondEngine(POLICY, POLICY.bonds, self.known)
        self.paths = paths or (to(2), to(3))
        self.silent_since: dict[Path, int] = {}
        self.acts, self.lost = [], []

    def arrange(self) -> None:
        over = {"bond0": "bond0"}
        self.lost += self.engine.arrange({"bond0": self.bond}, over, self.now)

    def run(self, for_ns: int = SECOND, dead=(), slow=()) -> list[str]:
        """Measure for so long; the ports selected meanwhile."""
        began, until = len(self.acts), self.now + for_ns
        while self.now < until:
            self.now += STEP
            for path in self.paths:
                self.measure(path, path in dead, path in slow)
            self.arrange()
            self.engine.look(self.now)
            for act in self.engine.decide(self.now):
                self.acts.append((self.now, act))
                self.engine.carried_out(act, self.now)
                self.bond = replace(self.bond, active=act.port)
        return [act.bond.port(act.port) for _, act in self.acts[began:]]

    def measure(self, path: Path, dead: bool, slow: bool) -> None:
        since = self.silent_since.setdefault(path, self.now - STEP) if dead else self.silent_since.pop(path, None)
        missed = (self.now - since) // (10 * MS) if dead and since is not None else 0
        queueing = None if dead else 20 * MS if slow else 0
        told = measured(path, self.now, queueing, lost=5 if dead else 0, received=0 if dead else 5)
        for signal in (told, liveness(path, self.now, missed)):
            self.known.take(signal, self.now)

    @property
    def held(self) -> str:
        [facts] = self.engine.facts()
        return str(facts["held"])


@pytest.fixture
def world() -> World:
    made = World()
    assert made.run() == []
    return made


@pytest.mark.parametrize("bad", ["dead", "slow"])
def test_another_port_is_selected_when_all_paths_are_bad_and_stays_if_it_is_better(world: World, bad: str) -> None:
    assert world.run(**{bad: world.paths}) == ["eth1"]
    [(_, act)] = world.acts
    assert act.because.startswith("every path by eth0 of bond0, to h2, h3, is bad: h1>h2 dev bond0")
    assert (act.under, act.over) == ({"dead": "dead", "slow": "congested"}[bad], False)
    assert sorted(messages.bond_act("h1", act, "applied", world.now).paths) == sorted(world.paths)
    assert world.run(20 * SECOND) == [] and world.engine.facts()[0]["former"] == "eth0"


@pytest.mark.parametrize("bad", ["dead", "slow"])
def test_one_good_path_keeps_the_port(bad: str) -> None:
    world = World(to(2), to(3), to(4))
    world.run()
    assert world.run(5 * SECOND, **{bad: world.paths[:2]}) == []


def test_load_that_weights_have_just_moved_has_time_to_go(world: World) -> None:
    drained = PathHealth("drained", world.now)
    paths = dict.fromkeys(world.paths, drained)
    parts = {"evidence": world.known.evidence, "usual": world.known.usual, "overrides": world.known.overrides}
    world.engine = BondEngine(POLICY, POLICY.bonds, SimpleNamespace(paths=paths, **parts))
    assert world.run(SECOND * 19 // 10, slow=world.paths) == []
    assert world.run(SECOND // 2, slow=world.paths) == ["eth1"]


def test_one_peer_alone_may_be_the_cause_itself() -> None:
    for bad in ("dead", "slow"):
        world = World(to(2))
        assert world.run() == world.run(5 * SECOND, **{bad: world.paths}) == []
        assert "only h2 says so" in world.held


@pytest.mark.parametrize(("gateway", "acts"), [("10.1.1.1", ["eth1"]), ("", [])])
def test_a_router_that_is_gone_is_evidence_enough_but_not_a_peer_on_the_link(gateway: str, acts: list[str]) -> None:
    world = World(to(2, gateway=gateway))
    world.run()
    world.known.take(event(world.paths[0], world.now, "neighbour_failed"), world.now)
    assert world.run(dead=world.paths) == acts


def test_where_another_interface_leads_to_the_peers_silence_everywhere_is_theirs() -> None:
    world = World(to(2), to(3), to(2, "eth9"), to(3, "eth9"))
    world.run()
    assert world.run(5 * SECOND, dead=world.paths) == []
    world.run(SECOND)
    assert world.run(5 * SECOND, dead=world.paths[:2]) == ["eth1", "eth0"], "and where that answers, it is the bond's"


def test_a_port_that_is_no_better_is_left_again_and_waits_longer_each_time(world: World) -> None:
    assert world.run(60 * SECOND, dead=world.paths) == ["eth1", "eth0"] * 3
    times = [round((at - T0) / SECOND) for at, _ in world.acts]
    tried = [later - before for before, later in zip(times[::2], times[1::2], strict=True)]
    waited = [later - before for before, later in zip(times[1::2], times[2::2], strict=False)]
    assert tried == [2, 2, 2] and waited == [10, 20]
    assert world.acts[1][1].because.startswith("no better 2 s after eth1 was selected") and world.acts[1][1].over


def test_a_port_that_was_left_is_not_selected_again_at_once(world: World) -> None:
    world.run(dead=world.paths)
    assert world.run(3 * SECOND) == []
    assert world.run(4 * SECOND, dead=world.paths) == []
    assert mentions(world.held, "eth0", "not selected again")
    assert world.run(5 * SECOND, dead=world.paths) == ["eth0"] and world.acts[-1][1].over


def test_of_several_ports_one_that_was_not_left_comes_first() -> None:
    ports = (*BOND.ports, (THIRD, "eth2"))
    world = World(bond=replace(BOND, ports=ports, usable=frozenset(dict(ports))))
    world.run()
    assert world.run(dead=world.paths) == ["eth1"]
    world.run(3 * SECOND)
    assert world.run(dead=world.paths) == ["eth2"] and world.engine.facts()[0]["former"] == "eth0"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"usable": frozenset({FIRST})}, "no other port of it is up"),
        ({"moves_back": "its primary is eth0"}, "its primary is eth0"),
    ],
)
def test_nothing_is_done_where_it_would_not_last(change: dict, why: str) -> None:
    world = World(bond=replace(BOND, **change))
    assert world.run() == world.run(dead=world.paths) == [] and world.held == why


def test_the_operator_may_hold_everything(world: World) -> None:
    world.known.overrides = Overrides((Override("hold"),))
    assert world.run(dead=world.paths) == [] and "the operator holds it" in world.held


def test_what_somebody_else_selects_meanwhile_stays(world: World) -> None:
    world.run(dead=world.paths)
    world.bond = replace(world.bond, active=FIRST)
    assert world.run() == []
    [act] = world.lost
    assert mentions(act.because, "eth1", "selected", "eth0", "active") and act.over
    assert world.engine.facts()[0]["former"] == ""


def test_a_dry_run_says_it_once(world: World) -> None:
    said = []
    for _ in range(250):
        world.now += STEP
        for path in world.paths:
            world.measure(path, True, False)
        world.engine.look(world.now)
        for act in world.engine.decide(world.now):
            said.append(act)
            world.engine.pretended(act, world.now)
    assert len(said) == 1


def test_a_selection_is_taken_over_only_while_it_is_active(world: World) -> None:
    assert not world.engine.adopt("bond0", SECOND_PORT, (THIRD,))
    assert world.engine.adopt("bond0", SECOND_PORT, (FIRST,)) and world.engine.facts()[0]["former"] == "eth1"


# ---- the end ----


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A bond that is on the port we selected, and the file that says so."""
    made = SimpleNamespace(bond=replace(BOND, active=SECOND_PORT), file=tmp_path / "bonds.json", refusal="")

    def select(_netlink, bond, port):
        assert bond == BOND.index
        if made.refusal:
            raise SwerveError(made.refusal)
        made.bond = replace(made.bond, active=port)

    monkeypatch.setattr(bonds, "read", lambda _: bonds.Bonds({"bond0": made.bond}, {}))
    monkeypatch.setattr(bonds, "select", select)
    made.file.parent.chmod(0o700)
    bond_ports.save(made.file, "here", [Selected("bond0", BOND.index, FIRST, (THIRD, SECOND_PORT))])
    return made


def test_the_former_port_is_put_back(kernel) -> None:
    [done] = bond_ports.restore(None, kernel.file, "here", "died")
    assert (kernel.bond.active, done.failure, done.act.because) == (FIRST, "", "died") and not kernel.file.exists()


def test_a_port_that_somebody_else_selected_stays(kernel) -> None:
    kernel.bond = replace(kernel.bond, active=14)
    [done] = bond_ports.restore(None, kernel.file, "here", "died")
    assert kernel.bond.active == 14 and "interface 14 stays active" in done.act.because and not kernel.file.exists()


def test_what_the_kernel_refuses_is_tried_again(kernel) -> None:
    kernel.refusal = "eth0 is down"
    [done] = bond_ports.restore(None, kernel.file, "here", "died")
    assert done.failure == "eth0 is down" and kernel.file.exists()
    kernel.refusal = ""
    bond_ports.restore(None, kernel.file, "here", "off")
    assert kernel.bond.active == FIRST


@pytest.mark.parametrize("what", ["scope", "torn", "index"])
def test_what_was_not_selected_here_is_left(kernel, what: str) -> None:
    if what == "torn":
        kernel.file.write_text("{")
    elif what == "index":
        kernel.bond = replace(kernel.bond, index=6)
    assert bond_ports.restore(None, kernel.file, "there" if what == "scope" else "here", "died") == []
    assert kernel.bond.active == SECOND_PORT


def test_the_guardian_puts_it_back_after_the_rules_are_gone(kernel, monkeypatch, tmp_path) -> None:
    asked = []
    monkeypatch.setattr(guardian, "switch_off", lambda _: asked.append(kernel.bond.active))
    monkeypatch.setattr(guardian, "sweep", lambda _: [])
    monkeypatch.setattr(guardian.directories, "bond_ports", lambda _: kernel.file)
    code, [act] = guardian.undo(None, tmp_path / "journal.jsonl", "here", "the controller died", "x")
    assert (code, asked, kernel.bond.active) == (0, [SECOND_PORT], FIRST)
    assert (act.actuator, act.outcome, act.after) == ("bond", "undone", {"eth1": 0, "eth0": 1})
