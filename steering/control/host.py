"""What the operator's desk needs of the controller in which it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytools.signals import Act
from steering.acting.background import Later
from steering.deciding.engine import Engine
from steering.plan import Change, FlowKey, LabelChange, Pin


@dataclass(frozen=True, slots=True)
class Site:
    """What a desk needs of its controller."""

    folder: Path
    later: Later
    engine: Engine
    apply: bool
    host: Callable[[], str]
    say: Callable[[str], None]
    send: Callable[[Act], None]
    act: Callable[[list[Change]], None]  # carries changes out, or says what would be
    take_back: Callable[[Change, str], str]  # carries out one under this name; why it could not
    pin: Callable[[Pin], str]  # pins a flow; why it could not
    unpin: Callable[[FlowKey], bool]
    pinned: Callable[[], list[Pin]]
    stop: Callable[[int], None]
    guardian: Callable[[], int | None]
    acts_lost: Callable[[], int]  # acts that could not be kept for the history
    missed: Callable[[], tuple[int, int]] = lambda: (0, 0)  # signals read too slowly for, and urgent ones of them
    guarded: Callable[[], bool] = bool  # whether the guardian would undo us now
    labelled: Callable[[], list[LabelChange]] = list  # connections that have another flow label
    managed: Callable[[], dict[str, Any]] = dict  # what is managed and what is not
    flow_facts: Callable[[], dict[str, Any]] = dict  # what rules about flows left out; stand-bys
