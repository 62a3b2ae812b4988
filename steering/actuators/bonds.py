"""The active port of active-backup bonds: read, and selected by netlink. One thread, in the namespace of the bonds."""

from __future__ import annotations

from typing import Final, NamedTuple

from pytools.kernel.netlink.bonds import ACTIVE_BACKUP, ALWAYS, selecting
from pytools.kernel.netlink.links import LinkRow, Tables
from pytools.kernel.netlink.routing import Netlink
from steering.plan import Bond, moves_back

_NEW_LINK: Final = 16  # RTM_NEWLINK


class Bonds(NamedTuple):
    bonds: dict[str, Bond]
    over: dict[str, str]  # which of them the packets of an interface leave by: the bond itself, a VLAN on it


def read(netlink: Netlink) -> Bonds:
    """The active-backup bonds of this namespace."""
    tables = Tables(netlink)
    stack, rows = tables.stack(), tables.links()
    bonds = {
        index: _bond(row, [rows[port] for port in sorted(stack.lowers.get(index, ())) if port in rows])
        for index, row in rows.items()
        if row.bond is not None and row.bond.mode == ACTIVE_BACKUP
    }
    named = {bond.name: bond for bond in bonds.values()}
    devices = {row.name: stack.devices.get(index, "") for index, row in rows.items() if row.port is None}
    return Bonds(named, {name: device for name, device in devices.items() if device in named})


def _bond(row: LinkRow, ports: list[LinkRow]) -> Bond:
    assert row.bond is not None
    names = {port.index: port.name for port in ports}
    usable = (each.index for each in ports if each.up and each.carrier and each.port and each.port.status == "up")
    primary = row.bond.primary if row.bond.reselect == ALWAYS else 0
    why = moves_back(names.get(primary, f"interface {primary}")) if primary else ""
    return Bond(row.index, row.name, row.bond.active, tuple(names.items()), frozenset(usable), why)


def select(netlink: Netlink, bond: int, port: int) -> None:
    """Make a port the active one of a bond; both by index.

    Raises
    ------
    SwerveError
        If the kernel refuses, as for a port without a link.
    """
    what = f"selecting the active port of interface {bond}"
    [refusal] = netlink.socket.change_bodies([selecting(bond, port)], _NEW_LINK, 0, what)
    if refusal is not None:
        raise refusal
