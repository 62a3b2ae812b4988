"""Tables of RDMA: queue pairs with their verdicts, ports with their counters, and who is suspected to be slow.

Pure: a model and the signals that passed the filters in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from pytools import units
from pytools.signals import AnySignal, Bandwidth, RdmaPort, RdmaQueuePair, RdmaSight, RdmaSuspects, RdmaVerdict, Suspect
from pytools.units import duration
from pytools.views import empty_states, tables
from pytools.views.columns import Column, Listing, figure, figures, little, much, named
from pytools.views.filters import Query
from pytools.views.model import KEPT, Model, is_silent
from pytools.views.overview import Overview, Part
from pytools.views.tables import alarm, number

_WINDOW: Final = 8  # messages; of the windows that are kept, the one that neither jumps nor lags
_REASONS: Final = 8
_STYLES: Final[dict[RdmaVerdict, str]] = {
    "dead": "bold red",
    "congested": "red",
    "slow_receiver": "yellow",
    "unknown": "dim",
    "no_demand": "dim",
    "ok": "green",
}
WORST_FIRST: Final[tuple[RdmaVerdict, ...]] = tuple(_STYLES)


def queue_pairs(now_ns: int) -> Listing[RdmaQueuePair]:
    return Listing(
        (
            Column(
                "queue pair", _ends, {"device": named(lambda row: row.device), "qp": little(lambda row: row.qp_number)}
            ),
            tables.owner(spare=2),
            Column("type\nseen by", lambda row: f"{row.qp_type}\n{row.seen_by}", left=True, spare=6),
            figures(
                "posted\ncompleted",
                "{:,}".format,
                {"posted": much(lambda row: row.posted), "completed": much(lambda row: row.completed)},
                spare=4,
            ),
            Column(
                "outstanding",
                lambda row: f"{row.outstanding:,}\n{units.size(row.outstanding_bytes)}",
                {"outstanding": much(lambda row: row.outstanding_bytes)},
                spare=1,
            ),
            Column(
                "bandwidth\nmean",
                _bandwidth,
                {
                    "bandwidth": little(lambda row: None if (found := _of(row)) is None else found.last_bps),
                    "mean": little(lambda row: None if (found := _of(row)) is None else found.mean_bps),
                },
            ),
            figures(
                "latency\np50, p99",
                duration,
                {"p50": much(lambda row: row.latency.p50_ns), "p99": much(lambda row: row.latency.p99_ns)},
                spare=3,
            ),
            Column("errors", _errors, {"errors": much(lambda row: sum(row.errors.values()))}, left=True, spare=5),
            Column(
                "verdict",
                lambda row: _verdict(row, now_ns),
                {"verdict": much(lambda row: len(WORST_FIRST) - WORST_FIRST.index(row.verdict))},
                left=True,
            ),
        ),
        lambda row: (row.closed, WORST_FIRST.index(row.verdict), -row.outstanding_bytes, row.device, row.qp_number),
    )


def ports(_now_ns: int) -> Listing[RdmaPort]:
    """One row per port of a device."""
    return Listing(
        (
            figure("port", "device", str, lambda row: f"{row.device}/{row.port}", order=named),
            figure(
                "interface", "interface", lambda name: name or units.UNKNOWN, lambda row: row.interface, 0, named, True
            ),
            Column("state", _port_state, {"state": much(lambda row: row.state != "active")}, left=True),
            Column("rate", lambda row: row.rate, left=True, spare=2),
            figure("CNP\nreceived", "cnp", number, lambda row: row.cnp_received),
            figure("CNP\nsent", "cnp-sent", number, lambda row: row.cnp_sent, 3),
            figure("ECN\nmarked", "ecn", number, lambda row: row.ecn_marked),
            figure("out of\nsequence", "sequence", alarm, lambda row: row.out_of_sequence),
            figure("time-\nouts", "timeouts", alarm, lambda row: row.timeouts),
            figure("RNR", "rnr", alarm, lambda row: row.receiver_not_ready),
            Column("changed in the window", _changed, left=True, spare=4),
            Column("addresses", lambda row: number(len(row.gids)), spare=5),
        ),
        lambda row: (row.state == "active", row.device, row.port),
    )


def suspects(_now_ns: int) -> Listing[Suspect]:
    """One row per host or link that several queue pairs agree about."""
    return Listing(
        (
            Column("suspect", lambda row: f"{row.kind} {row.name}", {"name": named(lambda row: row.name)}),
            figure("slowness", "slowness", units.share, lambda row: row.slowness),
            Column(
                "queue pairs",
                lambda row: f"{row.agreeing} of {row.queue_pairs}",
                {"agreeing": much(lambda row: row.agreeing)},
            ),
            Column("reason", lambda row: row.reason, left=True, spare=1),
        ),
        lambda row: (-row.slowness, row.kind, row.name),
    )


def overview(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """Queue pairs, then who is suspected, and how RDMA is seen."""
    rows = [each for each in signals if isinstance(each, RdmaQueuePair)]
    listing = queue_pairs(model.at_ns)
    parts: list[RenderableType] = []
    if rows:
        title = f"{model.host}: RDMA queue pairs; bandwidth over {_WINDOW} messages{asked.said()}"
        parts.append(listing.sheet(title, listing.ordered(rows, asked.sort), lambda row: _dim(row, model.at_ns)))
        parts.extend(_reasons(listing.ordered(rows, "verdict")))
    else:
        parts.append(Text(_none(model, asked)))
    if RdmaQueuePair in model.crowded:
        parts.append(
            Text(
                f"more queue pairs than this view remembers ({KEPT[RdmaQueuePair].most:,}): use --pid or --dst",
                style="dim",
            )
        )
    if not asked.filters:
        found = model.one(RdmaSuspects)
        parts.extend([_suspects(model, found.suspects, None)] if found is not None and found.suspects else [])
        parts.extend(_sight(model.one(RdmaSight)))
    return Group(*parts)


def _reasons(rows: Sequence[RdmaQueuePair]) -> list[Text]:
    """Why the worst have their verdict, a line each, and an empty one behind."""
    told = [row for row in rows if row.verdict != "ok" and not row.closed][:_REASONS]
    lines = []
    for row in told:
        why = f": {row.reason}{_path_answers(row)}"
        lines.append(Text(f"{row.device} qp {row.qp_number} ").append_text(verdict(row)).append(why))
        lines += [Text(f"  {line}") for line in _backups(row)]
    return [*lines, Text("")] if lines else []


def _path_answers(row: RdmaQueuePair) -> str:
    if row.path_answers is None:
        return ""
    return f"; its path {row.path} {'answers' if row.path_answers else 'does not answer'} probes"


def _backups(row: RdmaQueuePair) -> list[str]:
    """What could be used instead of a dead queue pair, or why there is nothing."""
    found = [
        f"backup: {each.device}/{each.port} GID {each.gid_index} ({each.gid}) → {each.remote}; "
        f"{each.path} answers probes"
        for each in row.backups
    ]
    return found or ([f"no backup: {row.no_backup}"] if row.no_backup else [])


def suspect_table(model: Model, _signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    found = model.one(RdmaSuspects)
    if found is None or not found.suspects:
        why = empty_states.no_rdma(model)
        return Text(why or f"{model.host}: no host and no link is suspected: no two queue pairs agree that one is slow")
    return _suspects(model, found.suspects, asked.sort)


def _suspects(model: Model, found: Sequence[Suspect], sort: str | None) -> RenderableType:
    listing = suspects(model.at_ns)
    return listing.sheet("slow hosts and links, as several queue pairs agree", listing.ordered(found, sort))


def _none(model: Model, asked: Query) -> str:
    return asked.none_passes(model.host) or empty_states.no_rdma(model) or empty_states.no_queue_pairs(model)


def _sight(sight: RdmaSight | None) -> list[Text]:
    """What the figures above rest on."""
    if sight is None or not sight.available:
        return []
    line = f"seen through the tap in {sight.tap_processes} processes"
    line += f", probes in {', '.join(sight.providers) or 'no provider'} ({sight.hits_per_s:,.0f} hits/s)"
    unseen = [
        f"{process}: {how}" for process, how in sorted(sight.seen.items()) if not how.startswith(("tap", "uprobe"))
    ]
    return [Text(line, style="dim"), *(Text(f"not seen: {each}", style="yellow") for each in unseen)]


def _ends(row: RdmaQueuePair) -> str:
    remote = row.remote or "no address known"
    other = "" if row.remote_qp_number is None else f" qp {row.remote_qp_number}"
    return f"{row.device} qp {row.qp_number}\n  → {remote}{other}"


def _of(row: RdmaQueuePair) -> Bandwidth | None:
    return next((each for each in row.bandwidths if each.messages == _WINDOW), None)


def _bandwidth(row: RdmaQueuePair) -> str:
    found = _of(row)
    if found is None:
        return units.UNKNOWN
    return f"{units.bit_rate(found.last_bps)}\n{units.bit_rate(found.mean_bps)}"


def _errors(row: RdmaQueuePair) -> Text:
    said = [f"{name} {count:,}" for name, count in sorted(row.errors.items(), key=lambda item: -item[1]) if count]
    said += [f"refused {row.refused_posts:,}"] if row.refused_posts else []
    return Text("\n".join(said) or "0", style="red" if said else "")


def verdict(row: RdmaQueuePair) -> Text:
    return Text(row.verdict.replace("_", " "), style=_STYLES[row.verdict])


def _verdict(row: RdmaQueuePair, now_ns: int) -> Text:
    if row.closed:
        return Text("closed", style="dim")
    since = f"\nfor {duration(max(0, row.at_ns - row.since_ns))}"
    return verdict(row).append("?" if is_silent(row, now_ns) else "").append(since, style="dim")


def _dim(row: RdmaQueuePair, now_ns: int) -> str | None:
    return "dim" if row.closed else tables.dim(row, now_ns)


def _port_state(row: RdmaPort) -> Text:
    return Text(row.state, style="green" if row.state == "active" else "red")


def _changed(row: RdmaPort) -> str:
    most = sorted(((count, name) for name, count in row.window.items() if count), reverse=True)
    return "\n".join(f"{name} +{count:,}" for count, name in most[:3]) or "0"


port_table: Final = Overview(
    [Part(RdmaPort, ports, "{host}: RDMA ports, counted since the driver was loaded{asked}")], _none
)
