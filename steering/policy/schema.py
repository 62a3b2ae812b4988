"""The JSON Schema of policy files, for editors, other tooling, and our own error messages. Pure."""

from __future__ import annotations

import functools
from typing import Any, Final

from pytools.units import SCHEMA_DURATION, SCHEMA_RATE, duration_yaml, rate_yaml
from pytools.yaml_reader import Location
from steering.policy.model import Policy

_NONE: Final = object()
_WRITTEN: Final = {SCHEMA_DURATION: duration_yaml, SCHEMA_RATE: rate_yaml}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, for editors and other tooling."""
    schema = Policy.model_json_schema(by_alias=True)
    for part in (schema, *schema["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            part["properties"][name] = _as_in_a_file(field)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "docs/policy.md"} | schema


def _as_in_a_file(field: dict[str, Any]) -> dict[str, Any]:
    """One key: defaults as they are written, and no null, which is no value of ours."""
    real = [choice for choice in field.get("anyOf", []) if choice != {"type": "null"}]
    if len(real) == 1:
        field = {key: value for key, value in field.items() if key not in ("anyOf", "default")} | real[0]
    written = _WRITTEN.get(field.get("pattern", ""))
    if written and "default" in field:
        field = field | {"default": written(field["default"])}
    return field


def described(at: Location, raw: Any) -> dict[str, Any]:
    """What the schema says of a place in a file; empty if it knows no such place.

    Where several things may stand, what the file has there decides which is meant, and if that does not tell, the
    answer is all of them together: `properties` and `choices` of each.
    """
    whole = _schema()
    nodes, value = [whole], raw
    for part in at:
        inner = [node.get("items") if isinstance(part, int) else _member(node, part) for node in _meant(nodes, value)]
        nodes = [each for node in inner if node is not None for each in _alternatives(node, whole)]
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    if not nodes:
        return {}
    merged: dict[str, Any] = {"properties": {}, "choices": []}
    for node in _meant(nodes, value):
        merged |= {key: each for key, each in node.items() if key != "properties"}
        merged["properties"] |= node.get("properties", {})
        more = node.get("enum", [node["const"]] if "const" in node else [])
        merged["choices"] += [each for each in more if each not in merged["choices"]]
    return merged


def _member(node: dict[str, Any], key: str) -> Any:
    """What the schema says of a key, which its author may have chosen."""
    named = next(iter(node.get("patternProperties", {}).values()), None)
    return node.get("properties", {}).get(key, named)


def _meant(nodes: list[dict[str, Any]], value: Any) -> list[dict[str, Any]]:
    """Of conditions, the one that the file has; else all."""
    if len(nodes) < 2 or not isinstance(value, dict):
        return nodes
    for node in nodes:
        of = node.get("properties", {})
        if "signal" in value and value["signal"] == of.get("signal", {}).get("const", _NONE):
            return [node]
        if "signal" not in value and "signal" not in of and of.keys() & value.keys():
            return [node]
    return nodes


def _alternatives(node: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return _alternatives(whole["$defs"][node["$ref"].rsplit("/", 1)[1]], whole)
    choices = [*node.get("oneOf", []), *node.get("anyOf", [])]
    return [inner for choice in choices for inner in _alternatives(choice, whole)] or [node]


@functools.cache
def _schema() -> dict[str, Any]:
    return json_schema()
