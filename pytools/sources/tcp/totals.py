"""What the connections of a path, an interface and the host come to, from the kernel's own sums.

Nothing here depends on the rows of single connections, so nothing is lost when these make room for others. Counts are
those of `struct swerve_tcp_counts` as one row of int64 each, columns in its order. One thread: the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.kernel.addresses import texts
from pytools.kernel.bpf.maps import Map
from pytools.signals import Path, Retransmissions, TcpHost, TcpPath

Where = tuple[str, Path | None]  # an interface, and the measured path over it: None for all the others
PathOf = Callable[[str, str], Path | None]  # (remote address, interface) -> the path, if it is a measured one
Counts = NDArray[np.int64]

OTHERS: Final = 0  # the interface that stands for all that found no row of their own
_OTHERS: Final = "others"  # what it is called
_PRUNED_AT_ONCE: Final = 1024  # bounds the time that one reading takes
_SAME_NAME: Final = ("retransmitted_bytes", "timeouts", "sent_bytes", "zero_windows", "resets_sent", "resets_received")


class Columns:
    """Where each count lies in a row of them."""

    def __init__(self, counts: np.dtype[Any]) -> None:
        assert counts.fields is not None
        self._at = {name: field[1] // 8 for name, field in counts.fields.items()}
        self.width = counts.itemsize // 8

    def flat(self, values: NDArray[Any]) -> Counts:
        """Rows of `struct swerve_tcp_counts` as plain numbers, one row each."""
        packed = np.ascontiguousarray(values)
        return packed.view(np.int64).reshape(*values.shape, self.width)

    def of(self, row: Counts, name: str) -> int:
        return int(row[self._at[name]])

    def retransmitted(self, row: Counts) -> Retransmissions:
        """The segments retransmitted, by cause."""
        first = self._at["retransmitted"]
        return Retransmissions(*row[first : first + 5].tolist())


class Growth:
    """By how much each row grew since the last reading; a row that is new grew from zero."""

    def __init__(self) -> None:
        self._keys: NDArray[np.bytes_] = np.zeros(0, "S1")
        self._counts: Counts = np.zeros((0, 0), np.int64)

    def since_last(self, keys: NDArray[np.bytes_], counts: Counts) -> Counts:
        """Takes all rows that there are now."""
        grown = counts.copy()
        if len(self._keys) and len(keys):
            at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
            same = (self._keys[at] == keys) & (self._counts[at] <= counts).all(axis=1)  # smaller: gone and come anew
            grown[same] -= self._counts[at[same]]
        order = np.argsort(keys, kind="stable")
        self._keys, self._counts = keys[order], counts[order]
        return grown

    def forget(self, keys: NDArray[np.bytes_]) -> None:
        kept = ~np.isin(self._keys, keys)
        self._keys, self._counts = self._keys[kept], self._counts[kept]


class Totals:
    """Sums by path, by interface, and of the host.

    Parameters
    ----------
    paths, interfaces : Map
        `tcp_paths` and `tcp_interfaces`.
    name : callable
        An interface's name by its index.
    """

    def __init__(self, paths: Map, interfaces: Map, name: Callable[[int], str], path_of: PathOf) -> None:
        self._paths, self._interfaces = paths, interfaces
        self._name, self._path_of = name, path_of
        self.columns = Columns(interfaces.value)
        self._path_growth, self._interface_growth = Growth(), Growth()
        self._owed: dict[str, Counts] = {}  # of rows, not yet seen in the counts of their interface; negative
        self.retransmitted: dict[Where, int] = {}  # since the start
        self.host: Counts = np.zeros(self.columns.width, np.int64)

    def read(self, known: Iterable[Path]) -> dict[Where, Counts]:
        """What was counted since the last reading, of every measured path and every interface with anything besides."""
        window: dict[Where, Counts] = {where: self._nothing() for where in self.retransmitted}
        for path in known:
            measured = self._path_of(path.address, path.interface)
            window.setdefault((path.interface, path if measured is None else measured), self._nothing())
        grown = self._read_interfaces()  # first: what is counted meanwhile is seen at its path only, and owed
        self._add_rest(window, grown, self._read_paths(window))
        for where, counts in window.items():
            segments = self.columns.retransmitted(counts).segments
            self.retransmitted[where] = self.retransmitted.get(where, 0) + segments
        return window

    def _nothing(self) -> Counts:
        return np.zeros(self.columns.width, np.int64)

    def _read_paths(self, window: dict[Where, Counts]) -> dict[str, Counts]:
        keys, values = self._paths.read()
        plain, counts = as_bytes(keys), self.columns.flat(values)
        grown = self._path_growth.since_last(plain, counts)
        busy = grown.any(axis=1)
        by_interface: dict[str, Counts] = {}
        for (interface, path), more in zip(self._wheres(keys[busy]), grown[busy], strict=True):
            window[interface, path] = window.get((interface, path), self._nothing()) + more
            by_interface[interface] = by_interface.get(interface, self._nothing()) + more
        if len(keys) > self._paths.max_entries * 3 // 4:
            self._prune(keys[~busy][:_PRUNED_AT_ONCE], plain[~busy][:_PRUNED_AT_ONCE])
        return by_interface

    def _wheres(self, keys: NDArray[Any]) -> list[Where]:
        interfaces = [self._name(ifindex) for ifindex in keys["ifindex"].tolist()]
        remotes = texts(keys["remote"]["bytes"])
        return [(name, self._path_of(remote, name)) for name, remote in zip(interfaces, remotes, strict=True)]

    def _read_interfaces(self) -> dict[str, Counts]:
        """By how much the sum of each interface grew."""
        keys, values = self._interfaces.read()
        counts = self.columns.flat(values).sum(axis=1)
        self.host = counts.sum(axis=0, dtype=np.int64) if len(keys) else self.host
        grown: dict[str, Counts] = {}
        for ifindex, more in zip(keys.tolist(), self._interface_growth.since_last(as_bytes(keys), counts), strict=True):
            interface = _OTHERS if ifindex == OTHERS else self._name(ifindex)
            grown[interface] = grown.get(interface, self._nothing()) + more
        return grown

    def _add_rest(self, window: dict[Where, Counts], grown: dict[str, Counts], told: dict[str, Counts]) -> None:
        """What an interface has counted that no row of `tcp_paths` has: they were full, or the row is gone."""
        crowded = grown.get(_OTHERS, self._nothing()).any()
        for interface, counts in told.items():
            where = _OTHERS if crowded and interface not in grown else interface
            self._owed[where] = self._owed.get(where, self._nothing()) - counts
        for interface, more in grown.items():
            left = more + self._owed.pop(interface, self._nothing())
            rest = np.maximum(left, 0)
            if (left < 0).any():
                self._owed[interface] = left - rest
            if rest.any():
                window[interface, None] = window.get((interface, None), self._nothing()) + rest

    def _prune(self, keys: NDArray[Any], plain: NDArray[np.bytes_]) -> None:
        """Make room: idle rows of no measured path; what one counts before it goes is in its interface's sum."""
        gone = np.array([path is None for _, path in self._wheres(keys)], bool)
        for key in keys[gone]:
            self._paths.delete(key)
        self._path_growth.forget(plain[gone])


