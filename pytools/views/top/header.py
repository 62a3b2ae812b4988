"""The first lines of the live view: who, since when, how far its clock can be trusted, who steers, at what cost.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.text import Text

from pytools import units
from pytools.signals import PathState, Self
from pytools.views import clock_tables
from pytools.views.actions import Mode, Steering
from pytools.views.model import is_silent
from pytools.views.top.fields import Rows
from pytools.views.top.glyphs import UNICODE, Glyphs
from pytools.views.top.keys import Look
from pytools.views.top.paths import short_time
from pytools.views.top.state import Known

_TABS: Final = (
    ("1", "paths", ("paths",)),
    ("2", "flows", ("flows",)),
    ("3", "links", ("links", "rdma")),
    ("4", "events", ("events", "jobs")),
)
_ASIDE: Final = {"rdma": "3 RDMA", "jobs": "5 jobs"}  # shown in the place of a list that is not
_MODES: Final = {"observe": "", "dry run": "cyan", "steering": "green", "a controller runs": "cyan"}


@dataclass(frozen=True)
class Around:
    """What there is to say that is no signal."""

    now_ns: int
    up_s: int = 0  # since the host was started
    missed: int = 0  # signals this view was too slow for
    own_share: float | None = None  # of one core, for the view itself
    mode: Mode | None = None  # None: nobody knows how to ask
    frozen_for_ns: int | None = None  # how long the view has been frozen
    child: bool = False  # the agent is the view's own


@dataclass(frozen=True)
class Given:
    """What the view was started with."""

    count: int | None = None  # frames, then it ends
    every_s: float = 1.0
    color: bool = True
    glyphs: Glyphs = UNICODE
    allow_actions: bool = False
    steering: Steering | None = None
    child: bool = False  # the agent is our own
    clock_ns: Callable[[], int] = time.monotonic_ns
    up_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
    is_gone: Callable[[], bool] = lambda: False  # nobody is at the terminal any more
    timed: bool = True  # False: frames come only by `tick` (tests)


def mode(known: Known, around: Around) -> str:
    """Who steers, in a word."""
    if around.mode is not None:
        return "observe" if not around.mode.running else "steering" if around.mode.applies else "dry run"
    fresh = any(not is_silent(state, around.now_ns) for state in known.model.of(PathState).values())
    return "a controller runs" if fresh else "observe"


def first(known: Known, around: Around, width: int) -> Text:
    """Host, uptime, clock, mode, cost, losses; what is least important goes where there is no room."""
    model, cost = known.model, known.model.one(Self)
    word = mode(known, around)
    clock = clock_tables.own(model, around.now_ns)
    lost = sum(known.drops().values())
    days, seconds = divmod(around.up_s, 86_400)
    up = f"up {f'{days}d ' if days else ''}{seconds // 3600:02}:{seconds // 60 % 60:02}"
    parts = [
        (0, Text(f"swerve {model.host}", style="bold")),
        (0, Text(up)),
        (0, clock if clock else Text(f"clock {units.UNKNOWN}", style="dim")),
        (0, Text(word, style=_MODES[word])),
    ]
    agent = "own agent" if around.child else "agent"
    if cost is not None:
        parts += [(0, Text(f"{agent} {units.share(cost.cpu_share)}")), (2, Text(units.size(cost.resident_bytes)))]
    elif around.child:
        parts.append((0, Text(agent)))
    if around.own_share is not None:
        parts.append((3, Text(f"view {units.share(around.own_share)}")))
    parts.append((0, Text(f"lost {lost:,}", style="red" if lost else "")))
    for most in (3, 2, 1, 0):
        line = Text("  ").join(text for rank, text in parts if rank <= most)
        if line.cell_len <= width:
            return line
    short = parts[2][1].plain.split(" to ")[0].replace("synchronised", "sync")
    parts[2] = (0, Text(short, style=parts[2][1].style))
    return Text(" ").join(text for rank, text in parts if rank == 0)


def second(look: Look, rows: Rows[Any], count: int, arrow: str, width: int) -> Text:
    """Panels, horizon, interval, order, and where the cursor is."""
    line = Text()
    for key, name, panels in _TABS:
        shown = _ASIDE.get(look.panel, "") if look.panel in panels else ""
        line.append(f" {shown or f'{key} {name}'} ", "reverse" if look.panel in panels else None)
    order = f"{look.sort or rows.by}{' reversed' if look.reverse else ''}"
    place = f" {look.cursor + 1}/{count}" if count else ""
    horizon, order = f" last {look.horizon_s} s", f" {arrow} {order}{place}"
    every = f", every {look.every_s:g} s"
    short = line.cell_len + len(horizon) + len(every) + len(order) > width
    return line.append(horizon + ("" if short else every) + order)


def alerts(known: Known, around: Around, look: Look, passed: tuple[int, int]) -> Text | None:
    """What must not be overlooked; None when there is nothing."""
    said: list[Text] = []
    now = around.mode
    if now is not None and now.confirm_left_s is not None:
        left = f"CONFIRM within {now.confirm_left_s:.0f} s, or all is undone: {now.confirm}"
        said.append(Text(left, style="bold red"))
    if around.frozen_for_ns is not None:
        said.append(Text(f"FROZEN for {short_time(around.frozen_for_ns)}: Space goes on", style="bold yellow"))
    if look.asked:
        said.append(Text(f"filter: {look.asked} ({passed[0]} of {passed[1]})", style="cyan"))
    if now is not None and now.frozen:
        said.append(Text(f"steering is frozen: {now.frozen}", style="yellow"))
    cost = known.model.one(Self)
    if cost is not None and cost.failed:
        said.append(Text(f"not attached: {', '.join(sorted(cost.failed))}", style="red"))
    missed = known.missed(around.missed)
    if missed:
        said.append(Text(f"this view missed {missed:,} signals", style="red"))
    if known.malformed:
        said.append(Text(f"{known.malformed:,} lines were no signals", style="red"))
    if known.zeroed_ns is not None:
        said.append(Text(f"zeroed {short_time(around.now_ns - known.zeroed_ns)} ago", style="dim"))
    return Text("  ").join(said) if said else None
