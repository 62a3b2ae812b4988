"""Orders from the live view: nothing is done that was not typed in full, about the row that is selected."""

from __future__ import annotations

from typing import Any

import pytest
import samples
from top_kit import NOW_NS, known, story

from pytools.errors import UsageError
from pytools.signals import TcpFlow
from pytools.views.actions import Mode
from pytools.views.top import orders, paths
from pytools.views.top.glyphs import UNICODE


class Noted:
    """A stand-in for steering."""

    def mode(self) -> Mode:
        return Mode()

    def drain(self, interface: str, lasting: str) -> list[str]:
        return [f"drain {interface} {lasting}"]

    def undrain(self, interface: str) -> list[str]:
        return [f"undrain {interface}"]

    def pin(self, flow: TcpFlow, interface: str, lasting: str) -> list[str]:
        return [f"pin {flow.local_port} {interface} {lasting}"]

    def unpin(self, flow: TcpFlow) -> list[str]:
        return [f"unpin {flow.local_port}"]


FLOW = samples.tcp_flow()


def path_row() -> Any:
    return paths.rows(known(*story()), NOW_NS, 10, UNICODE).ordered(None, False)[0]


@pytest.mark.parametrize(
    ("kind", "typed", "done"),
    [
        ("drain", "drain rail1", "drain rail1 "),
        ("drain", "  drain   rail1  1h ", "drain rail1 1h"),
        ("undrain", "undrain rail1", "undrain rail1"),
        ("pin", "pin rail2 10m", "pin 40000 rail2 10m"),
        ("unpin", "unpin", "unpin 40000"),
    ],
)
def test_what_was_typed_in_full_is_asked_for(kind: orders.Kind, typed: str, done: str) -> None:
    row = path_row() if "drain" in kind else FLOW
    assert orders.order(kind, row, typed)(Noted()) == [done]


@pytest.mark.parametrize(
    ("kind", "typed"),
    [
        *(
            ("drain", typed)
            for typed in ("", "y", "yes", "rail1", "drain", "drain rail2", "drain rail1 1h now", "DRAIN rail1")
        ),
        *(("undrain", typed) for typed in ("", "drain rail1", "undrain rail2", "undrain rail1 1h")),
        *(("pin", typed) for typed in ("", "pin", "pin rail2", "pin rail2 10m now", "rail2 10m")),
        *(("unpin", typed) for typed in ("", "y", "unpin rail2")),
    ],
)
def test_anything_else_does_nothing_and_says_what_to_type(kind: orders.Kind, typed: str) -> None:
    with pytest.raises(UsageError, match=r"nothing was done; .*type"):
        orders.order(kind, path_row() if "drain" in kind else FLOW, typed)


@pytest.mark.parametrize(("kind", "row"), [("drain", FLOW), ("undrain", None), ("pin", None), ("unpin", "event")])
def test_what_cannot_be_done_with_a_row_is_said(kind: orders.Kind, row: Any) -> None:
    with pytest.raises(UsageError, match="select"):
        orders.question(kind, row)
