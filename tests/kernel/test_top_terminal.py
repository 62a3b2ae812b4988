"""`swerve top` in a real terminal (tmux): keys, sizes, sixteen colours, no UTF-8; and a terminal that is as it was.

The agent is a stand-in on a real socket, but for the tests in which the view brings its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import samples
import tmux
from serving import Served
from support import ROOT, SWERVE, lives, require, run, wait_until
from top_kit import story

from pytools.signals import AnySignal

NETNS = "swerve-t-top"
SECOND_NS = samples.SECOND_NS
CRASHING = """
import sys
from pytools.views.top import app
drawn, draw = 0, app.draw
def crash(*given, **named):
    global drawn
    drawn += 1
    if drawn > 3:
        raise ZeroDivisionError("made to crash")
    return draw(*given, **named)
app.draw = crash
from steering.cli import main
main()
"""


class Tmux(tmux.Tmux):
    """A terminal, and the agent that is attached to."""

    def __init__(self, served: Served, size: tuple[int, int], **environment: str) -> None:
        self.served = served
        self._told_ns = 0
        super().__init__(size, **environment)

    def meanwhile(self) -> None:
        """Let the agent go on telling."""
        self.served.turn(0.02)
        if self.served.server.clients and time.monotonic_ns() - self._told_ns > SECOND_NS // 5:
            self._told_ns = time.monotonic_ns()
            for signal_ in now(story()):
                self.served.bus.publish(signal_)
            self.served.turn()

    def top(self, *words: str, start: tuple[str, ...] = tuple(SWERVE)) -> None:
        self.enter(*start, "top", "-n", NETNS, *words)

    def open(self, *words: str, start: tuple[str, ...] = tuple(SWERVE)) -> None:
        self.top(*words, start=start)
        self.shows("swerve h1")
        assert self.state() != self.before


def now(told: list[AnySignal]) -> list[AnySignal]:
    """The story, as if it ended now."""
    shift_ns = time.monotonic_ns() - samples.AT_NS - SECOND_NS // 2
    moved = []
    for each in told:
        fields = {"at_ns": each.at_ns + shift_ns}
        for name in ("since_ns", "happened_ns", "first_ns", "last_ns"):
            if isinstance(getattr(each, name, None), int):
                fields[name] = getattr(each, name) + shift_ns
        moved.append(msgspec.structs.replace(each, **fields))
    return moved


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    if shutil.which("tmux") is None:
        pytest.skip("missing: the command tmux (package tmux)")
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    one = Served(tmp_path / "run" / NETNS / "agent.sock", 1 << 20)
    yield one
    one.close()


@pytest.fixture
def terminal(served: Served) -> Iterator[Callable[..., Tmux]]:
    made: list[Tmux] = []

    def make(size: tuple[int, int] = (80, 24), **environment: str) -> Tmux:
        made.append(Tmux(served, size, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
def test_keys_do_in_a_terminal_what_the_help_says(terminal: Callable[..., Tmux], size: tuple[int, int]) -> None:
    screen = terminal(size)
    screen.open()
    screen.shows("h2 rail1 drained")
    assert len(screen.lines()) == size[1]
    screen.press("?")
    screen.shows("freeze or continue")
    screen.press("Escape")
    screen.shows("h2 rail1 drained")
    screen.press("2")
    screen.shows("10.9.0.1:40029 → 10.9.0.2:5201")
    screen.press("3")
    screen.shows("interface")
    screen.press("3")
    screen.shows("rxe0 20")
    screen.press("4")
    screen.shows("newest first")
    screen.press("1", "Down")
    screen.shows("worst first 2/3")
    screen.press("k", "Enter")
    screen.shows("queueing of single probes")
    screen.press("Escape")  # what follows at once would be another key, with Alt
    screen.shows("h2 rail1 drained")
    screen.press("t")
    screen.shows("last 40 s")
    screen.press("/", "rail3", "Enter")
    screen.shows("filter: rail3 (1 of 3)")
    screen.press("Escape")
    screen.press("Space")
    screen.shows("FROZEN")
    screen.press("Space", "+")
    screen.shows("every 2 s")
    screen.press("z")
    screen.shows("zeroed")
    screen.press("d")
    screen.shows("--allow-actions")
    screen.press("q")
    screen.ended(0)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGQUIT, 131)]
)
def test_a_signal_leaves_the_terminal_as_it_was(terminal: Callable[..., Tmux], number: int, code: int) -> None:
    screen = terminal()
    screen.open()
    os.kill(screen.pid(), number)
    screen.ended(code)


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal: Callable[..., Tmux]) -> None:
    screen = terminal()
    screen.open()
    screen.press("/", "abc", "C-c")
    screen.ended(130)


def test_a_crash_leaves_the_terminal_as_it_was_and_says_what_happened(
    terminal: Callable[..., Tmux], tmp_path: Path
) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    screen = terminal((200, 50))
    screen.top("-i", "0.1", start=("env", f"PYTHONPATH={ROOT}", sys.executable, str(script)))
    assert "made to crash" in screen.ended(1)


def test_an_agent_that_goes_leaves_the_terminal_as_it_was(terminal: Callable[..., Tmux], served: Served) -> None:
    screen = terminal()
    screen.open()
    served.server.close()
    assert "closed the connection" in screen.ended(1).replace("\n", "")


def test_it_can_be_put_aside_and_come_back(terminal: Callable[..., Tmux]) -> None:
    screen = terminal()
    screen.open()
    pid = screen.pid()
    os.kill(pid, signal.SIGTSTP)
    screen.until(lambda: screen.state() == screen.before, "the terminal is as it was")
    screen.press("fg", "Enter")
    screen.shows("swerve h1")
    screen.press("q")
    screen.until(lambda: not Path(f"/proc/{pid}").exists(), "it ends")
    screen.until(lambda: screen.state() == screen.before, "the terminal is as it was")


@pytest.mark.parametrize("variable", [("LC_ALL", "C"), ("PYTHONIOENCODING", "ascii")])
def test_without_utf8_all_is_ascii(terminal: Callable[..., Tmux], variable: tuple[str, str]) -> None:
    screen = terminal((80, 24), **dict([variable]))
    screen.open()
    screen.shows("trend 40 s")
    screen.shows("+-450 ns")
    for keys in (("2",), ("3",), ("4",), ("1", "Enter"), ("?",)):
        screen.press(*keys)
        screen.until(lambda: "swerve h1" in screen.text(), "a frame")
        assert screen.text().isascii()
    screen.press("q")
    screen.ended(0)


@pytest.mark.parametrize("how", ["default", "option", "environment"])
def test_colours_are_the_sixteen_or_none(terminal: Callable[..., Tmux], how: str) -> None:
    screen = terminal(**({"NO_COLOR": "1"} if how == "environment" else {}))
    screen.open(*(["--no-color"] if how == "option" else []))
    screen.shows("h2 rail1 drained")
    codes = {
        code for line in screen.lines("-e") for each in re.findall(r"\x1b\[([\d;]*)m", line) for code in each.split(";")
    }
    assert not codes & {"38", "48"}, "a colour beyond the sixteen"
    colors = {int(code) for code in codes if code} & {*range(30, 38), *range(90, 98)}
    assert bool(colors) == (how == "default")
    assert "7" in codes, "the selected row is not marked"
    screen.press("q")
    screen.ended(0)


# ---- no terminal ----


def test_in_a_pipe_it_is_a_report_and_ends(served: Served, tmp_path: Path) -> None:
    for words, frames in (((), 1), (("-c", "2", "-i", "0.1"), 2)):
        out = tmp_path / "out"
        with out.open("w") as file:
            process = subprocess.Popen(
                [*SWERVE, "top", "-n", NETNS, *words], cwd=ROOT, stdout=file, stdin=subprocess.DEVNULL
            )

            def ended(process: subprocess.Popen[bytes] = process) -> bool:
                served.turn(0.02)
                if served.server.clients:
                    for each in now(story())[-60:]:
                        served.bus.publish(each)
                return process.poll() is not None

            wait_until(ended, 30, "the report is made", every_s=0)
        text = out.read_text()
        assert process.returncode == 0 and text.count("swerve h1") == frames and "\x1b" not in text
        assert "last acts" in text or "h2 rail1" in text


# ---- an agent of its own ----

CONFIG = "host: h1\npeers: [{name: h2, address: 10.77.0.2, clock: shared}]\nrecording: {fine: 1MiB, coarse: 1MiB}\n"


def own_agent_of(pid: int) -> list[int]:
    """The agent that a view runs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children if b"cli.agent" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    require("root", "bcc", "netns", "ip")
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    file = tmp_path / "agent.yaml"
    file.write_text(CONFIG)
    return file


