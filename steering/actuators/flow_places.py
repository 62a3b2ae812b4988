"""Where each steered flow lies in the kernel's table: its row, and the entry by which the kernel finds it. Pure.

Mirrors `struct swerve_steer_set`: the lower half of a flow's hash names a set, the upper half is its tag there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytools.errors import RefusedError
from steering.plan import FlowKey

_MAKE_ROOM = "let leases end, or remove some"


@dataclass(frozen=True, slots=True)
class Place:
    row: int
    set: int
    way: int
    tag: int

    @property
    def entry(self) -> int:
        return self.tag << 32 | self.row


class Places:
    """Gives places out.

    Parameters
    ----------
    rows, sets, ways : int
        What there is of each; `sets` is a power of two.
    """

    def __init__(self, rows: int, sets: int, ways: int) -> None:
        self._capacity, self._sets, self._ways = rows, sets, ways
        self._of: dict[FlowKey, Place] = {}
        self._tags: dict[int, dict[int, int]] = {}  # set -> tag -> way
        self._free = deque(range(rows))  # a row rests as long as it can before it is used again

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[FlowKey]:
        return iter(self._of)

    def __getitem__(self, flow: FlowKey) -> Place:
        return self._of[flow]

    def get(self, flow: FlowKey) -> Place | None:
        return self._of.get(flow)

    def room_for(self, count: int) -> bool:
        """Whether there are rows for so many more."""
        return count <= len(self._free)

    def take(self, flows: Sequence[FlowKey], hashes: Sequence[int]) -> list[Place]:
        """Places for flows that have none: for all of them or for none.

        Raises
        ------
        RefusedError
            If there is no room.
        """
        if not self.room_for(len(flows)):
            raise RefusedError(
                f"{len(flows)} more flows cannot be steered: {len(self)} of {self._capacity} are already", _MAKE_ROOM
            )
        taken: dict[FlowKey, Place] = {}
        for flow, value in zip(flows, hashes, strict=True):
            index, tag = value & (self._sets - 1), value >> 32 | 1
            tags = self._tags.setdefault(index, {})
            way = next((way for way in range(self._ways) if way not in tags.values()), None) if tags else 0
            if way is None or tag in tags:
                self._release(taken.values())
                raise RefusedError("the flows cannot be steered: a set of the table is full (very rare)", _MAKE_ROOM)
            tags[tag] = way
            taken[flow] = Place(self._free.popleft(), index, way, tag)
        self._of.update(taken)
        return list(taken.values())

    def give_back(self, flows: Iterable[FlowKey]) -> None:
        """Take the places of these flows away, once the kernel finds them no more."""
        self._release([self._of.pop(flow) for flow in flows])

    def _release(self, places: Iterable[Place]) -> None:
        for place in places:
            del self._tags[place.set][place.tag]
            self._free.append(place.row)
