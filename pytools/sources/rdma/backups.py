"""Which GIDs of this host reach the peer of a dead queue pair over a path that answers probes.

Only the application can use one, by a queue pair there. Devices are read from sysfs at most once a second, and only
while a queue pair is dead. Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytools.signals import Path, RdmaBackup
from pytools.sources.links.rdma_sysfs import Port, Sysfs
from pytools.sources.rdma.register import QueuePair

PathsAnswering = Callable[[], Mapping[Path, bool]]

_READ_NS: Final = 1_000_000_000
_MOST: Final = 8  # in a record


@dataclass(frozen=True)
class _Gid:
    port: Port
    index: int
    text: str  # address and type
    interface: str

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """None where it is no address of RoCE that is routed to."""
        try:
            address = ipaddress.ip_address(self.text.partition(" ")[0])
        except ValueError:
            return None
        return None if address.is_link_local else address


@dataclass(frozen=True)
class Found:
    """What a record says of a dead queue pair's path and of the others."""

    path_answers: bool | None = None
    backups: Sequence[RdmaBackup] = ()
    no_backup: str = ""


class Backups:
    """Finds them.

    Parameters
    ----------
    answering : callable
        The measured paths, and whether each answers its probes.
    """

    def __init__(self, sysfs: Sysfs, answering: PathsAnswering) -> None:
        self._sysfs, self._answering = sysfs, answering
        self._gids: list[_Gid] = []
        self._read_ns: int | None = None
        self._found_ns = 0
        self._paths: Mapping[Path, bool] = {}  # as of then
        self._found: dict[tuple[Path | None, str, str], Found] = {}  # of queue pairs alike, as of then

    def find(self, pair: QueuePair, now_ns: int) -> Found:
        """What is known for one queue pair that is dead."""
        if now_ns != self._found_ns:
            self._found_ns, self._paths, self._found = now_ns, self._answering(), {}
        alike = (pair.path, pair.remote, pair.interface)
        if alike not in self._found:
            self._found[alike] = self._look(pair, self._paths, now_ns)
        return self._found[alike]

    def _look(self, pair: QueuePair, paths: Mapping[Path, bool], now_ns: int) -> Found:
        """Look for them.

        Paths by its own interface count only if they lead to another address of the peer: a queue pair cannot choose
        between gateways.
        """
        own = paths.get(pair.path) if pair.path is not None else None
        peers = {path.destination for path in paths if path == pair.path or path.address == pair.remote}
        if not peers:
            return Found(own, no_backup=f"no measured path leads to {pair.remote or 'its peer'}")
        others = sorted(
            path
            for path, answers in paths.items()
            if answers
            and path.destination in peers
            and path != pair.path
            and (path.interface != pair.interface or path.address != pair.remote)
        )
        named = ", ".join(sorted(peers))
        if not others:
            return Found(own, no_backup=f"no other path to {named} answers probes")
        self._read(now_ns)
        found = [
            RdmaBackup(gid.port.device, gid.port.number, gid.index, gid.text, path.address, path)
            for path in others
            for gid in self._gids_of(path)
        ]
        if not found:
            rails = ", ".join(dict.fromkeys(path.interface for path in others))
            return Found(own, no_backup=f"{rails} answers probes of {named}, but no active RDMA port has a GID there")
        return Found(own, found[:_MOST])

    def _gids_of(self, path: Path) -> list[_Gid]:
        """The best GID of each port at the interface of a path: RoCE v2 first."""
        version = ipaddress.ip_address(path.address).version
        best: dict[Port, _Gid] = {}
        for gid in sorted(self._gids, key=lambda each: (not each.text.endswith("v2"), each.port, each.index)):
            if gid.interface == path.interface and gid.address is not None and gid.address.version == version:
                best.setdefault(gid.port, gid)
        return list(best.values())

    def _read(self, now_ns: int) -> None:
        if self._read_ns is not None and now_ns - self._read_ns < _READ_NS:
            return
        self._read_ns = now_ns
        self._gids = [
            _Gid(port, index, text, self._sysfs.interface(port, [index]))
            for port in self._sysfs.ports()
            if self._sysfs.state(port) == "active"
            for index, text in self._sysfs.gids(port).items()
        ]
