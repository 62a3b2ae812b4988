"""The agent's own table of paths, which it lends us, and packets looked up by interface and destination.

Without the agent's maps steer.c knows nothing of any path. Times are CLOCK_MONOTONIC nanoseconds; one thread, in the
namespace whose interfaces are hooked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from pytools.kernel.bpf.mapped import MappedArray
from pytools.kernel.bpf.maps import Map
from pytools.signals import Path
from steering.actuators import flow_keys
from steering.actuators.flow_table import LENT, FlowTable

_INTERFACE_BITS: Final = 32
_MAPPED_BITS: Final = 96  # in front of an IPv4 address

Prefix = tuple[int, int, bytes]  # bits, interface index, address: a key of the kernel's


class Row(NamedTuple):
    """Where a path is in the agent's table."""

    number: int
    generation: int
    ifindex: int


class AgentPaths:
    """The agent's paths, as long as it lends them.

    Parameters
    ----------
    table : FlowTable
        The kernel's tables; stays the caller's.
    """

    def __init__(self, table: FlowTable) -> None:
        self._table = table
        self._paths: MappedArray | None = None

    @property
    def lent(self) -> bool:
        """Whether the kernel can see them."""
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
        """The agent is gone: nothing is known of any path."""
        for place in self._table.lent:
            place.delete(0)
        if self._paths is not None:
            self._paths.close()
            self._paths = None

    def value(self, row: int, field: str) -> int:
        """A field of a path; 0 while the agent lends none."""
        return 0 if self._paths is None else int(self._paths.records[field][row])

    def rows(self) -> Rows:
        found: dict[tuple[bytes, bytes, str], Row] = {}
        if self._paths is None:
            return Rows(found)
        numbers = np.flatnonzero(self._paths.records["ifindex"])
        names = {}
        for index in np.unique(self._paths.records["ifindex"][numbers]).tolist():
            with contextlib.suppress(OSError):  # it is gone
                names[index] = socket.if_indextoname(index)
        for number in numbers.tolist():
            record = self._paths.records[number]
            index = int(record["ifindex"])
            if index in names:
                remote, gateway = (record[field]["bytes"].tobytes() for field in ("remote", "gateway"))
                found[remote, gateway, names[index]] = Row(number, int(record["generation"]), index)
        return Rows(found)


class Rows(NamedTuple):
    """The rows of all paths, by address, gateway and interface."""

    found: Mapping[tuple[bytes, bytes, str], Row]

    def get(self, path: Path) -> Row | None:
        """The row of a path; None: the agent does not probe it."""
        remote = flow_keys.address(path.address).mapped
        gateway = flow_keys.address(path.gateway).mapped if path.gateway else remote
        return self.found.get((remote, gateway, path.interface))


class PrefixTable:
    """A map of the kernel's: packets to a prefix that leave by an interface, and the row they have in another map."""

    def __init__(self, prefixes: Map) -> None:
        self._map = prefixes
        self._shown: dict[Prefix, int] = {}

    def show(self, prefixes: dict[Prefix, int]) -> bool:
        """Let the kernel find rows, which are whole by now, and forget others; False: there was no room for all."""
        changed = {key: row for key, row in prefixes.items() if self._shown.get(key) != row}
        keys = self._keys(list(changed))
        refused = self._map.update_many(keys, np.array(list(changed.values()), np.uint32))
        for key in self._keys(list(self._shown.keys() - prefixes.keys())):
            self._map.delete(key)
        self._shown = prefixes
        return not refused

    def _keys(self, prefixes: list[Prefix]) -> Any:
        keys = np.zeros(len(prefixes), self._map.key)
        keys["bits"] = [bits for bits, _, _ in prefixes]
        keys["ifindex"] = [socket.htonl(ifindex) for _, ifindex, _ in prefixes]
        packed = b"".join(address for _, _, address in prefixes)
        keys["to"]["bytes"] = np.frombuffer(packed, np.uint8).reshape(-1, 16)
        return keys


def prefix_key(prefix: str, ifindex: int) -> Prefix:
    """Packets to a prefix that leave by an interface."""
    network = ipaddress.ip_network(prefix, strict=False)
    bits = _INTERFACE_BITS + network.prefixlen + (_MAPPED_BITS if network.version == 4 else 0)
    return bits, ifindex, flow_keys.address(str(network.network_address)).mapped