def test_without_an_agent_it_measures_by_itself_for_as_long_as_it_is_open(
    veth_pair: tuple[str, str], config: Path
) -> None:
    done = run([*SWERVE, "top", "-n", veth_pair[0], "--config", str(config)], cwd=ROOT)
    assert done.stdout.startswith("swerve h1") and "own agent" in done.stdout.splitlines()[0]
    pid = int(re.search(r"measuring by itself \(process (\d+)\)", done.stderr)[1])  # type: ignore[index]
    assert not Path(f"/proc/{pid}").exists()
    assert not (config.parent / "run" / veth_pair[0] / "agent.sock").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_agent_ends_with_it_however_it_ends(veth_pair: tuple[str, str], config: Path, number: int) -> None:
    command = [*SWERVE, "top", "-n", veth_pair[0], "--config", str(config), "-i", "1"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as view:
        agent = wait_until(lambda: own_agent_of(view.pid), 30, "it runs an agent")[0]
        wait_until((config.parent / "run" / veth_pair[0] / "agent.sock").exists, 60, "the agent serves")
        view.send_signal(number)
        view.wait(30)
    wait_until(lambda: not lives(agent), 30, "the agent has ended")


def test_an_agent_that_cannot_start_is_said_in_one_line(namespace: str, config: Path) -> None:
    config.write_text("host: h1\npeers: 7\n")
    done = run([*SWERVE, "top", "-n", namespace, "--config", str(config)], cwd=ROOT, check=False)
    assert done.returncode == 1 and "the agent that was to measure ended: " in done.stderr.splitlines()[-1]
