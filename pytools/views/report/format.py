"""How figures, times and acts read in the report. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from pytools.signals import Act, Path
from pytools.units import duration
from pytools.views.report.aggregate import NumberedAct
from pytools.views.report.scales import Span
from pytools.views.report.series import Measured

UNKNOWN: Final = "unknown"
_ACKNOWLEDGED: Final = {"applied": "made", "dry_run": "not made: a dry run", "failed": "failed", "undone": "taken back"}


def delay(measured: Measured | None) -> str:
    return UNKNOWN if measured is None else with_bound(measured.value, measured.bound, duration)


def with_bound(value: float, bound: float | None, said: Callable[[float], str]) -> str:
    """A value with its error; an error that is not known is said to be."""
    return f"{said(value)} ± {said(bound) if bound is not None else UNKNOWN}"


def share(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "0 %" if value == 0 else f"{100 * value:.2f} %" if value < 0.1 else f"{100 * value:.1f} %"


def way(path: Path) -> str:
    return f"{path.source} → {path.destination} dev {path.interface}" + (f" via {path.gateway}" if path.gateway else "")


def moved(act: Act) -> str:
    """From what to what, by nexthop."""
    names = dict.fromkeys((*act.before, *act.after))
    return ", ".join(f"{name}: {act.before.get(name, 0)} → {act.after.get(name, 0)}" for name in names)


def outcome(act: Act) -> str:
    return _ACKNOWLEDGED.get(act.outcome, act.outcome)


def took(act: Act) -> str:
    """From the measurement to the kernel's acknowledgement."""
    return UNKNOWN if act.acknowledged_ns is None else duration(act.acknowledged_ns - act.seen_ns)


def explained(numbered: NumberedAct, span: Span) -> str:
    """An act on one line: what, from → to, because, under."""
    act = numbered.act
    under = f", under {act.under}" if act.under else ""
    return (
        f"act {numbered.number}, {span.clock(act.unix_ns, 3)} UTC, {act.host}: {act.what} ({outcome(act)}): "
        f"{moved(act)}, because {act.because}{under}"
    )


def state(span: Span, word: str, began_ns: int, ended_ns: int, note: str) -> str:
    return f"{word}, {span.clock(began_ns, 1)} to {span.clock(ended_ns, 1)} UTC ({duration(ended_ns - began_ns)})" + (
        f": {note}" if note else ""
    )


def counted(count: int, what: str) -> str:
    """So many of something."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def lasted(states: Mapping[str, int]) -> str:
    """How long each state lasted, the longest first."""
    return ", ".join(
        f"{word} {duration(length_ns)}" for word, length_ns in sorted(states.items(), key=lambda pair: -pair[1])
    )
