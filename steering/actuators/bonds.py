"""The active port of active-backup bonds: read, and selected by netlink. One thread, in the namespace of the bonds."""

from __future__ import annotations

from typing import Final, NamedTuple

from pytools.kernel.netlink.bonds import ACTIVE_BACKUP, selecting
from pytools.kernel.netlink.links import LinkRow, Tables
from pytools.kernel.netlink.routing import Netlink
from steering.plan import Bond

_NEW_LINK: Final = 16  # RTM_NEWLINK


class Bonds(NamedTuple):
    """All active-backup bonds."""

    bonds: dict[str, Bond]
    over: dict[str, str]  # which of them the packets of an interface leave by: the bond itself, a VLAN on it


def read(netlink: Netlink) -> Bonds:
    """The active-backup bonds of this namespace."""
    tables = Tables(netlink)
    lowers = tables.stack().lowers
    rows = tables.links()
    bonds = {
        index: _bond(row, [rows[port] for port in sorted(lowers.get(index, ())) if port in rows])
        for index, row in rows.items()
        if row.bond is not None and row.bond.mode == ACTIVE_BACKUP
    }
    over = {}
    for index, row in rows.items():
        below = index
        while below not in bonds and len(under := lowers.get(below, set())) == 1:
            [below] = under
        if below in bonds:
            over[row.name] = bonds[below].name
    return Bonds({bond.name: bond for bond in bonds.values()}, over)


def _bond(row: LinkRow, ports: list[LinkRow]) -> Bond:
    assert row.bond is not None
    names = {port.index: port.name for port in ports}
    usable = (each.index for each in ports if each.up and each.carrier and each.port and each.port.status == "up")
    moves_back = ""
    if row.bond.primary and row.bond.reselect == "always":
        primary = names.get(row.bond.primary, f"interface {row.bond.primary}")
        moves_back = f"its primary is {primary} with primary_reselect always: the bond itself would select that again"
    return Bond(row.index, row.name, row.bond.active, tuple(names.items()), frozenset(usable), moves_back)


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
