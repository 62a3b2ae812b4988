"""`swerve policy suggest`: thresholds from a recording, as a whole policy, with what it would have done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytools import directories
from pytools.errors import UsageError
from steering.plan import canonical
from steering.policy import file as policy_file
from steering.policy.file import parse
from steering.policy.model import Policy
from steering.replay import suggesting
from steering.replay.player import Tally
from steering.replay.recording import Recording
from steering.replay.suggesting import Proposal, Survey


@dataclass(frozen=True)
class Suggested:
    """A policy, and how it came about."""

    text: str
    facts: dict[str, Any]


def suggested(place: Path, records: Callable[[Policy], Recording], file: Path | None) -> Suggested:
    """A policy with thresholds from a recording.

    Parameters
    ----------
    place : Path
        Where the recording is, for people.
    records : callable
        Opens it, for what a policy needs.
    file : Path, optional
        The present policy.

    Raises
    ------
    SwerveError
        If nothing can be suggested, and why.
    """
    found_file = file or _default()
    present = policy_file.load(found_file, guarded=False) if found_file else suggesting.for_everything()
    survey = Survey(present)
    before = suggesting.play(present, records(present), survey)
    found = suggesting.proposals(present, survey)
    if found_file is None:
        name, text = "a policy that leaves a queue of 10 ms", suggesting.for_addresses(_addresses(survey))
    else:
        name, text = str(found_file), _text(found_file)
    text = suggesting.policy_text(text, parse(text, str(found_file or "")), found)
    new = parse(text, "the suggested policy")
    after = suggesting.play(new, records(new))
    lines = suggesting.comments(str(place), survey, found, name, (before, after))
    facts = {
        "policy": text,
        "thresholds": [_proposal(each) for each in found.values()],
        "present": _played(before) | {"policy": name},
        "suggested": _played(after),
        "healthy_share": survey.calm / survey.all,
    }
    return Suggested("".join(f"# {line}\n" for line in lines) + text, facts)


def _default() -> Path | None:
    file = directories.default_policy()
    return file if file.exists() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "name a policy file") from None


def _addresses(survey: Survey) -> set[str]:
    each = {canonical(path.address) for _, path in survey.counts}
    return {f"{address}/{128 if ':' in address else 32}" for address in each}


def _proposal(each: Proposal) -> dict[str, Any]:
    return {
        "signal": each.subject,
        "usual_p99": each.usual,
        "path": str(each.path),
        "measurements": each.measurements,
        "above": each.text,
        "at_least": each.level.at_least,
        "until_learned": each.level.until_learned,
        "at_most": each.level.at_most,
    }


def _played(played: Tally) -> dict[str, Any]:
    return {
        "acts": played.acts.total(),
        "acts_by_rule": dict(sorted(played.by_rule.items())),
        "alerts": played.alerts,
        "reversals": played.reversals,
        "played_ns": played.played_ns,
    }
