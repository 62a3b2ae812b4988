"""Tables of links: interfaces that carry paths, what happened to them, and what size and marks their paths have.

Pure: a model and the signals that passed the filters in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rich.text import Text

from pytools import units
from pytools.signals import Link, LinkEvent, PathEcn, PathMtu, Qdisc
from pytools.units import UNKNOWN, share
from pytools.views import tables
from pytools.views.columns import Column, Listing, figure, little, much, named
from pytools.views.overview import Overview, Part, filters_first
from pytools.views.tables import alarm, amber, number

GOOD_NEWS: Final = frozenset({"carrier_found", "neighbour_reachable", "mtu_agrees", "port_up", "bond_port_found"})
_MTU_STYLES: Final = {"agrees": "green", "mismatch": "red", "unknown": "dim"}


def links(_now_ns: int) -> Listing[Link]:
    """One row per interface."""
    return Listing(
        (
            Column("interface", _name, {"interface": named(lambda row: row.interface)}),
            Column("state", _state, {"state": much(lambda row: 2 * (not row.carrier) + (not row.up))}, left=True),
            figure("carrier\nchanges", "changes", number, lambda row: row.carrier_changes, 5),
            Column("speed", _speed, {"speed": little(lambda row: row.speed_mbps)}, spare=8),
            figure("MTU", "mtu", number, lambda row: row.mtu_bytes, 7, little),
            figure("in", "in", units.bit_rate, lambda row: _rate(row, row.window.received_bytes), 2),
            figure("out", "out", units.bit_rate, lambda row: _rate(row, row.window.sent_bytes), 1),
            Column("queue", _backlog, {"queue": much(backlog_bytes)}),
            figure("queue\ndrops", "queue-drops", alarm, lambda row: _most(row, lambda qdisc: qdisc.drops), 3),
            figure("over-\nlimits", "overlimits", number, lambda row: _most(row, lambda qdisc: qdisc.overlimits), 9),
            Column("drops\nin / out", _drops, {"drops": much(_all_drops)}, spare=4),
            figure("errors", "errors", alarm, lambda row: row.window.received_errors + row.window.sent_errors, 6),
            Column("pauses\nin / out", _pauses, {"pauses": much(_all_pauses)}, left=True, spare=10),
            Column(
                "failed\nneighbours",
                lambda row: Text("\n".join(row.failed_neighbours) or "0", style="red" if row.failed_neighbours else ""),
                {"neighbours": much(lambda row: len(row.failed_neighbours))},
                left=True,
                spare=11,
            ),
            Column("driver says", _driver, left=True, spare=12),
        ),
        lambda row: (row.up and row.carrier, row.interface),
    )


def _name(row: Link) -> str:
    return f"{row.interface} (of {row.upper})" if row.upper else row.interface


def mtus(_now_ns: int) -> Listing[PathMtu]:
    """One row per path: what size it carries."""
    return Listing(
        (
            figure("path", "path", str, lambda row: tables.way(row.path), order=named),
            Column("packets of full size", _mtu_state, {"state": much(lambda row: row.state == "mismatch")}, left=True),
            Column("interface", lambda row: number(row.interface_mtu_bytes)),
            figure("works", "works", number, lambda row: row.works_bytes, order=little),
            figure("fails", "fails", number, lambda row: row.fails_bytes, order=little),
            Column("told", _told, left=True, spare=1),
        ),
        lambda row: (row.state == "agrees", row.path.destination, row.path.interface, str(row.path)),
    )


def ecns(_now_ns: int) -> Listing[PathEcn]:
    """One row per path: marks on what comes back by it."""
    return Listing(
        (
            figure("from the peer of", "path", str, lambda row: tables.way(row.path), order=named),
            figure("CE", "ce", share, lambda row: row.ce_packets / row.packets if row.packets else None),
            figure("marked", "marked", amber, lambda row: row.ce_packets),
            Column("could be", lambda row: number(row.packets)),
            figure("marked, total", "total", number, lambda row: row.total_ce_packets),
            Column("could be, total", lambda row: number(row.total_packets), spare=1),
        ),
        lambda row: (-row.ce_packets, -row.total_ce_packets, str(row.path)),
    )


def events(now_ns: int) -> Listing[LinkEvent]:
    """One row per event, the newest first."""
    return Listing(
        (
            Column(
                "when", lambda row: tables.ago(row.happened_ns, now_ns), {"when": little(lambda row: -row.happened_ns)}
            ),
            figure("interface", "interface", str, lambda row: row.interface, order=named, left=True),
            Column("what", _what, {"what": named(lambda row: row.what)}, left=True),
            Column("detail", lambda row: row.detail, left=True, spare=1),
            Column("paths", lambda row: "\n".join(map(tables.way, row.paths)) or UNKNOWN, left=True, spare=2),
        ),
        lambda row: (-row.happened_ns, row.interface, row.what),
    )


def _state(link: Link) -> Text:
    if not link.up:
        return Text("down", style="red")
    if not link.carrier:
        return Text("no carrier", style="red")
    port = link.port
    if port is None:
        return Text("up", style="green")
    if port.trouble:
        return Text(f"up, {port.trouble}", style="red")
    return Text(f"up, {port.mode}{'' if port.active else ': backup'}", style="green")


def _speed(link: Link) -> str:
    return UNKNOWN if link.speed_mbps is None else units.bit_rate(link.speed_mbps * 1e6)


def _rate(link: Link, count_bytes: int) -> float | None:
    return count_bytes * 8e9 / link.window_ns if link.window_ns else None


def _fullest(link: Link) -> Qdisc | None:
    # A queue discipline with classes has what its classes hold in its own backlog: no sum.
    return max(link.qdiscs, key=lambda qdisc: qdisc.backlog_bytes, default=None)


def backlog_bytes(link: Link) -> int | None:
    """What waits in the interface's queue; None where it has none."""
    fullest = _fullest(link)
    return None if fullest is None else fullest.backlog_bytes


