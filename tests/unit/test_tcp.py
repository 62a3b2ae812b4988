"""The TCP source on maps made by hand, and the answers of the kernel's socket diagnostics taken apart."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.bus import Bus, Subscription
from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.kernel import sockdiag
from pytools.kernel.loader import Loaded
from pytools.kernel.netlink import Netlink
from pytools.signals import Path, TcpFlow, TcpPath
from pytools.sources import tcp

SECOND = 10**9
ADDRESS = np.dtype([("bytes", "u1", (16,))])
KEY = np.dtype(
    [("local", ADDRESS), ("remote", ADDRESS), ("local_port", "u2"), ("remote_port", "u2"), ("ifindex", "u4")]
)
FLOW = np.dtype([("retransmitted_segments", "u8"), ("first_ns", "u8"), ("last_ns", "u8")])
INTERFACE = np.dtype([("retransmitted_segments", "u8"), ("unrecorded_segments", "u8")])
ACCOUNTED = np.dtype([("segments", "u8"), ("last_ns", "u8")])
MEASURED = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")


class FakeMap:
    """A hash map in user space."""

    def __init__(self, key: np.dtype[Any], value: np.dtype[Any], max_entries: int) -> None:
        self.key, self.value, self.max_entries = key, value, max_entries
        self.rows: dict[bytes, tuple[Any, Any]] = {}

    def read(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows = list(self.rows.values())
        return np.array([key for key, _ in rows], self.key), np.array([value for _, value in rows], self.value)

    def update(self, key: Any, value: Any) -> None:
        raw = np.asarray(key, self.key).tobytes()
        if raw not in self.rows and len(self.rows) >= self.max_entries:
            raise SwerveError("full")
        self.rows[raw] = (key, value)

    def delete(self, key: Any) -> bool:
        return self.rows.pop(np.asarray(key, self.key).tobytes(), None) is not None


@dataclass
class FakeCounters:
    values: list[int] = field(default_factory=lambda: [0] * 5)

    def read_percpu_sum(self) -> np.ndarray[Any, Any]:
        return np.array(self.values, np.uint64)


@dataclass
class FakeLink:
    index: int
    name: str


class FakeNetlink:
    def links(self) -> list[FakeLink]:
        return [FakeLink(7, "rail1"), FakeLink(8, "rail2")]


@dataclass
class Kernel:
    """What the source reads, and what it published."""

    flows: FakeMap = field(default_factory=lambda: FakeMap(KEY, FLOW, 8))
    interfaces: FakeMap = field(default_factory=lambda: FakeMap(np.dtype("u4"), INTERFACE, 8))
    accounted: FakeMap = field(default_factory=lambda: FakeMap(np.dtype("u8"), ACCOUNTED, 2))
    counters: FakeCounters = field(default_factory=FakeCounters)

    def map(self, name: str) -> Any:
        return getattr(self, name.removeprefix("tcp_"))

    def flow(self, port: int, segments: int, last_ns: int, first_ns: int = 1, ifindex: int = 7) -> None:
        self.flows.update(key(port, ifindex), (segments, first_ns, last_ns))


def key(port: int, ifindex: int = 7) -> tuple[Any, ...]:
    local, remote = (bytes(10) + b"\xff\xff" + bytes([10, 9, 0, last]) for last in (1, 2))
    return (list(local),), (list(remote),), port, 5201, ifindex


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the sockets retransmitted before; fill it before the source is made."""
    found: dict[int, int] = {}
    monkeypatch.setattr(sockdiag, "retransmitted_segments", lambda: found)
    monkeypatch.setattr(tcp.time, "monotonic_ns", lambda: 0)
    return found


def source_on(kernel: Kernel, *known: Path) -> tuple[tcp.TcpSource, Subscription]:
    bus = Bus()
    subscription = bus.subscribe(frozenset({"tcp_flow", "tcp_path"}), 1000)
    source = tcp.TcpSource(
        AgentConfig(host="h1", peers=[]),
        cast(Loaded, kernel),
        cast(Netlink, FakeNetlink()),
        bus,
        lambda remote, interface: MEASURED if (remote, interface) == ("10.9.0.2", "rail1") else None,
        lambda: known,
    )
    return source, subscription


