"""Clocks of lab hosts: a known function of CLOCK_MONOTONIC each, so that estimates can be compared with the truth.

`VirtualClock.at` and bpf/lib/clock.h compute the same, bit for bit, in int64 nanoseconds. A host's clock lies in its
runtime directory; the agent loads it into its stamping programs. Pure but for `load` and `save`; any thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from pytools.errors import UsageError

FILE: Final = "clock.json"  # in the host's runtime directory
KNOTS: Final = 4096  # as in bpf/swerve.h
KNOT_SHIFT: Final = 30
STEP_APART_NS: Final = 1_000_000_000  # the kernel holds one step at a time: the agent needs time to give it the next

MAX_OFFSET_NS: Final = 1_000_000_000
MAX_DRIFT_PPB: Final = 50_000
MAX_STEP_NS: Final = 10_000_000_000
_SECOND_NS = 10**9
_KNOT_NS = 1 << KNOT_SHIFT

Times = NDArray[np.int64]


def _within(what: str, value: Any, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"a virtual clock's {what} is {value}", f"keep it within {low} and {high}")


class Wander(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How temperature moves a clock's frequency: a sinusoid, and a random walk that tells two clocks apart for good.

    By default the frequency changes by up to 8 ppb per second: about ten times what a server's crystal does.
    """

    amplitude_ppb: float = 400.0
    period_s: float = 300.0
    walk_ppb: float = 0.5  # standard deviation after one second; grows with the square root of time
    seed: int = 0  # of the sinusoid's phase and of the walk

    def __post_init__(self) -> None:
        _within("amplitude_ppb", self.amplitude_ppb, 0, 5_000)
        _within("period_s", self.period_s, 10, 100_000)
        _within("walk_ppb", self.walk_ppb, 0, 100)
        _within("seed", self.seed, 0, 2**63 - 1)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From this instant of CLOCK_MONOTONIC on, the clock is ahead by so much more."""

    at_ns: int
    step_ns: int

    def __post_init__(self) -> None:
        _within("at_ns", self.at_ns, 0, 2**62)
        _within("step_ns", self.step_ns, -MAX_STEP_NS, MAX_STEP_NS)


class VirtualClock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One clock: CLOCK_MONOTONIC plus an offset, a drift, a wander and steps."""

    offset_ns: int = 0  # how far it is ahead at `origin_ns`, within ±1 s
    drift_ppb: float = 0.0  # by how much it runs fast, in nanoseconds per second, within ±50,000
    wander: Wander = Wander(amplitude_ppb=0.0, walk_ppb=0.0)  # what comes and goes on top of the drift
    origin_ns: int = 0  # drift and wander begin then; 73 minutes later they end, and the clock keeps what it has gained
    steps: tuple[Step, ...] = ()  # in the order of time, at least a second apart

    def __post_init__(self) -> None:
        _within("offset_ns", self.offset_ns, -MAX_OFFSET_NS, MAX_OFFSET_NS)
        _within("drift_ppb", self.drift_ppb, -MAX_DRIFT_PPB, MAX_DRIFT_PPB)
        _within("origin_ns", self.origin_ns, 0, 2**62)
        for earlier, later in zip(self.steps, self.steps[1:], strict=False):
            if later.at_ns - earlier.at_ns < STEP_APART_NS:
                raise UsageError(
                    f"a virtual clock's steps at {earlier.at_ns} and {later.at_ns} follow too closely",
                    "keep them in order, at least a second apart",
                )

    def knots(self) -> Times:
        """How far the clock has run ahead by drift and wander, every 2^30 ns from the origin on."""
        seconds = np.arange(KNOTS) * (_KNOT_NS / _SECOND_NS)
        random = np.random.default_rng(self.wander.seed)
        phase = random.uniform(0, 2 * np.pi)
        turns = 2 * np.pi / self.wander.period_s
        swing = self.wander.amplitude_ppb / turns * (np.cos(phase) - np.cos(turns * seconds + phase))
        spread = self.wander.walk_ppb * np.sqrt(_KNOT_NS / _SECOND_NS)
        walk = np.cumsum(random.normal(0.0, spread, KNOTS))  # frequency from each knot to the next
        walked = np.concatenate(([0.0], np.cumsum(walk[:-1]))) * (_KNOT_NS / _SECOND_NS)
        gained = self.drift_ppb * seconds + swing + walked
        return np.asarray(np.rint(gained), np.int64)

    def at(self, true_ns: ArrayLike) -> Times:
        """What the clock shows at instants of CLOCK_MONOTONIC."""
        return Table.of(self).at(true_ns)

    def when(self, shown_ns: ArrayLike) -> Times:
        """The instants of CLOCK_MONOTONIC at which the clock shows this.

        Within a nanosecond or two. Of a time that a step back shows twice, the later instant; of one that a step
        forward leaves out, the instant of the step.
        """
        return Table.of(self).when(shown_ns)

    def drift_at(self, true_ns: ArrayLike) -> NDArray[np.float64]:
        """By how much the clock runs fast at these instants, in nanoseconds per second, wander included."""
        return Table.of(self).drift_at(true_ns)

    def stepped(self, at_ns: int, step_ns: int) -> VirtualClock:
        """The same clock with one more step.

        Raises
        ------
        UsageError
            If the step is too large, or not at least a second after the last.
        """
        return msgspec.structs.replace(self, steps=(*self.steps, Step(at_ns, step_ns)))

    def loaded_at(self, now_ns: int) -> tuple[int, Step]:
        """What the kernel is to hold from now on: an offset that includes old steps, and the one step it can hold."""
        past = [step for step in self.steps if step.at_ns <= now_ns]
        future = self.steps[len(past) :]
        held = future[0] if future else past.pop() if past else None
        offset = self.offset_ns + sum(step.step_ns for step in past)
        return offset, held if held is not None else Step(0, 0)


