"""The ways behind a path's first hop: how many there are, which source ports take which, and which of them is bad.

Pure. Times are CLOCK_MONOTONIC nanoseconds, forward delays differences of two clocks: only their differences count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING

State = Literal["healthy", "slow", "lossy", "dead", "unmeasured"]
Hop = Mapping[int, str]  # the address of the router that a port meets there
Key = tuple[str, ...]  # of a way: its lower, if known, and the routers where ways part; of a port alone: its number

SLOW_NS: Final = 1_000_000  # longer than the best way
LATEST: Final = 20  # probes of a way that it is judged by
_LEAST_ANSWERS: Final = 6
_NEWEST_ANSWERS: Final = 8  # that delays are compared over
_FALSE: Final = 1e-6  # how likely a run of losses may be by chance, to be called dead
_FALSE_LOSSES: Final = 1e-4  # the same of a count of losses, to be called lossy
_LEAST_RUN: Final = 4
_LEAST_LOSSES: Final = 3
_Z: Final = 1.96


def miss(ways: int, ports: int) -> float:
    """How likely so many ports have all missed one more way, if all ways were equally likely; a bound.

    That of the Multipath Detection Algorithm (Augustin, Friedman, Teixeira 2007).
    """
    return min(1.0, (ways + 1) * (ways / (ways + 1)) ** ports) if ways else 1.0


def ports_needed(ways: int, at_most: float) -> int:
    """How many ports leave no more than this chance that there is one more way."""
    if not ways:
        return 1
    return math.ceil(math.log(at_most / (ways + 1)) / math.log(ways / (ways + 1)))


@dataclass(frozen=True, slots=True)
class Way:
    key: Key
    ports: tuple[int, ...]
    hops: tuple[str | None, ...]  # routers from the first hop on
    alone: bool = False  # a port that no router answers
    lower: str = ""  # the port of the bond or team that it leaves by


class Ways(NamedTuple):
    ways: tuple[Way, ...]
    differs_at: int | None  # the first hop at which they differ
    confidence: float
    ports: int


def group(hops: Sequence[Hop], silent: Iterable[int] = (), lowers: Hop | None = None) -> Ways:
    """Ports by the routers that they meet.

    Parameters
    ----------
    hops : sequence of mapping
        From the first hop on; a hop that does not answer is empty.
    silent : iterable of int
        Ports that no router answers at a hop where others are answered, or at all: each is by itself.
    lowers : mapping, optional
        The interface below the path's own by which each port leaves.
    """
    alone = sorted(set(silent))
    lowers = lowers or {}
    members: dict[Key, list[int]] = {}
    for port in sorted({port for hop in (lowers, *hops) for port in hop} - set(alone)):
        if port in lowers or not lowers:
            members.setdefault((lowers[port],) if lowers else (), []).append(port)
    differs_at = None
    for number, hop in enumerate(hops, 1):
        if all(len({hop[port] for port in ports if port in hop}) <= 1 for ports in members.values()):
            continue  # routers answer by the address that a packet came in at: behind where ways meet, they differ too
        differs_at = differs_at or number
        parted: dict[Key, list[int]] = {}
        for key, ports in members.items():
            for port in ports:
                if port in hop:
                    parted.setdefault((*key, hop[port]), []).append(port)
        members = parted
    of_all = [set(hop.values()) for hop in hops]

    def routers(ports: Sequence[int]) -> tuple[str | None, ...]:
        found: list[str | None] = []
        for place, hop in enumerate(hops):
            own = {hop[port] for port in ports if port in hop} or of_all[place]
            found.append(next(iter(own)) if len(own) == 1 else None)
        return tuple(found)

    ways = [
        Way(key, tuple(ports), routers(ports), lower=lowers.get(ports[0], ""))
        for key, ports in members.items()
        if ports
    ]
    ways += [Way((str(port),), (port,), routers((port,)), True, lowers.get(port, "")) for port in alone]
    in_all = sum(len(way.ports) for way in ways)
    sure = 0.0 if alone else 1 - miss(len(ways), in_all)
    return Ways(tuple(ways), differs_at, sure, in_all)


class Probes(NamedTuple):
    """Those of one way whose fate is known, oldest first."""

    sent_ns: NDArray[np.int64]
    forward_ns: NDArray[np.int64]  # MISSING: lost

    @property
    def answered(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.forward_ns != MISSING
        return found

    @property
    def lost(self) -> int:
        return len(self.sent_ns) - int(np.count_nonzero(self.answered))

    @property
    def run(self) -> int:
        """How many of the newest are lost in a row."""
        answered = self.answered.nonzero()[0]
        return len(self.sent_ns) - 1 - int(answered[-1]) if len(answered) else len(self.sent_ns)

    @property
    def delays(self) -> NDArray[np.int64]:
        """Of the newest that came back."""
        return self.forward_ns[self.answered][-_NEWEST_ANSWERS:]


class Verdict(NamedTuple):
    state: State
    sent: int
    lost: int
    loss_bound: float | None
    queueing_ns: int | None
    queueing_bound_ns: int | None
    window_ns: int


def may_lose(lost: int, sent: int) -> float:
    """How large the share of losses may be where so many were seen (95 %, Wilson)."""
    if not sent:
        return 1.0
    share, weight = lost / sent, _Z * _Z / sent
    return (share + weight / 2 + _Z * math.sqrt(share * (1 - share) / sent + weight / (4 * sent))) / (1 + weight)


def _loss_bound(lost: int, sent: int) -> float | None:
    if not sent:
        return None
    share = lost / sent
    return round(max(may_lose(lost, sent) - share, share + may_lose(sent - lost, sent) - 1), 4)


def _by_chance(lost: int, sent: int, share: float) -> float:
    """How likely so many losses, or more, are among so many probes."""
    return sum(math.comb(sent, each) * share**each * (1 - share) ** (sent - each) for each in range(lost, sent + 1))


def judge(probes: Sequence[Probes], before: Sequence[State], drift: float, stamps_ns: int) -> list[Verdict]:
    """What each way of a path is like, against the others.

    A way is dead when so many in a row were lost that by the loss of the others it happens once in 10⁶ times, and
    others answered meanwhile; lossy when its losses happen by theirs once in 10⁴ times; slow when three quarters of its
    newest delays are longer by 1 ms than three quarters of those of the best way.

    Parameters
    ----------
    before : sequence of State
        Of each way: what is dead stays so until it answers, what is slow until half of its delays exceed those by
        less than half a millisecond.
    drift : float
        Of the two clocks against each other, at most.
    stamps_ns : int
        The error of the difference of two stamps.
    """
    silent = [each.run >= _LEAST_RUN or each.run == len(each.sent_ns) for each in probes]
    quartiles = [
        np.percentile(each.delays, (25, 50, 75)) if len(each.delays) >= _LEAST_ANSWERS else None for each in probes
    ]
    least = min((int(each.delays.min()) for each in probes if len(each.delays)), default=0)
    found = []
    for number, own in enumerate(probes):
        others = [each for place, each in enumerate(probes) if place != number and not silent[place]]
        state: State = "healthy"
        best = min((q[2] for place, q in enumerate(quartiles) if q is not None and place != number), default=None)
        ours = quartiles[number]
        if _is_dead(own, others, before[number]):
            state = "dead"
        elif len(probes) > 1 and ((silent[number] and not others) or len(own.sent_ns) < _LEAST_RUN):
            state = "unmeasured"
        elif ours is not None and best is not None and _is_slow(ours, best, before[number]):
            state = "slow"
        elif _is_lossy(own, others):
            state = "lossy"
        sent, window_ns, bound_ns = len(own.sent_ns), 0, None
        if sent:
            window_ns = int(own.sent_ns[-1] - own.sent_ns[0])
        if ours is not None:
            spread = (ours[2] - ours[0]) / math.sqrt(len(own.delays))
            bound_ns = round(stamps_ns + drift * window_ns + spread)
        found.append(
            Verdict(
                *(state, sent, own.lost),
                _loss_bound(own.lost, sent),
                round(ours[1] - least) if ours is not None else None,
                bound_ns,
                window_ns,
            )
        )
    return found


def _is_dead(own: Probes, others: Sequence[Probes], before: State) -> bool:
    run = own.run
    if run < _LEAST_RUN or not others:
        return False
    since_ns = int(own.sent_ns[-run])
    if not any(bool(np.any(each.answered & (each.sent_ns >= since_ns))) for each in others):
        return False
    if before == "dead":
        return True
    share = may_lose(sum(each.lost for each in others), sum(len(each.sent_ns) for each in others))
    return bool(share**run <= _FALSE)


def _is_lossy(own: Probes, others: Sequence[Probes]) -> bool:
    if own.lost < _LEAST_LOSSES or own.run >= _LEAST_RUN:  # it may be dead, which is not known yet
        return False
    share = own.lost / len(own.sent_ns)
    better = [each for each in others if each.lost <= share * len(each.sent_ns)]
    if not better:
        return False
    usual = may_lose(sum(each.lost for each in better), sum(len(each.sent_ns) for each in better))
    return _by_chance(own.lost, len(own.sent_ns), usual) <= _FALSE_LOSSES


def _is_slow(quartiles: NDArray[np.float64], best: float, before: State) -> bool:
    if before == "slow":
        return bool(quartiles[1] > best + SLOW_NS / 2)
    return bool(quartiles[0] > best + SLOW_NS)


def sick_hop(good: Sequence[bool | None], first: int) -> int | None:
    """The last hop that is as it should be, if the next is not; None: not known.

    Parameters
    ----------
    good : sequence of bool, optional
        Of each hop from `first` on, and at last of the far end, whether what is bad there is not seen yet; None: the
        router does not say.
    first : int
        Before it nothing is bad.
    """
    found = first - 1
    for hop, each in enumerate(good, first):
        if each is None:
            return None
        if not each:
            return found if not any(good[hop - first :]) else None  # bad, and good behind: routers that answer late
        found = hop
    return None
