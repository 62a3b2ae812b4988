"""Who else uses the numbers that are ours: tables, and the priority of a rule.

One thread; the netlink socket's namespace decides.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytools.errors import RefusedError
from pytools.kernel.leftovers import is_our_rule
from pytools.kernel.netlink.routing import PROTOCOL, Netlink, Rule
from steering.actuators.mirror import Numbers
from steering.actuators.objects import owner_name
from steering.actuators.owners_routes import View, ViewKey


class TableUsers:
    """Who uses the tables that would be ours. Each is looked at once: what comes there later is known to be ours.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    numbers : Numbers
        Of our tables.
    """

    def __init__(self, netlink: Netlink, numbers: Numbers) -> None:
        self._netlink, self._numbers = netlink, numbers
        self._known: dict[ViewKey, str] = {}

    def of(self, view: View) -> str:
        """Who uses the one above a view, in words; empty for nobody."""
        if view.key not in self._known:
            number = self._numbers.table(view.key)
            theirs = [route for route in self._netlink.routes(view.family, number) if route.protocol != PROTOCOL]
            self._known[view.key] = (
                f"routing table {number} is used by protocol {owner_name(theirs[0].protocol)} ({theirs[0].destination})"
                if theirs
                else ""
            )
        return self._known[view.key]


def refuse(views: Iterable[View], users: TableUsers, rules: Iterable[Rule], priority: int | None) -> None:
    """Refuse to start where others use our numbers.

    Raises
    ------
    RefusedError
        If they do, and who.
    """
    for view in views:
        if why := users.of(view):
            raise RefusedError(why, "set manage.table in the policy to a free number")
    for rule in rules:
        if rule.priority == priority and not is_our_rule(rule):
            why = f"rule priority {priority} is used by protocol {owner_name(rule.protocol)} (table {rule.table})"
            raise RefusedError(why, "set manage.priority in the policy to a free number, or leave it out")
