"""Our rules, which put our tables in force: one directly above each rule of theirs that leads to a steered table.

One thread; the netlink socket's namespace decides.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Final

from pytools.errors import RefusedError
from pytools.kernel.leftovers import is_our_rule
from pytools.kernel.netlink.routing import MAIN_TABLE, PROTOCOL, Netlink, Rule
from pytools.kernel.netlink.tables import rule_like, rule_of, rule_selects_all
from steering.actuators.mirror import Numbers
from steering.actuators.objects import owner_name
from steering.actuators.owners_routes import View, ViewKey

_LAST: Final = 32_767  # priority
_NOWHERE: Final = "swerve-none"  # no interface


class Switch:
    """The rules of all views.

    Parameters
    ----------
    numbers : Numbers
        Of our tables.
    priority : int or None
        Of the rule above that of table `main`; None: one less than theirs.
    """

    def __init__(self, netlink: Netlink, numbers: Numbers, priority: int | None) -> None:
        self._netlink, self._numbers, self._priority = netlink, numbers, priority
        self._on: dict[ViewKey, list[bytes]] = {}

    def read(self, rules: Iterable[Rule], views: Iterable[ViewKey]) -> list[ViewKey]:
        """Take note of the rules that the kernel has; the views that have any, also those that are no more."""
        places = {(key[0], self._numbers.table(key)): key for key in views}
        self._on = {}
        for rule in rules:
            if is_our_rule(rule):
                key = places.get((rule.family, rule.table), (rule.family, 0, None))
                self._on.setdefault(key, []).append(rule.body)
        return list(self._on)

    def put(self, key: ViewKey, view: View | None) -> None:
        """Have the rules of a view; none where none is given.

        Raises
        ------
        NetlinkError
            If the kernel refuses.
        """
        wanted = self._wanted(view) if view is not None else []
        have = self._on.get(key, [])
        fresh = [body for body in wanted if rule_of(body) not in map(rule_of, have)]
        stale = [body for body in have if rule_of(body) not in map(rule_of, wanted)]
        for error in (*self._netlink.make_rules(fresh), *self._netlink.drop_rules(stale)):
            if error is not None and error.code not in (errno.EEXIST, errno.ENOENT):
                raise error
        self._on[key] = wanted

    def _wanted(self, view: View) -> list[bytes]:
        """One above each of theirs; one that shares a priority with another comes after that one."""
        found = []
        for each in view.selectors:
            of_main = view.table == MAIN_TABLE and rule_selects_all(rule_of(each.body))
            priority = self._priority if of_main and self._priority is not None else each.priority - 1
            number = self._numbers.table(view.key)
            found.append(rule_like(each.body, priority, number, PROTOCOL, each.iif, each.oif))
        return found

    def touch(self, view: ViewKey) -> None:
        """Have live IPv6 flows look their routes up again, by a rule that holds for no packet."""
        nothing = rule_like(bytes([socket.AF_INET6, *bytes(11)]), _LAST, self._numbers.table(view), PROTOCOL, _NOWHERE)
        self._netlink.make_rules([nothing])
        self._netlink.drop_rules([nothing])

    def forget(self) -> None:
        self._on.clear()


class TableUsers:
    """Who uses the tables that would be ours. Each is looked at once: what comes there later is known to be ours."""

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
