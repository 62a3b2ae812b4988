"""What the operator ordered, whatever is measured: nexthops out of use, targets that are left as they are. Pure.

An order ends by CLOCK_BOOTTIME, which a suspend and a step of the wall clock do not shift. After a reboot, which starts
that clock again, it ends by the wall clock, and at the latest when the host has been up for as long as was ordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from steering.plan import Group, canonical


class Moment(msgspec.Struct, frozen=True):
    unix_ns: int  # CLOCK_REALTIME
    boot_ns: int  # CLOCK_BOOTTIME
    boot_id: str


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["drain", "hold"]
    interface: str = ""  # drain: what leaves by it
    gateway: str = ""  # drain: only through this gateway; empty for any
    target: str = ""  # hold: this target; drain: only in this target; empty for all
    until_unix_ns: int = 0  # as the clocks stood when it was ordered; 0: until it is taken back
    by: str = ""  # who ordered it
    why: str = ""
    until_boot_ns: int = 0
    boot_id: str = ""  # of the boot in which it was ordered
    lasts_ns: int = 0  # for how long it was ordered

    def lasting(self, for_ns: int, now: Moment) -> Override:
        """The same, from now on for so long; 0 for without end."""
        if not for_ns:
            return self
        return msgspec.structs.replace(
            self,
            until_unix_ns=now.unix_ns + for_ns,
            until_boot_ns=now.boot_ns + for_ns,
            boot_id=now.boot_id,
            lasts_ns=for_ns,
        )

    def left_ns(self, now: Moment) -> int | None:
        """How much longer it holds, at most 0 when it is over; None for without end."""
        if not self.until_unix_ns:
            return None
        if self.boot_id == now.boot_id:
            return self.until_boot_ns - now.boot_ns
        by_the_wall = self.until_unix_ns - now.unix_ns
        return min(by_the_wall, self.lasts_ns - now.boot_ns) if self.boot_id else by_the_wall


class Overrides(msgspec.Struct, frozen=True):
    orders: tuple[Override, ...] = ()

    def at(self, now: Moment) -> Overrides:
        """Those that have not run out."""
        left = tuple(order for order in self.orders if (left := order.left_ns(now)) is None or left > 0)
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
