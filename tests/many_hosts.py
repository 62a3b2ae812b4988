"""Many hosts under one policy that share congested rails: simulated rails and flows, the real engine on every host.

Imported as `many_hosts`.

A rail is a fluid queue: what arrives beyond its capacity waits, what does not fit its buffer is lost. Every host has
flows of its own, whose rates do not give way, spread over the rails by hash and weights as the kernel does it (hash
threshold), and decides alone on its own measurements, every `TICK_NS`. Rates are in units of one whole rail's capacity.
Times are nanoseconds from an arbitrary zero. Pure: the same arguments give the same herd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import samples
from numpy.typing import NDArray

from pytools.signals import Delay, Path, PathDelay
from steering.deciding.engine import Engine
from steering.plan import Group, Member, Weights, nexthop_group, weights_of
from steering.policy.model import Policy

TICK_NS: Final = 20_000_000
CUT_AFTER_S: Final = 5
WITHIN: Final = 0.1  # of the optimum
_STEPS: Final = 4  # of the queues within a tick; a host measures at one of them
_WINDOW: Final = 4  # measurements to a window of 80 ms
_START_NS: Final = 1_000_000_000_000
_SECOND_NS: Final = 1_000_000_000
_TARGET: Final = nexthop_group(102)
_ADDRESS: Final = "10.9.0.2"

Rates = NDArray[np.float64]

_CONGESTED: Final = {"signal": "queueing_delay", "above": "5ms", "for": "60ms", "clear_below": "1ms"}


def policy(damped: bool) -> Policy:
    """A policy against congestion as one is advised to write it for a herd, or as one might at first."""
    shift = {"share": 0.0, "step": 0.1, "settle": "1s"} if damped else {"share": 0.0}
    at_once = {"dwell": "0s", "max_dwell": "0s", "retry_after": "0s", "steps": [1.0], "step": "20ms"}
    rule = {"name": "congested", "when": _CONGESTED, "then": {"shift": shift}}
    return Policy.model_validate(
        {
            "version": 1,
            "manage": {"destinations": ["10.9.0.0/16"]},
            "safety": {"herd": {"jitter": "1s" if damped else "0s"}},
            "rules": [rule if damped else rule | {"return": at_once}],
        }
    )


@dataclass(frozen=True)
class Scene:
    """What the hosts share, and what they send."""

    capacities: tuple[float, ...]  # of each rail once it is cut; 1 is a whole one
    load: float  # all flows together, as a share of all capacity that is left
    hosts: int = 64
    flows: int = 16  # of each host
    buffer_ns: int = 50_000_000  # of a rail, at its capacity
    noise_ns: float = 30_000.0  # mean of what is added to each measurement
    bursts: float = 0.03  # standard deviation of a rail's load, with 200 ms to its memory
    seed: int = 1

    @property
    def rails(self) -> int:
        """How many."""
        return len(self.capacities)


@dataclass(frozen=True)
class Second:
    """What happened within one second."""

    delivered: float  # share of what was offered
    worst: float  # share of what was offered that got through where least did, of the rails in use
    queueing_ns: float  # mean over what was sent
    moves: NDArray[np.int64]  # by flow
    acts: int
    shares: tuple[float, ...]  # of what was sent, by rail, at the end


@dataclass(frozen=True)
class Outcome:
    """How a herd behaved."""

    gap: float  # to the optimum: share of what was offered that did not get through where least did
    lost: float  # share of all that was offered
    queueing_ns: float
    moves: float  # of a flow in 10 s, the mean
    most_moves: int  # of any flow in any 10 s
    settled_s: int  # after the cut, until the gap stayed WITHIN


class _Host:
    """One host's flows, weights and engine."""

    def __init__(self, number: int, scene: Scene, policy: Policy, rng: np.random.Generator) -> None:
        self.engine = Engine(policy)
        self.hashes = rng.random(scene.flows)
        self.rates: Rates = rng.exponential(1.0, scene.flows)
        self.step = number % _STEPS
        self.seen: list[list[float]] = [[] for _ in range(scene.rails)]
        rails = range(scene.rails)
        self.members = tuple(Member(11 + rail, f"10.{rail}.1.1", f"rail{rail}", 1) for rail in rails)
        self.paths = [Path(f"h{number}", "peer", _ADDRESS, m.gateway, m.interface) for m in self.members]
        self.weights: Weights = weights_of((m.nexthop_id, m.weight) for m in self.members)
        group = Group(_TARGET, (f"{_ADDRESS}/32",), self.members, self.weights)
        self.engine.arrange([group], lambda _: (_TARGET,), _START_NS)
        self.places = self._placed()

    def _placed(self) -> NDArray[np.intp]:
        """Which rail each flow takes: the members divide the space of hashes in their order, by weight."""
        upper = np.cumsum([weight for _, weight in self.weights]) / sum(weight for _, weight in self.weights)
        rails = np.array([nexthop - 11 for nexthop, _ in self.weights])
        places: NDArray[np.intp] = rails[np.searchsorted(upper[:-1], self.hashes, side="right")]
        return places

    def decide(self, now_ns: int, delays_ns: Sequence[float]) -> NDArray[np.bool_] | None:
        """Measure all rails, do what the engine wants; which flows moved, None if nothing was done."""
        for path, seen, delay_ns in zip(self.paths, self.seen, delays_ns, strict=True):
            seen.append(delay_ns)
            del seen[:-_WINDOW]
            self.engine.take(_measured(path, seen, now_ns), now_ns)
        changes = self.engine.changes(now_ns)
        if not changes:
            return None
        for change in changes:
            self.weights = change.after
            self.engine.carried_out(change, now_ns, change.after)
        before, self.places = self.places, self._placed()
        moved: NDArray[np.bool_] = before != self.places
        return moved


