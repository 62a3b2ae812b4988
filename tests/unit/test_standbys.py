"""Which path stands by for which destinations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as File

import msgspec
import pytest
from support import mentions

from pytools.signals import Path
from steering.acting import messages
from steering.acting.agent_maps import AgentMaps
from steering.acting.standbys import StandByActing
from steering.actuators.standbys import Moved
from steering.deciding.engine import Engine
from steering.deciding.health import PathHealth
from steering.deciding.overrides import Override, Overrides
from steering.deciding.standbys import needed, standbys
from steering.plan import Group, Member, StandBy, weights_of
from steering.policy.file import parse

NOW = 1_000_000_000_000
TEXT = """\
version: 1
manage: {destinations: [10.0.0.0/8]}
rules:
  - name: full
    when: {signal: queueing_delay, above: 5ms, clear_below: 1ms}
    then: {drain: {}}
  - name: dead
    when: {any: [{signal: link, event: carrier_lost}, {signal: silence}]}
    then: {drain: {}}
    scope: {interfaces: ["rail*"]}
"""
POLICY = parse(TEXT)


def path(rail: int, address: str = "10.9.0.2") -> Path:
    return Path("h1", "h2", address, f"10.{rail}.1.1", f"rail{rail}")


def group(rails: int = 2, addresses: tuple[str, ...] = ("10.9.0.2",), **changes: object) -> Group:
    members = tuple(Member(10 + rail, f"10.{rail}.1.1", f"rail{rail}", 1) for rail in range(1, rails + 1))
    paths = tuple((10 + rail, path(rail, address)) for rail in range(1, rails + 1) for address in addresses)
    made = Group("nexthop_group:1", ("10.9.0.0/24",), members, weights_of((m.nexthop_id, 1) for m in members), paths)
    return replace(made, **changes)  # type: ignore[arg-type]


def health(groups: list[Group], **states: str) -> dict[Path, PathHealth]:
    """Every path in order, but for the rails that are named."""
    return {
        each: PathHealth(states.get(each.interface, "healthy"), NOW, seen_ns=NOW)  # type: ignore[arg-type]
        for one in groups
        for _, each in one.paths
    }


def found(one: Group, overrides: Overrides | None = None, text: str = TEXT, **states: str) -> list[StandBy]:
    return list(standbys(parse(text), health([one], **states), [one], overrides or Overrides()))


def test_each_of_two_paths_stands_by_for_the_other() -> None:
    one, two = found(group())
    assert one == StandBy(path(1), ("10.9.0.0/24",), path(2), "nexthop_group:1", 12, "dead")
    assert two == StandBy(path(2), ("10.9.0.0/24",), path(1), "nexthop_group:1", 11, "dead")


@pytest.mark.parametrize("state", ["unmeasured", "drained", "returning"])
def test_only_a_path_that_is_in_order_stands_by(state: str) -> None:
    assert [each.path for each in found(group(), rail2=state)] == [path(2)]


def test_what_is_armed_stays_so_while_nothing_is_heard() -> None:
    """The agent may only be late, and the kernel looks for itself."""
    one = group()
    known = health([one])
    known[path(2)] = msgspec.structs.replace(known[path(2)], seen_ns=NOW - 2 * POLICY.safety.stale_after)
    assert [each.path for each in standbys(POLICY, known, [one])] == [path(1), path(2)]


def test_a_nexthop_without_weight_stands_by_only_where_one_carries_all() -> None:
    idle = group(current=((11, 1),))
    assert [each.path for each in found(idle)] == [path(2)]
    exclusive = replace(idle, members=(idle.members[0], replace(idle.members[1], weight=0)))
    assert [each.path for each in found(exclusive)] == [path(1), path(2)]


def test_the_operators_orders_hold() -> None:
    drained = Overrides((Override("drain", interface="rail2"),))
    assert [each.path for each in found(group(), drained)] == [path(2)]
    assert found(group(), Overrides((Override("hold", target="nexthop_group:1"),))) == []


def test_a_rule_about_silence_must_cover_the_path() -> None:
    assert found(group(), text=TEXT.replace("rail*", "rail2"))[0].path == path(2)
    assert found(group(), text=TEXT.replace("{signal: silence}", "{signal: link, event: port_down}")) == []
    alert = "version: 1\nmanage: {destinations: [10.0.0.0/8]}\nrules:\n"
    alert += "  - {name: dead, when: {signal: silence}, then: {alert: {}}}\n"
    assert found(group(), text=alert) == []
    assert not needed(parse(alert))


def test_without_a_hold_time_there_is_none() -> None:
    assert needed(POLICY)
    assert not needed(parse(TEXT.replace("rules:", "safety: {reroute_hold: 0s}\nrules:")))


def test_what_one_path_carried_is_dealt_to_the_others_by_destination() -> None:
    addresses = tuple(f"10.9.0.{host}" for host in range(1, 41))
    one = group(rails=5, addresses=addresses)
    taking = [each.other.interface for each in found(one) if each.path.interface == "rail1"]
    assert len(taking) == 40
    assert {taking.count(f"rail{rail}") for rail in range(2, 6)} <= set(range(4, 18))
    assert found(one) == found(one)


def test_a_prefix_with_several_peers_is_not_moved_for_one_of_them() -> None:
    one = group(addresses=("10.9.0.2", "10.9.0.3"))
    assert {each.path.address: each.prefixes for each in found(one)} == {
        "10.9.0.2": ("10.9.0.2/32",),
        "10.9.0.3": ("10.9.0.3/32",),
    }


def test_a_prefix_without_a_peer_of_its_own_belongs_to_the_only_one() -> None:
    one = group(destinations=("10.9.0.0/24", "10.77.0.0/16"))
    assert {each.prefixes for each in found(one)} == {("10.9.0.0/24", "10.77.0.0/16")}
    two = group(addresses=("10.9.0.2", "10.77.0.3"), destinations=("10.9.0.0/24", "10.77.0.0/16", "10.55.0.0/16"))
    assert {each.path.address: each.prefixes for each in found(two)} == {
        "10.9.0.2": ("10.9.0.0/24",),
        "10.77.0.3": ("10.77.0.0/16",),
    }


PACKET_NS = 40_000_000  # when the kernel moved the first packet
PROBE_NS = PACKET_NS - 17_000_000  # when the first unanswered probe left


def moved(since_ns: int = 0, lasted_ns: int = 0, waited_ns: int = 0) -> Moved:
    one = found(group())[0]
    return Moved(one, 7, 700, PACKET_NS, 10 * PACKET_NS, since_ns, lasted_ns, waited_ns)


def test_before_an_answer_a_move_is_not_told_as_silence() -> None:
    act = messages.rerouted("h1", moved(since_ns=PROBE_NS), NOW)
    facts = (str(path(1)), "no answer", "17 ms", f"{path(2)} answers", "silent", "queue", "kernel moved 7 packets")
    assert mentions(act.because, *facts)
    assert (act.seen_ns, act.under) == (PACKET_NS, "dead")


@pytest.mark.parametrize(
    ("lasted", "waited", "told"),
    [
        (131_000_000, 128_000_000, ("queue", "not a dead path", "128 ms")),  # a late answer
        (160_000_000, 90_000_000, ("queue", "not a dead path", "90 ms")),  # some lost at its end
        (4_000_000_000, 200_000, ("silent for 4 s",)),
        (4_000_000_000, 128_000_000, ("silent for 4 s",)),  # and had a queue when it was back
        (20_000_000, 10_000_000, ("silent for 20 ms",)),
    ],
)
def test_an_answer_tells_a_queue_from_a_dead_path(lasted: int, waited: int, told: tuple[str, ...]) -> None:
    known = moved(lasted_ns=lasted, waited_ns=waited)
    began = messages.rerouted("h1", known, NOW)
    assert mentions(began.because, *told, "answers again")
    over = messages.reroute_over(began, known, 7, 700, 360_000_000, NOW + 1)
    assert mentions(over.because, "kernel moved 7 packets", "700 bytes", "360 ms", *told)
    assert (over.act_id, over.outcome, over.before) == (began.act_id, "undone", began.after)


def test_the_end_of_a_move_from_a_path_that_is_still_silent_says_nothing_of_why() -> None:
    known = moved(since_ns=PROBE_NS)
    over = messages.reroute_over(messages.rerouted("h1", known, NOW), known, 1, 100, 0, NOW + 1)
    assert mentions(over.because, "kernel moved 1 packet", "100 bytes", "0 ms")
    assert not any(word in over.because for word in ("queue", "silent", "answer", str(path(1))))


class Kernel:
    """What would stand by, and until when: a lease without any stand-by ends at once, as in the kernel's table."""

    def __init__(self) -> None:
        self.armed: tuple[StandBy, ...] = ()
        self.until_ns = 0
        self.dead: set[Path] = set()  # stand-bys whose neighbour does not answer
        self.paths = self
        self.lent = True

    def arm(self, wanted: tuple[StandBy, ...]) -> dict[Path, str]:
        self.armed = wanted
        return {}

    def alive(self, armed: StandBy) -> bool:
        return armed.other not in self.dead

    def moved(self) -> list[Moved]:
        return []

    def renew(self, until_ns: int, hold_ns: int) -> None:
        self.until_ns = until_ns if self.armed else 0


def acted() -> tuple[StandByActing, Kernel, AgentMaps]:
    """What keeps the stand-bys of one target with two healthy paths."""
    engine, only = Engine(POLICY), group()
    engine.groups[only.target] = only
    engine.paths.update(health([only]))
    output = messages.Output("h1", print, print)
    return StandByActing(POLICY, engine, output), Kernel(), AgentMaps(File("nobody"), output)


def test_no_standby_is_told_of_without_a_lease():
    """Who reads that two paths have a stand-by may stop the controller in the same moment."""
    acting, kernel, maps = acted()
    acting.turn(NOW, kernel, maps, "")
    assert acting.facts() == {"standbys": 2, "standbys_missing": ""}
    assert kernel.until_ns == NOW + POLICY.safety.lease
    acting.turn(NOW + 1, kernel, maps, "nobody guards")
    assert acting.facts() == {"standbys": 0, "standbys_missing": "nobody guards"}
    assert kernel.until_ns == 0


def test_a_standby_with_a_dead_neighbour_is_not_counted():
    acting, kernel, maps = acted()
    kernel.dead = {path(2)}
    acting.turn(NOW, kernel, maps, "")
    assert len(kernel.armed) == 2 and acting.facts()["standbys"] == 1
