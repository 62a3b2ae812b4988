"""The agent: runs the sources of one network namespace on one thread, and serves their signals.

Everything it puts into the kernel goes when it stops; what a killed predecessor left is removed at the start. All times
are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from pytools import places
from pytools.bus import Bus, Server
from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.estimators.offsets import Offset
from pytools.kernel import attach, bpf, loader, netns
from pytools.kernel.netlink import Netlink
from pytools.sources.cost import CostSource
from pytools.sources.links.source import LinkSource
from pytools.sources.nexthops import NexthopSource
from pytools.sources.path_ecn import PathEcnSource
from pytools.sources.path_mtu import PathMtuSource
from pytools.sources.probing.mesh import ProbeMesh
from pytools.sources.programs import SAMPLE_EGRESS, SAMPLE_INGRESS, TCP_EGRESS, TCP_INGRESS
from pytools.sources.rdma.waiting import RdmaWhenThere
from pytools.sources.tcp.source import TcpSource

if TYPE_CHECKING:
    from pytools.bus_hosts import HostBus

_HOOKS_INTERVAL_NS = 1_000_000_000
_HOOKS: tuple[tuple[str, attach.Direction], ...] = (
    ("stamp_ingress", "ingress"),
    ("stamp_egress", "egress"),
    (TCP_EGRESS, "egress"),
    (TCP_INGRESS, "ingress"),
    (SAMPLE_INGRESS, "ingress"),
    (SAMPLE_EGRESS, "egress"),
)


class Source(Protocol):
    """What the agent runs."""

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register files; `key.data` is called with the event mask."""

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""

    def drops(self) -> dict[str, int]:
        """Everything lost so far, by name."""

    def close(self) -> None:
        """Give everything back."""


