"""The pictures of the live view in docs/, from one fixed story: `python tests/top_pictures.py` makes them anew."""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Mapping
from pathlib import Path

from top_kit import story
from top_pilot import Orders, Script, app

from pytools.views.actions import Mode

SIZE = (132, 40)
DOCS = Path(__file__).resolve().parent.parent / "docs"
# File -> the keys that lead to what it shows.
PICTURES: Mapping[str, tuple[str, ...]] = {
    "top-paths.svg": (),
    "top-detail.svg": ("enter",),
    "top-events.svg": ("4",),
}


async def _made(keys: tuple[str, ...]) -> str:
    view = app(Script(story()), steering=Orders(Mode(True, True)))
    async with view.run_test(size=SIZE) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        return view.export_screenshot(title=f"swerve top on {view.known.model.host}")


def picture(name: str) -> str:
    """One picture as SVG. It loads nothing: fonts are those of whoever looks at it."""
    drawn = asyncio.run(_made(PICTURES[name]))
    return re.sub(r"\s*(@font-face \{.*?\}|<!--.*?-->)", "", drawn, flags=re.DOTALL).strip() + "\n"


def words(svg: str) -> list[str]:
    """What a picture says, however it is drawn."""
    found = [html.unescape(each).replace("\xa0", " ").strip() for each in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]
    return [each for each in found if each]


if __name__ == "__main__":
    for file in PICTURES:
        (DOCS / file).write_text(picture(file))
