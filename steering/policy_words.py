"""pydantic's errors about a policy in our words: what was expected, what was given, what was probably meant. Pure."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from typing import Any, Final

from steering.policy import UNITS, json_schema
from steering.policy_yaml import Location, Problem, Reader, dotted

_SCHEMA: Final = json_schema()


def follows(fault: Mapping[str, Any]) -> bool:
    """Whether it only repeats faults of its parts: a list counts as too short when its entries are bad."""
    return fault["type"] == "too_short" and bool(fault["input"])


def problem_of(fault: Mapping[str, Any], raw: Any, reader: Reader) -> Problem:
    """One of pydantic's errors in our words, with its line."""
    context = fault.get("ctx", {})
    at = _in_file((*fault["loc"], *context.get("at", ())), raw)
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found"):
        at = (*at, "signal")
    line = next((reader.lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in reader.lines), 1)
    what, hint = _words(fault, context, at, _value_at(raw, at, fault.get("input")))
    return Problem(line, dotted(at), what, hint)


def _in_file(loc: Location, raw: Any) -> Location:
    """A pydantic location without the names of union members, which are not in the file."""
    found: list[str | int] = []
    node = raw
    for part in loc:
        if isinstance(node, dict) and part not in node and node.get("signal") == part:
            continue
        found.append(part)
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return tuple(found)


def _value_at(raw: Any, at: Location, otherwise: Any) -> Any:
    """What the file has at a place."""
    node = raw
    for part in at:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return node


def _words(  # noqa: PLR0911 (one return per kind of error)
    fault: Mapping[str, Any], context: Mapping[str, Any], at: Location, value: Any
) -> tuple[str, str]:
    """What is wrong and what was expected; and the nearest valid word, if one is near."""
    kind, given = fault["type"], _shown(value)
    schema = _schema_at(at[:-1])
    name = str(at[-1]) if at else ""
    if kind == "extra_forbidden":
        valid = sorted(schema.get("properties", {}))
        return f'unknown key "{name}"; expected one of {", ".join(valid)}', _near(name, valid)
    if kind in ("missing", "union_tag_not_found"):
        return f'"{name}" is missing; expected {_expected(_schema_at(at))}', ""
    if kind in ("literal_error", "union_tag_invalid"):
        valid = _choices(_schema_at(at))
        return f"expected {' or '.join(valid)}, got {given}", _near(given.strip('"'), valid)
    if kind == "duration":
        return f"expected a duration, a number and a unit such as 40ms, 3s or 1m, got {given}", _unit(given)
    if kind == "prefix":
        why = f" ({context['why']})" if context.get("why") else ""
        return f"expected a prefix such as 10.9.0.0/16, got {given}{why}", _without_host_bits(given)
    if kind == "policy":
        return f"expected {context['expected']}, got {given}", ""
    return f"expected {_expected(_schema_at(at))}, got {given}", ""


def _shown(value: Any) -> str:
    """A value as a person wrote it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _near(word: str, valid: list[str]) -> str:
    return next(iter(difflib.get_close_matches(word, valid, n=1, cutoff=0.5)), "")


def _unit(given: str) -> str:
    """The duration somebody may have meant by `40 ms`, `3 sec` or `5`."""
    match = re.match(r"^\s*([\d.]+)\s*([a-zA-Zµ]+)\s*$", given.strip('"'))
    if not match or match[1].count(".") > 1:
        return ""
    long = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "msec": "ms", "usec": "us"}
    word = match[2].lower().rstrip("s") or "s"
    unit = match[2] if match[2] in UNITS else long.get(word, "") or _near(match[2].lower(), list(UNITS))
    return f"{match[1]}{unit}" if unit else ""


def _without_host_bits(given: str) -> str:
    try:
        return str(ipaddress.ip_network(given.strip('"'), strict=False))
    except ValueError:
        return ""


def _schema_at(at: Location) -> dict[str, Any]:
    """The part of the JSON Schema that describes a place in the file; empty if there is none."""
    whole = _SCHEMA
    nodes = [whole]
    for part in at:
        found = []
        for node in nodes:
            inner = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
            if inner is not None:
                found += _alternatives(inner, whole)
        nodes = found
    if not nodes:
        return {}
    merged: dict[str, Any] = {"properties": {}, "choices": []}
    for node in nodes:
        merged |= {key: value for key, value in node.items() if key != "properties"}
        merged["properties"] |= node.get("properties", {})
        merged["choices"] += node.get("enum", [node["const"]] if "const" in node else [])
    return merged


def _alternatives(node: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in node:
        return [whole["$defs"][node["$ref"].rsplit("/", 1)[1]]]
    return [inner for choice in node.get("oneOf", []) for inner in _alternatives(choice, whole)] or [node]


def _choices(schema: dict[str, Any]) -> list[str]:
    return [str(choice) for choice in schema.get("choices", [])]


def _expected(schema: dict[str, Any]) -> str:  # noqa: PLR0911
    """What a place in the file may hold, in words."""
    if schema.get("choices"):
        return " or ".join(_choices(schema))
    kind = schema.get("type")
    if kind == "number":
        low = schema.get("minimum", schema.get("exclusiveMinimum", ""))
        high = schema.get("maximum", schema.get("exclusiveMaximum", ""))
        more = "above" if "exclusiveMinimum" in schema else "from"
        less = "below" if "exclusiveMaximum" in schema else "up to"
        return f"a number {more} {low} {less} {high}"
    if kind == "string" and "examples" in schema:
        return f"a text such as {schema['examples'][0]}"
    if kind == "string":
        return f"a text that matches {schema['pattern']}" if "pattern" in schema else "a text"
    if kind == "array":
        return "a list with at least one entry" if schema.get("minItems") else "a list"
    if schema.get("properties"):
        return f"a mapping with {', '.join(schema['properties'])}"
    return "another value"
