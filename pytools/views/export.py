"""Signals as JSON Lines for other programs: each line whole, flushed, and a signal of the schema.

Ends quietly when the reader closes the pipe. Single-threaded; the only wait is for the next signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable
from typing import BinaryIO, TextIO, TypeVar

from pytools.ipc.client import AgentGoneError, Connection
from pytools.signals import AnySignal, encode

_Told = TypeVar("_Told")
_NOTE_S = 1.0  # between two words about the same
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


def lines(
    lots: Iterable[list[bytes]], out: BinaryIO, count: int | None = None, tell: Callable[[bool], object] = bool
) -> int:
    """Write lines as they come, until there are no more, `count` were written, or the reader went away.

    Parameters
    ----------
    lots : iterable of list of bytes
        Lines without their ends; an empty lot now and then is the occasion to see whether anybody reads.
    out : BinaryIO
        Where lines go; nothing else is written there. Each lot is flushed.
    count : int, optional
        Stop after so many.
    tell : callable
        Called with False after each lot, with True at the end.

    Returns
    -------
    int
        How many were written.
    """
    written = 0
    try:
        for lot in lots:
            some = lot if count is None else lot[: count - written]
            if some:
                out.write(b"\n".join([*some, b""]))
                out.flush()
            written += len(some)
            tell(False)
            if written == count or (not some and _closed(out)):
                break
    except BrokenPipeError:
        _disarm(out)
    finally:
        tell(True)
    return written


def missed(
    client: Connection[_Told], notes: TextIO, clock: Callable[[], float] = time.monotonic
) -> Callable[[bool], None]:
    """A function that says how many signals the agent dropped for us, when there are more: once a second at most.

    Called with True it is the last word, and waits for nothing.
    """
    told, due_s = 0, 0.0

    def tell(last: bool) -> None:
        nonlocal told, due_s
        if client.dropped > told and (last or clock() >= due_s):
            told, due_s = client.dropped, clock() + _NOTE_S
            print(f"swerve: {told} signals dropped so far: this reader is too slow", file=notes, flush=True)

    return tell


def some(client: Connection[_Told]) -> list[_Told]:
    """What an agent has told, waiting a little for the first; possibly nothing.

    Raises
    ------
    AgentGoneError
        If the agent is gone and all that it told was handed on.
    """
    first = client.next(_LOOK_S)
    told = [] if first is None else [first]
    if told:
        with contextlib.suppress(AgentGoneError):  # raised again when there is nothing left to hand on
            told += client.read()
    return told


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
