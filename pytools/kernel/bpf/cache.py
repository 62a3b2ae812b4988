"""What bcc compiled once, kept in files and loaded without it: a start then costs the verifier's time, none of LLVM's.

The name of an entry is a digest of all that it was made from (cache_key.py), so it fits on other hosts too. Only what
its user or root alone can write is read, and whatever does not go as it should means that bcc is asked again. For the
compiling child (compiler.py) as well, hence the standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytools.errors import RefusedError
from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.cache_key import Inputs

MOST_ENTRIES: Final = 64  # of other sources and other constants; the newest stay
MOST_BYTES: Final = 4_000_000  # of an entry; ours have up to 200,000
_NAME_BYTES: Final = 16
_SK_STORAGE: Final = 24  # the one type of map that the kernel wants described
_ARRAY_OF_MAPS: Final = 12
_LENT: Final = "lent_"  # a map of maps is called so and by the name of the map that shows what it holds
_LOAD_64: Final = 0x18  # an instruction that loads 64 bits
_MAP_FD: Final = 1  # what they are: a map


@dataclass(frozen=True)
class Function:
    """One entry point, as bcc loads it."""

    descriptor: str  # what its descriptor is called in the reply
    name: str
    kind: int  # BPF_PROG_TYPE_…
    code: bytes  # instructions that name maps by their descriptors
    tracepoint: str = ""  # the raw one that it is attached to
    attach: int = 0  # enum bpf_attach_type, where the verifier wants to know it


class Shelf:
    """The entries in directories that nobody else can write; others serve as if nothing were in them.

    Parameters
    ----------
    own : str
        This user's, where entries are put. Made if need be. Empty: nothing is kept.
    *others : str
        Where entries are looked for besides.
    """

    def __init__(self, own: str, *others: str) -> None:
        self.refused = ""  # why an entry that was there could not be loaded
        self._own, self._fds = -1, list[int]()
        with contextlib.suppress(OSError, RefusedError):
            if own:
                self._own = opened(own, make=True)
                self._fds.append(self._own)
        for each in others:
            with contextlib.suppress(OSError, RefusedError):
                self._fds.append(opened(each))

    def names(self) -> list[str]:
        """Of all entries, the newest of each directory first."""
        found: dict[str, None] = {}
        for fd in self._fds:
            found |= dict.fromkeys(reversed(_by_age(fd)))
        return [name for name in found if _is_finished(name)]

    def read(self, name: str) -> bytes | None:
        """What is in an entry; None if there is none that can be trusted."""
        return next(self._bodies(name), None)

    def _bodies(self, name: str) -> Iterator[bytes]:
        for at in self._fds:
            with contextlib.suppress(OSError), open(name, "rb", opener=functools.partial(_open_at, at)) as file:
                if not _distrusted(os.fstat(file.fileno())):
                    yield file.read(MOST_BYTES)

    def load(self, made_from: Inputs) -> tuple[dict[str, Any], list[int]] | None:
        """The reply for an entry and its descriptors, with all of it in the kernel; None if it is not there.

        Where nothing can compile, one that any compiler made will do.
        """
        if not made_from.prefix:
            return None
        names = [made_from.name] if made_from.name else [x for x in self.names() if x.startswith(made_from.prefix)]
        for name in names:
            for body in self._bodies(name):
                try:
                    reply, descriptors = _loaded(json.loads(body))
                    return {**reply, "entry": name}, descriptors
                except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
                    self.refused = str(error)  # nothing that can be loaded: bcc is asked
        return None

    def keep(
        self, made_from: Inputs, reply: Mapping[str, Any], maps: Mapping[str, int], made: Sequence[Function]
    ) -> None:
        """Put down what was compiled, if it can be; too many of the oldest go.

        Parameters
        ----------
        reply : mapping
            What the child answers.
        maps : mapping of str to int
            Descriptors by name.
        """
        if self._own < 0 or not made_from.name:
            return
        with contextlib.suppress(OSError, ValueError):
            entry = {"made_from": {"program": made_from.program, "compiler": made_from.compiler}}
            put(self._own, {made_from.name: json.dumps(entry | _entry(reply, maps, made)).encode()})


def opened(directory: str, make: bool = False) -> int:
    """Open a directory of entries; `make` is for this user's own, which others may read.

    Raises
    ------
    OSError
        If it cannot be opened.
    RefusedError
        If somebody else could write there.
    """
    if make:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        why = _distrusted(found)
        if make and found.st_uid != os.geteuid():
            why = f"belongs to user {found.st_uid}, not to you"
        if why:
            raise RefusedError(f"{directory}: refused: it {why}", "remove it: swerve makes another")
        if make and stat.S_IMODE(found.st_mode) != 0o755:
            os.fchmod(fd, 0o755)  # whatever the umask
    except BaseException:
        os.close(fd)
        raise
    return fd


def put(at: int, entries: Mapping[str, bytes], *, durable: bool = False) -> None:
    """Put entries into an open directory, all or none; whoever looks finds whole ones only. Too many of the oldest go.

    Raises
    ------
    OSError
        If they cannot be written.
    """
    mark = os.urandom(8).hex()
    there: list[str] = []
    try:
        for name, body in entries.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(f"{name}.{mark}", flags, 0o600, dir_fd=at)
            there.append(f"{name}.{mark}")
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(body)
                file.flush()
                if durable:
                    os.fsync(fd)
        for place, name in enumerate(entries):
            os.replace(f"{name}.{mark}", name, src_dir_fd=at, dst_dir_fd=at)
            there[place] = name
        if durable:
            os.fsync(at)
    except BaseException:
        for name in there:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=at)
        raise
    for name in _by_age(at)[:-MOST_ENTRIES]:
        with contextlib.suppress(OSError):  # another process removed it as well, or it is none of ours
            os.unlink(name, dir_fd=at)


def _open_at(directory: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)


def _by_age(fd: int) -> list[str]:
    found: dict[str, int] = {}
    for each in os.scandir(fd):
        with contextlib.suppress(FileNotFoundError):
            found[each.name] = each.stat(follow_symlinks=False).st_mtime_ns
    return sorted(found, key=found.__getitem__)


def _is_finished(name: str) -> bool:
    return name.count(".") == 1


def _distrusted(found: os.stat_result) -> str:
    """Why what is open here may be somebody else's; empty when root or this user alone can have written it."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    return "can be written by others" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def _entry(reply: Mapping[str, Any], maps: Mapping[str, int], made: Sequence[Function]) -> dict[str, Any]:
    places = {fd: place for place, fd in enumerate(maps.values())}
    return {
        "reply": dict(reply),
        "maps": [[name, *syscall.MapInfo(fd).made_with] for name, fd in maps.items()],
        "functions": [
            [each.descriptor, each.name, each.kind, each.attach, each.tracepoint, _text(_with_maps(each.code, places))]
            for each in made
        ],
    }


