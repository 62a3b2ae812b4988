"""Tables of delays: what probes found per path, and what application packets found per path and flow.

One-way delays stand apart from queueing, which needs no common clock. Pure: a model in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from pytools.signals import AppDelay, Delay, PathDelay, PathLiveness
from pytools.views.empty_states import no_app_delays
from pytools.views.model import Model
from pytools.views.sheet import Sheet
from pytools.views.tables import UNKNOWN, bound, clock_state, duration, endpoint, offset, one_way, one_way_bound, share
from pytools.views.timing import is_whole_path, supports_one_way

_QUEUEING: Final = ("queueing\np50", "queueing\np99", "queueing\n±")
_APP_FIGURES: Final = ("OWD\np50", "OWD\np90", "OWD\np99", "OWD\nmax", "OWD\n±", "queueing\np50", "queueing\np99")
_APP_COUNTS: Final = ("sampled\njoined", "ambiguous\nunmatched")


def delays(model: Model) -> RenderableType:
    """Both directions of every path, a line each."""
    sheet = Sheet(
        f"{model.host}: one-way delays{_over([delay.window_ns for delay in model.delays.values()])}",
        ("path", "", "OWD\nmin", "OWD\np50", "OWD\np99", "OWD\n±", *_QUEUEING, "RTT min\nasymmetry", "clock\nloss"),
        left=("", "clock\nloss"),
        spare=("OWD\nmin", "queueing\np50", "RTT min\nasymmetry", "OWD\np50"),
    )
    for path, delay in sorted(model.delays.items()):
        there, back = _direction(delay, delay.forward), _direction(delay, delay.reverse)
        via = f"  via {path.gateway}" if path.gateway else f"  to {path.address}"
        clock = clock_state(delay.clock)
        sheet.add(f"{path.destination} {path.interface}", "→", *there, duration(delay.round_trip_min_ns), clock)
        sheet.add(via, "←", *back, asymmetry(delay), _loss(delay, model.liveness.get(path)))
    return sheet


def _direction(delay: PathDelay, one: Delay) -> tuple[str, ...]:
    return (
        one_way(one.owd_min_ns, delay.clock),
        one_way(one.owd_p50_ns, delay.clock),
        one_way(one.owd_p99_ns, delay.clock),
        one_way_bound(one.bound_ns, delay.clock, one.owd_p99_ns),
        duration(one.queueing_p50_ns),
        duration(one.queueing_p99_ns),
        bound(one.queueing_bound_ns) if one.queueing_p50_ns is not None else UNKNOWN,
    )


def asymmetry(delay: PathDelay) -> Text:
    """Smallest forward minus smallest reverse delay with its error; coloured when it is larger than that."""
    if delay.asymmetry_ns is None or delay.asymmetry_bound_ns is None or not supports_one_way(delay.clock):
        return Text(UNKNOWN)
    sure = abs(delay.asymmetry_ns) > delay.asymmetry_bound_ns
    shown = f"{offset(delay.asymmetry_ns)} {bound(delay.asymmetry_bound_ns)}"
    return Text(shown, style="yellow" if sure else "dim")


def _loss(delay: PathDelay, liveness: PathLiveness | None) -> Text:
    """The share of lost probes; of a path that is silent now, for how long: that is known before anything is lost."""
    if liveness is not None and liveness.missed > 1 and liveness.at_ns >= delay.at_ns - delay.window_ns:
        return Text(f"silent {duration(liveness.silent_ns)} ({liveness.missed})", style="red")
    settled = delay.received + delay.lost
    if not settled:
        return Text(UNKNOWN)
    return Text(f"{share(delay.loss)} ({delay.lost}/{settled})", style="red" if delay.lost else "")


def _over(windows_ns: Sequence[int]) -> str:
    """The windows behind the figures, in words."""
    if not windows_ns:
        return ""
    low, high = duration(min(windows_ns)), duration(max(windows_ns))
    return f" over {low}" if low == high else f" over windows from {low} to {high}"


def app_delays(model: Model) -> RenderableType:
    """Delays of application packets by path, then by flow, the busiest first."""
    apps = sorted(model.timing.apps.values(), key=lambda app: (-app.sampled, app.local, app.local_port))
    if not apps:
        return Text(no_app_delays(model))
    paths, flows = [app for app in apps if is_whole_path(app)], [app for app in apps if not is_whole_path(app)]
    title = f"{model.host}: application packets{_over([app.window_ns for app in apps])}, by "
    parts: list[RenderableType] = []
    if paths:
        sheet = _app_sheet(f"{title}path", "path", "clock")
        for app in paths:
            sheet.add(f"{app.protocol} {_place(app)}", *_app_figures(app), clock_state(app.clock))
        parts.append(sheet)
    if flows:
        sheet = _app_sheet("by flow, the busiest first" if paths else f"{title}flow, the busiest first", "flow", "path")
        for app in flows:
            local, remote = endpoint(app.local, app.local_port), endpoint(app.remote, app.remote_port)
            sheet.add(f"{app.protocol} {local}\n  → {remote}", *_app_figures(app), _place(app))
        parts.append(sheet)
    return Group(*parts)


def _app_sheet(title: str, first: str, last: str) -> Sheet:
    spare = ("OWD\nmax", "OWD\np90", "queueing\np50", "ambiguous\nunmatched", last)
    return Sheet(title, (first, *_APP_FIGURES, *_APP_COUNTS, last), left=(last,), spare=spare)


def _place(app: AppDelay) -> str:
    if app.path is None:
        return "no measured\n  path"
    return f"{app.path.destination} {app.path.interface}" + (f"\n  via {app.path.gateway}" if app.path.gateway else "")


def _app_figures(app: AppDelay) -> tuple[str, ...]:
    owd = app.owd
    return (
        *(one_way(each, app.clock) for each in (owd.p50_ns, owd.p90_ns, owd.p99_ns, owd.max_ns)),
        one_way_bound(app.bound_ns, app.clock, owd.max_ns),
        duration(app.queueing.p50_ns),
        duration(app.queueing.p99_ns),
        f"{app.sampled}\n{app.joined}",
        f"{app.ambiguous}\n{app.unmatched}",
    )
