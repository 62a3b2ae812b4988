"""Named network namespaces as `ip netns` keeps them, made and removed without a child process."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.netns import inside

NAMED = Path("/run/netns")

_CLONE_NEWNET = 0x40000000
_BIND, _REC, _SHARED, _DETACH = 0x1000, 0x4000, 0x100000, 2
_libc = ctypes.CDLL(None, use_errno=True)


def create(name: str) -> None:
    """Make a namespace and give it a name. The calling thread stays where it is.

    Raises
    ------
    CapabilityError
        If the process may not.
    SwerveError
        If the name is in use.
    """
    _share_directory()
    place = NAMED / name
    try:
        os.close(os.open(place, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    except FileExistsError:
        raise SwerveError(f"network namespace {name} already exists", "remove it, or use another name") from None
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.unshare(_CLONE_NEWNET), f"making network namespace {name}")
        try:
            _mount("/proc/thread-self/ns/net", place, _BIND)
        finally:
            _checked(_libc.setns(before, _CLONE_NEWNET), "returning to the namespace before")
    except BaseException:
        place.unlink(missing_ok=True)
        raise
    finally:
        os.close(before)


def delete(name: str) -> None:
    """Take the name away; the kernel removes the namespace with its last process. No name, no error."""
    place = NAMED / name
    code = 0 if _libc.umount2(os.fsencode(place), _DETACH) == 0 else ctypes.get_errno()
    if code not in (0, errno.EINVAL, errno.ENOENT):  # the first of the two: its making was interrupted
        what = f"removing network namespace {name}: {os.strerror(code)}"
        raise CapabilityError(what, "run as root (CAP_SYS_ADMIN)") if code == errno.EPERM else SwerveError(what)
    place.unlink(missing_ok=True)


def names() -> list[str]:
    return sorted(place.name for place in NAMED.iterdir()) if NAMED.is_dir() else []


def set_sysctls(name: str, values: Mapping[str, int]) -> None:
    """Write settings of one namespace.

    Parameters
    ----------
    values : mapping
        Value by path below /proc/sys/net.
    """
    with inside(name):
        for path, value in values.items():
            try:
                (Path("/proc/sys/net") / path).write_text(f"{value}\n")
            except OSError as error:
                raise CapabilityError(
                    f"setting {path} in {name}: {error.strerror}", "needs root and a writable /proc/sys"
                ) from None


def _share_directory() -> None:
    """Let the names reach other mount namespaces, as `ip netns` does."""
    NAMED.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        _mount("", NAMED, _SHARED | _REC)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not a mount point yet
            raise CapabilityError(f"sharing {NAMED}: {error.strerror}", "run as root") from None
        _mount(str(NAMED), NAMED, _BIND | _REC)
        _mount("", NAMED, _SHARED | _REC)


def _mount(source: str, target: Path, flags: int) -> None:
    result = _libc.mount(os.fsencode(source), os.fsencode(target), b"none", ctypes.c_ulong(flags), None)
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _checked(result: int, what: str) -> None:
    if result != 0:
        raise CapabilityError(f"{what}: {os.strerror(ctypes.get_errno())}", "run as root (CAP_SYS_ADMIN)")
