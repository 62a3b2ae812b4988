"""An agent that is killed (SIGKILL) where the kernel has TCX: nothing of it is left but sockets that are files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import bpf_objects
import pytest
import support

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel import netns
from pytools.kernel.bpf import attach, loader, syscall, tc_programs
from pytools.signals import PathLiveness, Self

CONFIG = """\
host: one
peers: [{name: two, address: 10.77.0.2, clock: shared}]
recording: {fine: 1MiB, coarse: 1MiB}
"""
EVERYTHING = (
    *(("ip", family, *what) for family in ("-4", "-6") for what in (("rule",), ("route", "show", "table", "all"))),
    ("ip", "nexthop"),
    ("ip", "-o", "link"),
    ("tc", "qdisc"),
)


@contextlib.contextmanager
def running(namespace: str, config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent that probes."""
    words = [*support.SWERVE, "agent", "-n", namespace, "--config", str(config)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        support.wait_until(lambda: probes(namespace), 120, "the agent tells of its probes", every_s=0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def probes(namespace: str) -> bool:
    """Whether an agent tells of unanswered probes: nobody is at the other end."""
    with (
        contextlib.suppress(SwerveError),
        Client(directories.agent_socket(namespace), frozenset({"path_liveness"})) as told,
    ):
        signal_ = told.next(2.0)
        return isinstance(signal_, PathLiveness) and signal_.missed > 0
    return False


def everything(namespace: str) -> dict[str, list[str]]:
    """What there is in a namespace that an agent could have made."""
    with netns.inside(namespace):
        found = {" ".join(words): sorted(support.run(list(words)).stdout.splitlines()) for words in EVERYTHING}
        for name, index in attach.interfaces().items():
            found[name] = [f"{each.mechanism} {each.direction} {each.name}" for each in tc_programs.on(name, index)]
    return found


def files(namespace: str) -> set[Path]:
    return {path for path in directories.runtime_dir(namespace).rglob("*") if not path.is_dir()}


def test_a_killed_agent_leaves_nothing_but_sockets_that_its_successor_replaces(
    veth_pair: tuple[str, str], tmp_path: Path
) -> None:
    support.require("bcc", "netns", "tc", "tracefs")
    with loader.load([loader.Program("empty.c", ("empty",))]) as loaded:
        if not syscall.has_tcx(loaded.programs["empty"]):
            pytest.skip("missing: TCX (Linux 6.6)")
    namespace, config = veth_pair[0], tmp_path / "agent.yaml"
    config.write_text(CONFIG)
    config.chmod(0o600)
    before, earlier = everything(namespace), files(namespace)
    pinned = set(Path("/sys/fs/bpf").rglob("*"))
    with running(namespace, config) as agent:
        objects = bpf_objects.held_by(Path(f"/proc/{agent.pid}"))
        assert {kind for kind, _ in objects} == {"prog", "map", "link"}
        assert objects <= bpf_objects.numbered()
        assert {"tcx ingress observe_ingress", "tcx egress observe_egress"} <= set(everything(namespace)["v0"])
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        support.wait_until(lambda: not objects & bpf_objects.numbered(), 10, "its programs, maps and links are gone")
        support.wait_until(lambda: everything(namespace) == before, 20, "the namespace is as it was")
        support.wait_until(lambda: not [pid for pid in children if support.lives(int(pid))], 10, "its children end")
        assert not set(Path("/sys/fs/bpf").rglob("*")) - pinned
        left = files(namespace) - earlier
        assert left and all(path.is_socket() for path in left), f"only sockets are left: {left}"
    with running(namespace, config) as successor:
        assert left <= files(namespace)
        successor.send_signal(signal.SIGTERM)
        assert successor.wait(30) == 0
    assert not files(namespace) - earlier
    assert everything(namespace) == before


def test_a_pacer_that_was_killed_is_replaced_within_seconds(veth_pair: tuple[str, str], tmp_path: Path) -> None:
    support.require("bcc", "netns", "tracefs")
    namespace, config = veth_pair[0], tmp_path / "agent.yaml"
    config.write_text(CONFIG)
    config.chmod(0o600)
    with running(namespace, config) as agent:
        pacer = pacer_of(agent.pid)
        assert pacer is not None
        with Client(directories.agent_socket(namespace), frozenset({"path_liveness", "self"})) as told:
            os.kill(pacer, signal.SIGKILL)
            support.wait_until(lambda: pacer_of(agent.pid) not in (None, pacer), 30, "there is another")
            costs = (each for each in told.within(30) if isinstance(each, Self))
            cost = next(each for each in costs if each.drops["probe_pacer_restarts"])
            assert cost.drops["probe_pacer_restarts"] == 1
            missed = [each.missed for each in told.within(3) if isinstance(each, PathLiveness)]
            assert missed[-1] > missed[0], "probes are sent on"
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0


def pacer_of(agent: int) -> int | None:
    """The process that sends an agent's probes."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"swerve-pacer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None
