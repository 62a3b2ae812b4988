"""Ten minutes of four hosts on two rails, as their flight recorders have them: the same to the byte for the same seed.

Rail 1 is congested from minute three to minute six; every host leaves it and comes back. Behind that are a clock in
holdover, one that was never compared, lost probes, queue pairs, link events and an alert. Imported as `report_world`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import samples
from msgspec.structs import replace as replaced

from pytools.recording.writer import TrackWriter
from pytools.signals import Act, AnySignal, Delay, GroupMember, NexthopGroup, Path, PathDelay, Retransmissions, encode

SECOND = 1_000_000_000
BEGAN_NS = 1_795_000_000 * SECOND  # 2026-11-18 11:06:40 UTC
HOSTS = ("h1", "h2", "h3", "h4")
RAILS = (1, 2)
SECONDS = 600
CONGESTED_S, HEALED_S, RETURNS_S, BACK_S = 180, 360, 395, 420
DEAD = ("h4", "h3")  # between these no probe passes for a minute from SILENT_S on
SILENT_S = 450


@dataclass(frozen=True)
class World:
    """What differs from one to the other."""

    seed: int = 1
    seconds: int = SECONDS
    hosts: tuple[str, ...] = HOSTS
    rails: tuple[int, ...] = RAILS

    def paths(self, host: str) -> list[Path]:
        """Every path of a host."""
        return [
            Path(host, peer, f"10.9.0.{self.hosts.index(peer) + 1}", f"10.{rail}.{self.hosts.index(host) + 1}.1",
                 f"rail{rail}")
            for peer in self.hosts
            if peer != host
            for rail in self.rails
        ]  # fmt: skip

    def signals(self, host: str) -> Iterator[AnySignal]:
        """All that one host told, in its order."""
        dice = random.Random(f"{self.seed} {host}")
        offsets = {peer: dice.randrange(-(10**9), 10**9) for peer in self.hosts}
        for second in range(self.seconds):
            common = {"host": host, "at_ns": (1000 + second) * SECOND, "unix_ns": BEGAN_NS + second * SECOND}
            for path in self.paths(host):
                yield _delay(dice, common, path, second)
                yield _state(common, path, second)
                yield _tcp(dice, common, path, second)
            for peer in self.hosts:
                yield _clock(dice, common, host, peer, offsets[peer] - offsets[host], second)
                if peer != host:
                    yield _group(common, host, peer, second, self)
            yield from _happened(common, host, second, self)


def congested(path: Path, second: int) -> bool:
    """Whether the path's rail is."""
    return path.interface == "rail1" and CONGESTED_S <= second < HEALED_S


def _delay(dice: random.Random, common: dict[str, Any], path: Path, second: int) -> PathDelay:
    dead = (path.source, path.destination) == DEAD and SILENT_S <= second < SILENT_S + 60
    forward, reverse = (_direction(dice, path, second) for _ in range(2))
    clock = "holdover" if path.destination == "h2" and 500 <= second < 540 else "synchronised"
    if dead:
        forward = reverse = Delay(samples=0)
    return replaced(
        samples.path_delay(),
        path=path,
        forward=forward,
        reverse=reverse,
        clock=clock,
        received=0 if dead else 50,
        lost=50 if dead else 0,
        **common,
    )


def _direction(dice: random.Random, path: Path, second: int) -> Delay:
    base = 1_800 + 40 * int(path.destination[1:])
    full = congested(path, second)
    p50 = (
        round(dice.lognormvariate(17.2 - 1.2 * (_apart(path) - 1), 0.2))
        if full
        else round(dice.lognormvariate(6.2, 0.5))
    )
    p99 = round(p50 * (1 + dice.random()))
    if second % 97 == 13:
        p99 += 3_000_000  # a burst that one window alone has seen
    bound = 240 + 3 * max(0, second - 500) if path.destination == "h2" and 500 <= second < 540 else 240
    return Delay(samples=50, owd_min_ns=base, owd_p50_ns=base + p50, owd_p99_ns=base + p99, bound_ns=bound,
                 hard_bound_ns=1_900, queueing_p50_ns=p50, queueing_p99_ns=p99, queueing_last_ns=p50,
                 queueing_bound_ns=200)  # fmt: skip


def _apart(path: Path) -> int:
    """How many places the ends are apart: the nearer, the worse the congestion."""
    return abs(int(path.source[1:]) - int(path.destination[1:]))


def phase(path: Path, second: int) -> tuple[str, int]:
    """State and weight."""
    if path.interface != "rail1" or not CONGESTED_S + 1 <= second < BACK_S:
        return "healthy", 10
    if second < CONGESTED_S + 2:
        return "suspect", 10
    return ("returning", 3) if second >= RETURNS_S else ("drained", 0)


