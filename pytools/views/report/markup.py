"""HTML from templates of jinja2, and SVG as strings that cannot be forgotten to be escaped. Pure.

Host names, reasons and names of processes are chosen by others. Text is escaped on its way into an element or a
template, and what does not print (control characters, changes of direction) is replaced by a mark.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import resources
from typing import Final

import jinja2
from markupsafe import Markup, escape

_UNPRINTABLE: Final = "\N{REPLACEMENT CHARACTER}"

Attribute = str | int | float | bool | None


@functools.cache
def asset(name: str) -> str:
    """A file of `assets`, with nothing in it replaced."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def text(words: str) -> Markup:
    """Words as they shall be read, whatever is in them; markup as it is."""
    return escape(_printable(words))


def _printable(words: object) -> object:
    if not isinstance(words, str) or isinstance(words, Markup) or words.isprintable():
        return words
    return "".join(each if each.isprintable() or each == "\n" else _UNPRINTABLE for each in words)


TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.FunctionLoader(asset),
    autoescape=True,
    finalize=_printable,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Parts one after the other; those that are not markup are escaped."""
    return text(between).join(map(text, parts))


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
    return Markup(f"<{name}{opened}>{joined(content)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is False:
        return ""
    if value is True:
        return f" {name}"
    said = value if isinstance(value, str) else f"{value:.7g}" if isinstance(value, float) else str(value)
    return f' {name}="{text(said)}"'