def published(subscription: Subscription) -> tuple[list[TcpFlow], dict[Any, tuple[int, int]]]:
    """The flows, and per interface and path the segments of the window and in total."""
    signals = subscription.read()
    flows = [signal for signal in signals if isinstance(signal, TcpFlow)]
    paths = {
        (signal.interface, signal.path): (signal.retransmitted_segments, signal.total_segments)
        for signal in signals
        if isinstance(signal, TcpPath)
    }
    assert len(flows) + len(paths) == len(signals)
    return flows, paths


def test_flows_are_joined_to_their_path(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND // 2)
    kernel.flow(40001, 2, SECOND // 2)
    kernel.flow(40000, 3, SECOND // 2, ifindex=8)
    source.read(SECOND)
    flows, paths = published(subscription)
    assert [(flow.local, flow.local_port, flow.remote, flow.remote_port) for flow in flows] == [
        ("10.9.0.1", 40000, "10.9.0.2", 5201),
        ("10.9.0.1", 40001, "10.9.0.2", 5201),
        ("10.9.0.1", 40000, "10.9.0.2", 5201),
    ]
    assert [(flow.interface, flow.path, flow.retransmitted_segments) for flow in flows] == [
        ("rail1", MEASURED, 5),
        ("rail1", MEASURED, 2),
        ("rail2", None, 3),
    ]
    assert paths == {("rail1", MEASURED): (7, 7), ("rail2", None): (3, 3)}


def test_only_what_changed_is_published_and_totals_stay(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND // 2)
    kernel.interfaces.update(7, (5, 0))
    source.read(SECOND)
    published(subscription)
    source.read(2 * SECOND)
    assert published(subscription) == ([], {("rail1", MEASURED): (0, 5)})
    kernel.flow(40000, 9, 5 * SECOND // 2)
    source.read(3 * SECOND)
    flows, paths = published(subscription)
    assert [flow.retransmitted_segments for flow in flows] == [9]
    assert paths == {("rail1", MEASURED): (4, 9)}


def test_a_row_written_a_little_after_its_stamp_is_not_missed(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    source.read(10 * SECOND)
    kernel.flow(40000, 5, 10 * SECOND - 1000)
    source.read(11 * SECOND)
    assert published(subscription)[1] == {("rail1", MEASURED): (5, 5)}


def test_a_row_that_was_pruned_and_came_back_counts_from_zero(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND, first_ns=SECOND)
    source.read(SECOND)
    published(subscription)
    kernel.flow(40000, 6, 2 * SECOND, first_ns=2 * SECOND)
    source.read(2 * SECOND)
    assert published(subscription)[1] == {("rail1", MEASURED): (6, 11)}


def test_segments_without_a_row_belong_to_the_interface(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND)
    kernel.interfaces.update(7, (12, 7))
    source.read(SECOND)
    assert published(subscription)[1] == {("rail1", MEASURED): (5, 5), ("rail1", None): (7, 7)}
    kernel.interfaces.update(7, (13, 8))
    source.read(2 * SECOND)
    assert published(subscription)[1] == {("rail1", MEASURED): (0, 5), ("rail1", None): (1, 8)}


def test_an_interface_that_is_gone_keeps_its_index_for_a_name(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND, ifindex=9)
    source.read(SECOND)
    assert list(published(subscription)[1]) == [("if9", None)]


def test_a_crowded_map_loses_its_longest_idle_rows_and_no_total(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    for port in range(7):
        kernel.flow(port, 1, SECOND * (port + 1))
    source.read(64 * SECOND + 1)
    left = {int(row["local_port"]) for row in kernel.flows.read()[0]}
    assert left == {4, 5, 6}  # those of ports 0 to 3 have been idle for more than a minute
    published(subscription)
    source.read(65 * SECOND)
    assert published(subscription)[1] == {("rail1", MEASURED): (0, 7)}


def test_a_map_with_room_keeps_idle_rows(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, _ = source_on(kernel)
    for port in range(6):
        kernel.flow(port, 1, SECOND)
    source.read(1000 * SECOND)
    assert len(kernel.flows.rows) == 6


def test_requests_that_died_are_forgotten(earlier: dict[int, int]) -> None:
    earlier[1] = 4
    kernel = Kernel()
    source, _ = source_on(kernel)
    kernel.accounted.update(2, (3, 100 * SECOND))
    source.read(399 * SECOND)
    assert len(kernel.accounted.rows) == 2
    source.read(2 * 399 * SECOND)
    assert {int(cookie) for cookie in kernel.accounted.read()[0]} == {1}


def test_what_sockets_did_before_is_handed_to_the_kernel(earlier: dict[int, int]) -> None:
    earlier.update({11: 3, 12: 0, 13: 9})
    kernel = Kernel()
    source, _ = source_on(kernel)
    cookies, accounted = kernel.accounted.read()
    assert dict(zip(cookies.tolist(), accounted["segments"].tolist(), strict=True)) == {11: 3, 12: 0}
    assert source.drops()["tcp_baselines_full"] == 1


def test_every_drop_has_a_name(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, _ = source_on(kernel)
    kernel.counters.values = [100, 1, 2, 3, 4]
    assert source.drops() == {
        "tcp_baselines_full": 0,
        "tcp_flows_full": 1,
        "tcp_interfaces_full": 2,
        "tcp_synacks_full": 3,
        "tcp_deferred": 4,
    }


def test_a_path_without_retransmissions_says_so(earlier: dict[int, int]) -> None:
    source, subscription = source_on(Kernel(), MEASURED)
    source.read(SECOND)
    assert published(subscription) == ([], {("rail1", MEASURED): (0, 0)})


def test_ticks_keep_their_distance(earlier: dict[int, int]) -> None:
    kernel = Kernel()
    source, subscription = source_on(kernel)
    kernel.flow(40000, 5, SECOND)
    assert source.tick(SECOND - 1) == SECOND
    assert subscription.read() == []
    assert source.tick(SECOND + 5) == 2 * SECOND
    assert len(subscription.read()) == 2
    assert source.tick(10 * SECOND) == 11 * SECOND  # held up: one reading, not nine


@given(st.lists(st.integers(0, 2**62)), st.integers(0, 2**62), st.integers(0, 20))
def test_longest_idle(last_ns: list[int], before_ns: int, at_most: int) -> None:
    chosen = tcp.longest_idle(np.array(last_ns, np.uint64), before_ns, at_most).tolist()
    wanted = sorted(time_ns for time_ns in last_ns if time_ns < before_ns)[:at_most]
    assert [last_ns[index] for index in chosen] == wanted
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (bytes(10) + b"\xff\xff\x0a\x09\x00\x02", "10.9.0.2"),
        (bytes.fromhex("fd000009000000000000000000000002"), "fd00:9::2"),
        (bytes(15) + b"\x01", "::1"),
    ],
)
def test_address(raw: bytes, text: str) -> None:
    assert tcp.address(np.frombuffer(raw, ADDRESS)[0]) == text


def diagnostics(state: int, retrans: int, attributes: bytes) -> bytes:
    """A `struct inet_diag_msg` with cookie 0x200000001."""
    identity = struct.pack("!HH32x", 40000, 5201) + struct.pack("=III", 0, 1, 2)
    return struct.pack("=BBBB", 2, state, 0, retrans) + identity + bytes(20) + attributes


def attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


INFO = attribute(2, bytes(100) + struct.pack("=I", 77) + bytes(100))


@pytest.mark.parametrize(
    ("state", "retrans", "attributes", "segments"),
    [
        (1, 0, INFO, 77),
        (1, 3, attribute(8, b"\0") + INFO, 77),
        (1, 3, b"", 0),
        (1, 3, attribute(2, bytes(60)), 0),
        (3, 3, b"", 3),
        (1, 0, b"\0\0\0\0", 0),
    ],
    ids=["established", "after_another", "no_info", "short_info", "request", "broken"],
)
def test_socket_diagnostics(state: int, retrans: int, attributes: bytes, segments: int) -> None:
    message = diagnostics(state, retrans, attributes)
    assert sockdiag._parsed(message) == (state, 2 << 32 | 1, segments)
