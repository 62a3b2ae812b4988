"""RDMA ports on a directory that looks like /sys: counters of several drivers, GIDs that change, ports that go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import mentions

from pytools.ipc.bus import Bus, Subscription
from pytools.signals import LinkEvent, RdmaPort
from pytools.signals import Path as NetworkPath
from pytools.sources.links import rdma_ports
from pytools.sources.links.rdma_ports import GidHistory, RdmaPorts
from pytools.sources.links.rdma_sysfs import Port, Sysfs, meanings

S, MS = 1_000_000_000, 1_000_000
PATH = NetworkPath("h1", "h2", "10.9.0.2", "", "lo")
V4, V4_TOO, LOCAL = "10.5.0.1 RoCE v2", "10.5.0.2 RoCE v2", "fe80::1 RoCE v2"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


class FakeSys:
    """Something like /sys/class with one RDMA device."""

    def __init__(self, base: Path, device: str = "mlx5_0", interface: str = "lo", ifindex: int = 1) -> None:
        self.root, self.interface = base / "infiniband", interface
        self.port = self.root / device / "ports" / "1"
        self.write("state", "4: ACTIVE")
        self.write("rate", "100 Gb/sec (4X EDR)")
        for index in range(4):
            self.gid(index, EMPTY)
        net = base / "net" / interface / "ifindex"
        net.parent.mkdir(parents=True)
        net.write_text(f"{ifindex}\n")

    def write(self, name: str, text: str) -> None:
        place = self.port / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    def gid(self, index: int, gid: str, kind: str = "RoCE v2") -> None:
        self.write(f"gids/{index}", gid)
        self.write(f"gid_attrs/types/{index}", kind if gid != EMPTY else "")
        self.write(f"gid_attrs/ndevs/{index}", self.interface if gid != EMPTY else "")

    def count(self, **counters: int) -> None:
        for name, value in counters.items():
            self.write(f"hw_counters/{name}", str(value))


def mapped(last: int) -> str:
    return f"0000:0000:0000:0000:0000:ffff:0a05:{last:04x}"


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSys:
    fake = FakeSys(tmp_path)
    fake.gid(0, "fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1")
    fake.gid(3, mapped(1))
    return fake


@pytest.fixture(autouse=True)
def costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings are spaced by what they took; here they take no time, however busy the machine is."""
    stopped = SimpleNamespace(thread_time_ns=lambda: 0, monotonic_ns=lambda: 0, time_ns=lambda: 0)
    monkeypatch.setattr(rdma_ports, "time", stopped)


class Watched:
    """The ports at work, and what they have told."""

    def __init__(self, fake: FakeSys) -> None:
        bus = Bus()
        self.ports = RdmaPorts("h1", bus, self.paths_of, S, Sysfs(fake.root))
        self._subscription: Subscription = bus.subscribe(frozenset({"link_event", "rdma_port"}))
        self.asked: list[str] = []

    def paths_of(self, interface: str) -> Sequence[NetworkPath]:
        self.asked.append(interface)
        return [PATH]

    def at(self, now_ns: int) -> list[LinkEvent | RdmaPort]:
        self.ports.tick(now_ns)
        return [each for each in self._subscription.read() if isinstance(each, (LinkEvent, RdmaPort))]

    def events(self, now_ns: int) -> list[LinkEvent]:
        return [each for each in self.at(now_ns) if isinstance(each, LinkEvent)]


def test_a_port_is_told_with_its_gids_and_counters(sysfs: FakeSys) -> None:
    sysfs.count(rp_cnp_handled=5, np_cnp_sent=7, lifespan=12)
    sysfs.write("counters/port_xmit_data", "1000")
    sysfs.write("counters/VL15_dropped", "N/A (no PMA)")
    work = Watched(sysfs)
    (port,) = work.at(0)
    assert isinstance(port, RdmaPort)
    assert (port.device, port.port, port.interface, port.state) == ("mlx5_0", 1, "lo", "active")
    assert port.rate == "100 Gb/sec (4X EDR)"
    assert port.gids == {"0": "fe80::1 IB/RoCE v1", "3": V4}
    assert port.counters == {"rp_cnp_handled": 5, "np_cnp_sent": 7, "port_xmit_data": 1000}
    assert (port.cnp_received, port.cnp_sent, port.ecn_marked) == (5, 7, None)
    assert port.window == {}
    sysfs.count(np_cnp_sent=9)
    (port,) = work.at(S)
    assert isinstance(port, RdmaPort)
    assert (port.window, port.window_ns, port.cnp_sent) == ({"np_cnp_sent": 2}, S, 9)


