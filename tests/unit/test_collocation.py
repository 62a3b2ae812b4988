"""Collocation: who shares an oscillator is found, who does not is not grouped, and what is not known stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytools.estimators.collocation import Collocations, chance, groups
from pytools.estimators.drift_history import DriftHistory

Floats = NDArray[np.float64]
SECOND_NS = 1_000_000_000


@dataclass
class Solves:
    """Drifts of hosts that carry the letter of their oscillator and a number: (seconds, hosts)."""

    hosts: list[str]
    drift: Floats
    sigma: Floats
    slew: Floats

    def history(self, order: Sequence[int] | None = None) -> DriftHistory:
        chosen = list(range(len(self.hosts)) if order is None else order)
        history = DriftHistory()
        for second in range(len(self.drift)):
            row = (each[second, chosen] for each in (self.drift, self.sigma, self.slew))
            history.push(7 + second * SECOND_NS, [self.hosts[host] for host in chosen], *row)
        return history

    def verdict(self) -> Collocations:
        return groups(self.history())


def solves(
    hosts: str,
    base_ppb: dict[str, float] | None = None,
    wander_ppb: float | dict[str, float] = 100.0,
    sigma_ppb: float = 5.0,
    seconds: int = 120,
    seed: int = 1,
) -> Solves:
    """Drifts of hosts named by their oscillators: "AAB" is A0, A1, B0. Each wanders over a few minutes."""
    random = np.random.default_rng(seed)
    time = np.arange(seconds)
    frequency = {}
    for name in sorted(set(hosts)):
        phase, period = random.uniform(0, 2 * np.pi, 2), random.uniform(150, 500, 2)
        wave = np.sin(2 * np.pi * time[:, None] / period + phase).sum(axis=1)
        wander = wander_ppb[name] if isinstance(wander_ppb, dict) else wander_ppb
        frequency[name] = random.uniform(-30_000, 30_000) + wander * wave
        if base_ppb is not None and name in base_ppb:
            frequency[name] = base_ppb[name] + wander * (wave - wave[0])
    drift = np.stack([frequency[name] for name in hosts], axis=1)
    drift += random.normal(0, sigma_ppb, drift.shape)
    names = [f"{name}{hosts[:place].count(name)}" for place, name in enumerate(hosts)]
    return Solves(names, drift, np.full(drift.shape, sigma_ppb), np.zeros(drift.shape))


def together(result: Collocations) -> set[frozenset[str]]:
    return {frozenset(each.hosts) for each in result.groups}


def verdicts(result: Collocations) -> tuple[set[frozenset[str]], list[str], list[str]]:
    return together(result), result.alone, result.unknown


FLEET = "AAABBCDEFFGH"


def test_hosts_of_one_oscillator_are_grouped_and_the_others_are_alone() -> None:
    result = solves(FLEET).verdict()
    assert verdicts(result) == (
        {frozenset({"A0", "A1", "A2"}), frozenset({"B0", "B1"}), frozenset({"F0", "F1"})},
        ["C0", "D0", "E0", "G0", "H0"],
        [],
    )
    assert result.groups[0].hosts == ["A0", "A1", "A2"]
    assert all(0.99 < each.confidence <= 1 for each in result.groups)
    assert result.span_ns == 119 * SECOND_NS


def test_confidence_grows_with_the_span() -> None:
    short, long = (solves("AABCDEFG", sigma_ppb=20, seconds=seconds).verdict() for seconds in (60, 240))
    assert together(short) == together(long) == {frozenset({"A0", "A1"})}
    assert short.groups[0].confidence < long.groups[0].confidence


@settings(max_examples=25)
@given(order=st.permutations(range(len(FLEET))))
def test_the_order_of_hosts_does_not_matter(order: list[int]) -> None:
    given_order, other = groups(solves(FLEET).history()), groups(solves(FLEET).history(order))
    assert verdicts(given_order) == verdicts(other)


@settings(max_examples=25)
@given(ppb=st.floats(-1e5, 1e5), growth=st.floats(-1e3, 1e3), seed=st.integers(0, 5))
def test_what_the_reference_does_to_all_does_not_matter(ppb: float, growth: float, seed: int) -> None:
    plain = solves(FLEET, seed=seed)
    shifted = solves(FLEET, seed=seed)
    shifted.drift += ppb + growth * np.sin(np.arange(120) / 9)[:, None]
    assert verdicts(shifted.verdict()) == verdicts(plain.verdict())


@settings(max_examples=25)
@given(slew=st.lists(st.floats(-1e5, 1e5), min_size=len(FLEET), max_size=len(FLEET)))
def test_a_slew_of_the_hosts_own_time_service_is_taken_out(slew: list[float]) -> None:
    plain, slewed = solves(FLEET), solves(FLEET)
    slewed.drift += slew
    slewed.slew += slew
    assert verdicts(slewed.verdict()) == verdicts(plain.verdict())


def test_a_slew_that_changes_within_a_window_does_not_part_a_pair() -> None:
    found = solves(FLEET)
    for second in (20, 41, 60, 88):
        found.slew[second:, 0] += 300
        found.drift[second + 1 :, 0] += 300
        found.drift[second, 0] += 150  # half of the window was before
    assert frozenset({"A0", "A1", "A2"}) in together(found.verdict())


@settings(max_examples=30)
@given(
    hosts=st.text("ABCDE", min_size=1, max_size=9),
    seconds=st.sampled_from([1, 5, 40, 100]),
    missing=st.floats(0, 0.6),
    seed=st.integers(0, 99),
)
def test_every_host_is_in_one_place(hosts: str, seconds: int, missing: float, seed: int) -> None:
    found = solves(hosts, seconds=seconds, seed=seed)
    random = np.random.default_rng(seed)
    found.drift[random.uniform(size=found.drift.shape) < missing] = np.nan
    result = found.verdict()
    named = [host for each in result.groups for host in each.hosts] + result.alone + result.unknown
    assert sorted(named) == sorted(found.hosts)
    assert all(len(each.hosts) > 1 and 0 < each.confidence <= 1 for each in result.groups)


@pytest.mark.parametrize("what", ["drift", "sigma", "slew"])
@pytest.mark.parametrize("rows", [slice(0, 50), slice(100, 120), slice(0, 120), slice(0, 120, 2)])
def test_a_host_with_missing_data_is_unknown(what: str, rows: slice) -> None:
    found = solves(FLEET)
    getattr(found, what)[rows, 0] = np.nan
    result = found.verdict()
    assert result.unknown == ["A0"]
    assert frozenset({"A1", "A2"}) in together(result)


def test_a_lost_solve_now_and_then_does_no_harm() -> None:
    found = solves(FLEET)
    found.drift[np.random.default_rng(3).uniform(size=found.drift.shape) < 0.1] = np.nan
    assert verdicts(found.verdict()) == verdicts(solves(FLEET).verdict())


def test_a_wild_solve_does_no_harm() -> None:
    found = solves(FLEET)
    found.drift[60:63, 0] += 1e6
    found.drift[30, 5] -= 3e4
    assert verdicts(found.verdict()) == verdicts(solves(FLEET).verdict())


def test_close_but_different_oscillators_are_not_grouped() -> None:
    result = solves("AABBCDEF", {"A": 1000.0, "B": 1008.0}, wander_ppb=0.0).verdict()
    assert together(result) == {frozenset({"A0", "A1"}), frozenset({"B0", "B1"})}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("seconds", [10, 20, 30, 45, 60, 120])
def test_equal_frequencies_are_told_apart_by_wander_or_not_at_all(seconds: int, seed: int) -> None:
    base = {"A": 1000.0, "B": 1000.0}  # equal where they begin
    result = solves("ABCDDEFG", base, sigma_ppb=3.0, seconds=seconds, seed=seed).verdict()
    assert not any({"A0", "B0"} <= group for group in together(result))
    if seconds == 120:
        assert {"A0", "B0"} <= set(result.alone)


def test_without_wander_a_large_fleet_cannot_be_told_apart() -> None:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    result = solves(2 * names + names.lower() * 3, wander_ppb=0.0, sigma_ppb=20.0, seconds=60).verdict()
    assert not result.groups
    assert {f"{name}0" for name in names} <= set(result.unknown)


def test_too_much_noise_and_too_little_time_are_unknown() -> None:
    assert solves(FLEET, sigma_ppb=3000.0).verdict().unknown == sorted(solves(FLEET).hosts)
    assert solves(FLEET, sigma_ppb=1.0, seconds=15).verdict().unknown == sorted(solves(FLEET).hosts)
    assert verdicts(groups(DriftHistory())) == (set(), [], [])


def test_a_noisy_host_between_two_good_ones_chains_nothing() -> None:
    found = solves("ABCDEFGH", {"A": 1000.0, "B": 1006.0, "C": 1012.0}, wander_ppb=0.0, sigma_ppb=1.0)
    random = np.random.default_rng(5)
    noise = random.normal(0, 30, 120)
    found.drift[:, 1] += noise - noise.mean()
    found.sigma[:, 1] = 30
    result = found.verdict()
    assert not result.groups
    assert {"A0", "B0", "C0"} <= set(result.unknown)  # B0 may share with either: nobody of the three is surely alone
    assert {"D0", "E0"} <= set(result.alone)


def test_an_understated_noise_parts_nobody() -> None:
    found = solves(FLEET, sigma_ppb=20.0)
    found.sigma[:, 0] = 0.5
    assert "A0" not in found.verdict().alone


def test_no_false_pair_in_seeded_fleets() -> None:
    random = np.random.default_rng(11)
    for seed in range(5):
        hosts = "".join(random.choice(list("ABCDEFGHIJKLMNOP"), 48))
        true = {frozenset(f"{name}{n}" for n in range(hosts.count(name))) for name in set(hosts)}
        result = solves(hosts, sigma_ppb=10.0, seed=seed).verdict()
        assert all(any(group <= each for each in true) for group in together(result))
        assert len(together(result) & true) >= 0.9 * sum(len(each) > 1 for each in true)


@pytest.mark.parametrize(
    ("square", "freedom", "probability"),
    [(2 * np.log(100), 2, 0.01), (9.4877, 4, 0.05), (16.8119, 6, 0.01), (0.0, 6, 1.0)],
)
def test_chance_is_the_tail_of_chi_square(square: float, freedom: int, probability: float) -> None:
    assert chance(np.array([square]), freedom)[0] == pytest.approx(probability, rel=1e-4)


def test_the_history_is_bounded_and_forgets_hosts_that_left() -> None:
    history = DriftHistory(depth=10)
    for second in range(25):
        host = "early" if second < 5 else "late"
        history.push(second * SECOND_NS, ["always", host], [1.0, 2.0], [1.0, 1.0], [0.5, 0.0])
    found = history.frequencies()
    assert found.hosts == ("always", "late")
    assert found.at_ns.tolist() == [second * SECOND_NS for second in range(15, 25)]
    assert found.ppb.tolist() == [[0.5] * 10, [2.0] * 10]
    assert len(history) == 10


def test_a_host_that_comes_later_has_no_past() -> None:
    history = DriftHistory(depth=10)
    history.push(0, ["a"], [1.0], [1.0], [0.0])
    history.push(SECOND_NS, ["b", "a"], [3.0, 2.0], [1.0, 1.0], [0.0, 0.0])
    found = history.frequencies()
    assert found.hosts == ("a", "b")
    np.testing.assert_array_equal(found.ppb, [[1.0, 2.0], [np.nan, 3.0]])


def test_time_that_runs_back_begins_a_new_history() -> None:
    history = DriftHistory()
    history.push(5 * SECOND_NS, ["a"], [1.0], [1.0], [0.0])
    history.push(4 * SECOND_NS, ["b"], [2.0], [1.0], [0.0])
    assert history.frequencies().hosts == ("b",)
    assert len(history) == 1


def test_a_change_of_slew_makes_the_figures_around_it_uncertain() -> None:
    history = DriftHistory(window_ns=2 * SECOND_NS)
    for second, slew in enumerate([0.0, 0.0, 30.0, 30.0, 30.0, 30.0]):
        history.push(second * SECOND_NS, ["a"], [slew], [4.0], [slew])
    # The row before as well (the slew may be read late); the fourth window began as the slew was changed, or after.
    assert history.frequencies().sigma_ppb[0].round(1).tolist() == [4.0, 30.3, 30.3, 30.3, 4.0, 4.0]


def test_a_slew_that_creeps_hides_nothing_for_ever() -> None:
    history = DriftHistory(window_ns=2 * SECOND_NS)
    for second in range(20):
        slew = (1000.0 if second > 5 else 0.0) + 0.1 * second
        history.push(second * SECOND_NS, ["a"], [slew], [4.0], [slew])
    assert history.frequencies().sigma_ppb[0, 9:].max() < 4.1


def test_a_row_that_comes_too_soon_is_left_out() -> None:
    history = DriftHistory(window_ns=2 * SECOND_NS)
    for half in range(10):
        history.push(half * SECOND_NS // 2, ["a"], [half], [1.0], [0.0])
    assert history.frequencies().ppb.tolist() == [[0.0, 2.0, 4.0, 6.0, 8.0]]


def test_a_host_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        DriftHistory().push(0, ["a", "a"], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0])
