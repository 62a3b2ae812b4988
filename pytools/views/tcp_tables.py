"""Tables of TCP: causes of retransmission by path and by connection, the host's totals, and packets the kernel dropped.

Pure: a model and the signals that passed the filters in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from pytools import units
from pytools.signals import AnySignal, PacketDrops, Retransmissions, TcpFlow, TcpHost, TcpNamespace, TcpPath
from pytools.units import duration
from pytools.views import tables
from pytools.views.filters import Query
from pytools.views.model import KEPT, Model
from pytools.views.overview import Overview, Part, filters_first
from pytools.views.tcp_columns import CAUSES, flows, namespaces, paths, reasons

_NO_PATH_IS: Final = (
    "connections to addresses that are not probed by this interface: of hosts that are not peers, or other addresses "
    "of a peer than the one in the agent's configuration"
)
# Of the kernel's counters, those that stand beside ours; the others are in the JSON.
_COMPARED: Final = (
    *("TcpRetransSegs", "TcpExtTCPTimeouts", "TcpExtTCPLossProbes", "TcpExtTCPSynRetrans", "TcpExtTCPDSACKRecv"),
    *("TcpExtTCPToZeroWindowAdv", "TcpOutRsts", "TcpEstabResets"),
)


def _remarks(model: Model, shown: Sequence[TcpPath | TcpNamespace | TcpFlow]) -> list[Text]:
    said = []
    if any(row.path is None for row in shown if not isinstance(row, TcpNamespace)):
        said.append(Text(f"{tables.NO_PATH}: {_NO_PATH_IS}", style="dim"))
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
    found = model.one(PacketDrops)
    if found is None:
        return Text(f"{model.host}: nothing is known of packets that the kernel drops (swerve doctor says why)")
    if not found.reasons:
        return Text(f"{found.host}: the kernel has dropped no packet since the agent started")
    rows = [row for each in signals if isinstance(each, PacketDrops) for row in each.reasons]
    if not rows:
        return Text(asked.none_passes(found.host))
    over = f"over {duration(found.window_ns)}{asked.said()}"
    title = f"{found.host}: packets dropped by this kernel, in all its network namespaces, {over}"
    listing = reasons(model.at_ns)
    return listing.sheet(title, listing.ordered(rows, asked.sort))


_FLOWS: Final = Part(
    TcpFlow, flows, "{host}: TCP connections, since each began or the agent started{asked}", dims=False
)
_NOTHING: Final = filters_first("no TCP connection has been reported")
connections: Final = Overview([_FLOWS], _NOTHING, _remarks)
overview: Final = Overview(
    [
        Part(TcpPath, paths, "{host}: TCP by path, over {window}{asked}"),
        Part(
            TcpNamespace,
            namespaces,
            "{host}: TCP of pods and other network namespaces, over their last window{asked}",
            20,
            "and {more} more: --pod selects, -j has all",
        ),
        replace(_FLOWS, most=20, more="and {more} more connections: swerve tcp --flows"),
    ],
    _NOTHING,
    _remarks,
    lambda signals: [_host(each) for each in signals if isinstance(each, TcpHost)],
)
