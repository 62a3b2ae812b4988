#!/usr/bin/env python3
"""The lists in docs/ that are made of the program's own tables, so that a meaning is written once.

    python scripts/reference.py

writes docs/signals.txt (every field of every signal, from the comments in pytools/signals/), docs/metrics.txt (every
metric with its type, labels and meaning), docs/columns.txt (those of `swerve top`), and docs/config.txt and
docs/policy.txt (every key of the two files).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import keys

from pytools import units
from pytools.views.columns import Column
from pytools.views.metrics.families import FAMILIES, PATH, Family
from pytools.views.top import lists, paths
from pytools.views.top.glyphs import UNICODE
from pytools.views.top.state import Known

ROOT: Final = Path(__file__).resolve().parent.parent
DOCS: Final = ROOT / "docs"
# In the order of the list.
_SIGNALS: Final = ("base", "delays", "clocks", "tcp", "host", "links", "rdma", "jobs", "gpu", "steering")
_TITLES: Final = {"flows": "Flows", "links": "Links", "rdma": "RDMA queue pairs", "events": "Events", "jobs": "Jobs"}


def _kinds() -> Iterator[tuple[str, str, dict[str, tuple[str, str]]]]:
    """Name, meaning and fields of each record and of each part of one; the name of a record is its `type`."""
    for module in _SIGNALS:
        for kind, fields in keys.classes(ROOT / "pytools" / "signals" / f"{module}.py"):
            if kind.name not in ("Signal", "Header"):
                tags = [ast.literal_eval(each.value) for each in kind.keywords if each.arg == "tag"]
                yield tags[0] if tags else kind.name, ast.get_docstring(kind) or "", fields


def _literals() -> dict[str, str]:
    """What each name of a set of words stands for."""
    modules = (ast.parse((ROOT / "pytools" / "signals" / f"{module}.py").read_text()) for module in _SIGNALS)
    assigned = [each for module in modules for each in module.body if isinstance(each, ast.Assign)]
    found = {ast.unparse(each.targets[0]): ast.unparse(each.value) for each in assigned}
    return {name: value for name, value in found.items() if value.startswith("Literal[")}


def signals() -> str:
    """All records and their parts, module by module."""
    literals = _literals()
    parts = ["The fields of every signal. None is null. For units and fields without a text see docs/signals.md.\n"]
    for name, meaning, fields in _kinds():
        part = [name, textwrap.indent(meaning, "    "), ""]
        for field, (kind, text) in fields.items():
            words = re.sub(r"\w+", lambda name: literals.get(name[0], name[0]), kind)
            part.append(textwrap.fill(f"{field}: {words}", 112, initial_indent="    ", subsequent_indent=" " * 12))
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
    found: dict[str, Sequence[Column[Any]]] = {"Paths": paths.fields(UNICODE)}
    found |= {_TITLES[name]: panel(Known(), 0).listing.columns for name, panel in lists.PANELS.items()}
    parts = ["The columns of `swerve top`.\n"]
    for title, fields in found.items():
        parts.append("\n".join([title, *(f"    {field.heading:<13} {field.meaning}" for field in fields), ""]))
    return "\n".join(parts)


def _keys(head: str, found: Sequence[keys.Key]) -> str:
    """What each key is and holds in a line, and its meaning below."""
    parts = [head]
    for key in found:
        parts.append(textwrap.fill(key.head, 116, subsequent_indent=" " * 8, break_on_hyphens=False))
        parts.append(textwrap.fill(key.meaning, 116, initial_indent="    ", subsequent_indent="    "))
    return "\n".join([*parts, ""])


def config() -> str:
    """All keys of the agent's configuration."""
    durations, sizes = " ".join(units.UNITS), " ".join(units.SIZE_UNITS)
    return _keys(
        "The keys of agent.yaml (docs/config.md).\n"
        f"A duration is a number and one of {durations}, a size a number and one of {sizes}.\n",
        keys.of_agent(),
    )


def policy() -> str:
    """All keys of a policy."""
    durations, rates = " ".join(units.UNITS), " ".join(units.RATE_UNITS)
    return _keys(
        "The keys of policy.yaml (docs/policy.md). {} names the signals that have a key, if not all have it.\n"
        f"A duration is a number and one of {durations}, a rate a number and one of {rates} (per second).\n",
        keys.of_policy(),
    )


FILES: Final[dict[str, Callable[[], str]]] = {
    "signals.txt": signals,
    "metrics.txt": metrics,
    "columns.txt": columns,
    "config.txt": config,
    "policy.txt": policy,
}

if __name__ == "__main__":
    for file, made in FILES.items():
        (DOCS / file).write_text(made())
