"""Stand-bys: where the kernel sends packets by itself while the path that they are routed along is silent.

steer.c looks at the agent's own table of paths, which the agent lends us: without it, without a lease that we renew,
and while no path is silent, every packet follows the routing table. Nothing outlives this process but, before TCX, a
filter whose lease has ended. Times are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace whose interfaces are
hooked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from pytools.kernel.bpf.mapped import MappedArray
from pytools.signals import Path
from steering.actuators import flow_keys
from steering.actuators.flow_table import LENT, FlowTable
from steering.actuators.pins import Pins
from steering.plan import StandBy, Target

_INTERFACE_BITS: Final = 32
_MAPPED_BITS: Final = 96  # in front of an IPv4 address

_Prefix = tuple[int, int, bytes]  # bits, interface index, address: a key of the kernel's
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
    silent: bool  # now; False: the path answers again, and its packets are on hold


class StandBys:
    """The stand-bys of one namespace.

    Parameters
    ----------
    table : FlowTable
        The kernel's tables; stays the caller's.
    pins : Pins
        Knows the members that packets can be sent to, and whether they are alive; stays the caller's.
    """

    def __init__(self, table: FlowTable, pins: Pins) -> None:
        self._table, self._pins = table, pins
        self._held: dict[_Name, tuple[StandBy, int, _Content]] = {}
        self._free = deque(range(len(table.standbys)))  # the row that was used last comes last
        self._prefixes: dict[_Prefix, int] = {}
        self._armed: list[tuple[StandBy, _Content | str]] = []  # what was asked for last
        self._refused: dict[Path, str] = {}
        self._paths: MappedArray | None = None

    def close(self) -> None:
        """Disarm all stand-bys: every packet follows the routing table."""
        self._table.settings["standby_until_ns"] = 0
        self.take_back()

    # ---- the agent's maps ----

    @property
    def lent(self) -> bool:
        """Whether the kernel can see which paths are silent."""
        return self._paths is not None

    def lend(self, maps: Mapping[str, int]) -> None:
        """Use these maps of an agent from now on; their descriptors are then ours.

        Raises
        ------
        SwerveError
            If they are not what they should be: then there are none.
        """
        self.take_back()
        try:
            for name, place in zip(LENT, self._table.lent, strict=True):
                place.update(0, maps[name])
            self._paths = MappedArray(os.dup(maps["probe_paths"]), self._table.path_record)
        except BaseException:
            self.take_back()
            raise
        finally:
            for fd in maps.values():
                os.close(fd)

    def take_back(self) -> None:
        """The agent is gone: no path is known to be silent."""
        for place in self._table.lent:
            place.delete(0)
        if self._paths is not None:
            self._paths.close()
            self._paths = None

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
        rows = self._rows_of_paths()
        contents = [(each, self._content(each, rows)) for each in wanted]
        if contents == self._armed:  # mostly it is so
            return self._refused
        refused: dict[Path, str] = {}
        held: dict[_Name, tuple[StandBy, int, _Content]] = {}
        prefixes: dict[_Prefix, int] = {}
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
            index = int(rows[_place(each.path)][2])
            for prefix in each.prefixes:
                prefixes.setdefault(_key(prefix, index), row)
        given_up += [row for _, row, _ in self._held.values()]
        shown = self._show(prefixes)
        self._held, self._refused = held, refused
        self._armed = contents if shown else []  # then all is written again
        self._free.extend(given_up)
        return refused

    def _rows_of_paths(self) -> dict[tuple[bytes, bytes, str], tuple[int, int, int]]:
        """The agent's paths: row, generation and interface index by address, gateway and interface."""
        if self._paths is None:
            return {}
        rows = np.flatnonzero(self._paths.records["ifindex"])
        names = {}
        for index in np.unique(self._paths.records["ifindex"][rows]).tolist():
            with contextlib.suppress(OSError):  # it is gone
                names[index] = socket.if_indextoname(index)
        found = {}
        for row in rows.tolist():
            record = self._paths.records[row]
            index = int(record["ifindex"])
            if index in names:
                remote, gateway = (record[field]["bytes"].tobytes() for field in ("remote", "gateway"))
                found[remote, gateway, names[index]] = row, int(record["generation"]), index
        return found

    def _content(self, wanted: StandBy, rows: Mapping[Any, tuple[int, int, int]]) -> _Content | str:
        """What the kernel has to know of a stand-by; or why it cannot be had."""
        path, other = rows.get(_place(wanted.path)), rows.get(_place(wanted.other))
        target = self._pins.row(wanted.target, wanted.nexthop_id)
        if path is None or other is None:
            missing = wanted.path if path is None else wanted.other
            return f"the agent does not probe {missing}" if self.lent else "the agent has lent no maps"
        if target is None:
            return f"nothing can be sent to nexthop {wanted.nexthop_id}"
        return path[0], other[0], path[1], other[1], target

    def _fill(self, row: int, content: _Content) -> None:
        record = self._table.standbys[row : row + 1]
        record[:] = 0
        for name, value in zip(("path", "other", "generation", "other_generation", "target"), content, strict=True):
            record[name] = value

    def _show(self, prefixes: dict[_Prefix, int]) -> bool:
        """Let the kernel find rows, which are whole by now, and forget others; False: there was no room for all."""
        changed = {key: row for key, row in prefixes.items() if self._prefixes.get(key) != row}
        keys = _keys(list(changed), self._table.prefixes.key)
        refused = self._table.prefixes.update_many(keys, np.array(list(changed.values()), np.uint32))
        for key in _keys(list(self._prefixes.keys() - prefixes.keys()), self._table.prefixes.key):
            self._table.prefixes.delete(key)
        self._prefixes = prefixes
        return not refused

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
            Moved(standby, *self._counts(row), silent=self._silent(content[0]))
            for standby, row, content in self._held.values()
            if row in used
        ]

    def _counts(self, row: int) -> tuple[int, int, int, int]:
        packets, size, first, last = self._table.standbys[["packets", "bytes", "first_ns", "last_ns"]][row].tolist()
        return packets, size, first, last

    def _silent(self, path: int) -> bool:
        return self._paths is not None and bool(self._paths.records["silent_at_ns"][path])


def _place(path: Path) -> tuple[bytes, bytes, str]:
    remote = flow_keys.address(path.address).mapped
    return remote, flow_keys.address(path.gateway).mapped if path.gateway else remote, path.interface


def _key(prefix: str, ifindex: int) -> _Prefix:
    network = ipaddress.ip_network(prefix, strict=False)
    bits = _INTERFACE_BITS + network.prefixlen + (_MAPPED_BITS if network.version == 4 else 0)
    return bits, ifindex, flow_keys.address(str(network.network_address)).mapped


def _keys(prefixes: list[_Prefix], layout: np.dtype[Any]) -> Any:
    keys = np.zeros(len(prefixes), layout)
    keys["bits"] = [bits for bits, _, _ in prefixes]
    keys["ifindex"] = [socket.htonl(ifindex) for _, ifindex, _ in prefixes]
    packed = b"".join(address for _, _, address in prefixes)
    keys["to"]["bytes"] = np.frombuffer(packed, np.uint8).reshape(-1, 16)
    return keys