def _state(common: dict[str, Any], path: Path, second: int) -> AnySignal:
    state, weight = phase(path, second)
    why = "queueing 41 ms > 5 ms for 60 ms" if state != "healthy" else "queueing 0.4 us, below 1 ms"
    return replaced(samples.path_state(), path=path, state=state, weight_wanted=weight, weight_actual=weight,
                            reason=why, under="leave-congested-rail", **common)  # fmt: skip


def _tcp(dice: random.Random, common: dict[str, Any], path: Path, second: int) -> AnySignal:
    bad = congested(path, second)
    fast, timeout = (dice.randrange(40), dice.randrange(4)) if bad else (int(dice.random() < 0.05), 0)
    resent = Retransmissions(fast=fast, timeout=timeout, tail_probe=int(dice.random() < 0.02))
    return replaced(samples.tcp_path(), interface=path.interface, path=path, retransmitted=resent,
                            retransmitted_segments=resent.segments, segments_out=9_000, **common)  # fmt: skip


def _clock(dice: random.Random, common: dict[str, Any], host: str, of: str, offset_ns: int, second: int) -> AnySignal:
    if of == "h4" and 300 <= second < 320:
        return replaced(samples.free_clock(of, reference="h1"), **common)
    held = of == "h2" and 500 <= second < 540
    bound_ns = 240 + 3 * (second - 500) if held else 220 + dice.randrange(40)
    if of == "h1":
        offset_ns = bound_ns = 0
    return replaced(samples.clock(of, reference="h1"), state="holdover" if held else "synchronised",
                            offset_ns=offset_ns, bound_ns=bound_ns, epoch_ns=common["at_ns"], **common)  # fmt: skip


def _group(common: dict[str, Any], host: str, peer: str, second: int, world: World) -> NexthopGroup:
    number = world.hosts.index(peer) + 101
    paths = [path for path in world.paths(host) if path.destination == peer]
    members = [
        GroupMember(nexthop_id=10 + rail, gateway=path.gateway, interface=path.interface,
                    weight=phase(path, second)[1], packets=1_000 * second)
        for rail, path in enumerate(paths)
    ]  # fmt: skip
    return NexthopGroup(group_id=number, destinations=[f"10.9.0.{number - 100}/32"], members=members, **common)


def _happened(common: dict[str, Any], host: str, second: int, world: World) -> Iterator[AnySignal]:
    for at, before, after, why in (
        (CONGESTED_S + 2, 10, 0, "queueing delay 41 ms above 5 ms for 60 ms"),
        (RETURNS_S, 0, 3, "queueing delay below 1 ms for 30 s"),
        (BACK_S, 3, 10, "queueing delay below 1 ms for 25 s more"),
    ):
        if second == at:
            for peer in world.hosts:
                if peer != host:
                    yield _act(common, host, peer, (before, after), why, world)
    if second == CONGESTED_S and host == "h1":
        yield replaced(samples.link_event(what="queue_full"), detail="rail1: its queue is full", **common)
    if second == 240:
        yield replaced(samples.act(), outcome="alert", what="alert tell-of-loss", target="alert:tell-of-loss",
                               because="retransmissions 1.2 % above 1 %", under="tell-of-loss", **common)  # fmt: skip
    if host in ("h1", "h2"):
        verdict = "congested" if CONGESTED_S <= second < HEALED_S else "ok"
        yield replaced(samples.rdma_qp(verdict=verdict), **common)
    if second % 10 == 0:
        yield replaced(samples.self_cost(drops={"ring_full": second // 300, "bus_slow": 0}), **common)


def _act(common: dict[str, Any], host: str, peer: str, weights: tuple[int, int], why: str, world: World) -> Act:
    paths = [path for path in world.paths(host) if path.destination == peer]
    names = [f"{path.gateway} dev {path.interface}" for path in paths]
    return replaced(
        samples.act(),
        act_id=f"{host}-{peer}-{common['at_ns']}",
        what=f"routes to {paths[0].address}/32",
        target=f"overlay:main:{paths[0].address}/32",
        before={name: weights[0] if name.endswith("rail1") else 10 for name in names},
        after={name: weights[1] if name.endswith("rail1") else 10 for name in names},
        because=f"{paths[0]}: {why}",
        under="leave-congested-rail",
        **common,
    )


def record(folder: File, world: World | None = None) -> list[File]:
    """Write the recording of every host; returns their directories."""
    world = world or World()
    found = []
    for host in world.hosts:
        place = folder / host
        place.mkdir(parents=True)
        writer = TrackWriter(place, "fine", 1 << 30, 1 << 62)
        for signal in world.signals(host):
            writer.write(encode(signal) + b"\n", signal.unix_ns)
        writer.close()
        found.append(place)
    return found