def _loaded(entry: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Make the maps and load the functions; the descriptors are the caller's."""
    found: dict[str, int] = {}
    try:
        for name, *made_with in sorted(entry["maps"], key=lambda each: each[1] == _ARRAY_OF_MAPS):
            found[f"map:{name}"] = _map(name, made_with, found.get(f"map:{name.removeprefix(_LENT)}", 0))
        maps = {place: found[f"map:{name}"] for place, (name, *_) in enumerate(entry["maps"])}
        for descriptor, name, kind, attach, tracepoint, text in entry["functions"]:
            fd = _program(name, kind, attach, _with_maps(base64.b64decode(text), maps))
            found[descriptor] = fd
            if tracepoint:
                found[descriptor] = _attached(fd, tracepoint)
                os.close(fd)
    except BaseException:
        for fd in found.values():
            os.close(fd)
        raise
    return {**entry["reply"], "descriptors": list(found)}, list(found.values())


def _text(code: bytes) -> str:
    return base64.b64encode(code).decode()


def _with_maps(code: bytes, numbers: Mapping[int, int]) -> bytes:
    """The instructions with other numbers for their maps: places for descriptors, or the other way round.

    Raises
    ------
    ValueError
        If they refer to anything but a map that is known.
    """
    changed = bytearray(code)
    for at, (operation, registers, _, number) in enumerate(struct.iter_unpack("<BBhi", code)):
        source = registers >> 4
        if operation == _LOAD_64 and source:
            if source != _MAP_FD or number not in numbers:
                raise ValueError(f"instruction {at} refers to something else than a map")
            struct.pack_into("<i", changed, at * 8 + 4, numbers[number])
    return bytes(changed)


def _map(name: str, made_with: Sequence[int], shown: int) -> int:
    """Make a map; `shown` is one like those that a map of maps holds."""
    kind, key_bytes, value_bytes, entries, flags = made_with
    inner = shown if kind == _ARRAY_OF_MAPS else 0
    sizes = struct.pack("<7I", kind, key_bytes, value_bytes, entries, flags, inner, 0)
    with _described(value_bytes) if kind == _SK_STORAGE else contextlib.nullcontext(b"") as types:
        return syscall.bpf(syscall.MAP_CREATE, (sizes + _short(name) + bytes(4) + types).ljust(72, b"\0"))


@contextlib.contextmanager
def _described(value_bytes: int) -> Iterator[bytes]:
    """Types of a 32-bit key and of a value of so many bytes, as the kernel wants them for storage on sockets."""
    integer, array = 1 << 24, 3 << 24
    types = struct.pack("<4I", 0, integer, 4, 32) + struct.pack("<4I", 0, integer, 1, 8)
    types += struct.pack("<3I3I", 0, array, 0, 2, 1, value_bytes)
    head = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), 1)
    text = ctypes.create_string_buffer(head + types + b"\0", len(head) + len(types) + 1)
    fd = syscall.bpf(syscall.BTF_LOAD, struct.pack("<QQ3I", syscall.address(text), 0, len(text), 0, 0).ljust(32, b"\0"))
    try:
        yield struct.pack("<3I", fd, 1, 3)
    finally:
        os.close(fd)


def _program(name: str, kind: int, attach: int, code: bytes) -> int:
    # bcc's word for a program that names no licence
    body, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    head = struct.pack("<2I2Q", kind, len(code) // 8, syscall.address(body), syscall.address(licence))
    tail = _short(name) + struct.pack("<2I", 0, attach)
    return syscall.bpf(syscall.PROG_LOAD, head.ljust(48, b"\0") + tail)


def _short(name: str) -> bytes:
    return name.encode()[: _NAME_BYTES - 1].ljust(_NAME_BYTES, b"\0")


def _attached(fd: int, tracepoint: str) -> int:
    name = ctypes.create_string_buffer(tracepoint.encode())
    return syscall.bpf(syscall.RAW_TRACEPOINT_OPEN, struct.pack("<QII", syscall.address(name), fd, 0))
