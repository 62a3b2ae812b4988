"""The files that hooks use: programs that root alone can change, secrets that nobody else can read. Any thread."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pytools.directories import read_obeyed, unsafe
from pytools.errors import RefusedError

_MOST_LINKS: Final = 40
_SECRET_BYTES: Final = 4096
_CA_BYTES: Final = 1 << 20
_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def program_objection(program: str) -> str:
    """Why a program must not be run; empty when it may: it, and all that leads to it, is root's and nobody else's."""
    left, here, links = list(reversed(Path(program).parts[1:])), Path("/"), 0
    while True:
        try:
            found = os.lstat(here)
        except OSError as error:
            return f"{here}: {error.strerror}"
        link = stat.S_ISLNK(found.st_mode)
        if found.st_uid != 0:
            return f"{here} belongs to user {found.st_uid}, not to root"
        if found.st_mode & _OTHERS and not link:
            return f"{here} is writable by others than root (mode {stat.S_IMODE(found.st_mode):04o})"
        if link:
            links += 1
            target = Path(os.readlink(here))
            if links > _MOST_LINKS:
                return f"{program}: too many links"
            left += reversed(target.parts[target.is_absolute() :])
            here = Path("/") if target.is_absolute() else here.parent
        elif not left:
            return "" if stat.S_ISREG(found.st_mode) and found.st_mode & 0o111 else f"{here} is not a program"
        if left:
            name = left.pop()
            here = here.parent if name == ".." else here / name


def secret(path: str) -> str:
    """What is in a secret file: one line. It may also be the service's own, when root checks a policy.

    Raises
    ------
    OSError
        If it cannot be read.
    RefusedError
        If somebody else may read it or could have written it, or if it holds no line for a header.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if why := unsafe(Path(path), status, _service()):
            raise RefusedError(f"{path}: refused: {why}")
        if status.st_mode & 0o077:
            raise RefusedError(f"{path}: refused: others may read it", "chmod 600 FILE, and change the secret")
        return _line(path, file.read(_SECRET_BYTES + 1))


def _service() -> tuple[int, ...]:
    """The user of the units (packaging/systemd), where there is one."""
    try:
        return (pwd.getpwnam("swerve").pw_uid,)
    except KeyError:
        return ()


def token(path: str) -> str:
    """What is in the token file of a service account, which Kubernetes itself lets everybody in the container read.

    Raises
    ------
    OSError
        If it cannot be read.
    RefusedError
        If somebody else could have written it, or if it holds no line for a header.
    """
    return _line(path, read_obeyed(Path(path), _SECRET_BYTES + 1))


def _line(path: str, data: bytes) -> str:
    text = data.decode("latin-1").strip()
    if not text or len(data) > _SECRET_BYTES or not (text.isascii() and text.isprintable()):
        raise RefusedError(f"{path}: expected one line of at most {_SECRET_BYTES} bytes of ASCII")
    return text


def objections(options: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Why files of a hook must not be used, a sentence each; and which of them are not there, as on another host."""
    uses: dict[str, Callable[[str], object]] = {
        **dict.fromkeys(("program", "scontrol"), _may_run),
        **{"secret_file": secret, "token_file": token, "ca_file": _authorities},
    }
    refused, missing = [], []
    for key, use in uses.items():
        if not (file := options.get(key)):
            continue
        try:
            use(file)
        except FileNotFoundError:
            missing.append(f"{file} is not there")
        except OSError as error:
            refused.append(f"{file}: {error.strerror}")
        except RefusedError as error:
            refused.append(str(error))
    return refused, missing


def _may_run(program: str) -> None:
    os.stat(program)
    if why := program_objection(program):
        raise RefusedError(f"{program}: refused: {why}")


def _authorities(path: str) -> None:
    if b"-----BEGIN CERTIFICATE-----" not in read_obeyed(Path(path), _CA_BYTES):
        raise RefusedError(f"{path}: no certificate in PEM is in it")