DRIVERS = {
    "mlx5": (
        {
            **{"rp_cnp_handled": 1, "rp_cnp_ignored": 2, "np_cnp_sent": 4, "np_ecn_marked_roce_packets": 8},
            **{"out_of_sequence": 16, "local_ack_timeout_err": 32, "rnr_nak_retry_err": 64, "out_of_buffer": 128},
            **{"packet_seq_err": 256, "duplicate_request": 512},
        },
        (3, 4, 8, 16, 32, 192),
    ),
    "bnxt_re": (
        {
            **{"rx_cnp_pkts": 1, "tx_cnp_pkts": 2, "rx_ecn_marked_pkts": 4, "oos_drop_count": 8},
            **{"to_retransmits": 16, "rnr_naks_rcvd": 32, "seq_err_naks_rcvd": 64},
        },
        (1, 2, 4, 8, 16, 32),
    ),
    "irdma": ({"cnpHandled": 1, "cnpIgnored": 2, "cnpSent": 4, "RxECNMrkd": 8}, (3, 4, 8, None, None, None)),
    "rxe": (
        {
            **{"out_of_seq_request": 1, "retry_exceeded_err": 2, "rcvd_rnr_err": 4, "send_rnr_err": 8},
            **{"duplicate_request": 16, "rcvd_seq_err": 32, "completer_retry_err": 64},
        },
        (None, None, None, 1, 2, 12),
    ),
    "efa": ({"retrans_timeout_events": 1, "rx_drops": 2, "retrans_pkts": 4}, (None, None, None, None, 1, 2)),
    "none": ({"rx_bytes": 1}, (None,) * 6),
}


@pytest.mark.parametrize("name", DRIVERS)
def test_counters_of_drivers_mean_the_same(name: str) -> None:
    counters, expected = DRIVERS[name]
    means = meanings(counters)
    names = ("cnp_received", "cnp_sent", "ecn_marked", "out_of_sequence", "timeouts", "receiver_not_ready")
    assert tuple(means[each] for each in names) == expected
    assert means.keys() == set(names)


def test_a_driver_that_counts_by_device_is_read_there(sysfs: FakeSys, tmp_path: Path) -> None:
    place = tmp_path / "infiniband" / "mlx5_0" / "hw_counters"
    place.mkdir()
    (place / "retrans_timeout_events").write_text("3\n")
    assert Sysfs(sysfs.root).counters(Port("mlx5_0", 1)) == {"retrans_timeout_events": 3}


# ---- GIDs ----


def test_an_index_that_holds_another_address_is_told_with_both() -> None:
    change = GidHistory({3: V4}).take({3: V4_TOO})
    assert change is not None
    assert mentions(change.detail, "index 3", V4, "→", V4_TOO)
    assert change.values == {"index": 3, "changed": 1, "vanished": 0, "returned": 0, "moved": 0, "appeared": 0}


def test_what_an_index_held_before_it_was_empty_is_remembered() -> None:
    history = GidHistory({2: LOCAL, 3: V4})
    gone = history.take({2: LOCAL})
    assert gone is not None
    assert gone.values["vanished"] == 1 and mentions(gone.detail, "index 3", V4, "→", "gone")
    assert history.take({2: LOCAL}) is None
    other = history.take({2: LOCAL, 3: V4_TOO})
    assert other is not None
    assert other.values["changed"] == 1 and mentions(other.detail, "index 3", V4, "→", V4_TOO)


