"""Pins: single flows held on another nexthop than routing has chosen, as leases that the kernel lets end.

A pin moves a live flow between two packets. It acts while its target is alive (neighbours.py) and its lease lasts; in
every other case the flow goes as it is routed, and the table's counters say why. There is no journal: a process that
dies takes its hooks with it (docs/pins.md). Times are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace whose
interfaces are steered, beside the one that watches the neighbours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

import numpy as np

from pytools.closing import Closing
from steering.actuators import flow_keys
from steering.actuators.flow_table import FlowTable, Lease
from steering.actuators.neighbours import Hop, Neighbours
from steering.plan import FlowKey, LabelChange, Pin, Target, canonical

FAMILIES: Final = {4: 2, 6: 10}  # SWERVE_FAMILY_*
_Name = tuple[Target, int]
Wanted = TypeVar("Wanted", Pin, LabelChange)


class Leases(Closing, Generic[Wanted]):
    """The leases of one kind in one namespace.

    Parameters
    ----------
    table : FlowTable
        The kernel's table of flows; stays the caller's.
    """

    _lease: ClassVar[Lease]

    def __init__(self, table: FlowTable) -> None:
        self.table = table

    def close(self) -> None:
        self.remove([row.flow for row in self.table.read()])

    def install(self, leases: Sequence[Wanted]) -> dict[FlowKey, str]:
        """Give flows leases, or others.

        Returns flows that were given none, and why; all others were.
        Raises RefusedError if there is no room for all that could be: none is given one then.
        Raises SwerveError if the kernel refuses.
        """
        now_ns = time.monotonic_ns()
        wanted = {each.flow: each for each in leases}
        refused = {flow: why for flow, each in wanted.items() if (why := self._refusal(each, now_ns))}
        granted = [each for flow, each in wanted.items() if flow not in refused]
        if granted:
            flows, until_ns = [each.flow for each in granted], [each.expires_ns for each in granted]
            self.table.grant(self._lease, flows, until_ns, **self._values(granted))
        return refused

    def _refusal(self, wanted: Wanted, now_ns: int) -> str:
        """Why a flow is given no such lease; empty when it is."""
        raise NotImplementedError

    def _values(self, granted: Sequence[Wanted]) -> Mapping[str, Sequence[int]]:
        raise NotImplementedError

    def renew(self, flows: Sequence[FlowKey], expires_ns: int) -> set[FlowKey]:
        """Let these leases end at another moment; returns the flows that have none."""
        return self.table.renew(self._lease, flows, [expires_ns] * len(flows))

    def remove(self, flows: Iterable[FlowKey]) -> set[FlowKey]:
        """End the leases of flows; returns those that had one."""
        return self.table.end(self._lease, flows)


@dataclass(frozen=True, slots=True)
class PinTarget:
    """A member of a target that flows can be pinned to."""

    nexthop_id: int
    ifindex: int
    gateway: str
    alive: bool = True  # false: whatever the neighbour says, its pins shall not act (the way behind it is dead)
    target: Target = ""  # as in Pin

    @property
    def name(self) -> _Name:
        return self.target, self.nexthop_id

    @property
    def hop(self) -> Hop:
        return self.ifindex, canonical(self.gateway)


@dataclass(frozen=True, slots=True)
class PinState:
    """A pin as the kernel has it, and what it did."""

    pin: Pin
    packets: int  # of the flow that left by the target, by routing or redirected; segments, not buffers
    bytes: int  # the same, each segment with its headers
    last_ns: int | None  # when the last of them left


class Pins(Leases[Pin]):
    """The pins of one namespace.

    Parameters
    ----------
    table : FlowTable
        The kernel's table of flows; stays the caller's.
    """

    _lease = "pin_until_ns"

    def __init__(self, table: FlowTable) -> None:
        super().__init__(table)
        self._lock = threading.Lock()  # the thread that watches neighbours writes `alive`
        self._rows: dict[_Name, int] = {}  # of the kernel's table of targets
        self._targets: dict[_Name, PinTarget] = {}
        self._by_hop: dict[Hop, list[_Name]] = {}
        self._interfaces: set[int] = set()
        self._upper: set[int] = set()  # of these
        self._neighbours = Neighbours(self._changed)

    def close(self) -> None:
        self._neighbours.close()
        self.table.targets["alive"] = 0
        super().close()

    # ---- targets ----

    def targets(self, targets: Iterable[PinTarget]) -> dict[_Name, str]:
        """What flows may be pinned to from now on: hooks every interface, and asks for every neighbour.

        To be called whenever a route, an interface or the health of a path has changed, or `outdated` says so. Pins to
        a target that is named no more go as they are routed, until it is named again or their leases end.

        Returns
        -------
        dict
            Targets that cannot be used, by (target, nexthop id), and why; a neighbour that is merely silent is none.

        Raises
        ------
        SwerveError
            If the kernel's tables of neighbours cannot be read.
        """
        wanted = {each.name: each for each in targets}
        removed = self._neighbours.take_removed()
        stacked = self._stacked({each.ifindex for each in wanted.values()}, removed)
        refused = {name: why for name, each in wanted.items() if (why := _objection(each, stacked))}
        wanted = {name: each for name, each in wanted.items() if name not in refused}
        unattached = self.table.attach({each.ifindex for each in wanted.values()}, removed)
        for name, each in wanted.items():
            if each.ifindex in unattached:
                refused[name] = unattached[each.ifindex]
        wanted = {name: each for name, each in wanted.items() if name not in refused}
        refused |= self._place(wanted)
        self._neighbours.watch({each.hop for each in self._targets.values()})
        return refused

    def row(self, target: Target, nexthop_id: int) -> int | None:
        """The kernel's row of a member; None while nothing can be sent to it."""
        name = target, nexthop_id
        return self._rows.get(name) if name in self._targets else None

    def alive(self, target: Target, nexthop_id: int) -> bool:
        row = self._rows.get((target, nexthop_id))
        return row is not None and bool(self.table.targets["alive"][row])

    def wait_alive(self, timeout_s: float) -> bool:
        """Wait until every neighbour has answered; False when one has not in time."""
        return self._neighbours.wait_alive([each.hop for each in self._targets.values()], timeout_s)

    @property
    def outdated(self) -> bool:
        """Whether an interface went since `targets` was called: should it be back already, it lacks its hook."""
        return self._neighbours.some_removed

    @property
    def error(self) -> str:
        """Why no pin acts any more; empty while all is well."""
        return self._neighbours.error

    def _stacked(self, interfaces: set[int], removed: set[int]) -> set[int]:
        """Those that lie on another of them: what is redirected there comes by the other, and so round again."""
        if removed or interfaces != self._interfaces:
            pairs = self._neighbours.stacked()
            self._upper = {upper for upper, lower in pairs if upper in interfaces and lower in interfaces}
            self._interfaces = interfaces
        return self._upper

    def _place(self, wanted: Mapping[_Name, PinTarget]) -> dict[_Name, str]:
        """Write the kernel's rows: a row is filled before it is alive, and not used again while a pin names it."""
        refused: dict[_Name, str] = {}
        with self._lock:
            dropped = [row for name, row in self._rows.items() if name not in wanted]
            for field in ("alive", "ifindex"):
                self.table.targets[field][dropped] = 0
            named = {row.target for row in self.table.read() if row.pin_until_ns}
            self._rows = {name: row for name, row in self._rows.items() if name in wanted or row in named}
            used = set(self._rows.values())
            free = (number for number in range(len(self.table.targets)) if number not in used)
            for name, each in wanted.items():
                row = self._rows[name] if name in self._rows else next(free, None)
                if row is None:
                    refused[name] = f"there is room for {len(self.table.targets)} targets"
                    continue
                self._rows[name] = row
                self._fill(row, each)
            self._targets = {name: each for name, each in wanted.items() if name in self._rows}
            self._by_hop = {}
            for name, each in self._targets.items():
                self._by_hop.setdefault(each.hop, []).append(name)
        return refused

    def _fill(self, row: int, target: PinTarget) -> None:
        values = self.table.targets
        address = flow_keys.address(target.gateway)
        gateway = np.frombuffer(address.mapped, np.uint8)
        alive = target.alive and self._neighbours.alive(target.hop)
        wanted: dict[str, Any] = {
            "family": FAMILIES[address.version],
            "nexthop_id": target.nexthop_id,
            "ifindex": target.ifindex,
        }
        same = all(values[name][row] == value for name, value in wanted.items())
        if not same or not np.array_equal(values["gateway"]["bytes"][row], gateway):
            values["alive"][row] = 0
            values["gateway"]["bytes"][row] = gateway
            for name, value in wanted.items():
                values[name][row] = value
        values["alive"][row] = alive

    def _changed(self, hop: Hop, alive: bool) -> None:
        with self._lock:
            for name in self._by_hop.get(hop, ()):
                self.table.targets["alive"][self._rows[name]] = alive and self._targets[name].alive

    # ---- pins ----

    def _values(self, granted: Sequence[Pin]) -> Mapping[str, Sequence[int]]:
        return {"target": [self._rows[pin.target, pin.nexthop_id] for pin in granted]}

    def _refusal(self, wanted: Pin, now_ns: int) -> str:
        if why := self.table.objection(wanted.flow):
            return why
        target = self._targets.get((wanted.target, wanted.nexthop_id))
        if target is None:
            return f"there is no nexthop {wanted.nexthop_id} to pin to"
        if wanted.expires_ns <= now_ns:
            return "its lease has ended already"
        if ":" in wanted.flow.remote and ":" not in target.gateway:  # the other way round is RFC 5549
            return f"{target.gateway} takes no IPv6 packets"
        return "" if self.alive(wanted.target, wanted.nexthop_id) else f"{target.gateway} is not alive"

    # ---- what the kernel has ----

    def read(self) -> dict[FlowKey, PinState]:
        """Every pin in the kernel's table, acting or not."""
        names = {row: name for name, row in self._rows.items()}
        return {
            row.flow: PinState(
                Pin(row.flow, *names.get(row.target, ("", 0)), row.pin_until_ns),
                row.packets,
                row.bytes,
                row.last_ns or None,
            )
            for row in self.table.read()
            if row.pin_until_ns
        }


