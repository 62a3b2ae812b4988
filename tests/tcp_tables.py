"""The kernel's TCP maps made by hand: layouts as in bpf/swerve.h, and maps that live in user space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.kernel.bpf.maps import update_each

ADDRESS = np.dtype([("bytes", "u1", (16,))])
KEY = np.dtype([("local", ADDRESS), ("remote", ADDRESS), ("local_port", "u2"), ("remote_port", "u2"), ("netns", "u4")])
COUNTS = np.dtype(
    [
        ("retransmitted", "u8", (5,)),
        *(
            (name, "u8")
            for name in (
                *("retransmitted_bytes", "timeouts", "spurious", "sent_bytes", "received_bytes", "segments_out"),
                *("segments_in", "delivered", "delivered_ce", "zero_windows", "resets_sent", "resets_refused"),
                "resets_received",
            )
        ),
    ]
)
FLOW = np.dtype(
    [
        ("counts", COUNTS),
        ("congestion_ns", "u8", (5,)),
        *((name, "u8") for name in ("cookie", "skaddr", "cgroup", "netns", "first_ns")),
        *((name, "u8") for name in ("last_ns", "acknowledged_bytes")),
        *((name, "u4") for name in ("ifindex", "srtt_us", "min_rtt_us", "cwnd", "ssthresh", "mss")),
        *((name, "u4") for name in ("rate_delivered", "rate_interval_us")),
        *((name, "u1") for name in ("state", "congestion", "ecn_flags", "flags")),
        ("pad", "u4"),
    ]
)
PATH_KEY = np.dtype([("remote", ADDRESS), ("ifindex", "u4")])
ACCOUNTED = np.dtype([("segments", "u8"), ("timeouts", "u8"), ("last_ns", "u8"), ("older", "u4"), ("congestion", "u4")])
NAMESPACE = np.dtype([("counts", COUNTS), ("connections", "u8"), ("cgroup", "u8")])
SETTINGS = np.dtype([("netns_cookie", "u8"), ("refresh_ns", "u8"), ("namespaces", "u8")])
DROP_KEY = np.dtype([("rx_sk", "u8"), ("reason", "u8")])
DROP_RUN = np.dtype([("key", DROP_KEY), ("packets", "u8")])
COUNTERS = (
    *("flows_created", "flows_replaced", "flows_full", "paths_full", "interfaces_full", "lost", "synacks_full"),
    *("deferred", "congestion_full", "unsized", "met", "congestion_missed", "namespaces_full"),
)
FAST, TIMEOUT, TAIL_PROBE, SYN, UNKNOWN = range(5)
CPUS = 2


def mapped(last: int) -> list[int]:
    """10.9.0.last, mapped into IPv6."""
    return list(bytes(10) + b"\xff\xff" + bytes([10, 9, 0, last]))


class FakeMap:
    """A hash map in user space; per CPU, all is counted on the second one."""

    def __init__(self, key: Any, value: Any, max_entries: int = 16, percpu: bool = False) -> None:
        self.key, self.value, self.max_entries, self.percpu = np.dtype(key), np.dtype(value), max_entries, percpu
        self.rows: dict[bytes, bytes] = {}
        self.read_at_once: list[int] = []

    def read(self) -> tuple[NDArray[Any], NDArray[Any]]:
        keys = np.frombuffer(b"".join(self.rows), self.key, len(self.rows)).copy()
        values = np.frombuffer(b"".join(self.rows.values()), self.value, len(self.rows)).copy()
        if not self.percpu:
            return keys, values
        spread = np.zeros((len(self.rows), CPUS), self.value)
        spread[:, 1] = values
        return keys, spread

    def batches(self, at_once: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        keys, values = self.read()
        for first in range(0, max(len(keys), 1), at_once):
            part = keys[first : first + at_once]
            self.read_at_once.append(len(part))
            yield part, values[first : first + at_once]

    def read_percpu_sum(self) -> NDArray[Any]:
        keys, values = self.read()
        total: NDArray[Any] = values.sum(axis=1)[np.argsort(keys)]
        return total

    def update(self, key: Any, value: Any) -> None:
        raw = np.asarray(key, self.key).tobytes()
        if raw not in self.rows and len(self.rows) >= self.max_entries:
            raise SwerveError("full")
        self.rows[raw] = np.asarray(value, self.value).tobytes()

    def update_many(self, keys: NDArray[Any], values: NDArray[Any]) -> int:
        return update_each(self.update, keys, values)

    def lookup_many(self, keys: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        raw = [self.rows.get(np.asarray(key, self.key).tobytes()) for key in keys]
        values = b"".join(each or bytes(self.value.itemsize) for each in raw)
        return np.array([each is not None for each in raw], np.bool_), np.frombuffer(
            values, self.value, len(raw)
        ).copy()

    def delete(self, key: Any) -> bool:
        return self.rows.pop(np.asarray(key, self.key).tobytes(), None) is not None


def counts(segments: int = 0, cause: int = FAST, **others: int) -> NDArray[Any]:
    """A `struct swerve_tcp_counts`."""
    made = np.zeros((), COUNTS)
    made["retransmitted"][cause] = segments
    for name, value in others.items():
        made[name] = value
    return made


def flow(segments: int = 0, **others: int) -> NDArray[Any]:
    """A row of tcp_flows: established, seen at 1 s."""
    made = np.zeros((), FLOW)
    made["counts"] = counts(segments)
    made["state"], made["last_ns"], made["first_ns"], made["cookie"], made["ifindex"] = 1, 10**9, 1, 1, 7
    made["min_rtt_us"] = 0xFFFFFFFF
    for name, value in others.items():
        made[name] = value
    return made


def flow_key(port: int, remote: int = 2) -> NDArray[Any]:
    """The key of a connection from 10.9.0.1 to port 5201 of 10.9.0.2, unless another is given."""
    return np.array(((mapped(1),), (mapped(remote),), port, 5201, 0), KEY)


def path_key(remote: int = 2, ifindex: int = 7) -> NDArray[Any]:
    """The key of all connections with 10.9.0.2 by interface 7, unless others are given."""
    return np.array(((mapped(remote),), ifindex), PATH_KEY)


@dataclass
class Kernel:
    """What the source reads; takes the place of what the loader returns."""

    flows: FakeMap = field(default_factory=lambda: FakeMap(KEY, FLOW, 1000))
    paths: FakeMap = field(default_factory=lambda: FakeMap(PATH_KEY, COUNTS, 8))
    interfaces: FakeMap = field(default_factory=lambda: FakeMap("u4", COUNTS, 8, percpu=True))
    namespaces: FakeMap = field(default_factory=lambda: FakeMap("u8", NAMESPACE, 8))
    accounted: FakeMap = field(default_factory=lambda: FakeMap("u8", ACCOUNTED, 2))
    settings: FakeMap = field(default_factory=lambda: FakeMap("i4", SETTINGS, 1))
    counters: FakeMap = field(default_factory=lambda: FakeMap("i4", "u8", 16, percpu=True))
    drops_by_reason: FakeMap = field(default_factory=lambda: FakeMap("u4", "u8", 1024, percpu=True))
    drops_by_socket: FakeMap = field(default_factory=lambda: FakeMap(DROP_KEY, "u8", 16))
    drops_latest: FakeMap = field(default_factory=lambda: FakeMap("i4", DROP_RUN, 1, percpu=True))
    drops_sockets_full: FakeMap = field(default_factory=lambda: FakeMap("i4", "u8", 1, percpu=True))
    programs: dict[str, int] = field(default_factory=dict)
    has_drops: bool = True

    def __post_init__(self) -> None:
        for at in range(len(COUNTERS)):
            self.counters.update(at, 0)
        self.drops_sockets_full.update(0, 0)
        self.drops_latest.update(0, ((0, 0), 0))
        for at in range(1024):
            self.drops_by_reason.update(at, 0)

    def map(self, name: str) -> FakeMap:
        found = getattr(self, name.removeprefix("tcp_"))
        assert isinstance(found, FakeMap)
        return found

    def has_map(self, name: str) -> bool:
        return self.has_drops or not name.startswith("drops")

    def count(self, counter: str, value: int) -> None:
        self.counters.update(COUNTERS.index(counter), value)
