"""A real chronyd understands what it is fed: the very offset, the very drift. It runs with -x: no clock is touched."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import support

from pytools.sources.clocks import slew
from pytools.sources.clocks.chrony import ChronyFeed, realtime_difference_ns

OFFSET_NS = 123_456_000
DRIFT_PPM = 20
CONFIGURATION = """\
refclock SOCK {place}/swerve.sock refid SWRV poll 0 filter 1 precision 1e-7
port 0
cmdport 0
bindcmdaddress {place}/command.sock
pidfile {place}/pid
"""


@dataclass
class Daemon:
    """A chronyd in a namespace of its own, started by the test when it likes."""

    netns: str
    place: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """Where it takes samples."""
        return self.place / "swerve.sock"

    def start(self) -> None:
        """Start it, and wait until it takes samples and commands."""
        configuration = self.place / "chrony.conf"
        configuration.write_text(CONFIGURATION.format(place=self.place))
        command = ["ip", "netns", "exec", self.netns, "chronyd", "-d", "-x", "-u", "root", "-f", str(configuration)]
        log = (self.place / "log").open("wb")
        with log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        support.wait_until(
            lambda: self.socket.exists() and (self.place / "command.sock").exists(), 10, f"chronyd is up:\n{self.log}"
        )

    @property
    def log(self) -> str:
        """What it wrote."""
        return (self.place / "log").read_text()

    def ask(self, what: str) -> list[str]:
        """The fields of the first line of one of chronyc's reports."""
        command = ["chronyc", "-n", "-c", "-h", str(self.place / "command.sock"), what]
        return support.run(command).stdout.splitlines()[0].split(",")

    def end(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture
def daemon(namespace: str, tmp_path: Path) -> Iterator[Daemon]:
    for command in ("chronyd", "chronyc"):
        if shutil.which(command) is None:
            pytest.skip(f"missing: the command {command} (package chrony)")
    tmp_path.chmod(0o700)  # chronyd makes no command socket where others may write
    daemon = Daemon(namespace, tmp_path)
    yield daemon
    daemon.end()


def correction() -> tuple[int, ...] | None:
    """What the kernel does to the clock's rate."""
    read = slew.read()
    return None if read is None else (read.status, read.offset, read.freq, read.constant, read.tick)


def test_chronyd_reads_our_offset_and_drift(daemon: Daemon) -> None:
    before, difference_ns = correction(), realtime_difference_ns()
    feed = ChronyFeed(str(daemon.socket))
    try:
        begin_ns = time.time_ns()

        def offset_at(realtime_ns: int) -> int:
            return OFFSET_NS + (realtime_ns - begin_ns) * DRIFT_PPM // 1_000_000

        def feed_on() -> int:
            now_ns = time.time_ns()
            feed.send(time.monotonic_ns(), now_ns, offset_at(now_ns))
            return feed.sent

        feed_on()
        assert feed.drops() == {"chrony_samples_lost": 1}  # nobody is there yet
        daemon.start()
        support.wait_until(lambda: feed_on() and daemon.ask("tracking")[1] == "SWRV", 30, "chronyd follows the source")
        support.wait_until(lambda: feed_on() and int(daemon.ask("sourcestats")[1]) >= 6, 30, "chronyd has six samples")

        source, tracking = daemon.ask("sources"), daemon.ask("tracking")
        expected_s = offset_at(time.time_ns()) / 1e9
        assert source[1:3] == ["*", "SWRV"]
        assert int(source[5], 8) != 0  # reach
        # With -x chronyd keeps a clock of its own that follows us: "system time" is what the kernel's lacks.
        assert float(tracking[4]) == pytest.approx(expected_s, abs=5e-5)
        assert float(tracking[7]) == pytest.approx(-DRIFT_PPM, abs=0.1)  # ppm; the system's clock is slow
        assert feed.drops() == {"chrony_samples_lost": 1}
    finally:
        feed.close()
    assert "Unexpected" not in daemon.log
    assert correction() == before, "the kernel's clock was touched"
    assert abs(realtime_difference_ns() - difference_ns) < 1_000_000, "the kernel's clock was stepped"