def path_signal(
    columns: Columns, where: Where, counts: Counts, total_segments: int, window_ns: int, **common: Any
) -> TcpPath:
    """A window's counts of one path, or of what is left of an interface."""
    return TcpPath(
        interface=where[0],
        path=where[1],
        window_ns=window_ns,
        segments_out=columns.of(counts, "segments_out"),
        delivered_segments=columns.of(counts, "delivered"),
        delivered_ce_segments=columns.of(counts, "delivered_ce"),
        total_segments=total_segments,
        **_counted(columns, counts),
        **common,
    )


def host_signal(columns: Columns, counts: Counts, **others: Any) -> TcpHost:
    """What was counted of all connections since the start."""
    return TcpHost(resets_refused=columns.of(counts, "resets_refused"), **_counted(columns, counts), **others)


def _counted(columns: Columns, counts: Counts) -> dict[str, Any]:
    """What is told of paths and of the host alike."""
    retransmitted = columns.retransmitted(counts)
    return {
        "retransmitted": retransmitted,
        "retransmitted_segments": retransmitted.segments,
        "spurious_segments": columns.of(counts, "spurious"),
        **{name: columns.of(counts, name) for name in _SAME_NAME},
    }


def as_bytes(keys: NDArray[Any]) -> NDArray[np.bytes_]:
    """Keys as strings of bytes, which can be sorted and compared."""
    if not len(keys):
        return np.zeros(0, f"S{keys.dtype.itemsize}")
    return np.frombuffer(np.ascontiguousarray(keys).tobytes(), f"S{keys.dtype.itemsize}")
