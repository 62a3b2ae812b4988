"""What commands have in common: options that all share, filters of tables, and commands that are imported when used."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from pytools.ipc.bus import Client

_DEFAULT_INTERVAL_S: Final = 1.0
_NAME_MAX: Final = 80  # bytes; the path of a socket has room for 107


@dataclass(frozen=True)
class Options:
    """What every command understands."""

    json: bool = False
    interval_s: float | None = None
    count: int | None = None
    netns: str | None = None
    config: Path | None = None
    color: bool = True

    @property
    def frames(self) -> int | None:
        """How many times to show: once, unless an interval or a count was given; None without end."""
        if self.count is not None:
            return self.count
        return 1 if self.interval_s is None else None

    @property
    def every_s(self) -> float:
        """The interval, given or not."""
        return _DEFAULT_INTERVAL_S if self.interval_s is None else self.interval_s


def finite(_context: click.Context, _option: click.Parameter, seconds: float | None) -> float | None:
    """A time that ends: a range alone takes nan, which is outside of none."""
    if seconds is not None and not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is not a number of seconds")
    return seconds


def _instance(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """The name of a network namespace, which is one of a directory, too."""
    if name is not None and (
        name in (".", "..") or "/" in name or not name.isprintable() or not 1 <= len(name.encode()) <= _NAME_MAX
    ):
        raise click.BadParameter(f"{name!r} is not the name of a network namespace; `ip netns` lists them")
    return name


NETNS: Final = click.option(
    "-n", "--netns", metavar="NAME", callback=_instance, help="Select the instance of network namespace NAME."
)


def common(follows: bool = True, without: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that all commands share, as one argument `options`.

    Parameters
    ----------
    follows : bool
        Whether the command can go on showing (`--interval`, `--count`).
    without : str
        The one that this command has no use for: `json` or `interval`.
    """
    listed = {
        "json": click.option("-j", "--json", is_flag=True, help="Print JSON, one object per line."),
        "interval": click.option(
            "-i",
            "--interval",
            type=click.FloatRange(min=0.05),
            callback=finite,
            metavar="SECONDS",
            help="Repeat every SECONDS until interrupted.",
        ),
        "count": click.option(
            "-c", "--count", type=click.IntRange(min=1), metavar="N", help="Stop after N tables or lines."
        ),
        "netns": NETNS,
        "config": click.option(
            "--config",
            metavar="FILE",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Read the agent's configuration from FILE.",
        ),
        "no_color": click.option("--no-color", is_flag=True, help="Disable colour (also: environment NO_COLOR)."),
    }
    for name in (without, *(() if follows else ("interval", "count"))):
        listed.pop(name, None)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_options(
            *,
            netns: str | None,
            config: Path | None,
            no_color: bool,
            json: bool = False,
            interval: float | None = None,
            count: int | None = None,
            **rest: Any,
        ) -> Any:
            color = not (no_color or os.environ.get("NO_COLOR"))
            return function(Options(json, interval, count, netns, config, color), **rest)

        for option in reversed(listed.values()):
            with_options = option(with_options)
        return with_options

    return decorate


def report_every(least_s: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--interval` of a command that reports until it ends."""
    kind, text = click.FloatRange(min=least_s), "Report every SECONDS (default: 5)."
    return click.option("-i", "--interval", type=kind, callback=finite, default=5.0, metavar="SECONDS", help=text)


SINCE: Final = click.option(
    "--since", metavar="TIME", help="Start at TIME: 03:10, '2026-11-20 03:10', or 15m for 15 minutes ago."
)
UNTIL: Final = click.option("--until", metavar="TIME", help="End at TIME; same formats as --since.")


def recording_of(options: Options) -> Path:
    """Where the flight recorder of an instance writes.

    Raises
    ------
    UsageError
        If the agent's configuration is there and wrong.
    RefusedError
        If somebody else could have written it.
    """
    from pytools import config, directories

    file = options.config or directories.default_config(options.netns)
    directory = config.load(file).recording.directory if options.config or file.exists() else ""
    return directories.recording(directory, options.netns)


def client_of(options: Options, types: frozenset[str] | None) -> Client:
    """A connection to the agent of an instance, for signals of these types."""
    from pytools import directories
    from pytools.ipc.client import Client

    return Client(directories.agent_socket(options.netns), types)


class LazyCommand(click.Command):
    """A command that lives in another module, which is imported when the command is used."""

    def __init__(self, name: str, module: str, attribute: str, help: str) -> None:
        super().__init__(name, help=help)
        self._module, self._attribute = module, attribute

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Let the real command parse its arguments; it is then the one that runs."""
        command: click.Command = getattr(importlib.import_module(self._module), self._attribute)
        return command.make_context(info_name, args, parent, **extra)


@dataclass(frozen=True)
class Asked:
    """Filters and order, as they were typed."""

    sort: str | None = None
    filters: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # name of the option -> its values


_FILTERS: Final[Mapping[str, tuple[str, type, str]]] = {
    "dst": ("PREFIX", str, "Select destinations in PREFIX, like 10.9.0.0/16."),
    "src": ("PREFIX", str, "Select local addresses in PREFIX."),
    "port": ("N", int, "Select connections with port N at either end."),
    "pid": ("N", int, "Select connections, queue pairs, jobs and GPUs of process N."),
    "command": ("TEXT", str, "Select processes with TEXT in their name."),
    "pod": ("TEXT", str, "Select pods and other network namespaces with TEXT in their name."),
    "interface": ("NAME", str, "Select interface NAME (or RDMA device NAME)."),
    "path": ("TEXT", str, "Select paths that contain TEXT: a host, an interface, a gateway."),
    "verdict": ("WORD", str, "Select queue pairs with verdict WORD."),
    "job": ("TEXT", str, "Select jobs with TEXT in their name."),
    "host": ("TEXT", str, "Select clocks of hosts with TEXT in their name."),
    "gpu": ("ID", str, "Select the GPU with this index, or GPUs whose UUID begins with ID."),
    "reason": ("TEXT", str, "Select packets dropped for a reason with TEXT in its name."),
}
EVERY_FILTER: Final = tuple(_FILTERS)


def filtered(*names: str, sort: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these filters and `--sort`, as one argument `asked`; each filter may be given several times."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_filters(*arguments: Any, sort: str | None = None, **rest: Any) -> Any:
            filters = {name: rest.pop(f"filter_{name}") for name in names}
            return function(*arguments, asked=Asked(sort, filters), **rest)

        wrapped: Callable[..., Any] = with_filters
        for name in reversed(names):
            metavar, kind, text = _FILTERS[name]
            option = click.option(f"--{name}", f"filter_{name}", metavar=metavar, type=kind, multiple=True, help=text)
            wrapped = option(wrapped)
        column = click.option("--sort", metavar="COLUMN", help="Sort by COLUMN, the worst first; names from a to z.")
        return column(wrapped) if sort else wrapped

    return decorate
