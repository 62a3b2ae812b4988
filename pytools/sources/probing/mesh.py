"""The probe mesh: probes every path to every peer, answers the peers' probes, and publishes what they show.

Works in ticks, not per packet: one tick takes what has arrived, reads the kernel's stamps, joins the two, answers,
sends the group of probes that is due, and publishes. That a reply waits for a tick does not enter a delay: all
times that count are taken in the kernel. Times are CLOCK_MONOTONIC nanoseconds. One thread; made and used in the
network namespace it measures.
"""

from __future__ import annotations

import contextlib
import ipaddress
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from pytools.bus import Bus
from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.estimators.offsets import Offset
from pytools.kernel.loader import Loaded
from pytools.kernel.netlink import Netlink
from pytools.signals import Path, PathState, ProbeSamples
from pytools.sources.probing import paths as pinning
from pytools.sources.probing import udp
from pytools.sources.probing.measurements import Measurements, Window
from pytools.sources.probing.paths import PinnedPath, PinnedPaths
from pytools.sources.probing.reflector import Reflector
from pytools.sources.probing.sender import Sender

_MS: Final = 1_000_000
_MOST_WAIT_NS: Final = 20 * _MS
_SAMPLES_EVERY_NS: Final = 200 * _MS
_PATHS_EVERY_NS: Final = 30_000 * _MS  # besides whenever routes change
_PATHS_AFTER_CHANGE_NS: Final = 250 * _MS
_COUNTERS = ("recorded", "ring_full", "malformed", "foreign", "merged", "ecn_full")


