"""Note that everything was taken back: our rules are deleted already, and what they had in force is history.

Safe to repeat and to interrupt. For a controller that starts or ends, a guardian, and `swerve steer off`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from steering.acting.journal import Entry, Journal, entry_now
from steering.plan import title


@dataclass(frozen=True, slots=True)
class Undone:
    """A target that has its original weights back."""

    last: Entry  # the act that was in force
    acknowledged_ns: int

    @property
    def text(self) -> str:
        return f"{title(self.last.target)}: original weights are back"


def note(log: Journal, scope: str, by: str, because: str) -> list[Undone]:
    """Note what was in force before our rules were deleted.

    Parameters
    ----------
    scope : str
        This boot and namespace.
    by : str
        Who does it: controller, guardian or command.

    Raises
    ------
    OSError
        If it could not be noted: it was undone all the same.
    """
    found = log.read().in_force(scope).values()
    notes = [
        replace(
            entry_now("undone", last.act_id, last.group, last.after, last.original, because, last.under, scope, by),
            host=last.host,
        )
        for last in found
    ]
    log.write(*notes)
    return [Undone(last, note.at_ns) for last, note in zip(found, notes, strict=True)]
