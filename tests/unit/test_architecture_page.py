"""The map in docs/architecture.md: it names every directory of the sources and no file or page that is not there."""

from __future__ import annotations

import re

from support import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAP = PAGE.partition("## Directories\n```\n")[2].partition("```")[0]


def named() -> set[str]:
    """Files and directories of the map, from the root of the repository; a line starts with names and two blanks."""
    found, top = set(), ""
    for line in MAP.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            top = names[0] if len(names) == 1 else ""
            found.update(each.rstrip("/") for each in names)
        else:
            found.update(f"{top}{each}".rstrip("/") for each in names)
    return found


def test_every_directory_of_sources_is_on_the_map() -> None:
    sources = [file for top in ("bpf", "pytools", "steering") for file in (ROOT / top).rglob("*.[pch]*")]
    rooms = {str(file.parent.relative_to(ROOT)) for file in sources if file.suffix in (".py", ".c", ".h")}
    linked = {room for room in rooms if any(part.is_symlink() for part in [ROOT / room, *(ROOT / room).parents])}
    inner = {room for room in rooms if room.startswith("bpf/include/")}
    assert rooms - linked - inner - named() == set()


def test_what_the_map_names_is_there() -> None:
    assert [each for each in sorted(named()) if not (ROOT / each).exists()] == []


def test_every_page_is_listed() -> None:
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"architecture.md"}
    assert pages - set(re.findall(r"\]\(([\w-]+\.md)\)", PAGE.partition("## All pages")[2])) == set()
