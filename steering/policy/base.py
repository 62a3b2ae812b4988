"""What the parts of the policy model are made of: frozen base, shares, prefixes, how faults are raised. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, core_schema

from pytools.units import SCHEMA_DURATION, SCHEMA_RATE, duration_text, duration_yaml, parse_duration, parse_rate


class Model(BaseModel):
    """A mapping of the file: frozen, and no key beyond those that are known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def bad(expected: str, at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """A value that parses but makes no sense; `at` is where, seen from the model that found it."""
    return PydanticCustomError("policy", "{expected}", {"expected": expected, "at": list(at)})


def at_least(other: str) -> Callable[[int, ValidationInfo], int]:
    """A validator of a duration: no shorter than the field `other`, which the model has before it."""

    def checked(value: int, info: ValidationInfo) -> int:
        least = info.data.get(other)
        if least is not None and value < least:
            raise bad(f"at least {other} ({duration_text(least)})")
        return value

    return checked


@dataclass(frozen=True, slots=True)
class Within:
    """The range of a duration in nanoseconds, both ends in it; JSON Schema, which sees text, has it as a comment."""

    least: int = 0
    most: int | None = None

    def __str__(self) -> str:
        """As errors and the list of keys say it."""
        if self.most is None:
            return "more than 0" if self.least == 1 else f"at least {duration_yaml(self.least)}"
        most = duration_yaml(self.most)
        return f"between {duration_yaml(self.least)} and {most}" if self.least else f"at most {most}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Checked once the duration is read."""
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """The schema of a duration, and the range."""
        return handler(schema) | {"$comment": str(self)}

    def _checked(self, value: int) -> int:
        if value < self.least or (self.most is not None and value > self.most):
            raise bad(str(self))
        return value


def _prefix(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("prefix", "not a prefix", {"given": value})
    try:
        found = str(ipaddress.ip_network(value))
        if "%" in found:  # no route has one
            raise ValueError(f"{found} has a scope")
    except ValueError as error:
        raise PydanticCustomError("prefix", "not a prefix", {"given": value, "why": str(error)}) from None
    return found


def _address(value: object) -> str:
    try:
        found = ipaddress.ip_address(value if isinstance(value, str) else "")
    except ValueError:
        raise PydanticCustomError("address", "not an address", {"given": value}) from None
    if "%" in str(found):  # what a gateway's address does not carry: `interfaces` is for that
        raise PydanticCustomError("address", "not an address", {"given": value})
    return str(found)


def _duration(value: object) -> int:
    try:
        return parse_duration(value)
    except ValueError:
        raise PydanticCustomError("duration", "not a duration", {"given": value}) from None


def _rate(value: object) -> int:
    try:
        return parse_rate(value)
    except ValueError:
        raise PydanticCustomError("rate", "not a rate", {"given": value}) from None


Duration = Annotated[
    int,
    BeforeValidator(_duration),
    WithJsonSchema({"type": "string", "pattern": SCHEMA_DURATION, "examples": ["40ms", "3s", "1m"]}),
]
Rate = Annotated[
    int,
    BeforeValidator(_rate),
    WithJsonSchema({"type": "string", "pattern": SCHEMA_RATE, "examples": ["10mbit", "1gbit"]}),
]
Prefix = Annotated[
    str, BeforeValidator(_prefix), WithJsonSchema({"type": "string", "examples": ["10.9.0.0/16", "fd00:9::/64"]})
]
Address = Annotated[
    str, BeforeValidator(_address), WithJsonSchema({"type": "string", "examples": ["10.1.1.1", "fd00:1::1"]})
]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(strict=True, ge=0, lt=1)]
ShareAboveZero = Annotated[float, Field(strict=True, gt=0, le=1)]
Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]

_T = TypeVar("_T")


def _some(value: object) -> object:
    if value is None:
        raise PydanticCustomError("nothing", "a value is missing")
    return value


LongerThanZero = Annotated[Duration, Within(1)]

NotNull = Annotated[_T | None, BeforeValidator(_some)]  # may be left out, but not left empty
Some = Annotated[tuple[_T, ...], Field(min_length=1)]  # an empty list would mean everything where nothing is written