class ProbeMesh:
    """Sender and reflector of one host.

    Parameters
    ----------
    loaded : Loaded
        With stamp.c. When that is missing, without stamps there is loss, but no delay.
    netlink : Netlink
        In the namespace of the calling thread; stays the caller's.

    Raises
    ------
    SwerveError
        If the probe port is taken or the routes cannot be read.
    """

    def __init__(self, config: AgentConfig, loaded: Loaded, netlink: Netlink, bus: Bus) -> None:
        self.stamps = np.zeros(5, np.int64)  # read from the ring, by kind
        self._ahead_ns = 0  # stamping clock minus CLOCK_MONOTONIC, at the newest stamp
        self._config, self._loaded, self._bus = config, loaded, bus
        interval_ns = int(config.probe.interval_ms * _MS)
        # Two groups: fewer wake-ups cost less, more groups would make smaller bursts.
        self._groups = 2 if interval_ns >= 2 * _MS else 1
        self._step_ns = interval_ns // self._groups
        # All that has arrived is worked on at once: what a wake-up costs is mostly the same for one packet or twenty.
        self._serve_ns = min(interval_ns, _MOST_WAIT_NS)
        self._measurements = Measurements(config.host, config.windows, config.probe)
        self._ring = loaded.ring("stamps", "stamp") if loaded.has_map("stamps") else None
        self._counters = loaded.map("stamp_counters") if loaded.has_map("stamp_counters") else None
        self._stamp(set(), {peer.address for peer in config.peers})
        with contextlib.ExitStack() as undo:
            self.reflector = Reflector(config.probe.port, config.probe.dscp, config.peers)
            undo.callback(self.reflector.close)
            clocks = config.clocks if any(peer.clock != "shared" for peer in config.peers) else None
            families = udp.families(peer.address for peer in config.peers)
            self.sender = Sender(config.probe, clocks, families, self._groups, self._measurements)
            undo.callback(self.sender.close)
            self._changes = pinning.Changes()
            undo.callback(self._changes.close)
            pinning.clean(netlink)  # the port is ours, so what is there is of an agent that died
            self._states = bus.subscribe(frozenset({"path_state"}))
            undo.callback(self._states.close)
            self.paths = PinnedPaths(netlink, config.host, config.peers)
            undo.callback(self.paths.close)
            self._discovery_failed = 0
            self._look_again_ns = _PATHS_AFTER_CHANGE_NS
            now_ns = time.monotonic_ns()
            self._due = dict.fromkeys(("send", "serve", "long", "samples", "paths"), now_ns)
            self._miss_ns: int | None = None  # when a path that has just fallen silent misses its next answer
            self._started = False
            self._next_group = 0
            self._gave_samples = False
            self._missed_sends = 0
            self._path_by_end: dict[tuple[str, str], Path] = {}
            self._discover(now_ns)
            self._close = undo.pop_all().close

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be woken when routes change; everything else goes by ticks."""
        selector.register(self._changes.fileno(), selectors.EVENT_READ, self._routes_changed)

    def set_peers(self, config: AgentConfig, now_ns: int) -> None:
        """Probe these peers from now on, and answer them alone; of those that stay nothing measured is touched.

        Raises
        ------
        SwerveError
            If the first peer of an address family needs a socket that cannot be had; then nothing has changed.
        """
        families = udp.families(peer.address for peer in config.peers)
        self.reflector.open(families)
        self.sender.open(families)
        before, after = ({peer.address for peer in each.peers} for each in (self._config, config))
        self._stamp(before, after)
        self.paths.set_peers(config.peers)
        self.reflector.set_peers(config.peers)
        self._config = config
        self._discover(now_ns)
        self._take_paths()  # a peer that only went is no news to a discovery

    def _stamp(self, before: set[str], after: set[str]) -> None:
        """Have the kernel stamp what goes to these addresses and comes from them, instead of those before."""
        if not self._loaded.has_map("stamp_peers"):
            return
        stamped = self._loaded.map("stamp_peers")
        for address in sorted(before ^ after):
            key = np.frombuffer(udp.mapped(address).tobytes(), stamped.key)[0]
            if address in after:
                stamped.update(key, 1)
            else:
                stamped.delete(key)

    def _routes_changed(self, _mask: int) -> None:
        if self._changes.happened():
            self._due["paths"] = min(self._due["paths"], time.monotonic_ns() + self._look_again_ns)

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called again."""
        if not self._started:  # what was due while the hooks were being attached was not missed
            self._started = True
            self._due.update(send=now_ns, serve=now_ns, long=now_ns + self._measurements.long.length_ns)
        if now_ns >= self._due["paths"]:
            self._discover(now_ns)
        if now_ns >= self._due["serve"] or (self._miss_ns is not None and now_ns >= self._miss_ns):
            # A quarter of a step early rather than late: the next send then finds the work done.
            self._due["serve"] = now_ns + self._serve_ns - self._step_ns // 4
            self.serve(now_ns)
            self._publish(now_ns)
        self._send(now_ns)
        due_ns = min(self._due["serve"], self._due["send"])
        return due_ns if self._miss_ns is None else min(due_ns, self._miss_ns)

    def serve(self, now_ns: int) -> None:
        """Answer the requests that have arrived, and measure by the replies."""
        self.sender.receive()
        self.reflector.receive()
        stamps = None if self._ring is None else self._ring.read()
        if stamps is not None and len(stamps):  # after the sockets: those of all that was taken from them are there
            self.stamps += np.bincount(stamps["kind"], minlength=5)[:5]
            self._ahead_ns = int(stamps["ts_ns"][-1]) - int(stamps["seen_ns"][-1])
            self.reflector.take_stamps(stamps, now_ns)
            self._measurements.liveness.take_stamps(stamps)
        self.reflector.answer(time.monotonic_ns())
        if stamps is not None and len(stamps):
            self.sender.take_stamps(stamps)
        self.sender.join()

    def _send(self, now_ns: int) -> None:
        """Send the groups that are due; of those missed in a pause, each once at most."""
        if now_ns < self._due["send"]:
            return
        behind = (now_ns - self._due["send"]) // self._step_ns + 1
        skipped = max(0, behind - self._groups)
        self._missed_sends += skipped
        for step in range(skipped, behind):
            self.sender.send((self._next_group + step) % self._groups, now_ns)
        self._next_group = (self._next_group + behind) % self._groups
        self._due["send"] += behind * self._step_ns

    def _publish(self, now_ns: int) -> None:
        self._miss_ns = self._measurements.liveness.look(now_ns)
        if self._bus.wanted("path_liveness"):
            for told in self._measurements.liveness.signals(self._config.host, now_ns, time.time_ns()):
                self._bus.publish(told)
        self.sender.expire(now_ns)
        self._publish_delays(self._measurements.short, now_ns, only_news=True)
        if now_ns >= self._due["long"]:
            self._due["long"] = _after(self._due["long"], self._measurements.long.length_ns, now_ns)
            self._publish_delays(self._measurements.long, now_ns, only_news=False)
        if now_ns >= self._due["samples"]:
            self._due["samples"] = now_ns + _SAMPLES_EVERY_NS
            self._listen(now_ns)
            self._publish_samples(now_ns)

    def _publish_delays(self, window: Window, now_ns: int, only_news: bool) -> None:
        if not self._bus.wanted("path_delay"):
            self._measurements.skip(window, now_ns)
            return
        overtaken = self.sender.overtaken(now_ns - window.length_ns)
        for signal in self._measurements.signals(window, now_ns, time.time_ns(), only_news, overtaken):
            self._bus.publish(signal)

    def _publish_samples(self, now_ns: int) -> None:
        if not self._bus.wanted("probe_samples"):
            self._gave_samples = False
            return
        if not self._gave_samples:
            self._gave_samples = True
            self.sender.skip_results()
            return
        by_index = {pinned.index: pinned for pinned in self.paths.current}
        unix_ns = time.time_ns()
        for index, entries in self.sender.results(now_ns):
            if index not in by_index:
                continue
            seq, sent_ns, forward_ns, reverse_ns = zip(*entries, strict=True)
            self._bus.publish(
                ProbeSamples(
                    host=self._config.host,
                    at_ns=now_ns,
                    unix_ns=unix_ns,
                    path=by_index[index].path,
                    clock=self._measurements.clocks.states(np.array([index]))[0],
                    seq=list(seq),
                    sent_ns=list(sent_ns),
                    forward_ns=list(forward_ns),
                    reverse_ns=list(reverse_ns),
                )
            )

    def _listen(self, now_ns: int) -> None:
        """Learn of paths from what a controller says about them."""
        states = [each for each in self._states.read() if isinstance(each, PathState)]
        if any([self.paths.remember(state.path, now_ns) for state in states]):
            self._due["paths"] = now_ns

    def _discover(self, now_ns: int) -> None:
        """Look at the routes again, and probe what they lead along."""
        self._due["paths"] = now_ns + _PATHS_EVERY_NS
        self._changes.happened()  # what is waiting is covered by this look
        try:
            changed = self.paths.refresh(now_ns)
        except SwerveError:
            self._discovery_failed += 1  # a table that changes while it is read; the next look will do
            return
        # Where routes change all the time, looking must not take more than a fiftieth of it.
        self._look_again_ns = max(_PATHS_AFTER_CHANGE_NS, 50 * (time.monotonic_ns() - now_ns))
        if changed:
            self._take_paths()

    def _take_paths(self) -> None:
        for part in (self._measurements, self.sender, self.reflector):
            part.set_paths(self.paths.current)
        self._path_by_end = {
            (str(ipaddress.ip_address(pinned.path.address)), pinned.path.interface): pinned.path
            for pinned in reversed(self.paths.current)
        }

    def interfaces(self) -> set[str]:
        """Where stamps are wanted: the interfaces of the paths, and those by which probes have come in."""
        names = {pinned.path.interface for pinned in self.paths.current}
        for ifindex in self.reflector.ifindexes:
            with contextlib.suppress(OSError):  # gone by now
                names.add(socket.if_indextoname(ifindex))
        return names

    def path_of(self, remote: str, interface: str) -> Path | None:
        """The path to an address by an interface; None when it is on no measured one."""
        return self._path_by_end.get((remote, interface))

    def all_paths(self) -> list[Path]:
        """Every path that is probed now."""
        return [pinned.path for pinned in self.paths.current]

    def stamping_clock(self, now_ns: int) -> int:
        """What the clock shows that stamps are taken by: CLOCK_MONOTONIC, but in a lab."""
        return now_ns + self._ahead_ns

    def has_own_clock(self, pinned: PinnedPath) -> bool:
        """Whether a path's peer has a clock of its own, and answers so that it can be compared with ours."""
        return pinned.peer.clock != "shared" and not self._measurements.foreign[pinned.index]

    def set_offset(self, path: int, offset: Offset | None, known_ns: int) -> None:
        """Let the delays of a path rest on what is known of its peer's clock, see `PathClocks.set`."""
        self._measurements.set_offset(path, offset, known_ns)

    def in_doubt(self, path: int) -> bool:
        """Whether a sample of this path has contradicted what was known of its clocks, and nothing newer is known."""
        return bool(self._measurements.clocks.suspended(np.array([path]))[0])

    @property
    def contradictions(self) -> int:
        """Samples that were earlier than what was known of the clocks allowed."""
        return self._measurements.clocks.contradictions

    def wire_bytes(self) -> int:
        """Bytes of probes and replies so far, both directions, with Ethernet, IP and UDP headers."""
        return self.sender.wire_bytes + self.reflector.wire_bytes

    @property
    def current(self) -> Sequence[PinnedPath]:
        """The paths that are probed now."""
        return self.paths.current

    def drops(self) -> dict[str, int]:
        """Everything that was lost, refused or not understood, by name."""
        counted = {f"probe_{name}": count for name, count in (self.sender.drops | self.reflector.drops).items()}
        counted["probe_replies_in_full_socket"] = self.sender.socket_drops()
        counted["probe_requests_in_full_socket"] = self.reflector.socket_drops()
        counted["probe_missed_sends"] = self._missed_sends
        counted["probe_discovery_failed"] = self._discovery_failed
        if self._counters is not None:
            values = self._counters.read_percpu_sum().tolist()
            named = zip(_COUNTERS[1:], values[1:], strict=False)  # the first counts what was not lost
            counted.update((f"stamp_{name}", value) for name, value in named)
        return counted

    def close(self) -> None:
        """Remove every rule, table and socket."""
        self._close()


def _after(due_ns: int, every_ns: int, now_ns: int) -> int:
    """The next time on a steady beat; periods missed in a pause are left out."""
    return due_ns + ((now_ns - due_ns) // every_ns + 1) * every_ns
