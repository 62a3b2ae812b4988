"""What the ranks of this host send: their TCP connections and queue pairs, summed by path over a window.

Connections are joined by process; those of other network namespaces, whose process is not known, by control group.
They come as arrays, and are kept as such. Whose a connection is and where it goes is asked when it is new, when it
leaves by another interface, when ranks change, and once a minute.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.ipc.bus import Published
from pytools.signals import Path, RdmaQueuePair
from pytools.sources.jobs.processes import Member
from pytools.sources.tcp.connections import COUNTS, Connections

TYPES: Final = frozenset({"rdma_qp"})
_MOST: Final = 131_072  # connections, of ranks and others
_MOST_PAIRS: Final = 65_536
_SILENT_NS: Final = 15 * 10**9  # every fourth window all are reported
_AGAIN_NS: Final = 60 * 10**9
_ROW: Final = np.dtype(
    [
        ("cookie", "u8"),  # 0: it has gone to another row
        ("counts", "i8", (len(COUNTS),)),  # as last reported
        ("before", "i8", (len(COUNTS),)),  # when the window began
        ("at_ns", "i8"),
        *((name, "i4") for name in ("place", "holder")),  # -1: of no rank
        ("ifindex", "u4"),
        *((name, "?") for name in ("described", "told", "closed")),
    ]
)
_ABOVE: Final = np.uint64(2**64 - 1)
_SENT, _RECEIVED, _TIMEOUTS = (COUNTS.index(name) for name in ("sent_bytes", "received_bytes", "timeouts"))

Holder = tuple[Hashable, int]  # job, rank
Where = tuple[Hashable, Path | None, str]  # job, path, interface or device


class Wait(NamedTuple):
    """A connection that waited for its retransmission timer within the window."""

    timeouts: int
    lasted_ns: int  # if it still waits
    srtt_ns: int  # 0 if not known


@dataclass(slots=True)
class Sum:
    """What the ranks of a job have on a path, in a window."""

    where: Where
    connections: int = 0
    sent: int = 0
    received: int = 0
    segments: int = 0
    retransmitted: int = 0  # of these segments
    timeouts: int = 0
    # bytes sent by each connection that was told of
    flows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    waits: list[Wait] = field(default_factory=list)
    pairs: list[RdmaQueuePair] = field(default_factory=list)


@dataclass(slots=True)
class _Pair:
    """A queue pair, as last reported, and as it was when the window began."""

    holder: Holder
    where: Where
    signal: RdmaQueuePair
    before: RdmaQueuePair


class _Numbers:
    """Numbers for places or holders, while any row has them."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self._number: dict[Any, int] = {}

    def of(self, what: Hashable) -> int:
        number = self._number.setdefault(what, len(self.known))
        if number == len(self.known):
            self.known.append(what)
        return number

    def renumber(self, used: NDArray[np.int32]) -> NDArray[np.int32]:
        """Forget those that are not in `used`; returns the new numbers."""
        numbers, renumbered = np.unique(np.append(used, -1), return_inverse=True)
        self.known = [self.known[each] for each in numbers[1:].tolist()]
        self._number = {what: number for number, what in enumerate(self.known)}
        return renumbered[:-1].astype(np.int32) - 1


