"""Tables of TCP: causes of retransmission by path and by connection, the host's totals, and packets the kernel dropped.

Pure: a model and the signals that passed the filters in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from pytools import units
from pytools.signals import AnySignal, PacketDrops, Retransmissions, TcpFlow, TcpHost, TcpNamespace, TcpPath
from pytools.units import duration
from pytools.views import tables
from pytools.views.model import KEPT, Model
from pytools.views.query import Query
from pytools.views.tcp_columns import CAUSES, flows, namespaces, paths, reasons

_SHOWN_FLOWS: Final = 20  # under the paths; --flows shows all
_SHOWN_NAMESPACES: Final = 20
_NO_PATH_IS: Final = (
    "connections to addresses that are not probed by this interface: of hosts that are not peers, or other addresses "
    "of a peer than the one in the agent's configuration"
)
# Of the kernel's counters, those that stand beside ours; the others are in the JSON.
_COMPARED: Final = (
    *("TcpRetransSegs", "TcpExtTCPTimeouts", "TcpExtTCPLossProbes", "TcpExtTCPSynRetrans", "TcpExtTCPDSACKRecv"),
    *("TcpExtTCPToZeroWindowAdv", "TcpOutRsts", "TcpEstabResets"),
)


def overview(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """The host's totals, paths, and the worst connections."""
    by_path = paths(model.at_ns).ordered([each for each in signals if isinstance(each, TcpPath)], asked.sort)
    by_flow = flows(model.at_ns).ordered([each for each in signals if isinstance(each, TcpFlow)], asked.sort)
    parts: list[RenderableType] = [_host(each) for each in signals if isinstance(each, TcpHost)]
    if by_path:
        window = duration(max(row.window_ns for row in by_path))
        title = f"{model.host}: TCP by path, over {window}{asked.said()}"
        parts.append(paths(model.at_ns).sheet(title, by_path, lambda row: tables.dim(row, model.at_ns)))
    by_namespace = namespaces(model.at_ns).ordered(
        [each for each in signals if isinstance(each, TcpNamespace)], asked.sort
    )
    if by_namespace:
        title = f"{model.host}: TCP of pods and other network namespaces, over their last window{asked.said()}"
        listing, shown = namespaces(model.at_ns), by_namespace[:_SHOWN_NAMESPACES]
        parts.append(listing.sheet(title, shown, lambda row: tables.dim(row, model.at_ns)))
        if len(by_namespace) > len(shown):
            parts.append(Text(f"and {len(by_namespace) - len(shown)} more: --pod selects, -j has all", style="dim"))
    if by_flow:
        parts.append(_flow_sheet(model, by_flow[:_SHOWN_FLOWS], asked))
        if len(by_flow) > _SHOWN_FLOWS:
            parts.append(Text(f"and {len(by_flow) - _SHOWN_FLOWS} more connections: swerve tcp --flows", style="dim"))
    return Group(*parts, *_remarks(model, [*by_path, *by_flow[:_SHOWN_FLOWS]], asked))


def connections(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """All connections."""
    rows = flows(model.at_ns).ordered([each for each in signals if isinstance(each, TcpFlow)], asked.sort)
    parts: list[RenderableType] = [_flow_sheet(model, rows, asked)] if rows else []
    return Group(*parts, *_remarks(model, rows, asked))


def _flow_sheet(model: Model, rows: Sequence[TcpFlow], asked: Query) -> RenderableType:
    title = f"{model.host}: TCP connections, since each began or the agent started{asked.said()}"
    return flows(model.at_ns).sheet(title, rows)


def _remarks(model: Model, shown: Sequence[TcpPath | TcpFlow], asked: Query) -> list[Text]:
    said = []
    if any(row.path is None for row in shown):
        said.append(Text(f"{tables.NO_PATH}: {_NO_PATH_IS}", style="dim"))
    if not shown:
        nothing = asked.none_passes(model.host) or f"{model.host}: no TCP connection has been reported"
        said.append(Text(nothing))
    if TcpFlow in model.crowded:
        said.append(
            Text(
                f"more connections than this view remembers ({KEPT[TcpFlow].most:,}): those that retransmitted least "
                "are missing; narrow it down with --dst, --port or --pid",
                style="dim",
            )
        )
    said.extend(Text(f"not attached: {each}", style="red") for each in tables.failed_hooks(model, "tcp", "observe"))
    return said


def _host(host: TcpHost) -> Text:
    line = Text(f"{host.host}: ", style="bold")
    plain = Text(style="not bold")
    plain.append(f"{host.flows:,} TCP connections of at most {host.capacity:,} remembered, {host.created:,} seen")
    plain.append(f", {host.evicted:,} evicted (their counts stay in the totals)" if host.evicted else "")
    plain.append("\nsince the agent started: ")
    plain.append(f"{host.retransmitted_segments:,} segments", style="red" if host.retransmitted_segments else "")
    plain.append(f" retransmitted ({causes(host.retransmitted)}; {units.size(host.retransmitted_bytes)})")
    plain.append(f", {host.spurious_segments:,} of them needlessly")
    plain.append(f"; timeouts {host.timeouts:,}, zero windows {host.zero_windows:,}; resets {host.resets_sent:,} by")
    plain.append(f" connections, {host.resets_refused:,} to strangers, {host.resets_received:,} received")
    counted = ", ".join(f"{name} {host.kernel[name]:,}" for name in _COMPARED if name in host.kernel)
    plain.append(f"\nthe kernel counted meanwhile: {counted or 'none of this'}\n")
    return line.append_text(plain)


def causes(counts: Retransmissions) -> str:
    """What is not zero, in words."""
    said = [f"{heading} {getattr(counts, name):,}" for name, (_, heading) in CAUSES.items() if getattr(counts, name)]
    return ", ".join(said) or "none"


def drops(model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """Packets that this kernel dropped."""
    found = model.one(PacketDrops)
    if found is None:
        return Text(f"{model.host}: nothing is known of packets that the kernel drops (swerve doctor says why)")
    if not found.reasons:
        return Text(f"{found.host}: the kernel has dropped no packet since the agent started")
    title = (
        f"{found.host}: packets dropped by this kernel, in all its network namespaces, over {duration(found.window_ns)}"
    )
    listing = reasons(model.at_ns)
    return listing.sheet(title, listing.ordered(found.reasons, asked.sort))
