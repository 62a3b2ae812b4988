"""What a person asked a table for, checked against what the table has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytools.errors import UsageError
from pytools.views import filters
from pytools.views.filters import Query, chosen
from pytools.views.registry import VIEWS


def asked_for(kind: str, sort: str | None, given: Mapping[str, Sequence[Any]]) -> Query:
    """What was typed, checked against what the table has.

    Parameters
    ----------
    given : mapping
        Name of a filter -> its values, as typed.

    Raises
    ------
    UsageError
        If there is no such column, a filter is not what it should be, or nothing could ever pass.
    """
    has = VIEWS[kind].filters
    for name, values in given.items():
        if values and name not in has:
            can = f"it can be narrowed with {', '.join(f'--{each}' for each in sorted(has))}" if has else "leave it out"
            raise UsageError(f"nothing in this table has what --{name} asks for", can)
    return Query(filters.parse(**given), None if sort is None else sort_word(kind, sort))


def sort_word(kind: str, word: str) -> str:
    """The column that a person means.

    Raises
    ------
    UsageError
        If the table has no such column; names the nearest, and all there are.
    """
    from pytools.views import table_registry

    words = [each for listing in table_registry.LISTINGS[kind].values() for each in listing(0).words()]
    return chosen(word, words, "column to sort by")


def view_word(word: str) -> str:
    """The table that a person means.

    Raises
    ------
    UsageError
        If there is no such table; names the nearest, and all there are.
    """
    from pytools.views import table_registry

    return chosen(word, table_registry.TABLES, "view")
