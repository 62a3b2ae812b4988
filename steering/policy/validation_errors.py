"""pydantic's errors about a policy in our words: what was expected, what was given, what was probably meant. Pure."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytools.units import RATE_UNITS, UNITS
from pytools.yaml_reader import Location, Problem, Reader
from steering.policy.conditions import SIGNALS, TREES
from steering.policy.levels import CLAUSES
from steering.policy.schema import described

_NO_PART: Final = (*SIGNALS, *TREES.values())  # of a location: names of union members, which are in no file


def follows(fault: Mapping[str, Any]) -> bool:
    """Whether it only repeats faults of its parts: a list counts as too short when its entries are bad."""
    return fault["type"] == "too_short" and bool(fault["input"])


def problem_of(fault: Mapping[str, Any], raw: Any, reader: Reader) -> Problem:
    """One of pydantic's errors in our words, with its line."""
    context = fault.get("ctx", {})
    at = _in_file((*fault["loc"], *context.get("at", ())), raw)
    if fault["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(fault["input"], dict):
        at = (*at, "signal")
    return reader.problem(at, *_words(fault, context, at, raw))


def _in_file(loc: Location, raw: Any) -> Location:
    """A pydantic location without the names of union members, which are not in the file."""
    found: list[str | int] = []
    node = raw
    for part in loc:
        if part in _NO_PART and not (isinstance(node, dict) and part in node):
            continue
        found.append(part)
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return tuple(found)


def _value_at(raw: Any, at: Location, otherwise: Any) -> Any:
    node = raw
    for part in at:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return node


def _words(  # noqa: PLR0911, PLR0912 (one return per kind of error)
    fault: Mapping[str, Any], context: Mapping[str, Any], at: Location, raw: Any
) -> tuple[str, str]:
    """What is wrong and what was expected; and the nearest valid word, if one is near."""
    value = _value_at(raw, at, fault.get("input"))
    kind, given = fault["type"], _shown(value)
    name = str(at[-1]) if at else ""
    if kind == "extra_forbidden":
        valid = sorted(described(at[:-1], raw).get("properties", {}))
        if "above" in valid and name.startswith(CLAUSES):
            return f'unknown key "{name}"; expected above in quotes, as its value has a comma', ""
        expected = f"one of {', '.join(valid)}" if len(valid) > 1 else f"only {valid[0]}" if valid else "none"
        return f'unknown key "{name}"; expected {expected}', _near(name, valid)
    if kind == "union_tag_not_found":
        if not isinstance(fault["input"], dict):
            return f"expected a mapping with signal, all, any or not, got {given}", ""
        near = next((near for key in fault["input"] if (near := _near(str(key), ["signal", *TREES]))), "")
        return f'"signal" is missing; expected {_listed(SIGNALS)}; or all, any or not in its place', near
    if kind == "missing":
        return f'"{name}" is missing; expected {_expected(described(at, raw))}', ""
    if kind in ("literal_error", "union_tag_invalid"):
        valid = list(SIGNALS) if kind == "union_tag_invalid" else _choices(described(at, raw))
        return f"expected {_listed(valid)}, got {given}", _near(given.strip('"'), valid)
    if kind == "duration":
        return f"expected a duration, a number and a unit such as 40ms, 3s or 1m, got {given}", _unit(given, UNITS)
    if kind == "level":
        return f"expected {context['expected']}, got {given}", context["near"]
    if kind == "rate":
        return f"expected a rate, a number and a unit such as 10mbit or 1gbit, got {given}", _unit(given, RATE_UNITS)
    if kind == "prefix":
        why = f" ({context['why']})" if context.get("why") else ""
        return f"expected a prefix such as 10.9.0.0/16, got {given}{why}", _without_host_bits(given)
    if kind == "address":
        return f"expected an address such as 10.1.1.1 or fd00::1, got {given}", _bare_address(given)
    if kind == "ports":
        return f"expected a port from 1 to 65535 or a list of them, got {given}", ""
    if kind == "policy":
        return f"expected {context['expected']}, got {given}", ""
    return f"expected {_expected(described(at, raw))}, got {given}", ""


def _shown(value: Any) -> str:
    """A value as a person wrote it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(words) if len(words) < 4 else f"one of {', '.join(words)}"


def _near(word: str, valid: list[str]) -> str:
    """The word that was probably meant: one that is spelt alike, or the only one that begins so."""
    begin = [each for each in valid if len(word) > 2 and each.startswith(word)]
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return close[0] if close else begin[0] if len(begin) == 1 else ""


_LONG: Final = {
    **{"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "msec": "ms", "usec": "us"},
    **{"k": "kbit", "m": "mbit", "g": "gbit", "bp": "bit", "kbp": "kbit", "mbp": "mbit", "gbp": "gbit"},
    **{"kb": "kbit", "mb": "mbit", "gb": "gbit"},
}


def _unit(given: str, units: Mapping[str, int]) -> str:
    """The duration or rate somebody may have meant by `40 ms`, `3 sec` or `10Mbit/s`; empty for a number alone."""
    match = re.match(r"^\s*([\d.]+)\s*([a-zA-Zµ]+)(/s)?\s*$", given.strip('"'))
    if not match or match[1].count(".") > 1:
        return ""
    word = match[2].lower().removesuffix("s") or "s"
    long = _LONG.get(word, "")
    unit = match[2] if match[2] in units else long if long in units else _near(match[2].lower(), list(units))
    return f"{match[1]}{unit}" if unit else ""


def _without_host_bits(given: str) -> str:
    """The prefix that this is in, without a scope; empty if it is none."""
    try:
        return str(ipaddress.ip_network(re.sub("%[^/]*", "", given.strip('"')), strict=False))
    except ValueError:
        return ""


def _bare_address(given: str) -> str:
    """The address without a prefix length or a scope; empty if it is none."""
    try:
        return str(ipaddress.ip_address(re.split("[/%]", given.strip('"'))[0]))
    except ValueError:
        return ""


def _choices(schema: dict[str, Any]) -> list[str]:
    return [str(choice) for choice in schema.get("choices", [])]


def _expected(schema: dict[str, Any]) -> str:  # noqa: PLR0911
    """What a place in the file may hold, in words."""
    if schema.get("choices"):
        return _listed(_choices(schema))
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
    if kind == "integer":
        return f"a whole number from {schema.get('minimum', '')} to {schema.get('maximum', '')}"
    if kind == "boolean":
        return "true or false"
    if schema.get("properties"):
        return f"a mapping with {', '.join(schema['properties'])}"
    if kind == "object":
        return "an empty mapping, {}"
    return "another value"