def _backlog(link: Link) -> str:
    fullest = _fullest(link)
    if fullest is None:
        return UNKNOWN
    return f"{units.size(fullest.backlog_bytes)}\n{fullest.backlog_packets:,} packets"


def _most(link: Link, count: Callable[[Qdisc], int]) -> int:
    return max(map(count, link.qdiscs), default=0)


def _drops(link: Link) -> Text:
    window = link.window
    text = f"{window.received_drops:,} / {window.sent_drops:,}"
    return Text(text, style="red" if window.received_drops or window.sent_drops else "")


def _all_drops(link: Link) -> int:
    return link.window.received_drops + link.window.sent_drops


def _pauses(link: Link) -> str:
    """Frames by priority, with what they cost where the driver says so."""
    said = []
    for pause in link.pauses:
        if not (pause.received or pause.sent):
            continue
        which = "link" if pause.priority is None else f"prio {pause.priority}"
        text = f"{which}: {number(pause.received)} / {number(pause.sent)}"
        if pause.received_duration_us:
            text += f", kept for {units.duration(pause.received_duration_us * 1000)}"
        said.append(text)
    return "\n".join(said) or ("0" if link.pauses else UNKNOWN)


def _all_pauses(link: Link) -> int | None:
    return sum((pause.received or 0) + (pause.sent or 0) for pause in link.pauses) if link.pauses else None


def _driver(link: Link) -> str:
    most = sorted(((count, name) for name, count in link.driver.items() if count), reverse=True)
    return "\n".join(f"{name} {count:,}" for count, name in most[:3]) or UNKNOWN


def _mtu_state(row: PathMtu) -> Text:
    return Text({"agrees": "pass", "mismatch": "do not pass", "unknown": "unknown"}[row.state], _MTU_STYLES[row.state])


def _told(row: PathMtu) -> str:
    if row.told_bytes is None:
        return UNKNOWN
    return number(row.told_bytes) + (f" by {row.told_by}" if row.told_by else "")


def _what(event: LinkEvent) -> Text:
    return Text(event.what.replace("_", " "), style="green" if event.what in GOOD_NEWS else "yellow")


_EVENTS: Final = Part(LinkEvent, events, "{host}: what happened to links{asked}", dims=False)
overview: Final = Overview(
    [
        Part(Link, links, "{host}: interfaces that carry paths{asked}"),
        Part(PathMtu, mtus, "sizes of packets, bytes"),
        Part(PathEcn, ecns, "congestion marks on packets that came in", passes=lambda row: bool(row.total_packets)),
        replace(_EVENTS, title="last events", most=5, more="and {more} more: swerve links --events", sorts=False),
    ],
    filters_first("no interface that carries a path has been reported"),
)
happenings: Final = Overview(
    [_EVENTS], filters_first("nothing has happened to its links while this looked; let it go on with -i 1")
)
