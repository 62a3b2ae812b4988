"""What became of an interface: what two readings of it, of its queues, its neighbours or its pauses mean. Pure.

Times are CLOCK_MONOTONIC nanoseconds, of the moment when the kernel was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytools.kernel.netlink.bonds import trouble
from pytools.kernel.netlink.links import FAILED, REACHED, LinkRow, NeighbourRow, QdiscRow, handle_text, parent_text
from pytools.signals import LinkEventKind
from pytools.sources.links.driver import Held
from pytools.units import SECOND

Neighbour = tuple[int, str]  # interface index, address

_QUIET_NS: Final = SECOND  # a full queue is told of once in this time
_STORM_SHARE: Final = 0.5  # of a window, by durations
_FRAME_HEADER_BYTES: Final = 14


@dataclass(frozen=True, slots=True)
class Happening:
    """One event, without the paths it concerns."""

    what: LinkEventKind
    happened_ns: int
    detail: str
    values: dict[str, int] = field(default_factory=dict)


class LinkHistory:
    """Carrier and MTU of one interface, reading by reading.

    The kernel counts how often the carrier was lost and found, so a flap between two readings is not missed; only its
    times are then no better than those of the readings.
    """

    def __init__(self, row: LinkRow, now_ns: int, flap_window_ns: int) -> None:
        self.row, self._read_ns = row, now_ns
        self._window_ns = flap_window_ns
        self._lost_ns: int | None = None
        self._flaps: deque[int] = deque()
        self._port_lost = False

    def take(self, row: LinkRow, now_ns: int) -> list[Happening]:
        """What happened since the last reading."""
        before, since_ns = self.row, self._read_ns
        self.row, self._read_ns = row, now_ns
        happened = self._carrier(before, row, since_ns, now_ns)
        if row.mtu != before.mtu:
            values = {"before_bytes": before.mtu, "after_bytes": row.mtu}
            happened.append(Happening("mtu_changed", now_ns, f"the MTU went from {before.mtu} to {row.mtu}", values))
        if row.port is not None or before.port is not None:
            happened += self._bond_port(before, row, now_ns)
        return happened

    def _bond_port(self, before: LinkRow, row: LinkRow, now_ns: int) -> Iterator[Happening]:
        """What its bond makes of it, while it has a carrier: of one that has none that is told."""
        was, now = (each.port and each.carrier and trouble(each.port) for each in (before, row))
        if was == "" and now:
            self._port_lost = True
            yield Happening("bond_port_lost", now_ns, now, {"failures": row.port.failures if row.port else 0})
        elif now == "" and self._port_lost:
            self._port_lost = False
            yield Happening("bond_port_found", now_ns, "the bond can use it again")

    def _carrier(self, before: LinkRow, row: LinkRow, since_ns: int, now_ns: int) -> list[Happening]:
        lost = (row.carrier_downs - before.carrier_downs) % 2**32
        found = (row.carrier_ups - before.carrier_ups) % 2**32
        changes = {"carrier_changes": row.carrier_changes}
        if before.carrier and not row.carrier:
            unseen = self._unseen(max(lost - 1, 0), since_ns, now_ns)
            self._lost_ns = now_ns
            words = "the carrier is gone" if row.up else "it was set down"
            return [*unseen, Happening("carrier_lost", now_ns, words, changes)]
        if not before.carrier and row.carrier:
            happened = self._unseen(max(found - 1, 0), since_ns, now_ns)
            happened.append(Happening("carrier_found", now_ns, "the carrier is back", changes))
            if self._lost_ns is not None and now_ns - self._lost_ns <= self._window_ns:
                happened.append(self._flap(self._lost_ns, now_ns))
            self._lost_ns = None
            return happened
        return self._unseen(lost if row.carrier else found, since_ns, now_ns)

    def _flap(self, lost_ns: int, found_ns: int) -> Happening:
        flaps = self._counted(1, found_ns)
        values = {"lost_ns": lost_ns, "found_ns": found_ns, "down_ns": found_ns - lost_ns, "flaps": flaps, "unseen": 0}
        words = f"the carrier was gone for {(found_ns - lost_ns) / 1e6:.1f} ms{self._how_often(flaps)}"
        return Happening("flap", found_ns, words, values)

    def _unseen(self, count: int, since_ns: int, now_ns: int) -> list[Happening]:
        """Flaps that began and ended between two readings: the kernel counted them."""
        if not count:
            return []
        flaps = self._counted(count, now_ns)
        span_ns = now_ns - since_ns
        values = {"lost_ns": since_ns, "found_ns": now_ns, "down_ns": span_ns, "flaps": flaps, "unseen": count}
        times = "once" if count == 1 else f"{count} times"
        words = f"the carrier went and came {times} within {span_ns / 1e6:.1f} ms{self._how_often(flaps)}"
        return [Happening("flap", now_ns, words, values)]

    def _counted(self, count: int, now_ns: int) -> int:
        """Flaps within the window, with these."""
        self._flaps.extend([now_ns] * min(count, 10_000))
        while self._flaps and self._flaps[0] < now_ns - self._window_ns:
            self._flaps.popleft()
        return len(self._flaps)

    def _how_often(self, flaps: int) -> str:
        return "" if flaps == 1 else f"; {flaps} flaps within {self._window_ns / SECOND:g} s"


class QueueHistory:
    """The queues of one interface, reading by reading.

    A queue is full when it dropped packets since the last reading, or when what waits leaves no room for one more
    packet of full size.
    """

    def __init__(self) -> None:
        self._drops: dict[tuple[str, int, int], int] | None = None
        self._untold = 0
        self._told_ns: int | None = None

    def take(self, rows: Sequence[QdiscRow], mtu: int, now_ns: int) -> Happening | None:
        """Whether to tell of a full queue now; drops in a quiet second are told with the next event."""
        queues = [row for row in rows if not row.is_ingress]
        grown = self._grown(queues)
        self._untold += _dropped(queues, grown)
        full = [row for row in queues if _stands_full(row, mtu)]
        if not (self._untold or full) or (self._told_ns is not None and now_ns - self._told_ns < _QUIET_NS):
            return None
        leaves = {_key(row) for row in queues if not _has_children(row, queues)}

        def blame(row: QdiscRow) -> tuple[bool, int, bool, bool]:
            key = _key(row)
            return key in leaves and grown[key] > 0, grown[key], row in full, key in leaves

        named = max(queues, key=blame)
        drops, self._untold, self._told_ns = self._untold, 0, now_ns
        values = {"drops": drops, "backlog_bytes": named.backlog_bytes, "backlog_packets": named.backlog_packets}
        limit = ""
        if named.limit_bytes is not None:
            values["limit_bytes"] = named.limit_bytes
            limit = f", {named.backlog_bytes} of {named.limit_bytes} bytes wait"
        elif named.limit_packets is not None:
            values["limit_packets"] = named.limit_packets
            limit = f", {named.backlog_packets} of {named.limit_packets} packets wait"
        did = f"dropped {drops} packet{'s' if drops != 1 else ''}" if drops else "is full"
        where = f"{named.kind} {handle_text(named.handle)} ({parent_text(named.parent)})"
        return Happening("queue_full", now_ns, f"the queue {where} {did}{limit}", values)

    def _grown(self, rows: Sequence[QdiscRow]) -> dict[tuple[str, int, int], int]:
        """By how much the drops of each queue grew; one that is new had none before, at the first reading all had."""
        now = {_key(row): row.drops for row in rows}
        before = now if self._drops is None else self._drops
        self._drops = now
        return {
            key: drops - before[key] if drops >= before.get(key, drops + 1) else drops for key, drops in now.items()
        }


def _key(row: QdiscRow) -> tuple[str, int, int]:
    return row.kind, row.handle, row.parent


def _has_children(row: QdiscRow, rows: Sequence[QdiscRow]) -> bool:
    """Of those without a handle only the root has any: the queues that a driver with several comes with."""
    if not row.handle and parent_text(row.parent) != "root":
        return False
    return any(other is not row and other.parent >> 16 == row.handle >> 16 for other in rows)


def _dropped(rows: Sequence[QdiscRow], grown: dict[tuple[str, int, int], int]) -> int:
    """Packets dropped by all queues: most roots count what their leaves dropped as well, some do not."""
    leaves = sum(grown[_key(row)] for row in rows if not _has_children(row, rows))
    roots = sum(grown[_key(row)] for row in rows if parent_text(row.parent) == "root")
    return max(leaves, roots)


def _stands_full(row: QdiscRow, mtu: int) -> bool:
    if row.limit_bytes is not None and row.limit_bytes > 0:
        return row.backlog_bytes > 0 and row.backlog_bytes + mtu + _FRAME_HEADER_BYTES > row.limit_bytes
    return row.limit_packets is not None and 0 < row.limit_packets <= row.backlog_packets


class NeighbourHistory:
    """Which gateways could not be resolved; the kernel tries again and again, which is no news."""

    def __init__(self) -> None:
        self._failed: dict[Neighbour, int] = {}  # since when

    def take(
        self, rows: Iterable[NeighbourRow], wanted: frozenset[Neighbour], now_ns: int
    ) -> list[tuple[Neighbour, Happening]]:
        """What happened to the wanted ones; the rows are in the order in which the kernel told."""
        happened = []
        for row in rows:
            key = (row.index, row.address)
            if key not in wanted:
                continue
            if row.state & FAILED and key not in self._failed:
                self._failed[key] = now_ns
                words = f"the neighbour {row.address} does not answer"
                happened.append((key, Happening("neighbour_failed", now_ns, words)))
            elif row.state & REACHED and key in self._failed:
                down_ns = now_ns - self._failed.pop(key)
                words = f"the neighbour {row.address} answers again after {down_ns / SECOND:.1f} s"
                happened.append((key, Happening("neighbour_reachable", now_ns, words, {"down_ns": down_ns})))
        return happened

    def keep(self, wanted: frozenset[Neighbour]) -> None:
        """Forget all but these."""
        self._failed = {key: since for key, since in self._failed.items() if key in wanted}

    def failed(self, index: int) -> list[str]:
        """The addresses that failed on an interface."""
        return sorted(address for each, address in self._failed if each == index)


class PauseHistory:
    """Pause storms of one interface: by durations half of a window is one; by frames alone two whole windows in a row.

    Frames alone say how long they can have held the link at most, not how long they did.
    """

    def __init__(self) -> None:
        self._suspects: set[tuple[int | None, str]] = set()

    def take(self, held: Iterable[Held], counted: int, now_ns: int) -> Happening | None:
        """Whether the last window was a storm; `counted` is by how many the driver's own count of storms grew."""
        found = list(held)
        whole: set[tuple[int | None, str]] = {
            (each.priority, each.way) for each in found if not each.exact and each.share >= 1.0
        }
        storms = [
            each
            for each in found
            if (each.exact and each.share >= _STORM_SHARE)
            or (not each.exact and (each.priority, each.way) in whole & self._suspects)
        ]
        self._suspects = whole
        if not storms:
            if not counted:
                return None
            return Happening("pause_storm", now_ns, f"the driver counted {counted} pause storms", {"storms": counted})
        worst = max(storms, key=lambda each: (each.exact, each.share))
        whose = "the link" if worst.priority is None else f"priority {worst.priority}"
        who = "the peer held" if worst.way == "received" else "this host held the peer's"
        share = f"{min(worst.share, 1.0):.0%} of the time"
        words = f"{who} {whose} for {share}" if worst.exact else f"{who} {whose} for up to {share}"
        values = {"share_percent": min(round(worst.share * 100), 100), "frames": worst.frames, "storms": counted}
        if worst.priority is not None:
            values["priority"] = worst.priority
        return Happening("pause_storm", now_ns, f"{words} by pause frames ({worst.frames})", values)
