"""Tables for people: every figure with its unit and its error, and a dash for what is not known.

Pure: a model in, a renderable out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pytools.figures import supports_one_way
from pytools.signals import AnySignal, ClockState, Owner, Path, ProgramCost, Self
from pytools.units import UNKNOWN, duration, share, size
from pytools.views.columns import Column, Listing, Order, figure, much, named
from pytools.views.filters import Query
from pytools.views.model import Model, is_silent

NO_PATH: Final = "no measured path"
NO_INTERFACE: Final = "interface not known"
# Of a path under a controller, the most urgent first.
STATE_STYLES: Final[dict[str, str]] = {
    "drained": "red",
    "suspect": "yellow",
    "returning": "cyan",
    "unmeasured": "dim",
    "healthy": "green",
}
CLOCK_STYLES: Final[dict[ClockState, str]] = {"synchronised": "green", "holdover": "yellow", "free_running": "red"}


def bound(ns: int | None) -> str:
    return UNKNOWN if ns is None or ns < 0 else f"±{duration(ns)}"


def one_way(ns: int | None, clock: ClockState) -> str:
    """A one-way delay: what free-running clocks measured is no fact, and none is negative."""
    return duration(ns) if supports_one_way(clock) else UNKNOWN


def one_way_bound(ns: int | None, clock: ClockState, of_ns: int | None) -> str:
    """The error of a one-way delay; a dash where that is one."""
    return UNKNOWN if one_way(of_ns, clock) == UNKNOWN else bound(ns)


def offset(ns: int | None) -> str:
    """A difference of two clocks, which may be days: sign and units."""
    if ns is None:
        return UNKNOWN
    sign, size_ns = "-" if ns < 0 else "+", abs(ns)
    if size_ns < 100_000_000_000:
        return sign + duration(size_ns)
    minutes, seconds = divmod(size_ns // 1_000_000_000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{sign}{days}d {hours:02}h {minutes:02}m"
    return f"{sign}{hours}h {minutes:02}m {seconds:02}s" if hours else f"{sign}{minutes}m {seconds:02}s"


def ppm(ppb: float | None) -> str:
    """A rate in parts in a million, given in parts in a billion (nanoseconds per second)."""
    return UNKNOWN if ppb is None else f"{round(ppb) / 1e3:+.3f}"


def clock_state(state: ClockState, silent: bool = False) -> Text:
    """The state of a clock; with a question mark when nobody stands for it any more."""
    return Text(f"{state}?", style="dim") if silent else Text(state, style=CLOCK_STYLES[state])


def number(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def alarm(count: int | None, style: str = "red") -> Text:
    """A count that is trouble unless it is zero."""
    return Text(number(count), style=style if count else "")


def amber(count: int | None) -> Text:
    """A count that may become trouble unless it is zero."""
    return alarm(count, "yellow")


def ago(ns: int, now_ns: int) -> str:
    """How long something is past."""
    return f"{duration(max(0, now_ns - ns))} ago"


def dim(row: AnySignal, now_ns: int) -> str | None:
    """The style of a row that nobody stands for any more."""
    return "dim" if is_silent(row, now_ns) else None


def process(owner: Owner) -> str:
    """Who holds it, and below that the container, or else the service; a dash for nobody known."""
    if not owner.pid and not owner.command and not owner.cgroup:
        return UNKNOWN
    name = f"{owner.command or UNKNOWN} ({owner.pid})" if owner.pid else owner.command or UNKNOWN
    unit = owner.container[:12] or owner.cgroup.rstrip("/").rpartition("/")[2]
    return f"{name}\n  {unit}" if unit else name


def owner(spare: int) -> Column[Any]:
    """The column of a row's process."""
    orders: dict[str, Order[Any]] = {
        "command": named(lambda row: row.owner.command),
        "pid": much(lambda row: row.owner.pid or None),
    }
    return Column("process", lambda row: process(row.owner), orders, left=True, spare=spare)


def way(path: Path, short: bool = False) -> str:
    """A path without its source, which is this host; short: nothing but what tells paths apart."""
    place = f"{path.destination} {path.interface}"
    if short:
        return place + (" v6" if ":" in path.address else "")
    return place + (f" via {path.gateway}" if path.gateway else f" to {path.address}")


def plain(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """A table in the house's style; columns named in `right` are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in set(right) else "left", no_wrap=name != "reason")
    return table


def add_row(table: Table, *cells: str | Text, style: str | None = None) -> None:
    """Add a row whose cells mean what they say: brackets in an address or a reason are no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def failed_hooks(model: Model, *words: str) -> list[str]:
    """Kernel hooks that are not attached and whose name has one of these words, with the reason."""
    own = model.one(Self)
    failed = own.failed if own is not None else {}
    return [f"{name}: {reason}" for name, reason in sorted(failed.items()) if any(word in name for word in words)]


def place(path: Path | None, interface: str) -> str:
    """A path, or where there is none, the interface."""
    return way(path) if path is not None else f"{interface} ({NO_PATH})"


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _per_run(program: ProgramCost) -> float | None:
    return program.run_time_ns / program.runs if program.run_time_ns is not None and program.runs else None


PROGRAMS: Final[Listing[ProgramCost]] = Listing(
    (
        figure("program", "program", str, lambda row: row.name, order=named),
        figure("runs", "runs", str, lambda row: row.runs),
        figure("per run", "per-run", duration, _per_run),
    ),
    lambda _row: 0,  # as the agent lists them
)
COUNTERS: Final[Listing[tuple[str, int]]] = Listing(
    (
        figure("counter", "counter", str, lambda row: row[0], order=named),
        figure("count", "count", alarm, lambda row: row[1]),
    ),
    lambda row: row[0],
)


def cost(model: Model, _signals: Sequence[AnySignal], asked: Query) -> RenderableType:
    """What the agent costs and what it lost; nothing before the agent said so."""
    own = model.one(Self)
    if own is None:
        return Text("the agent has not said yet")
    table = plain(f"{model.host}: the agent", "what", "value", right=("value",))
    add_row(table, "processor", f"{share(own.cpu_share)} of one core over {duration(own.window_ns)}")
    add_row(table, "memory", size(own.resident_bytes))
    add_row(table, "probes on the wire", f"{size(own.probe_bytes_per_s)}/s")
    programs = PROGRAMS.sheet("kernel programs", PROGRAMS.ordered(own.programs, asked.sort))
    drops = COUNTERS.sheet("lost while watching", COUNTERS.ordered(own.drops.items(), asked.sort))
    parts: list[RenderableType] = [table, programs, drops]
    if own.failed:
        failed = plain("hooks that are not attached", "hook", "reason")
        for name, reason in sorted(own.failed.items()):
            add_row(failed, name, Text(reason, style="red"))
        parts.append(failed)
    return Group(*parts)
