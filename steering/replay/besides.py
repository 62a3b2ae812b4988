"""What a policy has besides rules, over a recording: ports and labels around hidden ways, ports of bonds. Pure.

The machines are those of a dry run, where nothing is learnt of routers either. Bonds are as their interfaces were
recorded. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pytools.signals import WAY_LASTS_NS, Act, Link, PathWay, Signal
from pytools.units import SECOND
from steering.acting import messages
from steering.deciding.engine import Engine
from steering.deciding.link_states import REPORT_LIVES_NS
from steering.flows.bonds import BondEngine
from steering.flows.labels import LabelEngine
from steering.flows.ports import PortEngine
from steering.plan import Bond, moves_back
from steering.policy.model import Policy

_LOOK_NS: Final = 50_000_000  # as the controller's
_READ_NS: Final = SECOND


class RecordedBonds:
    """Active-backup bonds by the records of their ports; the indexes are made up."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}
        self._indexes: dict[str, int] = {}

    def see(self, link: Link) -> None:
        self._links[link.interface] = link

    def read(self, now: int) -> tuple[dict[str, Bond], dict[str, str]]:
        """The bonds, and which of them the packets of an interface leave by."""
        known = [link for link in self._links.values() if link.bond and now - link.at_ns <= REPORT_LIVES_NS]
        ports: dict[str, list[Link]] = {}
        for link in sorted(known, key=lambda link: (len(link.interface), link.interface)):
            if link.port is not None and link.port.mode == "active-backup":
                ports.setdefault(link.bond, []).append(link)
        over = {link.interface: link.bond for link in known if link.port is None and link.bond in ports}
        return {name: self._bond(name, links) for name, links in ports.items()}, over

    def _bond(self, name: str, links: list[Link]) -> Bond:
        ports = {self._index(link.interface): link for link in links}
        told = {index: link.port for index, link in ports.items() if link.port is not None}
        usable = {n for n, port in told.items() if ports[n].up and ports[n].carrier and port.status == "up"}
        why = next((moves_back(ports[n].interface) for n, port in told.items() if port.preferred), "")
        active = next((n for n, port in told.items() if port.active), 0)
        names = tuple((n, link.interface) for n, link in ports.items())
        return Bond(self._index(name), name, active, names, frozenset(usable), why)

    def _index(self, name: str) -> int:
        return self._indexes.setdefault(name, len(self._indexes) + 1)


class Besides:
    """What a dry run would have told."""

    def __init__(self, policy: Policy, engine: Engine) -> None:
        managed = policy.manage.destinations
        self._ports = PortEngine(policy.ports, managed, int, learns=False) if policy.ports is not None else None
        self._labels = LabelEngine(policy.labels, managed, int, learns=False) if policy.labels is not None else None
        self._bonds = BondEngine(policy, policy.bonds, engine) if policy.bonds is not None else None
        self._recorded = RecordedBonds()
        self._look_ns = self._read_ns = 0
        self._ways = self._over_bonds = False  # whether any was recorded

    @property
    def lasts_ns(self) -> int:
        """How long silence may still lead to something; 0 if there is nothing to decide."""
        return WAY_LASTS_NS + SECOND if self._ports or self._labels else SECOND if self._bonds else 0

    def take(self, signal: Signal, now: int) -> None:
        self._ways |= isinstance(signal, PathWay)
        for each in (self._ports, self._labels):
            if each is not None:
                each.take(signal, now)
        if isinstance(signal, Link):
            self._recorded.see(signal)

    def decide(self, host: str, now: int) -> Iterator[Act]:
        if self._ports is not None:
            for way in self._ports.decide(now).acts:
                yield messages.port_act(host, way, "dry_run", now)
        if self._labels is not None:
            for labels in self._labels.decide(now):
                yield messages.label_act(host, labels, "dry_run", now)
        if self._bonds is not None and now >= self._look_ns:
            self._look_ns = now + _LOOK_NS
            yield from self._of_bonds(self._bonds, host, now)

    def _of_bonds(self, engine: BondEngine, host: str, now: int) -> Iterator[Act]:
        if now >= self._read_ns:
            self._read(engine, now)
        engine.look(now)
        if not engine.decide(now):
            return
        self._read(engine, now)
        for act in engine.decide(now):
            engine.pretended(act, now)
            yield messages.bond_act(host, act, "dry_run", now)

    def _read(self, engine: BondEngine, now: int) -> None:
        self._read_ns = now + _READ_NS
        bonds, over = self._recorded.read(now)
        self._over_bonds |= bool(over)
        engine.arrange(bonds, over, now)

    def missing(self) -> list[str]:
        """What cannot be known of these parts, each a sentence."""
        said = []
        parts = [name for name, part in (("ports", self._ports), ("labels", self._labels)) if part is not None]
        if parts and self._ways:
            said.append(f"which connections {' and '.join(parts)} would have led around bad ways is not recorded")
        elif parts:
            said.append(f"no hidden ways (path_way) are in it: {' and '.join(parts)} had nothing to decide by")
        if self._bonds is not None and not self._over_bonds:
            said.append("no active-backup bond that carries a path is in it: bonds had nothing to decide by")
        return said
