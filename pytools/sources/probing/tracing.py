"""Which routers the ports of a path pass, and behind which of them a way is bad: the probes to send, and the answers.

Each search is a generator: it yields the probes to send at once and gets the replies. Routers limit their answers
(Linux: six at once, then one a second to each host), so an unanswered probe is repeated a second later. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Generator, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Final, NamedTuple

from pytools.estimators.ways import Hop, State, Way, Ways, group, ports_needed, sick_hop

MISS: Final = 0.01  # how likely a further way may be missed, to tell those that were met
_MISS_LATER: Final = 1e-4  # in a later search: one in a hundred paths would be told a way too few until then
LATE_NS: Final = 400_000_000  # without an answer for so long, a probe counts as lost until one comes
PORTS: Final = 64  # source ports that a path is probed from, at most
ALONE: Final = 16  # of these, where routers do not answer

_BATCH: Final = 6
_AGREE: Final = 6  # ports of several ways that meet one router: these ways have met again
_TRIES: Final = 16  # most fail where a router has to answer many ports, and a fifth of all packets is lost
_TRIES_OF_KNOWN: Final = 6  # of a port whose router answered in an earlier search
_AGAIN_NS: Final = 1_000_000_000
_SOON_NS: Final = 300_000_000
_BURST: Final = 2  # rounds before a router has answered so often that it goes on by seconds
_ROUNDS: Final = 5
_ROUNDS_OF_LOSS: Final = 10
_LEAST_REPLIES: Final = 3


class Ask(NamedTuple):
    """A probe of a port that ends at a hop, from 1; at hop 0 it is seen as it leaves by a port of a bond."""

    port: int
    hop: int


class Batch(NamedTuple):
    """What to ask at once, each port once, and how long after the last."""

    asks: Sequence[Ask]
    after_ns: int


class Reply(NamedTuple):
    """Of a router, or the lower interface at hop 0."""

    router: str
    round_trip_ns: int


Steps = Generator[Batch, Mapping[Ask, Reply], None]


class Meeting:
    """The search for all ways of a path.

    Parameters
    ----------
    routers : int
        On the path.
    before : sequence of mapping
        What an earlier search has found; a port that is not answered any more keeps it, and more ports are asked.
    bundled : bool
        Whether the path's interface is, or is above, a bond or team that hashes flows over its ports.
    """

    def __init__(self, routers: int, before: Sequence[Hop] = (), bundled: bool = False) -> None:
        self.hops: list[dict[int, str]] = [{} for _ in range(routers)]
        self.lowers: dict[int, str] = {}  # by which lower interface each port leaves
        self._bundled = bundled
        self._before = before if len(before) == routers else [dict[int, str]()] * routers
        self._miss = _MISS_LATER if before else MISS
        self._silent: set[int] = set()
        self.counted = False  # whether so many ports were answered that `ways` is worth telling

    def ways(self) -> Ways:
        found = group(self.hops, () if self.lowers else self._silent, self.lowers)
        return found._replace(confidence=0.0) if self._silent else found

    def search(self) -> Steps:
        """Hop by hop; of the first, which is the path's gateway, one port says enough."""
        nobody = False
        if self._bundled:
            yield from self._meet_lowers()
        if self.hops:
            yield from self._meet(1, [0], 1)
        for hop in range(2, len(self.hops) + 1):
            ways = group(self.hops).ways
            if len(ways) > 1:
                yield from self._meet_again(hop, ways)
            else:
                yield from self._meet(hop, range(PORTS), None)
                nobody = nobody or not self.hops[hop - 1]
        if nobody and self.ways().differs_at is None:
            self._silent = set(range(ALONE))
        self.counted = True

    def _meet_lowers(self) -> Steps:
        """Each port once, and the first ones again: one that leaves by another lower then is of no flow's hash."""
        seen = self.lowers
        for _ in range(2):
            left = [port for port in range(PORTS) if port not in seen]
            for first in range(0, len(left), _BATCH):
                replies = yield Batch([Ask(port, 0) for port in left[first : first + _BATCH]], 0)
                seen.update((ask.port, reply.router) for ask, reply in replies.items())
        for first in range(0, 2 * _BATCH, _BATCH):
            replies = yield Batch([Ask(port, 0) for port in range(first, first + _BATCH)], 0)
            if any(seen.setdefault(ask.port, reply.router) != reply.router for ask, reply in replies.items()):
                seen.clear()
                return
        self.counted = len(set(seen.values())) > 1

    def _meet(self, hop: int, ports: Sequence[int], enough: int | None) -> Steps:
        """Ask until there is no further way, or nobody answers; `enough`: so many answers."""
        found, tries = self.hops[hop - 1], Counter[int]()
        while True:
            routers = len(set(found.values()))
            least, needed = (enough or ports_needed(max(routers, 1), miss) for miss in (MISS, self._miss))
            if len(found) >= needed:
                self.counted = self.counted or routers > 1
            late = [
                port for port in ports if tries[port] > 1 and port not in found and port not in self._before[hop - 1]
            ]
            asked = ports[: needed + len(late)] if len(found) < needed else [each for each in ports if tries[each]]
            if not found and tries.total() >= 2 * _BATCH:
                return
            least += len(late) if least == needed else sum(port in late for port in ports[:least])
            more = ports[least:]  # count if they are answered
            if (yield from self._ask(hop, asked, tries, more)):
                self._silent.update(port for port in asked if found and port not in found and port not in more)
                return

    def _meet_again(self, hop: int, ways: Sequence[Way]) -> Steps:
        """Ask ports of all ways in turn, until it shows that these have met again, or that none parts; if not, all."""
        found, tries = self.hops[hop - 1], Counter[int]()
        ports = [port for turn in zip_longest(*(way.ports for way in ways)) for port in turn if port is not None]
        some = {port for way in ways for port in way.ports[:_AGREE]}
        while True:
            if len(found) >= _AGREE and len(set(found.values())) == 1:
                return
            if not found and tries.total() >= 2 * _BATCH:
                return
            parted = any(len({found[port] for port in way.ports if port in found}) > 1 for way in ways)
            if (yield from self._ask(hop, ports if parted else [port for port in ports if port in some], tries)):
                return

    def _ask(
        self, hop: int, ports: Sequence[int], tries: Counter[int], more: Container[int] = ()
    ) -> Generator[Batch, Mapping[Ask, Reply], bool]:
        """One batch of those that were asked least, fewer times if among `more`; True: there are none left to ask."""
        found, before = self.hops[hop - 1], self._before[hop - 1]
        for port in ports:
            if port not in found and port in before and tries[port] >= _TRIES_OF_KNOWN:
                found[port] = before[port]
        most = {port: _TRIES_OF_KNOWN if port in more else _TRIES for port in ports}
        left = [port for port in ports if port not in found and tries[port] < most[port]]
        if not left:
            return True
        chosen = sorted(left, key=lambda port: tries[port])[:_BATCH]
        again = any(tries[port] for port in chosen)
        replies = yield Batch([Ask(port, hop) for port in chosen], _AGAIN_NS if again else 0)
        tries.update(chosen)
        found.update((ask.port, reply.router) for ask, reply in replies.items() if ask.hop == hop)
        return False


