"""What the relative thresholds of a policy are on each path: as the controller has learnt, else by the recording."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pytools import directories
from pytools.cli_options import Options, recording_of
from pytools.units import duration_text
from steering.acting import memory
from steering.deciding.thresholds import ENOUGH
from steering.deciding.usual import Row, Usuals
from steering.policy.conditions import figures_of, subject, with_threshold
from steering.policy.model import Policy

_LOOKED_AT_NS = 900 * 1_000_000_000  # of a recording


def learnt(options: Options, policy: Policy) -> tuple[str, list[Row]]:
    """Who knows what is usual, in words, and every relative threshold on each path."""
    usuals = Usuals(policy)
    if not usuals.needed:
        return "", []
    instance = directories.instance(options.netns)
    at_ns, entries = memory.read_usual(directories.runtime_dir(options.netns), guarded=False)
    now = time.monotonic_ns()
    if 0 < at_ns <= now:
        usuals.restore(entries, now)
        rows = list(usuals.rows(sorted({entry.key.path for entry in entries})))
        if rows:
            return f"learned by the controller of instance {instance}, {duration_text(now - at_ns)} ago", rows
    rows = _replayed(options, policy)
    if rows:
        return f"from the last {duration_text(_LOOKED_AT_NS)} that the agent of instance {instance} recorded", rows
    return f"nothing learned yet on instance {instance}", []


def _replayed(options: Options, policy: Policy) -> list[Row]:
    from pytools.recording import files
    from pytools.recording.reader import FOR_EVER, Read
    from steering.replay.player import Player
    from steering.replay.recording import Recording, kinds_of

    place = recording_of(options)
    if not place.is_dir():
        return []
    told, player = Read(), Player(policy)
    lines = files.opened(place, told, time.time_ns() - _LOOKED_AT_NS, FOR_EVER)
    for _ in player.play(Recording(lines, told, kinds_of(policy))):
        pass
    return list(player.engine.usual.rows(sorted(player.engine.paths)))


def row_lines(policy: Policy, source: str, rows: list[Row]) -> Iterator[str]:
    """The same in words, one threshold a line."""
    if not source:
        return
    yield f"What is usual on each path, {source}{':' if rows else '.'}"
    kinds = {subject(leaf): figures_of(leaf) for rule in policy.rules for leaf in with_threshold(rule.when)}
    for row in rows:
        clear = kinds[row.subject].text(row.limits.clear_below)
        yield f"   {row.path}: {row.rule}: {row.subject} {row.limits.text}, clear below {clear}"


def row_facts(row: Row) -> dict[str, Any]:
    """One threshold for other programs; figures in nanoseconds or shares, as the policy has them."""
    return {
        "path": str(row.path),
        "rule": row.rule,
        "signal": row.subject,
        "usual": row.learnt.level if row.learnt.known else None,
        "measurements": row.learnt.count,
        "needed": ENOUGH,
        "above": row.limits.above,
        "clear_below": row.limits.clear_below,
    }
