"""fq on interfaces that have the queue discipline which the kernel gives by itself; taken off, that one is back.

Ours are known by their handle, so whoever removes them needs to remember nothing. One with a handle of its own was
chosen by somebody, and is never replaced. One thread, in the namespace of the interfaces.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Final, Literal

from pytools.kernel.netlink.links import QdiscRow, Tables
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.socket import CREATE, EXCLUSIVE, NetlinkError, attribute

Queue = Literal["fq", "ours", "default", "other"]

_NEW_QDISC, _DEL_QDISC = 36, 37
_HEADER: Final = struct.Struct("=BxxxiIII")  # struct tcmsg
_ROOT: Final = 0xFFFFFFFF
_HANDLE: Final = 0x5E77_0000
_KIND, _OPTIONS = 1, 2  # TCA_*
_FLOW_LIMIT, _RATE_ENABLE = 2, 5  # TCA_FQ_*
# Held packets of one flow that wait at once; its default, 100, is little for UDP and for what is forwarded.
_FLOW_PACKETS: Final = 1000


def queues(netlink: Netlink, interfaces: set[int]) -> dict[int, tuple[Queue, str]]:
    """What packets of each interface wait in, by index: whether that keeps their departure times, and its kind."""
    rows = [row for row in Tables(netlink).qdiscs(interfaces) if not row.is_ingress]
    return {index: _judged([row for row in rows if row.index == index]) for index in interfaces}


def _judged(rows: Sequence[QdiscRow]) -> tuple[Queue, str]:
    root = next((row for row in rows if row.parent == _ROOT), None)
    if root is None:
        return "default", "none"
    leaves = [row for row in rows if row is not root]
    keeps = root.kind == "fq" or (root.kind == "mq" and bool(leaves) and all(row.kind == "fq" for row in leaves))
    if root.handle == _HANDLE and keeps:
        return "ours", root.kind
    if keeps:
        return "fq", root.kind
    chosen = root.handle or any(row.handle for row in leaves)
    return "other" if chosen else "default", root.kind


def install(netlink: Netlink, index: int, kind: str) -> None:
    """Put fq on an interface that has the kernel's own queue discipline, of this kind; below mq, on each of its queues.

    It does not pace connections: those that pace themselves go on doing so, also when it is gone.

    Raises
    ------
    SwerveError
        If the kernel refuses, as without fq, or when somebody was faster.
    """
    what = f"putting fq on interface {index}"
    if kind != "mq":
        _change(netlink, [_fq(index, _HANDLE, _ROOT)], CREATE | EXCLUSIVE, what)
        return
    body = _HEADER.pack(0, index, _HANDLE, _ROOT, 0) + attribute(_KIND, b"mq\0")
    _change(netlink, [body], CREATE | EXCLUSIVE, what)
    leaves = [row for row in Tables(netlink).qdiscs({index}) if row.parent >> 16 == _HANDLE >> 16]
    try:
        _change(netlink, [_fq(index, 0, row.parent) for row in leaves], CREATE | EXCLUSIVE, what)
    except NetlinkError:
        remove(netlink, {index})
        raise


def there(netlink: Netlink) -> bool:
    return any(_is_ours(row) for row in Tables(netlink).qdiscs(None))


def _is_ours(row: QdiscRow) -> bool:
    return row.handle == _HANDLE and row.parent == _ROOT


def remove(netlink: Netlink, interfaces: set[int] | None = None) -> dict[int, str]:
    """Take ours off these interfaces, or off all.

    Returns
    -------
    dict of int to str
        Those that it was taken off, by index, and why not; empty when it was.
    """
    ours = [row.index for row in Tables(netlink).qdiscs(interfaces) if _is_ours(row)]
    bodies = [_HEADER.pack(0, index, _HANDLE, _ROOT, 0) for index in ours]
    refusals = netlink.socket.change_bodies(bodies, _DEL_QDISC, 0, "taking fq off an interface")
    gone = (errno.ENODEV, errno.ENOENT)
    return {
        index: "" if why is None or why.code in gone else str(why) for index, why in zip(ours, refusals, strict=True)
    }


def _fq(index: int, handle: int, parent: int) -> bytes:
    options = attribute(_FLOW_LIMIT, struct.pack("=I", _FLOW_PACKETS)) + attribute(_RATE_ENABLE, struct.pack("=I", 0))
    header = _HEADER.pack(0, index, handle, parent, 0)
    return header + attribute(_KIND, b"fq\0") + attribute(_OPTIONS, options)


def _change(netlink: Netlink, bodies: Sequence[bytes], flags: int, what: str) -> None:
    for refusal in netlink.socket.change_bodies(bodies, _NEW_QDISC, flags, what):
        if refusal is not None:
            raise refusal
