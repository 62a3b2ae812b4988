"""The probe mesh: probes every path to every peer, and publishes what the replies show.

The peers' probes are answered by probe.c, which stamps and matches ours as well; a tick sends the probes that are due
and reads one ring. Times are CLOCK_MONOTONIC nanoseconds. One thread; made and used in the network namespace it
measures.
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
from pytools.errors import CapabilityError, SwerveError
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.offsets import Offset
from pytools.kernel.loader import Loaded
from pytools.kernel.netlink import Netlink
from pytools.signals import Path, PathState, ProbeSamples
from pytools.sources.probing import stamp_packet, udp
from pytools.sources.probing.measurements import Measurements, Window
from pytools.sources.probing.paths import Changes, PinnedPath, PinnedPaths
from pytools.sources.probing.probe_port import ProbePort
from pytools.sources.probing.program import ProbeProgram
from pytools.sources.probing.sender import Sender

_MS: Final = 1_000_000
_MOST_WAIT_NS: Final = 20 * _MS
_SAMPLES_EVERY_NS: Final = 200 * _MS
_PATHS_EVERY_NS: Final = 30_000 * _MS  # besides whenever routes change
_PATHS_AFTER_CHANGE_NS: Final = 250 * _MS
_REQUESTS_EVERY_NS: Final = 200 * _MS  # besides whenever a path is silent
_NO_LOSS: Final = ("recorded", "reflected", "wire_bytes")  # counters that count what went well


class ProbeMesh:
    """All probes of one host.

    Parameters
    ----------
    loaded : Loaded
        With probe.c.
    netlink : Netlink
        In the namespace of the calling thread; stays the caller's.

    Raises
    ------
    CapabilityError
        If probe.c was not loaded, or this process may not send by a packet socket.
    SwerveError
        If the probe port is taken or the routes cannot be read.
    """

    def __init__(self, config: AgentConfig, loaded: Loaded, netlink: Netlink, bus: Bus) -> None:
        if not loaded.has_map("probe_settings"):
            why = loaded.failed.get("probe.c", "it is missing")
            raise CapabilityError(f"the probe program was not loaded: {why}", "`swerve doctor` says what is missing")
        self._ahead_ns = 0  # stamping clock minus CLOCK_MONOTONIC, at the newest record
        self._config, self._bus = config, bus
        interval_ns = int(config.probe.interval_ms * _MS)
        # Two groups: fewer wake-ups cost less, more groups would make smaller bursts.
        self._groups = 2 if interval_ns >= 2 * _MS else 1
        self._step_ns = interval_ns // self._groups
        # All that has arrived is worked on at once: what a wake-up costs is mostly the same for one packet or twenty.
        self._serve_ns = min(interval_ns, _MOST_WAIT_NS)
        self._measurements = Measurements(config.host, config.windows, config.probe)
        with contextlib.ExitStack() as undo:
            clocks = config.clocks if any(peer.clock != "shared" for peer in config.peers) else None
            families = udp.families(peer.address for peer in config.peers)
            self._port = ProbePort(config.probe.port)
            undo.callback(self._port.close)
            self._port.open(families)
            slots = Sender.slots_for(config.probe, clocks)
            self.program = undo.enter_context(ProbeProgram(loaded, slots))
            self._set_peers(config)
            self.sender = Sender(config.probe, clocks, families, self._groups, self._measurements, self.program)
            undo.callback(self.sender.close)
            self._changes = Changes()
            undo.callback(self._changes.close)
            self._states = bus.subscribe(frozenset({"path_state"}))
            undo.callback(self._states.close)
            self.paths = PinnedPaths(netlink, config.host, config.peers)
            self._discovery_failed = 0
            self._look_again_ns = _PATHS_AFTER_CHANGE_NS
            now_ns = time.monotonic_ns()
            self._due = dict.fromkeys(("send", "serve", "long", "samples", "paths", "requests"), now_ns)
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
        self._port.open(families)
        self.sender.open(families)
        self._set_peers(config)
        self.paths.set_peers(config.peers)
        self._config = config
        self._discover(now_ns)
        self._take_paths()  # a peer that only went is no news to a discovery

    def _set_peers(self, config: AgentConfig) -> None:
        """Have the kernel answer these peers alone."""
        self.program.set_peers(
            {peer.address: stamp_packet.error_estimate(STAMP_BOUND_NS, peer.clock == "shared") for peer in config.peers}
        )
        self._port.set_peers(peer.address for peer in config.peers)

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
        """Show that this agent works, and measure by the replies that have come in."""
        self.program.beat(now_ns)
        records = self.program.read()
        if len(records):
            self._ahead_ns = int(records["t4_ns"][-1]) - int(records["seen_ns"][-1])
            self.sender.take(records)
        liveness = self._measurements.liveness
        if liveness.any_silent or now_ns >= self._due["requests"]:
            self._due["requests"] = now_ns + _REQUESTS_EVERY_NS
            liveness.requested({key: seen.last_ns for key, seen in self.program.requests().items()})
            self._port.look()
            self.sender.look()

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
        for index, entries in self.sender.results():
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
        self._measurements.set_paths(self.paths.current)
        self.sender.set_paths(self.paths.current)
        self._path_by_end = {
            (str(ipaddress.ip_address(pinned.path.address)), pinned.path.interface): pinned.path
            for pinned in reversed(self.paths.current)
        }

    def interfaces(self) -> set[str]:
        """Where the program is wanted: at the interfaces of the paths, and those by which probes have come in."""
        names = {pinned.path.interface for pinned in self.paths.current}
        for ifindex in self._port.ifindexes:
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
        return self.sender.wire_bytes + self.program.counters()["wire_bytes"]

    @property
    def current(self) -> Sequence[PinnedPath]:
        """The paths that are probed now."""
        return self.paths.current

    def drops(self) -> dict[str, int]:
        """Everything that was lost, refused or not understood, by name."""
        counted = {f"probe_{name}": count for name, count in self.sender.drops.items()}
        counted["probe_missed_sends"] = self._missed_sends
        counted["probe_discovery_failed"] = self._discovery_failed
        counted["probe_requests_without_program"] = self._port.unanswered
        kernel = self.program.counters()
        counted.update((f"probe_{name}", count) for name, count in kernel.items() if name not in _NO_LOSS)
        return counted

    def close(self) -> None:
        """Close every socket."""
        self._close()


def _after(due_ns: int, every_ns: int, now_ns: int) -> int:
    """The next time on a steady beat; periods missed in a pause are left out."""
    return due_ns + ((now_ns - due_ns) // every_ns + 1) * every_ns
