"""HTML and SVG as strings that cannot be forgotten to be escaped: whatever is not `Markup` is text. Pure.

Host names, reasons and names of processes are chosen by others. Text is escaped on its way into an element, and what
does not print (control characters, changes of direction) is replaced by a mark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

_VOID: Final = frozenset({"meta", "br", "col"})
_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"

Attribute = str | int | float | bool | None


class Markup(str):
    """What may stand in a page as it is."""

    __slots__ = ()


def text(words: str) -> Markup:
    """Words as they shall be read, whatever is in them."""
    plain = words if words.isprintable() else "".join(map(_printable, words))
    return Markup(html.escape(plain))


def _printable(character: str) -> str:
    return character if character.isprintable() or character == "\n" else _UNPRINTABLE


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after the other; those that are not markup are escaped."""
    return Markup(_safe(between).join(map(_safe, parts)))


def element(name: str, /, *content: str, **attributes: Attribute) -> Markup:
    """One element.

    Parameters
    ----------
    content : str
        What is in it: markup, or text.
    attributes : str, number, bool or None
        `class_` stands for class and `_` for `-`; True is an attribute without a value, None and False leave it out.
    """
    opened = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{name}{opened}>")
    return Markup(f"<{name}{opened}>{''.join(map(_safe, content))}</{name}>")


def _safe(part: str) -> str:
    return part if isinstance(part, Markup) else text(part)


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is False:
        return ""
    if value is True:
        return f" {name}"
    said = value if isinstance(value, str) else f"{value:.7g}" if isinstance(value, float) else str(value)
    return f' {name}="{text(said)}"'
