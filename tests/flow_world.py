"""A host with rails, greedy or limited connections, and a fluid model of what they get: what `flows` steers in tests.

Imported as `flow_world`. Rates are bits per second, times CLOCK_MONOTONIC nanoseconds. Every 100 ms each connection is
looked at, every 50 ms each path is measured; a rail that is full shows a queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import policy_kit
import steering_kit as kit
from fair_rates import fair_rates

from pytools.signals import CongestionTimes, Owner, Path, Retransmissions, TcpFlow
from steering.deciding.engine import Engine
from steering.flows.engine import FlowEngine
from steering.flows.maxmin import INFINITE
from steering.flows.plan import FlowAct
from steering.plan import FlowKey, Group, Member
from steering.policy.file import parse

MS, SECOND, MBIT = kit.MS, kit.SECOND, 1_000_000
SEGMENT = 1448

POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {max_moves_per_flow: {count: 1, per: 10s}}
rules:
  - name: move-elephants
    when: {signal: queueing_delay, above: 15ms, for: 20ms, clear_below: 8ms}
    then: {pin: {flows: {min_rate: 2mbit, at_most: 64}, gain: 0.1, lease: 4s}}
"""


def tcp_flow(port: int, at_ns: int, over: Path | None = None, **others: Any) -> TcpFlow:
    """A signal about a connection to 10.9.0.2 from this local port; established, nothing lost."""
    values: dict[str, Any] = {
        **{"host": "h1", "at_ns": at_ns, "unix_ns": at_ns, "local": "10.9.0.1", "local_port": port},
        **{"remote": "10.9.0.2", "remote_port": 5201, "interface": over.interface if over else "rail1", "path": over},
        **{"owner": Owner(), "state": "established", "first_ns": 1, "last_ns": at_ns, "sent_bytes": 0},
        **{"acknowledged_bytes": 0, "received_bytes": 0, "segments_out": 0, "segments_in": 0},
        **{"retransmitted": Retransmissions(), "retransmitted_segments": 0, "retransmitted_bytes": 0},
        **{"spurious_segments": 0, "timeouts": 0, "srtt_ns": MS, "min_rtt_ns": MS, "cwnd_segments": 1000},
        **{"ssthresh_segments": None, "delivery_rate_bps": None, "zero_windows": 0, "ecn": "off"},
        **{"delivered_segments": 0, "delivered_ce_segments": 0, "congestion": "open"},
        **{"congestion_times": CongestionTimes(), "resets_sent": 0, "resets_received": 0},
    }
    return TcpFlow(**(values | others))


@dataclass
class Connection:
    """One connection of the model."""

    port: int
    routed: int  # rail that routing sends it by
    demand: float = INFINITE
    pinned: int | None = None
    until_ns: int = 0
    delivered: float = 0.0  # bytes
    rate: float = 0.0
    six: bool = False  # over IPv6
    namespace: str = ""  # another one than the agent's

    def rail(self, now: int) -> int:
        """The rail that it goes by."""
        return self.pinned if self.pinned is not None and now < self.until_ns else self.routed

    @property
    def key(self) -> FlowKey:
        """As it is pinned."""
        local, remote = ("fd00:9::1", "fd00:9::2") if self.six else ("10.9.0.1", "10.9.0.2")
        return FlowKey(6, local, self.port, remote, 5201)


