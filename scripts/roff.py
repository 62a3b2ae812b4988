"""Text and Markdown as roff, the language of man pages: all that this project knows of it is here. Pure functions.

Of Markdown it takes what the pages in docs/ use. A table becomes a list, its first column the terms: rows of many words
do not fit beside each other in a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token

_FONTS: Final = {"strong_open": r"\fB", "em_open": r"\fI", "link_open": r"\fI"}
# What a terminal shows as another sign, or hides, unless it is written so; the backslash first.
_SIGNS: Final = (("\\", r"\e"), ("-", r"\-"), ("'", r"\(aq"), ("`", r"\(ga"), ("^", r"\(ha"), ("~", r"\(ti"))
_CLOSING: Final = frozenset({"strong_close", "em_close", "link_close"})


def escaped(text: str) -> str:
    """Text as it is to be read: nothing in it is a request, a dash stays one that can be copied."""
    for sign, roff in _SIGNS:
        text = text.replace(sign, roff)
    return _no_request(text)


def _no_request(text: str) -> str:
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)


def prose(text: str) -> str:
    """One paragraph of plain text; what stands in backquotes is what is typed."""
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    return _no_request("".join(bold(each) if number % 2 else escaped(each) for number, each in enumerate(parts)))


def bold(text: str) -> str:
    """Text as it is typed."""
    return rf"\fB{escaped(text)}\fR"


def heading(title: str, section: int, date: str, source: str) -> str:
    """The first line of a page."""
    return f'.TH "{escaped(title.upper())}" {section} "{date}" "{escaped(source)}" "swerve"'


def part(name: str) -> str:
    """The heading of a part."""
    return f'.SH "{escaped(name.upper())}"'


def paragraphs(text: str) -> list[str]:
    """Plain text, blank lines between its paragraphs."""
    return [line for each in re.split(r"\n\s*\n", text.strip()) if each for line in (".PP", prose(each))]


def listed(terms: Iterable[tuple[str, str]]) -> list[str]:
    """Terms that are typed, and what each means."""
    return [line for term, text in terms for line in (".TP", bold(term), prose(text) or r"\&")]


def example(text: str) -> list[str]:
    """Lines as they stand, set apart."""
    return [".PP", ".RS 4", ".EX", *escaped(text).splitlines(), ".EE", ".RE"]


def markdown(text: str) -> list[str]:
    """A page; its title is left out."""
    return list(_blocks(MarkdownIt("commonmark").enable("table").parse(text)))


def _blocks(tokens: Sequence[Token]) -> Iterator[str]:
    items: list[int] = []  # of each open list, the number of its next item; 0: not numbered
    at = 0
    while at < len(tokens):
        token = tokens[at]
        if token.type == "heading_open":
            if token.tag != "h1":
                kind = ".SH" if token.tag == "h2" else ".SS"
                yield f'{kind} "{_inline(tokens[at + 1]).replace(chr(34), chr(92) + "(dq")}"'
            at += 2
        elif token.type == "paragraph_open":
            yield from [] if token.hidden or (items and tokens[at - 1].type == "list_item_open") else [".PP"]
            yield _inline(tokens[at + 1])
            at += 2
        elif token.type == "fence":
            yield from example(token.content.rstrip("\n"))
        elif token.type == "table_open":
            end = next(i for i in range(at, len(tokens)) if tokens[i].type == "table_close")
            yield from _table(tokens[at:end])
            at = end
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            items.append(0 if token.type == "bullet_list_open" else 1)
        elif token.type == "list_item_open":
            yield rf".IP {items[-1]}. 4" if items[-1] else r".IP \(bu 2"
            items[-1] += bool(items[-1])
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            items.pop()
        elif token.type not in ("paragraph_close", "heading_close", "list_item_close"):
            raise ValueError(f"no roff is known for {token.type!r} (line {token.map and token.map[0] + 1})")
        at += 1


def _table(tokens: Sequence[Token]) -> Iterator[str]:
    rows: list[list[str]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(_inline(token))
    head, *body = rows
    for first, *others in body:
        yield ".TP"
        yield first if "\\fB" in first else rf"\fB{first}\fR"
        told = [(name, cell) for name, cell in zip(head[1:], others, strict=True) if cell]
        if not told:
            yield r"\&"
        for number, (name, cell) in enumerate(told):
            if number:
                yield ".br"
            yield cell if len(head) == 2 or not name else rf"\fI{name}:\fR {cell}"


def _inline(token: Token) -> str:
    said = []
    for child in token.children or ():
        if child.type == "text":
            said.append(escaped(child.content))
        elif child.type == "code_inline":
            said.append(bold(child.content))
        elif child.type in _FONTS:
            said.append(_FONTS[child.type])
        elif child.type in _CLOSING:
            said.append(r"\fR")
        elif child.type in ("softbreak", "hardbreak"):
            said.append("\n")
        else:
            raise ValueError(f"no roff is known for {child.type!r} in {token.content!r}")
    return _no_request("".join(said))
