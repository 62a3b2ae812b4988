"""A process that calls NCCL's profiler plugin as NCCL does (tests/native/nccl_app.c), both built with a sanitizer."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from pathlib import Path

import native_build
from support import ROOT

from pytools.kernel.native import NCCL
from pytools.sources.jobs.nccl import ring as rings

ADDRESS, THREAD = "address,undefined", "thread"
SOURCES = ROOT / "pytools/sources/jobs/nccl"


@functools.cache
def built(sanitizer: str) -> tuple[Path, Path]:
    """The caller, and the plugin."""
    flags = ("-O1", f"-I{SOURCES}", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    app, plugin = (native_build.directory() / f"{name}-{sanitizer}" for name in ("nccl_app", "plugin.so"))
    native_build.cc(*flags, native_build.NATIVE / "nccl_app.c", "-o", app, "-ldl", "-lpthread")
    native_build.cc(*flags, *NCCL.flags, NCCL.source, "-o", plugin)
    return app, plugin


@functools.cache
def built_empty() -> Path:
    """The plugin of bench/nccl_plugin.py that does nothing."""
    plugin = native_build.directory() / "empty.so"
    flags = ("-Wextra", "-Werror", f"-I{SOURCES}", "-shared", "-fPIC", "-fvisibility=hidden")
    native_build.cc(*flags, "-Wno-unused-parameter", ROOT / "bench/nccl_empty.c", "-o", plugin)
    return plugin


@functools.cache
def limit() -> ctypes.CDLL:
    """What is in pytools/sources/jobs/nccl/limit.h."""
    library = native_build.library("nccl_limit", SOURCES)
    library.begins.restype = library.at.restype = ctypes.c_uint64
    library.begins.argtypes = library.at.argtypes = [ctypes.c_uint64]
    library.next.restype = ctypes.c_uint8
    library.next.argtypes = [ctypes.c_uint8, ctypes.c_int]
    return library


def count_limit() -> int:
    """How many operations of a period are recorded."""
    return ctypes.c_uint64.in_dll(limit(), "limit").value


class Job(native_build.App):
    """One process that calls the plugin."""

    def __init__(
        self, directory: Path | None, version: int, sanitizer: str = ADDRESS, plugin: Path | None = None
    ) -> None:
        app, ours = built(sanitizer)
        place = {} if directory is None else {rings.DIRECTORY_VARIABLE: str(directory)}
        self.process = subprocess.Popen(
            [str(app), str(plugin or ours), str(version)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **place},
        )

    def end(self) -> None:
        """Let it end by itself, which must succeed."""
        assert self.process.stdin is not None
        self.process.stdin.write("exit\n")
        assert self.process.wait(20) == 0
