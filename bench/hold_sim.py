"""Laws of holding packets at the sender, in a simulation: incast, a ring, fairness, late and rare samples.

The hosts, queue and connections are those of tests/hold_world.py, the scenes those of tests/hold_scenes.py; three
seeds each, medians. `peer` is the same without any hold; the cases `…_on_ramp` are On-Ramp's law of pauses.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from _common import emit, note
from hold_laws import InUse, OnRamp
from hold_scenes import Make, Seen, Sensor, incast, ring, shared
from hold_world import MS

SEEDS: Final = (1, 2, 3)
LAWS: Final[dict[str, Make]] = {"off": lambda: None, "on_ramp": OnRamp, "in_use": InUse}


def _wrong_clocks(host: int, now: int) -> int:
    """Half of the hosts read their clocks wrong: their queues look 0.5 ms longer or shorter than they are."""
    return (MS // 2, -MS // 2, 0, 0)[host % 4]


SCENES: Final[dict[str, Callable[[Make, int], Seen]]] = {
    "incast": incast,
    "incast_alone": lambda make, seed: incast(make, seed, background=0),
    "incast_bbr": lambda make, seed: incast(make, seed, kind="rate"),
    "incast_every1": lambda make, seed: incast(make, seed, Sensor(MS, 0)),
    "incast_every5": lambda make, seed: incast(make, seed, Sensor(5 * MS, 0)),
    "incast_late10": lambda make, seed: incast(make, seed, Sensor(late_ns=10 * MS)),
    "incast_clocks": lambda make, seed: incast(make, seed, Sensor(error_ns=_wrong_clocks)),
    "ring": ring,
    "groups": shared,
    "groups_every5": lambda make, seed: shared(make, seed, Sensor(5 * MS, 0)),
    "beside_others": lambda make, seed: shared(make, seed, others=lambda: None),
}


def main() -> None:
    chosen = sys.argv[1:] or list(SCENES)
    with ProcessPoolExecutor(2) as pool:
        runs = {
            (scene, name, seed): pool.submit(_run, scene, name, seed)
            for scene in chosen
            for name in LAWS
            for seed in SEEDS
        }
        for scene in chosen:
            found = {name: _median([runs[scene, name, seed].result() for seed in SEEDS]) for name in LAWS}
            for name in ("in_use", "on_ramp"):
                _emit(scene if name == "in_use" else f"{scene}_on_ramp", found[name], found["off"])
            for name, seen in found.items():
                note(f"{scene:14} {name:8} {_words(seen)}")


def _run(scene: str, name: str, seed: int) -> Seen:
    return SCENES[scene](LAWS[name], seed)


def _median(runs: list[Seen]) -> Seen:
    return Seen(*(statistics.median(getattr(run, each.name) for run in runs) for each in fields(Seen)))


def _emit(case: str, seen: Seen, off: Seen) -> None:
    n = len(SEEDS)
    if seen.p99_ms:
        emit(
            "hold_sim", "completion_p50", seen.p50_ms, "ms", "lower", case=case, peer="off", peer_value=off.p50_ms, n=n
        )
        emit(
            "hold_sim", "completion_p99", seen.p99_ms, "ms", "lower", case=case, peer="off", peer_value=off.p99_ms, n=n
        )
    emit("hold_sim", "drops", seen.dropped, "packets", "lower", case=case, peer="off", peer_value=off.dropped, n=n)
    if seen.used:
        emit("hold_sim", "used", seen.used, "share", "higher", case=case, peer="off", peer_value=off.used, n=n)
    if seen.share:
        emit("hold_sim", "fair_share", seen.share, "share", "higher", case=case, peer="off", peer_value=off.share, n=n)


def _words(seen: Seen) -> str:
    return " ".join(f"{each.name} {getattr(seen, each.name):.2f}" for each in fields(Seen))


if __name__ == "__main__":
    main()
