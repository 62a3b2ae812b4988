"""Words that a person may choose from: the right one, or an error that names the nearest. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pytools.errors import UsageError


def chosen(word: str, words: Iterable[str], what: str) -> str:
    """The word as it is written among `words`, whatever its case.

    Raises
    ------
    UsageError
        If it is none of them; names the nearest, and all there are.
    """
    known = list(dict.fromkeys(words))
    for each in known:
        if each.lower() == word.lower():
            return each
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no {what} {word!r}", f"{hint}there are: {', '.join(known)}")
