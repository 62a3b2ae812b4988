"""`bpf/steer/hold_law.h` in Python, for the simulator and the tests. Pure; CLOCK_MONOTONIC nanoseconds.

A test compiles the header and compares both, step by step. docs/hold.md says what holds are for.

Notes
-----
There is one rate for each destination and path. A sample of queueing changes it by

    -0.4 x growth / delay - 0.226 x excess / delay x interval / delay

`growth` is the change of queueing since the sample before, `excess` the queueing above the threshold, `interval` the
time between both probes and `delay` the time from the first of them to now. With these constants XCP is stable for any
capacity and delay [1]_. Below the threshold the second factor is 1, so that a rate which a departed competitor has
freed is found in a few samples.

1. Start: nothing is limited until a sample is above the threshold. Then the rate becomes what this host has sent,
   divided by the overload that the growth shows.
2. After silence: if a queue was measured in the last second, a host from which nothing left for 10 ms begins at what
   its last burst came to, from its first packet to the departure of its last: the share that it had among those who
   sent with it, as they mostly do again. Where that is unknown, or no packet of it was held, it begins at four times
   the floor. Packets that wait at the host are no silence.
3. Fairness: a rate that holds packets back also grows, by the root of (rate x 1 Mbit/s) in 32 ms. Small rates gain
   relatively more, so shares converge. A rate above twice what the host sends does not grow.
4. Pause: above twice the threshold nothing leaves until the excess has drained. Pauses that a probe could not see yet
   are subtracted from what it found.
5. Beside others: where the queue has been longer than four thresholds for 300 ms, hosts without a hold keep it so, and
   a rate would come to nothing. Then nothing is held (as Copa competes [2]_), but in the first 100 ms of each second
   of CLOCK_REALTIME: the queue becomes short if those hosts have gone, since all others hold at the same time.
6. End: a rate that has held no packet for a second is forgotten.

References
----------
.. [1] Katabi et al., "Congestion control for high bandwidth-delay product networks", SIGCOMM 2002.
.. [2] Arun and Balakrishnan, "Copa: practical delay-based congestion control for the Internet", NSDI 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

SHIFT: Final = 20
SECOND_NS: Final = 1_000_000_000
WINDOW_NS: Final = 1_000_000
SPAN_NS: Final = 50_000_000
MEMORY_NS: Final = 1_000_000_000
LEAST_RATE: Final = 1024
MOST_RATE: Final = 1 << 37
MOST_BYTES: Final = 1 << 33
UNIT_RATE: Final = 125_000
TREND: Final = 410
EXCESS: Final = 231
SHORTFALL: Final = 1024
MOST: Final = 512
PAUSE_ABOVE: Final = 2
IDLE_NS: Final = 10_000_000
START: Final = 4
GROWTH_NS: Final = 32_000_000
SHORT: Final = 4
OTHERS_NS: Final = 300_000_000
TRY_NS: Final = 100_000_000


class Result(IntEnum):
    """What a sample came to: `enum hold_result`."""

    OFF = 0
    STALE = 1
    CLEAR = 2
    CONGESTED = 3


@dataclass(slots=True)
class Limits:
    """`struct swerve_hold_limits`."""

    until_ns: int
    second_ns: int
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
    pause_ns: int = 0
    pause_end_ns: int = 0
    window_ns: int = 0
    window_bytes: int = 0
    own_rate: int = 0
    left_ns: int = 0
    burst_ns: int = 0
    burst_bytes: int = 0
    burst_rate: int = 0
    short_ns: int = 0


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
    taken_ns, before_ns = state.taken_ns, state.sent_ns
    if limits.until_ns <= now_ns:
        _forget(state)
        return Result.OFF
    if not before_ns < sent_ns <= now_ns <= sent_ns + limits.fresh_ns:
        return Result.STALE
    queue_ns, apart = min(queue_ns, SECOND_NS), sent_ns - before_ns
    grown = queue_ns - state.queue_ns + _paused(state, before_ns, sent_ns)
    excess = queue_ns - _paused(state, sent_ns, state.pause_end_ns) - limits.threshold_ns
    state.sent_ns, state.queue_ns, state.taken_ns = sent_ns, queue_ns, now_ns
    if apart > SPAN_NS:  # what nobody looked at does not count as long
        state.short_ns += apart
    if queue_ns <= SHORT * limits.threshold_ns or state.short_ns > now_ns:
        state.short_ns = now_ns
    _measure(state, now_ns)
    if now_ns > state.held_ns + MEMORY_NS:
        _forget(state)
    if _is_beside(state, limits, now_ns):
        state.rate = state.gap = 0
        return Result.CONGESTED if excess > 0 else Result.CLEAR
    binds = state.last_ns > taken_ns and state.rate <= 2 * state.own_rate
    if not state.rate:
        rate = min(state.own_rate, MOST_RATE) if excess > 0 else 0
        if rate and apart <= SPAN_NS and grown > 0:
            rate = rate // 1024 * (apart * 1024 // (apart + grown))
        if rate:
            _set_rate(state, rate, limits.floor)
            state.held_ns = now_ns
    elif apart <= SPAN_NS:
        _correct(state, limits, _step(grown, excess, apart, now_ns - before_ns), apart if binds else 0)
    if excess <= 0:
        return Result.CLEAR
    excess -= limits.threshold_ns * (PAUSE_ABOVE - 1)
    if excess > 0:
        _pause(state, limits, now_ns, excess * limits.gain >> 8)
    return Result.CONGESTED


def release(state: State, limits: Limits, now_ns: int, wire_bytes: int) -> int:
    """When a packet may leave; 0: at once."""
    idle_ns = max(0, now_ns - max(state.left_ns, state.last_ns))
    if idle_ns > IDLE_NS:
        _end_burst(state, now_ns)
    state.bytes += wire_bytes
    state.left_ns = now_ns
    if limits.until_ns <= now_ns or now_ns > state.taken_ns + limits.fresh_ns:
        return state.last_ns if state.last_ns > now_ns else 0
    queued = state.rate or state.queue_ns > limits.threshold_ns >> 2
    if idle_ns > IDLE_NS and queued and not _is_beside(state, limits, now_ns):
        _set_rate(state, state.burst_rate or min(limits.floor, MOST_RATE) * START, limits.floor)
        state.held_ns = now_ns
    if state.next_ns <= now_ns:
        if state.gap:
            state.next_ns = now_ns + (wire_bytes * state.gap >> SHIFT)
        return 0
    at = min(state.next_ns, now_ns + limits.longest_ns)
    state.next_ns = at + (wire_bytes * state.gap >> SHIFT)
    state.last_ns = at
    state.held_ns = now_ns
    return at


def _is_beside(state: State, limits: Limits, now_ns: int) -> bool:
    long = now_ns > state.short_ns + OTHERS_NS
    return long and max(0, now_ns - limits.second_ns) % SECOND_NS >= TRY_NS


def _end_burst(state: State, now_ns: int) -> None:
    took_ns = state.last_ns - state.burst_ns
    if took_ns >= WINDOW_NS:
        state.burst_rate = min(state.bytes - state.burst_bytes, MOST_BYTES) * SECOND_NS // took_ns
    state.burst_ns, state.burst_bytes = now_ns, state.bytes


def _step(grown: int, excess: int, apart: int, delay: int) -> int:
    trend = abs(grown) * TREND // delay
    off = abs(excess) * (EXCESS if excess > 0 else SHORTFALL) // delay * apart // delay
    return min(max((trend if grown < 0 else -trend) + (off if excess < 0 else -off), -MOST), MOST)


def _correct(state: State, limits: Limits, step: int, bound_ns: int) -> None:
    rate, more = state.rate, root(state.rate * UNIT_RATE) * bound_ns // GROWTH_NS
    if step < 0 or bound_ns:
        rate += (rate >> 10) * step
    _set_rate(state, rate + more, limits.floor)


def _pause(state: State, limits: Limits, now_ns: int, pause: int) -> None:
    wait = max(0, state.next_ns - now_ns)
    pause = min(pause, max(0, limits.longest_ns - wait))
    if not pause:
        return
    if state.pause_end_ns <= now_ns:
        state.pause_ns = state.pause_end_ns = now_ns
    state.pause_end_ns += pause
    state.next_ns = now_ns + wait + pause


def _set_rate(state: State, rate: int, floor: int) -> None:
    least = min(max(floor, LEAST_RATE), MOST_RATE)
    state.rate = min(max(rate, least), MOST_RATE)
    state.gap = (SECOND_NS << SHIFT) // state.rate


def _forget(state: State) -> None:
    state.rate = state.gap = state.burst_rate = 0


def _measure(state: State, now_ns: int) -> None:
    age = max(0, now_ns - state.window_ns)
    if age < WINDOW_NS:
        return
    sent = min(max(0, state.bytes - state.window_bytes), MOST_BYTES)
    rate = sent * SECOND_NS // age if state.window_ns else 0
    state.own_rate = max(state.own_rate - (state.own_rate >> 3), rate)
    state.window_ns, state.window_bytes = now_ns, state.bytes


def _paused(state: State, since_ns: int, until_ns: int) -> int:
    return max(0, min(until_ns, state.pause_end_ns) - max(since_ns, state.pause_ns))
