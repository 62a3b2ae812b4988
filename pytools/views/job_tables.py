"""The table of jobs. Pure: a model and the signals that passed the filters in, a renderable out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from pytools import units
from pytools.signals import Job, JobPath, JobStep, JobVerdictWord, RasState
from pytools.views import empty_states, tables
from pytools.views.columns import Column, Listing, figure, much, named
from pytools.views.model import Model
from pytools.views.overview import Overview, Part, filters_first
from pytools.views.tables import number

_PATHS: Final = 8  # lines of a job
_LAGGING: Final = 4
_VERDICTS: Final[dict[JobVerdictWord, str]] = {"healthy": "green", "unknown": "dim"}
_STYLES: Final[dict[RasState, str]] = {"ok": "green", "unresponsive": "red", "invalid": "yellow"}


def jobs(_now_ns: int) -> Listing[Job]:
    return Listing(
        (
            Column("job", lambda row: f"{row.job}\n  {_who(row)}", {"job": named(lambda row: row.job)}, left=True),
            figure("from", "source", str, lambda row: row.source, 4, named, True),
            Column("ranks\nhere / all", _ranks, {"ranks": much(lambda row: len(row.ranks))}),
            figure("connec-\ntions", "connections", number, lambda row: sum(each.connections for each in row.paths)),
            figure("queue\npairs", "qps", number, lambda row: sum(each.queue_pairs for each in row.paths), 3),
            figure("sent", "sent", units.bit_rate, lambda row: _rate(row, row.paths, "sent_bytes"), 1),
            figure("received", "received", units.bit_rate, lambda row: _rate(row, row.paths, "received_bytes"), 2),
            Column("sent by path", _paths, left=True, spare=5),
            Column(
                "why slow",
                verdict,
                {"verdict": much(lambda row: row.why.causes[0].share if row.why and row.why.causes else None)},
                left=True,
            ),
            Column("RAS", lambda row: Text(row.ras, style=_STYLES.get(row.ras, "dim")), left=True),
            Column(
                "behind", _behind, {"lag": much(lambda row: row.lagging[0].behind if row.lagging else None)}, left=True
            ),
        ),
        lambda row: (
            -(row.why.causes[0].share if row.why and row.why.causes else 0),
            -(row.lagging[0].behind if row.lagging else 0),
            row.job,
            row.uid,
        ),
    )


def verdict(row: Job) -> Text:
    """The verdict in a word, with the share of a step that its cause explains."""
    if row.why is None:
        return Text(units.UNKNOWN)
    share = f" {units.share(row.why.causes[0].share)}" if row.why.causes else ""
    return Text(f"{row.why.verdict}{share}", style=_VERDICTS.get(row.why.verdict, "red"))


def reasons(row: Job) -> list[Text]:
    """Why the steps of a job take as long as they do, a line for each cause; and what was not measured."""
    if row.why is None:
        return []
    head = Text(f"{row.job}: {_rhythm(row.why.step)}", style="bold")
    lines = [
        Text(f"  {each.kind} explains {units.share(each.share)} ({units.share(each.low)} to {units.share(each.high)})")
        .append(f": {each.reason}")
        for each in row.why.causes
    ]  # fmt: skip
    if not lines:
        lines = [Text(f"  {row.why.verdict}: {row.why.reason}")]
    elif row.why.missing:
        missing = "; ".join(f"{sensor}: {why}" for sensor, why in row.why.missing.items())
        lines.append(Text(f"  not measured: {missing}", style="dim"))
    return [head, *lines]


def _rhythm(step: JobStep | None) -> str:
    if step is None:
        return "steps not seen"
    slower = "" if step.slowdown is None else f", {step.slowdown:.2f} times the usual"
    if step.duration_ns is None:
        return f"{step.steps} connections send {units.bit_rate(step.flow_bps)} each{slower}"
    bound = f" {tables.bound(step.duration_bound_ns)}" if step.duration_bound_ns is not None else ""
    return f"steps of {units.duration(step.duration_ns)}{bound}, {step.operations} collectives each{slower}"


def _who(row: Job) -> str:
    commands = sorted({each.owner.command for each in row.ranks if each.owner.command})
    pods = sorted({each.pod for each in row.ranks if each.pod})
    return ", ".join([f"user {row.uid}", *commands[:2], *pods[:2]])


def _ranks(row: Job) -> str:
    return f"{len(row.ranks)} / {number(row.size)}"


def _rate(row: Job, paths: Sequence[JobPath], what: str) -> float | None:
    return sum(getattr(each, what) for each in paths) * 8e9 / row.window_ns if row.window_ns else None


def _paths(row: Job) -> str:
    lines = [
        f"{tables.place(each.path, each.interface or tables.NO_INTERFACE)}: "
        f"{units.bit_rate(_rate(row, [each], 'sent_bytes'))}"
        for each in row.paths[:_PATHS]
    ]
    more = len(row.paths) - _PATHS
    return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])]) or units.UNKNOWN


def _behind(row: Job) -> Text:
    if row.ras != "ok":
        return Text(units.UNKNOWN)
    lines = [
        (f"rank {each.rank}" if each.rank is not None else f"{each.host} process {each.pid}")
        + f" by {each.behind:,} operations"
        for each in row.lagging[:_LAGGING]
    ]
    return Text("\n".join(lines) or "nobody", style="red" if lines else "")


def _remarks(_model: Model, rows: Sequence[Job]) -> list[Text]:
    """Why each is slow, and what RAS did not say."""
    why = [line for row in rows for line in reasons(row)]
    return [*why, *(Text(f"{row.job}: RAS: {row.ras_reason}", style="dim") for row in rows if row.ras_reason)]


overview: Final = Overview(
    [Part(Job, jobs, "{host}: jobs, over {window}{asked}")], filters_first(empty_states.no_jobs), _remarks
)
