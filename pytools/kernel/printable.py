"""Text that others chose (names of processes and groups), made fit for a terminal and for JSON."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a mark in place of whatever does not print: control characters, escapes, halves of surrogates."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
