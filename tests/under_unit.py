"""Runs a command as a systemd unit would, where no systemd runs: its user, capabilities, system calls, file system.

    python tests/under_unit.py UNIT --uid N [--netns NAME] [--write DIR]... [--place FROM:TO]... -- COMMAND...

Every directive of the unit that says what the process may do is either carried out here or listed in `IGNORED` with
the reason; one that is in neither is an error, so that a line added to the unit cannot go untried. As root, one thread;
the command takes the place of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

# Of [Service]: what starts, stops and names it, which is the caller's affair.
OF_THE_MANAGER: Final = frozenset(
    {
        *("Type", "NotifyAccess", "ExecStartPre", "ExecStart", "ExecReload", "ExecStopPost", "WatchdogSec"),
        *("TimeoutStartSec", "TimeoutStopSec", "Restart", "RestartSec", "RestartPreventExitStatus", "KillMode"),
        *("OOMScoreAdjust", "OOMPolicy", "User", "Group", "Environment", "EnvironmentFile", "FinalKillSignal"),
    }
)
# Directories are the caller's (--write, --place): a test has its own.
PLACES: Final = frozenset(
    {
        *("RuntimeDirectory", "RuntimeDirectoryPreserve", "StateDirectory", "StateDirectoryMode"),
        *("ConfigurationDirectory", "CacheDirectory", "BindReadOnlyPaths"),
    }
)
IGNORED: Final = {
    "CPUWeight": "of the unit's own control group",
    "KeyringMode": "no key ring is used",
    "RemoveIPC": "acts when the user's last process ends",
    "PrivateTmp": "the caller's directories lie in /tmp",
    "PrivateMounts": "a mount namespace of its own is made anyway",
    "ProtectHome": "a checkout may lie in a home",
    "ProtectHostname": "of the UTS namespace; the system calls are refused",
    "ProtectClock": "the capability and the system calls are refused",
    "ProtectKernelLogs": "the capability and the system calls are refused",
    "ProtectKernelModules": "the capability and the system calls are refused",
    "DevicePolicy": "by a program on the unit's own control group",
    "DeviceAllow": "by a program on the unit's own control group",
    "PrivateDevices": "a /dev of its own; nothing in it is used",
    "RestrictSUIDSGID": "a file mode that nothing here sets",
    "RestrictRealtime": "the system calls are refused",
    "LockPersonality": "the system call is refused",
}
CAPABILITIES: Final = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}

_NEWNS, _NEWNET = 0x0002_0000, 0x4000_0000
_NAMESPACES = 0x7E02_0080  # every CLONE_NEW*
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_RECURSIVE, _RDONLY = 442, 0x8000, 0x1
_AT_FDCWD = -100
_PR_CAPBSET_DROP, _PR_SET_KEEPCAPS, _PR_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 8, 38, 47
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CMP_EQ, _CMP_MASKED = 4, 7
_libc = ctypes.CDLL(None, use_errno=True)


class Unit:
    """The [Service] section of a unit: values by directive, in their order."""

    def __init__(self, path: Path) -> None:
        section, self.values = "", dict[str, list[str]]()
        for line in path.read_text().splitlines():
            if line.startswith("["):
                section = line
            elif section == "[Service]" and line and not line.startswith(("#", ";")):
                name, _, value = line.partition("=")
                self.values.setdefault(name, []).append(value)
        unknown = self.values.keys() - OF_THE_MANAGER - PLACES - IGNORED.keys() - _CARRIED_OUT
        if unknown:
            raise ValueError(f"{path}: nothing here tries {', '.join(sorted(unknown))}")

    def words(self, name: str) -> list[str]:
        """All words of all lines of a directive."""
        return [word for value in self.values.get(name, []) for word in value.split()]

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.words(name)[-1:] == ["yes"]

    def system_calls(self) -> set[str]:
        """What the filter allows, groups resolved, lines in their order."""
        groups, allowed = _groups(), set[str]()
        for value in self.values["SystemCallFilter"]:
            names = {call for word in value.lstrip("~").split() for call in _members(word, groups)}
            allowed = allowed - names if value.startswith("~") else allowed | names
        return allowed | _members("@default", groups)


_CARRIED_OUT: Final = frozenset(
    {
        *("AmbientCapabilities", "CapabilityBoundingSet", "NoNewPrivileges", "UMask", "SystemCallArchitectures"),
        "LimitNOFILE",
        *("SystemCallFilter", "SystemCallErrorNumber", "RestrictAddressFamilies", "RestrictNamespaces"),
        *(
            "MemoryDenyWriteExecute",
            "LimitNOFILE",
            "Nice",
            "ProtectSystem",
            "ProtectControlGroups",
            "ProtectKernelTunables",
        ),
    }
)


def _groups() -> Mapping[str, list[str]]:
    """systemd's own groups of system calls."""
    ask = ["systemd-analyze", "syscall-filter", "--no-pager"]
    done = subprocess.run(ask, capture_output=True, text=True, check=True)
    groups: dict[str, list[str]] = {}
    name = ""
    for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines():
        if line.startswith("@"):
            name = line.strip()
            groups[name] = []
        elif name and line.startswith("    ") and not line.lstrip().startswith("#"):
            groups[name].append(line.strip())
        elif line and not line.startswith(" "):
            name = ""  # what the kernel has and no group
    return groups


