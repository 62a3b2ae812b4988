"""What a view knows of clocks and of application delays: a fold of signals, beside the one in model.py.

And which of a path's windows people are shown: the longest, so that figures do not jump.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.signals import AnySignal, AppDelay, Clock, ClockEdge, Collocation, Path

SILENT_NS: Final = 10_000_000_000  # a clock not heard of for so long: what was last said is not vouched for
FORGOTTEN_NS: Final = 60_000_000_000
APP_FLOWS: Final = 4096  # flows remembered; the ones heard of longest ago go first

AppKey = tuple[Path | None, str, str, int, str, int]


@dataclass(frozen=True)
class Timing:
    """The newest of everything about clocks, and of what they make possible."""

    clocks: Mapping[str, Clock] = field(default_factory=dict)  # by the host whose clock it is
    edges: Mapping[Path, ClockEdge] = field(default_factory=dict)
    collocation: Collocation | None = None
    apps: Mapping[AppKey, AppDelay] = field(default_factory=dict)


TYPES: Final = (Clock, ClockEdge, Collocation, AppDelay)  # what is folded here


def fold(timing: Timing, signals: Iterable[AnySignal], now_ns: int) -> Timing:
    """What is known after these signals, in their order; what was not heard of for long is forgotten.

    Parameters
    ----------
    now_ns : int
        When the newest signal of any kind was published.
    """
    clocks, edges, apps = dict(timing.clocks), dict(timing.edges), dict(timing.apps)
    collocation = timing.collocation
    for signal in signals:
        match signal:
            case Clock():
                clocks[signal.of] = signal
            case ClockEdge():
                edges[signal.path] = signal
            case Collocation():
                collocation = signal
            case AppDelay():
                apps[app_key(signal)] = signal
            case _:
                pass
    fresh = {key: app for key, app in apps.items() if now_ns - app.at_ns <= _kept_ns(app.window_ns)}
    if len(fresh) > APP_FLOWS:
        # Paths as a whole are few, and stay.
        fresh = dict(sorted(fresh.items(), key=lambda item: (is_whole_path(item[1]), item[1].at_ns))[-APP_FLOWS:])
    return Timing(
        {of: clock for of, clock in clocks.items() if now_ns - clock.at_ns <= FORGOTTEN_NS},
        {path: edge for path, edge in edges.items() if now_ns - edge.at_ns <= FORGOTTEN_NS},
        collocation,
        fresh,
    )


def _kept_ns(window_ns: int) -> int:
    """How long after a window its figures are still worth showing."""
    return max(3_000_000_000, 3 * window_ns)


def app_key(app: AppDelay) -> AppKey:
    """What tells the rows of application delays apart."""
    return (app.path, app.protocol, app.local, app.local_port, app.remote, app.remote_port)


def is_whole_path(app: AppDelay) -> bool:
    """Whether all flows of the path are meant."""
    return not app.local


def is_silent(at_ns: int, now_ns: int, window_ns: int = 0) -> bool:
    """Whether the last word about a clock is too old to stand for now."""
    return now_ns - at_ns > max(SILENT_NS, 3 * window_ns)


def references(timing: Timing) -> list[str]:
    """The hosts whose clock is the common one; more than one only while hosts disagree about it."""
    return sorted({clock.reference for clock in timing.clocks.values() if clock.reference})


_LONG_OVER: Final = 3  # so many windows without another one as long: the agent has shorter ones by now


def is_shown(window_ns: int, shown_ns: int, since_ns: int) -> bool:
    """Whether a window takes the place of the one that is shown.

    Parameters
    ----------
    window_ns, shown_ns : int
        Lengths of the new one and of the one that is shown.
    since_ns : int
        From the end of the one that is shown to the end of the new one.
    """
    return window_ns >= shown_ns or since_ns > _LONG_OVER * shown_ns
