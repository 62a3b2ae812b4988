"""Thresholds as a file writes them: a figure, a multiple of what is usual on the path, a part of the other one. Pure.

    above: 5ms                                                          a figure
    above: usual p99 × 3, at least 5ms, at most 50ms, until learned 10ms    relative to what the path has learnt
    clear_below: above × 0.2                                            relative to `above`

`x` and `*` stand for `×` as well, and the commas may be left out. Delays are nanoseconds, shares within 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pytools.units import SCHEMA_DURATION, UNITS, duration_text, duration_yaml, parse_duration
from steering.policy.base import Model

Figure = int | float
UsualQuantile = Literal["p50", "p90", "p99"]
QUANTILES: Final[dict[str, float]] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
CLAUSES: Final = ("at least", "at most", "until learned")
_DEFAULT_LEAST_NS: Final = UNITS["ms"]
_DEFAULT_SPAN: Final = 10  # at most: so many times `at least`
_HIGHEST_SHARE: Final = 0.9  # of the default of `at most`
_FACTOR: Final = r"[0-9]{1,4}(\.[0-9]{1,4})?"
_SHARE: Final = r"0?\.[0-9]{1,9}"
_TIMES: Final = "[×x*]"


class Usual(Model):
    """A threshold that follows what is usual on each path, within two limits."""

    quantile: UsualQuantile
    factor: float
    plus: Figure
    at_least: Figure  # never lower, whatever is usual; what is below a tenth of it teaches nothing
    at_most: Figure  # never higher, whatever was learnt
    until_learned: Figure  # what holds until enough is learnt


class OfAbove(Model):
    """A threshold that is a part of `above`, whatever that is."""

    factor: float


@dataclass(frozen=True, slots=True)
class FigureKind:
    """What the figures of a signal are."""

    parse: Callable[[str], Figure]  # raises ValueError
    text: Callable[[Figure], str]  # for people
    written: Callable[[Figure], str]  # as in a file
    example: str
    least: Figure | None  # default of `at least`
    most: Figure | None  # the highest default of `at most`


def _share(text: str) -> float:
    value = float(text) if re.fullmatch(_SHARE, text) else 0.0
    if not 0 < value < 1:
        raise ValueError("not a share")
    return value


def _duration(ns: Figure) -> str:
    """A duration as a person writes it, exactly: 6.1ms, not 6100us."""
    short = (f"{ns / UNITS[unit]:g}{unit}" for unit in ("s", "ms", "us") if ns >= UNITS[unit])
    return next((text for text in short if parse_duration(text) == ns), duration_yaml(round(ns)))


DELAY: Final = FigureKind(
    parse_duration, lambda ns: duration_text(round(ns)), _duration, "5ms", _DEFAULT_LEAST_NS, None
)
SHARE: Final = FigureKind(
    _share, lambda share: f"{share:.3g}", lambda share: f"{share:.6g}", "0.05", None, _HIGHEST_SHARE
)


def written(level: Usual, kind: FigureKind) -> str:
    """A relative threshold as it is written in a file."""
    times = f" × {level.factor:g}" if level.factor != 1 else ""
    plus = f" + {kind.written(level.plus)}" if level.plus else ""
    limits = zip(CLAUSES, (level.at_least, level.at_most, level.until_learned), strict=True)
    return ", ".join(
        [f"usual {level.quantile}{times}{plus}", *(f"{word} {kind.written(each)}" for word, each in limits)]
    )


def _wrong(value: object, expected: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("level", "not a threshold", {"given": value, "expected": expected, "near": hint})


def _usual(text: str, kind: FigureKind) -> Usual:
    """The relative threshold in a text that begins with `usual`."""
    head, *clauses = re.split(r"\s*,\s*|\s+(?=at least|at most|until learned)", text.strip())
    match = re.fullmatch(rf"usual\s+([^\s×x*+]+)(?:\s*{_TIMES}\s*({_FACTOR}))?(?:\s*\+\s*(\S+))?", head)
    if match is None:
        raise _wrong(text, f'"usual p99 × 3", with "+ {kind.example}" or limits behind it, such as "at least"')
    quantile, factor = match[1], float(match[2] or 1)
    if quantile not in QUANTILES:
        raise _wrong(text, f"usual {', '.join(QUANTILES)}; {quantile} is not learnt", "p99")
    plus = _figure(match[4], kind, text) if match[4] else 0
    found: dict[str, Figure] = {}
    for clause in clauses:
        part = re.fullmatch(rf"({'|'.join(CLAUSES)})\s+(\S+)", clause)
        if part is None or part[1] in found:
            raise _wrong(text, f"each of {', '.join(CLAUSES)} at most once, with a figure such as {kind.example}")
        found[part[1]] = _figure(part[2], kind, text)
    return _checked(text, kind, quantile, factor, plus, found)


def _checked(
    text: str, kind: FigureKind, quantile: str, factor: float, plus: Figure, found: dict[str, Figure]
) -> Usual:
    if factor < 1 or (factor == 1 and not plus):
        raise _wrong(text, "more than what is usual: a factor above 1, or something added")
    least = found.get("at least", kind.least)
    if least is None:
        raise _wrong(text, f'"at least" with a share such as {kind.example}: a multiple of next to nothing is nothing')
    if not least:
        raise _wrong(text, "at least more than 0")
    most = found.get("at most", least * _DEFAULT_SPAN if kind.most is None else min(least * _DEFAULT_SPAN, kind.most))
    if most <= least:
        raise _wrong(text, f"at most more than at least ({kind.text(least)})")
    until = found.get("until learned", most)
    if not least <= until <= most:
        raise _wrong(text, f"until learned from {kind.text(least)} to {kind.text(most)}, at least and at most")
    return Usual.model_construct(
        quantile=quantile, factor=factor, plus=plus, at_least=least, at_most=most, until_learned=until
    )


def _figure(text: str, kind: FigureKind, whole: str) -> Figure:
    try:
        return kind.parse(text)
    except ValueError:
        raise _wrong(whole, f"a figure such as {kind.example} where it has {text}") from None


def _begins_with(value: object, word: str) -> bool:
    return isinstance(value, str) and value.split()[:1] == [word]


def _of_above(text: str) -> OfAbove:
    match = re.fullmatch(rf"above\s*{_TIMES}\s*({_FACTOR})", text.strip())
    if match is None or not 0 < float(match[1]) < 1:
        raise _wrong(text, '"above × 0.2", with a factor above 0 and below 1')
    return OfAbove.model_construct(factor=float(match[1]))


def _delay(value: object) -> object:
    if isinstance(value, Usual | OfAbove):
        return value
    try:
        return parse_duration(value)
    except ValueError:
        raise PydanticCustomError("duration", "not a duration", {"given": value}) from None


def _number(low: float, high: float, *, least: bool, most: bool) -> Callable[[object], object]:
    """A check that a value is a number in a range, whose ends may be in it."""

    def check(value: object) -> object:
        if isinstance(value, Usual | OfAbove):
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (low <= value <= high) or (value == low and not least) or (value == high and not most):  # type: ignore[operator]
            begin = f"from {low:g}" if least else f"above {low:g}"
            raise _wrong(value, f"a number {begin} {'up to' if most else 'below'} {high:g}")
        return float(value)  # type: ignore[arg-type]

    return check


def _or_usual(kind: FigureKind, plain: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: _usual(str(value), kind) if _begins_with(value, "usual") else plain(value)


def _or_part(plain: Callable[[object], object]) -> Callable[[object], object]:
    return lambda value: _of_above(str(value)) if _begins_with(value, "above") else plain(value)


def _schema_usual(figure: str) -> str:
    clause = rf"(\s*,?\s*({'|'.join(CLAUSES)})\s+{figure})"
    return rf"usual\s+p(50|90|99)(\s*{_TIMES}\s*{_FACTOR})?(\s*\+\s*{figure})?{clause}{{0,3}}"


_DURATION: Final = SCHEMA_DURATION.removeprefix("^").removesuffix("$")
_PART: Final = rf"above\s*{_TIMES}\s*0?\.[0-9]{{1,4}}"


def _text_schema(pattern: str, *examples: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, "examples": list(examples)}


AboveDelay = Annotated[
    int | Usual,
    BeforeValidator(_or_usual(DELAY, _delay)),
    WithJsonSchema(_text_schema(rf"^({_DURATION}|{_schema_usual(_DURATION)})$", "5ms", "usual p99 × 3, at least 5ms")),
]
ClearDelay = Annotated[
    int | OfAbove,
    BeforeValidator(_or_part(_delay)),
    WithJsonSchema(_text_schema(rf"^({_DURATION}|{_PART})$", "1ms", "above × 0.2")),
]
AboveShare = Annotated[
    float | Usual,
    BeforeValidator(_or_usual(SHARE, _number(0, 1, least=True, most=False))),
    WithJsonSchema(
        {
            "anyOf": [
                _text_schema(rf"^{_schema_usual(_SHARE)}$", "usual p99 × 3, at least 0.05"),
                {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            ]
        }
    ),
]
ClearShare = Annotated[
    float | OfAbove,
    BeforeValidator(_or_part(_number(0, 1, least=False, most=True))),
    WithJsonSchema(
        {"anyOf": [_text_schema(rf"^{_PART}$", "above × 0.2"), {"type": "number", "exclusiveMinimum": 0, "maximum": 1}]}
    ),
]
