"""Ports, labels and bonds of a policy: a replay tells what a live dry run told; what is missing is said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import msgspec
import pytest
import samples
from policy_kit import liveness
from steering_kit import MS, SECOND, measured
from support import mentions

from pytools.recording.reader import Read
from pytools.signals import Act, AnySignal, BondPort, Link, Path, encode
from steering.acting.bonds import BondActing
from steering.acting.flows import FlowActing
from steering.acting.labels import LabelActing
from steering.acting.messages import Output
from steering.acting.ports import PortActing
from steering.actuators import bonds
from steering.deciding.engine import Engine
from steering.flows.engine import FlowEngine
from steering.plan import Bond
from steering.policy.file import parse
from steering.replay import timeline
from steering.replay.player import Event, Player
from steering.replay.recording import Recording, kinds_of

START, STEP = 10**12, 20 * MS
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16, "fd00:9::/64"]}
ports: {}
labels: {dwell: 4s}
bonds: {trial: 2s, retry_after: 10s}
rules:
  - name: dead
    when: {signal: silence}
    then: {drain: {}}
"""
OVER_BOND = [Path("h1", f"h{peer}", f"10.9.0.{peer}", "10.1.1.1", "bond0.7") for peer in (2, 3)]
BEHIND_HOP = [Path("h1", "h4", address, gateway, "rail1") for address, gateway in (("10.9.0.4", ""), ("fd00:9::4", ""))]


def port(name: str, at_ns: int, active: bool, **fields: object) -> Link:
    told = BondPort("active-backup", "layer2", active, "up", "", 0, 0, preferred=bool(fields.pop("preferred", False)))
    return samples.link(at_ns=at_ns, interface=name, upper="bond0.7", bond="bond0", port=told, paths=[], **fields)


def each_second(at_ns: int, slow: bool, **of_backup: object) -> Iterator[AnySignal]:
    """Two ways of each path behind its first hop, one of them slow or not; a VLAN on a bond of two ports."""
    for path in BEHIND_HOP:
        for number in (1, 2):
            router = f"fd00:{number}::1" if ":" in path.address else f"10.1{number}.1.1"
            state = "slow" if slow and number == 2 else "healthy"
            fixed = {"path": path, "way": number, "router": router, "differs_at": 2, "state": state}
            yield samples.path_way(at_ns=at_ns, **fixed)
    yield port("eth0", at_ns, True)
    yield port("eth1", at_ns, False, **of_backup)
    for name, paths in (("bond0", []), ("bond0.7", OVER_BOND)):
        yield samples.link(at_ns=at_ns, interface=name, bond="bond0", paths=paths)


def records(seconds: int = 30, slow: tuple[int, int] = (3, 6), dead: tuple[int, int] = (12, 26)) -> Iterator[AnySignal]:
    """Ways that are slow for a while; then nothing comes back over the bond for a while."""
    silent_ns = START + dead[0] * SECOND
    for at_ns in range(START, START + seconds * SECOND, STEP):
        second, into = divmod(at_ns - START, SECOND)
        if not into:
            yield from each_second(at_ns, slow[0] <= second < slow[1])
        is_dead = dead[0] <= second < dead[1]
        missed = (at_ns - silent_ns) // (10 * MS) if is_dead else 0
        for path in (*OVER_BOND, *BEHIND_HOP):
            bad = is_dead and path in OVER_BOND
            yield measured(path, at_ns, None if bad else 0, lost=5 if bad else 0, received=0 if bad else 5)
            yield liveness(path, at_ns, missed if bad else 0)


