"""What the guest's tests load most, compiled out here: LLVM, emulated, takes half a minute for each program.

The guest has this machine's compiler, headers and sources, so it would come to the same code; its kernel verifies and
runs it. What tests/kernel/test_loader.py loads is compiled in there. An entry that the guest looks for by another name
is not found, and compiled in there as well.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import probe_kit
import tcp_kit

from pytools import directories
from pytools.config import AgentConfig, Probe, Tcp
from pytools.kernel.bpf import cache, loader
from pytools.kernel.bpf.compiler_client import Program, bpf_dir
from pytools.kernel.features import Finding
from pytools.sources import programs
from pytools.sources.rdma import providers
from steering.actuators import flow_table, ports

VARIABLE = "SWERVE_GUEST_COMPILED"  # in the guest's environment: where they are (tests/conftest.py)
_OFFSET_OF_VERSION = 0x20E  # in a bzImage, from 0x200 on (Documentation/arch/x86/boot.rst)


def wanted() -> list[Program]:
    """The programs, as tests name them."""
    config = AgentConfig("", [], Probe(port=probe_kit.PORT))
    with mock.patch.object(programs.features, "program", lambda _: Finding(False)):  # the guest's kernel is too old
        connections = programs.tcp_connections(Tcp(flows=1024))
    probes, samples = programs.probes(config), programs.samples(config)
    return [
        *programs.observers(probes, connections),
        probes,
        programs.probes(AgentConfig("", [], virtual_clock="any")),
        samples,
        programs.observers(probes, connections, samples)[-1],
        loader.Program("probe.c", ("probe_egress", "probe_ingress")),
        loader.Program("empty.c", ("empty",)),
        tcp_kit.program(causes=True),
        flow_table.PROGRAM,
        ports.PROGRAM,
        providers.program(),
    ]


def put(image: Path, directory: Path) -> None:
    """Compile them, and put them down by the names that they have under another kernel."""
    directory.mkdir()
    for under_way in [loader.Compilation([each]) for each in wanted()]:
        loader.collect(under_way).close()
    with _running(image):
        there = _names(wanted())
    for here, name in zip(_names(wanted()), there, strict=True):
        with suppress(FileNotFoundError):  # it cannot be compiled, as the guest will say
            shutil.copyfile(directories.compiled_dir() / here, directory / name)


def _names(made: Sequence[Program]) -> list[str]:
    cache.sources_digest.cache_clear()
    return [
        cache.name_of(
            {
                "source": each.source,
                "defines": dict(each.defines),
                "functions": [[name, each.kinds.get(name, "tc")] for name in each.functions],
            },
            str(bpf_dir()),
        )
        for each in made
    ]


@contextmanager
def _running(image: Path) -> Iterator[None]:
    """As if this kernel ran."""
    raw = image.read_bytes()
    begin = 0x200 + int.from_bytes(raw[_OFFSET_OF_VERSION : _OFFSET_OF_VERSION + 2], "little")
    said = raw[begin : raw.index(b"\0", begin)].decode()
    ours = os.uname()
    words = (ours.sysname, ours.nodename, said.split()[0], said[said.index("#") :], ours.machine)
    with mock.patch.object(os, "uname", lambda: os.uname_result(words)):
        yield
