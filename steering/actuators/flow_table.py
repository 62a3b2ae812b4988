"""The flows that the kernel steers: steer.c, its hooks, and the table that pins and labels share.

The table lies in memory that the kernel reads at every packet: one row a flow, found by a hash; a lease is renewed by
a store. Nothing outlives the table: its TCX links and maps go with the process, and a clsact filter (before
6.6) is left with leases that end by themselves. Times are CLOCK_MONOTONIC nanoseconds; one thread, in the namespace
whose interfaces are hooked.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from pytools.closing import Closing
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf import contract, syscall
from pytools.kernel.bpf.attach import STEERING, Attachment, attach_tc, clean, is_readable
from pytools.kernel.bpf.compiler_client import Program
from pytools.kernel.bpf.loader import Loaded
from steering.actuators import flow_keys
from steering.actuators.flow_places import Place, Places
from steering.plan import FlowKey

Lease = Literal["pin_until_ns", "label_until_ns", "watch_until_ns"]

LENT: Final = ("probe_settings", "probe_paths")  # the agent's maps that the kernel's part reads
_FUNCTION = "steer_egress"
_SEEN: Final = contract.constant("SWERVE_STEER_SEEN")

PROGRAM: Final = Program("steer.c", (_FUNCTION,))


@dataclass(frozen=True, slots=True)
class Row:
    flow: FlowKey
    pin_until_ns: int  # 0: not pinned
    label_until_ns: int  # 0: not relabelled
    target: int  # row in the table of targets
    label: int
    packets: int  # that left by the target while it was pinned
    bytes: int
    last_ns: int
    relabelled: int  # packets


class FlowTable(Closing):
    """steer.c at work.

    Parameters
    ----------
    loaded : Loaded
        What came of `PROGRAM`; taken over.
    force_clsact : bool
        Do not try TCX; for tests of the fallback.

    Raises
    ------
    CapabilityError
        If the program could not be loaded.
    """

    def __init__(self, loaded: Loaded, force_clsact: bool = False) -> None:
        self._force_clsact = force_clsact
        self._closing = contextlib.ExitStack()
        self._closing.callback(loaded.close)
        self._hooks: dict[int, Attachment] = {}
        self._wanted: dict[str, frozenset[int]] = {}
        try:
            if _FUNCTION not in loaded.programs:
                why = "; ".join(f"{name}: {each}" for name, each in loaded.failed.items())
                raise CapabilityError(f"flows cannot be steered: {why}", "`swerve doctor` says what is missing")
            self.program_fd = loaded.programs[_FUNCTION]  # the program
            if force_clsact or not syscall.has_tcx(self.program_fd):
                clean(STEERING)  # what a killed predecessor left
            self._counters = loaded.map("steer_counters")
            # the maps of these names (swerve.h) in this process's memory, as the kernel reads them at
            # each packet
            self.settings, self.sets, self.rows, self.targets, self.standbys, self.holds = (
                self._closing.enter_context(loaded.mapped(f"steer_{name}")).records
                for name in ("settings", "sets", "rows", "targets", "standbys", "holds")
            )
            # stand-bys and holds by destination
            self.prefixes, self.hold_prefixes = (loaded.map(f"steer_{name}") for name in ("prefixes", "hold_prefixes"))
            # an entry of the agent's maps that `lent` are to hold
            self.path_record, self.settings_record = (
                loaded.map(name).value for name in ("probe_paths", "probe_settings")
            )
            # where the agent's maps are put in, in the order of `LENT`
            self.lent = [loaded.map(f"lent_{name}") for name in LENT]
        except BaseException:
            self._closing.close()
            raise
        self._seed = int.from_bytes(os.urandom(8))  # so that nobody can fill a set on purpose
        self.settings["seed"] = self._seed
        self._places = Places(len(self.rows), *self.sets["entries"].shape)

    def close(self) -> None:
        """Take the hooks off, then the table away: all flows go as they are routed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._closing.close)
            for hook in self._hooks.values():
                stack.callback(hook.close)
            self._hooks = {}

    # ---- hooks ----

    @property
    def attached(self) -> frozenset[int]:
        """Interfaces whose packets are looked at."""
        return frozenset(self._hooks)

    def attach(self, interfaces: Iterable[int], renewed: Iterable[int] = (), by: str = "") -> dict[int, str]:
        """Look at what leaves by these interfaces, and by no others but those of others who asked.

        Parameters
        ----------
        interfaces : iterable of int
            Indexes in this namespace.
        renewed : iterable of int
            Those that went and may have come back under the same index: their hooks went with them.
        by : str
            Who asks.

        Returns
        -------
        dict of int to str
            Those that could not be attached to, and why.
        """
        self._wanted[by], failed = frozenset(interfaces), {}
        wanted = frozenset[int]().union(*self._wanted.values())
        for index in (self._hooks.keys() - wanted) | (self._hooks.keys() & set(renewed)):
            self._hooks.pop(index).close()
        for index in sorted(wanted - self._hooks.keys()):
            try:
                self._hooks[index] = self._attached(index)
            except OSError:
                failed[index] = f"there is no interface {index}"
            except SwerveError as error:
                failed[index] = str(error)
        return failed

    def mend(self) -> None:
        """Attach again where others removed our hook or came before it, as an agent's observers do when it starts."""
        lost = [index for index, hook in self._hooks.items() if not hook.is_in_place()]
        if lost:
            by, interfaces = next(iter(self._wanted.items()))
            self.attach(interfaces, lost, by)

    def _attached(self, index: int) -> Attachment:
        name = socket.if_indextoname(index)
        if not is_readable(name):
            raise SwerveError(f"{name} has no Ethernet header and is not a tunnel, so its flows cannot be steered")
        return attach_tc(self.program_fd, name, "egress", self._force_clsact, STEERING)

    # ---- leases ----

    def objection(self, flow: FlowKey) -> str:
        """Why a flow cannot be steered; empty when it can."""
        return flow_keys.objection(flow)

    def grant(self, lease: Lease, flows: Sequence[FlowKey], until_ns: Sequence[int], **values: Sequence[int]) -> None:
        """Write leases and the values that they are for: all of them or none. No flow is named twice.

        Raises
        ------
        RefusedError
            If there is no room for all: nothing is changed, and no other flow makes room.
        SwerveError
            If the kernel refuses.
        """
        places = [self._places.get(flow) for flow in flows]
        if not self._places.room_for(places.count(None)):
            self.sweep(time.monotonic_ns())
            places = [self._places.get(flow) for flow in flows]
        new = [flow for flow, place in zip(flows, places, strict=True) if place is None]
        keys = flow_keys.encoded(new, self.rows.dtype["flow"])
        made = self._places.take(new, flow_keys.hashes(keys, self._seed).tolist())
        fresh = [place.row for place in made]
        self.rows[fresh] = 0
        self.rows["flow"][fresh] = keys
        remaining = iter(made)
        rows = [(place or next(remaining)).row for place in places]
        for name, each in values.items():
            self.rows[name][rows] = each
        self.rows[lease][rows] = until_ns
        if made:
            self.settings["flows"] = len(self._places)
            self._show(made, [place.entry for place in made])

    def _show(self, places: Sequence[Place], entries: Sequence[int] | int) -> None:
        """Let the kernel find rows, which are whole by now, or no more (0); a row is not touched before that is so."""
        _order()
        self.sets["entries"][[place.set for place in places], [place.way for place in places]] = entries
        _order()

    def renew(self, lease: Lease, flows: Sequence[FlowKey], until_ns: Sequence[int]) -> set[FlowKey]:
        """Let leases end at another moment; returns the flows that have none, which get none."""
        rows, ends, missing = [], [], set()
        for flow, until, row in zip(flows, until_ns, self._leased_rows(lease, flows), strict=True):
            if row is None:
                missing.add(flow)
            else:
                rows.append(row)
                ends.append(until)
        self.rows[lease][rows] = ends
        return missing

    def end(self, lease: Lease, flows: Iterable[FlowKey]) -> set[FlowKey]:
        """End leases now; returns the flows that had one."""
        asked = list(dict.fromkeys(flows))
        had = {flow: row for flow, row in zip(asked, self._leased_rows(lease, asked), strict=True) if row is not None}
        self.rows[lease][list(had.values())] = 0
        self._drop(self._ended(had, 0))
        return set(had)

    def sweep(self, now_ns: int) -> set[FlowKey]:
        """Forget the flows whose leases have all ended; returns them."""
        ended = self._ended({flow: self._places[flow].row for flow in self._places}, now_ns)
        self._drop(ended)
        return set(ended)

    def _leased_rows(self, lease: Lease, flows: Sequence[FlowKey]) -> list[int | None]:
        """Each flow's row, if it has such a lease."""
        rows = [-1 if (place := self._places.get(flow)) is None else place.row for flow in flows]
        has = (self.rows[lease][rows] != 0).tolist()
        return [row if row >= 0 and leased else None for row, leased in zip(rows, has, strict=True)]

    def _ended(self, rows: Mapping[FlowKey, int], now_ns: int) -> list[FlowKey]:
        """Those of which no lease lasts beyond a moment."""
        numbers = list(rows.values())
        lasting = np.any([self.rows[lease][numbers] > now_ns for lease in get_args(Lease)], axis=0)
        return [flow for flow, lasts in zip(rows, lasting.tolist(), strict=True) if not lasts]

    def _drop(self, flows: Sequence[FlowKey]) -> None:
        if flows:
            self._show([self._places[flow] for flow in flows], 0)
            self._places.give_back(flows)
            self.settings["flows"] = len(self._places)

    # ---- what the kernel has ----

    def read(self) -> list[Row]:
        """All flows that the kernel finds, with what came of their leases."""
        entries = self.sets["entries"].reshape(-1)
        rows = self.rows[(entries[entries != 0] & np.uint64(0xFFFFFFFF)).astype(np.intp)]
        names = ("pin_until_ns", "label_until_ns", "target", "label", "packets", "bytes", "last_ns", "relabelled")
        columns = zip(*(rows[name].tolist() for name in names), strict=True)
        return [Row(flow_keys.decoded(key), *values) for key, values in zip(rows["flow"], columns, strict=True)]

    def seen(self, flows: Iterable[FlowKey]) -> dict[FlowKey, int]:
        """The flow labels that packets of flows come with; of those that have a row, and of which one has come."""
        rows = {flow: place.row for flow in flows if (place := self._places.get(flow)) is not None}
        found = zip(rows, self.rows["seen"][list(rows.values())].tolist(), strict=True)
        return {flow: seen & ~_SEEN for flow, seen in found if seen}

    def counters(self) -> dict[str, int]:
        """Packets since the program was loaded: what was done with them, and why nothing was."""
        totals = self._counters.read_percpu_sum()
        return {name: int(value) for name, value in zip(contract.counters("steer"), totals, strict=True)}


def _order() -> None:
    """Keep stores before and after apart, as the kernel sees them. x86 does; elsewhere the scheduler is a barrier."""
    if platform.machine() != "x86_64":
        os.sched_yield()
