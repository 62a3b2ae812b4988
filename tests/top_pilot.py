"""The live view's application without terminal and agent; it draws when a key is pressed or a test says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import support
from textual.strip import Strip
from top_kit import NOW_NS, around, lines

from pytools.errors import SwerveError
from pytools.signals import AnySignal, TcpFlow
from pytools.views.actions import Mode
from pytools.views.top.app import Top
from pytools.views.top.header import Given


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
    source = script or Script()
    made = Top(
        source,
        Given(clock_ns=lambda: NOW_NS, up_s=lambda: around().up_s, timed=False, **given),
    )
    made.known.take(source.read())
    return made


@contextlib.contextmanager
def without_looking_at_the_clock(app: Top) -> Iterator[None]:
    """After a key wait until all that it led to has been handled.

    Textual's pilot waits until the process has used little processor time for 20 ms, twice a key: long where nothing is
    to be done, and too short where the processor is somebody else's.
    """

    async def idle(*_: float) -> None:
        await handled(app)

    with mock.patch("textual.app.wait_for_idle", idle), mock.patch("textual.pilot.wait_for_idle", idle):
        yield


async def handled(app: Top) -> None:
    """Return once no message waits anywhere: twice in a row, for the last one may have been the cause of another."""
    loop, quiet = asyncio.get_running_loop(), 0

    async def sent_before() -> None:
        """Keys are sent from what may be another thread, in this order."""

    while quiet < 2 and app.is_running:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sent_before(), loop))
        pumps = [app, *(app.screen.walk_children(with_self=True) if app.screen_stack else ())]
        reached = [asyncio.Event() for _ in pumps]
        waiting = [event.wait() for pump, event in zip(pumps, reached, strict=True) if pump.call_later(event.set)]
        ended = asyncio.create_task(app._exception_event.wait())
        all_reached = asyncio.gather(*waiting)
        await asyncio.wait([all_reached, ended], timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            all_reached.cancel()
            return
        ended.cancel()
        quiet = 0 if any(pump.message_queue_size for pump in pumps) else quiet + 1


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Let the application go on until this holds: what a timer or another thread does is not waited for otherwise."""
    end = time.monotonic() + deadline_s * support.slow_factor()
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)


def strips(app: Top) -> list[Strip]:
    """The lines of the screen as Textual puts them out: it has no public name for that."""
    return list(app.screen._compositor.render_strips())


def shown(app: Top) -> list[str]:
    assert app.frame is not None
    return [line.plain.rstrip() for line in app.frame.lines]
