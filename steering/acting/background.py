"""Writing to disk in a thread of its own, in order: who steers must not wait for a disk that hangs.

Waits are of CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, Self, TypeVar

from pytools.errors import SwerveError

MOST: Final = 10_000  # waiting; more are dropped and counted
_END_S: Final = 1.0  # so long the end of a run waits for what is still to be written


class Later:
    """A queue of writes and the thread that does them."""

    def __init__(self) -> None:
        self.lost = 0  # writes that failed, or that there was no room for
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._failure = ""
        threading.Thread(target=self._run, name="later", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._waiting.get()()

    def put(self, write: Callable[[], object]) -> bool:
        """Have something written; what comes of it `failure` says. False: there is no room, it never will be."""
        if self._waiting.qsize() >= MOST:
            self._failed("the disk does not answer")
            return False
        self._waiting.put(lambda: self._try(write))
        return True

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._failed(error.strerror or str(error))

    def _failed(self, why: str) -> None:
        self.lost += 1
        self._failure = why

    def failure(self) -> str:
        """Why something could not be written since this was last asked; empty when all was."""
        why, self._failure = self._failure, ""
        return why

    def do(self, write: Callable[[], object], timeout_s: float) -> None:
        """Have something written now.

        Raises
        ------
        OSError
            If it could not be; a TimeoutError if it was not within this time: it may be later.
        """
        done, errors = threading.Event(), list[OSError]()

        def try_it() -> None:
            try:
                write()
            except OSError as error:
                errors.append(error)
            done.set()

        self._waiting.put(try_it)
        if not done.wait(timeout_s):
            raise TimeoutError(0, "the disk does not answer")
        if errors:
            raise errors[0]

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was put before is written, but not for longer; whether it is."""
        done = threading.Event()
        self._waiting.put(done.set)
        return done.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(_END_S)


T = TypeVar("T")


class Background(Generic[T]):
    """A call that is being made. It is not waited for when the process ends.

    Parameters
    ----------
    call : callable
        What to do; a SwerveError of it is raised by `result`.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._results: list[T] = []
        self._error: SwerveError = SwerveError("it ended without a result")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except SwerveError as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned, once it is done.

        Raises
        ------
        SwerveError
            If it failed.
        """
        self._thread.join()
        if not self._results:
            raise self._error
        return self._results[0]
