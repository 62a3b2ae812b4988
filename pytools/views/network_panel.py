"""TCP, links and RDMA in the live view: a line each, and only when there is something to say.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

from typing import Final

from rich.text import Text

from pytools import units
from pytools.signals import Gpu, LinkEvent, RdmaQueuePair, RdmaSuspects, TcpPath
from pytools.views import tables
from pytools.views.gpu_tables import complaints
from pytools.views.link_tables import GOOD_NEWS
from pytools.views.model import Model, is_silent
from pytools.views.rdma_tables import WORST_FIRST, verdict
from pytools.views.tcp_tables import causes

_NAMED: Final = 3
_NEWS_NS: Final = 60_000_000_000  # an event is worth a line for so long
_WELL: Final = ("ok", "no_demand")
# Events that follow upon one another: only the last of each kind is told.
_TOPICS: Final = {
    **dict.fromkeys(("carrier_lost", "carrier_found", "flap", "removed"), "carrier"),
    **dict.fromkeys(("neighbour_failed", "neighbour_reachable"), "neighbour"),
    **dict.fromkeys(("mtu_mismatch", "mtu_agrees", "mtu_changed"), "mtu"),
    **dict.fromkeys(("port_down", "port_up"), "port"),
    **dict.fromkeys(("bond_port_lost", "bond_port_found"), "bond port"),
}


def tcp(model: Model, now_ns: int) -> Text | None:
    """Paths that retransmitted in the last window, by cause; None when none did."""
    rows = [row for row in model.of(TcpPath).values() if not is_silent(row, now_ns)]
    troubled = sorted((row for row in rows if row.retransmitted_segments or row.zero_windows), key=_much_first)
    return _line("TCP: ", [Text(_of_path(row)) for row in troubled[:_NAMED]], len(troubled))


def _much_first(row: TcpPath) -> tuple[int, int, str]:
    return (-row.retransmitted_segments, -row.zero_windows, row.interface)


def _of_path(row: TcpPath) -> str:
    place = row.interface if row.path is None else tables.way(row.path, short=True)
    said = []
    if row.retransmitted_segments:
        needless = f", {row.spurious_segments:,} needlessly" if row.spurious_segments else ""
        said.append(f"{row.retransmitted_segments:,} retransmitted ({causes(row.retransmitted)}){needless}")
    if row.zero_windows:
        said.append(f"{row.zero_windows:,} zero windows")
    return f"{place} {', '.join(said)}"


def links(model: Model, now_ns: int) -> Text | None:
    """What happened to links in the last minute, the newest first; None when nothing did."""
    last: dict[tuple[str, str], LinkEvent] = {}
    for event in sorted(model.of(LinkEvent).values(), key=lambda each: each.happened_ns):
        if now_ns - event.happened_ns <= _NEWS_NS:
            last[(event.interface, _TOPICS.get(event.what, event.what))] = event
    newest = sorted(last.values(), key=lambda each: -each.happened_ns)
    return _line("links: ", [_of_event(event, now_ns) for event in newest[:_NAMED]], len(newest))


def _of_event(event: LinkEvent, now_ns: int) -> Text:
    text = Text(f"{event.interface} ").append(
        event.what.replace("_", " "), style="green" if event.what in GOOD_NEWS else "yellow"
    )
    return text.append(f" {tables.ago(event.happened_ns, now_ns)}")


def rdma(model: Model, now_ns: int) -> Text | None:
    """Queue pairs that are not well, by verdict, and who is suspected; None when all are well."""
    pairs = [pair for pair in model.of(RdmaQueuePair).values() if not pair.closed and not is_silent(pair, now_ns)]
    said = []
    for word in (each for each in WORST_FIRST if each not in (*_WELL, "unknown")):
        found = sorted((pair for pair in pairs if pair.verdict == word), key=lambda pair: -pair.outstanding_bytes)
        if found:
            said.append(Text(f"{len(found)} ").append_text(verdict(found[0])).append(f" ({_pairs(found)})"))
    suspects = model.one(RdmaSuspects)
    if suspects is not None and not is_silent(suspects, now_ns):
        worst = sorted(suspects.suspects, key=lambda each: -each.slowness)
        said.extend(Text(f"slow {each.kind} {each.name}, {units.share(each.slowness)}") for each in worst[:1])
    if not said:
        return None
    well = sum(pair.verdict in _WELL for pair in pairs)
    said += [Text(f"{well} well")] if well else []
    return _line("RDMA: ", said, len(said))


def gpus(model: Model, now_ns: int) -> Text | None:
    """GPUs that are not well, and why; None when all are well."""
    rows = sorted((row for row in model.of(Gpu).values() if not is_silent(row, now_ns)), key=lambda row: row.gpu)
    found = [(row, why) for row in rows if (why := complaints(row))]
    said = [Text(f"GPU {row.gpu} ").append(", ".join(why), style="red") for row, why in found[:_NAMED]]
    return _line("GPUs: ", said, len(found))


def _pairs(pairs: list[RdmaQueuePair]) -> str:
    names = [f"{pair.device} qp {pair.qp_number} {pair.owner.command}".rstrip() for pair in pairs[:2]]
    return ", ".join(names) + (", …" if len(pairs) > len(names) else "")


def _line(start: str, said: list[Text], count: int) -> Text | None:
    """The first of so many things there are to say; None when there is nothing."""
    if not said:
        return None
    shown = said + ([Text(f"and {count - len(said)} more")] if count > len(said) else [])
    line = Text(start, style="bold")
    for index, each in enumerate(shown):
        line.append("; " if index else "", style="not bold").append_text(_plain(each))
    return line


def _plain(text: Text) -> Text:
    return Text(style="not bold").append_text(text)
