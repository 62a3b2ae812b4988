"""YAML with the line of every key kept, for error messages that name it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

Location = tuple[str | int, ...]

_DEEPEST = 16


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of a policy file."""

    line: int  # from 1
    where: str  # e.g. rules[0].when.above; empty for the file as a whole
    what: str  # what is wrong and what was expected
    hint: str = ""  # the nearest valid word

    def text(self, path: str) -> str:
        """The fault in one line, as a compiler would print it."""
        where = f"{self.where}: " if self.where else ""
        hint = f'; did you mean "{self.hint}"?' if self.hint else ""
        return f"{path}:{self.line}: {where}{self.what}{hint}"


def _refuse_tricks(text: str) -> None:
    """Raise on what a policy does not need, and what could make a small file endless: aliases, deep nesting."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        what = ""
        if isinstance(event, yaml.AliasEvent):
            what = f"alias *{event.anchor} (a policy is written without aliases)"
        elif depth > _DEEPEST:
            what = "nested too deeply"
        if what:
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)  # type: ignore[arg-type]


class Reader:
    """YAML to plain values, remembering the line of every key and value."""

    def __init__(self) -> None:
        self.lines: dict[Location, int] = {}
        self.problems: list[Problem] = []
        self._loader: yaml.SafeLoader

    def read(self, text: str) -> Any:
        """The values of a text; `lines` then has the line of each."""
        self._loader = yaml.SafeLoader(text)
        try:
            _refuse_tricks(text)
            node = self._loader.get_single_node()
            return None if node is None else self._value(node, ())
        finally:
            self._loader.dispose()

    def _value(self, node: yaml.Node, at: Location) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            what = f"tag {node.tag.removeprefix('tag:yaml.org,2002:')} (a policy is written without tags)"
            self.problems.append(Problem(node.start_mark.line + 1, dotted(at), what))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*at, i)) for i, item in enumerate(node.value)]
        try:
            value = self._loader.construct_object(node)
            return _encodable(value) if isinstance(value, str) else value
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # the last two of "!!bool maybe"
            self.problems.append(Problem(node.start_mark.line + 1, dotted(at), f"not a value: {error}"))
            return None

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = _encodable(str(key_node.value)) if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*at, key)
            if key in result:
                self.problems.append(Problem(line, dotted(here), f"given twice, first in line {self.lines[here]}"))
                continue
            self.lines[here] = line
            result[key] = self._value(value_node, here)
        return result


def _encodable(text: str) -> str:
    r"""A text as UTF-8 can hold it: `"\ud83d\ude00"` is one character, as in JSON, and half of one is none."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dotted(at: Location) -> str:
    """A place in the file as a person writes it: `rules[0].when.above`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)
    return text.removeprefix(".")
