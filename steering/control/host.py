"""What the operator's desk needs of the controller in which it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steering.acting.background import Later
from steering.acting.flows import FlowActing
from steering.acting.messages import Output
from steering.deciding.engine import Engine
from steering.plan import Change


@dataclass(frozen=True, slots=True)
class Site:
    """What a desk needs of its controller."""

    folder: Path
    later: Later
    engine: Engine
    flows: FlowActing
    apply: bool
    output: Output
    act: Callable[[list[Change]], None]  # carries changes out, or says what would be
    take_back: Callable[[Change, str], str]  # carries out one under this name; why it could not
    stop: Callable[[int], None]
    facts: Callable[[], dict[str, Any]]  # what the controller says of itself in `status`
