"""A libnvidia-ml.so with two GPUs whose answers the caller sets (tests/native/fake_nvml.c)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import native_build

EVERY = -1  # GPU


@functools.cache
def built(*flags: str) -> Path:
    target = native_build.directory() / f"fake_nvml{''.join(flags)}.so"
    native_build.cc("-shared", "-fPIC", *flags, native_build.NATIVE / "fake_nvml.c", "-o", target, "-lpthread")
    return target


class Fake:
    """The library, with its answers; a fresh copy for each test, because its state lives as long as the process."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.fake_calls.restype = ctypes.c_ulonglong

    def set(self, gpu: int = EVERY, **values: int) -> None:
        for name, value in values.items():
            self.library.fake_set(name.encode(), gpu, ctypes.c_ulonglong(value))

    def fail(self, function: str, status: int, gpu: int = EVERY) -> None:
        self.library.fake_fail(function.encode(), gpu, ctypes.c_ulonglong(status))

    def hang(self, function: str, gpu: int = EVERY) -> None:
        self.library.fake_hang(function.encode(), gpu)

    def release(self) -> None:
        self.library.fake_release()

    def calls(self, function: str, gpu: int = 0) -> int:
        return int(self.library.fake_calls(function.encode(), gpu))
