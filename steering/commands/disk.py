"""Files that cannot be read or written, in one line for the operator instead of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pytools.errors import CapabilityError, SwerveError


@contextlib.contextmanager
def told(place: Path) -> Iterator[None]:
    """Make an OSError about `place`, or a file in it, a SwerveError."""
    try:
        yield
    except PermissionError as error:
        raise CapabilityError(f"{error.filename or place}: {error.strerror}", "run it as root") from None
    except OSError as error:
        raise SwerveError(f"{error.filename or place}: {error.strerror or error}") from None