def _objection(target: PinTarget, stacked: set[int]) -> str:
    if target.ifindex in stacked:
        return "its interface lies on another that is steered"
    if not target.gateway:
        return "it has no gateway, so there is no one neighbour to watch"
    try:
        flow_keys.address(target.gateway)
    except ValueError as error:
        return str(error)
    return ""


MOST_LABELS: Final = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class LabelState:
    """A label as the kernel has it, and what came of it."""

    change: LabelChange
    relabelled: int  # packets that left with another label than they came with


class Labels(Leases[LabelChange]):
    """The relabelled flows of one namespace, on the interfaces that the table is attached to.

    Another IPv6 flow label makes the fabric's own ECMP choose again, without touching a switch. The kernel rewrites the
    label of each packet until the lease ends. Works only where switches hash the label (RFC 6438); a flow may be pinned
    and relabelled at once. While it is relabelled, the kernel's own change of label after a timeout is overwritten.
    """

    _lease = "label_until_ns"

    def _values(self, granted: Sequence[LabelChange]) -> Mapping[str, Sequence[int]]:
        return {"label": [each.label for each in granted]}

    def _refusal(self, wanted: LabelChange, now_ns: int) -> str:
        if why := self.table.objection(wanted.flow):
            return why
        if ":" not in wanted.flow.remote:
            return "IPv4 has no flow labels"
        if not 0 < wanted.label <= MOST_LABELS:
            return f"{wanted.label} is not a flow label (1 to {MOST_LABELS})"
        if wanted.expires_ns <= now_ns:
            return "its lease has ended already"
        return ""

    def read(self) -> dict[FlowKey, LabelState]:
        """Every label in the kernel's table, acting or not."""
        return {
            row.flow: LabelState(LabelChange(row.flow, row.label, row.label_until_ns), row.relabelled)
            for row in self.table.read()
            if row.label_until_ns
        }
