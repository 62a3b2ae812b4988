"""What is drawn with: Unicode where the terminal's locale has UTF-8, else plain ASCII. Pure, but for `of_locale`."""

from __future__ import annotations

import locale
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytools.streams import PLAIN

# Queueing by half decades: below 10 µs, 30 µs, 100 µs … up to 10 ms and more. One scale for all paths, so that their
# sparklines compare.
STEPS_NS: Final = (10_000, 31_623, 100_000, 316_228, 1_000_000, 3_162_278, 10_000_000)


@dataclass(frozen=True)
class Glyphs:
    """Characters for what a line of text cannot say."""

    sparks: str  # one for each step, the lowest first
    bar: str
    rule: str
    falling: str
    rising: str
    plain: dict[int, str] | None = None  # what other characters become

    def text(self, text: str) -> str:
        if self.plain is None or text.isascii():
            return text
        return text.translate(self.plain).encode("ascii", "replace").decode()

    def spark(self, values_ns: Sequence[float | None]) -> str:
        """A sparkline; a blank where nothing was measured."""
        return "".join(
            " " if value is None else self.sparks[sum(value >= step for step in STEPS_NS)] for value in values_ns
        )


UNICODE: Final = Glyphs("▁▂▃▄▅▆▇█", "█", "─", "↓", "↑")
ASCII: Final = Glyphs("_.-:=+*#", "#", "-", "v", "^", str.maketrans(PLAIN))


def of_locale() -> Glyphs:
    """What the locale can show, and standard output takes (PYTHONIOENCODING).

    Python itself takes a locale that is not set for UTF-8 (PEP 538), and so do we.
    """
    names = {
        name.lower().replace("-", "").replace("_", "") for name in (locale.getencoding(), sys.stdout.encoding or "")
    }
    return UNICODE if names == {"utf8"} else ASCII
