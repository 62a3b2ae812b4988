"""The operator's orders on disk, so that they outlive the controller: one JSON file, replaced as a whole.

Belongs to whoever steers, mode 0600; a file that others could have written is not obeyed. One writer at a time:
whoever holds the `Lock`. When an order ends: `overrides`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import msgspec

from pytools import owned_files
from pytools.directories import unsafe
from pytools.errors import CapabilityError, RefusedError, SwerveError
from pytools.owned_files import as_owner, owner_of
from steering.acting.journal import sync_folder
from steering.deciding.overrides import NONE, Moment, Override, Overrides

FILE: Final = "overrides.json"
MOST: Final = 1000  # orders
_MAX_BYTES: Final = 1 << 20
_VERSIONS: Final = (1, 2)  # 1: orders end by the wall clock alone


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    orders: tuple[Override, ...]


_decoder = msgspec.json.Decoder(_Contents)


def load(folder: Path, now: Moment) -> Overrides:
    """The orders that have not run out; none when there is no file.

    Raises
    ------
    RefusedError
        If others could have written the file.
    SwerveError
        If it makes no sense: to go on without an order that was given would be worse than not to start.
    """
    path = folder / FILE
    data = _read(path)
    if data is None:
        return NONE
    try:
        contents = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _invalid(path, str(error)) from None
    if contents.version not in _VERSIONS:
        raise _invalid(path, f"version {contents.version}")
    return Overrides(contents.orders).at(now)


def as_json(order: Override, now: Moment) -> dict[str, Any]:
    """An order for other programs; `left_s` is how much longer it holds, null for without end."""
    raw: dict[str, Any] = msgspec.to_builtins(order)
    left_ns = order.left_ns(now)
    return raw | {"left_s": None if left_ns is None else round(left_ns / 1e9, 1)}


def _read(path: Path) -> bytes | None:
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CapabilityError(f"{path}: {error.strerror}", "run it as root") from None
    except OSError as error:  # a symbolic link
        raise RefusedError(f"{path}: refused: {error.strerror}", "look at it, and remove it") from None
    with open(fd, "rb") as file:
        owner = owner_of(path)  # of a service, beside which root's commands work
        if why := unsafe(path, os.fstat(fd), owner[:1] if owner else ()):
            raise RefusedError(f"{path}: refused: {why}", "look at it, and remove it")
        return file.read(_MAX_BYTES + 1)


def _invalid(path: Path, why: str) -> SwerveError:
    return SwerveError(f"{path}: not a file of orders: {why}", "remove it; the orders in it are lost")


def save(folder: Path, overrides: Overrides) -> None:
    """Put the orders on disk; when this returns they are there, whatever happens next.

    Raises
    ------
    OSError
        If they cannot be written, or their name not be synced: the file has them or the former ones.
    """
    data = msgspec.json.encode(_Contents(_VERSIONS[-1], overrides.orders))
    owned_files.replace(folder / FILE, data, durable=True)
    sync_folder(folder)
