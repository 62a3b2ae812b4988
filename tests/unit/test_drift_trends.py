"""Where drifts are heading: from drifts alone, and what it does to the offsets and drifts of all clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytools.estimators.clock_graph import Edges, solve
from pytools.estimators.drift_trends import DriftTrend, DriftTrends, Trends, slope
from pytools.estimators.offsets import MEMORY_S, WANDER_PPB_PER_S
from pytools.sources.clocks.messages import VERSION, Edge
from pytools.sources.clocks.messages import Edges as EdgesTold
from pytools.sources.clocks.timescale import Timescale

S = 10**9
Floats = NDArray[np.float64]
WINDOW_S = 2.0
BEGIN_NS = 1_000 * S


def fed(drifts_ppb: list[float], sigma_ppb: float = 4.0, every_ns: int = S) -> DriftTrend:
    """The trend of drifts that were measured one after the other."""
    trend = DriftTrend(WINDOW_S)
    for place, drift_ppb in enumerate(drifts_ppb):
        trend.push(BEGIN_NS + place * every_ns, drift_ppb, sigma_ppb)
    return trend


@given(st.floats(-15, 15), st.floats(-1e5, 1e5), st.sampled_from([S // 8, S // 2, S]))
def test_a_drift_that_changes_steadily_has_that_slope(rate: float, drift: float, every_ns: int) -> None:
    seconds = np.arange(MEMORY_S * S / every_ns) * every_ns * 1e-9
    found = fed((drift + rate * seconds).tolist(), 0.5, every_ns).ppb_per_s
    assert abs(found) <= abs(rate) + 1e-6
    assert found == pytest.approx(rate, abs=0.1)


@given(st.floats(-1e6, 1e6), st.integers(0, 40))
def test_a_steady_drift_has_none(drift: float, count: int) -> None:
    assert fed([drift] * count).ppb_per_s == 0.0


@pytest.mark.parametrize("rate", [0.0, 8.0, -16.0])
def test_the_errors_of_drifts_hardly_turn_it(rate: float) -> None:
    rng = np.random.default_rng(1)
    of_halves = rng.normal(0, 4.0, (300, 26))
    errors = (of_halves[:, 1::2] + of_halves[:, ::2]) / np.sqrt(2)
    found = np.array([fed((rate * np.arange(13) + row).tolist()).ppb_per_s for row in errors])
    assert np.abs(found - rate).mean() < 0.4
    assert np.sqrt(np.mean((found - rate) ** 2)) < 0.6


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e6)), max_size=40))
def test_no_slope_is_steeper_than_what_bounds_take_in(drifts: list[tuple[float, float]]) -> None:
    trend = DriftTrend(WINDOW_S)
    for place, (drift_ppb, sigma_ppb) in enumerate(drifts):
        trend.push(BEGIN_NS + place * S, drift_ppb, sigma_ppb)
        assert abs(trend.ppb_per_s) <= WANDER_PPB_PER_S


@pytest.mark.parametrize("jump", [100.0, -500.0, 30_000.0])
def test_a_rate_that_jumps_has_no_slope(jump: float) -> None:
    trend = fed([0.0] * 12)
    for place in range(12, 30):  # a window that straddles the jump shows half of it
        trend.push(BEGIN_NS + place * S, jump / 2 if place == 12 else jump, 4.0)
        assert trend.ppb_per_s == pytest.approx(0, abs=0.1)


def test_a_clock_that_was_set_back_begins_anew() -> None:
    trend = fed((10.0 * np.arange(12)).tolist())
    assert trend.ppb_per_s == pytest.approx(10, abs=0.2)
    trend.push(BEGIN_NS, 110.0, 4.0)
    assert trend.ppb_per_s == 0.0


def test_drifts_that_say_nothing_have_no_say() -> None:
    rows = [
        (BEGIN_NS + place * S, 10.0 * place if place % 2 else 400.0, 4.0 if place % 2 else 1e4) for place in range(12)
    ]
    assert slope(rows, WINDOW_S) == pytest.approx(10, abs=0.3)


def test_hosts_that_left_are_forgotten() -> None:
    trends = DriftTrends(WINDOW_S, 0.0)
    for place in range(8):
        trends.push(place * S, ["a", "b"], np.array([10.0, -10.0]) * place, np.ones(2), np.zeros(2))
    assert trends.of(["b", "ref", "a"]).ppb_per_s == pytest.approx([-10, 0, 10], abs=0.2)
    trends.push(8 * S, ["a"], np.array([80.0]), np.ones(1), np.zeros(1))
    assert trends.of(["b", "a"]).ppb_per_s == pytest.approx([0, 10], abs=0.2)


# ---- clocks whose drift changes ----

RATES = np.array([0.0, 15.0, -12.0, 9.0, -16.0])  # ppb per second
DRIFTS = np.array([0.0, 20_000.0, -30_000.0, 5_000.0, 100.0])


def offsets_ns(true_s: float) -> Floats:
    """Of all clocks against the first, which shows the true time."""
    return np.asarray(DRIFTS * true_s + RATES * true_s**2 / 2)


def line(owner: int, peer: int, epoch_s: float) -> tuple[float, float]:
    """Offset and drift of the line through a window with this middle, by least squares, as of the owner's clock."""
    times = epoch_s + np.linspace(-WINDOW_S / 2, WINDOW_S / 2, 201)
    apart = (DRIFTS[peer] - DRIFTS[owner]) * times + (RATES[peer] - RATES[owner]) * times**2 / 2
    drift, offset = np.polyfit(times - epoch_s, apart, 1)
    return float(offset), float(drift)


