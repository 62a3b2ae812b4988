"""Application delays: samples of application packets from sample.c, exchanged with the peers, joined and published.

The host that sends the packets joins. It asks the peers that it sends to for what they see arriving, for as long as
somebody wants `app_delay`; a host that nobody asks, and where nobody listens, samples nothing. Times are
CLOCK_MONOTONIC nanoseconds, but for those of stamping clocks, called `at_ns`. One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.estimators.matching import FRESH
from pytools.estimators.offsets import Offset
from pytools.ipc.bus import Bus
from pytools.ipc.hosts import HostBus
from pytools.kernel.addresses import mapped
from pytools.kernel.bpf import contract
from pytools.kernel.bpf.loader import Loaded
from pytools.signals import Path
from pytools.sources.interfaces import Interfaces
from pytools.sources.samples import batches as wire
from pytools.sources.samples.joins import OFF, SAMPLE, Joins, Rates, concatenated
from pytools.sources.samples.rates import RateControl, lost_of
from pytools.sources.samples.reports import ONE_CLOCK, Reports
from pytools.sources.source import Source
from pytools.units import MS

EGRESS, INGRESS = 1, 2  # enum swerve_sample_direction

_LEAST_TICK_NS: Final = 200 * MS
_MOST_TICK_NS: Final = 500 * MS
_RING_SAMPLES: Final = 6553  # of bpf/sample/tables.h
_BEAT_NS: Final = 1000 * MS  # a batch is sent that often even when it is empty: so that silence says something
_ASK_NS: Final = 1000 * MS
_LEASE_NS: Final = 5000 * MS
_TALKED_NS: Final = 60_000 * MS  # a peer that we sent sampled bytes to within that is asked


class _Asker:
    """A peer that wants to know what arrives here from it."""

    def __init__(self, until_ns: int, now_ns: int) -> None:
        self.until_ns = until_ns
        self.told_ns = now_ns
        self.told = False  # whether a batch was sent: the first one says that there was nothing before


class SampleSource(Source):
    """Samples, exchanges and publishes.

    Parameters
    ----------
    loaded : Loaded
        With sample.c; stays the caller's.
    interfaces : Interfaces
        The names of those that packets pass.
    hosts : Hosts
        The bus between hosts.
    between : callable
        How a peer's clock runs against ours; asked once per window for peers whose clock is not shared.
    """

    def __init__(
        self,
        config: AgentConfig,
        loaded: Loaded,
        interfaces: Interfaces,
        bus: Bus,
        hosts: HostBus,
        between: Callable[[str], Offset | None],
        path_of: Callable[[str, str], Path | None],
    ) -> None:
        self._bus, self._hosts = bus, hosts
        self._ring = loaded.ring("samples", "sample")
        self._wakeups = select.epoll()  # by edges: samples that wake nobody make the ring readable, too
        self._wakeups.register(self._ring.fileno(), select.EPOLLIN | select.EPOLLET)
        self._counters = loaded.map("sample_counters")
        self._settings, self._peer_map = loaded.map("sample_settings"), loaded.map("sample_peers")
        self._set: tuple[int, int, int] | None = None
        self._names = sorted({peer.name for peer in config.peers})
        self._addresses = {mapped(peer.address): self._names.index(peer.name) for peer in config.peers}
        self._directions: dict[bytes, int] = {}
        shared = {peer.name for peer in config.peers if peer.clock == "shared"}
        self.control = RateControl(config.samples.per_s)  # how often is sampled
        self._outward, self._inward = Rates(), Rates()
        self.joins = Joins(len(self._names))  # what is remembered of both ends
        self._interfaces = interfaces
        self._reports = Reports(
            config.host,
            self._names,
            int(config.windows.base_s * 1e9),
            lambda name: ONE_CLOCK if name in shared else between(name),
            path_of,
            self._interfaces.name,
        )
        self._window_ns = config.windows.long_ns
        self._tick_ns = tick_ns(self._window_ns, config.samples.per_s)
        self._settled: list[NDArray[Any]] = []
        self._askers: dict[int, _Asker] = {}
        self._talked_ns: dict[int, int] = {}
        self._counts = dict.fromkeys(("refused", "unasked", "foreign"), 0)
        self._kernel = np.zeros(len(contract.counters("sample")), np.int64)
        self._wanted = False
        self._ask_due_ns = self._window_end_ns = 0
        hosts.receive(wire.BATCHES)  # from now on
        hosts.receive(wire.ASKS)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be woken when there are far more samples than the rates were to bring."""
        selector.register(self._wakeups.fileno(), selectors.EVENT_READ, self._woken)

    def _woken(self, _mask: int) -> None:
        self._wakeups.poll(0)
        self.tick(time.monotonic_ns())

    def tick(self, now_ns: int) -> int:
        """Exchange, join, and publish when it is time; says when to be called next."""
        self._listen(now_ns)
        batches = self._hosts.receive(wire.BATCHES)  # before the ring: what it left here earlier is then in there
        if self._set is not None and self._set[0]:
            self._work(batches, now_ns)
        self._apply(now_ns)
        return now_ns + self._tick_ns

    # ---- who wants samples ----

    def _listen(self, now_ns: int) -> None:
        """Learn who asks for samples, here and at the peers."""
        for name, payload in self._hosts.receive(wire.ASKS):
            try:
                until_ns = now_ns + wire.decode_ask(payload)
            except wire.BadBatchError:
                self._counts["refused"] += 1
                continue
            asker = self._askers.setdefault(self._names.index(name), _Asker(until_ns, now_ns))
            asker.until_ns = until_ns
        self._askers = {peer: asker for peer, asker in self._askers.items() if asker.until_ns > now_ns}
        wanted = self._bus.wanted("app_delay")
        if wanted and not self._wanted:
            self._window_end_ns = now_ns + self._window_ns
        elif self._wanted and not wanted:
            self.joins.clear()
            self._settled.clear()
            self._talked_ns.clear()
        self._wanted = wanted

    def _ask(self, now_ns: int) -> None:
        """Ask those for samples to whom we send something that can be sampled."""
        self._talked_ns = {peer: at_ns for peer, at_ns in self._talked_ns.items() if at_ns > now_ns - _TALKED_NS}
        if now_ns >= self._ask_due_ns and self._talked_ns:
            self._ask_due_ns = now_ns + _ASK_NS
            for peer in self._talked_ns:
                self._hosts.send(wire.ASKS, wire.encode_ask(_LEASE_NS), self._names[peer])

    def _apply(self, now_ns: int) -> None:
        """Have the kernel sample what is wanted, as often as the budget allows."""
        every = EGRESS if self._wanted else 0
        for address, peer in self._addresses.items():
            directions = every | (INGRESS if peer in self._askers else 0)
            if self._directions.get(address) != directions:
                self._peer_map.update(np.frombuffer(address, self._peer_map.key)[0], directions)
                self._directions[address] = directions
        directions = every | (INGRESS if self._askers else 0)
        control = self.control
        settings = (directions, control.tcp, control.udp)
        if self._set == settings:
            return
        before = 0 if self._set is None else self._set[0]
        if directions and not before:
            self._ring.read()  # of an earlier time
            control.start(now_ns)
        if directions & ~before & EGRESS:  # what left until now was not seen
            self._outward.note(now_ns, OFF, OFF)
        for rates in (self._outward, self._inward):
            rates.note(now_ns, control.tcp, control.udp)
        self._settings.update(0, (*settings, 0))
        self._set = settings

    # ---- samples ----

    def _work(self, batches: list[tuple[str, bytes]], now_ns: int) -> None:
        records = self._ring.read()
        kernel = self._counters.read_percpu_sum().astype(np.int64)
        grown = kernel - self._kernel
        self._kernel = kernel
        is_tcp = records["protocol"] == wire.TCP
        tcp = int(np.count_nonzero(is_tcp))
        names = contract.counters("sample")
        lost, multiple = (int(grown[names.index(name)]) for name in ("ring_full", "multiple"))
        udp = len(records) - tcp
        tcp_lost = lost_of(lost, tcp, udp)
        self.control.observe(now_ns, tcp + tcp_lost, udp + lost - tcp_lost, multiple)
        outward = records["direction"] == EGRESS
        self._tell(records.take(np.flatnonzero(~outward)), now_ns)  # much faster with records than a mask is
        if not self._wanted:
            return
        ours = records.take(np.flatnonzero(outward))
        self._take_ours(ours, now_ns)
        if lost:
            self.joins.doubt()
        # The turn may have begun long before its batches came in: what they tell of is not older than what left here.
        known_ns = max(now_ns, int(ours["seen_ns"].max(initial=0)))
        for name, payload in batches:
            self._take_theirs(self._names.index(name), payload, known_ns)
        self.take(self.joins.settle(now_ns, self._outward))
        self._ask(now_ns)
        if now_ns >= self._window_end_ns:
            self._publish(now_ns)

    def _tell(self, records: NDArray[Any], now_ns: int) -> None:
        """Send those that asked what has arrived from them."""
        flows = _flows(records, "remote", "local")
        named, which = wire.distinct(flows)
        peers = self._peers_of(named["source"])[which]
        samples = np.zeros(len(records), wire.SAMPLE)
        samples["at_ns"], samples["key"] = records["ts_ns"], records["key"]
        self._counts["unasked"] += len(records)
        for peer, asker in self._askers.items():
            rows = np.flatnonzero(peers == peer)
            self._counts["unasked"] -= len(rows)
            if not len(rows) and asker.told and now_ns < asker.told_ns + _BEAT_NS:
                continue
            rates = self._inward.coarsest(asker.told_ns) if asker.told else (OFF, OFF)
            for batch in wire.batches(*rates, flows.take(rows), samples.take(rows)):
                self._hosts.send(wire.BATCHES, wire.encode(batch), self._names[peer])
            asker.told_ns, asker.told = now_ns, True

    def _take_ours(self, records: NDArray[Any], now_ns: int) -> None:
        named, which = wire.distinct(_flows(records, "local", "remote"))
        peers = self._peers_of(named["destination"])
        self._talked_ns.update(dict.fromkeys(peers.tolist(), now_ns))
        samples = np.zeros(len(records), SAMPLE)
        samples["flow"], samples["peer"] = self.joins.flows.number(named)[which], peers[which]
        for column, field in (("key", "key"), ("at_ns", "ts_ns"), ("seen_ns", "seen_ns"), ("ifindex", "ifindex")):
            samples[column] = records[field]
        samples["protocol"], samples["fate"] = records["protocol"], FRESH
        self.joins.add_near(samples)

    def _take_theirs(self, peer: int, payload: bytes, known_ns: int) -> None:
        """Remember what has arrived at a peer."""
        try:
            batch = wire.decode(payload)
        except wire.BadBatchError:
            self._counts["refused"] += 1
            return
        self.joins.heard(peer, known_ns, batch.tcp_rate, batch.udp_rate)
        # A peer can only speak of what arrived at its own addresses.
        known = (self._peers_of(batch.flows["destination"]) == peer)[batch.samples["flow"]]
        self._counts["foreign"] += int(np.count_nonzero(~known))
        chosen = batch.samples[known & wire.common(batch, self.control.tcp, self.control.udp)]
        samples = np.zeros(len(chosen), SAMPLE)
        samples["flow"] = self.joins.flows.number(batch.flows)[chosen["flow"]]
        samples["key"], samples["at_ns"], samples["seen_ns"] = chosen["key"], chosen["at_ns"], known_ns
        samples["peer"], samples["protocol"], samples["fate"] = peer, batch.flows["protocol"][chosen["flow"]], FRESH
        self.joins.add_far(samples)

    def take(self, settled: NDArray[Any]) -> None:
        """Keep samples whose fate is known, of SETTLED, for the window's end; the place to look at each of them."""
        if len(settled):
            self._settled.append(settled)

    def _peers_of(self, addresses: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Whose addresses these are; -1 for nobody's."""
        return np.array([self._addresses.get(each.tobytes(), -1) for each in addresses], np.int64)

    # ---- what comes of it ----

    def _publish(self, now_ns: int) -> None:
        settled = concatenated(self._settled) if self._settled else None
        self._settled.clear()
        self._interfaces.reread()
        begin_ns = self._window_end_ns - self._window_ns
        self._window_end_ns = now_ns + self._window_ns
        if settled is not None:
            for signal in self._reports.signals(settled, self.joins.flows, now_ns - begin_ns, now_ns, time.time_ns()):
                self._bus.publish(signal)
        self.joins.flows.keep(self.joins.numbers())

    def drops(self) -> dict[str, int]:
        """What was left out, by cause."""
        kernel = dict(zip(contract.counters("sample")[1:], self._counters.read_percpu_sum().tolist()[1:], strict=True))
        return {
            f"app_{name}": n for name, n in (kernel | self._counts | self.joins.drops | self._reports.drops).items()
        }

    def close(self) -> None:
        self._wakeups.close()
        with contextlib.suppress(SwerveError):
            self._settings.update(0, (0, OFF, OFF, 0))


def tick_ns(window_ns: int, per_s: int) -> int:
    """How often to work: twice a window or more, in even parts, and before twice the budget would fill the ring.

    Beyond twice the budget the rates become coarser at once.
    """
    most_ns = min(_MOST_TICK_NS, _RING_SAMPLES * 10**9 // (2 * per_s))
    return max(window_ns // max(2, -(-window_ns // most_ns)), _LEAST_TICK_NS)


def _flows(records: NDArray[Any], source: str, destination: str) -> NDArray[Any]:
    """The flow of each record, in the direction of its packet."""
    flows = np.zeros(len(records), wire.FLOW)
    flows["source"], flows["destination"] = records[source]["bytes"], records[destination]["bytes"]
    flows["source_port"], flows["destination_port"] = records[f"{source}_port"], records[f"{destination}_port"]
    flows["protocol"] = records["protocol"]
    return flows
