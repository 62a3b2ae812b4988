"""Other values in the text of a policy, everything else as its author wrote it: comments, order, style. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pytools.yaml_reader import Location, Reader

_TREES: Final = ("all", "any", "not")


def thresholds(text: str) -> dict[str, list[Location]]:
    """Where the leaves of each rule are, by its name, in the order of the tree (`leaves`)."""
    found: dict[str, list[Location]] = {}
    raw = Reader().read(text)
    for i, rule in enumerate(raw["rules"]):
        found[rule["name"]] = _leaves(rule["when"], ("rules", i, "when")) if "when" in rule else []
    return found


def _leaves(node: object, at: Location) -> list[Location]:
    if isinstance(node, list):
        return [each for i, part in enumerate(node) for each in _leaves(part, (*at, i))]
    if isinstance(node, dict) and "signal" not in node:
        return [each for key in _TREES if key in node for each in _leaves(node[key], (*at, key))]
    return [at]


def replaced(text: str, values: Mapping[Location, str]) -> str:
    """The text with these scalars in the places of those that are there, each in quotes."""
    reader = Reader()
    reader.read(text)
    for (begin, end), value in sorted(((reader.spans[at], value) for at, value in values.items()), reverse=True):
        text = f'{text[:begin]}"{value}"{text[end:]}'
    return text