class Hooks:
    """Keeps our programs attached to the interfaces that carry paths, as these come and go."""

    def __init__(self, programs: dict[str, int], interfaces: Callable[[], Iterable[str]]) -> None:
        self._programs, self._interfaces = programs, interfaces
        self._attached: dict[tuple[str, str], attach.Attachment] = {}
        self.failed: dict[str, str] = {}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Nothing to wait for."""

    def tick(self, now_ns: int) -> int:
        """Attach what is missing; what cannot be attached is named in `failed` and tried again."""
        indexes = attach.interfaces()
        wanted = set(self._interfaces())
        for (interface, hook), attachment in list(self._attached.items()):
            if interface not in wanted or indexes.get(interface) != attachment.ifindex:
                self._attached.pop((interface, hook)).close()
        for interface in sorted(wanted & set(indexes)):
            for hook, direction in _HOOKS:
                if hook in self._programs and (interface, hook) not in self._attached:
                    self._attach(interface, hook, direction)
        return now_ns + _HOOKS_INTERVAL_NS

    def _attach(self, interface: str, hook: str, direction: attach.Direction) -> None:
        name = f"{hook} on {interface}"
        try:
            self._attached[interface, hook] = attach.attach_tc(self._programs[hook], interface, direction)
            self.failed.pop(name, None)
        except SwerveError as error:
            self.failed[name] = str(error)

    def drops(self) -> dict[str, int]:
        """Nothing is lost here that `failed` does not name."""
        return {}

    def close(self) -> None:
        """Detach everything."""
        for attachment in self._attached.values():
            with contextlib.suppress(SwerveError):
                attachment.close()
        self._attached.clear()


class Agent:
    """All sources of one namespace, wired; enter the namespace before making one.

    Parameters
    ----------
    config : AgentConfig
        Whom to probe, and how.
    namespace : str, optional
        The name of the namespace, for the place of the control socket.
    compilation : Compilation
        Of `pytools.sources.programs.all_of(config)`, which may be under way since before this module was imported.
    """

    def __init__(self, config: AgentConfig, namespace: str | None, compilation: loader.Compilation) -> None:
        self._stop = False
        self._closing = contextlib.ExitStack()
        try:
            self._build(config, namespace, compilation)
        except BaseException:
            self._closing.close()
            raise

    def _build(self, config: AgentConfig, namespace: str | None, compilation: loader.Compilation) -> None:
        keep = self._closing.enter_context
        self._selector = keep(contextlib.closing(selectors.DefaultSelector()))  # first in, so last to go
        self._sources: list[Source] = []
        bus = Bus()
        self._add(Server(bus, places.agent_socket(namespace)))
        netlink = keep(contextlib.closing(Netlink()))
        loaded = keep(loader.collect(compilation))
        if not bpf.has_tcx(next(iter(loaded.programs.values()), -1)):
            attach.clean()
        if config.virtual_clock:
            from pytools.sources.clocks.virtual_clock import VirtualClockSource

            self._add(VirtualClockSource(config.virtual_clock, loaded))  # before anything is stamped
        mesh = ProbeMesh(config, loaded, netlink, bus)
        hooks = Hooks(loaded.programs, mesh.interfaces)
        self._add(hooks)  # before the mesh: its first tick attaches, and the first probe is to be stamped
        self._add(mesh)
        self._add_between_hosts(config, loaded, netlink, bus, mesh)
        rdma = RdmaWhenThere(config, bus, mesh.path_of, places.tap_socket(namespace))
        failed = [loaded.failed, hooks.failed, rdma.failed]
        if TCP_EGRESS in loaded.programs:  # notes in the constructor what happened before the first tick
            connections = TcpSource(config, loaded, netlink, bus, mesh.path_of, mesh.all_paths)
            failed.append(connections.failed)
            self._add(connections)
        self._add(NexthopSource(config.host, [peer.address for peer in config.peers], netlink, bus))
        self._add(LinkSource(config, netlink, bus, mesh.interfaces, mesh.all_paths))
        if loaded.has_map("stamp_ecn"):
            self._add(PathEcnSource(config, loaded, bus, lambda: mesh.current))
        sizes = PathMtuSource(config, bus, lambda: mesh.current)
        self._add(sizes)
        self._add(rdma)
        self._add(
            CostSource(
                config.host,
                ChainMap(loaded.programs, rdma.programs),
                drops=self.drops,
                failed=lambda: dict(ChainMap(*failed)),
                wire_bytes=lambda: mesh.wire_bytes() + sizes.wire_bytes(),
                bus=bus,
            )
        )

    def _add_between_hosts(
        self, config: AgentConfig, loaded: loader.Loaded, netlink: Netlink, bus: Bus, mesh: ProbeMesh
    ) -> None:
        """What needs the other hosts' agents; imported only where it is wanted."""
        hosts: HostBus | None = None
        between: Callable[[str], Offset | None] = _unknown
        if config.bus.key_file:
            from pytools import bus_hosts

            hosts = bus_hosts.HostBus(config.host, config.peers, config.bus)
            self._add(hosts)
        if any(peer.clock != "shared" for peer in config.peers):
            from pytools.sources.clocks.source import ClockSource

            clocks = ClockSource(config, mesh, hosts, bus)
            between = clocks.since_long
            self._add(clocks)
        if hosts is not None and SAMPLE_EGRESS in loaded.programs:
            from pytools.sources.samples.source import SampleSource

            self._add(SampleSource(config, loaded, netlink, bus, hosts, between, mesh.path_of))

    def _add(self, source: Source) -> None:
        self._closing.enter_context(contextlib.closing(source))
        self._sources.append(source)
        source.register(self._selector)

    def drops(self) -> dict[str, int]:
        """Everything that any source lost so far, by name."""
        return {name: count for source in self._sources for name, count in source.drops().items()}

    def run(self) -> None:
        """Work until `stop` is called."""
        due = dict.fromkeys(range(len(self._sources)), 0)
        while not self._stop:
            now_ns = time.monotonic_ns()
            for index, source in enumerate(self._sources):
                if due[index] <= now_ns:
                    due[index] = source.tick(now_ns)
            timeout_s = max(0.0, (min(due.values()) - time.monotonic_ns()) / 1e9)
            for key, mask in self._selector.select(timeout_s):
                key.data(mask)

    def stop(self) -> None:
        """Have `run` return; safe in a signal handler."""
        self._stop = True

    def close(self) -> None:
        """Remove everything from the kernel, last thing first."""
        self._closing.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unknown(_peer: str) -> Offset | None:
    """How a peer's clock runs against ours, where nobody looks."""
    return None


def run(config: AgentConfig, namespace: str | None, compilation: loader.Compilation) -> None:
    """Run an agent in a namespace until SIGTERM or SIGINT.

    Raises
    ------
    SwerveError
        If it cannot start: no bcc, no privilege, another agent serves this namespace.
    """
    if namespace is not None:
        netns.enter(namespace)
    with Agent(config, namespace, compilation) as agent, _on_signals(agent.stop):
        agent.run()


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