class Locating:
    """The search for the hop behind which a way is bad.

    Parameters
    ----------
    sick, good : Way
        What is bad, and what is not.
    first : int
        The first hop at which they differ.
    size : float
        How bad it is: queueing (ns) of what is slow, else the share of losses.
    """

    def __init__(self, sick: Way, good: Way, state: State, first: int, size: float) -> None:
        self._sick, self._good, self._state, self._first, self._size = sick, good, state, first, size
        self._seen: dict[tuple[int, bool], list[int | None]] = {}
        self.hop: int | None = None  # the last that is not affected; None: not known
        self.moved = False  # whether ports of the bad way leave by another lower interface than they did

    def search(self) -> Steps:
        """Ask the routers of both ways in turn, hop by hop."""
        if self._sick.lower:
            replies = yield Batch([Ask(port, 0) for port in self._sick.ports[:_BATCH]], 0)
            self.moved = any(reply.router != self._sick.lower for reply in replies.values())
            if self.moved:
                return
        for turn in range(_ROUNDS_OF_LOSS if self._state == "lossy" else _ROUNDS):
            pause_ns = _SOON_NS if turn < _BURST else 2 * _AGAIN_NS
            for hop in range(self._first, len(self._sick.hops) + 1):
                asks = [Ask(way.ports[turn % len(way.ports)], hop) for way in (self._sick, self._good)]
                replies = yield Batch(asks, pause_ns)
                for ask, is_sick in zip(asks, (True, False), strict=True):
                    reply = replies.get(ask)
                    self._seen.setdefault((hop, is_sick), []).append(reply and reply.round_trip_ns)
                pause_ns = 0
        hops = range(self._first, len(self._sick.hops) + 1)
        self.hop = sick_hop([*map(self._is_good, hops), False], self._first)

    def _is_good(self, hop: int) -> bool | None:
        sick, good = ([each for each in self._seen[hop, which] if each is not None] for which in (True, False))
        asked = len(self._seen[hop, True])
        if len(good) < _LEAST_REPLIES:
            return None
        if self._state == "slow":
            return None if len(sick) < _LEAST_REPLIES else median(sick) - median(good) < self._size / 2
        if self._state == "dead":
            if sick:
                return True
            return False if self._sick.hops[hop - 1] is not None else None
        lost, lost_of_good = 1 - len(sick) / asked, 1 - len(good) / asked
        if lost <= self._size / 3:
            return True
        return False if lost >= self._size / 2 > 2 * lost_of_good else None
