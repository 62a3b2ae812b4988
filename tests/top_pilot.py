"""The live view's application without terminal and agent; it draws when a key is pressed or a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from top_kit import NOW_NS, around, lines

from pytools.errors import SwerveError
from pytools.signals import AnySignal, TcpFlow
from pytools.views.actions import Mode
from pytools.views.top.app import Given, Top


class Script:
    """What an agent tells, when the test says so."""

    def __init__(self, signals: Sequence[AnySignal] = ()) -> None:
        self.dropped = 0
        self.wanted: frozenset[str] = frozenset()
        self._waiting = lines(signals)

    def read(self) -> list[bytes]:
        found, self._waiting = self._waiting, []
        return found

    def want(self, types: frozenset[str]) -> None:
        self.wanted = types

    def tell(self, *signals: AnySignal) -> None:
        self._waiting += lines(signals)


class Orders:
    """A stand-in for steering, which notes what it was asked."""

    def __init__(self, mode: Mode | None = None, refusal: SwerveError | None = None) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._mode, self._refusal = mode or Mode(), refusal

    def mode(self) -> Mode:
        return self._mode

    def _take(self, *words: str) -> list[str]:
        if self._refusal is not None:
            raise self._refusal
        self.asked.append(words)
        return [" ".join(words)]

    def drain(self, interface: str, lasting: str) -> list[str]:
        return self._take("drain", interface, lasting)

    def undrain(self, interface: str) -> list[str]:
        return self._take("undrain", interface)

    def pin(self, flow: TcpFlow, interface: str, lasting: str) -> list[str]:
        return self._take("pin", str(flow.local_port), interface, lasting)

    def unpin(self, flow: TcpFlow) -> list[str]:
        return self._take("unpin", str(flow.local_port))


def app(script: Script | None = None, **given: Any) -> Top:
    """An application that draws when a key is pressed, or `tick` is called."""
    made = Top(
        script or Script(),
        Given(clock_ns=lambda: NOW_NS, up_s=lambda: around().up_s, timed=False, **given),
    )
    made.known.take(made._source.read())
    return made


def shown(app: Top) -> list[str]:
    assert app.frame is not None
    return [line.plain.rstrip() for line in app.frame.lines]