@dataclass
class World:
    """The model and what steers it."""

    routed: list[int]  # the rail of each connection
    rails: int = 2
    text: str = POLICY
    demands: dict[int, float] = field(default_factory=dict)  # by place in `routed`
    dry: bool = False
    routed6: list[int] = field(default_factory=list)  # the rail of each connection over IPv6

    def __post_init__(self) -> None:
        self.now = 100 * SECOND
        self.capacity = dict.fromkeys(range(1, self.rails + 1), 100.0 * MBIT)
        self.dead: set[int] = set()
        self.refuses = False  # the kernel every pin
        self.refused: list[FlowAct] = []
        self.unheard: set[int] = set()
        self.silent: set[int] = set()  # rails whose probes are not answered, while those of their siblings are
        self.connections = [
            Connection(40_000 + index, rail, self.demands.get(index, INFINITE))
            for index, rail in enumerate(self.routed)
        ]
        self.connections += [Connection(41_000 + index, rail, six=True) for index, rail in enumerate(self.routed6)]
        policy = parse(self.text, "policy.yaml")
        self.paths = {rail: kit.path(rail) for rail in self.capacity}
        self.group: Group = kit.group({rail: [path] for rail, path in self.paths.items()})
        self.engine, self.flows = Engine(policy), FlowEngine(policy, "h1")
        self.paths6 = {rail: Path("h1", "h2", "fd00:9::2", f"fe80::{rail}", f"rail{rail}") for rail in self.capacity}
        members = tuple(Member(20 + rail, path.gateway, path.interface, 1) for rail, path in self.paths6.items())
        weights = tuple((member.nexthop_id, 1) for member in members)
        group6 = Group("nexthop_group:202", ("fd00:9::2/128",), members, weights)
        targets = {"10.9.0.2": (self.group.target,), "fd00:9::2": (group6.target,)}
        self.engine.arrange([self.group, group6], lambda address: targets.get(address, ()), self.now)
        self.acts: list[tuple[int, FlowAct]] = []
        self.renewed = 0

    def run(self, seconds: float) -> list[FlowAct]:
        """Let time pass; the acts that were made."""
        first = len(self.acts)
        end = self.now + int(seconds * SECOND)
        while self.now < end:
            self.now += 50 * MS
            self._flow(50 * MS)
            if self.now % (100 * MS) == 0:
                for connection in self.connections:
                    self.tell(connection)
            probed = [*self.paths.items(), *(self.paths6.items() if self.routed6 else ())]
            for rail, path in probed:
                if rail in self.unheard:
                    continue
                signal = kit.measured(path, self.now, int(self.queue(rail) * MS), window_ns=80 * MS)
                self.engine.take(signal, self.now)
                self.flows.take(signal, self.now)
            for rail, path in self.paths.items() if self.silent else ():
                missed = 10 if rail in self.silent else 0
                self.engine.take(policy_kit.liveness(path, self.now, missed=missed), self.now)
            self.engine.changes(self.now)
            self.steer()
        return [act for _, act in self.acts[first:]]

    def cut(self, rail: int = 1, to: float = 10 * MBIT) -> None:
        """Let a rail carry less."""
        self.capacity[rail] = to

    def kill(self, rail: int) -> None:
        """Let nothing pass over a rail any more."""
        for rails in (self.dead, self.unheard, self.silent):
            rails.add(rail)

    def queue(self, rail: int) -> float:
        """Milliseconds: 64 KiB wait at a full rail."""
        mine = [c for c in self.connections if c.rail(self.now) == rail]
        if not mine or sum(c.demand for c in mine) < self.capacity[rail]:
            return 0.0
        return 1e3 * 65_536 * 8 / self.capacity[rail]

    def on(self, rail: int) -> int:
        """Connections that go by a rail."""
        return sum(c.rail(self.now) == rail for c in self.connections)

    def counts(self) -> list[int]:
        """Connections on each rail."""
        return [self.on(rail) for rail in self.capacity]

    def moves(self) -> int:
        """Flows pinned so far, each time."""
        return sum(len(act.pins) for _, act in self.acts)

    def _flow(self, span_ns: int) -> None:
        for rail, capacity in self.capacity.items():
            mine = [c for c in self.connections if c.rail(self.now) == rail]
            got = fair_rates(0.0 if rail in self.dead else capacity, [c.demand for c in mine])
            for connection, rate in zip(mine, got, strict=True):
                connection.rate = rate
                connection.delivered += rate * span_ns / 8e9

    def tell(self, connection: Connection) -> None:
        if connection.rate == 0:
            return  # nothing leaves, so it is not looked at
        segments = int(connection.delivered / SEGMENT)
        held = connection.rate < connection.demand
        signal = tcp_flow(
            connection.port,
            self.now,
            (self.paths6 if connection.six else self.paths)[connection.rail(self.now)],
            local=connection.key.local,
            remote=connection.key.remote,
            delivered_segments=segments,
            segments_out=segments,
            sent_bytes=segments * SEGMENT,
            srtt_ns=20 * MS,
            namespace=connection.namespace,
            cwnd_segments=max(1, int(connection.rate / 8 * 0.02 / SEGMENT)) if held else 1000,
        )
        self.flows.take(signal, self.now)

    def steer(self) -> None:
        plan = self.flows.decide(self.engine.paths, self.engine.groups.values(), self.now, self.engine.overrides)
        by_key = {connection.key: connection for connection in self.connections}
        for renewal in plan.renewals:
            self.renewed += 1
            for key in renewal.flows:
                if key in by_key:
                    by_key[key].until_ns = renewal.expires_ns
            self.flows.renewed(renewal, ())
        for act in plan.acts:
            if self.refuses:
                self.refused.append(act)
                self.flows.carried_out(act, self.now, dict.fromkeys(act.flows, "its gateway is not alive"))
                continue
            self.acts.append((self.now, act))
            if self.dry:
                self.flows.pretended(act, self.now)
                continue
            for pin in act.pins:
                by_key[pin.flow].pinned, by_key[pin.flow].until_ns = pin.nexthop_id % 10, pin.expires_ns
            if act.kind == "unpin":
                for key in act.flows:
                    if key in by_key:
                        by_key[key].pinned = None
            self.flows.carried_out(act, self.now)
