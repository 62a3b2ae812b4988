"""Whether systemd is about to start a unit again: what an `ExecStopPost=` command has to know."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import Final

_ANSWER_S: Final = 5.0
_RESTARTS: Final = ("restart", "try-restart")
# As in packaging/systemd/swerve-steer.service: with these it is not started again.
_FOR_GOOD: Final = frozenset({"2", "3", "4", "5"})


def expected(unit: str, environment: Mapping[str, str]) -> bool:
    """Whether a unit that has just ended will be started again; False where that cannot be told.

    Parameters
    ----------
    unit : str
        Its name.
    environment : mapping of str to str
        What systemd says of the end: `SERVICE_RESULT`, `EXIT_CODE`, `EXIT_STATUS`.
    """
    result = environment.get("SERVICE_RESULT", "")
    if result == "success":
        return _restart_queued(unit)
    if result in ("", "start-limit-hit"):
        return False
    return not (environment.get("EXIT_CODE") == "exited" and environment.get("EXIT_STATUS") in _FOR_GOOD)


def _restart_queued(unit: str) -> bool:
    """Whether it was stopped for a restart."""
    words = ["systemctl", "list-jobs", "--no-legend", "--plain", "--no-pager", unit]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    jobs = [line.split() for line in done.stdout.splitlines()]
    return any(len(job) >= 3 and job[1] == unit and job[2] in _RESTARTS for job in jobs)