def edges_at(epoch_s: float) -> Edges:
    pairs = [(owner, peer) for owner in range(5) for peer in range(5) if owner != peer]
    lines = [line(owner, peer, epoch_s) for owner, peer in pairs]
    owners = np.array([owner for owner, _ in pairs])
    offset = np.array([round(each[0]) for each in lines])
    count = len(pairs)
    return Edges(
        owner=owners,
        peer=np.array([peer for _, peer in pairs]),
        epoch_ns=np.array([round(epoch_s * S + offsets_ns(epoch_s)[owner]) for owner in owners]),
        offset_ns=offset,
        drift_ppb=np.array([each[1] for each in lines]),
        sigma_ns=np.full(count, 5.0),
        drift_sigma_ppb=np.full(count, 5.0),
        bound_ns=np.full(count, 300),
        hard_low_ns=offset - 2_000,
        hard_high_ns=offset + 2_000,
    )


def test_all_clocks_are_carried_along_parabolas() -> None:
    edges, now_s, ahead_s = edges_at(1_000.0), 1_001.8, 0.5
    plain = solve(edges, 5, 0, round(now_s * S))
    found = solve(edges, 5, 0, round(now_s * S), None, Trends(RATES, WINDOW_S, ahead_s))
    assert np.abs(plain.offset_ns - offsets_ns(now_s)).max() > 15
    assert np.abs(found.offset_ns - offsets_ns(now_s)).max() < 2
    assert found.drift_ppb == pytest.approx(DRIFTS + RATES * (now_s + ahead_s), rel=1e-4, abs=0.1)
    assert found.measured_drift_ppb == pytest.approx(plain.drift_ppb, abs=0.01)
    assert found.measured_ago_s == pytest.approx([1.8] * 5, abs=1e-3)
    assert np.all(np.abs(found.offset_ns - offsets_ns(now_s)) <= found.hard_bound_ns)


@given(st.integers(-(2**60), 2**60), st.sampled_from([1, -1]))
def test_an_edge_of_another_time_harms_nobody_else(epoch_ns: int, sign: int) -> None:
    """One host made it up; trends would carry it to any offset, and its drift below -1."""
    edges, now_ns = edges_at(1_000.0), 1_001 * S + 800_000_000
    bad = edges.take(np.flatnonzero((edges.owner == 4) & (edges.peer == 1)))
    every = {name: np.concatenate([column, getattr(bad, name)]) for name, column in vars(edges).items()}
    every["epoch_ns"][-1] = epoch_ns
    trends = Trends(np.array([0.0, *[sign * WANDER_PPB_PER_S] * 3, -sign * WANDER_PPB_PER_S]), WINDOW_S, 0.5)
    found, clean = (solve(each, 5, 0, now_ns, None, trends) for each in (Edges(**every), edges))
    assert np.abs(found.offset_ns[2:4] - clean.offset_ns[2:4]).max() < 60
    assert np.abs(found.drift_ppb[2:4] - clean.drift_ppb[2:4]).max() < 30


def test_who_solves_learns_the_trends_and_tells_drifts_for_the_interval_to_come() -> None:
    scale = Timescale("h0", S, "h0", round(WINDOW_S * S))
    late = []
    for second in range(1_000, 1_020):
        edges, now_s = edges_at(second - 1.3), float(second)
        now_ns = round(now_s * S)
        for owner in range(5):
            own = edges.take(np.flatnonzero(edges.owner == owner))
            columns = {name: column.tolist() for name, column in vars(own).items() if name not in ("owner", "peer")}
            counts = {"pairs_kept": 80, "pairs_rejected": 0, "stepped": False}
            figures = [dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)]
            rows = [Edge(f"h{peer}", **each, **counts) for peer, each in zip(own.peer, figures, strict=True)]
            scale.hear(f"h{owner}", EdgesTold(VERSION, None, rows), now_ns)
        told = scale.solve(now_ns, now_ns, 0)
        scale.adopt("h0", told, now_ns)
        one_later = np.array([clock.offset_ns + clock.drift_ppb for clock in told.hosts])
        late.append(np.abs(one_later - offsets_ns(now_s + 1)).max())
    assert late[0] > 35, "a line alone is that far off after a second"
    assert max(late[10:]) < 5
