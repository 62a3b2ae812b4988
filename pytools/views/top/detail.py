"""All about one row of the live view: of a path its figures, histograms, acts and states; of others every field.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from rich.style import Style
from rich.text import Text

from pytools import units
from pytools.figures import FOLLOWED
from pytools.signals import DELAY_BOUNDS_NS, PathWay
from pytools.units import UNKNOWN, duration
from pytools.views import delay_tables, tables
from pytools.views.top.glyphs import Glyphs
from pytools.views.top.group_traffic import Share
from pytools.views.top.header import Around
from pytools.views.top.keys import KEYS, Look
from pytools.views.top.lists import clock_time
from pytools.views.top.paths import PathRow, short_time
from pytools.views.top.rings import queued
from pytools.views.top.state import Event, Known, since_ns

_HEAD: Final = "bold"
_LABEL: Final = 14


def lines(row: Any, known: Known, look: Look, around: Around, width: int, glyphs: Glyphs) -> list[Text]:
    if isinstance(row, PathRow):
        return list(_path(row, known, look, around, width, glyphs))
    if isinstance(row, Event):
        head = [Text(f"{clock_time(row.unix_ns)} UTC  {row.kind}  {row.place}", style=_HEAD), Text(row.what)]
        return [*head, *wrapped(row.why, width), Text(""), *_fields(msgspec.to_builtins(row.signal), width)]
    return _fields(msgspec.to_builtins(row), width)


def _fields(value: dict[str, Any], width: int, indent: int = 0) -> list[Text]:
    """Name and value, line by line."""
    found: list[Text] = []
    for name, each in value.items():
        start = " " * indent + name.ljust(24 - indent)
        if isinstance(each, dict) and each:
            found += [Text(start.rstrip(), style="dim"), *_fields(each, width, indent + 2)]
        elif isinstance(each, list) and each and isinstance(each[0], dict):
            for part in each:
                found += [Text(start.rstrip(), style="dim"), *_fields(part, width, indent + 2)]
        else:
            said = _value(name, each)
            first, *more = textwrap.wrap(said, max(20, width - 26)) or [""]
            found.append(Text(start, style="dim").append(f" {first}", "not dim"))
            found += [Text(" " * 25 + part) for part in more]
    return found


def _value(name: str, value: Any) -> str:
    """A value in words; large counts with commas."""
    if value is None or value in ("", [], {}):
        return UNKNOWN
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if type(value) is int and value >= 100_000 and name != "pid" else str(value)


def wrapped(text: str, width: int, indent: str = "", style: str | Style = "") -> list[Text]:
    return [
        Text(part, style=style) for part in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
    ]


def _path(row: PathRow, known: Known, look: Look, around: Around, width: int, glyphs: Glyphs) -> Iterator[Text]:
    path, figures = row.path, row.figures
    yield Text(f"{path}  to {path.address}", style=_HEAD)
    if row.delay is not None and row.delay.underlay is not None:
        outer = "".join({f" to {each.address}" for each in row.delay.underlay})
        yield from wrapped(f"outer packets{outer} leave {delay_tables.underlay(row.delay)}", width)
    if row.state is not None:
        since = short_time(around.now_ns - row.state.since_ns)
        yield Text("state ").append(f"{row.state.state} for {since}", tables.STATE_STYLES.get(row.state.state, ""))
    yield from wrapped(row.why(), width, "  ")
    window = duration(row.ring.windows[-1].window_ns) if row.ring.windows else UNKNOWN
    yield Text(
        f"last {look.horizon_s} s: {figures.windows} windows of {window}, "
        f"which cover {duration(figures.covered_ns)}; clock {figures.clock or UNKNOWN}"
    )
    yield Text(f"{'':{_LABEL}}" + "".join(f"{name:>11}" for name in ("there", "±", "back", "±")), style="dim")
    for each in FOLLOWED:
        cells = (
            text
            for of in (figures.forward, figures.reverse)
            for text in (duration(of.figures.get(each)), tables.bound(of.bounds.get(each.measure)))
        )
        yield Text(f"{each.name:{_LABEL}}" + "".join(f"{text:>11}" for text in cells))
    yield Text("p50: the middle one of the windows'; the others and ±: the largest of the windows'", style="dim")
    yield Text(f"probes lost {figures.lost:,} of {figures.received + figures.lost:,}").append(
        f"   TCP retransmitted {_number(figures.retransmitted_per_s)}/s, timeouts {_count(figures.timeouts)}"
        f"   CE there {units.share(figures.marked_forward)}, back {units.share(figures.marked_reverse)}"
    )
    if row.share is not None:
        wanted = row.share.wanted_weight
        yield Text(
            f"weight {row.share.member.weight} in the kernel, {UNKNOWN if wanted is None else wanted} wanted: "
            f"{units.share(row.share.wanted)} of the group's packets, {units.share(row.share.sent)} sent"
        )
        yield from wrapped(_counted(row.share), width, "  ", "dim")
    yield from _hold(row, around, width)
    yield from _ways(row, known)
    yield Text("")
    yield from _histogram(row, look, around, width, glyphs)
    yield Text("")
    yield Text("acts and states since this view was opened, the newest first", style=_HEAD)
    log = known.about(path)
    for event in log:
        line = Text(f"{clock_time(event.unix_ns)} {event.kind:<5} ", style="dim").append(
            event.what, event.style or "none"
        )
        yield line
        yield from wrapped(f"{event.place}: {event.why}" if event.kind == "act" else event.why, width, " " * 15)
    if not log:
        yield Text("none", style="dim")


def _hold(row: PathRow, around: Around, width: int) -> Iterator[Text]:
    """What waits at this host because of the queue on the path."""
    hold = row.hold
    if hold is None:
        return
    if row.holding is None or hold.why_not:
        gone = f"no controller for {duration(around.now_ns - hold.at_ns)}" if hold.armed else "the hold has ended"
        why = hold.why_not or gone
        yield from wrapped(f"packets are not held: {why}", width)
    else:
        most = "all leaves" if hold.rate_bytes_per_s is None else f"{units.bit_rate(8 * hold.rate_bytes_per_s)} leave"
        yield from wrapped(
            f"packets are held above {duration(hold.threshold_ns)} of queueing, for at most "
            f"{duration(hold.longest_ns)}: now {duration(hold.queueing_ns)}, {most} [{hold.under}]",
            width,
        )
    yield Text(
        f"held {units.size(hold.held_bytes)} in {hold.held_packets:,} packets, {duration(hold.waited_ns)} in all; "
        f"{hold.samples_above:,} of {hold.samples:,} samples above"
    )


def _ways(row: PathRow, known: Known) -> Iterator[Text]:
    """What the path has behind its first hop; of the only way its own figures tell."""
    ways = [each for each in known.model.of(PathWay).values() if each.path == row.path]
    if not ways:
        return
    newest = max(ways, key=lambda way: way.at_ns)
    yield Text("")
    yield Text(delay_tables.ways_met(newest), style=_HEAD)
    for each in sorted((way for way in ways if way.ways == newest.ways > 1), key=lambda way: way.way):
        queued_ns, lost = each.queueing_p50_ns, each.lost / each.sent if each.sent else None
        yield (
            Text(f"{delay_tables.way_name(each)}  ")
            .append_text(delay_tables.way_state(each))
            .append(
                f"  queueing {duration(queued_ns)} {tables.bound(each.queueing_bound_ns)}, loss {units.share(lost)}"
            )
        )


def _counted(share: Share) -> str:
    """What the share that was sent rests on."""
    kernel = "the kernel counts none" if share.member.packets is None else f"{share.chosen:,} that the kernel counted"
    return (
        f"sent here: {share.segments:,} TCP segments, and {kernel} where it chooses the way: "
        "each forwarded packet, but a connected socket once; so of connected UDP sockets nothing is known"
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _histogram(row: PathRow, look: Look, around: Around, width: int, glyphs: Glyphs) -> Iterator[Text]:
    """Queueing of single probes, there and back side by side."""
    there, back = queued(row.ring, since_ns(around.now_ns, look.horizon_s))
    total = f"{sum(there):,} there, {sum(back):,} back"
    yield Text(f"queueing of single probes: {total}", style=_HEAD)
    used = [index for index, both in enumerate(zip(there, back, strict=True)) if any(both)]
    if not used:
        yield Text("none yet: they come with each window", style="dim")
        return
    room = max(4, (width - _LABEL - 2 * 9) // 2)
    most = max(*there, *back)
    for index in range(used[0], used[-1] + 1):
        line = Text(f"{_class(index):<{_LABEL}}", style="dim")
        for counts in (there, back):
            bar = glyphs.bar * -(-counts[index] * room // most)
            line.append(f"{counts[index]:>7} ", "not dim").append(f"{bar:<{room}} ", "cyan not dim")
        yield line


def _class(index: int) -> str:
    if index < len(DELAY_BOUNDS_NS):
        return f"up to {_round(DELAY_BOUNDS_NS[index])}"
    return f"above {_round(DELAY_BOUNDS_NS[-1])}"


def _round(ns: int) -> str:
    """An edge: they are round."""
    for size, unit in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if ns >= size:
            return f"{ns // size} {unit}"
    return f"{ns} ns"


def help_lines(width: int, allow_actions: bool) -> list[Text]:
    """All keys, and what the figures of a horizon are."""
    said: list[Text] = []
    half = (len(KEYS) + 1) // 2
    column = min(60, width // 2)
    for index in range(half):
        line = Text()
        for key in (KEYS[index], *KEYS[half + index : half + index + 1]):
            start = line.cell_len
            line.append(f"{key.shown:<8}", "bold").append(key.words, "dim" if key.acts and not allow_actions else "")
            line.append(" " * (column - (line.cell_len - start)))
        said.append(line)
    if not allow_actions:
        said += wrapped("d, u, p, n need `swerve top --allow-actions`; each is typed out before it is done.", width)
    text = (
        "Figures are of the horizon. Counts and shares are exact over it. Of percentiles of windows: p50 is the "
        "middle one of the windows'; the others and ± are the largest (a percentile of the whole horizon is no larger)."
    )
    return [*said, *wrapped(text, width)]


def cut(found: Sequence[Text], scroll: int, room: int) -> tuple[list[Text], int]:
    """So many lines from there; and how far it can be scrolled."""
    furthest = max(0, len(found) - room)
    start = min(max(0, scroll), furthest)
    return list(found[start : start + room]), start
