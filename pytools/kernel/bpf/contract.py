"""Numbers and names that bpf/swerve.h defines, read from it. Any thread."""

from __future__ import annotations

import functools
import re
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.bpf.compiler_client import bpf_dir

_NUMBER: Final = re.compile(r"^(?:#define |\t)(SWERVE_\w+)(?: =)? (0x[0-9a-f]+|\d+)\b", re.MULTILINE)
_MEMBER: Final = re.compile(r"^\t(\w+) = \d+,", re.MULTILINE)


@functools.cache
def _header() -> str:
    return (bpf_dir() / "swerve.h").read_text()


@functools.cache
def _numbers() -> dict[str, int]:
    return {name: int(number, 0) for name, number in _NUMBER.findall(_header())}


def constant(name: str) -> int:
    """A number that is defined by a macro or an enum.

    Raises
    ------
    SwerveError
        If it is not defined.
    """
    if name not in _numbers():
        raise SwerveError(f"bpf/swerve.h does not define {name}", "install swerve again")
    return _numbers()[name]


@functools.cache
def counters(program: str) -> tuple[str, ...]:
    """The names of a program's counters, by index: of enum swerve_PROGRAM_counter, in lower case, without the prefix.

    Raises
    ------
    SwerveError
        If there are none.
    """
    found = re.search(rf"^enum swerve_{program}_counter {{\n(.*?)^}};", _header(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise SwerveError(f"bpf/swerve.h declares no counters of {program}", "install swerve again")
    *names, _ = _MEMBER.findall(found[1])  # the last is how many there are
    return tuple(name.removeprefix(f"SWERVE_{program.upper()}_").lower() for name in names)
