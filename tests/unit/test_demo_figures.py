"""The figures of the demo: what arrived of what was offered, what is in use, the 99th percentile, a reversal."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import samples

from pytools.signals import Act, Delay, Path, PathState
from steering.demo import phases, traffic
from steering.demo.observe import Record, idle_spans, in_use
from steering.demo.phases import first_act_ns, p99, reversals, shown_ns

SECOND = 1_000_000_000
PATH = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
OTHER = Path("h1", "h2", "10.9.0.2", "10.2.1.1", "rail2")


def state(at_ns: int, weight: int) -> PathState:
    return samples.path_state(at_ns=at_ns, unix_ns=0, path=PATH, weight_wanted=weight, weight_actual=weight)


def act(rail1: tuple[int, int], acknowledged_ns: int | None = 1, outcome: str = "applied", to: int = 2) -> Act:
    before, after = ({"rail1": weight, "rail2": 1} for weight in rail1)
    where = {"what": f"routes to 10.9.0.{to}/32", "target": f"overlay:main:10.9.0.{to}/32"}
    return samples.act(before=before, after=after, outcome=outcome, acknowledged_ns=acknowledged_ns, **where)


class Offered:
    """A load of which every byte arrives: 60 Mbit/s a pair, read pair by pair, which takes 40 ms each."""

    offered_bit_s = 120e6

    def __init__(self, clock: Clock) -> None:
        self.measured_from_ns, self._clock = clock.now_ns + SECOND, clock

    def __enter__(self) -> Offered:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def broken(self) -> tuple[str, ...]:
        return ()

    def received(self) -> list[traffic.Received]:
        found = []
        for _ in range(2):
            self._clock.sleep(0.04)
            found.append(traffic.Received(self._clock.now_ns, self._clock.now_ns * 60_000_000 // (8 * SECOND)))
        return found


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)


def test_of_what_is_offered_all_has_arrived_however_long_the_readings_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(phases, "time", clock)
    monkeypatch.setattr(traffic, "Load", lambda *_: Offered(clock))
    monkeypatch.setattr(traffic, "transmitted_packets", lambda _: {})
    monkeypatch.setattr(traffic, "established_resets", lambda _: 0)
    lab, observer = SimpleNamespace(hosts=["h1"]), SimpleNamespace(take=Record)
    stage = phases.Stage(lab, observer, 60_000_000, 0)  # type: ignore[arg-type]
    phase = stage.play("congested", 8, onset=lambda: clock.sleep(0.1))
    assert phase.goodput_share == pytest.approx(1.0, abs=1e-6)
    assert phase.duration_s == 8.0


def test_each_pair_counts_between_its_own_readings() -> None:
    before = [traffic.Received(0, 1_000), traffic.Received(SECOND, 5_000)]
    after = [traffic.Received(2 * SECOND, 3_000), traffic.Received(2 * SECOND, 5_500)]
    assert traffic.bit_rate(before, after) == 8 * (1_000 + 500)


def test_a_path_is_idle_from_its_drain_to_its_return() -> None:
    states = [state(30, 0), state(10, 1), state(50, 2), state(40, 0), state(80, 0)]
    assert idle_spans(states, 100) == [(30, 50), (80, 100)]
    assert idle_spans([state(10, 1)], 100) == []


def test_only_probes_on_paths_that_carry_weight_count() -> None:
    record = Record(states=[state(30, 0), state(50, 1)])
    record.samples[PATH] = [(5, 1.0), (10, 2.0), (30, 3.0), (49, 4.0), (50, 5.0), (90, 6.0)]
    record.samples[OTHER] = [(40, 7.0), (60, np.inf)]
    assert sorted(in_use(record, None, 10, 90)) == [2.0, 5.0, 7.0, np.inf]
    assert sorted(in_use(record, "rail1", 10, 90)) == [7.0, np.inf]


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        (range(1, 101), 99.0),
        ([*range(1, 100), np.inf], 99.0),  # one lost of a hundred
        ([*range(1, 99), np.inf, np.inf], None),  # two lost: the percentile itself is a lost probe
        ([], None),
    ],
)
def test_a_lost_probe_waits_for_ever(delays: list[float], expected: float | None) -> None:
    assert p99(np.array(list(delays), float)) == expected


def test_a_reversal_is_weight_given_back_and_taken_again() -> None:
    drain, back, step = act((1, 0)), act((0, 1)), act((1, 5))
    assert reversals([]) == 0
    assert reversals([drain]) == 0
    assert reversals([drain, back, step]) == 0
    assert reversals([drain, back, drain]) == 1
    assert reversals([drain, back, drain, back, drain]) == 2
    assert reversals([drain, act((1, 0), to=3)]) == 0, "each target counts for itself"
    assert reversals([drain, back, act((1, 0), outcome="failed")]) == 0


def test_the_first_act_is_the_first_that_the_kernel_acknowledged() -> None:
    acts = [act((1, 0), None, "failed"), act((0, 1), 20), act((1, 0), 70), act((1, 0), 40, to=3)]
    assert first_act_ns(acts, "h1", "rail1") == 40
    assert first_act_ns(acts, "h2", "rail1") is None
    assert first_act_ns(acts, "h1", "rail2") is None


@pytest.mark.parametrize(
    ("last", "p50", "overtaken", "shown"),
    [(0, 43, None, 43), (42, None, None, 42), (0, 0, 12, 12), (None, None, None, 0)],
)
def test_a_signal_shows_the_longest_wait_it_has(
    last: int | None, p50: int | None, overtaken: int | None, shown: int
) -> None:
    forward = Delay(3, queueing_last_ns=last, queueing_p50_ns=p50)
    assert shown_ns(samples.path_delay(forward=forward, overtaken_forward_p50_ns=overtaken)) == shown
