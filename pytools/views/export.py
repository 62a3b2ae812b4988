"""Signals as JSON Lines for other programs: each line whole, flushed, and a signal of the schema.

Ends quietly when the reader closes the pipe. Single-threaded; the only wait is for the next signal.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterable
from typing import BinaryIO, TextIO

from pytools.bus_client import AgentGoneError, Client
from pytools.signals import AnySignal, encode

_LOT = 1024  # signals written at once
_LOOK_S = 0.5  # how soon a closed pipe is noticed while there is nothing to write


def write(signals: Iterable[AnySignal], out: BinaryIO) -> None:
    """Write one line per signal, and flush once.

    Raises
    ------
    BrokenPipeError
        If the reader is gone.
    """
    lines = [encode(signal) + b"\n" for signal in signals]
    if lines:
        out.write(b"".join(lines))
        out.flush()


def watch(client: Client, out: BinaryIO, notes: TextIO, count: int | None = None) -> int:
    """Write every signal as it comes, until `count` were written or the reader went away.

    Parameters
    ----------
    client : Client
        Where signals come from.
    out : BinaryIO
        Where lines go; nothing but signals is written there.
    notes : TextIO
        Where it is said how many signals the agent had to drop for us.
    count : int, optional
        Stop after so many.

    Returns
    -------
    int
        How many were written.
    """
    written = 0
    tell = missed(client, notes)
    try:
        while count is None or written < count:
            signals = _some(client, None if count is None else count - written)
            write(signals, out)
            written += len(signals)
            tell()
            if not signals and _closed(out):
                break
    except BrokenPipeError:
        _disarm(out)
    finally:
        tell()
    return written


def missed(client: Client, notes: TextIO) -> Callable[[], None]:
    """A function that says how many signals the agent dropped for us, whenever there are more."""
    told = 0

    def tell() -> None:
        nonlocal told
        if client.dropped > told:
            told = client.dropped
            print(f"swerve: {told} signals dropped so far: this reader is too slow", file=notes, flush=True)

    return tell


def _some(client: Client, limit: int | None) -> list[AnySignal]:
    """What is there, waiting a little for the first; at most `limit`."""
    most = _LOT if limit is None else min(limit, _LOT)
    signal = client.next(_LOOK_S)
    signals: list[AnySignal] = []
    with contextlib.suppress(AgentGoneError):  # raised again when there is nothing left to hand on
        while signal is not None:
            signals.append(signal)
            signal = client.next(0) if len(signals) < most else None
    return signals


def _closed(out: BinaryIO) -> bool:
    """Whether the reader of a pipe is gone (files and buffers have none)."""
    try:
        fd = out.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(fd, 0)  # errors are reported without being asked for
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _disarm(out: BinaryIO) -> None:
    """Let the interpreter flush what is left to nowhere when it ends."""
    try:
        fd = out.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
