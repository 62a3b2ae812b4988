"""What the guest's tests load most, compiled out here: LLVM, emulated, takes half a minute for each program.

The guest has this machine's compiler, headers and sources, so it would come to the same code by the same name; its
kernel verifies and runs it. What tests/kernel/test_loader.py loads is compiled in there.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import probe_kit
import tcp_kit

from pytools import directories
from pytools.config import AgentConfig, Probe, Tcp
from pytools.kernel.bpf import loader
from pytools.kernel.bpf.compiler_client import Program
from pytools.sources import programs
from pytools.sources.rdma import providers
from steering.actuators import flow_table, ports

VARIABLE = "SWERVE_GUEST_COMPILED"  # in the guest's environment: where they are (tests/conftest.py)


def wanted() -> list[Program]:
    """The programs, as tests name them."""
    config = AgentConfig("", [], Probe(port=probe_kit.PORT))
    guest = replace(programs.running(), packet_namespaces=False)  # its kernel is too old
    connections = programs.tcp_connections(Tcp(flows=1024), guest)
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


def put(directory: Path) -> None:
    """Compile them; their names there are the same, for nothing of the kernel is in them."""
    directory.mkdir()
    with loader.Compilation(wanted()) as under_way:
        for reply, descriptors in under_way.replies():
            for fd in descriptors:
                os.close(fd)
            with suppress(OSError):  # it cannot be compiled, as the guest will say
                shutil.copyfile(directories.compiled_dirs()[0] / reply["entry"], directory / reply["entry"])
