"""What a person looks at: panel, horizon, order, filter, place of the cursor; and the keys that change it. Pure.

`KEYS` is the one list of keys: the bindings, the help and the page of the documentation are made from it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pytools.errors import UsageError
from pytools.signals import AnySignal
from pytools.views import filters
from pytools.views.filters import FILTERS, Filters, chosen
from pytools.views.top.rings import HORIZONS_S

Panel = Literal["paths", "flows", "links", "rdma", "events", "jobs"]
Page = Literal["list", "detail", "help"]
INTERVALS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Key(NamedTuple):
    keys: str  # as textual names them, with commas between
    action: str
    shown: str
    words: str
    acts: bool = False  # changes something on the host


KEYS: Final = (
    Key("q", "leave", "q", "quit"),
    Key("ctrl+c", "interrupt", "Ctrl-C", "quit, exit code 130"),
    Key("question_mark,h", "help", "? h", "this help"),
    Key("1", "panel('paths')", "1", "paths"),
    Key("2", "panel('flows')", "2", "flows: TCP connections"),
    Key("3", "panel('links')", "3", "links; again: RDMA queue pairs"),
    Key("4", "panel('events')", "4", "events"),
    Key("5", "panel('jobs')", "5", "jobs, and why their steps are slow"),
    Key("enter", "detail", "Enter", "all about this row"),
    Key("escape", "back", "Esc", "back; in a list: no filter"),
    Key("up,k", "move(-1)", "Up k", "one row up"),
    Key("down,j", "move(1)", "Down j", "one row down"),
    Key("pageup", "page(-1)", "PgUp", "one page up"),
    Key("pagedown", "page(1)", "PgDn", "one page down"),
    Key("home,g", "move(-1000000)", "Home g", "first row"),
    Key("end,G", "move(1000000)", "End G", "last row"),
    Key("left", "shift(-1)", "Left", "columns on the left"),
    Key("right", "shift(1)", "Right", "columns on the right"),
    Key("slash", "filter", "/", "filter: a text, or --path X ..."),
    Key("s", "sort(1)", "s", "sort by the next column"),
    Key("S", "sort(-1)", "S", "sort by the column before"),
    Key("r", "reverse", "r", "reverse the order"),
    Key("t", "horizon", "t", "horizon: 2, 10, 40 s"),
    Key("space", "freeze", "Space", "freeze or continue"),
    Key("plus,equals_sign", "interval(1)", "+ =", "longer interval"),
    Key("minus", "interval(-1)", "-", "shorter interval"),
    Key("z", "zero", "z", "zero counters and horizons"),
    Key("d", "order('drain')", "d", "drain the path's interface", acts=True),
    Key("u", "order('undrain')", "u", "undrain it", acts=True),
    Key("p", "order('pin')", "p", "pin the connection", acts=True),
    Key("n", "order('unpin')", "n", "unpin it", acts=True),
)


@dataclass(frozen=True)
class Asked:
    """What passes: a text in the row, or the filters of the other commands."""

    text: str = ""
    filters: Filters = field(default_factory=Filters)

    def __str__(self) -> str:
        return self.text or str(self.filters)

    def __bool__(self) -> bool:
        return bool(self.text or self.filters)

    def passes(self, signals: Iterable[AnySignal], text: str) -> bool:
        """Whether a row passes, by the signals that it stands for and the text that it shows."""
        if self.filters:
            return any(self.filters.passes(signal) for signal in signals)
        return self.text.lower() in text.lower()


def asked(typed: str) -> Asked:
    """What was meant: words like `--path rail1` are filters, anything else is a text.

    Raises
    ------
    UsageError
        If it begins like a filter and is none.
    """
    typed = typed.strip()
    if not typed.startswith("--"):
        return Asked(typed)
    try:
        words = shlex.split(typed)
    except ValueError:
        raise UsageError(f"{typed}: a quotation mark is missing") from None
    given: dict[str, list[str]] = {}
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(rest[::2], rest[1::2], strict=False):
        given.setdefault(chosen(name.removeprefix("--"), FILTERS, "filter"), []).append(value)
    if len(rest) % 2:
        raise UsageError(f"{rest[-1]} has no value", "like --path rail1")
    numbers = {name: [_number(name, value) for value in given.pop(name, [])] for name in ("port", "pid")}
    return Asked(filters=filters.parse(**given, **numbers))


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"--{name} {text}: that is not a number", f"like --{name} 5201")
    return int(text)


@dataclass(frozen=True)
class Look:
    panel: Panel = "paths"
    page: Page = "list"
    horizon_s: int = HORIZONS_S[1]
    every_s: float = 1.0
    sort: str | None = None  # heading of the column; None: the worst first
    reverse: bool = False
    shift: int = 0  # columns gone to the left
    cursor: int = 0
    selected: object = None  # the row under the cursor, whatever its place
    scroll: int = 0  # of pages that are longer than the screen
    asked: Asked = Asked()

    def next_horizon(self) -> int:
        return HORIZONS_S[(HORIZONS_S.index(self.horizon_s) + 1) % len(HORIZONS_S)]

    def other_interval(self, step: int) -> float:
        """The next longer one (1), or shorter (-1)."""
        if step > 0:
            return next((each for each in INTERVALS_S if each > self.every_s), self.every_s)
        return next((each for each in reversed(INTERVALS_S) if each < self.every_s), self.every_s)

    def other_sort(self, columns: list[str], step: int) -> str | None:
        """The next column (1) or the one before (-1); None, the usual order, comes between the last and the first."""
        places: list[str | None] = [None, *columns]
        here = places.index(self.sort) if self.sort in places else 0
        return places[(here + step) % len(places)]
