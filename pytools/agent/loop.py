"""The agent: runs the sources of one network namespace on one thread, and serves their signals.

It removes everything that it put into the kernel when it stops, and at the start what a killed predecessor left. All
times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import gc
import selectors
import signal
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from pytools import directories, log
from pytools.agent import reload as agent_reload
from pytools.agent.heartbeat import Heartbeat, Standing
from pytools.agent.hooks import Hooks
from pytools.agent.reload import Slot
from pytools.agent.scheduler import Scheduler
from pytools.closing import Closing
from pytools.config import AgentConfig
from pytools.config_units import key_of
from pytools.errors import CapabilityError, SwerveError
from pytools.estimators.offsets import Offset
from pytools.ipc.bus import Bus
from pytools.ipc.map_lending import Lender
from pytools.ipc.server import ReadServer, Server, readers_group
from pytools.kernel import low_ports, netns, privileges
from pytools.kernel.bpf import attach, loader, syscall
from pytools.kernel.netlink.routing import Netlink
from pytools.log import Level
from pytools.notify import Manager
from pytools.sources.cost import CostSource
from pytools.sources.gpu.source import GpuSource
from pytools.sources.interfaces import Interfaces
from pytools.sources.jobs.source import JobSource
from pytools.sources.links.source import LinkSource
from pytools.sources.nexthops import NexthopSource
from pytools.sources.path_ecn import PathEcnSource
from pytools.sources.path_mtu import PathMtuSource
from pytools.sources.probing.base_memory import BaseMemory
from pytools.sources.probing.mesh import ProbeMesh
from pytools.sources.programs import SAMPLE_EGRESS, TCP_EGRESS
from pytools.sources.rdma.waiting import RdmaWhenThere
from pytools.sources.recording import RECORDING_LATE_NS, RecordingSource
from pytools.sources.source import RELAXED_NS, Source
from pytools.sources.tcp.connections import Feed
from pytools.sources.tcp.source import TcpSource

if TYPE_CHECKING:
    from pytools.ipc.hosts import HostBus

_S = TypeVar("_S", bound=Source)


class Agent(Closing):
    """All sources of one namespace, wired; enter the namespace before making one.

    Parameters
    ----------
    config : AgentConfig
        Whom to probe, and how.
    namespace : str, optional
        The name of the namespace, for the place of the control socket.
    compilation : Compilation
        Of `pytools.sources.programs.all_of(config)`, which may be under way since before this module was imported.
    read : callable, optional
        Reads the configuration again, for `reload`.
    """

    def __init__(
        self,
        config: AgentConfig,
        namespace: str | None,
        compilation: loader.Compilation,
        read: Callable[[], AgentConfig] | None = None,
    ) -> None:
        self._stop = self._reload_asked = False
        self._config, self._read, self._manager = config, read, Manager()
        self._began_ns = time.monotonic_ns()
        self._waiting: Mapping[str, str] = {}  # fields of the configuration that wait for a restart, and why
        self._slots: dict[str, Slot[Any]] = {}
        self._feed = Feed()  # from the connections to the jobs
        self._closing = contextlib.ExitStack()
        try:
            self._build(config, namespace, compilation)
        except BaseException:
            self._closing.close()
            raise

    def _build(self, config: AgentConfig, namespace: str | None, compilation: loader.Compilation) -> None:
        keep = self._closing.enter_context
        self._selector = keep(contextlib.closing(selectors.DefaultSelector()))  # first in, so last to go
        self._scheduler = Scheduler(self._selector, self._flush)
        bus = Bus()
        self._server = Server(bus, directories.agent_socket(namespace), long_window_ns=config.windows.long_ns)
        self._add(self._server, RELAXED_NS)
        readers = directories.readers_socket(namespace)
        self._readers = ReadServer(bus, readers, readers_group(), config.windows.long_ns)
        self._add(self._readers, RELAXED_NS)
        netlink = keep(contextlib.closing(Netlink()))
        loaded = keep(loader.collect(compilation))
        if not loaded.programs:
            why = next((f"{name}: {why}" for name, why in loaded.failed.items()), "none was compiled")
            step = "`swerve doctor` says what is missing; in a container, its seccomp profile must allow bpf()"
            raise CapabilityError(f"no kernel program can be loaded: {why}", step)
        if not syscall.has_tcx(next(iter(loaded.programs.values()))):
            attach.clean()
        if config.virtual_clock:
            from pytools.sources.clocks.virtual_clock import VirtualClockSource

            self._add(VirtualClockSource(config.virtual_clock, loaded))  # before anything is stamped
        bases = BaseMemory(directories.base_delays(namespace), netns.scope())
        with low_ports.allowed(config.probe.port):
            self._mesh = mesh = ProbeMesh(config, loaded, netlink, bus, bases)
        lent = {name: loaded.map(name).fd for name in ("probe_settings", "probe_paths")}
        self._add(Lender(directories.maps_socket(namespace), lent), RELAXED_NS)
        hooks = Hooks(loaded, mesh.interfaces)
        self._add(hooks, RELAXED_NS)  # before the mesh: its first tick attaches, and the first probe is to be stamped
        self._add(mesh, at_events=True)  # or its routes may have changed
        self._add(bases, RELAXED_NS)
        self._add_between_hosts(config, loaded, bus, mesh)
        rdma = RdmaWhenThere(
            *(config, bus, mesh.paths.path_of, mesh.measurements.liveness.answering, directories.tap_socket(namespace))
        )
        failed = [loaded.failed, hooks.failed, rdma.failed]
        if TCP_EGRESS in loaded.programs:  # notes in the constructor what happened before the first tick
            connections = TcpSource(
                config, loaded, Interfaces(), bus, mesh.paths.path_of, mesh.paths.all_paths, self._feed
            )
            failed.append(connections.failed)
            self._add(connections)
        self._add_slot("peers", lambda now: NexthopSource(now.host, [each.address for each in now.peers], netlink, bus))
        self._add_slot(
            "links",
            lambda now: LinkSource(
                *(now, netlink, bus, mesh.interfaces, mesh.paths.all_paths, mesh.carrier_changed),
                bundles_changed=mesh.ways.set_bundles,
            ),
        )
        if loaded.has_map("path_ecn"):
            self._add(PathEcnSource(config, loaded, bus, lambda: mesh.paths.current), RELAXED_NS)
        sizes = PathMtuSource(config, bus, lambda: mesh.paths.current)
        self._add(sizes, sizes.late_ns)
        for source, late_ns in ((rdma, 0), (JobSource(config, bus, self._feed), RELAXED_NS)):
            self._add(source, late_ns)
        slots: list[Slot[RecordingSource] | Slot[GpuSource]] = [
            self._add_slot("gpu", lambda now: GpuSource(now, bus) if now.gpu.enabled or now.gpu.clock else None),
            self._add_slot("recording", lambda now: _recording(now, namespace, bus), RECORDING_LATE_NS),
        ]

        def named() -> dict[str, str]:
            return dict(ChainMap(*failed, *(slot.source.failed for slot in slots if slot.source is not None)))

        self._add(
            CostSource(
                config.host,
                ChainMap({name: fd for name, fd in loaded.programs.items() if name not in hooks.called}, rdma.programs),
                drops=self.drops,
                failed=named,
                wire_bytes=lambda: mesh.wire_bytes() + sizes.wire_bytes(),
                pacer=mesh.sender.schedule.cost,
                bus=bus,
            ),
            RELAXED_NS,
        )

        def standing() -> Standing:
            wanted = len(mesh.interfaces())
            peers = len(self._config.peers)
            return Standing(len(mesh.paths.current), peers, wanted, hooks.attached(), named(), tuple(self._waiting))

        # Last: ready when all had a turn.
        self._add(Heartbeat(self._manager, standing, self.drops, self._began_ns), RELAXED_NS)

    def _add_between_hosts(self, config: AgentConfig, loaded: loader.Loaded, bus: Bus, mesh: ProbeMesh) -> None:
        """What needs the other hosts' agents; imported only where it is wanted."""
        hosts: HostBus | None = None
        between: Callable[[str], Offset | None] = _unknown
        if config.bus.key_file:
            from pytools.ipc import hosts as bus_hosts

            hosts = bus_hosts.HostBus(config.host, config.peers, config.bus)
            self._add(hosts, RELAXED_NS)
            mesh.program.set_key(hosts.probe_key)  # before the first probe: none has been sent yet
        if any(peer.clock != "shared" for peer in config.peers):
            from pytools.sources.clocks.source import ClockSource

            clocks = ClockSource(config, mesh, hosts, bus)
            between = clocks.since_long
            self._add(clocks, clocks.late_ns)
        if hosts is not None and SAMPLE_EGRESS in loaded.programs:
            from pytools.sources.samples.source import SampleSource

            self._add(SampleSource(config, loaded, Interfaces(), bus, hosts, between, mesh.paths.path_of), RELAXED_NS)

    def _add(self, source: Source, late_ns: int | Callable[[], int] = 0, at_events: bool = False) -> None:
        self._closing.enter_context(contextlib.closing(source))
        self._scheduler.add(source, late_ns, at_events)
        source.register(self._selector)

    def _add_slot(self, part: str, make: Callable[[AgentConfig], _S | None], late_ns: int = RELAXED_NS) -> Slot[_S]:
        self._slots[part] = made = Slot(make, self._config)
        self._add(made, late_ns)
        return made

    def drops(self) -> dict[str, int]:
        """Everything that any source lost so far, by name."""
        return {name: count for source in self._scheduler.sources for name, count in source.drops().items()}

    def run(self) -> None:
        gc.freeze()  # what was loaded stays: a full collection would look through it for 10 ms
        self._scheduler.all_due()
        while not self._stop:
            if self._reload_asked:
                self._reload_asked = False
                self._reload()
            self._scheduler.turn()

    def _flush(self) -> None:
        self._server.flush()
        self._readers.flush()

    def stop(self) -> None:
        """Have `run` return; safe in a signal handler."""
        self._stop = True

    def reload(self) -> None:
        """Have the configuration read again before the next turn; safe in a signal handler."""
        self._reload_asked = True

    def _reload(self) -> None:
        self._manager.reloading()
        try:
            if self._read is not None:
                self._take_up(agent_reload.plan(self._config, self._read()))
        except SwerveError as error:
            log.event(Level.ERROR, "configuration not taken up, the one before holds", why=error)
        self._manager.ready()

    def _take_up(self, plan: agent_reload.Plan) -> None:
        """Restart the parts that have changed; one that fails stays as it was, and does not stop the others."""
        failed = {}
        for part in plan.parts:
            try:
                if part == "peers":
                    with low_ports.allowed(plan.config.probe.port):
                        self._mesh.set_peers(plan.config, time.monotonic_ns())
                self._slots[part].renew(plan.config)
            except SwerveError as error:
                failed[part] = str(error)
        self._config = plan.holds(failed)
        self._waiting = {key_of(field): why for field, why in {**plan.waiting, **failed}.items()}
        self._scheduler.all_due()  # hooks first: what is new is to be stamped from the start
        changed = ",".join(map(key_of, plan.taken(failed)))
        log.event(Level.INFO, "configuration read again", changed=changed or "nothing")
        for field, why in self._waiting.items():
            log.event(Level.WARNING, "not taken up", field=field, why=why, next="restart the agent")

    def close(self) -> None:
        """Remove everything from the kernel, last thing first."""
        self._closing.close()


