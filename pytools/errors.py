"""The exception tree: every error a person may see says what, where, and the next step.

The command line turns each into one line and an exit code; nothing else should reach the user.
"""

from __future__ import annotations


class SwerveError(Exception):
    """Something failed at run time.

    Parameters
    ----------
    what : str
        What failed, and where (one sentence, no trailing full stop).
    next_step : str
        What the reader can do about it; empty when there is nothing to do.
    """

    exit_code = 1

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}; {self.next_step}" if self.next_step else self.what


class UsageError(SwerveError):
    """The command or its configuration does not make sense (exit code 2)."""

    exit_code = 2


class PolicyError(SwerveError):
    """A policy file is invalid (exit code 3)."""

    exit_code = 3


class RefusedError(SwerveError):
    """The request is valid, but a safety guard refuses it (exit code 4)."""

    exit_code = 4


class CapabilityError(SwerveError):
    """A privilege or a kernel feature is missing (exit code 5)."""

    exit_code = 5


def not_permitted(error: OSError, file: object = None) -> CapabilityError:
    """What to tell of a file that this user may not use."""
    where = f"{file}: " if file is not None else ""
    return CapabilityError(f"{where}{error.strerror}", "run as root, or as the user whose it is")
