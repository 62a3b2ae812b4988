"""Attaching TC programs: a TCX link where the kernel has it, else a clsact filter; removes only what it made.

Ours come before the programs of others, which may end a packet's way through the hook, as Cilium's do. An unpinned TCX
link vanishes with its process. A clsact filter does not: it carries our name and priority, so that `clean` can find it
after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final, Literal

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall
from pytools.kernel.netlink.socket import NetlinkSocket
from pytools.kernel.netlink.tables import BARE

Direction = Literal["ingress", "egress"]


@dataclass(frozen=True, slots=True)
class Role:
    """What tells the filters of one process from those of the others, and where they are put."""

    name: str
    preference: int
    # before or behind those that are there; `first`: and no program may come before them
    place: Literal["before", "first", "last"]


OBSERVERS: Final = Role("swerve", 20100, "before")
OTHERS: Final = Role("swerve-other", 30000, "last")  # in the place of programs of others: tests, benchmarks
STEERING: Final = Role("swerve-steer", 20050, "first")  # a packet that it moves is observed where it went

_CLSACT_PARENT = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
_TCX = {"ingress": syscall.TCX_INGRESS, "egress": syscall.TCX_EGRESS}
_ETH_P_ALL = 3
_GET_FILTER, _TCMSG = 46, struct.Struct("=BBHiIII")  # RTM_GETTFILTER, struct tcmsg
_GET_HARDWARE, _ETHERNET = 0x8927, 1  # SIOCGIFHWADDR, ARPHRD_ETHER
_made_qdiscs: set[tuple[int, int]] = set()  # (namespace, interface): clsact that was not there before us


class Attachment(Closing):
    """One program on one interface and direction, until closed."""

    def __init__(
        self, interface: str, ifindex: int, direction: Direction, link_fd: int | None, number: int, role: Role
    ) -> None:
        self.interface, self.ifindex, self.direction, self._role = interface, ifindex, direction, role
        self.mechanism = "tcx" if link_fd is not None else "clsact"
        self._link_fd, self._open = link_fd, True
        self._number = number  # of the program, or the handle of the filter

    def is_in_place(self) -> bool:
        """Whether nobody has removed it, as those may who clear an interface's filters, nor come before the first."""
        if self._link_fd is None:
            return _has_filter(self.ifindex, self.direction, self._number, self._role)
        if self._role.place != "first":
            return True
        return syscall.tcx_programs(self.ifindex, _TCX[self.direction])[:1] == [self._number]

    def close(self) -> None:
        """Detach. Does nothing when the interface is already gone."""
        if not self._open:
            return
        self._open = False
        if self._link_fd is not None:
            os.close(self._link_fd)
            return
        with _netlink() as ip:
            _remove_filters(ip, self.ifindex, (self.direction,), self._role)
            _give_up_qdisc(ip, self.ifindex)


def attach_tc(
    prog_fd: int, interface: str, direction: Direction, force_clsact: bool = False, role: Role = OBSERVERS
) -> Attachment:
    """Attach a loaded TC program in the calling thread's network namespace.

    Parameters
    ----------
    force_clsact : bool
        Do not try TCX; for tests of the fallback.
    role : Role
        Whose program it is, which also says where it comes in the order.

    Raises
    ------
    SwerveError
        If there is no such interface, or the kernel refuses.
    """
    try:
        ifindex = socket.if_nametoindex(interface)
    except OSError:
        raise SwerveError(f"there is no interface {interface} here", "`ip link` lists them") from None
    if not force_clsact:
        link_fd = syscall.create_tcx_link(prog_fd, ifindex, _TCX[direction], role.place == "last")
        if link_fd is not None:
            return Attachment(interface, ifindex, direction, link_fd, syscall.program_id(prog_fd), role)
    with _netlink() as ip:
        _ensure_clsact(ip, ifindex, interface)
        handle = _free_handle(ip, ifindex, direction, role)
        try:
            ip.tc(
                "add-filter",
                "bpf",
                ifindex,
                handle,
                fd=prog_fd,
                name=role.name,
                parent=_CLSACT_PARENT[direction],
                prio=role.preference,
                protocol=_ETH_P_ALL,
                classid=1,
                direct_action=True,
            )
        except Exception as error:
            _give_up_qdisc(ip, ifindex)
            raise SwerveError(f"attaching to {interface} {direction} failed: {error}", "run `swerve doctor`") from None
    return Attachment(interface, ifindex, direction, None, handle, role)


