"""Loading kernel programs: asks the compiling child, receives the descriptors, owns every one of them.

Nothing outlives the `Loaded` object but what was pinned: close it, or die, and maps and programs are gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.bpf.compiler_client import Cache, Compilation, Program, bpf_dir, interpreter
from pytools.kernel.bpf.mapped import MappedArray
from pytools.kernel.bpf.maps import Map
from pytools.kernel.bpf.rings import Ring

__all__ = ["Cache", "Compilation", "Loaded", "Program", "bpf_dir", "collect", "dtype", "interpreter", "load"]

_LAYOUT_PREFIX = "layout_"  # maps that exist only to carry the layout of a ring's record


class Loaded(Closing):
    """Programs and maps in the kernel, and what did not make it there."""

    def __init__(self) -> None:
        self.programs: dict[str, int] = {}  # descriptors by name; a tracepoint's is its perf event
        self.tracepoints: dict[str, int] = {}
        self.failed: dict[str, str] = {}  # sources and hooks that were not loaded, each with the reason
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

    def mapped(self, name: str) -> MappedArray:
        """The mappable array `name`, in this process's memory; the caller's to close."""
        fd, _, value = self._entry(name)
        return MappedArray(os.dup(fd), np.dtype(value))

    @property
    def map_names(self) -> set[str]:
        """The maps of all programs that were loaded."""
        return set(self._maps)

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
        for fd in (*self.programs.values(), *self.tracepoints.values(), *(entry[0] for entry in self._maps.values())):
            os.close(fd)
        self._rings, self.programs, self.tracepoints, self._maps = [], {}, {}, {}


def dtype(described: Any) -> np.dtype[Any] | None:
    """A numpy type from the child's description of a C type; None for none."""
    return None if described is None else np.dtype(_formats(described))


def _formats(described: Any) -> Any:
    if isinstance(described, list):
        return (_formats(described[0]), tuple(described[1]))
    if isinstance(described, dict):
        return {**described, "formats": [_formats(part) for part in described["formats"]]}
    return described


def load(programs: Sequence[Program], cache: Cache = "use") -> Loaded:
    """Compile and load in a child process; what cannot be loaded is named in `failed`, and the rest goes on.

    Raises
    ------
    SwerveError
        If the child dies before it has answered.
    """
    with Compilation(programs, cache) as compilation:
        return collect(compilation)


def collect(compilation: Compilation) -> Loaded:
    """What a compilation that is under way comes to; waits for it, and ends it.

    Raises
    ------
    SwerveError
        If the child dies before it has answered.
    """
    loaded = Loaded()
    try:
        for reply, descriptors in compilation.replies():
            loaded._take(reply, descriptors)
    except BaseException:
        loaded.close()
        raise
    finally:
        compilation.close()
    return loaded