class Traffic:
    """Connections and queue pairs of ranks."""

    def __init__(self) -> None:
        self._by_pid: dict[int, Holder] = {}
        self._by_group: dict[str, Holder | None] = {}  # None: of several ranks
        self._pairs: dict[Hashable, _Pair] = {}
        self._held_pairs: Counter[Holder] = Counter()
        self.too_many = 0
        self.forget()

    def forget(self) -> None:
        """Nobody listens, or there is no job: begin anew then."""
        self._rows, self._used = np.zeros(64, _ROW), 0
        self._sort()
        self._places, self._holders = _Numbers(), _Numbers()
        self._waits: dict[int, tuple[int, int]] = {}  # by row, of the window: how long it lasted, and srtt_ns
        self._held: dict[Holder, int] = {}  # connections of each rank
        self._pairs.clear()
        self._held_pairs.clear()
        self._began_ns = self._again_ns = 0

    def set_ranks(self, jobs: Mapping[Hashable, list[Member]]) -> None:
        self._by_pid, self._by_group = {}, {}
        for job, members in jobs.items():
            for each in members:
                holder = self._by_pid[each.owner.pid] = job, each.place.rank
                group = each.owner.cgroup
                self._by_group[group] = holder if self._by_group.get(group, holder) == holder else None
        self._rows["described"] = False

    # ---- connections ----

    def take(self, part: Connections) -> None:
        """Add what these connections did since they were last reported."""
        at, counts = self._row_of(part), part.counts
        there = at >= 0
        if not there.all():
            at, counts = at[there], counts[there]
        rows = self._rows
        more = counts - rows["counts"][at]
        back = (more[:, _SENT] < 0) | (more[:, _RECEIVED] < 0)
        if back.any():  # it was met anew
            rows["before"][at[back]] += more[back]
            more[back] = 0
        rows["counts"][at] = counts
        rows["at_ns"][at], rows["told"][at] = part.at_ns, True
        if part.closed.any():
            rows["closed"][at] |= part.closed[there]
        if part.stalls or more[:, _TIMEOUTS].any():
            self._note_waits(part, np.flatnonzero(there), at, more[:, _TIMEOUTS])

    def _note_waits(
        self, part: Connections, positions: NDArray[np.int64], at: NDArray[np.int64], timeouts: NDArray[np.int64]
    ) -> None:
        for position, row, many in zip(positions.tolist(), at.tolist(), timeouts.tolist(), strict=True):
            stall = part.stalls.get(position)
            if stall is not None or many:
                self._waits[row] = 0 if stall is None else stall.lasted_ns, int(part.srtt_ns[position])

    def _row_of(self, part: Connections) -> NDArray[np.int64]:
        """The row of each, with those that are new; -1 where there is no room."""
        place = np.searchsorted(self._cookies, part.cookie)
        found = self._order[place]
        found[self._cookies[place] != part.cookie] = -1
        unclear = (found < 0) | ~self._rows["described"][found] | (self._rows["ifindex"][found] != part.ifindex)
        unclear &= part.cookie != 0  # no socket has that
        if unclear.any():
            for at in np.flatnonzero(unclear).tolist():
                found[at] = self._describe(part, at, int(found[at]))
            self._sort()
        return found

    def _sort(self) -> None:
        """Have the rows found by their cookies; the last entry, above all cookies, is of no row."""
        cookies = self._rows["cookie"][: self._used]
        order = np.argsort(cookies)[np.count_nonzero(cookies == 0) :]
        self._order, self._cookies = np.append(order, -1), np.append(cookies[order], _ABOVE)

    def _describe(self, part: Connections, at: int, row: int) -> int:
        """Say whose a connection is and where it goes; one that has moved to another place gets another row."""
        described, foreign = part.describe(at), bool(part.foreign[at])
        owner = described.owner
        holder = self._by_pid.get(owner.pid)
        if holder is None and foreign:
            holder = self._by_group.get(owner.cgroup)
        place = number = -1
        if holder is not None:
            place = self._places.of((holder[0], described.path, described.interface))
            number = self._holders.of(holder)
        before = int(self._rows["place"][row]) if row >= 0 else -1
        if row < 0 or before not in (-1, place):
            row = self._another(part, at, row)
        if row >= 0:
            values = {"place": place, "holder": number, "ifindex": part.ifindex[at]}
            found = owner.pid or (foreign and owner.cgroup) or part.closed[at]
            values["described"] = bool(found)  # else its process may be found yet
            for name, value in values.items():
                self._rows[name][row] = value
        return row

    def _another(self, part: Connections, at: int, former: int) -> int:
        if self._used == len(self._rows):
            if self._used >= _MOST:
                self.too_many += 1
                return former
            self._rows = np.concatenate([self._rows, np.zeros(len(self._rows), _ROW)])
        row = self._used
        self._used += 1
        new = self._rows[row]
        new["cookie"] = part.cookie[at]
        if former >= 0:
            new["counts"] = new["before"] = self._rows["counts"][former]
            self._rows["cookie"][former], self._rows["closed"][former] = 0, True
        elif not part.first_ns[at] >= self._began_ns > 0:  # what it did before is not of this window
            new["counts"] = new["before"] = part.counts[at]
        return row

    def held(self, job: Hashable, rank: int) -> tuple[int, int]:
        """How many connections and queue pairs a rank had at the end of the window."""
        return self._held.get((job, rank), 0), self._held_pairs[job, rank]

    # ---- windows ----

    def window(self, now_ns: int) -> list[Sum]:
        """What each job has on each path, since the last call; begins another window."""
        rows = self._rows[: self._used]
        rows["closed"] |= rows["at_ns"] < now_ns - _SILENT_NS
        sums = self._sum_connections(rows)
        self._sum_pairs(sums, now_ns)
        self._waits.clear()
        rows["before"], rows["told"] = rows["counts"], False
        if now_ns - self._again_ns >= _AGAIN_NS:
            self._again_ns, rows["described"] = now_ns, False
        if rows["closed"].any():
            self._drop(~rows["closed"])
        self._began_ns = now_ns
        return [each for each in sums.values() if each.connections or each.pairs or each.sent or each.received]

    def _sum_connections(self, rows: NDArray[Any]) -> dict[Where, Sum]:
        """By place; a place is a run of rows, when they are in the order of their places."""
        sums: dict[Where, Sum] = {}
        at = np.flatnonzero(rows["place"] >= 0)
        at = at[np.argsort(rows["place"][at], kind="stable")]
        place, is_open = rows["place"][at], ~rows["closed"][at]
        many = np.bincount(rows["holder"][at[is_open]]).tolist()
        self._held = {self._holders.known[number]: count for number, count in enumerate(many) if count}
        if not len(at):
            return sums
        more, told = rows["counts"][at] - rows["before"][at], rows["told"][at]
        begins = np.flatnonzero(np.diff(place, prepend=-1))
        ends = [*begins[1:].tolist(), len(at)]
        totals = np.add.reduceat(more, begins, axis=0).tolist()
        connections = np.add.reduceat(is_open, begins, dtype=np.int64).tolist()
        for first, last, total, count in zip(begins.tolist(), ends, totals, connections, strict=True):
            where: Where = self._places.known[place[first]]
            found = sums[where] = Sum(where, count, *total)
            found.flows = more[first:last, _SENT][told[first:last]]
        for each, (lasted_ns, srtt_ns) in self._waits.items():
            row = rows[each]
            if row["place"] >= 0:
                timeouts = int(row["counts"][_TIMEOUTS] - row["before"][_TIMEOUTS])
                sums[self._places.known[row["place"]]].waits.append(Wait(timeouts, lasted_ns, srtt_ns))
        return sums

    def _drop(self, kept: NDArray[np.bool_]) -> None:
        rows = self._rows[: self._used][kept]
        rows["place"], rows["holder"] = self._places.renumber(rows["place"]), self._holders.renumber(rows["holder"])
        self._used = len(rows)
        self._rows = np.concatenate([rows, np.zeros(max(64, self._used), _ROW)])
        self._sort()

    # ---- queue pairs ----

    def offer(self, published: Published) -> None:
        """Take a signal of TYPES, if it is about a rank."""
        signal = published.signal
        if not isinstance(signal, RdmaQueuePair):
            return
        holder = self._by_pid.get(signal.owner.pid)
        if holder is None:
            return
        key = signal.device, signal.qp_number, signal.owner.pid
        where = holder[0], signal.path, signal.path.interface if signal.path else signal.device
        pair = self._pairs.get(key)
        if pair is not None:
            pair.holder, pair.where, pair.signal = holder, where, signal
        elif len(self._pairs) < _MOST_PAIRS:
            self._pairs[key] = _Pair(holder, where, signal, signal)
        else:
            self.too_many += 1

    def _sum_pairs(self, sums: dict[Where, Sum], now_ns: int) -> None:
        self._held_pairs.clear()
        for key, pair in list(self._pairs.items()):
            signal, before, pair.before = pair.signal, pair.before, pair.signal
            found = sums.setdefault(pair.where, Sum(pair.where))
            sent = signal.completed_bytes - before.completed_bytes
            received = signal.received_bytes - before.received_bytes
            if sent >= 0 and received >= 0:  # else the counts went back
                found.sent += sent
                found.received += received
            if signal.closed or now_ns - signal.at_ns > _SILENT_NS:
                del self._pairs[key]
            else:
                found.pairs.append(signal)
                self._held_pairs[pair.holder] += 1
