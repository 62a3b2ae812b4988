"""Hop counts of the paths: whether all probes of a path show others than before, which is another route.

Times are CLOCK_MONOTONIC nanoseconds. Pure; one thread. `look` is for once a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.remembered_bases import Pair, few
from pytools.estimators.windows import Rows

LOOK_NS: Final = 1_000_000_000
_LOOKS: Final = 3  # updates in a row that must see other hop counts


class Hops(NamedTuple):
    """TTLs on arrival, of the replies and (as the replies say) of the requests, one element per probe."""

    paths: Rows
    replies: NDArray[Any]
    requests: NDArray[Any]


class Other(NamedTuple):
    """A path that has other hop counts than before."""

    path: int
    began_ns: int
    directions: tuple[bool, bool]  # which have
    queued: bool  # whether something waited on the path when they changed


@dataclass(slots=True)
class _Seen:
    usual: Pair
    beside: Counter[Pair] = field(default_factory=Counter)  # updates that saw each together with that one
    others_since_ns: int = 0  # since when the usual one is not seen; 0: it is
    looks: int = 0
    queued: bool = False  # whether something waited on the path when the usual one was seen last
    unseen: bool = False  # by us: a predecessor saw it


class HopCounts:
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def known(self, path: int) -> tuple[Pair | None, tuple[Pair, ...]]:
        """The usual hop counts of a path, and those that are seen together with them."""
        seen = self._seen.get(path)
        if seen is None:
            return None, ()
        return seen.usual, few([each for each, count in seen.beside.most_common() if count >= _LOOKS])

    def restore(self, path: int, usual: Pair | None, beside: Sequence[Pair]) -> None:
        if usual is not None:
            self._seen[path] = _Seen(usual, Counter(dict.fromkeys(beside, _LOOKS)), unseen=True)

    def look(self, now_ns: int, hops: Sequence[Hops], queued: Callable[[int, int, int], bool]) -> Iterator[Other]:
        """Find out which paths have other hop counts than before.

        Parameters
        ----------
        hops : sequence of Hops
            Of all probes since the last look.
        queued : callable
            Whether something waited on a path now just before a moment.
        """
        if not hops:
            return
        paths = np.concatenate([each.paths for each in hops])
        pairs = np.concatenate([each.requests.astype(np.int64) << 8 | each.replies for each in hops])
        different = np.unique(paths << 16 | pairs, return_counts=True)
        by_path: dict[int, Counter[Pair]] = {}
        for key, count in zip(different[0].tolist(), different[1].tolist(), strict=True):
            by_path.setdefault(key >> 16, Counter())[key >> 8 & 0xFF, key & 0xFF] = count
        for path, counted in by_path.items():
            other = self._look(path, counted, now_ns, queued)
            if other is not None:
                yield other

    def _look(
        self, path: int, counted: Counter[Pair], now_ns: int, queued: Callable[[int, int, int], bool]
    ) -> Other | None:
        ((new, _),) = counted.most_common(1)
        known = self._seen.setdefault(path, _Seen(new))
        if known.usual in counted:
            known.beside.update(counted.keys())
            known.looks, known.unseen = 0, False
            return None
        if not known.looks:
            known.others_since_ns = now_ns - 2 * LOOK_NS  # the probes of two looks may have had them
            known.queued = known.unseen or queued(path, now_ns, known.others_since_ns)
        known.looks += 1
        if known.looks < _LOOKS:
            return None
        was, also = known.usual, known.beside
        self._seen[path] = _Seen(new)
        if also[new] >= _LOOKS:  # several ways at once, of which none is another one; a change is seen once or twice
            self._seen[path].beside = also
            return None
        return Other(path, known.others_since_ns, (new[0] != was[0], new[1] != was[1]), known.queued)
