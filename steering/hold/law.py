"""`bpf/steer/hold_law.h` in Python, for the simulator and the tests. Pure; CLOCK_MONOTONIC nanoseconds.

A test compiles the header and compares both, step by step. docs/hold.md explains the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SHIFT: Final = 20
SECOND_NS: Final = 1_000_000_000
WINDOW_NS: Final = 1_000_000
MEMORY_NS: Final = 1_000_000_000
LEAST_RATE: Final = 1024
MOST_RATE: Final = 1 << 37
MOST_BYTES: Final = 1 << 33
UNIT_RATE: Final = 125_000
PATIENCE: Final = 4


class Result(IntEnum):
    """What a sample came to: `enum hold_result`."""

    OFF = 0
    STALE = 1
    CLEAR = 2
    PENDING = 3
    CONGESTED = 4


@dataclass(slots=True)
class Limits:
    """`struct swerve_hold_limits`."""

    until_ns: int
    threshold_ns: int
    longest_ns: int
    fresh_ns: int
    floor: int
    gain: int


@dataclass(slots=True)
class State:
    """`struct swerve_hold_state`."""

    next_ns: int = 0
    last_ns: int = 0
    held_ns: int = 0
    rate: int = 0
    gap: int = 0
    bytes: int = 0
    taken_ns: int = 0
    sent_ns: int = 0
    queue_ns: int = 0
    clear: int = 0
    lowered_ns: int = 0
    pause_ns: int = 0
    pause_end_ns: int = 0
    window_ns: int = 0
    window_bytes: int = 0
    own_rate: int = 0


def root(value: int) -> int:
    """The square root, at most a thousandth too large."""
    if not value:
        return 0
    result, rest = 1, value
    for bits in (32, 16, 8, 4, 2, 1):
        if rest >> bits:
            rest >>= bits
            result <<= bits // 2
    result <<= 1 if rest else 0
    for _ in range(4):
        result = (result + value // result) >> 1
    return result


def sample(state: State, limits: Limits, now_ns: int, sent_ns: int, queue_ns: int) -> Result:
    """Take in that a probe that left at `sent_ns` found `queue_ns` of queueing."""
    last_ns = state.taken_ns
    if limits.until_ns <= now_ns:
        _forget(state)
        return Result.OFF
    if sent_ns <= state.sent_ns or now_ns > sent_ns + limits.fresh_ns:
        return Result.STALE
    state.sent_ns, state.queue_ns, state.taken_ns = sent_ns, queue_ns, now_ns
    _measure(state, now_ns)
    if now_ns > state.held_ns + MEMORY_NS:
        _forget(state)
    rate = state.rate
    if queue_ns <= limits.threshold_ns:
        if rate and state.held_ns > last_ns:
            rate += root(rate * UNIT_RATE) >> 2
            if state.clear >= PATIENCE:
                rate += rate >> 3
            state.clear += 1
            _set_rate(state, rate, limits.floor)
        return Result.CLEAR
    state.clear = 0
    excess = max(0, queue_ns - limits.threshold_ns - _paused_since(state, sent_ns))
    if not excess:
        return Result.PENDING
    if sent_ns >= state.lowered_ns:
        rate = rate or state.own_rate
        if rate:
            rate -= (rate >> 8) * ((excess << 7) // (excess + limits.threshold_ns))
            _set_rate(state, rate, limits.floor)
            state.lowered_ns = state.held_ns = now_ns
    wait = max(0, state.next_ns - now_ns)
    pause = min(excess * limits.gain >> 8, max(0, limits.longest_ns - wait))
    if pause:
        if state.pause_end_ns <= now_ns:
            state.pause_ns = now_ns
        state.pause_end_ns = max(state.pause_end_ns, now_ns) + pause
        state.next_ns = max(state.next_ns, now_ns) + pause
    return Result.CONGESTED


def release(state: State, limits: Limits, now_ns: int, wire_bytes: int) -> int:
    """When a packet may leave; 0: at once."""
    state.bytes += wire_bytes
    if limits.until_ns <= now_ns or now_ns > state.taken_ns + limits.fresh_ns:
        return state.last_ns if state.last_ns > now_ns else 0
    if state.next_ns <= now_ns:
        if state.gap:
            state.next_ns = now_ns + (wire_bytes * state.gap >> SHIFT)
        return 0
    at = min(state.next_ns, now_ns + limits.longest_ns)
    state.next_ns = at + (wire_bytes * state.gap >> SHIFT)
    state.last_ns = at
    state.held_ns = now_ns
    return at


def _set_rate(state: State, rate: int, floor: int) -> None:
    least = min(max(floor, LEAST_RATE), MOST_RATE)
    state.rate = min(max(rate, least), MOST_RATE)
    state.gap = (SECOND_NS << SHIFT) // state.rate


def _forget(state: State) -> None:
    state.rate = state.gap = state.clear = 0


def _measure(state: State, now_ns: int) -> None:
    age = max(0, now_ns - state.window_ns)
    if age < WINDOW_NS:
        return
    sent = min(max(0, state.bytes - state.window_bytes), MOST_BYTES)
    rate = sent * SECOND_NS // age if state.window_ns else 0
    state.own_rate = max(state.own_rate - (state.own_rate >> 3), rate)
    state.window_ns, state.window_bytes = now_ns, state.bytes


def _paused_since(state: State, since_ns: int) -> int:
    return max(0, state.pause_end_ns - max(since_ns, state.pause_ns))
