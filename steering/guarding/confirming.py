"""A run that ends by itself unless somebody confirms it: the journal decides, whoever reads it.

`swerve steer confirm` appends `confirmed`, the guardian appends `expired` at the deadline; the first of the two that
names the run counts, for everybody: appends to one file have one order. Times are CLOCK_BOOTTIME nanoseconds: a suspend
counts.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pytools.errors import RefusedError
from pytools.owned_files import as_owner
from steering import elapsed
from steering.acting import journal
from steering.acting.lock import holder, holder_pidfd
from steering.plan import Group

Verdict = Literal["open", "confirmed", "expired"]
_NO_GROUP: Final = Group("", (), (), ())


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when a run has to be confirmed."""

    run: str
    at_ns: int


def deadline_in(wait_ns: int) -> Deadline | None:
    """The deadline of a run that begins now; None when it needs no confirmation."""
    if wait_ns == 0:
        return None
    return Deadline(f"run-{time.time_ns():x}-{os.getpid()}", elapsed.now_ns() + wait_ns)


def facts(deadline: Deadline | None) -> dict[str, object]:
    """A deadline for whoever finds the instance locked."""
    return {} if deadline is None else {"run": deadline.run, "confirm_by_ns": deadline.at_ns}


def verdict(path: Path, run: str) -> Verdict:
    """What the journal says of a run so far."""
    mark = run.encode()
    try:
        with as_owner(path):
            file = path.open("rb")
        with file:
            lines = [line for line in file if mark in line]
    except FileNotFoundError:
        return "open"
    for entry in map(journal.parse, lines):
        if entry is not None and entry.act_id == run and entry.kind in ("confirmed", "expired"):
            return "confirmed" if entry.kind == "confirmed" else "expired"
    return "open"


def expire(log: journal.Journal, run: str, scope: str, by: str) -> bool:
    """At the deadline: whether the run has to end. What cannot be written does not keep it alive."""
    if verdict(log.path, run) == "open":
        with contextlib.suppress(OSError):
            log.write(entry("expired", run, "nobody confirmed it in time", scope, by), sync=True)
    return verdict(log.path, run) != "confirmed"


def pending(facts: dict[str, Any] | None) -> Deadline | None:
    """The deadline in what the holder of the lock said of itself; None when it has none."""
    run, at_ns = (facts or {}).get("run"), (facts or {}).get("confirm_by_ns")
    return Deadline(run, at_ns) if isinstance(run, str) and isinstance(at_ns, int) else None


def confirm(folder: Path, by: str) -> str:
    """Let the running controller stay; what became of it, in words.

    Raises
    ------
    RefusedError
        If no controller runs, or the deadline has passed.
    OSError
        If it cannot be written; nothing is confirmed then.
    """
    pidfd = holder_pidfd(folder / journal.LOCK_FILE)
    held = holder(folder / journal.LOCK_FILE)
    deadline = pending(held)
    if pidfd is None:
        raise RefusedError("no controller runs: there is nothing to confirm", "see `swerve steer history`")
    with open(pidfd, "rb", buffering=0):
        if deadline is None:
            return "there is nothing to confirm: this controller was started without --confirm"
        file = folder / journal.FILE
        if verdict(file, deadline.run) == "confirmed":
            return "it was confirmed already"
        if elapsed.now_ns() >= deadline.at_ns:
            raise _too_late()
        with journal.Journal(file) as log:
            scope = str((held or {}).get("scope", ""))  # the controller's: this process may be in another namespace
            log.write(entry("confirmed", deadline.run, f"confirmed by {by}", scope, "command"), sync=True)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if verdict(file, deadline.run) != "confirmed":
            raise _too_late()
        if poll.poll(0):
            raise RefusedError("the controller has ended meanwhile", "see `swerve steer history`")
    return "confirmed: the controller goes on"


def _too_late() -> RefusedError:
    return RefusedError("too late: the time to confirm is over, and everything is undone", "start it again")


def entry(kind: Literal["confirmed", "expired"], run: str, because: str, scope: str, by: str) -> journal.Entry:
    """What is written about a deadline."""
    return journal.entry_now(kind, run, _NO_GROUP, (), (), because, "operator", scope, by)