def _unknown(_peer: str) -> Offset | None:
    """How a peer's clock runs against ours, where nobody looks."""
    return None


def _recording(config: AgentConfig, namespace: str | None, bus: Bus) -> RecordingSource | None:
    if not config.recording.hours:
        return None
    directory = directories.recording(config.recording.directory, namespace)
    return RecordingSource(config.recording, directory, config.windows.long_ns, bus)


def run(
    config: AgentConfig,
    namespace: str | None,
    compilation: loader.Compilation,
    read: Callable[[], AgentConfig] | None = None,
) -> None:
    """Run an agent in a namespace until SIGTERM or SIGINT; at SIGHUP it reads its configuration again.

    Raises
    ------
    SwerveError
        If it cannot start: no bcc, no privilege, another agent serves this namespace.
    """
    if namespace is not None:
        netns.enter(namespace)
    privileges.require()
    instance = directories.instance(namespace)
    log.event(Level.INFO, "agent starting", host=config.host, peers=len(config.peers), instance=instance)
    if refused := privileges.raise_priority():
        log.event(Level.NOTICE, "agent runs at the usual CPU priority", why=refused)
    for missing, lost in privileges.gaps():
        log.event(Level.NOTICE, "agent runs without", missing=missing, lost=lost)
    with Agent(config, namespace, compilation, read) as agent, _on_signals(agent.stop, agent.reload):
        agent.run()


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None], reload: Callable[[], None]) -> Iterator[None]:
    handled = {signal.SIGTERM: stop, signal.SIGINT: stop}
    if not sys.stderr.isatty():  # an agent at a terminal ends with it
        handled[signal.SIGHUP] = reload

    def handler(number: int, _frame: FrameType | None) -> None:
        handled[signal.Signals(number)]()

    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
