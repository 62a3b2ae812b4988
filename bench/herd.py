"""Many hosts with one policy on congested rails: does the herd settle near the optimum, or does it chase itself?

Simulated rails and flows, the real engine on each host (tests/many_hosts.py). Both policies see the same load, hashes
and noise. With a file name as argument the shares of the cut rail over time are drawn there.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from _common import emit, note
from many_hosts import CUT_AFTER_S, Outcome, Scene, Second, outcome, policy, simulate

SECONDS, JUDGED_S = 60, 40
SCENES: Final = {
    "rails4_one_to_40": Scene((1, 1, 1, 0.4), 0.88),
    "rails4_two_to_50": Scene((1, 1, 0.5, 0.5), 0.85),
    "rails2_one_to_30": Scene((1, 0.3), 0.85),
}
COLOURS: Final = {"damped": "#1f6fb4", "naive": "#c4561c"}


def main() -> None:
    kinds = ("damped", "naive")
    with ProcessPoolExecutor(2) as pool:
        runs = {(case, kind): pool.submit(_run, case, kind == "damped") for case in SCENES for kind in kinds}
        told = {key: run.result() for key, run in runs.items()}
    for case, scene in SCENES.items():
        damped, naive = (outcome(told[case, kind], JUDGED_S) for kind in kinds)
        figures = [
            ("optimum_gap", damped.gap, "share", naive.gap),
            ("moves", damped.moves, "1/flow/10 s", naive.moves),
            ("queueing_mean", damped.queueing_ns / 1e6, "ms", naive.queueing_ns / 1e6),
        ]
        for name, value, unit, peer in figures:
            emit("herd", name, value, unit, "lower", case=case, peer="naive", peer_value=peer, n=scene.hosts)
        emit("herd", "settled", damped.settled_s, "s", "lower", case=case, n=scene.hosts)
        for kind, found in (("damped", damped), ("naive", naive)):
            note(f"{case} {kind}: {_words(found)}")
    if len(sys.argv) > 1:
        case, scene = next(iter(SCENES.items()))
        drawn = {kind: [second.shares[-1] for second in told[case, kind]] for kind in kinds}
        Path(sys.argv[1]).write_text(_draw(drawn, scene))


def _run(case: str, damped: bool) -> list[Second]:
    return simulate(policy(damped), SCENES[case], SECONDS)


def _words(found: Outcome) -> str:
    return (
        f"gap {found.gap:.1%}, {found.lost:.1%} lost in all, {found.moves:.2f} moves a flow in 10 s (at most "
        f"{found.most_moves}), settled {found.settled_s} s after the cut"
    )


def _draw(curves: dict[str, list[float]], scene: Scene) -> str:
    """Share of all load on the cut rail, by second."""
    width, height, left, bottom = 640, 260, 60, 40
    most = 1.1 * max(max(curve) for curve in curves.values())

    def at(second: float, share: float) -> str:
        across = left + second / SECONDS * (width - left - 20)
        return f"{across:.1f} {height - bottom - share / most * (height - bottom - 20):.1f}"

    fits = scene.capacities[-1] / (scene.load * sum(scene.capacities))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{at(CUT_AFTER_S, fits)}L{at(SECONDS, fits)}" stroke="#888" stroke-dasharray="4 3"/>',
        f'<text x="{width - 24}" y="{float(at(0, fits).split()[1]) - 5:.1f}" text-anchor="end" fill="#666">'
        "what it carries</text>",
    ]
    for line, (kind, curve) in enumerate(curves.items()):
        points = "L".join(at(second + 1, share) for second, share in enumerate(curve))
        parts.append(f'<path d="M{points}" fill="none" stroke="{COLOURS[kind]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{left + 10 + 80 * line}" y="16" fill="{COLOURS[kind]}">{kind}</text>')
    for second in range(0, SECONDS + 1, 20):
        x = at(second, 0).split()[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{second} s</text>')
    for share in (0.0, 0.1, 0.2):
        y = float(at(0, share).split()[1])
        parts.append(f'<path d="M{left} {y:.1f}H{width - 20}" stroke="#eee"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
