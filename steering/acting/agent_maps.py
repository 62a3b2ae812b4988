"""Borrows the agent's maps for the kernel's part, again and again until there is an agent.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import selectors
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.ipc.map_lending import Loan
from steering.acting import messages
from steering.actuators.agent_paths import AgentPaths

_BORROW_EVERY_NS: Final = 500_000_000


class AgentMaps:
    """Has the kernel's part see the agent's paths while there is an agent.

    Parameters
    ----------
    lender : pathlib.Path
        The socket where the agent lends its maps.
    output : Output
        Takes lines for the log.
    """

    def __init__(self, lender: Path, output: messages.Output) -> None:
        self._lender, self._output = lender, output
        self._selector: selectors.BaseSelector | None = None
        self._loan: Loan | None = None
        self._paths: AgentPaths | None = None
        self._due_ns = self.changes = 0  # changes: how often they came or went

    def register(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def close(self) -> None:
        """Give the agent's maps back; the kernel's part is closed by who opened it."""
        if self._loan is not None:
            self._loan.close()
            self._loan = None

    def turn(self, now: int, paths: AgentPaths) -> None:
        """Borrow them for these paths, if they are not lent."""
        self._paths = paths
        if self._loan is not None or now < self._due_ns or self._selector is None:
            return
        self._due_ns = now + _BORROW_EVERY_NS
        try:
            self._loan = Loan(self._lender, self._selector, self._lent, self._returned)
        except SwerveError:
            return  # no agent: the link to it says so already

    def _lent(self, maps: dict[str, int]) -> None:
        assert self._paths is not None
        try:
            self._paths.lend(maps)
        except (SwerveError, KeyError) as error:
            self._output.say(f"no fast reroute and no hold: the agent's maps cannot be used: {error}")
        self.changes += 1

    def _returned(self) -> None:
        self._loan = None
        if self._paths is not None:
            self._paths.take_back()
        self.changes += 1
