"""Agents and controllers of a lab's hosts, as shipped, and the BPF programs of a running agent."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import yaml
from _common import wait_until

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.bpf import syscall
from pytools.lab import Host, Lab
from pytools.signals import PathDelay

SWERVE: Final = [sys.executable, "-m", "steering.cli"]
TC, TRACEPOINT, SOCK, SOCK_OPS, RAW_TRACEPOINT = 3, 5, 9, 13, 17  # BPF_PROG_TYPE_*
_READY_S, _END_S = 60.0, 20.0
_NAME_OFFSET, _NAME_BYTES = 64, 16  # of the name in struct bpf_prog_info


def configure(host: Host, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the configuration that the lab wrote for a host."""
    file = directories.default_config(host.netns)
    config = yaml.safe_load(file.read_text())
    change(config)
    file.write_text(yaml.safe_dump(config, sort_keys=False))


def start_agent(
    lab: Lab, host: Host, env: Mapping[str, str] | None = None, stderr: int | IO[Any] | None = None
) -> subprocess.Popen[str]:
    """Start the agent of a host."""
    return lab.start(host, [*SWERVE, "agent", "-n", host.netns], env, stderr=stderr)


def stop(agent: subprocess.Popen[str]) -> None:
    """End an agent and wait until it has cleaned up."""
    agent.terminate()
    if agent.wait(timeout=_END_S) != 0:
        raise SwerveError(f"the agent ended with exit code {agent.returncode}")


def wait_serving(host: Host) -> None:
    """Wait until the agent of a host accepts clients."""

    def serving() -> bool:
        try:
            Client(directories.agent_socket(host.netns), frozenset()).close()
        except SwerveError:
            return False
        return True

    wait_until(serving, f"the agent of {host.name} accepts clients", _READY_S)


def wait_measured(host: Host, paths: int = 1) -> None:
    """Wait until so many paths of a host have a delay."""
    wait_serving(host)
    seen: set[object] = set()
    with Client(directories.agent_socket(host.netns), frozenset({"path_delay"})) as client:

        def measured() -> bool:
            seen.update(each.path for each in client.read() if isinstance(each, PathDelay) and each.received)
            return len(seen) >= paths

        wait_until(measured, f"{paths} paths of {host.name} have a delay", _READY_S)


@contextlib.contextmanager
def agents(lab: Lab, *hosts: Host) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the agents of these hosts; at the start every path between the lab's hosts has a delay."""
    running: list[subprocess.Popen[str]] = []
    try:
        running += [start_agent(lab, host) for host in hosts]
        for host in hosts:
            wait_measured(host, (len(hosts) - 1) * len(lab.rails))
        yield running
        alive(*running)
        for agent in running:
            stop(agent)
    finally:
        for agent in running:
            if agent.poll() is None:
                agent.kill()
                agent.wait()


def alive(*processes: subprocess.Popen[str]) -> None:
    """Raise if one of these has ended."""
    for each in processes:
        if each.poll() is not None:
            words = each.args if isinstance(each.args, str) else " ".join(map(str, each.args))  # type: ignore[arg-type]
            raise SwerveError(f"{words}: ended with exit code {each.returncode}", "start it by hand to see why")


@contextlib.contextmanager
def controller(lab: Lab, host: Host, policy: str) -> Iterator[subprocess.Popen[str]]:
    """Run the controller of a host as a dry run: it reads all that it would act on."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "policy.yaml"
        file.write_text(policy)
        file.chmod(0o600)
        with Client(directories.agent_socket(host.netns), frozenset({"path_state"})) as client:
            process = lab.start(host, [*SWERVE, "steer", "run", "--policy", str(file), "-n", host.netns], stderr=None)
            try:
                wait_until(client.read, f"the controller of {host.name} judges paths", _READY_S)
                client.close()
                yield process
                alive(process)
            finally:
                process.terminate()
                process.wait(_END_S)


# ---- BPF programs ----


@dataclass(frozen=True)
class BpfProgram:
    """A program that a process holds a descriptor of; `fd` is ours."""

    name: str  # as the kernel has it, at most 15 bytes
    type: int
    fd: int


@contextlib.contextmanager
def programs_of(pid: int) -> Iterator[list[BpfProgram]]:
    """The BPF programs that a process holds, by themselves or by their links."""
    ids: set[int] = set()
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for line in entry.read_text().splitlines():
                if line.startswith("prog_id:"):
                    ids.add(int(line.split()[1]))
    programs: list[BpfProgram] = []
    try:
        for each in sorted(ids):
            fd = syscall.bpf(syscall.PROG_GET_FD_BY_ID, struct.pack("<3I", each, 0, 0))
            info = syscall.object_info(fd, syscall.PROG_INFO_BYTES)
            name = info[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES].rstrip(b"\0").decode()
            programs.append(BpfProgram(name, struct.unpack_from("<I", info)[0], fd))
        yield programs
    finally:
        for program in programs:
            os.close(program.fd)
