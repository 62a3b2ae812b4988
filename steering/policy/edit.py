"""Other values in the text of a policy, everything else as its author wrote it: comments, order, style. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import yaml

from steering.policy.yaml import Location

_TREES: Final = ("all", "any", "not")


def thresholds(text: str) -> dict[str, list[Location]]:
    """Where the leaves of each rule are, by its name, in the order of the tree (`leaves`)."""
    found: dict[str, list[Location]] = {}
    raw = yaml.safe_load(text)
    for i, rule in enumerate(raw["rules"]):
        found[rule["name"]] = _leaves(rule["when"], ("rules", i, "when"))
    return found


def _leaves(node: object, at: Location) -> list[Location]:
    if isinstance(node, list):
        return [each for i, part in enumerate(node) for each in _leaves(part, (*at, i))]
    if isinstance(node, dict) and "signal" not in node:
        return [each for key in _TREES if key in node for each in _leaves(node[key], (*at, key))]
    return [at]


def replaced(text: str, values: Mapping[Location, str]) -> str:
    """The text with these scalars in the places of those that are there, each in quotes."""
    root = yaml.compose(text, yaml.SafeLoader)
    spans = sorted(((*_span(root, at), value) for at, value in values.items()), reverse=True)
    for begin, end, value in spans:
        text = f'{text[:begin]}"{value}"{text[end:]}'
    return text


def _span(node: yaml.Node | None, at: Location) -> tuple[int, int]:
    """From where to where a scalar is written."""
    for part in at:
        if isinstance(node, yaml.MappingNode):
            node = next(value for key, value in node.value if key.value == part)
        elif isinstance(node, yaml.SequenceNode):
            node = node.value[int(part)]
    assert isinstance(node, yaml.ScalarNode), at
    return node.start_mark.index, node.end_mark.index