@dataclass(frozen=True, slots=True)
class Table:
    """A clock worked out: ask this one when asking often."""

    clock: VirtualClock
    knots: Times

    @classmethod
    def of(cls, clock: VirtualClock) -> Table:
        return cls(clock, clock.knots())

    def at(self, true_ns: ArrayLike) -> Times:
        true = np.asarray(true_ns, np.int64)
        shown = true + self.clock.offset_ns + self._ahead(true)
        for step in self.clock.steps:
            shown = shown + np.where(true >= step.at_ns, step.step_ns, 0)
        return np.asarray(shown, np.int64)

    def when(self, shown_ns: ArrayLike) -> Times:
        shown = np.asarray(shown_ns, np.int64)
        found = self._when(shown, 0)
        stepped = 0
        for step in self.clock.steps:
            stepped += step.step_ns
            after = self._when(shown, stepped)
            found = np.where(after >= step.at_ns, after, np.minimum(found, step.at_ns))
        return np.asarray(found, np.int64)

    def drift_at(self, true_ns: ArrayLike) -> NDArray[np.float64]:
        knot, _ = self._place(np.asarray(true_ns, np.int64))
        slope = np.diff(self.knots, append=self.knots[-1])[knot]
        return np.where(np.asarray(true_ns) < self.clock.origin_ns, 0.0, slope * (_SECOND_NS / _KNOT_NS))

    def _ahead(self, true: Times) -> Times:
        knot, within = self._place(true)
        start = self.knots[knot]
        grown = self.knots[np.minimum(knot + 1, KNOTS - 1)] - start
        return np.asarray(start + (grown * within >> KNOT_SHIFT), np.int64)

    def _place(self, true: Times) -> tuple[Times, Times]:
        """The knot before these instants, and how long before; the first and the last hold beyond the ends."""
        age = np.maximum(true - self.clock.origin_ns, 0)
        knot = np.minimum(age >> KNOT_SHIFT, KNOTS - 1)
        return knot, age & (_KNOT_NS - 1)

    def _when(self, shown: Times, stepped: int) -> Times:
        """As if the clock had been stepped by so much from the beginning."""
        found = shown - self.clock.offset_ns - stepped
        for _ in range(4):  # drifts are at most 1e-4: every round leaves a ten-thousandth of the error
            found = shown - self.clock.offset_ns - stepped - self._ahead(found)
        return found


def offset_between(a: VirtualClock, b: VirtualClock, true_ns: ArrayLike) -> Times:
    """The offset of `b` against `a`, which is b's clock minus a's, at instants of CLOCK_MONOTONIC."""
    return b.at(true_ns) - a.at(true_ns)


def draw(hosts: int, seed: int, origin_ns: int, shared: Sequence[Sequence[int]] = ()) -> list[VirtualClock]:
    """Clocks for so many hosts: offsets within ±1 s, drifts within ±30 ppm, a wander each.

    Parameters
    ----------
    hosts, seed, origin_ns : int
        The same three always give the same clocks.
    shared : sequence of sequences of int
        Numbers (from 1) of hosts that share one oscillator: drift and wander are the same, offsets are not.

    Raises
    ------
    UsageError
        If a host that shares is not there or shares twice.
    """
    _within("seed", seed, 0, 2**63 - 1)
    named = [number for group in shared for number in group]
    if len(set(named)) != len(named) or not all(1 <= number <= hosts for number in named):
        raise UsageError(f"hosts {named} cannot share oscillators", f"name each of h1 to h{hosts} once at most")
    random = np.random.default_rng(seed)
    clocks = [_drawn(random, origin_ns) for _ in range(hosts)]
    for group in shared:
        for number in group[1:]:
            first, own = clocks[group[0] - 1], clocks[number - 1]
            clocks[number - 1] = msgspec.structs.replace(first, offset_ns=own.offset_ns)
    return clocks


def _drawn(random: np.random.Generator, origin_ns: int) -> VirtualClock:
    return VirtualClock(
        offset_ns=int(random.integers(-MAX_OFFSET_NS, MAX_OFFSET_NS, endpoint=True)),
        drift_ppb=float(random.uniform(-30_000, 30_000)),
        wander=Wander(
            amplitude_ppb=float(random.uniform(300, 450)),
            period_s=float(random.uniform(290, 350)),
            seed=int(random.integers(2**32)),
        ),
        origin_ns=origin_ns,
    )


def save(clock: VirtualClock, path: Path) -> None:
    """Write a clock so that a reader sees the old one or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(clock)) + b"\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> VirtualClock:
    """Read a clock.

    Raises
    ------
    UsageError
        If there is none, or a value in it does not fit.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=VirtualClock)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "`swerve lab up --clocks` gives hosts clocks") from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: {error}", "`swerve lab up --clocks` writes valid ones") from None