def _members(word: str, groups: Mapping[str, list[str]]) -> set[str]:
    if not word.startswith("@"):
        return {word}
    return {call for each in groups[word] for call in _members(each, groups)}


class Filters:
    """Seccomp filters, through libseccomp."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
        self._lib.seccomp_init.restype = ctypes.c_void_p

    def only(self, calls: set[str], refused: int) -> None:
        """Allow these calls, refuse all others."""
        context = self._begin(_ERRNO | refused)
        for number in sorted({self._number(name) for name in calls} - {-1}):
            self._add(context, _ALLOW, number)
        self._load(context)

    def refuse(self, rules: Sequence[tuple[str, int, tuple[int, int, int, int] | None]]) -> None:
        """Refuse these (call, errno, condition on an argument), allow all others."""
        context = self._begin(_ALLOW)
        for name, code, condition in rules:
            self._add(context, _ERRNO | code, self._number(name), condition)
        self._load(context)

    def _begin(self, default: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._lib.seccomp_init(ctypes.c_uint32(default)))

    def _number(self, name: str) -> int:
        number: int = self._lib.seccomp_syscall_resolve_name(name.encode())
        return number if number >= 0 else -1

    def _add(
        self, context: ctypes.c_void_p, action: int, number: int, condition: tuple[int, int, int, int] | None = None
    ) -> None:
        compared = None if condition is None else (_Compared * 1)(_Compared(*condition))
        count = 0 if condition is None else 1
        _checked(self._lib.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, count, compared), "rule")

    def _load(self, context: ctypes.c_void_p) -> None:
        _checked(self._lib.seccomp_load(context), "seccomp filter")
        self._lib.seccomp_release(context)


class _Compared(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _checked(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno() or -result
        raise OSError(code, f"{what}: {os.strerror(code)}")


def file_system(unit: Unit, write: Sequence[Path], places: Sequence[tuple[Path, Path]]) -> None:
    """Everything read-only but the directories named; the places mounted where the unit mounts them."""
    _checked(_libc.unshare(_NEWNS), "unshare")
    _checked(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    for each in write:
        _checked(_libc.mount(bytes(each), bytes(each), None, _MS_BIND, None), f"bind {each}")
    for origin, target in places:
        _checked(_libc.mount(bytes(origin), bytes(target), None, _MS_BIND, None), f"bind {origin}")
    if unit.words("ProtectSystem") != ["strict"]:
        raise ValueError("only ProtectSystem=strict can be tried")
    kept = [Path("/dev"), Path("/proc"), *write]
    if not (unit.on("ProtectKernelTunables") and unit.on("ProtectControlGroups")):
        kept.append(Path("/sys"))
    if unit.on("ProtectKernelTunables"):
        _checked(_libc.mount(b"/proc/sys", b"/proc/sys", None, _MS_BIND, None), "bind /proc/sys")
    rows = [Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for row in rows:
        is_kept = any(row == each or each in row.parents for each in kept) and not str(row).startswith("/proc/sys")
        if not is_kept and row.exists():
            _read_only(row)


def _read_only(place: Path) -> None:
    attributes = struct.pack("<4Q", _RDONLY, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, bytes(place), 0, buffer, len(attributes))
    if result < 0 and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):  # hidden below another mount
        _checked(result, f"{place} read-only")


def drop(unit: Unit, uid: int) -> None:
    """Become the user, with the unit's capabilities and no others, for good."""
    bounding = [CAPABILITIES[name] for name in unit.words("CapabilityBoundingSet")]
    ambient = [CAPABILITIES[name] for name in unit.words("AmbientCapabilities")]
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for bit in set(range(last + 1)) - set(bounding):
        _checked(_libc.prctl(_PR_CAPBSET_DROP, bit, 0, 0, 0), f"capability {bit}")
    _checked(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "keeping capabilities")
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    mask = sum(1 << bit for bit in ambient)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0), 8)
    data = ctypes.create_string_buffer(struct.pack("<6I", low, low, low, high, high, high), 24)
    _checked(_libc.capset(header, data), "capset")
    for bit in ambient:
        _checked(_libc.prctl(_PR_CAP_AMBIENT, 2, bit, 0, 0), f"ambient capability {bit}")
    if not unit.on("NoNewPrivileges"):
        raise ValueError("a filter without NoNewPrivileges= needs root")
    _checked(_libc.prctl(_PR_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def restrict(unit: Unit, calls: set[str]) -> None:
    """Load the unit's seccomp filters; the last word, for nothing can be loaded after them."""
    filters = Filters()
    filters.refuse(list(_rules(unit)))
    code = getattr(errno, unit.words("SystemCallErrorNumber")[0])
    # What loads this very filter, and starts the command.
    filters.only(calls | {"seccomp", "execve"}, code)


def _rules(unit: Unit) -> Iterator[tuple[str, int, tuple[int, int, int, int] | None]]:
    families = {int(getattr(socket, name)) for name in unit.words("RestrictAddressFamilies")}
    for family in sorted(set(range(46)) - families):
        yield "socket", errno.EAFNOSUPPORT, (0, _CMP_EQ, family, 0)
    if unit.on("RestrictNamespaces"):
        yield "clone3", errno.ENOSYS, None  # its arguments cannot be looked into
        yield "setns", errno.EPERM, None
        for bit in (1 << shift for shift in range(32) if _NAMESPACES >> shift & 1):
            yield "unshare", errno.EPERM, (0, _CMP_MASKED, bit, bit)
            yield "clone", errno.EPERM, (0, _CMP_MASKED, bit, bit)
    if unit.on("MemoryDenyWriteExecute"):
        yield "mmap", errno.EPERM, (2, _CMP_MASKED, 6, 6)
        yield "mprotect", errno.EPERM, (2, _CMP_MASKED, 4, 4)
        yield "pkey_mprotect", errno.EPERM, (2, _CMP_MASKED, 4, 4)


def main(arguments: Sequence[str]) -> None:
    """Carry the unit out, and become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("unit", type=Path)
    parser.add_argument("--uid", type=int, required=True)
    parser.add_argument("--netns")
    parser.add_argument("--write", type=Path, action="append", default=[])
    parser.add_argument("--place", action="append", default=[])
    split = list(arguments).index("--")
    given, command = parser.parse_args(arguments[:split]), list(arguments[split + 1 :])
    unit = Unit(given.unit)
    calls = unit.system_calls()
    if given.netns:
        with open(f"/run/netns/{given.netns}") as file:
            _checked(_libc.setns(file.fileno(), _NEWNET), "setns")
    pairs = [tuple(map(Path, each.split(":"))) for each in given.place]
    file_system(unit, given.write, [(origin, target) for origin, target in pairs])
    os.chdir("/")
    os.umask(int(unit.words("UMask")[0], 8))
    program = shutil.which(command[0]) or command[0]
    if files := unit.words("LimitNOFILE"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(files[-1]),) * 2)
    if nice := unit.words("Nice"):
        os.setpriority(os.PRIO_PROCESS, 0, int(nice[-1]))
    drop(unit, given.uid)
    restrict(unit, calls)
    os.execv(program, command)


if __name__ == "__main__":
    main(sys.argv[1:])
