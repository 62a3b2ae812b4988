"""The main job in figures: congestion seen, traffic steered, on a lab of 4 hosts and 2 rails (about two minutes)."""

from __future__ import annotations

import sys
import time

from _common import emit, note

from steering.demo.run import Script, play, progress


def main() -> None:
    result = play(Script(name="bench-demo"), progress(sys.stderr, time.monotonic()))
    phases = {phase.name: phase for phase in result.phases}
    control, steered = phases["control"], phases["steered"]
    for phase in result.phases:
        emit("demo", "goodput_ratio", phase.goodput_share, "share", "higher", case=phase.name)
        emit("demo", "resets", phase.resets, "connections", "lower", case=phase.name)
        note(f"{phase.name}: packets {phase.packets}, p99 OWD {phase.owd_p99_ns}")
    if steered.owd_p99_ns is not None and control.owd_p99_ns is not None:
        emit(
            "demo",
            "owd_p99",
            steered.owd_p99_ns,
            "ns",
            "lower",
            case="steered",
            peer="control",
            peer_value=control.owd_p99_ns,
        )
        emit("demo", "owd_p99_ratio", steered.owd_p99_ns / control.owd_p99_ns, "ratio", "lower", case="steered")
    for name, value in (
        ("detect", steered.detect_ms),
        ("act", steered.act_ms),
        ("onset_to_act", steered.onset_to_act_ms),
    ):
        if value is not None:
            emit("demo", name, value, "ms", "lower", case="slowest_host")
    emit("demo", "reversals", steered.reversals or 0, "reversals", "lower", case="steered")
    if result.return_s is not None:
        emit("demo", "return", result.return_s, "s", "lower", case="after_healing")


if __name__ == "__main__":
    main()
