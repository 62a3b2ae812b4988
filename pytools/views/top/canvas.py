"""The whole screen of the live view as lines of text, of which only those that changed are drawn.

And what is being typed in its last line. One thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from rich.console import Console
from rich.segment import Segment
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


class Canvas(Widget):
    """Lines of text; only those that changed are drawn again."""

    DEFAULT_CSS: ClassVar[str] = "Canvas { height: 1fr; width: 1fr; }"

    def __init__(self, color: bool, resized: Callable[[], None]) -> None:
        super().__init__()
        self._resized = resized
        self._shown: list[Text] = []
        self._styles = Console(no_color=not color, color_system="standard", width=1, height=1)
        self._color = color

    def on_resize(self) -> None:
        """Other lines are wanted now."""
        self._resized()

    def show(self, lines: list[Text]) -> None:
        before, self._shown = self._shown, lines
        if len(before) != len(lines):
            self.refresh()
            return
        for y, (old, new) in enumerate(zip(before, lines, strict=True)):
            if old != new or old.style != new.style:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._shown):
            return Strip.blank(width)
        text = self._shown[y]
        if text.spans:
            segments = list(text.render(self._styles, end=""))
        else:  # of a text in one style rich yields no style
            segments = [Segment(text.plain, self._styles.get_style(text.style))]
        if not self._color:
            segments = [
                segment._replace(style=segment.style.without_color if segment.style else None) for segment in segments
            ]
        return Strip(segments).adjust_cell_length(width)


@dataclass(frozen=True)
class Prompt:
    """Something that is being typed in the last line."""

    question: str
    then: Callable[[str], None]  # what to do with it
    typed: str = ""

    def after(self, key: str, text: str | None) -> Prompt:
        typed = {"backspace": self.typed[:-1], "ctrl+u": ""}.get(key, self.typed + (text or ""))
        return replace(self, typed=typed)

    def line(self, width: int) -> Text:
        """As it is shown: of what is too long, the end."""
        room = max(0, width - len(self.typed) - 3)
        asked = self.question if len(self.question) <= room else self.question[: max(0, room - 1)] + "…"
        return Text(f"{asked}: ", style="cyan").append(self.typed[-max(1, width - 3) :] + "_", "bold")
