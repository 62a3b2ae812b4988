#!/usr/bin/env python3
"""Every metric with its type, labels and meaning, as docs/metrics.txt has them.

    python scripts/metrics_list.py >docs/metrics.txt

The exporter's own table is the source, so that a meaning is written once.
"""

from __future__ import annotations

import sys
import textwrap

from pytools.views.metrics.families import FAMILIES, PATH, Family

HEAD = f"""\
The metrics of `swerve metrics`, made by scripts/metrics_list.py.
PATH stands for the labels {", ".join(PATH)}.
"""


def entry(name: str, family: Family) -> str:
    """One metric: a line of its name, type and labels, and its meaning below."""
    labels = family.labels
    if labels[: len(PATH)] == PATH:
        labels = ("PATH", *labels[len(PATH) :])
    meaning = textwrap.fill(family.help, 100, initial_indent="    ", subsequent_indent="    ")
    return f"{name} {family.kind}{' {' + ', '.join(labels) + '}' if labels else ''}\n{meaning}\n"


def text() -> str:
    """All of them, in the order of the exposition."""
    return "\n".join([HEAD, *(entry(name, family) for name, family in FAMILIES.items())])


if __name__ == "__main__":
    sys.stdout.write(text())
