"""Marks per path: windows, totals, and how often they are told of; the kernel's map is made by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytools.config import AgentConfig, Peer
from pytools.ipc.bus import Bus
from pytools.kernel.addresses import mapped
from pytools.signals import LinkEvent, Path, PathEcn
from pytools.sources.path_ecn import PathEcnSource
from pytools.sources.probing.paths import PinnedPath

MS, SECOND = 1_000_000, 1_000_000_000
PEERS = {"h2": "10.9.0.2", "h3": "fd00:9::3"}
KEY = np.dtype([("remote", [("bytes", "u1", 16)]), ("ifindex", "<u4")])
VALUE = np.dtype([("packets", "<u8"), ("ce_packets", "<u8")])


@dataclass
class Marks:
    """The kernel's map: two CPUs, by address and interface."""

    counted: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def map(self, _name: str) -> Marks:
        return self

    def read(self) -> tuple[Any, Any]:
        keys, values = np.zeros(len(self.counted), KEY), np.zeros((len(self.counted), 2), VALUE)
        for row, ((address, ifindex), (packets, marked)) in enumerate(self.counted.items()):
            keys[row]["remote"]["bytes"] = list(mapped(address))
            keys[row]["ifindex"] = ifindex
            values[row]["packets"] = packets - packets // 3, packets // 3
            values[row]["ce_packets"] = marked // 2, marked - marked // 2
        return keys, values


def pinned(peer: str, ifindex: int) -> PinnedPath:
    address = PEERS[peer]
    path = Path("h1", peer, address, "", f"rail{ifindex}")
    return PinnedPath(ifindex, path, Peer(peer, address), 6 if ":" in address else 4, ifindex, "", None, False)


class Watched:
    """The source, and what it has published."""

    def __init__(self) -> None:
        self.marks, bus = Marks(), Bus()
        self.paths = [pinned("h2", 1), pinned("h2", 2), pinned("h3", 1)]
        config = AgentConfig("h1", [Peer(name, address) for name, address in PEERS.items()])
        self._told = bus.subscribe(frozenset({"path_ecn", "link_event"}))
        self.source = PathEcnSource(config, self.marks, bus, lambda: self.paths)  # type: ignore[arg-type]
        self.now_ns = 0

    def after(self, ns: int) -> tuple[list[PathEcn], list[LinkEvent]]:
        """What is told until then, with a tick whenever one is due."""
        until_ns = self.now_ns + ns
        while self.now_ns <= until_ns:
            self.now_ns = self.source.tick(self.now_ns)
        signals = self._told.read()
        return (
            [each for each in signals if isinstance(each, PathEcn)],
            [each for each in signals if isinstance(each, LinkEvent)],
        )


def test_a_window_tells_what_came_within_it_and_all_there_ever_was() -> None:
    watched = Watched()
    watched.marks.counted[PEERS["h2"], 2] = (1000, 10)
    first, _ = watched.after(1100 * MS)
    watched.marks.counted[PEERS["h2"], 2] = (1500, 40)
    watched.marks.counted[PEERS["h3"], 1] = (2**40, 2**33)
    second, _ = watched.after(1000 * MS)
    figures = {
        (each.path.destination, each.path.interface): (
            each.packets,
            each.ce_packets,
            each.total_packets,
            each.total_ce_packets,
        )
        for each in second
    }
    assert len(first) == len(second) == 3, "every path, whether or not anything came"
    assert figures == {
        ("h2", "rail1"): (0, 0, 0, 0),
        ("h2", "rail2"): (500, 30, 1500, 40),
        ("h3", "rail1"): (2**40, 2**33, 2**40, 2**33),
    }


def test_marks_are_told_of_at_once_and_then_once_a_second() -> None:
    watched = Watched()
    watched.after(2000 * MS)
    marked, events = 0, []
    for _ in range(24):
        marked += 7
        watched.marks.counted[PEERS["h2"], 1] = (10 * marked, marked)
        events += watched.after(249 * MS)[1]
    events += watched.after(1000 * MS)[1]
    assert {(event.what, event.interface, event.paths[0]) for event in events} == {
        ("ce_marked", "rail1", watched.paths[0].path)
    }
    assert events[0].at_ns <= 2500 * MS
    times = [event.at_ns for event in events]
    assert all(times[place + 1] - times[place] >= SECOND for place in range(len(times) - 1))
    assert sum(event.values["ce_packets"] for event in events) == marked
    assert watched.after(3000 * MS)[1] == [], "nothing new, nothing told"


def test_what_came_by_no_measured_path_is_told_once_it_is_one() -> None:
    watched = Watched()
    watched.marks.counted[PEERS["h3"], 2] = (9, 9)
    assert watched.after(1000 * MS)[1] == []
    watched.paths = [*watched.paths, pinned("h3", 2)]
    _, (event,) = watched.after(1000 * MS)
    assert (event.interface, event.values["total_ce_packets"]) == ("rail2", 9)