def is_readable(interface: str) -> bool:
    """Whether packets have an Ethernet header there or begin with the IP header, as our programs expect.

    Raises
    ------
    OSError
        If there is no such interface in the calling thread's network namespace.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_HARDWARE, struct.pack("16s24x", interface.encode()))
    hardware: int = struct.unpack_from("=H", answer, 16)[0]
    return hardware == _ETHERNET or hardware in BARE


def interfaces() -> dict[str, int]:
    """Index by name of every interface in the calling thread's network namespace."""
    return {name: index for index, name in socket.if_nameindex()}


def clean(role: Role = OBSERVERS) -> list[str]:
    """Remove the clsact filters that a crashed process of this role left in this network namespace.

    Returns
    -------
    list of str
        What was removed, one line each.
    """
    removed = []
    with _netlink() as ip:
        for link in ip.get_links():
            index, name = link["index"], link.get_attr("IFLA_IFNAME")
            for direction in _remove_filters(ip, index, ("ingress", "egress"), role):
                removed.append(f"clsact {direction} filter on {name}")
                _remove_empty_qdisc(ip, index)
    return removed


def _netlink() -> Any:
    from pyroute2 import IPRoute  # only the fallback pays for it

    return IPRoute()


def _ensure_clsact(ip: Any, ifindex: int, interface: str) -> None:
    for qdisc in ip.get_qdiscs(index=ifindex):
        if qdisc.get_attr("TCA_KIND") == "clsact":
            return
    try:
        ip.tc("add", "clsact", ifindex)
    except Exception as error:
        raise SwerveError(f"clsact on {interface} failed: {error}", "run `swerve doctor`") from None
    _made_qdiscs.add((_namespace(), ifindex))


def _namespace() -> int:
    return os.stat("/proc/thread-self/ns/net").st_ino


def _give_up_qdisc(ip: Any, ifindex: int) -> None:
    """Remove the clsact we made once nobody's filter is in it; one that was there before stays."""
    if (_namespace(), ifindex) in _made_qdiscs and _remove_empty_qdisc(ip, ifindex):
        _made_qdiscs.discard((_namespace(), ifindex))


def _ours(ip: Any, ifindex: int, direction: str, role: Role) -> list[tuple[int, int]]:
    """Handles and priorities of a role's filters. Dumps of an interface without clsact are empty or refused."""
    found = []
    with contextlib.suppress(Exception):
        for item in ip.get_filters(index=ifindex, parent=_CLSACT_PARENT[direction]):
            options = item.get_attr("TCA_OPTIONS")
            named = (
                options.get_attr("TCA_BPF_NAME") if options is not None and item.get_attr("TCA_KIND") == "bpf" else None
            )
            if named == role.name and item["info"] >> 16 == role.preference and item["handle"]:
                found.append((item["handle"], item["info"] >> 16))
    return found


def _has_filter(ifindex: int, direction: Direction, handle: int, role: Role) -> bool:
    """Whether the kernel has this filter of a role; asked often, so without pyroute2."""
    info = role.preference << 16 | socket.htons(_ETH_P_ALL)
    request, netlink = _TCMSG.pack(0, 0, 0, ifindex, handle, _CLSACT_PARENT[direction], info), NetlinkSocket()
    try:
        netlink.get_body(request, _GET_FILTER, "a filter")
    except SwerveError:
        return False
    finally:
        netlink.close()
    return True


def _free_handle(ip: Any, ifindex: int, direction: str, role: Role) -> int:
    taken = {handle for handle, _ in _ours(ip, ifindex, direction, role)}
    return next(handle for handle in range(1, 0x8000) if handle not in taken)


def _remove_filters(ip: Any, ifindex: int, directions: tuple[str, ...], role: Role) -> list[str]:
    removed = []
    for direction in directions:
        for handle, preference in _ours(ip, ifindex, direction, role):
            with contextlib.suppress(Exception):  # the interface may go at any time
                ip.tc(
                    "del-filter",
                    "bpf",
                    ifindex,
                    handle,
                    parent=_CLSACT_PARENT[direction],
                    prio=preference,
                    protocol=_ETH_P_ALL,
                )
                removed.append(direction)
    return removed


def _remove_empty_qdisc(ip: Any, ifindex: int) -> bool:
    with contextlib.suppress(Exception):
        if any(list(ip.get_filters(index=ifindex, parent=parent)) for parent in _CLSACT_PARENT.values()):
            return False
        ip.tc("del", "clsact", ifindex)
    return True
