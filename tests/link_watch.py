"""A link source at work without an agent: its loop turns while a test waits for what it tells."""

from __future__ import annotations

import contextlib
import json
import selectors
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import support

from pytools.config import AgentConfig, Links, Windows
from pytools.ipc.bus import Bus, Subscription
from pytools.kernel.netlink.bonds import Bundle
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.signals import Link, LinkEvent, Path, RdmaPort
from pytools.sources.links.rdma_sysfs import Sysfs
from pytools.sources.links.source import LinkSource


class Watching:
    """The source, and what it has told."""

    def __init__(
        self,
        source: LinkSource,
        subscription: Subscription,
        selector: selectors.BaseSelector,
        carriers: list[tuple[int, bool]],
    ) -> None:
        self.source, self.selector, self.carriers = source, selector, carriers
        self.events: list[LinkEvent] = []
        self.links: list[Link] = []
        self.ports: list[RdmaPort] = []
        self._subscription = subscription
        self._due_ns = 0

    def turn(self, wait_s: float = 0.01) -> None:
        """One turn of the loop, as the agent does it."""
        for key, mask in self.selector.select(wait_s):
            key.data(mask)
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._due_ns = self.source.tick(now_ns)
        for signal in self._subscription.read():
            if isinstance(signal, LinkEvent):
                self.events.append(signal)
            elif isinstance(signal, Link):
                self.links.append(signal)
            elif isinstance(signal, RdmaPort):
                self.ports.append(signal)

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 10) -> Any:
        """Turn until the condition holds."""

        def turned() -> Any:
            self.turn()
            return condition()

        return support.wait_until(turned, deadline_s, f"{what}; told so far: {self.told()}", every_s=0)

    def event(self, what: str, interface: str, deadline_s: float = 10) -> LinkEvent:
        """Wait for an event of this kind."""
        found: LinkEvent = self.until(lambda: self.find(what, interface), f"{what} of {interface}", deadline_s)
        return found

    def find(self, what: str, interface: str) -> LinkEvent | None:
        """The first event of this kind."""
        return next((each for each in self.events if (each.what, each.interface) == (what, interface)), None)

    def told(self) -> list[tuple[str, str]]:
        """Kinds and interfaces of all events."""
        return [(each.what, each.interface) for each in self.events]

    def link(self, interface: str) -> Link:
        """Wait for the next reading of an interface."""
        self.links.clear()
        found: Link = self.until(
            lambda: next((each for each in self.links if each.interface == interface), None),
            f"a reading of {interface}",
        )
        return found


@contextlib.contextmanager
def watching(
    namespace: str | None,
    interfaces: Callable[[], Sequence[str]],
    paths: Callable[[], Sequence[Path]] = lambda: (),
    links: Links | None = None,
    sysfs: Sysfs | None = None,
    room_bytes: int = 1 << 20,
    bundles: Callable[[Mapping[str, Bundle]], None] = lambda _bundles: None,
) -> Iterator[Watching]:
    """Watch interfaces in a namespace; the calling thread is inside it meanwhile."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(inside(namespace))
        netlink = stack.enter_context(Netlink())
        selector = stack.enter_context(selectors.DefaultSelector())
        bus = Bus()
        subscription = bus.subscribe(frozenset({"link", "link_event", "rdma_port"}), 100_000)
        config = AgentConfig(host="h1", peers=[], links=links or Links(), windows=Windows(long_ms=200))
        carriers: list[tuple[int, bool]] = []

        def carrier_changed(index: int, carrier: bool) -> None:
            carriers.append((index, carrier))

        source = LinkSource(config, netlink, bus, interfaces, paths, carrier_changed, sysfs, room_bytes, bundles)
        stack.callback(source.close)
        source.register(selector)
        work = Watching(source, subscription, selector, carriers)
        work.until(
            lambda: {each.interface for each in work.links} >= set(interfaces()), "every interface has been read once"
        )
        yield work


def kernel_link(namespace: str, interface: str) -> dict[str, Any]:
    """The kernel's counters of an interface, as iproute2 prints them."""
    shown = json.loads(support.run(["ip", "-n", namespace, "-j", "-s", "-s", "link", "show", interface]).stdout)
    counters: dict[str, Any] = shown[0]
    return counters


def kernel_queues(namespace: str, interface: str) -> list[dict[str, Any]]:
    """The kernel's queues of an interface, as iproute2 prints them."""
    queues: list[dict[str, Any]] = json.loads(
        support.run(["tc", "-n", namespace, "-j", "-s", "qdisc", "show", "dev", interface]).stdout
    )
    return queues
