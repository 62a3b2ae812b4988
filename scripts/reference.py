#!/usr/bin/env python3
"""The lists in docs/ that are made of the program's own tables, so that a meaning is written once.

    python scripts/reference.py

writes docs/signals.txt (every field of every signal, from the comments in pytools/signals.py), docs/metrics.txt (every
metric with its type, labels and meaning) and docs/columns.txt (those of `swerve top`).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytools.views.metrics.families import FAMILIES, PATH, Family
from pytools.views.top import lists, paths
from pytools.views.top.fields import Field
from pytools.views.top.glyphs import UNICODE
from pytools.views.top.state import Known

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
_TITLES: Final = {"flows": "Flows", "links": "Links", "rdma": "RDMA queue pairs", "events": "Events"}


def _comment(lines: list[str], field: ast.AnnAssign) -> str:
    """The comment behind a field, or else the one above it."""
    behind = lines[(field.end_lineno or field.lineno) - 1].encode()[field.end_col_offset :].decode()
    if "#" in behind:
        return behind.partition("#")[2].strip()
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not re.match(r"\s+# ", line):
            break
        above.insert(0, line.partition("#")[2].strip())
    return " ".join(above)


def _kinds() -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Name, meaning and fields of each record and of each part of one; the name of a record is its `type`."""
    source = (ROOT / "pytools" / "signals.py").read_text()
    lines = source.splitlines()
    for kind in ast.parse(source).body:
        if isinstance(kind, ast.ClassDef) and kind.name != "Signal":
            tags = [ast.literal_eval(each.value) for each in kind.keywords if each.arg == "tag"]
            fields = [
                (each.target.id, ast.unparse(each.annotation), _comment(lines, each))
                for each in kind.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            yield tags[0] if tags else kind.name, ast.get_docstring(kind) or "", fields


def signals() -> str:
    """All records and their parts, in the order of the source."""
    parts = ["The fields of every signal. None is null. For units and fields without a text see docs/signals.md.\n"]
    for name, meaning, fields in _kinds():
        part = [name, textwrap.indent(meaning, "    "), ""]
        for field, kind, text in fields:
            part.append(textwrap.fill(f"{field}: {kind}", 112, initial_indent="    ", subsequent_indent=" " * 12))
            if text:
                part.append(textwrap.fill(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 8))
        parts.append("\n".join([*part, ""]))
    return "\n".join(parts)


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


FILES: Final[dict[str, Callable[[], str]]] = {"signals.txt": signals, "metrics.txt": metrics, "columns.txt": columns}

if __name__ == "__main__":
    for file, made in FILES.items():
        (DOCS / file).write_text(made())
