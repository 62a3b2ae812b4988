"""A real terminal, which tmux emulates: what is typed in it, what stands on it, how it is set."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

from support import ROOT, lives, run, wait_until

_servers = itertools.count(1)


class Tmux:
    """A terminal with a shell in it."""

    def __init__(self, size: tuple[int, int] = (80, 24), **environment: str) -> None:
        self._name = f"swerve-test-{os.getpid()}-{next(_servers)}"
        width, height = size
        shell = ["env", *(f"{name}={value}" for name, value in environment.items()), "sh"]
        self._tmux("-f", "/dev/null", "-u", "new-session", "-d", "-x", str(width), "-y", str(height), *shell)
        self._tmux("set-option", "-g", "status", "off")
        self._tmux("resize-window", "-x", str(width), "-y", str(height))
        self.press("PS1='$ '; clear", "Enter")
        self.until(lambda: self.text() == "$", "the shell is ready")
        self.before = self.state()

    def _tmux(self, *words: str) -> str:
        return run(["tmux", "-L", self._name, *words]).stdout

    def press(self, *keys: str) -> None:
        """Keys by tmux's names, or texts."""
        self._tmux("send-keys", *keys)

    def enter(self, *words: str) -> None:
        """Have the shell run a command in the repository, and say what its exit code was."""
        quoted = " ".join(f"'{word}'" for word in words)
        self.press(f"cd {ROOT}; clear; {quoted}; echo ended $?", "Enter")

    def lines(self, *options: str) -> list[str]:
        """What stands on it."""
        return [line.rstrip() for line in self._tmux("capture-pane", "-p", *options).splitlines()]

    def text(self) -> str:
        """The same, as one."""
        return "\n".join(self.lines()).strip()

    def meanwhile(self) -> None:
        """Whatever has to go on while something is waited for."""

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until something is so."""

        def turned() -> object:
            self.meanwhile()
            return condition()

        wait_until(turned, 40, f"{what}; the screen is\n{self.text()}", every_s=0.02)

    def shows(self, words: str) -> None:
        """Wait until it does."""
        self.until(lambda: words in self.text(), f"{words!r} is shown")

    def pid(self) -> int:
        """The process in the foreground of the shell."""
        shell = self._tmux("display-message", "-p", "#{pane_pid}").strip()
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        assert len(children) == 1
        return int(children[0])

    def state(self) -> tuple[str, str]:
        """How the terminal is set, and what modes its emulator is in."""
        place = self._tmux("display-message", "-p", "#{pane_tty}").strip()
        modes = "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{keypad_flag} #{wrap_flag} #{bracket_paste_flag}"
        return run(["stty", "-a", "-F", place]).stdout, self._tmux("display-message", "-p", modes)

    def ended(self, code: int) -> str:
        """Wait for the end of what runs in it; what stands on the screen after it."""
        self.shows(f"ended {code}")
        self.until(lambda: self.state() == self.before, "the terminal is as it was")
        return self.text()

    def close(self) -> None:
        """End it, and wait until it has."""
        done = run(["tmux", "-L", self._name, "display-message", "-p", "#{pid} #{pane_pid}"], check=False)
        run(["tmux", "-L", self._name, "kill-server"], check=False)
        ended = [int(pid) for pid in done.stdout.split()]
        wait_until(lambda: not any(map(lives, ended)), 10, "the terminal's server and its shell are gone")
