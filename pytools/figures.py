"""The figures of a path and of its directions, one entry each: where each stands in a record, and what is made of it.

Tables, metrics, the live view, the report and the policy go through this catalogue; none of them names a field. To add
a figure see CONTRIBUTING.md. Durations and offsets are nanoseconds, shares within 0 and 1. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pytools.signals import ClockState, Delay, PathDelay

Unit = Literal["duration", "offset", "share"]
SUFFIXES: Final[dict[Unit, str]] = {"duration": "seconds", "offset": "seconds", "share": "ratio"}
DIRECTIONS: Final = ("forward", "reverse")
_NOW: Final = ("min", "last")  # parts that say nothing of a longer time


def supports_one_way(state: ClockState) -> bool:
    """Whether one-way delays between such clocks are facts: in holdover too, with the bound that has grown."""
    return state in ("synchronised", "holdover")


@dataclass(frozen=True, slots=True, eq=False)
class Measure:
    """What is measured: its figures have a unit, an error, a metric and a signal of the policy in common."""

    name: str  # as metrics, `--sort` and, where it `holds`, policies call it
    of_direction: bool  # whether each direction of a path has it, else the path
    words: str  # as sentences, and as columns call it
    heading: str
    unit: Unit
    # field of the record by part: a quantile, or nothing. A share is a count of its field, of that and those of
    # `rest`
    parts: dict[str, str]
    help: str  # what its metric is
    spare: dict[str, int]  # parts whose column may be left out of a table, the highest number first
    rest: str = ""
    compared: bool = False  # whether it is a fact only where the clocks of both ends are compared
    # fields of its error: under the stated allowance for asymmetric paths, and with none; empty: it has none
    error: str = ""
    hard_error: str = ""
    error_help: str = ""  # what the error is of
    metric: str = ""  # in place of `name` in the metric's
    # of policies: what a condition about it is, when it holds, and when it is clear; empty: there is none
    rule: str = ""
    holds: str = ""
    clears: str = ""
    least: float = 0.0  # the lowest threshold that is suggested, of shares

    @property
    def family(self) -> str:
        """Its metric."""
        return f"swerve_path_{self.metric or self.name}_{SUFFIXES[self.unit]}"

    @property
    def errors(self) -> dict[str, tuple[str, str]]:
        """Metrics of its errors: field and help of each."""
        stem, suffix = f"swerve_path_{self.name}", SUFFIXES[self.unit]
        found = {f"{stem}_bound_{suffix}": (self.error, f"The error of {self.error_help}, either way.")}
        hard = {f"{stem}_hard_bound_{suffix}": (self.hard_error, "The same with no assumption about symmetric paths.")}
        return (found if self.error else {}) | (hard if self.hard_error else {})

    @property
    def exported(self) -> dict[str, str]:
        """Parts that are metrics, with their fields."""
        return {part: field for part, field in self.parts.items() if part != "last"}

    def value(self, delay: PathDelay, way: Delay | None, part: str) -> float | None:
        """A figure; None where it is not known, or where the clocks do not support it."""
        if self.compared and not supports_one_way(delay.clock):
            return None
        if self.rest:
            of_it, whole = self.counts(delay)
            return of_it / whole if whole else None
        found: float | None = getattr(way if self.of_direction else delay, self.parts[part])
        return found

    def counts(self, delay: PathDelay) -> tuple[int, int]:
        """Of a share: the count, and that of all."""
        of_it: int = getattr(delay, self.parts[""])
        rest: int = getattr(delay, self.rest)
        return of_it, of_it + rest

    def bound(self, delay: PathDelay, way: Delay | None) -> int | None:
        """Its error; None where it is not known, or where the clocks do not support it."""
        if not self.error or (self.compared and not supports_one_way(delay.clock)):
            return None
        found: int | None = getattr(way if self.of_direction else delay, self.error)
        return found


@dataclass(frozen=True, slots=True)
class Figure:
    measure: Measure
    part: str

    @property
    def field(self) -> str:
        """In the record."""
        return self.measure.parts[self.part]

    @property
    def name(self) -> str:
        return f"{self.measure.heading} {self.part}".strip()

    @property
    def word(self) -> str:
        return self.name.lower().replace(" ", "-")

    @property
    def share(self) -> float:
        """The quantile of many windows that stands for the whole."""
        return 0.5 if self.part == "p50" else 0.99

    def value(self, delay: PathDelay, way: Delay | None) -> float | None:
        """Of a window; None where it is not known, or where the clocks do not support it."""
        return self.measure.value(delay, way, self.part)


ONE_WAY: Final = Measure(
    "one_way_delay",
    True,
    "one-way delay",
    "OWD",
    "duration",
    {"min": "owd_min_ns", "p50": "owd_p50_ns", "p99": "owd_p99_ns"},
    "One-way delay over the last long window; absent while the clocks are free running.",
    {"min": 4, "p50": 1},
    compared=True,
    error="bound_ns",
    hard_error="hard_bound_ns",
    error_help="one-way delays",
    rule="Bad while the one-way delay towards the peer exceeds above by more than its error, clear while it and its "
    "error are below clear_below; measured only while the clocks are synchronised.",
    holds="the {quantile} forward one-way delay is above {above} by more than its error",
    clears="that is below {below} by more than its error",
)
QUEUEING: Final = Measure(
    "queueing_delay",
    True,
    "queueing delay",
    "queueing",
    "duration",
    {"p50": "queueing_p50_ns", "p99": "queueing_p99_ns", "last": "queueing_last_ns"},
    "Queueing delay over the last long window.",
    {"p50": 3},
    error="queueing_bound_ns",
    error_help="queueing delays",
    metric="queueing_delay_window",
    rule="Bad while the queueing delay towards the peer exceeds above by more than its error, clear while it and its "
    "error are below clear_below.",
    holds="the {quantile} queueing delay is above {above} by more than its error",
    clears="that is below {below} by more than its error",
)
JITTER: Final = Measure(
    "jitter",
    True,
    "jitter",
    "jitter",
    "duration",
    {"": "jitter_ns"},
    "How much one-way delays of successive probes differ (RFC 3550), of the last long window.",
    {"": 5},
    error="jitter_bound_ns",
    error_help="the jitter",
    rule="Bad while the jitter (RFC 3550) towards the peer exceeds above by more than its error, clear while it and "
    "its error are below clear_below.",
    holds="the forward jitter is above {above} by more than its error",
    clears="that is below {below} by more than its error",
)
ROUND_TRIP: Final = Measure(
    "round_trip_min",
    False,
    "round trip",
    "RTT min",
    "duration",
    {"": "round_trip_min_ns"},
    "Smallest round trip of the last long window.",
    {"": 2},
)
ASYMMETRY: Final = Measure(
    "asymmetry",
    False,
    "asymmetry",
    "asymmetry",
    "offset",
    {"": "asymmetry_ns"},
    "Smallest forward minus smallest reverse delay.",
    {},
    compared=True,
    error="asymmetry_bound_ns",
    error_help="the asymmetry",
)
LOSS: Final = Measure(
    "loss",
    False,
    "loss",
    "loss",
    "share",
    {"": "lost"},
    "Probes lost, of those settled in the last long window.",
    {},
    rest="received",
    rule="Bad while the share of probes lost exceeds above, clear below clear_below.",
    holds="more than {above} of the probes are lost",
    clears="less than {below} of the probes are lost",
    least=0.2,
)
MEASURES: Final = (ONE_WAY, QUEUEING, JITTER, ROUND_TRIP, ASYMMETRY, LOSS)
OF_DIRECTIONS: Final = tuple(each for each in MEASURES if each.of_direction)
OF_PATHS: Final = tuple(each for each in MEASURES if not each.of_direction)
RULED: Final = (QUEUEING, ONE_WAY, LOSS, JITTER)  # policies have conditions about them, named in this order
# What views follow over a longer time than a window.
FOLLOWED: Final = tuple(Figure(each, part) for each in OF_DIRECTIONS for part in each.parts if part not in _NOW)
