#!/usr/bin/env python3
"""The lists in docs/ that are made of the program's own tables, so that a meaning is written once.

    python scripts/reference.py

writes docs/metrics.txt (every metric with its type, labels and meaning) and docs/columns.txt (those of `swerve top`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pytools.views.metrics.families import FAMILIES, PATH, Family
from pytools.views.top import lists, paths
from pytools.views.top.fields import Field
from pytools.views.top.glyphs import UNICODE
from pytools.views.top.state import Known

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
_TITLES: Final = {"flows": "Flows", "links": "Links", "rdma": "RDMA queue pairs", "events": "Events"}


def _metric(name: str, family: Family) -> str:
    """A line of its name, type and labels, and its meaning below."""
    labels = family.labels
    if labels[: len(PATH)] == PATH:
        labels = ("PATH", *labels[len(PATH) :])
    meaning = textwrap.fill(family.help, 100, initial_indent="    ", subsequent_indent="    ")
    return f"{name} {family.kind}{' {' + ', '.join(labels) + '}' if labels else ''}\n{meaning}\n"


def metrics() -> str:
    """All metrics, in the order of the exposition."""
    head = f"The metrics of `swerve metrics`. PATH stands for the labels {', '.join(PATH)}.\n"
    return "\n".join([head, *(_metric(name, family) for name, family in FAMILIES.items())])


def columns() -> str:
    """All columns of the live view, each list in the order in which it shows them."""
    found: dict[str, Sequence[Field[Any]]] = {"Paths": paths.fields(UNICODE)}
    found |= {_TITLES[name]: panel(Known(), 0).fields for name, panel in lists.PANELS.items()}
    parts = ["The columns of `swerve top`.\n"]
    for title, fields in found.items():
        parts.append("\n".join([title, *(f"    {field.heading:<13} {field.meaning}" for field in fields), ""]))
    return "\n".join(parts)


FILES: Final[dict[str, Callable[[], str]]] = {"metrics.txt": metrics, "columns.txt": columns}

if __name__ == "__main__":
    for file, made in FILES.items():
        (DOCS / file).write_text(made())
