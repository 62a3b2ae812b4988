"""The live view where there is no terminal: a report of everything, as text, once or as often as asked for."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from pytools.errors import SwerveError
from pytools.ipc.client import LineClient
from pytools.signals import Clock
from pytools.views import clock_tables, network_panel, tables
from pytools.views.actions import Mode
from pytools.views.follow import LOT_S, paced
from pytools.views.sheet import Sheet
from pytools.views.top import header, paths
from pytools.views.top.glyphs import Glyphs
from pytools.views.top.header import Around, Given
from pytools.views.top.keys import Look
from pytools.views.top.lists import clock_time
from pytools.views.top.state import Known

_FIRST_S: Final = 1.2  # long enough for one long window of every path
_PATIENCE_S: Final = 5.0
_CHILD_S: Final = 30.0  # until an agent that has just been started publishes
_WIDE: Final = 300
_ACTS: Final = 20
_REASONS: Final = 50


def report(known: Known, look: Look, around: Around, glyphs: Glyphs) -> RenderableType:
    """Header, all paths, why they are as they are, then clocks, TCP, links, RDMA, and the last acts."""
    model, now = known.model, around.now_ns
    rows = paths.rows(known, now, look.horizon_s, glyphs)
    fields = [field for field in rows.listing.columns if field.heading != "reason"]
    names = [field.heading for field in fields]
    sheet = Sheet(
        "", names, left=[each.heading for each in fields if each.left], spare=[*reversed(names[5:])], bare=True
    )
    ordered = rows.ordered(look.sort, look.reverse)
    for row in ordered:
        sheet.add(*(field.show(row) for field in fields), style="dim" if rows.dim(row) else None)
    parts: list[RenderableType] = [header.first(known, around, _WIDE)]
    alerts = header.alerts(known, around, look, (len(ordered), len(ordered)))
    parts += [alerts] if alerts is not None else []
    parts.append(Text(f"figures over the last {look.horizon_s} s; p99 and ±: the largest of the windows'"))
    parts.append(sheet if ordered else Text(rows.nothing))
    parts += [Text(f"{row.name}: {row.why()}") for row in ordered[:_REASONS] if row.why()]
    about = (network_panel.tcp, network_panel.links, network_panel.rdma, network_panel.gpus, clock_tables.summary)
    parts += [said for each in about if (said := each(model, now)) is not None]
    if model.of(Clock):
        listing = clock_tables.of_hosts(now)
        parts.append(listing.sheet("clocks", clock_tables.worst_first(model, now), lambda row: tables.dim(row, now)))
    acts = [event for event in reversed(known.events) if event.kind == "act"][:_ACTS]
    if acts:
        parts.append(Text("last acts"))
        parts += [Text(f"{clock_time(act.unix_ns)} {act.place} {act.what} because {act.why}") for act in acts]
    return Group(*parts)


def run(feed: LineClient, given: Given) -> None:
    """Print reports on standard output, until there were enough, or until interrupted.

    Raises
    ------
    SwerveError
        If nothing was heard at all.
    """
    known, look, started_s = Known(), Look(every_s=given.every_s), time.monotonic()
    patience_s = _CHILD_S if given.child else _PATIENCE_S

    def take(until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOT_S))
            known.take(feed.read())

    def enough() -> bool:
        if not known.model.at_ns and time.monotonic() - started_s > patience_s:
            raise SwerveError(
                f"the agent published nothing within {patience_s:g} s", "`swerve self` says which hooks failed"
            )
        return bool(known.model.at_ns)

    for _ in paced(take, enough, _FIRST_S, given.every_s, given.count):
        mode: Mode | None = None
        if given.steering is not None:
            with contextlib.suppress(SwerveError):
                mode = given.steering.mode()
        around = Around(given.clock_ns(), int(given.up_s()), feed.dropped, mode=mode, child=given.child)
        sys.stdout.write(text(report(known, look, around, given.glyphs), given.glyphs))
        sys.stdout.flush()


def text(what: RenderableType, glyphs: Glyphs) -> str:
    """As plain text; wide, where it is no terminal that is written to."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(what)
    return glyphs.text("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n")
