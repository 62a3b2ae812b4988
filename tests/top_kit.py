"""What a live view is shown in tests: signals made to order, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import samples
from samples import AT_NS, SECOND_NS

from pytools.signals import AnySignal, Histogram, encode
from pytools.views.top.header import Around
from pytools.views.top.state import Known

NOW_NS = AT_NS + SECOND_NS // 2


def around(now_ns: int = NOW_NS, **changes: Any) -> Around:
    return Around(now_ns, 3 * 86_400 + 4 * 3600 + 12 * 60, **changes)


def lines(signals: Sequence[AnySignal]) -> list[bytes]:
    return [encode(each) for each in signals]


def known(*signals: AnySignal) -> Known:
    found = Known()
    found.take(lines(signals))
    return found


def story() -> list[AnySignal]:
    """Forty seconds of three paths: rail 1 is congested for the last ten and drained for the last four."""
    told: list[AnySignal] = []
    for second in range(-40, 1):
        at_ns = AT_NS + second * SECOND_NS
        bad = second > -10
        for rail in (1, 2, 3):
            told.append(_window(rail, at_ns, bad and rail == 1))
            told.append(_window(rail, at_ns + SECOND_NS // 3, bad and rail == 1, window_ns=80_000_000))
        drained = second > -4
        told += [
            samples.tcp_path(1, at_ns, in_window=12 if bad else 0, **_acknowledged(1_000)),
            samples.tcp_path(2, at_ns, in_window=0, **_acknowledged(9_000)),
            samples.path_ecn(1, at_ns),
            samples.nexthop_group(at_ns, packets=(1_000 + (40 + second) * 100, 9_000 + (40 + second) * 900)),
            samples.self_cost(at_ns),
            samples.clock(at_ns=at_ns),
            samples.path_state(1, at_ns, _state(bad, drained), 0 if drained else 1),
            samples.path_state(2, at_ns, "healthy", 9),
        ]
        if second == -4:
            told.append(samples.act(at_ns + SECOND_NS - 50_000_000, what="nexthop group 102"))
        if second == -9:
            told.append(samples.link_event(1, at_ns, "queue_full", detail="rail1: its queue is full"))
    told += [samples.tcp_flow(1, local_port=40_000 + each, segments=each) for each in range(30)]
    told += [samples.link(1), samples.link(2)]
    told += [samples.rdma_qp(18), samples.rdma_qp(20, verdict="congested", reason="a third of its usual bandwidth")]
    return told


def _acknowledged(segments: int) -> dict[str, int]:
    return {"segments_out": segments, "delivered_segments": segments, "delivered_ce_segments": segments // 100}


def _state(bad: bool, drained: bool) -> str:
    return "drained" if drained else "suspect" if bad else "healthy"


def _window(rail: int, at_ns: int, bad: bool, **changes: Any) -> AnySignal:
    delay = samples.path_delay(rail, at_ns, **changes)
    if not bad:
        return delay
    slow = msgspec.structs.replace(
        delay.forward,
        owd_p50_ns=31_000_000,
        owd_p99_ns=41_000_000,
        queueing_p50_ns=30_000_000,
        queueing_p99_ns=40_000_000,
        queueing_last_ns=33_000_000,
        queueing_histogram=Histogram([0] * 14 + [50], 50 * 33_000_000),
    )
    return msgspec.structs.replace(delay, forward=slow, lost=1, received=49)
