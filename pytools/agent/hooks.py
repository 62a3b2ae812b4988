"""Attaches the agent's programs to the interfaces that carry paths, as these come and go.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's, in the namespace that it measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.bpf import attach
from pytools.kernel.bpf.loader import Loaded
from pytools.sources.programs import (
    OBSERVE_EGRESS,
    OBSERVE_INGRESS,
    PROBE_EGRESS,
    PROBE_INGRESS,
    SAMPLE_EGRESS,
    SAMPLE_INGRESS,
    TCP_EGRESS,
    TCP_INGRESS,
)
from pytools.sources.source import Source

_HOOKS_INTERVAL_NS = 1_000_000_000
_TABLES: Final = ("observers", "probe_observers")  # those of probe.c are its own: it is compiled by itself
_Hook = tuple[str, attach.Direction]
_TOGETHER: Final[tuple[_Hook, ...]] = ((OBSERVE_EGRESS, "egress"), (OBSERVE_INGRESS, "ingress"))
# What each of the two hands packets to, in the order of the table in bpf/observe/chain.h.
_PARTS: Final[tuple[tuple[_Hook, ...], ...]] = (
    ((PROBE_EGRESS, "egress"), (TCP_EGRESS, "egress"), (SAMPLE_EGRESS, "egress")),
    ((PROBE_INGRESS, "ingress"), (TCP_INGRESS, "ingress"), (SAMPLE_INGRESS, "ingress")),
)


def link_observers(loaded: Loaded) -> tuple[_Hook, ...]:
    """Have the observers that were loaded call each other; returns what is then to be attached.

    Where this kernel refused one of the two, its parts are to be attached in its place, in their order.
    """
    wanted: list[_Hook] = []
    tables = [loaded.map(name) for name in _TABLES if loaded.has_map(name)]
    for side, (together, parts) in enumerate(zip(_TOGETHER, _PARTS, strict=True)):
        there = [(place, part) for place, part in enumerate(parts) if part[0] in loaded.programs]
        if together[0] not in loaded.programs:
            wanted += [part for _, part in there]
            continue
        wanted.append(together)
        for table in tables:
            for place, (name, _) in there:
                table.update(side * len(parts) + place, loaded.programs[name])
    return tuple(wanted)


class Hooks(Source):
    """Keeps our programs attached to the interfaces that carry paths, as these come and go."""

    def __init__(self, loaded: Loaded, interfaces: Callable[[], Iterable[str]]) -> None:
        self._programs, self._interfaces = loaded.programs, interfaces
        self._hooks = link_observers(loaded)
        whole = [parts for (name, _), parts in zip(_TOGETHER, _PARTS, strict=True) if name in loaded.programs]
        # programs that are called by those that are attached: the kernel counts no runs of theirs
        self.called: Final = frozenset(name for parts in whole for name, _ in parts)
        self._attached: dict[tuple[str, str], attach.Attachment] = {}
        self.failed: dict[str, str] = {}

    def tick(self, now_ns: int) -> int:
        """Attach what is missing, or was removed by others; what cannot be is named in `failed` and tried again."""
        indexes = attach.interfaces()
        wanted = set(self._interfaces())
        for (interface, hook), attachment in list(self._attached.items()):
            there = interface in wanted and indexes.get(interface) == attachment.ifindex
            if not there or not attachment.is_in_place():
                self._attached.pop((interface, hook)).close()
        for interface in sorted(wanted & set(indexes)):
            for hook, direction in reversed(self._hooks):  # each comes before the last one
                if (interface, hook) not in self._attached:
                    self._attach(interface, hook, direction)
        return now_ns + _HOOKS_INTERVAL_NS

    def _attach(self, interface: str, hook: str, direction: attach.Direction) -> None:
        name = f"{hook} on {interface}"
        try:
            self._attached[interface, hook] = attach.attach_tc(self._programs[hook], interface, direction)
            self.failed.pop(name, None)
        except SwerveError as error:
            self.failed[name] = str(error)

    def attached(self) -> int:
        """How many interfaces have at least one of our programs."""
        return len({interface for interface, _ in self._attached})

    def close(self) -> None:
        for attachment in reversed(self._attached.values()):
            with contextlib.suppress(SwerveError):
                attachment.close()
        self._attached.clear()
