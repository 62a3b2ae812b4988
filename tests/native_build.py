"""Builds the C programs of tests/native: a stand-in for libibverbs and the small applications that use it.

Everything lands in one directory, made once a process and removed at its end. Needs cc and libibverbs' headers. What
the second kernel's tests need of it is built out here: emulated, a compiler takes seconds for each.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

NATIVE = Path(__file__).resolve().parent / "native"
NET = NATIVE.parent.parent / "examples/nccl-net"
VARIABLE = "SWERVE_GUEST_NATIVE"  # in the guest's environment: where `for_guest` has left it
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-O2", "-g", "-std=gnu11", "-Wall", "-Wno-unused-parameter")
PROVIDERS = ("alpha", "beta")


def cc(*arguments: object) -> None:
    """Run the C compiler; its words go to standard error, a failure raises."""
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, *map(str, arguments)], check=True)


@functools.cache
def directory() -> Path:
    """Where the products of this process lie."""
    made = Path(tempfile.mkdtemp(prefix="swerve-native-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@functools.cache
def library(name: str, headers: Path) -> ctypes.CDLL:
    """tests/native/NAME.c as a library: arithmetic of a header, with checks for undefined behaviour."""
    target = directory() / f"{name}.so"
    cc(
        *("-shared", "-fPIC", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"),
        *(f"-I{headers}", NATIVE / f"{name}.c", "-o", target),
    )
    return ctypes.CDLL(str(target))


@functools.cache
def fake_verbs(strip: bool = False) -> Path:
    """The directory that holds the stand-in `libibverbs.so.1` and its providers: a value for LD_LIBRARY_PATH."""
    where = directory() / ("stripped" if strip else "fake")
    where.mkdir()
    shared = ("-shared", "-fPIC", "-fvisibility=hidden", *(("-s",) if strip else ()))
    for provider in PROVIDERS:
        target = where / f"lib{provider}-rdmav34.so"
        cc(*shared, f"-DPROVIDER={provider}", NATIVE / "fake_provider.c", "-o", target)
    script = NATIVE / "fake_verbs.map"
    cc(
        *("-shared", "-fPIC", *(("-s",) if strip else ()), "-Wl,-soname,libibverbs.so.1"),
        *(f"-Wl,--version-script={script}", "-Wl,-rpath,$ORIGIN"),
        *(NATIVE / "fake_verbs.c", *(where / f"lib{provider}-rdmav34.so" for provider in PROVIDERS)),
        *("-o", where / "libibverbs.so.1"),
    )
    return where


@functools.cache
def program(name: str, *flags: str) -> Path:
    """An application from tests/native, linked against the real libibverbs (run it with `environment`)."""
    words = (NATIVE / f"{name}.c", *flags, "-Wl,--as-needed", "-libverbs", "-lpthread", "-ldl")
    return _built(name + "".join(flag.replace("/", "_") for flag in flags), *words)


def _built(name: str, *words: object) -> Path:
    """What these words for the compiler make; in the guest what they made out here."""
    outside = Path(os.environ.get(VARIABLE, "/nowhere"), name)
    if outside.exists():
        return outside
    cc(*words, "-o", directory() / name)
    return directory() / name


@functools.cache
def preload() -> Path:
    """What has perftest post by the extended API on any device."""
    return _built("perftest_extended.so", "-shared", "-fPIC", NATIVE / "perftest_extended.c", "-ldl")


@functools.cache
def pingpong(*flags: str) -> tuple[Path, Path]:
    """The program of examples/nccl-net, and the plugin that it loads."""
    kind, shared = "-sanitized" if flags else "", ("-shared", "-fPIC", "-fvisibility=hidden")
    plugin = _built(f"libnccl-net-swerve{kind}.so", *flags, *shared, NET / "plugin.c", "-libverbs")
    return _built(f"pingpong{kind}", *flags, NET / "pingpong.c", "-ldl"), plugin


def for_guest(place: Path) -> None:
    """Build what the guest's tests use, and copy it there."""
    place.mkdir()
    for each in (program("rc_pair"), preload(), *pingpong(), *pingpong(*SANITIZERS)):
        shutil.copy(each, place)


def environment(strip: bool = False) -> dict[str, str]:
    """The environment in which an application finds the stand-in."""
    return {**os.environ, "LD_LIBRARY_PATH": str(fake_verbs(strip))}


class App:
    """A running `verbs_app`: one command a line, one answer a line (see tests/native/verbs_app.c).

    Parameters
    ----------
    before : sequence of str
        What starts it, such as a launcher and its arguments.
    flags : str
        For the compiler; `-DDLOPEN` has it open the library by hand.
    more : mapping
        Added to its environment.
    """

    def __init__(self, *flags: str, before: tuple[str, ...] = (), more: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*before, str(program("verbs_app", *flags))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**environment(), **(more or {})},
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def do(self, command: str) -> list[str]:
        """Have it done; the words after `ok`, an error raises."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        answer = self.process.stdout.readline()
        first, *words = answer.split() or ["", f"ended with {self.process.wait(10)}"]
        if first != "ok":
            raise AssertionError(f"{command}: {' '.join([first, *words])}")
        return words

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
