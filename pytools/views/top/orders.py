"""What a person types to have something done from the live view: the whole order, word for word. Pure.

Nothing is done that was not typed: an order names what it is about, and that has to be the selected row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pytools.errors import UsageError
from pytools.signals import TcpFlow
from pytools.views import tables
from pytools.views.actions import Steering
from pytools.views.top.paths import PathRow

Kind = Literal["drain", "undrain", "pin", "unpin"]
Order = Callable[[Steering], list[str]]


def question(kind: Kind, row: Any) -> str:
    """What has to be typed.

    Raises
    ------
    UsageError
        If this cannot be done with such a row.
    """
    if kind in ("drain", "undrain"):
        if not isinstance(row, PathRow):
            raise UsageError("only an interface can be drained", "select a path: 1")
        lasting = ", and for how long if not for ever, like 1h" if kind == "drain" else ""
        return f"type `{kind} {row.path.interface}`{lasting}"
    if not isinstance(row, TcpFlow):
        raise UsageError("only a connection can be pinned", "select one: 2")
    if row.namespace:
        raise UsageError(f"{row.namespace}: connections of other network namespaces cannot be pinned", "select one: 2")
    ends = f"{tables.endpoint(row.local, row.local_port)}-{tables.endpoint(row.remote, row.remote_port)}"
    return f"{ends}: type `pin INTERFACE 10m`" if kind == "pin" else f"{ends}: type `unpin`"


def order(kind: Kind, row: Any, typed: str) -> Order:
    """What is to be done.

    Raises
    ------
    UsageError
        If anything else was typed than was asked for: then nothing is done.
    """
    asked, words = question(kind, row), typed.split()
    if kind in ("drain", "undrain"):
        interface = row.path.interface
        if words[:2] != [kind, interface] or len(words) > (3 if kind == "drain" else 2):
            raise UsageError("nothing was done", asked)
        if kind == "undrain":
            return lambda steering: steering.undrain(interface)
        lasting = words[2] if len(words) > 2 else ""
        return lambda steering: steering.drain(interface, lasting)
    if words[:1] != [kind] or len(words) != (3 if kind == "pin" else 1):
        raise UsageError("nothing was done", asked)
    if kind == "unpin":
        return lambda steering: steering.unpin(row)
    return lambda steering: steering.pin(row, words[1], words[2])
