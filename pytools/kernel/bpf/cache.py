"""What bcc compiled once, kept in files and loaded without it: a start then costs the verifier's time, none of LLVM's.

An entry's name is a digest of all that it was made from: our sources, their constants, bcc, the distribution's headers,
the running kernel. Only what its owner alone can write is read, and whatever does not go as it should means that bcc is
asked again. For the compiling child (compiler.py), hence the standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import stat
import struct
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytools.kernel.bpf import syscall

MOST_ENTRIES: Final = 64  # of other kernels and other constants; the newest stay
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


def name_of(program: Mapping[str, Any], bpf_dir: str) -> str:
    """The name of a program's entry; empty for one that is not ours, or whose making is not all known.

    Parameters
    ----------
    program : mapping
        As in the request to the child: source, defines, functions.
    """
    made_from = sources_digest(bpf_dir)
    if not made_from or not Path(bpf_dir, program["source"]).is_relative_to(bpf_dir):
        return ""
    return hashlib.sha256(json.dumps([made_from, dict(program)]).encode()).hexdigest()


@functools.cache
def sources_digest(bpf_dir: str) -> str:
    """A digest of what all programs are made from; empty if not all of that is known."""
    ours = Path(bpf_dir)
    spec = importlib.util.find_spec("bcc")
    library = Path(f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or ''}", "libbcc.so.0")
    made_by = [Path(spec.origin) if spec and spec.origin else library, library, Path("/usr/include/linux/version.h")]
    try:
        versions = [_state(each) for each in made_by]
    except OSError:
        return ""
    digest = hashlib.sha256(json.dumps([os.uname()[2:], versions]).encode())
    for file in sorted([*ours.rglob("*.[ch]"), *Path(__file__).parent.glob("comp*.py")]):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _state(file: Path) -> tuple[int, int]:
    """What tells one version of a file from the next."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


class Shelf:
    """The directory of entries, its owner's alone; one that is not serves as if nothing were in it.

    Parameters
    ----------
    directory : str
        Made if need be. Empty: nothing is kept.
    """

    def __init__(self, directory: str) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            if directory:
                os.makedirs(os.path.dirname(directory), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                self._fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if not _is_ours(self._fd):
                    os.close(self._fd)
                    self._fd = -1

    def load(self, name: str) -> tuple[dict[str, Any], list[int]] | None:
        """The reply for an entry and its descriptors, with all of it in the kernel; None if it is not there."""
        if self._fd < 0 or not name:
            return None
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
            with open(fd, "rb") as file:
                return _loaded(json.loads(file.read())) if _is_ours(fd) else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, struct.error):
            return None  # not there, or nothing that can be loaded: bcc is asked

    def keep(self, name: str, reply: Mapping[str, Any], maps: Mapping[str, int], made: Sequence[Function]) -> None:
        """Put down what was compiled, if it can be; too many of the oldest go.

        Parameters
        ----------
        reply : mapping
            What the child answers.
        maps : mapping of str to int
            Descriptors by name.
        """
        if self._fd < 0 or not name:
            return
        with contextlib.suppress(OSError, ValueError):
            body = json.dumps(_entry(reply, maps, made)).encode()
            unfinished = f"{name}.{os.getpid()}"
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
            with open(fd, "wb") as file:
                file.write(body)
            os.replace(unfinished, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            kept = {each.name: each.stat().st_mtime_ns for each in os.scandir(self._fd)}
            for each in sorted(kept, key=kept.__getitem__)[:-MOST_ENTRIES]:
                os.unlink(each, dir_fd=self._fd)


def _is_ours(fd: int) -> bool:
    """Whether nobody but this user can have written what is open here."""
    found = os.fstat(fd)
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


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
