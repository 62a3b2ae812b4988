"""What became of a port's GIDs: a RoCE connection names an index, and fails when that holds another address. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GidChange:
    """What changed between two readings."""

    detail: str
    values: dict[str, int]


class GidHistory:
    """The GIDs of one port, reading by reading; remembers what an index held before it was empty."""

    def __init__(self, gids: Mapping[int, str]) -> None:
        self._now = dict(gids)
        self._last = dict(gids)

    def take(self, gids: Mapping[int, str]) -> GidChange | None:
        """What changed, vanished, moved or came back; an address that is new and takes nobody's place is no news."""
        words: list[str] = []
        counts = {"changed": 0, "vanished": 0, "returned": 0, "moved": 0, "appeared": 0}
        first: int | None = None
        for index in sorted(self._now.keys() | gids.keys()):
            old, new = self._now.get(index), gids.get(index)
            if old == new:
                continue
            kind, text = self._change(index, old, new, gids)
            counts[kind] += 1
            if kind != "appeared":
                words.append(f"index {index}: {text}")
                first = index if first is None else first
        self._now = dict(gids)
        self._last.update(gids)
        if first is None:
            return None
        return GidChange("; ".join(words), {"index": first, **counts})

    def _change(self, index: int, old: str | None, new: str | None, gids: Mapping[int, str]) -> tuple[str, str]:
        if new is None:
            return "vanished", f"{old} → gone"
        before = old or self._last.get(index)
        if before == new:
            return "returned", f"gone → {new} again"
        if before is not None:
            return "changed", f"{before} → {new}"
        place = next((each for each, gid in self._last.items() if gid == new and gids.get(each) != new), None)
        return ("appeared", "") if place is None else ("moved", f"nothing → {new}, which was index {place}")
