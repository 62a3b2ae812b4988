"""What the operator ordered, whatever is measured: nexthops out of use, targets that are left as they are. Pure.

`until_unix_ns` is CLOCK_REALTIME: an order may outlive a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from steering.plan import Group, canonical


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One order."""

    kind: Literal["drain", "hold"]
    interface: str = ""  # drain: what leaves by it
    gateway: str = ""  # drain: only through this gateway; empty for any
    target: str = ""  # hold: this target; drain: only in this target; empty for all
    until_unix_ns: int = 0  # 0: until it is taken back
    by: str = ""  # who ordered it
    why: str = ""


class Overrides(msgspec.Struct, frozen=True):
    """All orders in force."""

    orders: tuple[Override, ...] = ()

    def at(self, unix_ns: int) -> Overrides:
        """Those that have not run out."""
        left = tuple(order for order in self.orders if not 0 < order.until_unix_ns <= unix_ns)
        return self if left == self.orders else Overrides(left)

    def held(self, group: Group) -> str:
        """Why a target is left as it is; empty when it is not."""
        for order in self.orders:
            if order.kind == "hold" and order.target in ("", group.target, group.beside):
                return f"the operator holds it{_because(order)}"
        return ""

    def drained(self, group: Group) -> Mapping[int, str]:
        """Members that are to be out of use, and why."""
        return {
            member.nexthop_id: f"the operator drained {member.name}{_because(order)}"
            for order in self.orders
            for member in group.members
            if order.kind == "drain"
            and order.target in ("", group.target, group.beside)
            and order.interface == member.interface
            and canonical(order.gateway) in ("", member.gateway)
        }


def _because(order: Override) -> str:
    return f" ({order.why})" if order.why else ""


NONE: Final = Overrides()
