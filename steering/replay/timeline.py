"""What a replay says: a timeline as text or as signals, and a summary that says what it cannot know. Pure."""

from __future__ import annotations

import json
from typing import Any

from pytools.signals import Act, PathState, encode
from pytools.units import duration_text
from steering.cli_types import act_line, clock
from steering.plan import title
from steering.replay.player import Event, Note, Player, Tally
from steering.replay.recording import Counts, Recording

UNKNOWABLE = (
    "no traffic moved: congestion that an act would have ended stays in the recording, and what the act would have "
    "caused elsewhere is not in it, so what comes after the first act is less sure the longer it lasts"
)


def text_of(event: Event) -> str:
    if isinstance(event, Note):
        return f"{clock(event.unix_ns)} note: {event.text}"
    if isinstance(event, Act):
        return act_line(event)
    under = f" [{event.under}]" if event.under else ""
    return f"{clock(event.unix_ns)} {event.path}: {event.state} because {event.reason}{under}"


def json_of(event: Event) -> str:
    """An event as a signal; a note as an object of its own."""
    if isinstance(event, Note):
        return json.dumps({"type": "replay_note", "unix_ns": event.unix_ns, "text": event.text}, ensure_ascii=False)
    return encode(event).decode()


def changes_something(event: Event) -> bool:
    """Whether an event is more than a change of opinion."""
    return not isinstance(event, PathState)


def summary(recording: Recording, player: Player) -> dict[str, Any]:
    """What a replay came to, for other programs."""
    counts, tally = recording.counts, player.tally
    return {
        "type": "replay_summary",
        "host": recording.host,
        "records": counts.lines,
        "used": counts.used,
        "not_needed": counts.not_needed,
        "broken": counts.broken,
        "first_broken_line": counts.first_broken,
        "why_broken": counts.why_broken,
        "other_hosts": counts.other_hosts,
        "schemas": sorted(counts.schemas),
        "undigested": tally.undigested,
        "refused_signals": player.engine.evidence.refused,
        "restarts": tally.restarts,
        "began_unix_ns": tally.began_unix_ns,
        "ended_unix_ns": tally.ended_unix_ns,
        "played_ns": tally.played_ns,
        "acts": tally.acts.total(),
        "acts_by_target": tally.acts,
        "alerts": tally.alerts,
        "notified": tally.notified,
        "reversals": tally.reversals,
        "in_state_ns": {str(path): times for path, times in sorted(tally.in_state_ns.items())},
        "targets": {target: list(group.named(group.original)) for target, group in player.kernel.groups.items()},
        "unmanaged": sorted(player.kernel.unmanaged),
        "left_out": player.kernel.left_out,
        "acts_while_recorded": tally.lived_acts,
        "reweighted_while_recorded": player.kernel.reweighted,
        "not_replayed": player.besides.missing(),
        "unknowable": UNKNOWABLE,
    }


def summary_lines(recording: Recording, player: Player) -> list[str]:
    counts, tally = recording.counts, player.tally
    lines = [
        f"{counts.used} of {counts.lines} records of {recording.host or 'no host'} "
        f"over {duration_text(tally.played_ns)}: "
        f"{tally.acts.total()} acts, {tally.alerts} alerts, {tally.reversals} reversals"
        + (f", {tally.notified} calls of hooks" if tally.notified else "")
    ]
    lines += [f"{title(target)}: {number} acts" for target, number in sorted(tally.acts.items())]
    for path, times in sorted(tally.in_state_ns.items()):
        listed = ", ".join(f"{state} {duration_text(ns)}" for state, ns in sorted(times.items()) if ns)
        lines.append(f"{path}: {listed or 'seen once'}")
    return lines + [f"note: {text}" for text in _notes(counts, tally, player)]


def _notes(counts: Counts, tally: Tally, player: Player) -> list[str]:
    notes = []
    if counts.broken:
        which = f"line {counts.first_broken} is the first: " if counts.first_broken else ""
        why = which + counts.why_broken
        notes.append(f"{counts.broken} lines are not signals and were skipped ({why})")
    if counts.other_hosts:
        listed = ", ".join(f"{name or 'no name'} {number}" for name, number in sorted(counts.other_hosts.items()))
        notes.append(f"records of other hosts were left out ({listed}): choose one with --host")
    if tally.undigested:
        notes.append(f"{tally.undigested} records hold numbers that no measurement can have")
    if player.kernel.unmanaged:
        notes.append(f"the policy does not manage {', '.join(sorted(player.kernel.unmanaged)[:5])}")
    if not player.kernel.groups:
        notes.append("no path that the policy manages is in it: record with `swerve watch`, all types")
    elif any(target.startswith("recorded:") for target in player.kernel.groups):
        notes.append("where no nexthop group is recorded, all paths to one address stand for one, each with weight 1")
    if player.kernel.left_out:
        notes.append(f"{player.kernel.left_out} paths and members were too many, and were left out")
    if tally.lived_acts or player.kernel.reweighted:
        notes.append(
            "weights were changed while this was recorded: what was measured then is what those weights led to"
        )
    return [*notes, *player.besides.missing(), UNKNOWABLE]
