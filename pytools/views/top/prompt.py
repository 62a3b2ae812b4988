"""What a person is asked for in the last line of the live view, and what has been typed of it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.text import Text


@dataclass(frozen=True)
class Prompt:
    """Something that is being typed in the last line."""

    question: str
    then: Callable[[str], None]  # what to do with it
    typed: str = ""

    def after(self, key: str, text: str | None) -> Prompt:
        """As it is after a key, or some text."""
        typed = {"backspace": self.typed[:-1], "ctrl+u": ""}.get(key, self.typed + (text or ""))
        return replace(self, typed=typed)

    def line(self, width: int) -> Text:
        """As it is shown: of what is too long, the end."""
        room = max(0, width - len(self.typed) - 3)
        asked = self.question if len(self.question) <= room else self.question[: max(0, room - 1)] + "…"
        return Text(f"{asked}: ", style="cyan").append(self.typed[-max(1, width - 3) :] + "_", "bold")
