"""What the commands about steering have in common: durations and flows as typed, times and acts as shown."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from pytools.errors import CapabilityError, SwerveError
from pytools.signals import Act
from pytools.units import parse_duration
from steering.plan import FlowKey, canonical

_PROTOCOLS: Final = {"tcp": 6, "udp": 17}


class Duration(click.ParamType[int]):
    """A duration such as 90s or 10m, in nanoseconds."""

    name = "duration"

    def __init__(self, least_ns: int = 1, most_ns: int = 1 << 53) -> None:
        self._least_ns, self._most_ns = least_ns, most_ns

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            found = parse_duration(value)
        except ValueError:
            self.fail(f"{value} is not a duration: like 90s, 10m, 1h", param, ctx)
        if not self._least_ns <= found <= self._most_ns:
            self.fail(f"{value} is too {'short' if found < self._least_ns else 'long'}", param, ctx)
        return found


class Flow(click.ParamType[FlowKey]):
    """A flow such as tcp:10.9.0.1:40000-10.9.0.2:5201, as this host sees it; IPv6 in brackets."""

    name = "flow"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> FlowKey:
        if isinstance(value, FlowKey):
            return value
        head, colon, rest = str(value).partition(":")
        protocol = _PROTOCOLS.get(head.lower())
        try:
            local, remote = (_end(text) for text in (rest if colon and protocol else str(value)).split("-"))
        except ValueError:
            self.fail(f"{value} is not a flow: like tcp:10.9.0.1:40000-10.9.0.2:5201", param, ctx)
        return FlowKey(protocol or _PROTOCOLS["tcp"], *local, *remote)


def _end(text: str) -> tuple[str, int]:
    address, _, port = text.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    ipaddress.ip_address(address)
    if not 0 < int(port) < 65_536:
        raise ValueError(port)
    return canonical(address), int(port)


def flow_text(flow: FlowKey) -> str:
    """A flow as it is typed."""
    name = next((word for word, number in _PROTOCOLS.items() if number == flow.protocol), str(flow.protocol))
    ends = [
        f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        for address, port in ((flow.local, flow.local_port), (flow.remote, flow.remote_port))
    ]
    return f"{name}:{'-'.join(ends)}"


def clock(unix_ns: int) -> str:
    """A time for people."""
    try:
        return datetime.datetime.fromtimestamp(unix_ns / 1e9).astimezone().isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):  # a record may say anything
        return f"{unix_ns} ns"


def act_line(act: Act) -> str:
    """An act on one line."""
    moved = ", ".join(f"{name} {act.before.get(name, 0)}→{weight}" for name, weight in act.after.items())
    under = f" [{act.under}]" if act.under else ""
    return f"{clock(act.unix_ns)} {act.outcome} {act.what}: {moved + ' ' if moved else ''}because {act.because}{under}"


def weights_text(weights: dict[Any, int]) -> str:
    """Weights by nexthop."""
    return ", ".join(f"{nexthop} weight {weight}" for nexthop, weight in weights.items()) or "gone"


def who() -> str:
    """Who types, for the history."""
    user = os.environ.get("SUDO_USER", "")
    return f"user {os.getuid()}" + (f" ({user})" if user.isprintable() and user else "")


@contextlib.contextmanager
def file_errors(place: Path) -> Iterator[None]:
    """Make an OSError about `place`, or a file in it, a SwerveError."""
    try:
        yield
    except PermissionError as error:
        raise CapabilityError(f"{error.filename or place}: {error.strerror}", "run it as root") from None
    except OSError as error:
        raise SwerveError(f"{error.filename or place}: {error.strerror or error}") from None
