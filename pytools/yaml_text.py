"""YAML to plain values, where what is wrong with it is one line that names the place. Pure."""

from __future__ import annotations

from typing import Any

import yaml


class NotYamlError(ValueError):
    """A text is no YAML; says where, in one line."""


class _Loader(yaml.SafeLoader):
    """Of a key that is given twice YAML would keep the second without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):  # whatever is tagged !!map
            _once_each(node)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # a 31st of April, a "!!bool maybe"
            if isinstance(error, NotYamlError):
                raise
            what = f"{node.value!r} is no value" if isinstance(node, yaml.ScalarNode) else str(error)
            raise NotYamlError(f"line {node.start_mark.line + 1}: {what}") from None


def _once_each(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise NotYamlError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)


def values(text: bytes) -> Any:
    """The values of a text.

    Raises
    ------
    NotYamlError
        If it is no YAML, gives a key twice, or is nested deeper than a person would.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise NotYamlError(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise NotYamlError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise NotYamlError("nested too deeply") from None
