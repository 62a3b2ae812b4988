"""What an agent publishes of clocks when one of them was stepped: never the old offset as synchronised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from oscillators import SECOND_NS, Crystal, edges_of

from pytools.config import AgentConfig, Clocks
from pytools.ipc.bus import Bus
from pytools.signals import Clock
from pytools.sources.clocks import messages
from pytools.sources.clocks.source import ClockSource
from pytools.sources.clocks.timescale import Timescale
from pytools.sources.probing.mesh import ProbeMesh

NOW_NS = 1_000 * SECOND_NS
CRYSTALS = {"h1": Crystal(0, 0), "h2": Crystal(9_000, 3_000), "h3": Crystal(-7_000, -2_500)}


class Agent:
    """The clock source of h2, which has just been told the clocks of all; no probe is under way."""

    def __init__(self, reference: str) -> None:
        self.published: list[Clock] = []
        self.in_doubt: set[str] = set()
        self.paths = [SimpleNamespace(index=place, peer=SimpleNamespace(name=name)) for place, name in enumerate(PEERS)]
        clocks = SimpleNamespace(in_doubt=lambda index: PEERS[index] in self.in_doubt)
        mesh = SimpleNamespace(
            paths=SimpleNamespace(current=self.paths),
            measurements=SimpleNamespace(clocks=clocks),
            has_own_clock=lambda _: True,
            stamping_clock=lambda now_ns: now_ns,
        )
        bus = SimpleNamespace(wanted=lambda tag, **_: tag == "clock", publish=self.published.append)
        self.source = ClockSource(AgentConfig(host="h2", peers=[]), cast(ProbeMesh, mesh), None, cast(Bus, bus))
        scale = Timescale(reference, SECOND_NS // 2, reference)
        for name in CRYSTALS:
            scale.hear(name, edges_of(name, CRYSTALS, NOW_NS), NOW_NS)
        self.told = scale.solve(CRYSTALS[reference].at(NOW_NS), NOW_NS, 0)
        self.reference = reference
        self.adopt(NOW_NS)

    def adopt(self, now_ns: int) -> None:
        self.source.timescale.adopt(self.reference, self.told, now_ns)

    def states(self, now_ns: int) -> dict[str, Any]:
        """What is published of each clock at the end of a round."""
        self.published.clear()
        self.source.notice_doubts(now_ns)
        self.source.publish(now_ns)
        for clock in self.published:
            assert (clock.offset_ns is None) == (clock.state == "free_running")
        return {clock.of: clock.state for clock in self.published}


PEERS = ["h1", "h3"]
FREE, SYNCHRONISED = "free_running", "synchronised"


@pytest.mark.parametrize(
    ("doubted", "reference", "states"),
    [
        ([], "h1", {"h1": SYNCHRONISED, "h2": SYNCHRONISED, "h3": SYNCHRONISED}),
        (["h3"], "h1", {"h1": SYNCHRONISED, "h2": SYNCHRONISED, "h3": FREE}),
        (["h1"], "h1", {"h1": SYNCHRONISED, "h2": FREE, "h3": FREE}),  # the reference: all offsets are old
        (["h1", "h3"], "h1", {"h1": SYNCHRONISED, "h2": FREE, "h3": FREE}),  # our own clock
        (["h1"], "h3", {"h1": FREE, "h2": SYNCHRONISED, "h3": SYNCHRONISED}),
    ],
)
def test_an_offset_of_before_a_step_is_not_called_synchronised(
    doubted: list[str], reference: str, states: dict[str, str]
) -> None:
    agent = Agent(reference)
    agent.in_doubt = set(doubted)
    assert agent.states(NOW_NS) == states


def test_a_result_of_hosts_that_had_not_seen_the_step_is_not_believed_either() -> None:
    agent = Agent("h1")
    agent.in_doubt = {"h1"}
    agent.states(NOW_NS)
    agent.in_doubt = set()
    for after_ns, state in ((SECOND_NS, FREE), (2 * SECOND_NS, SYNCHRONISED)):
        agent.adopt(NOW_NS + after_ns)
        assert agent.states(NOW_NS + after_ns)["h3"] == state


def test_a_drift_that_is_hardly_known_makes_no_bound_wider_than_the_hard_one() -> None:
    agent = Agent("h1")
    hosts = [replace(each, drift_sigma_ppb=3e5) for each in agent.told.hosts]
    agent.source.timescale.adopt("h1", replace(agent.told, hosts=hosts), NOW_NS)
    agent.states(NOW_NS + SECOND_NS // 2)
    for clock in agent.published:
        assert clock.bound_ns is not None and clock.hard_bound_ns is not None
        assert clock.bound_ns <= clock.hard_bound_ns


def test_the_messages_of_a_reference_that_was_stepped_call_nobody_synchronised() -> None:
    scale = Timescale("h1", SECOND_NS // 2, "h1")
    for name in CRYSTALS:
        scale.hear(name, edges_of(name, CRYSTALS, NOW_NS), NOW_NS)
    for peer in ("h2", "h3"):
        scale.doubt(peer, NOW_NS)
    told = scale.solve(NOW_NS, NOW_NS, 0)
    assert messages.decode_clocks(messages.encode(told)) == told
    assert {clock.state for clock in told.hosts} == {FREE}


class Rounds:
    """The clock source of h2 ticked forty times a second; no probe is answered, unless `pairs` says so."""

    def __init__(self, hosts: Any = None) -> None:
        nothing = np.zeros((0, 2), np.int64)
        paths = [SimpleNamespace(index=place, peer=SimpleNamespace(name=name)) for place, name in enumerate(PEERS)]
        self.fitted: list[int] = []
        self.pairs = [nothing] * 4
        self.clocks = SimpleNamespace(in_doubt=lambda _: False, contradictions=0)
        self.mesh = SimpleNamespace(
            paths=SimpleNamespace(current=paths),
            has_own_clock=lambda _: True,
            stamping_clock=lambda now_ns: now_ns,
            measurements=SimpleNamespace(
                clocks=self.clocks,
                set_offset=lambda index, _, now_ns: self.fitted.append(now_ns) if index == 0 else None,
            ),
            sender=SimpleNamespace(pairs=lambda *_: self.pairs, singles=lambda *_: [nothing[:, 0]] * 4),
        )
        bus = SimpleNamespace(wanted=lambda *_, **__: False)
        config = AgentConfig(host="h2", peers=[], clocks=Clocks(interval_ms=1000))
        self.source = ClockSource(config, cast(ProbeMesh, self.mesh), hosts, cast(Bus, bus))
        self.now_ns = NOW_NS

    def in_seconds(self, seconds: int) -> list[float]:
        """When all paths were fitted during the next seconds."""
        begin_ns = self.now_ns
        self.fitted.clear()
        while self.now_ns < begin_ns + seconds * SECOND_NS:
            self.source.tick(self.now_ns)
            self.now_ns += SECOND_NS // 40
        return [(at_ns - begin_ns) / SECOND_NS for at_ns in self.fitted]


def test_rounds_are_an_interval_apart_but_quicker_for_new_paths() -> None:
    agent = Rounds()
    assert agent.in_seconds(4)[:6] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625]
    agent.in_seconds(2)
    assert len(agent.in_seconds(10)) == 10
    agent.mesh.paths.current.append(SimpleNamespace(index=2, peer=SimpleNamespace(name="h4")))
    assert len(agent.in_seconds(10)) >= 20


def test_a_sample_that_contradicts_the_clocks_begins_a_round_at_once() -> None:
    agent = Rounds()
    agent.in_seconds(10)
    agent.source.tick(agent.now_ns)  # a round has just begun, or begins within a second
    agent.now_ns += SECOND_NS // 20
    agent.clocks.contradictions = 1
    agent.clocks.in_doubt = lambda index: index == 0
    rounds = agent.in_seconds(1)
    assert rounds[:4] == [0.0, 0.125, 0.25, 0.375]
    agent.clocks.in_doubt = lambda _: False
    assert len(agent.in_seconds(10)) <= 20


def test_a_host_that_is_told_of_a_step_looks_at_once() -> None:
    told = list[tuple[str, bytes]]()
    hosts = SimpleNamespace(
        receive=lambda topic: [told.pop()] if told and topic == messages.EDGES else [], send=lambda *_: None
    )
    agent = Rounds(hosts)
    agent.in_seconds(10)
    agent.source.tick(agent.now_ns)
    agent.now_ns += SECOND_NS // 20
    told.append(("h3", messages.encode(edges_of("h3", CRYSTALS, NOW_NS, stepped=True))))
    assert agent.in_seconds(1)[:2] == [0.0, 0.125]
    assert len(agent.in_seconds(10)) >= 12


@pytest.mark.parametrize(("span_ms", "known"), [(160, False), (360, False), (440, True)])
def test_the_drift_that_a_few_pairs_show_is_not_believed(span_ms: int, known: bool) -> None:
    agent = Rounds()
    at_ns = NOW_NS - np.arange(0, span_ms + 1, 40)[::-1, None] * 1_000_000 + [0, 1000]
    agent.pairs = [at_ns, np.full(at_ns.shape, 7_000), at_ns, np.full(at_ns.shape, 3_000)]
    agent.source.tick(NOW_NS)
    offset = agent.source.between("h1", NOW_NS)
    assert (offset is not None) == known
    assert offset is None or abs(offset.at(NOW_NS) - 2_000) < 100


def test_while_probes_wait_the_line_goes_on_as_its_drift_does() -> None:
    """A clock whose drift changes by 15 ppb a second; after 15 s all probes wait, in one direction, for 5 s."""
    agent, rate, begin_ns = Rounds(), 15.0, NOW_NS

    def ahead_ns(at_ns: Any) -> Any:
        seconds = (at_ns - begin_ns) * 1e-9
        return 5_000.0 * seconds + rate * seconds**2 / 2

    def pairs(_: int, since_ns: int) -> list[Any]:
        first_ns = max(since_ns, begin_ns)
        at_ns = np.arange(first_ns, agent.now_ns, 20_000_000)[:, None] + [0, 1000]
        offset = np.rint(ahead_ns(at_ns)).astype(np.int64)
        waited = np.where(at_ns > begin_ns + 15 * SECOND_NS, 3_000, 0)
        return [at_ns, 2_000 + waited + offset, at_ns, 2_000 - offset]

    agent.mesh.sender.pairs = pairs
    agent.now_ns += SECOND_NS
    agent.in_seconds(14)
    errors = []
    for _ in range(5):
        agent.in_seconds(1)
        known = agent.source.between("h1", agent.now_ns)
        assert known is not None
        errors.append(abs(known.at(agent.now_ns) - ahead_ns(agent.now_ns)))
        assert errors[-1] <= known.bound_ns
    assert max(errors) < 25, "its drift as of before would be off by 90 ns"
