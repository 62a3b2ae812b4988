"""Options of teams, which a daemon sets (teamd) and only root may read: whether flows are hashed over the ports.

Of the network namespace of the calling thread.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection, Mapping
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.netlink.generic import Family
from pytools.kernel.netlink.socket import attribute, attributes

_SET_OPTIONS, _GET_OPTIONS = 1, 2  # TEAM_CMD_OPTIONS_*
_INDEX, _OPTIONS, _OPTION = 1, 2, 1  # TEAM_ATTR_*, and in the second TEAM_ATTR_ITEM_OPTION
_NAME, _TYPE, _DATA = 1, 3, 4  # TEAM_ATTR_OPTION_*
_STRING, _BINARY = 5, 11  # NLA_*
# A balancing daemon moves hashes from port to port as their load changes, and nothing tells of it.
_HASHING: Final = {"mode": b"loadbalance", "lb_tx_method": b"hash"}


def hashing(teams: Collection[int]) -> set[int]:
    """Those of these, by index, that keep each flow on a port; also those whose options cannot be read."""
    try:
        with Family("team") as family:
            return {index for index in teams if _HASHING.items() <= _options(family, index).items()}
    except SwerveError:
        return set(teams)


def set_option(index: int, name: str, value: str | bytes) -> None:
    """Set an option of a team that is text or bytes.

    Raises
    ------
    SwerveError
        If the kernel has no teams, or refuses it: only a team without ports changes its mode.
    """
    kind, data = (_STRING, f"{value}\0".encode()) if isinstance(value, str) else (_BINARY, value)
    option = attribute(_NAME, f"{name}\0".encode()) + attribute(_TYPE, bytes([kind])) + attribute(_DATA, data)
    body = attribute(_INDEX, struct.pack("=I", index)) + attribute(_OPTIONS, attribute(_OPTION, option))
    with Family("team") as family:
        refusal = family.change(_SET_OPTIONS, body, f"setting {name} of team {index}")
    if refusal is not None and refusal.code != errno.ESRCH:  # it is set, and nobody listens to the news of it
        raise refusal


def _options(family: Family, index: int) -> Mapping[str, bytes]:
    """Options of a team that are text, by name; of options by port, one."""
    asked = attribute(_INDEX, struct.pack("=I", index))
    found: dict[str, bytes] = {}
    for part in family.answers(_GET_OPTIONS, asked, f"reading the options of team {index}"):
        for kind, options in attributes(part):
            for _, option in attributes(options) if kind == _OPTIONS else ():
                fields = dict(attributes(option))
                found[fields[_NAME].rstrip(b"\0").decode()] = fields.get(_DATA, b"").rstrip(b"\0")
    return found
