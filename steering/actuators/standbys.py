"""Stand-bys: where the kernel sends packets by itself while the path that they are routed along is silent.

steer.c looks at the agent's own table of paths (agent_paths.py): without it, without a lease that we renew, and while
no path is silent, every packet follows the routing table. Nothing outlives this process but, before TCX, a filter
whose lease has ended. Times are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace whose interfaces are hooked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pytools.signals import Path
from steering.actuators.agent_paths import AgentPaths, Prefix, PrefixTable, Rows, prefix_key
from steering.actuators.flow_table import FlowTable
from steering.actuators.pins import Pins
from steering.plan import StandBy, Target

_Name = tuple[Path, Target]
_Content = tuple[int, int, int, int, int]  # the fields of a row that we write


@dataclass(frozen=True, slots=True)
class Moved:
    """What a stand-by has taken over so far."""

    standby: StandBy
    packets: int  # segments, not buffers
    bytes: int  # the same, each segment with its headers
    first_ns: int  # of the present or last move; 0: none yet
    last_ns: int
    since_ns: int  # when the first probe left that has no answer; 0: the path answers, and its packets are on hold
    lasted_ns: int = 0  # the silence that the latest answer ended; 0: it is not over, or nothing is known of it
    waited_ns: int = 0  # how long that answer took

    @property
    def was_queue(self) -> bool:
        """Whether most of the silence was the way of one probe: it was late, and not lost."""
        return 2 * self.waited_ns > self.lasted_ns


class StandBys:
    """The stand-bys of one namespace.

    Parameters
    ----------
    table : FlowTable
        The kernel's tables; stays the caller's.
    pins : Pins
        Knows the members that packets can be sent to, and whether they are alive; stays the caller's.
    paths : AgentPaths
        The agent's paths; stays the caller's.
    """

    def __init__(self, table: FlowTable, pins: Pins, paths: AgentPaths) -> None:
        self._table, self._pins, self.paths = table, pins, paths
        self._held: dict[_Name, tuple[StandBy, int, _Content]] = {}
        self._free = deque(range(len(table.standbys)))  # the row that was used last comes last
        self._prefixes = PrefixTable(table.prefixes)
        self._armed: list[tuple[StandBy, _Content | str]] = []  # what was asked for last
        self._refused: dict[Path, str] = {}

    def close(self) -> None:
        """Disarm all stand-bys: every packet follows the routing table."""
        self._table.settings["standby_until_ns"] = 0

    # ---- arming ----

    def arm(self, wanted: Iterable[StandBy]) -> dict[Path, str]:
        """Have these stand-bys and no others.

        Returns
        -------
        dict of Path to str
            Those that cannot be had now, and why.

        Raises
        ------
        SwerveError
            If the kernel refuses.
        """
        rows = self.paths.rows()
        contents = [(each, self._content(each, rows)) for each in wanted]
        if contents == self._armed:  # mostly it is so
            return self._refused
        refused: dict[Path, str] = {}
        held: dict[_Name, tuple[StandBy, int, _Content]] = {}
        prefixes: dict[Prefix, int] = {}
        given_up = []
        for each, content in contents:
            name = each.path, each.target
            if isinstance(content, str):
                refused[each.path] = content
                continue
            before = self._held.pop(name, None)
            if before is not None and before[2] == content:
                row = before[1]
            else:
                if before is not None:
                    given_up.append(before[1])
                if not self._free:
                    refused[each.path] = f"there is room for {len(self._table.standbys)} stand-bys"
                    continue
                row = self._free.popleft()
                self._fill(row, content)
            held[name] = each, row, content
            path = rows.get(each.path)
            assert path is not None
            for prefix in each.prefixes:
                prefixes.setdefault(prefix_key(prefix, path.ifindex), row)
        given_up += [row for _, row, _ in self._held.values()]
        shown = self._prefixes.show(prefixes)
        self._held, self._refused = held, refused
        self._armed = contents if shown else []  # then all is written again
        self._free.extend(given_up)
        return refused

    def alive(self, armed: StandBy) -> bool:
        """Whether a packet that is sent to its nexthop would leave."""
        return self._pins.alive(armed.target, armed.nexthop_id)

    def _content(self, wanted: StandBy, rows: Rows) -> _Content | str:
        """What the kernel has to know of a stand-by; or why it cannot be had."""
        path, other = rows.get(wanted.path), rows.get(wanted.other)
        target = self._pins.row(wanted.target, wanted.nexthop_id)
        if path is None or other is None:
            missing = wanted.path if path is None else wanted.other
            return f"the agent does not probe {missing}" if self.paths.lent else "the agent has lent no maps"
        if target is None:
            return f"nothing can be sent to nexthop {wanted.nexthop_id}"
        return path.number, other.number, path.generation, other.generation, target

    def _fill(self, row: int, content: _Content) -> None:
        record = self._table.standbys[row : row + 1]
        record[:] = 0
        for name, value in zip(("path", "other", "generation", "other_generation", "target"), content, strict=True):
            record[name] = value

    # ---- the lease, and what came of it ----

    def renew(self, until_ns: int, hold_ns: int) -> None:
        """Let all stand-bys hold until this moment; packets stay on one for so long after their path answers again."""
        self._table.settings["hold_ns"] = hold_ns
        self._table.settings["standby_until_ns"] = until_ns if self._held else 0

    def moved(self) -> list[Moved]:
        """Every stand-by that has taken packets over since it was armed."""
        if not self._held:
            return []
        used = set(np.flatnonzero(self._table.standbys["packets"]).tolist())
        return [
            Moved(standby, *self._counts(row), *self._silence(content[0]))
            for standby, row, content in self._held.values()
            if row in used
        ]

    def _counts(self, row: int) -> tuple[int, int, int, int]:
        packets, size, first, last = self._table.standbys[["packets", "bytes", "first_ns", "last_ns"]][row].tolist()
        return packets, size, first, last

    def _silence(self, path: int) -> tuple[int, int, int]:
        """Since when a path is silent; or for how long it was, and how long the answer took that ended it."""
        if self.paths.value(path, "silent_at_ns"):
            return self.paths.value(path, "first_ns"), 0, 0
        return 0, self.paths.value(path, "lasted_ns"), self.paths.value(path, "waited_ns")
