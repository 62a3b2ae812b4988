"""YAML to plain values with the line of each, for error messages that name it. Pure.

Policies and the agent's configuration are read here. Whatever a text holds, reading ends, and soon: nesting and what
aliases expand to are limited.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import yaml

Location = tuple[str | int, ...]

_DEEPEST: Final = 16
_MOST_VALUES: Final = 1 << 20  # a file of the largest size has fewer; with aliases a small one may stand for more
_OURS: Final = "tag:yaml.org,2002:"
_MERGE: Final = f"{_OURS}merge"


@dataclass(frozen=True, order=True)
class Problem:
    line: int  # from 1
    where: str  # e.g. rules[0].when.above; empty for the file as a whole
    what: str  # what is wrong and what was expected
    hint: str = ""  # the nearest valid word

    def text(self, path: str) -> str:
        """The fault in one line, as a compiler would print it."""
        where = f"{self.where}: " if self.where else ""
        hint = f'; did you mean "{self.hint}"?' if self.hint else ""
        return f"{path}:{self.line}: {where}{self.what}{hint}"


class NotYamlError(ValueError):
    """A text is not YAML, or more than a configuration needs."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def decoded(data: bytes) -> str:
    """The text of a file.

    Raises
    ------
    NotYamlError
        If it is not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotYamlError(data[: error.start].count(b"\n") + 1, "not UTF-8 text") from None


class _Loader(yaml.SafeLoader):
    """Stops at what could make a small file endless."""

    aliases = False
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) and not self.aliases:
            raise NotYamlError(_line(event), f"alias *{event.anchor} (a policy is written without aliases)")
        self.depth += isinstance(event, yaml.CollectionStartEvent)
        if self.depth > _DEEPEST:
            raise NotYamlError(_line(event), "nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= isinstance(event, yaml.CollectionStartEvent)
        return node


def _line(of: Any) -> int:
    line: int = of.start_mark.line
    return line + 1


class Reader:
    """YAML to plain values, remembering the line of every key and value.

    Parameters
    ----------
    aliases : bool
        Whether the file may use anchors, aliases and merge keys.
    """

    def __init__(self, aliases: bool = False) -> None:
        self.lines: dict[Location, int] = {}
        self.spans: dict[Location, tuple[int, int]] = {}  # of each value: where it begins and ends in the text
        self.problems: list[Problem] = []
        self._aliases = aliases
        self._sizes: dict[int, int] = {}  # by node: how many values it stands for; 0 while they are counted
        self._loader: _Loader

    def read(self, text: str) -> Any:
        """The values of a text; `lines` then has the line of each.

        Raises
        ------
        NotYamlError
            If it is not YAML. What is wrong with single values is in `problems`.
        """
        try:
            self._loader = _Loader(text)
            self._loader.aliases = self._aliases
            node = self._loader.get_single_node()
            if node is None:
                return None
            self._sizes.clear()
            self._size(node)
            return self._value(node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise NotYamlError(mark.line + 1 if mark else 1, str(error.problem or error.context)) from None
        except yaml.reader.ReaderError as error:
            raise NotYamlError(text[: error.position].count("\n") + 1, str(error).splitlines()[0]) from None
        except yaml.YAMLError as error:
            raise NotYamlError(1, str(error).splitlines()[0]) from None

    def problem(self, at: Location, what: str, hint: str = "") -> Problem:
        """A fault of a place in the file, or of the nearest one around it that is there."""
        known = next(at[:end] for end in range(len(at), -1, -1) if at[:end] in self.lines or not end)
        return Problem(self.lines.get(known, 1), dotted(at), what, hint)

    def _size(self, node: yaml.Node) -> int:
        """Count the values that a node stands for, each node once however many aliases name it."""
        if id(node) not in self._sizes:
            self._sizes[id(node)] = 0
            inside = node.value if isinstance(node, yaml.CollectionNode) else []
            values = [each[1] for each in inside] if isinstance(node, yaml.MappingNode) else inside
            size = self._sizes[id(node)] = 1 + sum(map(self._size, values))
            if size > _MOST_VALUES:
                raise NotYamlError(_line(node), "too large")
        elif not self._sizes[id(node)]:  # an alias of what it is part of
            raise NotYamlError(_line(node), "nested too deeply")
        return self._sizes[id(node)]

    def _value(self, node: yaml.Node, at: Location) -> Any:
        if len(at) > _DEEPEST:  # of an alias
            raise NotYamlError(_line(node), "nested too deeply")
        self.lines.setdefault(at, _line(node))
        self.spans[at] = (node.start_mark.index, node.end_mark.index)
        if not node.tag.startswith(_OURS) or node.tag.startswith(f"{_OURS}python"):
            what = f"tag {node.tag.removeprefix(_OURS)} (a file is written without tags)"
            self.problems.append(Problem(_line(node), dotted(at), what))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*at, i)) for i, item in enumerate(node.value)]
        try:
            value = self._loader.construct_object(node)
            return _encodable(value) if isinstance(value, str) else value
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # the last two of "!!bool maybe"
            self.problems.append(Problem(_line(node), dotted(at), f"not a value: {error}".splitlines()[0]))
            return None

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if self._aliases and key_node.tag == _MERGE:
                merged |= self._merged(value_node, at, _line(key_node))
                continue
            line = _line(key_node)
            key = _encodable(str(key_node.value)) if isinstance(key_node, yaml.ScalarNode) else "?"
            here = (*at, key)
            if key in result:
                self.problems.append(Problem(line, dotted(here), f"given twice, first in line {self.lines[here]}"))
                continue
            self.lines[here] = line
            result[key] = self._value(value_node, here)
        return merged | result

    def _merged(self, node: yaml.Node, at: Location, line: int) -> dict[str, Any]:
        """What a merge key stands for: of several mappings the first holds."""
        found = self._value(node, (*at, "<<"))
        each = found[::-1] if isinstance(found, list) else [found]
        if not all(isinstance(one, dict) for one in each):
            self.problems.append(Problem(line, dotted((*at, "<<")), "expected mappings to merge"))
            return {}
        return {key: value for one in each for key, value in one.items()}


def _encodable(text: str) -> str:
    r"""A text as UTF-8 can hold it: `"\ud83d\ude00"` is one character, as in JSON, and half of one is none."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def dotted(at: Location) -> str:
    """A place in the file as a person writes it: `rules[0].when.above`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)
    return text.removeprefix(".")
