"""The main job in figures: congestion seen and traffic steered, on a lab of 4 hosts and 2 rails (two minutes a run).

goodput_ratio         of the offered load, steered: with one rail cut to a tenth while the controllers act
owd_p99_ratio         99th percentile of the one-way delay, steered, of the one with the same load on one healthy rail
detect, onset_to_act  from the onset of the congestion to the first signal of the slowest host, and to the kernel's
                      acknowledgement of its act
resets, reversals     connections reset; weight that was given back to a path and taken away again

--steal plays the demo again under CPU steal (bench/_steal.py), from the start of the lab to its end: cases *_steal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple
from unittest import mock

from _common import emit, median, note
from _steal import steal

from pytools.errors import SwerveError
from steering.demo import run as demo
from steering.demo.phases import Phase, Stage


class _Figure(NamedTuple):
    name: str
    unit: str
    better: Literal["lower", "higher"]
    case: str


FIGURES: Final = (
    _Figure("goodput_ratio", "ratio", "higher", "steered"),
    _Figure("owd_p99_ratio", "ratio", "lower", "steered"),
    _Figure("detect", "ms", "lower", "slowest_host"),
    _Figure("onset_to_act", "ms", "lower", "slowest_host"),
    _Figure("resets", "connections", "lower", "steered"),
    _Figure("reversals", "reversals", "lower", "steered"),
)


def main() -> None:
    options = _options()
    cases = ("", "_steal") if options.steal else ("",)
    found: dict[str, list[dict[str, float | None]]] = {suffix: [] for suffix in cases}
    failed: list[str] = []
    for turn in range(options.runs):
        for suffix in reversed(cases) if turn % 2 else cases:
            try:
                found[suffix].append(figures(played(suffix, options.seed + turn)))
            except SwerveError as error:  # the other runs are worth reporting
                failed.append(f"demo{suffix}: {error}")
                note(failed[-1])
    for suffix, runs in found.items():
        for name, unit, better, case in FIGURES:
            values = [value for run in runs if (value := run[name]) is not None]
            if len(values) < len(runs):
                note(f"{name}, {case}{suffix}: without a value in {len(runs) - len(values)} of {len(runs)} runs")
            if values:
                emit("demo", name, median(values), unit, better, case=case + suffix, n=len(values))
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {'; '.join(failed)}")


def played(suffix: str, seed: int) -> dict[str, Phase]:
    """One run of the demo; its phases by name.

    Where the paths do not get their weights back in time after healing, which a busy machine is enough for, the demo
    fails. The phases before stand, so they are taken as they end.
    """
    phases: dict[str, Phase] = {}

    class Recorded(Stage):
        def play(self, name: str, *arguments: Any, **named: Any) -> Phase:
            phases[name] = super().play(name, *arguments, **named)
            return phases[name]

    with steal(seed) if suffix else contextlib.nullcontext(), mock.patch.object(demo, "Stage", Recorded):
        try:
            script = demo.Script(name=f"bench-demo-{os.getpid()}")
            result = demo.play(script, demo.progress(sys.stderr, time.monotonic()))
            note(f"demo{suffix}: weights back {result.return_s} s after healing")
        except SwerveError as error:
            if not {"control", "steered"} <= phases.keys():
                raise
            note(f"demo{suffix}: {error}")
    return phases


def figures(phases: Mapping[str, Phase]) -> dict[str, float | None]:
    """The figures of one run by name; None for what it did not show, such as a delay when too many probes were lost."""
    for phase in phases.values():
        p99 = "lost" if phase.owd_p99_ns is None else f"{phase.owd_p99_ns / 1e6:.3f} ms"
        note(f"{phase.name}: goodput {phase.goodput_share:.3f}, p99 OWD {p99}, resets {phase.resets}, {phase.packets}")
    control, steered = phases["control"].owd_p99_ns, phases["steered"].owd_p99_ns
    note(f"seen after {phases['steered'].detect_ms} ms, acted after {phases['steered'].onset_to_act_ms} ms")
    if phases["steered"].reversals:
        for act in phases["steered"].acts:
            note(f"  {act.host} {act.what} {act.outcome}: {act.before} -> {act.after}; {act.because}")
    return {
        "goodput_ratio": phases["steered"].goodput_share,
        "owd_p99_ratio": None if control is None or steered is None else steered / control,
        "detect": phases["steered"].detect_ms,
        "onset_to_act": phases["steered"].onset_to_act_ms,
        "resets": phases["steered"].resets,
        "reversals": phases["steered"].reversals or 0,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="Runs of each kind (default: %(default)s).")
    parser.add_argument("--steal", action="store_true", help="Play it under CPU steal as well.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the CPU steal (default: %(default)s).")
    return parser.parse_args()


if __name__ == "__main__":
    main()
