"""One call that takes long, made in a thread of its own while the loop goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pytools.errors import SwerveError

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
        """Whether it has ended."""
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