def played(told: Iterable[AnySignal]) -> tuple[list[Event], Player, Recording]:
    policy = parse(POLICY)
    player, recording = Player(policy), Recording(map(encode, told), Read(), kinds_of(policy))
    return list(player.play(recording)), player, recording


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[list[Act]]:
    """What the parts of a controller say that runs dry over these records."""
    policy, acts = parse(POLICY), list[Act]()
    output = Output("h1", lambda _: None, acts.append)
    engine = Engine(policy)
    bond = Bond(5, "bond0", 11, ((11, "eth0"), (12, "eth1")), frozenset({11, 12}))
    over = {"bond0": "bond0", "bond0.7": "bond0"}
    monkeypatch.setattr(bonds, "read", lambda _netlink: bonds.Bonds({"bond0": bond}, over))
    of_bonds = BondActing(policy, False, engine, SimpleNamespace(), tmp_path / "bonds", output)
    flows = FlowActing(FlowEngine(policy), engine, output)
    with flows, PortActing(policy, False, output) as of_ports, LabelActing(policy, False, flows, output) as of_labels:
        for signal in records():
            for part in (engine, of_ports, of_labels):
                part.take(signal, signal.at_ns)
            of_ports.turn(signal.at_ns)
            of_labels.turn(signal.at_ns)
            of_bonds.turn(signal.at_ns, str)
    yield acts


def test_a_replay_tells_what_a_live_dry_run_tells_of_ports_labels_and_bonds(live: list[Act]) -> None:
    events, player, recording = played(records())
    replayed = [act for act in events if isinstance(act, Act) and act.actuator in ("ports", "label", "bond")]

    def facts(act: Act) -> tuple[object, ...]:
        return act.host, act.actuator, act.what, act.target, act.before, act.after, act.under, act.outcome, act.moves

    for actuator, count in (("ports", 2), ("label", 2), ("bond", 2)):
        ours, theirs = ([act for act in acts if act.actuator == actuator] for acts in (replayed, live))
        assert [facts(act) for act in ours] == [facts(act) for act in theirs] and len(theirs) == count
        for one, other in zip(ours, theirs, strict=True):
            assert abs(one.at_ns - other.decided_ns) <= 100 * MS and one.at_ns == one.decided_ns
            assert one.because.split(":")[0] == other.because.split(":")[0]
    assert player.tally.by_rule["ports"] == player.tally.by_rule["labels"] == 2
    said = [line for line in timeline.summary_lines(recording, player) if "not recorded" in line]
    assert len(said) == 1 and mentions(said[0], "connections", "ports", "labels", "not recorded")


def test_ways_that_are_told_of_no_more_are_avoided_no_more_in_the_middle_of_a_gap() -> None:
    later = (msgspec.structs.replace(each, at_ns=each.at_ns + 3600 * SECOND) for each in records(1, (9, 9)))
    events, _, _ = played([*records(6, (3, 9)), *later])
    ports = [act for act in events if isinstance(act, Act) and act.actuator == "ports"]
    assert [act.at_ns // SECOND - START // SECOND for act in ports] == [3, 5 + 15]
    assert "its ways are not known any more" in ports[1].because


@pytest.mark.parametrize(("of_backup", "acts"), [({}, 1), ({"carrier": False}, 0), ({"preferred": True}, 0)])
def test_a_bond_is_as_its_ports_were_recorded(of_backup: dict[str, bool], acts: int) -> None:
    told = [signal for signal in records(16) if not isinstance(signal, Link)]
    told += [each for s in range(16) for each in each_second(START + s * SECOND, False, **of_backup)]
    events, _, _ = played(sorted(told, key=lambda signal: signal.at_ns))
    assert [act.after for act in events if isinstance(act, Act) and act.actuator == "bond"] == [
        {"eth0": 0, "eth1": 1}
    ] * acts


def test_a_recording_without_ways_or_bonds_says_so_in_a_line_each() -> None:
    old = (msgspec.structs.replace(each, bond="") if isinstance(each, Link) else each for each in records(2))
    _, player, recording = played(each for each in old if each.host and not hasattr(each, "differs_at"))
    ways, bonds = timeline.summary(recording, player)["not_replayed"]
    assert mentions(ways, "no hidden ways", "path_way", "ports", "labels")
    assert mentions(bonds, "no active-backup bond", "bonds")
