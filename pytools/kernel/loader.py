"""Loading kernel programs: asks the compiling child, receives the descriptors, owns every one of them.

Nothing outlives the `Loaded` object but what was pinned: close it, or die, and maps and programs are gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.maps import Map
from pytools.kernel.rings import Ring

_DEADLINE_S = 60.0
# PyPI's bcc is another package: look for the module that only the real one has, without loading LLVM.
_HAS_BCC = "import importlib.util as u, sys; sys.exit(not (u.find_spec('bcc') and u.find_spec('bcc.libbcc')))"
_LAYOUT_PREFIX = "layout_"  # maps that exist only to carry the layout of a ring's record


@dataclass(frozen=True)
class Program:
    """One C file to load: its TC entry points by name, and constants for the compiler."""

    source: str
    functions: Sequence[str]
    defines: Mapping[str, int | str] = field(default_factory=dict)


def bpf_dir() -> Path:
    """Where the C sources are: inside the installed package, or beside it in a checkout.

    Raises
    ------
    SwerveError
        If the installation lacks them.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "bpf", package.parent / "bpf"):
        if (candidate / "swerve.h").exists():
            return candidate
    raise SwerveError(f"the kernel programs are missing beside {package}", "install swerve again")


class Loaded:
    """Programs and maps in the kernel, and what did not make it there."""

    def __init__(self) -> None:
        self.programs: dict[str, int] = {}
        self.tracepoints: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self._maps: dict[str, tuple[int, Any, Any]] = {}
        self._rings: list[Ring] = []

    def ring(self, name: str, record: str) -> Ring:
        """The ring `name`, whose records have the type declared as `SWERVE_RECORD(record, type)`."""
        ring = Ring(self._entry(name)[0], np.dtype(self._entry(_LAYOUT_PREFIX + record)[2]))
        self._rings.append(ring)
        return ring

    def map(self, name: str) -> Map:
        """The map `name` with the layouts of its compiled types."""
        fd, key, value = self._entry(name)
        return Map(name, fd, key, value)

    def has_map(self, name: str) -> bool:
        """Whether the program that declares the map was loaded."""
        return name in self._maps

    def _entry(self, name: str) -> tuple[int, Any, Any]:
        if name not in self._maps:
            raise SwerveError(f"there is no kernel map {name}", "`swerve doctor` says which program failed")
        return self._maps[name]

    def _take(self, reply: dict[str, Any], descriptors: list[int]) -> None:
        for described, fd in zip(reply["descriptors"], descriptors, strict=True):
            kind, _, name = described.partition(":")
            if kind == "map":
                table = reply["maps"][name]
                self._maps[name] = (fd, dtype(table["key"]), dtype(table["value"]))
            else:
                (self.programs if kind == "program" else self.tracepoints)[name] = fd
        if reply["error"]:
            self.failed[reply["source"]] = reply["error"]
        self.failed.update(reply["failed"])

    def close(self) -> None:
        """Give everything back to the kernel."""
        for ring in self._rings:
            ring.close()
        for fd in (
            *self.programs.values(),
            *self.tracepoints.values(),
            *(entry[0] for entry in self._maps.values()),
        ):
            os.close(fd)
        self._rings, self.programs, self.tracepoints, self._maps = [], {}, {}, {}

    def __enter__(self) -> Loaded:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dtype(described: Any) -> np.dtype[Any] | None:
    """A numpy type from the child's description of a C type; None for none."""
    return None if described is None else np.dtype(_formats(described))


def _formats(described: Any) -> Any:
    if isinstance(described, list):
        return (_formats(described[0]), tuple(described[1]))
    if isinstance(described, dict):
        return {**described, "formats": [_formats(part) for part in described["formats"]]}
    return described


@functools.cache
def interpreter() -> str:
    """A Python that can import bcc: this one, or the distribution's.

    Raises
    ------
    CapabilityError
        If neither can.
    """
    for candidate in (sys.executable, "/usr/bin/python3"):
        if candidate and subprocess.run([candidate, "-c", _HAS_BCC], capture_output=True, check=False).returncode == 0:
            return candidate
    raise CapabilityError("no Python here can import bcc", "apt-get install python3-bpfcc")


def load(programs: Sequence[Program]) -> Loaded:
    """Compile and load in a child process; what cannot be loaded is named in `failed`, and the rest goes on.

    Raises
    ------
    CapabilityError
        If bcc cannot be imported at all.
    SwerveError
        If the child dies before it has answered.
    """
    loaded = Loaded()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    script = Path(__file__).with_name("compiler.py")
    try:
        ours.settimeout(_DEADLINE_S)
        with theirs:
            child = subprocess.Popen(
                [interpreter(), str(script), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        assert child.stderr is not None
        try:
            request = {
                "bpf_dir": str(bpf_dir()),
                "programs": [
                    {"source": p.source, "defines": dict(p.defines), "functions": list(p.functions)} for p in programs
                ],
            }
            body = json.dumps(request).encode()
            ours.sendall(struct.pack("<I", len(body)) + body)
            for _ in programs:
                loaded._take(*_reply(ours))
            ours.send(b"k")
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
            child.kill()
            said = child.stderr.read().decode(errors="replace").strip().splitlines()
            raise SwerveError(
                f"the compiling process died: {said[-1] if said else error}",
                "`swerve doctor` says what is missing",
            ) from None
        finally:
            ours.close()
            child.kill()
            child.wait()
            child.stderr.close()
    except BaseException:
        loaded.close()
        raise
    return loaded


def _reply(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, descriptors, _, _ = socket.recv_fds(sock, 8, 250)
    if len(header) < 8:
        raise EOFError("no answer")
    size, count = struct.unpack("<II", header)
    body = b""
    while len(body) < size:
        part = sock.recv(size - len(body))
        if not part:
            raise EOFError("half an answer")
        body += part
    if len(descriptors) != count:
        for fd in descriptors:
            os.close(fd)
        raise EOFError(f"{len(descriptors)} descriptors of {count}")
    return json.loads(body), list(descriptors)
