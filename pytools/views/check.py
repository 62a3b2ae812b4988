"""One thing that `doctor` looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pytools.kernel.features import Finding


@dataclass(frozen=True)
class Check:
    """One thing that may be missing."""

    name: str
    essential: bool
    costs: str  # what is lost without it
    mend: str
    find: Callable[[], Finding]
