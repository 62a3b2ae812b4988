"""Slow host or slow link: fabrics with one planted, and strays among the witnesses."""

from __future__ import annotations

import numpy as np
import pytest

from pytools.estimators.suspects import Thing, Witness, suspects

HOSTS, RAILS, QUEUE_PAIRS = 8, 2, 2
USUAL = 100e9


def fabric(slow: Thing | None, seed: int, strays: float = 0.03, deaf: float = 0.05, by: float = 0.7) -> list[Witness]:
    """Every host sends to every other over every rail; what lies on the slow thing complains, nearly always."""
    rng = np.random.default_rng(seed)
    found = []
    for source in range(HOSTS):
        for destination in range(HOSTS):
            for rail in range(RAILS):
                for _ in range(QUEUE_PAIRS if source != destination else 0):
                    things: tuple[Thing, ...] = (
                        ("host", f"h{source}"),
                        ("link", f"h{source}:rail{rail}"),
                        ("host", f"h{destination}"),
                    )
                    hit = slow in things and rng.random() > deaf
                    stray = rng.random() < strays
                    complains = hit or stray
                    now = USUAL * (1 - by if hit else 0.45 if stray else rng.uniform(0.9, 1.1))
                    found.append(
                        Witness(things, things if complains else (), USUAL, now, "congested" if complains else "ok")
                    )
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slow", [("host", "h3"), ("link", "h5:rail1"), None], ids=str)
def test_what_was_planted_is_named_and_nothing_else(slow: Thing | None, seed: int) -> None:
    found = suspects(fabric(slow, seed))
    assert [(each.kind, each.name) for each in found] == ([slow] if slow else [])
    if slow:
        assert found[0].slowness == pytest.approx(0.68, abs=0.12)
        assert found[0].agreeing <= found[0].queue_pairs


def test_two_are_ranked_by_slowness() -> None:
    bad: dict[Thing, float] = {("host", "h1"): 0.6, ("link", "h6:rail0"): 0.9}
    found = []
    for witness in fabric(None, 1, strays=0.0):
        worst = max((share for thing, share in bad.items() if thing in witness.things), default=0.0)
        complains = witness.things if worst else ()
        verdict = "congested" if worst else "ok"
        found.append(Witness(witness.things, complains, USUAL, USUAL * (1 - worst), verdict))
    assert [each.name for each in suspects(found)] == ["h6:rail0", "h1"]


def test_a_slow_receiver_speaks_against_the_host_alone() -> None:
    def witness(rail: int, destination: str, verdict: str) -> Witness:
        there: Thing = ("host", destination)
        things: tuple[Thing, ...] = (("host", "a"), ("link", f"a:rail{rail}"), there)
        return Witness(things, (there,) if verdict != "ok" else (), USUAL, 0.2 * USUAL, verdict)

    found = suspects([witness(rail, "b", "slow_receiver") for rail in (0, 1)])
    assert [(each.kind, each.name, each.agreeing) for each in found] == [("host", "b", 2)]
    assert "2 slow_receiver" in found[0].reason


def test_one_witness_is_none() -> None:
    things: tuple[Thing, ...] = (("host", "a"), ("link", "a:eth0"), ("host", "b"))
    assert suspects([Witness(things, things, USUAL, 0.0, "dead")]) == []
    assert suspects([]) == []


def test_what_cannot_be_told_apart_is_said_to_be_so() -> None:
    things: tuple[Thing, ...] = (("host", "a"), ("link", "a:eth0"), ("host", "b"))
    found = suspects([Witness(things, things, USUAL, 0.0, "dead")] * 4)
    assert {(each.kind, each.name) for each in found} == set(things)
    assert all("not told apart" in each.reason for each in found)


def test_a_bandwidth_that_was_never_known_is_all_missing() -> None:
    things: tuple[Thing, ...] = (("host", "b"),)
    assert suspects([Witness(things, things, 0.0, 0.0, "dead")] * 2)[0].slowness == 1.0
