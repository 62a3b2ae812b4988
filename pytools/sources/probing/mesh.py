"""The probe mesh: probes every path to every peer, and publishes what the replies show.

probe.c answers the peers' probes, and stamps and matches ours, which are planned ahead and sent by the pacer. The ring
of replies is read once a long window, five times a second while somebody reads short ones, once an interval while a
path is slow or has just fallen silent, and at once when probe.c reports a change. Times are CLOCK_MONOTONIC
nanoseconds. One thread; created and used in the network namespace that it measures.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from pytools import log
from pytools.config import AgentConfig
from pytools.errors import CapabilityError, SwerveError
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import MISSING
from pytools.ipc.bus import Bus
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.netlink.routing import Netlink
from pytools.log import Level
from pytools.signals import HoldState, PathState, ProbeSamples
from pytools.sources.probing import stamp_packet, udp
from pytools.sources.probing.attention import Attention, next_slow
from pytools.sources.probing.base_memory import BaseMemory
from pytools.sources.probing.held_paths import HeldPaths
from pytools.sources.probing.liveness import HURRY_EVERY_NS
from pytools.sources.probing.measurements import RECEIVED, Measurements, Window
from pytools.sources.probing.paths import Changes, PinnedPath, PinnedPaths
from pytools.sources.probing.probe_port import ProbePort
from pytools.sources.probing.program import ProbeProgram
from pytools.sources.probing.sender import Sender
from pytools.sources.probing.sweep import FIRST_ROW
from pytools.sources.probing.underlays import Underlays
from pytools.sources.probing.ways import HiddenWays
from pytools.sources.source import next_beat

_MS: Final = 1_000_000
_SLOW_EVERY_NS: Final = 1000 * _MS
_SAMPLES_EVERY_NS: Final = 200 * _MS
_PATHS_EVERY_NS: Final = 30_000 * _MS  # besides whenever routes change
_PATHS_AFTER_CHANGE_NS: Final = 250 * _MS
_REQUESTS_EVERY_NS: Final = 500 * _MS  # besides whenever a path is silent
_PACER_AFTER_NS: Final = 1000 * _MS  # another one is started, when it has ended
_NEVER_NS: Final = 1 << 62
_NO_LOSS: Final = (
    "recorded",
    "reflected",
    "wire_bytes",
    "lost_carriers",
    "sensed",
)  # counters that count what went well


class ProbeMesh:
    """All probes of one host.

    Parameters
    ----------
    loaded : Loaded
        With probe.c.
    netlink : Netlink
        In the namespace of the calling thread; stays the caller's.
    memory : BaseMemory, optional
        Of the base delays that a predecessor knew, and that a successor begins with.

    Attributes
    ----------
    program : ProbeProgram
        The kernel's half: stamps, answers and matches probes.
    sender : Sender
        The sessions, and what is sent along them.
    measurements : Measurements
        What the probes have shown: counters, windows and liveness by path index.
    paths : PinnedPaths
        The paths that the routes lead along.
    ways : HiddenWays
        Those that each path has behind its first hop.
    underlays : Underlays
        Those that each path by a tunnel has below it.

    Raises
    ------
    CapabilityError
        If probe.c was not loaded, or this process may not send by a packet socket.
    SwerveError
        If the probe port is taken or the routes cannot be read.
    """

    def __init__(
        self, config: AgentConfig, loaded: Loaded, netlink: Netlink, bus: Bus, memory: BaseMemory | None = None
    ) -> None:
        if not loaded.has_map("probe_settings"):
            why = loaded.failed.get("probe.c", "it is missing")
            raise CapabilityError(f"the probe program was not loaded: {why}", "`swerve doctor` says what is missing")
        self._ahead_ns = 0  # stamping clock minus CLOCK_MONOTONIC, at the newest record
        self._config, self._bus, self._netlink = config, bus, netlink
        self._interval_ns = int(config.probe.interval_ms * _MS)
        remembered = None if memory is None else memory.found
        self.measurements = Measurements(config.host, config.windows, config.probe, remembered)
        with contextlib.ExitStack() as undo:
            clocks = config.clocks if any(peer.clock != "shared" for peer in config.peers) else None
            families = udp.families(peer.address for peer in config.peers)
            self._port = ProbePort(config.probe.port)
            undo.callback(self._port.close)
            self._port.open(families)
            slots = Sender.slots_for(config.probe, clocks)
            self.program = undo.enter_context(contextlib.closing(ProbeProgram(loaded, slots)))
            self._set_peers(config)
            ports = () if memory is None else memory.ports
            self.sender = Sender(config.probe, clocks, families, self.measurements, self.program, ports)
            undo.callback(self.sender.close)
            self.ways = HiddenWays(config.host, config.probe, self.program, bus)
            undo.callback(self.ways.close)
            if memory is not None:
                memory.keep(self.measurements.bases, self.sender.ports, config.probe.dscp)
            self._changes = Changes()
            undo.callback(self._changes.close)
            self._states = bus.subscribe(frozenset({"path_state", "hold_state"}))
            undo.callback(self._states.close)
            self._held = undo.enter_context(
                contextlib.closing(HeldPaths(self.program, self.measurements, config.probe, self.sender.ports))
            )
            self.paths = PinnedPaths(netlink, config.host, config.peers)
            self.underlays = Underlays(netlink, loaded)
            self._discovery_failed = 0
            self._look_again_ns = _PATHS_AFTER_CHANGE_NS
            now_ns = time.monotonic_ns()
            due = "read", "short", "long", "slow", "samples", "paths", "requests", "hurry"
            self._due = {**dict.fromkeys(due, now_ns), "pacer": _NEVER_NS}
            self._lost_interface = 0  # index of the one that lost its carrier last; 0: none
            self._miss_ns: int | None = None  # when a path that has just fallen silent misses its next answer
            self._attention = Attention(self._interval_ns)
            self._started = self._answered = self._results_wanted = False
            self._discover(now_ns)
            self._close = undo.pop_all().close

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be woken when routes change, by probe.c, and by the pacer; everything else goes by ticks."""
        selector.register(self._changes.fileno(), selectors.EVENT_READ, self._routes_changed)
        selector.register(self.sender.schedule.fileno(), selectors.EVENT_READ, self._pacer_speaks)
        selector.register(self.program.fileno(), selectors.EVENT_READ, self._woken)
        selector.register(self.ways.fileno(), selectors.EVENT_READ, lambda _mask: self.ways.searches.hear())

    def set_peers(self, config: AgentConfig, now_ns: int) -> None:
        """Probe these peers from now on, and answer them alone; of those that stay nothing measured is touched.

        Raises
        ------
        SwerveError
            If the first peer of an address family needs a socket that cannot be had; then nothing has changed.
        """
        families = udp.families(peer.address for peer in config.peers)
        self._port.open(families)
        self.sender.open(families)
        self._set_peers(config)
        self.paths.set_peers(config.peers)
        self._config = config
        self._discover(now_ns)
        self._take_paths()  # a peer that only went is no news to a discovery

    def _set_peers(self, config: AgentConfig) -> None:
        self.program.set_peers(
            {peer.address: stamp_packet.error_estimate(STAMP_BOUND_NS, peer.clock == "shared") for peer in config.peers}
        )
        self._port.set_peers(peer.address for peer in config.peers)

    def carrier_changed(self, ifindex: int, carrier: bool) -> None:
        """Tell the peers by which interface nothing arrives here any more, or that something does again.

        Replies say so from now on. With a cluster key probes do as well, and extra ones leave at once by the others.
        """
        if carrier:
            if ifindex == self._lost_interface:
                self._lost_interface = 0
                self.program.set_lost_interface(0)
            return
        self._lost_interface = ifindex
        self.program.set_lost_interface(ifindex)
        others = [pinned.index for pinned in self.paths.current if pinned.ifindex != ifindex]
        if others and self._config.bus.key_file:
            self._hurry_along(np.array(others), time.monotonic_ns())

    def _routes_changed(self, _mask: int) -> None:
        if self._changes.happened():
            self._due["paths"] = min(self._due["paths"], time.monotonic_ns() + self._look_again_ns)

    def _woken(self, _mask: int) -> None:
        self._due["read"] = 0

    def _pacer_speaks(self, _mask: int) -> None:
        """An answer is overdue, or the pacer has ended: then the paths are laid out again, which starts another one."""
        if self.sender.schedule.hear():
            self._due["read"] = 0
        else:
            self._due["pacer"] = time.monotonic_ns() + _PACER_AFTER_NS

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called again."""
        if not self._started:  # what was due while the hooks were being attached was not missed
            self._started = True
            self._due.update(read=now_ns, long=now_ns + self.measurements.long.length_ns)
        if now_ns >= self._due["paths"]:
            self._discover(now_ns)
        if now_ns >= self._due["pacer"]:
            self._send_along()
        watched = self._attention.watched
        self._attention.watched = self.ways.sweeping or self._bus.wanted("path_delay", details=True)
        if (self._miss_ns is not None and now_ns >= self._miss_ns) or watched < self._attention.watched:
            self._due["read"] = now_ns
        if now_ns >= self._due["read"]:
            self._work(now_ns)
        if (search_ns := self.ways.searches.due_ns()) is not None and time.monotonic_ns() >= search_ns:
            self.ways.searches.hear()
        return min(each for each in (self._due["read"], self._miss_ns, self.ways.searches.due_ns()) if each is not None)

    def _work(self, now_ns: int) -> None:
        """Measure by what has come in, publish what follows, and plan what is to be sent."""
        self.program.beat(now_ns)
        now_ns = self.serve(now_ns)
        self.sender.plan(time.monotonic_ns())  # the first tick has taken its time to attach
        self._miss_ns = self.measurements.liveness.look(now_ns)
        if self._bus.wanted("path_liveness"):
            for told in self.measurements.liveness.signals(self._config.host, now_ns, time.time_ns()):
                self._bus.publish(told)
        self.sender.expire(now_ns)
        self._hurry(now_ns)
        alert = self._alert(now_ns)
        if now_ns >= self._due["short"]:
            self._answered = self._answered or bool(self.measurements.counts[:, RECEIVED].any())
            if self._answered:  # the first answers are reported at once
                self._due["short"] = now_ns + self._attention.read_ns * 3 // 4
            self._publish_delays(self.measurements.short, now_ns, only_news=True)
        elif alert is not None:
            self._publish_delays(self.measurements.short, now_ns, only_news=True, among=alert)
        if now_ns >= self._due["long"]:
            self._due["long"] = next_beat(self._due["long"], self.measurements.long.length_ns, now_ns)
            self._publish_delays(self.measurements.long, now_ns, only_news=False)
        if now_ns >= self._due["samples"]:
            self._due["samples"] = now_ns + _SAMPLES_EVERY_NS
            self._listen(now_ns)
            self._publish_results(now_ns)
        self.ways.tick(now_ns)
        self.program.set_limits(*self.measurements.liveness.for_kernel())
        if now_ns >= self._due["slow"]:
            self._due["slow"] = now_ns + _SLOW_EVERY_NS
            self._set_slow(now_ns)
        read_ns = self._attention.next_read(now_ns, self.sender.next_ns, self._due["long"])
        ways_ns = self.ways.look_ns(now_ns)
        self._due["read"] = read_ns if ways_ns is None else min(read_ns, ways_ns)

    def _hurry(self, now_ns: int) -> None:
        """Where answers have just become overdue, find out soon whether probes are lost, or wait; or paths are dead."""
        liveness = self.measurements.liveness
        if now_ns >= self._due["hurry"] and len(paths := liveness.begun(now_ns)):
            self._due["hurry"] = now_ns + HURRY_EVERY_NS
            self._hurry_along(paths, now_ns)
        elif not self._attention.hurried(now_ns) and len(paths := liveness.suspected(now_ns)):
            self._hurry_along(paths, now_ns, alone=True)

    def _hurry_along(self, paths: NDArray[np.intp], now_ns: int, alone: bool = False) -> None:
        try:
            if self.sender.hurry(paths, alone):
                self._attention.hurry(now_ns)
        except CapabilityError:
            self._due["pacer"] = now_ns  # where it is said, too

    def _alert(self, now_ns: int) -> NDArray[np.bool_] | None:
        """Which paths are reported once an interval, by index; None: none is."""
        alert = self._attention.look(self.program.slow, self.measurements.liveness, now_ns)
        if alert is not None:
            limits = self.program.slow_limit[: len(alert)]
            limits[:] = np.where(limits > 0, next_slow(self.program.slow[: len(alert)]), 0)
        return alert

    def serve(self, now_ns: int) -> int:
        """Measure by the replies that have come in; returns when the last of them did, if that was after `now_ns`."""
        records = self.program.read()
        self.sender.note_sent()  # after reading: of every answer the probe is known
        if len(records):
            self._ahead_ns = int(records["t4_ns"][-1]) - int(records["seen_ns"][-1])
            now_ns = max(now_ns, int(records["seen_ns"].max()))
            swept = records["session"] >= FIRST_ROW
            if np.count_nonzero(swept):
                self.ways.take(records[swept])
                records = records[~swept]
        if len(records):
            self.ways.note(records["session"] // self._config.probe.flows, records["sender_ttl"])
            self.sender.take(records)
        liveness = self.measurements.liveness
        if liveness.any_silent or now_ns >= self._due["requests"]:
            self._due["requests"] = now_ns + _REQUESTS_EVERY_NS
            liveness.requested({key: seen.last_ns for key, seen in self.program.requests().items()})
            known = len(self._port.addresses)
            self._port.look()
            if len(self._port.addresses) > known:
                self._due["paths"] = now_ns
            self.sender.look()
        return now_ns

    def _set_slow(self, now_ns: int) -> None:
        """Update the base delays, and the kernel's thresholds for slow paths."""
        self.measurements.find_base(now_ns)
        slow_ns = self.measurements.slow_from(now_ns, self.stamping_clock(now_ns))
        limits = next_slow(self.program.slow[: len(slow_ns)])
        self.program.set_slow(slow_ns, np.where(slow_ns == MISSING, 0, limits))

    def _publish_delays(
        self, window: Window, now_ns: int, only_news: bool, among: NDArray[np.bool_] | None = None
    ) -> None:
        if not self._bus.wanted("path_delay"):
            self.measurements.skip(window, now_ns)
            return
        overtaken = self.sender.overtaken(now_ns - window.length_ns)
        below = self.underlays.counted() if window is self.measurements.long else {}
        for signal in self.measurements.signals(window, now_ns, time.time_ns(), only_news, overtaken, among):
            ways = below.get(signal.path)
            self._bus.publish(signal if ways is None else msgspec.structs.replace(signal, underlay=ways))

    def _publish_results(self, now_ns: int) -> None:
        before, self._results_wanted = self._results_wanted, self._bus.wanted("probe_samples")
        if not self._results_wanted:
            return
        if not before:
            self.sender.skip_results()
        paths = {pinned.index: pinned.path for pinned in self.paths.current}
        unix_ns = time.time_ns()
        for index, results in self.sender.results():
            if index in paths:
                self._bus.publish(
                    ProbeSamples(
                        host=self._config.host,
                        at_ns=now_ns,
                        unix_ns=unix_ns,
                        path=paths[index],
                        clock=self.measurements.clocks.states(np.array([index]))[0],
                        **results._asdict(),
                    )
                )

    def _listen(self, now_ns: int) -> None:
        """Learn of paths from what a controller says about them."""
        heard = self._states.read()
        if any([self.paths.remember(each.path, now_ns) for each in heard if isinstance(each, PathState)]):
            self._due["paths"] = now_ns
        self._held.hear([each for each in heard if isinstance(each, HoldState)], now_ns)
        self._held.renew(self.paths.current, self._ahead_ns)

    def _discover(self, now_ns: int) -> None:
        self._due["paths"] = now_ns + _PATHS_EVERY_NS
        self._changes.happened()  # what is waiting is covered by this look
        try:
            self.program.set_locals(self._port.local_addresses(self._netlink))
            changed = self.paths.refresh(now_ns)
        except SwerveError:
            self._discovery_failed += 1  # a table that changes while it is read; the next look will do
            return
        # Where routes change all the time, looking must not take more than a fiftieth of it.
        self._look_again_ns = max(_PATHS_AFTER_CHANGE_NS, 50 * (time.monotonic_ns() - now_ns))
        if changed:
            self._take_paths()
        with contextlib.suppress(SwerveError):
            self.underlays.look(self.paths.current, self.paths.links)

    def _take_paths(self) -> None:
        self.measurements.set_paths(self.paths.current, time.monotonic_ns())
        self.ways.set_paths(self.paths.current)
        self._send_along()
        self._attention.grow(len(self.measurements.counts), self.sender.probes)

    def _send_along(self) -> None:
        """Have probes sent along the paths; where no process can be had that does, it is tried again."""
        try:
            self.sender.set_paths(self.paths.current)
        except CapabilityError as error:
            if not self._started:
                raise
            log.event(Level.ERROR, "no probes are sent", why=error)
            self._due["pacer"] = time.monotonic_ns() + _PACER_AFTER_NS
            return
        self._due["pacer"] = _NEVER_NS
        if self._started:
            self.sender.plan(time.monotonic_ns())

    def interfaces(self) -> set[str]:
        """Where the program is wanted: at the interfaces of the paths, those below tunnels, and those of requests."""
        paths = {pinned.path.interface for pinned in self.paths.current}
        return paths | self.underlays.interfaces() | self._port.interfaces()

    def stamping_clock(self, now_ns: int) -> int:
        """What the clock shows that stamps are taken by: CLOCK_MONOTONIC, but in a lab."""
        return now_ns + self._ahead_ns

    def has_own_clock(self, pinned: PinnedPath) -> bool:
        """Whether a path's peer has a clock of its own, and answers so that it can be compared with ours."""
        return not pinned.shared_clock and not self.measurements.foreign[pinned.index]

    def wire_bytes(self) -> int:
        """Bytes of probes and replies so far, both directions, with Ethernet, IP and UDP headers."""
        return (
            self.sender.wire_bytes
            + self._held.wire_bytes
            + self.ways.wire_bytes()
            + self.program.counters()["wire_bytes"]
        )

    def drops(self) -> dict[str, int]:
        """Everything that was lost, refused or not understood, by name."""
        counted = {f"probe_{name}": count for name, count in self.sender.drops.items()}
        counted["probe_pacer_restarts"] = self.sender.schedule.restarts
        counted["probe_sweep_refused"] = self.ways.refused
        counted["probe_discovery_failed"] = self._discovery_failed
        counted["probe_tunnels_full"] = self.underlays.refused
        counted["probe_requests_without_program"] = self._port.unanswered
        kernel = self.program.counters()
        counted.update((f"probe_{name}", count) for name, count in kernel.items() if name not in _NO_LOSS)
        return counted

    def close(self) -> None:
        self._close()
