"""Which of a path's windows people are shown: the longest, so that figures do not jump. Pure; times in nanoseconds."""

from __future__ import annotations

from typing import Final

_LONG_OVER: Final = 3  # so many windows without another one as long: the agent has shorter ones by now


def is_shown(window_ns: int, shown_ns: int, since_ns: int) -> bool:
    """Whether a window takes the place of the one that is shown.

    Parameters
    ----------
    window_ns, shown_ns : int
        Lengths of the new one and of the one that is shown.
    since_ns : int
        From the end of the one that is shown to the end of the new one.
    """
    return window_ns >= shown_ns or since_ns > _LONG_OVER * shown_ns
