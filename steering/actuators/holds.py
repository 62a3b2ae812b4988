"""Holds: packets wait at this host, under fq, while probes find a long queue on their path.

steer.c reads in the agent's own table of paths (agent_paths.py) how long the newest probe has waited, and gives packets
a time to leave at. Without a lease that we renew, without samples, or without fq, nothing is held. Nothing outlives
this process but an fq of ours, known by its handle (qdiscs.py), and, before TCX, a filter whose lease has ended. Times
are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace whose interfaces are hooked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import Any, Final

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.netlink import qdiscs
from pytools.kernel.netlink.monitor import Group, Monitor
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Path
from steering.actuators.agent_paths import AgentPaths, Prefix, PrefixTable, Row, prefix_key
from steering.actuators.flow_table import FlowTable
from steering.plan import Hold, HoldLimits

_ATTACHED_BY: Final = "hold"
_LIMITS: Final = tuple(each.name for each in fields(HoldLimits))
_COUNTS: Final = ("packets", "bytes", "waited_ns", "samples", "above")


@dataclass(frozen=True, slots=True)
class Holding:
    """A hold as the kernel has it, and what it did since it was armed."""

    hold: Hold
    packets: int  # that were held; segments, not buffers
    bytes: int  # the same, each segment with its headers
    waited_ns: int  # sum of the times that their buffers were held for
    samples: int  # of the queue
    above: int  # of these, above the threshold
    queue_ns: int | None  # the newest; None: there is none that still counts
    rate: int  # bytes a second that leave now at most; 0: all
    last_ns: int  # when a packet was held last; 0: none was


class Holds(Closing):
    """The holds of one namespace.

    Parameters
    ----------
    table : FlowTable
        The kernel's tables; stays the caller's.
    paths : AgentPaths
        The agent's paths; stays the caller's.
    """

    def __init__(self, table: FlowTable, paths: AgentPaths, netlink: Netlink) -> None:
        self._table, self._paths, self._netlink = table, paths, netlink
        self._held: dict[Path, tuple[Hold, int, Row]] = {}
        self._free = deque(range(len(table.holds)))  # the row that was used last comes last
        self._prefixes = PrefixTable(table.hold_prefixes)
        self._installed: set[int] = set()
        self._watch = Monitor((Group.LINK, Group.TC))
        self._queues: dict[int, tuple[qdiscs.Queue, str]] = {}  # of interfaces, until the kernel tells of a change

    def close(self) -> None:
        self._watch.close()

    # ---- arming ----

    def arm(self, wanted: Iterable[Hold]) -> dict[Path, str]:
        """As `StandBys.arm`: have these holds and no others; what the kernel knows of one that stays is kept."""
        rows, refused = self._paths.rows(), dict[Path, str]()
        found: dict[Path, tuple[Hold, Row]] = {}
        for each in wanted:
            place = rows.get(each.path)
            if place is None:
                why = f"the agent does not probe {each.path}" if self._paths.lent else "the agent has lent no maps"
                refused[each.path] = why
            else:
                found[each.path] = each, place
        installs = {place.ifindex for each, place in found.values() if each.install}
        unready = self._made_ready({place.ifindex: place.ifindex in installs for _, place in found.values()})
        refused |= {path: unready[row.ifindex] for path, (_, row) in found.items() if row.ifindex in unready}
        held: dict[Path, tuple[Hold, int, Row]] = {}
        prefixes: dict[Prefix, int] = {}
        for path, (each, place) in found.items():
            if path in refused:
                continue
            before = self._held.get(path)
            if before is not None and before[2] == place:
                number = before[1]
                if before[0].limits != each.limits:
                    self._limit(number, each.limits)
            elif self._free:
                number = self._free.popleft()
                self._fill(number, each, place)
            else:
                refused[path] = f"there is room for {len(self._table.holds)} holds"
                continue
            held[path] = each, number, place
            for prefix in each.prefixes:
                prefixes.setdefault(prefix_key(prefix, place.ifindex), number)
        kept = {number for _, number, _ in held.values()}
        given_up = [number for _, number, _ in self._held.values() if number not in kept]
        self._held = held
        self._prefixes.show(prefixes)
        self._table.holds["limits"]["until_ns"][given_up] = 0
        self._free.extend(given_up)
        return refused

    def _made_ready(self, interfaces: dict[int, bool]) -> dict[int, str]:
        """Have packets looked at, and kept until they may leave; which interfaces that is impossible on, and why.

        `interfaces` says by index whether fq may be put there. What we put elsewhere goes.
        """
        refused = self._table.attach(interfaces, by=_ATTACHED_BY)
        surplus = self._installed - interfaces.keys()
        if surplus:
            qdiscs.remove(self._netlink, surplus)
            self._installed -= surplus
        if list(self._watch.messages()):
            self._queues.clear()
        if unread := interfaces.keys() - self._queues.keys():
            self._queues |= qdiscs.queues(self._netlink, set(unread))
        for index, may_install in interfaces.items():
            queue, kind = self._queues[index]
            if queue == "ours":
                self._installed.add(index)
            elif queue == "other":
                refused[index] = f"packets wait in {kind} there, which somebody chose: put fq there to have them held"
            elif queue == "default" and not may_install:
                refused[index] = f"packets wait in {kind} there, and the policy does not say `qdisc: fq`"
            elif queue == "default":
                try:
                    qdiscs.install(self._netlink, index, kind)
                    self._installed.add(index)
                except SwerveError as error:
                    refused[index] = str(error)
        return refused

    def _fill(self, number: int, hold: Hold, place: Row) -> None:
        record = self._table.holds[number : number + 1]
        record[:] = 0
        record["path"], record["generation"] = place.number, place.generation
        self._limit(number, hold.limits)

    def _limit(self, number: int, limits: HoldLimits) -> None:
        record = self._table.holds["limits"]
        for name, value in zip(_LIMITS, astuple(limits), strict=True):
            record[name][number] = value

    # ---- the lease, and what came of it ----

    def renew(self, until_ns: int) -> None:
        """Let all holds last until this moment; 0: nothing is held but behind what waits already."""
        numbers = [number for _, number, _ in self._held.values()]
        limits = self._table.holds["limits"]
        limits["second_ns"][numbers] = time.monotonic_ns() - time.time_ns() % 1_000_000_000
        limits["until_ns"][numbers] = until_ns
        self._table.settings["held_until_ns"] = max(1, until_ns) if numbers else 0  # 0: not even looked at

    def end(self) -> None:
        """Hold nothing any more, and wait until what waits has left: it would be lost with an fq of ours."""
        self.renew(0)
        numbers = [number for _, number, _ in self._held.values()]
        last_ns = int(self._table.holds["state"]["last_ns"][numbers].max(initial=0))
        if self._installed:
            time.sleep(max(0, last_ns - time.monotonic_ns()) / 1e9)

    def blind(self, holding: Holding, now_ns: int) -> str:
        """Why the kernel knows nothing of the queue now; empty when it does."""
        if holding.queue_ns is not None:
            return ""
        if not self._paths.lent:
            return "there is no agent"
        _, _, place = self._held[holding.hold.path]
        if self._paths.value(place.number, "base_until_ns") <= now_ns:
            return "the clocks or the base delay do not allow to say how long a probe waits"
        return "no packet has left, or no probe was answered, a short while ago"

    def read(self, now_ns: int) -> list[Holding]:
        return [self._holding(hold, self._table.holds[number], now_ns) for hold, number, _ in self._held.values()]

    def _holding(self, hold: Hold, row: Any, now_ns: int) -> Holding:
        packets, size, waited, samples, above = (int(row[name]) for name in _COUNTS)
        state = row["state"]
        fresh = bool(state["taken_ns"]) and now_ns <= int(state["taken_ns"]) + hold.limits.fresh_ns
        queue = int(state["queue_ns"]) if fresh else None
        last = int(state["held_ns"]) if packets else 0
        return Holding(hold, packets, size, waited, samples, above, queue, int(state["rate"]), last)
