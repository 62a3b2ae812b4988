"""The keys of agent.yaml and policy.yaml, as their models describe them: docs/config.txt, docs/policy.txt, man pages.

Of the configuration the meaning of a key is the comment beside its field, of the policy the description of its field;
where a key holds a mapping that has none of its own, it is the docstring of that mapping.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pytools import config
from pytools.config_units import key_of, unit_of, written
from pytools.units import SCHEMA_DURATION, SCHEMA_RATE
from steering.policy.schema import json_schema

_DEFAULTS: Final = config.as_file(config.AgentConfig("", [config.Peer("", "")]))
_PATTERNS: Final = {SCHEMA_DURATION: "duration", SCHEMA_RATE: "rate"}
_PLAIN: Final[dict[object, str]] = {int: "integer", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of a file."""

    name: str  # with those that lead to it: `probe.interval`, `rules[].name`
    form: str  # type, default and limits
    meaning: str
    signals: tuple[str, ...] = ()  # of a condition: those that have it, unless all have

    @property
    def head(self) -> str:
        """All but the meaning, in one line."""
        signals = f" {{{', '.join(self.signals)}}}" if self.signals else ""
        return f"{self.name}{signals}{': ' if self.form else ''}{self.form}"

    @property
    def text(self) -> str:
        """All but the name."""
        return ": ".join(each for each in (", ".join(self.signals), self.form, self.meaning) if each)


def comment(lines: Sequence[str], field: ast.AnnAssign) -> str:
    """The comment behind a field, or else the one above it."""
    behind = lines[(field.end_lineno or field.lineno) - 1].encode()[field.end_col_offset :].decode()
    if "#" in behind:
        return behind.partition("#")[2].strip()
    above: list[str] = []
    for line in reversed(lines[: field.lineno - 1]):
        if not re.match(r"\s+# ", line):
            break
        above.insert(0, line.partition("#")[2].strip())
    return " ".join(above)


def classes(source: Path) -> Iterator[tuple[ast.ClassDef, dict[str, tuple[str, str]]]]:
    """The classes of a module, each with its fields: annotation and comment by name."""
    text = source.read_text()
    lines = text.splitlines()
    for kind in ast.parse(text).body:
        if isinstance(kind, ast.ClassDef):
            yield (
                kind,
                {
                    each.target.id: (ast.unparse(each.annotation), comment(lines, each))
                    for each in kind.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                },
            )


def of_agent() -> list[Key]:
    """The keys of agent.yaml, in the order of the source."""
    source = Path(inspect.getfile(config))
    return list(_of_struct(config.AgentConfig, "", {kind.name: fields for kind, fields in classes(source)}))


def _of_struct(
    kind: type[msgspec.Struct], prefix: str, comments: dict[str, dict[str, tuple[str, str]]]
) -> Iterator[Key]:
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        many = get_origin(hint) is list
        inner = get_args(hint)[0] if many else hint
        meaning = comments[kind.__name__][field.name][1]
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield Key(name, "list, required" if many else "mapping", meaning or inspect.getdoc(inner) or "")
            yield from _of_struct(inner, f"{name}[]." if many else f"{name}.", comments)
        else:
            required = field.required and name not in config.FILLED_IN
            yield Key(key_of(name), _form(name, hint, required=required), meaning)


def _form(name: str, hint: Any, *, required: bool) -> str:
    unit = unit_of(name)
    found = ["size" if unit == "mib" else "duration" if unit else _type(hint)]
    default: Any = _DEFAULTS
    for part in key_of(name).replace("[]", ".0").split("."):
        default = default[int(part) if part.isdigit() else part]
    found.append("required" if required else _default(default))
    for within in getattr(hint, "__metadata__", ()):
        least, most = (written(name, each) for each in (within.least, within.most))
        found.append(f"{least} to {most}")
    return ", ".join(each for each in found if each)


def _type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(inner)
    if origin in (Union, UnionType):
        return " or ".join(_type(each) for each in inner)
    return _PLAIN[inner[0] if inner else hint]


def _default(value: Any) -> str:
    """A default as a file has it; a value that is left out by default has none."""
    if value in ("", []):
        return ""
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    return f"default {value:g}" if isinstance(value, float) else f"default {value}"


def of_policy() -> list[Key]:
    """The keys of policy.yaml, in the order of the models."""
    whole = json_schema()
    return list(_of_object(whole, "", whole["$defs"]))


def _of_object(node: dict[str, Any], prefix: str, parts: dict[str, Any]) -> Iterator[Key]:
    for key, field in node["properties"].items():
        name, many = prefix + key, field.get("type") == "array"
        named = next(iter(field.get("patternProperties", {}).values()), None)
        reference = (named or (field["items"] if many else field)).get("$ref", "")
        part = parts[reference.rpartition("/")[2]] if reference else {}
        form, meaning = _form_of(field, required=key in node.get("required", ())), field.get("description", "")
        if "oneOf" in part:
            yield Key(name, form, meaning)
            yield from _of_conditions(f"{name}.", [parts[each["$ref"].rpartition("/")[2]] for each in part["oneOf"]])
        elif part:
            yield Key(name, form, meaning or part["description"])
            yield from _of_object(part, f"{name}[]." if many else f"{name}.NAME." if named else f"{name}.", parts)
        else:
            yield Key(name, form, meaning)


def _of_conditions(prefix: str, members: list[dict[str, Any]]) -> Iterator[Key]:
    """The trees, the signals, and each key of these once, with the signals that have it."""
    leaves = [each for each in members if "signal" in each["properties"]]
    for tree in members:
        if tree not in leaves:
            ((key, field),) = tree["properties"].items()
            yield Key(prefix + key, _form_of(field, required=False), tree["description"])
    found: dict[Key, list[str]] = {}
    for leaf in leaves:
        signal = leaf["properties"]["signal"]["const"]
        yield Key(f"{prefix}signal: {signal}", "", leaf["description"])
        for key, field in leaf["properties"].items():
            if key != "signal":
                form = _form_of(field, required=key in leaf["required"])
                found.setdefault(Key(prefix + key, form, field.get("description", "")), []).append(signal)
    for each, signals in found.items():
        yield Key(each.name, each.form, each.meaning, () if len(signals) == len(leaves) else tuple(signals))


def _form_of(field: dict[str, Any], *, required: bool) -> str:
    found = [_type_of(field), "required" if required else _default(field.get("default", ""))]
    return ", ".join(each for each in [*found, field.get("$comment", "")] if each)


def _type_of(field: dict[str, Any]) -> str:  # noqa: PLR0911 (one return per kind of value)
    """What a place of a policy may hold; the JSON Schema says it to programs."""
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return " or ".join(field["enum"])
    if "anyOf" in field:
        return " or ".join(_type_of(each) for each in field["anyOf"])
    if "$ref" in field:
        return "condition" if field["$ref"].endswith("/Condition") else "mapping"
    if field["type"] == "array":
        return f"list of {_type_of(field['items'])}"
    if field["type"] == "object":
        return "mapping"
    if field["type"] in ("number", "integer"):
        low, above = field.get("minimum"), field.get("exclusiveMinimum")
        high, below = field.get("maximum"), field.get("exclusiveMaximum")
        limits = f"{low} to" if above is None else f"above {above} to"
        return f"{field['type']} {limits} {high if below is None else f'below {below}'}"
    if field.get("pattern") in _PATTERNS:
        return _PATTERNS[field["pattern"]]
    return f"text such as `{'` or `'.join(field['examples'])}`" if "examples" in field else "text"
