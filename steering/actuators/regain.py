"""Steered groups that went with their links although nexthops that we had drained are left: made again at the end.

The kernel deletes a group with its last nexthop. Had nobody drained any, the group would still be there, over those
that are left, and so would its routes: whoever undoes makes it so, before the backup routes go. One thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytools.kernel.netlink import Netlink
from pytools.kernel.netlink_watch import Heard
from steering.actuators import remaking, restore
from steering.actuators.memory_file import MemoryFile
from steering.actuators.objects import read
from steering.actuators.route_names import group_number
from steering.plan import Group, Target, Weights, kind_of, weights_of


def regain(
    netlink: Netlink, folder: Path, scope: str, in_force: Mapping[Target, Sequence[Weights]]
) -> tuple[list[Group], list[str]]:
    """Make such groups and their routes again.

    Parameters
    ----------
    netlink : Netlink
        A socket in the namespace.
    folder, scope : Path, str
        Where the controller noted what it keeps, and of which boot and namespace that has to be.
    in_force : mapping of Target to sequence of Weights
        What each target may have had of ours when it was last there (`journal.Contents.last_in_force`).

    Returns
    -------
    list of Group
        Those that are there again, with their weights as they were read back.
    list of str
        What was done, and what could not be, in words.

    Raises
    ------
    SwerveError
        If the kernel cannot be read.
    """
    groups = {target: weights for target, weights in in_force.items() if kind_of(target) == "nexthop_group"}
    if not groups:
        return [], []
    before = MemoryFile(folder, scope).load().narrowed(lambda first: first.target in groups)
    objects = read(netlink, None)
    memory = restore.remember(before, before.first.values(), objects, Heard(changed=True, missed=True), groups)
    told, failed = remaking.make_again(netlink, memory, objects, memory.lost_nexthops)
    there = read(netlink, None).groups if told else {}
    again = [
        replace(first, current=weights_of((member.nexthop_id, member.weight) for member in there[number].members))
        for target, first in memory.lost.items()
        if (number := group_number(target)) in there
    ]
    return again, told + failed
