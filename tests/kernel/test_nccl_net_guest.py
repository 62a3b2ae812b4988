"""The plugin of examples/nccl-net over two Soft-RoCE rails in the second kernel, one of which fails and heals."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import native_build
import pytest
import rdma_kit
import support

pytestmark = [pytest.mark.guest(only=True, every=5), pytest.mark.deadline(240)]

SECONDS = 2  # at least
LIMIT_S = 5.0  # for what has to happen next, before SWERVE_SLOW_FACTOR
STALL_MS = 200  # what an emulated processor does not exceed by itself
CONNECTIONS = 2  # one each way
NEVER_MS = 60_000  # the device gives up long before
Rails = tuple[rdma_kit.Cable, rdma_kit.Cable]


@pytest.fixture(scope="module")
def rails() -> Iterator[Rails]:
    with rdma_kit.cables("sp", "sb") as [primary, backup]:
        yield primary, backup


class Pingpong:
    """pingpong.c with the plugin, until its standard input ends."""

    def __init__(self, rails: Rails, directory: Path, size: int, stall_ms: int, flags: Sequence[str]) -> None:
        program, plugin = native_build.pingpong(*flags)
        ends = (",".join(each.client.device for each in rails), ",".join(each.server.device for each in rails))
        self._log, self._out = directory / "log", directory / "out"
        with self._log.open("w") as log, self._out.open("w") as out:
            self._process = subprocess.Popen(
                [str(program), str(plugin), *ends, str(size), str(SECONDS)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                env={"SWERVE_NET_STALL_MS": str(stall_ms), "PATH": "/usr/bin:/bin"},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def changes(self, rail: int) -> int:
        """How often a sender has gone over to a rail."""
        return self.log.count(f"sender: rail {rail} from")

    def messages(self) -> int:
        """So far, as it says every 100 ms."""
        said = re.findall(r"^at (\d+)$", self._out.read_text(), re.MULTILINE)
        return int(said[-1]) if said else 0

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            assert self._process.poll() is None, self.log
            return condition()

        try:
            support.wait_until(met, LIMIT_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def goes_on(self, what: str) -> None:
        before = self.messages()
        self.wait_until(lambda: self.messages() > before + 5, what)

    def result(self) -> dict[str, float]:
        """End it; the figures of its last line."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(LIMIT_S * support.slow_factor()) == 0, self.log
        return {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", self._out.read_text())}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def counted(log: str, name: str) -> int:
    """Of all connections of both processes, as they said when they were closed."""
    return sum(int(value) for value in re.findall(rf" {name}=(\d+)", log))


@pytest.mark.parametrize(
    ("size", "stall_ms", "flags"),
    [(1000, STALL_MS, ()), (100_000, STALL_MS, native_build.SANITIZERS), (100_000, NEVER_MS, ())],
    ids=["one_chunk", "four_chunks", "error_completion"],
)
def test_messages_survive_the_loss_of_the_primary_rail_and_return_to_it(
    rails: Rails, tmp_path: Path, size: int, stall_ms: int, flags: Sequence[str]
) -> None:
    primary, _ = rails
    with pingpong(rails, tmp_path, size, stall_ms, flags) as running:
        fail_and_heal(running, primary)
        figures = running.result()
    check(figures, running.log)
    assert counted(running.log, "failures") >= CONNECTIONS  # at either end
    assert counted(running.log, "returns") >= CONNECTIONS
    assert counted(running.log, "chunks") >= 2 * figures["messages"] * (1 + size // 32_768)
    if stall_ms == STALL_MS:
        assert figures["longest_ms"] >= STALL_MS / 2  # the primary did fail under a message
    else:
        assert "failed: transport retry counter exceeded" in running.log


def test_chunks_whose_acknowledgement_is_lost_are_sent_again_and_discarded(rails: Rails, tmp_path: Path) -> None:
    primary, _ = rails
    with pingpong(rails, tmp_path, 100_000, STALL_MS, native_build.SANITIZERS) as running:
        for _ in range(30):  # nothing comes again where the receiver says over the backup, before, what it has
            fail_and_heal(running, primary, primary.server)
            if "came again" in running.log:
                break
        figures = running.result()
    check(figures, running.log)
    assert 0 < counted(running.log, "duplicates") <= counted(running.log, "again")


def test_messages_wait_while_both_rails_are_lost(rails: Rails, tmp_path: Path) -> None:
    with pingpong(rails, tmp_path, 1000, STALL_MS, ()) as running:
        for each in rails:
            each.cut()
        for rail in range(len(rails)):
            failed = f"sender: rail {rail} failed"
            running.wait_until(lambda: running.log.count(failed) >= 1, failed)  # noqa: B023
        for each in rails:
            each.heal()
        running.goes_on("messages again")
        figures = running.result()
    check(figures, running.log)


@contextlib.contextmanager
def pingpong(rails: Rails, *how: Any) -> Iterator[Pingpong]:
    running = Pingpong(rails, *how)
    try:
        running.goes_on("messages over the primary")
        yield running
    finally:
        running.kill()
        for each in rails:
            each.heal()


def fail_and_heal(running: Pingpong, primary: rdma_kit.Cable, *ends: rdma_kit.End) -> None:
    """The primary loses what these ends send, or everything, until both senders use the backup; then it is well."""
    for rail, act in ((1, lambda: primary.cut(*ends)), (0, primary.heal)):
        before = running.changes(rail)
        act()
        running.wait_until(lambda: running.changes(rail) >= before + CONNECTIONS, f"both senders on rail {rail}")  # noqa: B023
        running.goes_on(f"messages over rail {rail}")


def check(figures: dict[str, float], log: str) -> None:
    """Nothing was lost, or came twice or wrong; `pingpong` looked at every byte."""
    print(figures, log, sep="\n")
    assert (figures["lost"], figures["duplicated"], figures["wrong"]) == (0, 0, 0)
    assert figures["messages"] > 0
