"""Live TCP elephants over 2 and 4 rails, one rail cut to a tenth: how near to the max-min fair optimum, how soon.

    python bench/elephants.py [--trials 20] [--rails 2 4] [--small-loop]

Eight CUBIC connections of iperf3 from one host to another over rails of 100 Mbit/s; routing's hash has placed them.
The rail that most of them are on is cut to 10 Mbit/s. `swerve steer run --apply` with one rule moves them by pins (the
small loop instead: the same engine and pins without weights, guardian and journal).

placing_ratio
    of the fair rates that the placing gives at the true rates of the rails, 1 s after the cut: the sum of
    min(rate, optimum's rate of the same rank) over the sum of the optimum's. 1 is the max-min fair optimum of flows
    that cannot be split, found by trying every spread. placing_lowest: the smallest ratio of two rates of equal rank.
optimum_ratio
    what arrived from 1 s to 2 s after the cut, all connections together, over the optimum's total. Payload bytes.
fair_ratio
    the same time, by rank as in placing_ratio: what TCP makes of a placing, whose shares of one queue wander for
    seconds. Peer: the same connections 8 to 9 s after the cut, when there is nothing left to do.
settle
    from the cut (the return of the command that made it) to the kernel's acknowledgement of the last pin.
moves_ratio
    flows moved over the fewest that reach a placing_lowest of 0.9; each time that a flow is moved counts.
mice_p99_ratio
    one-way delay of the agent's UDP probes on the healthy rails, 1 to 4 s after the cut over 3 s before it.

The same with nobody acting: cases rails2_nobody and rails4_nobody. What deciding costs, cases flows1000_rails8, in
processor time: `plan` is the search with one rail cut, `rates` all rates and capacities, `take` a signal decoded and
digested.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from _common import emit, median, note
from _elephants import SECOND, Steer, Trial, command, nobody, play, said, small_loop

from pytools.signals import CongestionTimes, Owner, Path, Retransmissions, TcpFlow, decode, encode
from steering.flows.elephants import balance
from steering.flows.elephants_search import Flow, Rail
from steering.flows.rail_rates import RailRates
from steering.flows.rates import FlowRates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--rails", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--small-loop", action="store_true")
    parser.add_argument("--costs", action="store_true", help="only what deciding costs")
    wanted = parser.parse_args()
    costs()
    for rails in [] if wanted.costs else wanted.rails:
        trials = run(rails, small_loop if wanted.small_loop else command, wanted.trials)
        tell(f"rails{rails}", trials)
        idle = run(rails, nobody, max(1, wanted.trials // 4))
        case = f"rails{rails}_nobody"
        emit("elephants", "optimum_ratio", median(over(idle, early_total)), "ratio", "higher", case=case, n=len(idle))
        emit("elephants", "fair_ratio", median(over(idle, early_fair)), "ratio", "higher", case=case, n=len(idle))


def costs(flows: int = 1000, rails: int = 8, rounds: int = 7) -> None:
    """What a thousand busy connections cost whoever decides."""
    greedy = [Flow(number, f"rail{1 + number % rails}") for number in range(flows)]
    every = [Rail("rail1", 1e9, 5e7, open=False), *(Rail(f"rail{n}", 1e10, 5e8) for n in range(2, rails + 1))]
    mixed = [replace(flow, demand_bps=2e6 * (1 + flow.key % 97)) if flow.key % 3 else flow for flow in greedy]
    for name, each in (("greedy", greedy), ("mixed", mixed)):
        took = median([timed(lambda each=each: balance(each, every)) for _ in range(rounds)])
        emit("elephants", "plan", took / 1e6, "ms", "lower", case=f"flows{flows}_rails{rails}_{name}", n=rounds)
    looks = [[encode(look(port, at, 1 + port % rails)) for port in range(flows)] for at in range(1, 1 + rounds)]
    rates, capacities = FlowRates(), RailRates()

    def take(lines: list[bytes]) -> None:
        for line in lines:
            signal = decode(line)
            assert isinstance(signal, TcpFlow)
            rates.take(signal)

    took = median([timed(lambda lines=lines: take(lines)) for lines in looks])
    emit("elephants", "take", took / flows / 1e3, "us", "lower", case=f"flows{flows}_rails{rails}", n=rounds)
    now, places = rounds * SECOND // 10, [("h2", f"rail{n}") for n in range(1, rails + 1)]
    took = median([timed(lambda: capacities.estimate(list(rates.rates(now)), places, now)) for _ in range(rounds)])
    emit("elephants", "rates", took / 1e6, "ms", "lower", case=f"flows{flows}_rails{rails}", n=rounds)


def look(port: int, tenth: int, rail: int) -> TcpFlow:
    """A busy connection, looked at every tenth of a second."""
    at, interface = tenth * SECOND // 10, f"rail{rail}"
    sent = {"segments_out": 100 * tenth, "sent_bytes": 144_800 * tenth, "delivered_segments": 100 * tenth}
    return TcpFlow(
        **{"host": "h1", "at_ns": at, "unix_ns": at, "local": "10.9.0.1", "local_port": port, "remote": "10.9.0.2"},
        **{"remote_port": 5201, "interface": interface, "path": Path("h1", "h2", "10.9.0.2", "10.1.1.1", interface)},
        **{"owner": Owner(), "state": "established", "first_ns": 1, "last_ns": at, "acknowledged_bytes": 0},
        **{"received_bytes": 0, "segments_in": 0, "retransmitted": Retransmissions(), "retransmitted_segments": 0},
        **{"retransmitted_bytes": 0, "spurious_segments": 0, "timeouts": 0, "srtt_ns": 10**6, "min_rtt_ns": 10**6},
        **{"cwnd_segments": 100, "ssthresh_segments": None, "delivery_rate_bps": None, "zero_windows": 0},
        **{"ecn": "off", "delivered_ce_segments": 0, "congestion": "open", "congestion_times": CongestionTimes()},
        **{"resets_sent": 0, "resets_received": 0, **sent},  # type: ignore[arg-type]
    )


def timed(work: Callable[[], object]) -> int:
    """Processor time in nanoseconds."""
    begin = time.process_time_ns()
    work()
    return time.process_time_ns() - begin


def run(rails: int, steer: Steer, trials: int) -> list[Trial]:
    """Independent trials, each on a lab of its own."""
    found = []
    for number in range(trials):
        with tempfile.TemporaryDirectory(prefix="swerve-elephants-") as work:
            found.append(play(rails, steer, pathlib.Path(work)))
        note(f"rails {rails}, trial {number + 1}: {said(found[-1])}")
    return found


def tell(case: str, trials: Sequence[Trial]) -> None:
    """The figures of one case."""
    n = len(trials)
    for name, each, better in (
        ("placing_ratio", over(trials, lambda trial: trial.placed_share(SECOND)), "higher"),
        ("placing_lowest", over(trials, lambda trial: trial.placed_worst(SECOND)), "higher"),
        ("optimum_ratio", over(trials, early_total), "higher"),
        ("moves_ratio", over(trials, lambda trial: trial.moved() / max(1, trial.fewest())), "lower"),
        ("mice_p99_ratio", over(trials, mice_ratio), "lower"),
    ):
        low = min if better == "higher" else max
        emit("elephants", name, median(each), "ratio", better, case=case, n=n)  # type: ignore[arg-type]
        emit("elephants", f"{name}_worst_trial", low(each), "ratio", better, case=case, n=n)  # type: ignore[arg-type]
    emit(
        *("elephants", "fair_ratio", median(over(trials, early_fair)), "ratio", "higher"),
        **{"case": case, "peer": "8_s_later", "peer_value": median(over(trials, late_fair)), "n": n},
    )
    settled = [acted[1] / 1e9 for trial in trials if (acted := trial.acted_ns()) is not None]
    first = [acted[0] / 1e9 for trial in trials if (acted := trial.acted_ns()) is not None]
    if settled:
        emit("elephants", "first_act", median(first), "s", "lower", case=case, n=len(first))
        emit("elephants", "settle", median(settled), "s", "lower", case=case, n=len(settled))
        emit("elephants", "settle_p95", percentile(settled, 95), "s", "lower", case=case, n=len(settled))
    emit("elephants", "resets", sum(trial.resets for trial in trials), "connections", "lower", case=case, n=n)


def over(trials: Sequence[Trial], figure: Callable[[Trial], float]) -> list[float]:
    """One figure of each trial."""
    return [figure(trial) for trial in trials]


def early_total(trial: Trial) -> float:
    return trial.total_ratio(SECOND, 2 * SECOND)


def early_fair(trial: Trial) -> float:
    return trial.fair_ratio(SECOND, 2 * SECOND)


def late_fair(trial: Trial) -> float:
    return trial.fair_ratio(8 * SECOND, 9 * SECOND)


def mice_ratio(trial: Trial) -> float:
    before, after = trial.mice(-3 * SECOND, 0), trial.mice(SECOND, 4 * SECOND)
    return percentile(after, 99) / percentile(before, 99)


def percentile(values: Sequence[float], percent: int) -> float:
    """Of few values the largest."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


if __name__ == "__main__":
    main()
