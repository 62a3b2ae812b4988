"""The live view: an application on a terminal, a plain report elsewhere. This is its edge: streams, signals, the end.

On any way out the terminal is as it was: `q`, a signal, an exception, an agent that is gone.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pytools.ipc.client import LineClient
from pytools.views.actions import Steering
from pytools.views.top import plain
from pytools.views.top.feed import types_of
from pytools.views.top.glyphs import of_locale
from pytools.views.top.header import Given


def is_terminal() -> bool:
    """Whether there is somebody to show to, who can press keys."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def run(
    socket: Path,
    count: int | None,
    every_s: float | None,
    color: bool,
    *,
    steering: Steering | None = None,
    allow_actions: bool = False,
    child: bool = False,
) -> int:
    """Show an agent until `count` frames, q, or a signal; the exit code.

    Parameters
    ----------
    socket : Path
        The agent's.
    count : int, optional
        Frames; None: without end, or where there is no terminal and no interval either, one.
    steering : Steering, optional
        Who can be asked who steers, and with `allow_actions` to do something.
    child : bool
        The agent is our own.

    Raises
    ------
    SwerveError
        If there is no agent, or it went.
    """
    given = Given(count, every_s or 1.0, color, of_locale(), allow_actions, steering, child)
    if not is_terminal():
        once = 1 if count is None and every_s is None else count
        with LineClient(socket, types_of("paths"), coarse=True) as feed:
            plain.run(feed, replace(given, count=once))
        return 0
    # Nothing until the application reads: it takes half a second to load.
    with LineClient(socket, frozenset(), coarse=True) as feed:
        return _live(feed, given)


def _live(feed: LineClient, given: Given) -> int:
    from pytools.views.top import terminal
    from pytools.views.top.app import Top

    app = Top(feed, replace(given, is_gone=terminal.is_gone), terminal.Terminal)
    gc.freeze()  # what was loaded stays; and of what comes little is in cycles
    gc.set_threshold(20_000, 20, 50)
    with _ended_by_signal(), terminal.given_back():
        app.run(mouse=False)
    if app.failure is not None:
        raise app.failure
    if app.return_code == 130:
        raise KeyboardInterrupt
    return app.return_code or 0


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Turn SIGTERM, SIGHUP and SIGQUIT into an exception while no application runs that takes them: all is put back."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
