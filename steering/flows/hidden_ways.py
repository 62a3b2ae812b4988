"""Which of the ways behind the first hop of a path are bad: for all that can choose among them. Pure.

Of addresses that one path leads to, from `path_way`: where several do, weights and pins choose. A way is known by the
router at the hop where ways differ. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pytools.signals import WAY_LASTS_NS, Path, PathWay
from steering.policy.actions import AroundWays
from steering.policy.scope import inside

_BEST_FIRST: Final = ("healthy", "unmeasured", "slow", "lossy", "dead")


@dataclass(frozen=True, slots=True)
class WayAct:
    """What avoids which ways to an address from now on."""

    path: Path
    before: Mapping[str, int]  # ports or connections by way
    after: Mapping[str, int]
    because: str
    seen_ns: int  # the measurement that led to it
    over: bool = False  # nothing is avoided any more


@dataclass(slots=True)
class Way:
    """A way behind the first hop, by its router."""

    state: str
    told_ns: int
    bad_ns: int  # when it was last bad; 0: never


@dataclass(slots=True)
class Fan:
    path: Path
    distance: int  # the hop at which they differ
    ways: dict[str, Way] = field(default_factory=dict)
    states: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)  # by router and port of a bond; when
    avoided: frozenset[str] = frozenset()  # routers, as it was last told
    passed: int = 0  # distance at which a probe arrived at the destination: nothing more is sent so far


class Ways:
    """The ways to all managed addresses of one family."""

    def __init__(self, wanted: AroundWays, managed: tuple[str, ...], family: Literal[4, 6]) -> None:
        self._wanted, self._managed, self._is_ipv6 = wanted, managed, family == 6
        self.fans: dict[str, Fan] = {}  # by address
        self._several: dict[str, int] = {}  # addresses that several paths lead to, and when that was last told

    def take(self, signal: PathWay, now: int, void: Callable[[str], None]) -> bool:
        """Digest a report of a way; whether it is news. `void` gets the address whose path, or hop, has changed."""
        address, path = signal.path.address, signal.path
        if (":" in address) != self._is_ipv6 or not inside(address, self._managed):
            return False
        fan = self.fans.get(address)
        if fan is not None and fan.path != path and now - _told(fan) <= WAY_LASTS_NS:
            self._several[address] = now
            return False
        if not signal.router or signal.differs_at is None:
            return False
        if fan is None or fan.path != path or fan.distance != signal.differs_at:
            fan = self.fans[address] = Fan(path, signal.differs_at, avoided=fan.avoided if fan else frozenset())
            void(address)
        fan.states[signal.router, signal.lower] = signal.state, now
        # A probe says its router, not by which port of a bond it left: a router is as good as by the best of these.
        of_lowers = [
            state
            for (router, _), (state, told_ns) in fan.states.items()
            if router == signal.router and now - told_ns <= WAY_LASTS_NS
        ]
        state = min(of_lowers, key=_BEST_FIRST.index)
        before = fan.ways.get(signal.router)
        bad_ns = now if state in self._wanted.avoid else before.bad_ns if before else 0
        fan.ways[signal.router] = Way(state, now, bad_ns)
        return before is None or before.state != state

    def served(self, address: str, now: int) -> Fan | None:
        """The ways to an address, if there is a choice among them."""
        fan = self.fans.get(address)
        return None if fan is None or fan.passed == fan.distance or len(self.known(fan, now)) < 2 else fan

    def known(self, fan: Fan, now: int) -> Mapping[str, Way]:
        """The ways that are known now; none where another path leads to the address, too."""
        if now - self._several.get(fan.path.address, -WAY_LASTS_NS) < WAY_LASTS_NS:
            return {}
        return {router: way for router, way in fan.ways.items() if now - way.told_ns <= WAY_LASTS_NS}

    def parted(self, fan: Fan, now: int) -> tuple[frozenset[str], frozenset[str]]:
        """The routers of ways to avoid, and of the others; none of the first while there is no better one."""
        ways, dwell = self.known(fan, now), self._wanted.dwell
        bad = frozenset(
            router
            for router, way in ways.items()
            if way.state in self._wanted.avoid or (way.bad_ns and now - way.bad_ns < dwell)
        )
        good = frozenset(router for router, way in ways.items() if router not in bad and way.state != "unmeasured")
        return (bad, good) if bad and good else (frozenset(), good)

    def act(
        self, fan: Fan, bad: frozenset[str], before: Mapping[str, int], after: Mapping[str, int], now: int
    ) -> WayAct:
        """Say what is avoided, and why; nothing bad: it is over."""
        if not bad:
            known = self.known(fan, now)
            why = "no way is worse than the others any more" if known else "its ways are not known any more"
            return WayAct(fan.path, before, after, f"{fan.path}: {why}", now, over=True)
        states = {router: fan.ways[router].state for router in sorted(bad)}
        states = {
            router: state if state in self._wanted.avoid else "just good again" for router, state in states.items()
        }
        why = ", ".join(f"the way by {router} is {state}" for router, state in states.items())
        seen_ns = max(fan.ways[router].told_ns for router in bad)
        return WayAct(fan.path, before, after, f"{fan.path}: {why} (hop {fan.distance})", seen_ns)

    def avoided(self, address: str) -> list[str]:
        """Routers of the ways to an address that are avoided, as it was last told."""
        return sorted(self.fans[address].avoided) if address in self.fans else []


def _told(fan: Fan) -> int:
    return max((way.told_ns for way in fan.ways.values()), default=0)