def test_an_address_that_comes_back_at_its_index_or_at_another_is_told() -> None:
    history = GidHistory({3: V4})
    history.take({})
    back = history.take({3: V4})
    assert back is not None
    assert (back.values["returned"], "again" in back.detail) == (1, True)
    history.take({})
    moved = history.take({5: V4})
    assert moved is not None
    assert (moved.values["moved"], moved.values["index"]) == (1, 5)
    assert mentions(moved.detail, "index 5", "→", V4, "was index 3")


def test_a_new_address_at_a_new_index_is_no_news() -> None:
    history = GidHistory({3: V4})
    assert history.take({3: V4, 4: V4_TOO}) is None
    both = history.take({4: V4, 5: LOCAL})
    assert both is not None
    assert (both.values["vanished"], both.values["changed"], both.values["appeared"]) == (1, 1, 1)


def test_gids_are_looked_at_when_addresses_change_until_the_kernel_has_caught_up(sysfs: FakeSys) -> None:
    work = Watched(sysfs)
    work.at(0)
    sysfs.gid(3, mapped(2))
    assert work.events(S) == []  # nobody said that anything changed
    work.ports.changed(S)
    (event,) = work.events(S + 1)
    assert (event.what, event.interface, event.paths) == ("gid_changed", "lo", [PATH])
    assert mentions(event.detail, "mlx5_0/1", "index 3", V4, "→", V4_TOO)
    assert (event.values["port"], event.values["changed"]) == (1, 1)
    sysfs.gid(3, EMPTY)  # the kernel is late
    (event,) = [event for ms in (10, 60, 300) for event in work.events(S + ms * MS)]
    assert event.values["vanished"] == 1


def test_gids_are_looked_at_every_ten_seconds_anyway(sysfs: FakeSys) -> None:
    work = Watched(sysfs)
    work.at(0)
    sysfs.gid(3, EMPTY)
    told = [second for second in range(1, 12) if any(event.what == "gid_changed" for event in work.events(second * S))]
    assert told == [10]


# ---- ports ----


def test_a_reading_that_was_held_up_does_not_put_off_the_next(sysfs: FakeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Watched(sysfs)
    work.at(0)
    took_ns = iter([0, 10, 0, 60 * S])  # of two readings: begin and end
    clock = SimpleNamespace(thread_time_ns=lambda: next(took_ns), monotonic_ns=lambda: 0, time_ns=lambda: 0)
    monkeypatch.setattr(rdma_ports, "time", clock)
    for now_ns in (10 * S, 20 * S):
        work.ports._read_gids(now_ns)
    sysfs.gid(3, mapped(2))
    monkeypatch.undo()
    assert any(each.what == "gid_changed" for each in work.events(31 * S))


def test_a_port_that_goes_down_and_up_is_told(sysfs: FakeSys) -> None:
    work = Watched(sysfs)
    work.at(0)
    sysfs.write("state", "1: DOWN")
    (down,) = work.events(S)
    assert (down.what, down.interface, down.paths) == ("port_down", "lo", [PATH])
    assert "from active to down" in down.detail
    sysfs.write("state", "2: INIT")
    assert work.events(2 * S) == []
    sysfs.write("state", "4: ACTIVE")
    assert [each.what for each in work.events(3 * S)] == ["port_up"]


def test_a_device_that_goes_is_a_port_down(sysfs: FakeSys) -> None:
    work = Watched(sysfs)
    work.at(0)
    sysfs.root.rename(sysfs.root.with_name("elsewhere"))
    (event,) = work.events(S)
    assert (event.what, "gone" in event.detail) == ("port_down", True)
    assert work.events(2 * S) == []


def test_without_rdma_nothing_is_told(tmp_path: Path) -> None:
    bus = Bus()
    ports = RdmaPorts("h1", bus, lambda _: (), S, Sysfs(tmp_path / "infiniband"))
    ports.changed(0)
    assert ports.tick(0) == S


def test_an_interface_of_another_namespace_with_the_same_name_has_no_paths(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path, ifindex=77)
    fake.gid(3, mapped(1))
    work = Watched(fake)
    work.at(0)
    fake.write("state", "1: DOWN")
    (event,) = work.events(S)
    assert (event.interface, event.paths, work.asked) == ("lo", [], [])
