"""Our end of the compiling child: starts it, asks, and takes its replies when somebody waits for them.

The child needs most of a second, so it is started first thing, before anything heavy is imported: this module uses the
standard library alone. One thread per `Compilation`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytools import directories
from pytools.closing import Closing
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf.compiler import exactly

_DEADLINE_S = 300.0  # emulated processors need minutes; a child that dies is noticed at once
_MOST_DESCRIPTORS = 250  # in one message (SCM_MAX_FD is 253)
_OTHER = "/usr/bin/python3"  # the distribution's


Kind = Literal["tc", "sock_ops", "sock", "connect4", "connect6", "uprobe"]
Cache = Literal["use", "only", "avoid"]  # compile what is not in it, nothing, everything


@dataclass(frozen=True)
class Program:
    """One C file to load: its entry points by name, constants for the compiler, and what is no TC program."""

    source: str
    functions: Sequence[str]
    defines: Mapping[str, int | str] = field(default_factory=dict)
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        functions = [[name, self.kinds.get(name, "tc")] for name in self.functions]
        return {"source": self.source, "defines": dict(self.defines), "functions": functions}


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


def has_bcc() -> bool:
    """Whether this interpreter can import bcc; finds out without loading LLVM. PyPI's bcc is another package."""
    spec = importlib.util.find_spec("bcc")
    places = spec.submodule_search_locations if spec else None
    return any(Path(place, "libbcc.py").exists() for place in places or ())


def interpreter() -> str:
    """A Python that can import bcc: this one, or the distribution's.

    Raises
    ------
    CapabilityError
        If neither can.
    """
    if not bcc_package():
        raise CapabilityError("no Python here can import bcc", "apt-get install python3-bpfcc")
    return sys.executable if sys.executable and has_bcc() else _OTHER


@functools.cache
def bcc_package() -> str:
    """The directory of bcc's modules for `interpreter`; empty when there is none."""
    if sys.executable and has_bcc():
        spec = importlib.util.find_spec("bcc")
        return os.path.dirname(spec.origin or "") if spec else ""
    probe = "import os, importlib.util as u; s = u.find_spec('bcc'); d = os.path.dirname(s and s.origin or ''); "
    probe += "print(d if d and os.path.exists(os.path.join(d, 'libbcc.py')) else '')"
    with contextlib.suppress(OSError):
        return subprocess.run([_OTHER, "-c", probe], capture_output=True, text=True, check=False).stdout.strip()
    return ""


class Compilation(Closing):
    """Programs on their way into the kernel, each with a child process of its own.

    Parameters
    ----------
    cache : str
        Whether what was compiled before is used.
    """

    def __init__(self, programs: Sequence[Program], cache: Cache = "use") -> None:
        self._children: list[_Child] = []
        try:
            for each in programs:
                self._children.append(_Child(each, cache))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """For a selector: readable once the only program has its answer."""
        (child,) = self._children
        return child.sock.fileno()

    def replies(self) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Each program's reply and its descriptors, which are then the caller's, in their order; waits for them.

        Raises
        ------
        SwerveError
            If a child dies before it has answered.
        """
        for child in self._children:
            yield child.reply()

    def close(self) -> None:
        """End the children; a second time does nothing."""
        for child in self._children:
            child.close()


class _Child:
    def __init__(self, program: Program, cache: Cache) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_DEADLINE_S)
        script, package = Path(__file__).with_name("compiler.py"), bcc_package()
        python = interpreter() if package else sys.executable or _OTHER
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [python, "-S", str(script), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
        except BaseException:
            self.sock.close()
            raise
        request = {
            "bpf_dir": str(bpf_dir()),
            "kept": [""] if cache == "avoid" else [str(each) for each in directories.compiled_dirs()],
            "compile": cache != "only",
            "package": package,
            "program": program.request,
        }
        body = json.dumps(request).encode()
        with contextlib.suppress(OSError):  # a child that died already is noticed by `reply`
            self.sock.sendall(struct.pack("<I", len(body)) + body)

    def reply(self) -> tuple[dict[str, Any], list[int]]:
        try:
            found = _reply(self.sock)
            self.sock.send(b"k")
        except (OSError, EOFError) as error:
            raise SwerveError(
                f"the compiling process died: {self._last_words() or error}", "`swerve doctor` says what is missing"
            ) from None
        return found

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        self.sock.close()
        self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _reply(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    header, descriptors, _, _ = socket.recv_fds(sock, 8, _MOST_DESCRIPTORS)
    if len(header) < 8:
        raise EOFError("no answer")
    size, count = struct.unpack("<II", header)
    body = exactly(sock, size)
    if len(descriptors) != count:
        for fd in descriptors:
            os.close(fd)
        raise EOFError(f"{len(descriptors)} descriptors of {count}")
    return json.loads(body), list(descriptors)
