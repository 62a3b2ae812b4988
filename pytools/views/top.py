"""The live view: paths, worst first, with what steering wants and what the kernel counted; below them a line each on
clocks, TCP, links and RDMA where there is something to say, and the last acts.

`render` is pure (model and time in, renderable out). `run` owns the terminal: it leaves it as it found it, also on an
exception and on SIGTERM. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pytools.bus_client import Client
from pytools.signals import Act, AppDelay, Delay, Path, PathDelay
from pytools.views import clock_panel, network_panel, tables
from pytools.views.follow import LOT_S, console, frames
from pytools.views.kinds import VIEWS
from pytools.views.model import Model, fold, lost_while_watching, member_of, retransmitted
from pytools.views.timing import app_of

_STYLES: Final = {
    "healthy": "green",
    "suspect": "yellow",
    "drained": "red",
    "returning": "cyan",
    "unmeasured": "dim",
    "manual": "magenta",
}
_URGENCY: Final = ("drained", "suspect", "returning", "unmeasured", "manual", "healthy")
_SILENT_NS: Final = 3_000_000_000  # what was not heard of for so long (or three windows) is said to be silent
_COLUMNS: Final = (
    *("path", "OWD p50", "OWD p99", "±", "queue p50", "q p99", "back p99", "app p99", "app q p99", "loss", "retx"),
    *("weight", "packets", "pkt/s", "state", "reason"),
)
# Columns left out where the view is narrower than so many characters.
_NARROW: Final = (
    (252, {"reason"}),
    (182, {"app p99", "app q p99"}),
    (160, {"OWD p50", "pkt/s"}),
    (140, {"±", "queue p50"}),
    (118, {"back p99", "packets"}),
)
_SHORT: Final = 96  # narrower than this a path goes without its gateway, and loss without its counts
_LEAST_ROWS: Final = 4
_LEAST_ACTS: Final = 3
_FIRST_S: Final = 0.3  # something to look at, soon


def render(
    model: Model, now_ns: int, width: int = 10_000, height: int | None = None, missed: int = 0
) -> RenderableType:
    """One frame.

    Parameters
    ----------
    model : Model
        What is known.
    now_ns : int
        CLOCK_MONOTONIC of the agent's host.
    width, height : int, optional
        Characters and lines there are; as many as it takes unless given.
    missed : int
        Signals this view was too slow for.
    """
    paths = sorted(set(model.delays) | set(model.states), key=lambda path: _rank(model, path))
    acts = model.acts[-6:] if height is not None else model.acts[-20:]
    hidden = set().union(*(names for limit, names in _NARROW if width < limit))
    reasons = [_reason(model, path, now_ns) for path in paths if _why(model, path, now_ns)]
    reasons = reasons[:6] if "reason" in hidden else []
    apps = clock_panel.applications(model) if "app p99" in hidden else None
    about = [text for text in (apps, *_lines(model, now_ns)) if text is not None]
    header = _header(model, now_ns, missed)
    said = [_act(act, now_ns) for act in reversed(acts)]
    if height is not None:
        left = height - 8 - _LEAST_ROWS - _all_lines((header, *reasons), width) + 1
        about, said = _fitting(about, said, left, width)
    below = _all_lines((header, *reasons, *about, *said), width) - 1
    room = len(paths) if height is None else max(_LEAST_ROWS, height - 8 - below)
    parts: list[RenderableType] = [header, _paths(model, paths[:room], now_ns, width, hidden)]
    if len(paths) > room:
        parts.append(Text(f"… and {len(paths) - room} paths that look better", style="dim"))
    if not paths:
        parts.append(Text("no path has been measured yet", style="dim"))
    parts.extend((*reasons, *about))
    rows = None if height is None else room - len(paths) - clock_panel.HEAD_LINES
    if model.timing.clocks and (rows is None or rows > 0):
        parts.append(clock_panel.table(model, now_ns, rows))
    if said:
        parts.append(Text("last acts", style="bold"))
        parts.extend(said)
    return Group(*parts)


def _lines(model: Model, now_ns: int) -> tuple[Text | None, ...]:
    """What there is to say beside the paths, the least important first: that goes first where lines are few."""
    return (
        network_panel.tcp(model, now_ns),
        clock_panel.summary(model, now_ns),
        network_panel.rdma(model, now_ns),
        network_panel.links(model, now_ns),
    )


def _all_lines(texts: Sequence[Text], width: int) -> int:
    """How many lines these take, nearly."""
    return sum(1 + len(text) // width for text in texts)


def _fitting(about: list[Text], acts: list[Text], left: int, width: int) -> tuple[list[Text], list[Text]]:
    """What is said beside the paths, and of acts (newest first), in so few lines: old acts go first."""
    about, acts = list(about), list(acts)
    while len(acts) > _LEAST_ACTS and _all_lines((*about, *acts), width) > left:
        acts.pop()
    while about and _all_lines((*about, *acts), width) > left:
        about.pop(0)
    return about, acts


def _rank(model: Model, path: Path) -> tuple[int, int, Path]:
    """Worst first: by state, then by loss and queueing."""
    state = model.states.get(path)
    urgency = _URGENCY.index(state.state) if state is not None and state.state in _URGENCY else len(_URGENCY)
    delay = model.delays.get(path)
    trouble = 0
    if delay is not None:
        trouble = delay.lost * 1_000_000_000 + (delay.forward.queueing_p99_ns or 0)
    return (urgency, -trouble, path)


def _header(model: Model, now_ns: int, missed: int) -> Text:
    line = Text(f"swerve {model.host}", style="bold")
    own = model.cost
    if own is not None:
        cost = f"   agent {tables.share(own.cpu_share)} of a core, {tables.size(own.resident_bytes)}"
        line.append(cost, style="not bold")
    clock = clock_panel.own(model, now_ns)
    if clock:
        line.append("   ").append_text(clock)
    lost = lost_while_watching(model)
    if lost:
        line.append(f"   {lost} lost while watching (swerve self)", style="red")
    if own is not None and own.failed:
        line.append(f"   not attached: {', '.join(sorted(own.failed))}", style="red")
    if missed:
        line.append(f"   this view missed {missed} signals", style="red")
    return line


def _paths(model: Model, paths: list[Path], now_ns: int, width: int, hidden: set[str]) -> Table:
    shown = [name for name in _COLUMNS if name not in hidden]
    table = tables.plain("", *shown, right=set(shown) - {"path", "state", "reason"})
    short = width < _SHORT
    for path in paths:
        delay, tcp = model.delays.get(path), retransmitted(model, path)
        retransmissions = tables.UNKNOWN if tcp is None else Text(*_alarm(tcp.retransmitted_segments))
        cells = (
            tables.way(path, short),
            *_figures(delay, app_of(model.timing, path), short),
            retransmissions,
            *_weights(model, path),
            _state(model, path, now_ns),
            _why(model, path, now_ns),
        )
        tables.add_row(
            table,
            *(cell for name, cell in zip(_COLUMNS, cells, strict=True) if name in shown),
            style="dim" if delay is None or _silent(delay, now_ns) else None,
        )
    return table


def _alarm(count: int) -> tuple[str, str]:
    return str(count), "red" if count else ""


def _silent(delay: PathDelay, now_ns: int) -> bool:
    return now_ns - delay.at_ns > max(_SILENT_NS, 3 * delay.window_ns)


def _figures(delay: PathDelay | None, app: AppDelay | None, short: bool) -> tuple[str | Text, ...]:
    if delay is None:
        return (*(tables.UNKNOWN,) * 6, *_application(app), tables.UNKNOWN)
    forward = delay.forward
    style = "yellow" if delay.clock == "holdover" else ""
    return (
        Text(tables.one_way(forward.owd_p50_ns, delay.clock), style=style),
        Text(tables.one_way(forward.owd_p99_ns, delay.clock), style=style),
        Text(tables.one_way_bound(forward.bound_ns, delay.clock, forward.owd_p99_ns), style=style),
        _queueing(forward, forward.queueing_p50_ns),
        _queueing(forward, forward.queueing_p99_ns),
        _queueing(delay.reverse, delay.reverse.queueing_p99_ns),
        *_application(app),
        tables.loss(delay, short),
    )


def _application(app: AppDelay | None) -> tuple[str, str]:
    """One-way delay and queueing of application packets."""
    if app is None:
        return (tables.UNKNOWN, tables.UNKNOWN)
    return (tables.one_way(app.owd.p99_ns, app.clock), tables.duration(app.queueing.p99_ns))


def _queueing(one: Delay, value: int | None) -> Text:
    """A queueing delay; dimmed while it is no larger than its own bound."""
    small = value is None or (one.queueing_bound_ns is not None and value <= one.queueing_bound_ns)
    return Text(tables.duration(value), style="dim" if small else "")


def _weights(model: Model, path: Path) -> tuple[str | Text, str, str]:
    """Weight in the kernel (and the wanted one where it differs), packets counted, packets per second."""
    state, found = model.states.get(path), member_of(model, path)
    wanted = state.weight_wanted if state is not None else None
    if found is None:
        actual = state.weight_actual if state is not None else None
        return _weight(wanted, actual), tables.UNKNOWN, tables.UNKNOWN
    group_id, member = found
    rate = model.rates.get((group_id, member.nexthop_id))
    return (
        _weight(wanted, member.weight),
        tables.UNKNOWN if member.packets is None else str(member.packets),
        tables.UNKNOWN if rate is None else f"{rate:.0f}",
    )


def _weight(wanted: int | None, actual: int | None) -> Text:
    shown = tables.UNKNOWN if actual is None else str(actual)
    if wanted is None or wanted == actual:
        return Text(shown)
    return Text(f"{shown}→{wanted}", style="yellow")


def _state(model: Model, path: Path, now_ns: int) -> Text:
    state = model.states.get(path)
    if state is None:
        return Text(tables.UNKNOWN)
    if now_ns - state.at_ns > _SILENT_NS:
        return Text(f"{state.state}?", style="dim")
    since = tables.duration(max(0, now_ns - state.since_ns))
    return Text(f"{state.state} {since}", style=_STYLES.get(state.state, ""))


def _why(model: Model, path: Path, now_ns: int) -> str:
    """What there is to say about a path; empty when nothing is."""
    state, delay = model.states.get(path), model.delays.get(path)
    said = []
    if delay is not None and _silent(delay, now_ns):
        said.append(f"not measured for {tables.duration(now_ns - delay.at_ns)}")
    elif delay is not None and delay.overtaken_p50_ns is not None:
        said.append(f"half of the probes wait for at least {tables.duration(delay.overtaken_p50_ns)}")
    if state is not None and now_ns - state.at_ns > _SILENT_NS:
        said.append(f"no controller for {tables.duration(now_ns - state.at_ns)}")
    if state is not None and state.reason:
        said.append(state.reason + (f" [under {state.under}]" if state.under else ""))
    return "; ".join(said)


def _reason(model: Model, path: Path, now_ns: int) -> Text:
    return Text(f"{tables.way(path)}: ", style="dim").append(_why(model, path, now_ns), style="not dim")


def _act(act: Act, now_ns: int) -> Text:
    line = Text(f"{tables.duration(max(0, now_ns - act.at_ns))} ago ", style="dim")
    line.append(f"{act.outcome.replace('_', ' ')}: ", style="red" if act.outcome == "failed" else "bold")
    line.append(f"{act.what} {_change(act.before, act.after)}", style="not dim")
    line.append(f" because {act.because}" + (f" [under {act.under}]" if act.under else ""), style="not dim")
    return line


def _change(before: dict[str, int], after: dict[str, int]) -> str:
    keys = sorted(set(before) | set(after))
    return ", ".join(f"{key} {before.get(key, 0)}→{after.get(key, 0)}" for key in keys)


def run(client: Client, count: int | None, every_s: float, color: bool) -> None:
    """Show frames until `count`, until q, or until interrupted; plain text when this is no terminal."""
    out = console(color)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _run_plain(client, count, every_s, out)
        return
    with _ended_by_signal(), _keys(sys.stdin.fileno()), Live(console=out, screen=True, auto_refresh=False) as live:
        _run_live(client, count, every_s, live)


def _run_plain(client: Client, count: int | None, every_s: float, out: Console) -> None:
    for model in frames(client, VIEWS["top"], count, every_s):
        out.print(render(model, time.monotonic_ns(), out.width, missed=client.dropped))
        out.file.flush()


def _run_live(client: Client, count: int | None, every_s: float, live: Live) -> None:
    model = Model()
    due_s = time.monotonic() + _FIRST_S
    shown = 0
    while count is None or shown < count:
        pressed, model = _until(client, model, due_s)
        if "q" in pressed.lower():
            return
        size = live.console.size
        frame = render(model, time.monotonic_ns(), size.width, size.height, client.dropped)
        live.update(frame, refresh=True)
        shown += 1
        due_s = max(due_s + every_s, time.monotonic())


def _until(client: Client, model: Model, due_s: float) -> tuple[str, Model]:
    """Fold what arrives until then; returns at once when a key is pressed."""
    poll = select.poll()
    stdin = sys.stdin.fileno()
    poll.register(stdin, select.POLLIN)
    while (left_s := due_s - time.monotonic()) > 0:
        key = poll.poll(min(left_s, LOT_S) * 1e3)
        model = fold(model, client.read())
        if key:
            pressed = os.read(stdin, 64)
            return pressed.decode(errors="replace") if pressed else "q", model
    return "", model


@contextmanager
def _keys(fd: int) -> Iterator[None]:
    """Keys one by one, unechoed."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the terminal is put back."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
