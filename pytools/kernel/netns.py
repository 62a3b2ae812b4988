"""Entering a network namespace in-process: `ip netns exec` would hide bpffs and tracefs.

The namespace is a property of the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from pytools.errors import CapabilityError, UsageError

_CLONE_NEWNET = 0x40000000
_NAMED = "/run/netns"
_SO_NETNS_COOKIE = 71
_libc = ctypes.CDLL(None, use_errno=True)


def enter(name: str) -> None:
    """Move the calling thread into a named namespace, for good.

    Raises
    ------
    UsageError
        If there is no such namespace.
    CapabilityError
        If the process may not enter it.
    """
    try:
        fd = os.open(f"{_NAMED}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"network namespace {name}: {error.strerror}", "`ip netns` lists them") from None
    _enter(fd, name)


def enter_of(pid: int) -> None:
    """Move the calling thread into the namespace of a process, for good.

    Raises
    ------
    CapabilityError
        If the process is gone, or its namespace may not be entered.
    """
    what = f"of process {pid}"
    try:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CapabilityError(f"cannot enter the network namespace {what}: {error.strerror}", "run as root") from None
    _enter(fd, what)


def _enter(fd: int, what: str) -> None:
    """Move the calling thread into the namespace of a descriptor, and close that."""
    try:
        _setns(fd, what)
    finally:
        os.close(fd)


@contextlib.contextmanager
def inside(name: str | None) -> Iterator[None]:
    """Be in a named namespace for a while; None stays where the thread is."""
    if name is None:
        yield
        return
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(name)
        try:
            yield
        finally:
            _setns(before, "the one before")
    finally:
        os.close(before)


def cookie() -> int:
    """What tells this thread's network namespace from others in the kernel; 0, which is none, before Linux 5.14."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as any_one:
        return int.from_bytes(any_one.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8), sys.byteorder)
    return 0


def scope() -> str:
    """This boot and this thread's network namespace, by numbers that are never used twice."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known = cookie()
    return f"{boot}/" + (f"cookie:{known}" if known else f"inode:{os.stat('/proc/thread-self/ns/net').st_ino}")


def _setns(fd: int, name: str) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise CapabilityError(
            f"cannot enter network namespace {name}: {os.strerror(ctypes.get_errno())}", "run as root"
        )