def _measured(path: Path, seen: Sequence[float], now_ns: int) -> PathDelay:
    ordered = sorted(int(each) for each in seen)
    p50, p99 = ordered[(len(ordered) - 1) // 2], ordered[-1]
    forward = Delay(
        samples=len(ordered),
        queueing_p50_ns=p50,
        queueing_p99_ns=p99,
        queueing_last_ns=int(seen[-1]),
        queueing_bound_ns=400,
    )
    moment = {"host": path.source, "at_ns": now_ns, "unix_ns": now_ns, "window_ns": _WINDOW * TICK_NS}
    counts = {"sent": len(ordered), "received": len(ordered), "lost": 0}
    return samples.path_delay(path=path, forward=forward, reverse=forward, **moment, **counts)


def simulate(policy: Policy, scene: Scene, seconds: int) -> list[Second]:
    """What becomes of a herd under a policy, second by second. The rails are whole for the first `CUT_AFTER_S`."""
    rng = np.random.default_rng(scene.seed)
    hosts = [_Host(number, scene, policy, rng) for number in range(scene.hosts)]
    rates = np.array([host.rates for host in hosts])
    rates *= scene.load * sum(scene.capacities) / rates.sum()
    rails = _Rails(scene, rng)
    told = []
    for second in range(seconds):
        if second == CUT_AFTER_S:
            rails.capacities = np.array(scene.capacities)
        told.append(_second(hosts, rates, rails, scene, rng, _START_NS + second * _SECOND_NS))
    return told


def outcome(told: Sequence[Second], judged_s: int) -> Outcome:
    """How a herd behaved, judged by the last so many seconds.

    There is room for all of the load, so the optimum, max-min fair or in sum, is that everything gets through.
    """
    last = told[-judged_s:]
    moves = np.array([second.moves for second in last])
    sums = np.cumsum(np.vstack([np.zeros_like(moves[:1]), moves]), axis=0)
    bad = [place for place, second in enumerate(told) if second.worst < 1 - WITHIN]
    return Outcome(
        gap=1 - float(np.mean([second.worst for second in last])),
        lost=1 - float(np.mean([second.delivered for second in last])),
        queueing_ns=float(np.mean([second.queueing_ns for second in last])),
        moves=float(moves.sum() / moves.shape[1] / len(last) * 10),
        most_moves=int((sums[10:] - sums[:-10]).max()) if len(last) >= 10 else int(sums[-1].max()),
        settled_s=max(bad[-1] + 1 - CUT_AFTER_S, 0) if bad else 0,
    )


class _Rails:
    """The queues."""

    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self.capacities = np.ones(scene.rails)
        self._queued = np.zeros(scene.rails)  # rate times seconds
        self._burst = np.zeros(scene.rails)
        self._scene, self._rng = scene, rng

    def pass_time(self, load: Rates, seconds: float) -> tuple[Rates, Rates]:
        """What arrived and what was lost while the flows sent so much; times a rate."""
        memory = np.exp(-seconds / 0.2)
        fresh = self._rng.normal(0.0, self._scene.bursts, len(load))
        self._burst = memory * self._burst + np.sqrt(1 - memory**2) * fresh
        arrived = load * np.maximum(1 + self._burst, 0) * seconds
        queued = np.maximum(self._queued + arrived - self.capacities * seconds, 0.0)
        room = self.capacities * self._scene.buffer_ns / 1e9
        self._queued = np.minimum(queued, room)
        return arrived, queued - self._queued

    def delays_ns(self) -> Rates:
        """How long what arrives now will wait."""
        delays: Rates = self._queued / self.capacities * 1e9
        return delays


def _second(
    hosts: list[_Host], rates: Rates, rails: _Rails, scene: Scene, rng: np.random.Generator, began_ns: int
) -> Second:
    arrived, lost, waited = np.zeros(scene.rails), np.zeros(scene.rails), 0.0
    moves = np.zeros((scene.hosts, scene.flows), np.int64)
    places, acts = np.array([host.places for host in hosts]), 0
    load = _loads(places, rates, scene.rails)
    for turn in range(_SECOND_NS // TICK_NS * _STEPS):
        now_ns = began_ns + (turn + 1) * TICK_NS // _STEPS
        came, dropped = rails.pass_time(load, TICK_NS / _STEPS / 1e9)
        arrived, lost = arrived + came, lost + dropped
        delays_ns = rails.delays_ns()
        waited += float(came @ delays_ns)
        for number in range(turn % _STEPS, scene.hosts, _STEPS):
            seen = delays_ns + rng.exponential(scene.noise_ns, scene.rails)
            moved = hosts[number].decide(now_ns, seen.tolist())
            if moved is None:
                continue
            acts += 1
            moves[number] += moved
            places[number] = hosts[number].places
        load = _loads(places, rates, scene.rails)
    used = arrived > 0.001 * arrived.sum()
    through = 1 - lost[used] / arrived[used]
    return Second(
        delivered=float(1 - lost.sum() / arrived.sum()),
        worst=float(through.min()),
        queueing_ns=waited / float(arrived.sum()),
        moves=moves.ravel(),
        acts=acts,
        shares=tuple((load / load.sum()).tolist()),
    )


def _loads(places: NDArray[np.intp], rates: Rates, rails: int) -> Rates:
    return np.bincount(places.ravel(), weights=rates.ravel(), minlength=rails).astype(np.float64)
