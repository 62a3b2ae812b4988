#!/usr/bin/env python3
"""Every link between the repository's Markdown pages leads to a file, and to a heading where it names one.

Looks at README.md, CONTRIBUTING.md and docs/; links to other sites are not followed. Prints what is wrong and
exits with 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\((?P<inline>[^)\s]+)[^)]*\)|^\[[^\]]+\]:\s*(?P<reference>\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, spaces to hyphens."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        base = re.sub(r"[^\w\- ]", "", re.sub(r"[`*_]", "", heading).lower()).replace(" ", "-")
        number = 0
        while (anchor := base if number == 0 else f"{base}-{number}") in found:
            number += 1
        found.add(anchor)
    return found


def complaints(page: Path) -> list[str]:
    """What is wrong with the links of one page."""
    text = page.read_text()
    wrong = []
    for match in LINK.finditer(CODE.sub("", FENCE.sub("", text))):
        target = match["inline"] or match["reference"]
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists():
            wrong.append(f"{page.relative_to(ROOT)}: {target} leads nowhere")
        elif anchor and place.suffix == ".md" and anchor not in anchors(place.read_text()):
            wrong.append(f"{page.relative_to(ROOT)}: {target}: {place.name} has no such heading")
    return wrong


def main() -> int:
    """Look at every page."""
    pages = [page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if page.exists()]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    wrong = [complaint for page in pages for complaint in complaints(page)]
    print("\n".join(wrong) or f"links: {len(pages)} pages")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
