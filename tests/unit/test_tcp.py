"""The TCP source on maps made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import tcp_tables
from connections import member
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from tcp_tables import Kernel, counts, flow, flow_key, path_key

from pytools.config import AgentConfig, Tcp
from pytools.ipc.bus import Bus, Subscription
from pytools.kernel import addresses, tracefs
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.bpf.maps import Map
from pytools.kernel.netlink import sockdiag
from pytools.signals import Owner, PacketDrops, Path, Retransmissions, Stall, TcpFlow, TcpHost, TcpNamespace, TcpPath
from pytools.sources.interfaces import Interfaces
from pytools.sources.jobs.traffic import Traffic
from pytools.sources.tcp import baselines, busiest, source, table
from pytools.sources.tcp.connections import COUNTS, Connections, Feed
from pytools.sources.tcp.drops import Drops, SocketDrops
from pytools.sources.tcp.owners import Identity
from pytools.sources.tcp.rows import CLOSED, Rows
from pytools.sources.tcp.source import TcpSource
from pytools.sources.tcp.table import SLICE, Table

SECOND = 10**9
MEASURED = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
NAMES = {7: "rail1", 8: "rail2"}
Window = dict[tuple[str, Path | None], tuple[int, int]]


class FakeDiagnostics:
    """Socket diagnostics of a host whose sockets are these."""

    listed: tuple[sockdiag.Socket, ...] = ()

    def sockets(self) -> tuple[sockdiag.Socket, ...]:
        return self.listed

    def find(self, *_: object) -> None:
        return None

    def __enter__(self) -> FakeDiagnostics:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(autouse=True)
def started_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDiagnostics, "listed", ())
    monkeypatch.setattr(source, "Diagnostics", FakeDiagnostics)
    monkeypatch.setattr(source.time, "monotonic_ns", lambda: 0)
    monkeypatch.setattr(tracefs, "drop_reasons", lambda: {5: "NO_ROOM"})


def path_of(remote: str, interface: str) -> Path | None:
    return MEASURED if (remote, interface) == ("10.9.0.2", "rail1") else None


def source_on(
    kernel: Kernel, *known: Path, types: tuple[str, ...] = ("tcp_flow", "tcp_path"), tcp: Tcp | None = None
) -> tuple[TcpSource, Subscription]:
    bus = Bus()
    subscription = bus.subscribe(frozenset(types), 10_000)
    made = TcpSource(
        AgentConfig(host="h1", peers=[], tcp=tcp or Tcp()),
        cast(Loaded, kernel),
        Interfaces(lambda index: NAMES.get(index, f"if{index}")),
        bus,
        path_of,
        lambda: known,
    )
    return made, subscription


def windows(subscription: Subscription) -> Window:
    """Per interface and path, the segments retransmitted within the window and in total."""
    return {
        (signal.interface, signal.path): (signal.retransmitted_segments, signal.total_segments)
        for signal in subscription.read()
        if isinstance(signal, TcpPath)
    }


def told(subscription: Subscription) -> list[int]:
    """The connections that were published, by local port."""
    return [signal.local_port for signal in subscription.read() if isinstance(signal, TcpFlow)]


def run(made: TcpSource, now_ns: int) -> None:
    """Tick as the agent does, until all that is due at this time is done."""
    for _ in range(1000):
        if made.tick(now_ns) > now_ns:
            return
    pytest.fail("there is always more to do")


# ---- sums ----


def test_a_path_has_what_was_counted_in_the_window() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.paths.update(path_key(), counts(5, tcp_tables.TIMEOUT, timeouts=2, segments_out=50, sent_bytes=9000))
    kernel.interfaces.update(7, counts(5, tcp_tables.TIMEOUT, timeouts=2, segments_out=50, sent_bytes=9000))
    made.read(SECOND)
    (path,) = (each for each in subscription.read() if isinstance(each, TcpPath))
    assert (path.interface, path.path, path.window_ns) == ("rail1", MEASURED, SECOND)
    assert path.retransmitted == Retransmissions(timeout=5)
    assert (path.retransmitted_segments, path.timeouts, path.segments_out, path.sent_bytes) == (5, 2, 50, 9000)
    kernel.paths.update(path_key(), counts(8, tcp_tables.TIMEOUT, timeouts=2, segments_out=70, sent_bytes=9000))
    kernel.interfaces.update(7, counts(8, tcp_tables.TIMEOUT, timeouts=2, segments_out=70, sent_bytes=9000))
    made.read(2 * SECOND)
    (path,) = (each for each in subscription.read() if isinstance(each, TcpPath))
    assert (path.retransmitted_segments, path.timeouts, path.segments_out, path.total_segments) == (3, 0, 20, 8)
    assert path.retransmitted_share == 3 / 20


def test_an_interface_that_is_renamed_is_told_by_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.interfaces.update(8, counts(5))
    made.read(SECOND)
    assert windows(subscription)["rail2", None] == (5, 5)
    monkeypatch.setitem(NAMES, 8, "other")
    kernel.interfaces.update(8, counts(7))
    made.read(2 * SECOND)
    told = windows(subscription)
    assert (told["rail2", None], told["other", None]) == ((0, 5), (2, 2))


def test_the_rest_of_an_interface_has_no_path() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.paths.update(path_key(), counts(5))
    kernel.paths.update(path_key(remote=3), counts(4))
    kernel.paths.update(path_key(ifindex=8), counts(2))
    kernel.interfaces.update(7, counts(12))  # three segments found tcp_paths full
    kernel.interfaces.update(8, counts(2))
    kernel.interfaces.update(0, counts(1))
    made.read(SECOND)
    assert windows(subscription) == {
        ("rail1", MEASURED): (5, 5),
        ("rail1", None): (7, 7),
        ("rail2", None): (2, 2),
        ("others", None): (1, 1),
    }
    made.read(2 * SECOND)
    assert set(windows(subscription).values()) == {(0, 5), (0, 7), (0, 2), (0, 1)}


def test_a_count_seen_at_the_path_before_its_interface_is_no_count_of_the_rest() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.paths.update(path_key(), counts(5, sent_bytes=100))
    kernel.interfaces.update(7, counts(3, sent_bytes=40))
    made.read(SECOND)
    assert windows(subscription) == {("rail1", MEASURED): (5, 5)}
    kernel.interfaces.update(7, counts(6, sent_bytes=100))
    made.read(2 * SECOND)
    assert windows(subscription) == {("rail1", MEASURED): (0, 5), ("rail1", None): (1, 1)}


def test_what_is_sent_while_the_sums_are_read_is_no_count_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is on a measured path; it goes on between the look at one map and the look at the other."""
    kernel = Kernel()
    made, subscription = source_on(kernel)
    sent = 0

    def sends_on(look: Callable[[], object]) -> Callable[[], object]:
        def read() -> object:
            nonlocal sent
            found, sent = look(), sent + 7
            kernel.paths.update(path_key(), counts(sent, sent_bytes=100 * sent))
            kernel.interfaces.update(7, counts(sent, sent_bytes=100 * sent))
            return found

        return read

    for each in (kernel.paths, kernel.interfaces):
        monkeypatch.setattr(each, "read", sends_on(each.read))
    for second in range(1, 6):
        made.read(second * SECOND)
        told = windows(subscription)
        assert set(told) <= {("rail1", MEASURED)}
    assert {where: total for where, (_, total) in told.items()} == {("rail1", MEASURED): sent - 7}


def test_interfaces_beyond_the_table_are_counted_once() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.paths.update(path_key(ifindex=99), counts(4))
    kernel.interfaces.update(0, counts(5))  # one of them found tcp_paths full, too
    made.read(SECOND)
    assert windows(subscription) == {("if99", None): (4, 4), ("others", None): (1, 1)}


def test_a_path_over_which_nothing_is_sent_says_so() -> None:
    made, subscription = source_on(Kernel(), MEASURED)
    made.read(SECOND)
    assert windows(subscription) == {("rail1", MEASURED): (0, 0)}


def test_an_interface_that_is_gone_keeps_its_index_for_a_name() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.interfaces.update(9, counts(3))
    made.read(SECOND)
    assert windows(subscription) == {("if9", None): (3, 3)}


def test_a_crowded_path_map_loses_idle_rows_of_no_path_and_no_count() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    for remote in range(2, 9):
        kernel.paths.update(path_key(remote), counts(1))
    kernel.interfaces.update(7, counts(7))
    made.read(SECOND)
    assert len(kernel.paths.rows) == 7  # all were busy
    kernel.paths.update(path_key(5), counts(3))
    kernel.interfaces.update(7, counts(9))
    made.read(2 * SECOND)
    left = {int(key["remote"]["bytes"][15]) for key in kernel.paths.read()[0]}
    assert left == {2, 5}  # the measured one, and the one that was busy
    windows(subscription)
    kernel.paths.update(path_key(6), counts(2))  # back again, from zero
    kernel.paths.update(path_key(2), counts(2))
    kernel.interfaces.update(7, counts(12))
    made.read(3 * SECOND)
    assert windows(subscription) == {("rail1", MEASURED): (1, 2), ("rail1", None): (2, 10)}


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=8))
def test_no_segment_is_lost_or_counted_twice(steps: list[list[int]]) -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    places = ((2, 7), (3, 7), (2, 8), (4, 8))
    sums = [0] * len(places)
    got: dict[tuple[str, Path | None], int] = {}
    for step, more in enumerate(steps, start=1):
        sums = [before + each for before, each in zip(sums, more, strict=True)]
        for (remote, ifindex), value in zip(places, sums, strict=True):
            kernel.paths.update(path_key(remote, ifindex), counts(value))
        for ifindex in (7, 8):
            total = sum(value for (_, each), value in zip(places, sums, strict=True) if each == ifindex)
            kernel.interfaces.update(ifindex, counts(total))
        made.read(step * SECOND)
        for where, (segments, total) in windows(subscription).items():
            got[where] = got.get(where, 0) + segments
            assert got[where] == total
    assert got.get(("rail1", MEASURED), 0) == sums[0]
    assert got.get(("rail1", None), 0) == sums[1]
    assert got.get(("rail2", None), 0) == sums[2] + sums[3]


def test_the_host_has_the_sum_of_its_interfaces() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_host",))
    kernel.interfaces.update(7, counts(5, timeouts=1, resets_refused=4, spurious=2))
    kernel.interfaces.update(0, counts(2, tcp_tables.SYN, zero_windows=3))
    kernel.count("flows_created", 12)
    kernel.count("flows_replaced", 2)
    kernel.count("met", 11)
    made.read(SECOND)
    (host,) = subscription.read()
    assert isinstance(host, TcpHost)
    assert host.retransmitted == Retransmissions(fast=5, syn=2)
    assert (host.retransmitted_segments, host.timeouts, host.resets_refused) == (7, 1, 4)
    assert (host.spurious_segments, host.zero_windows) == (2, 3)
    assert (host.flows, host.capacity, host.created, host.evicted) == (10, 1000, 11, 0)


# ---- other network namespaces ----


def namespace(segments: int, **others: int) -> tuple[NDArray[Any], int, int]:
    return counts(segments, segments_out=100, **others), 3, 0


def test_namespaces_have_sums_of_their_own() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_namespace", "tcp_path", "tcp_host"))
    kernel.namespaces.update(4242, namespace(5, timeouts=1))
    kernel.namespaces.update(4243, namespace(0))
    made.read(SECOND)
    first = subscription.read()
    assert {each.netns: each.total_segments for each in first if isinstance(each, TcpNamespace)} == {4242: 5, 4243: 0}
    assert not any(each.retransmitted_segments for each in first if isinstance(each, TcpPath | TcpHost))
    kernel.namespaces.update(4242, namespace(7, timeouts=1))
    made.read(2 * SECOND)
    (only,) = (each for each in subscription.read() if isinstance(each, TcpNamespace))  # nothing new of the other
    assert (only.namespace, only.netns, only.connections) == ("netns:4242", 4242, 3)
    assert (only.retransmitted_segments, only.timeouts, only.total_segments) == (2, 0, 7)
    for window in range(3, 17):
        made.read(window * SECOND)
    assert {each.netns for each in subscription.read() if isinstance(each, TcpNamespace)} == {4242, 4243}


def test_idle_namespaces_make_room() -> None:
    kernel = Kernel()
    made, _ = source_on(kernel, types=("tcp_namespace",))
    for netns in range(7):  # of eight
        kernel.namespaces.update(100 + netns, namespace(1))
    made.read(SECOND)
    kernel.namespaces.update(103, namespace(2))
    made.read(2 * SECOND)
    assert kernel.namespaces.read()[0].tolist() == [103]


def test_connections_of_other_namespaces_are_no_business_of_who_steers() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    busy = {"mss": 1448, "rate_delivered": 20, "rate_interval_us": 1000}
    kernel.flows.update(flow_key(40000), flow(**busy))
    kernel.flows.update(flow_key(40001), flow(netns=4242, ifindex=0, cookie=2, **busy))
    run(made, SECOND)
    flows = {each.local_port: each for each in subscription.read() if isinstance(each, TcpFlow)}
    assert {port: each.namespace for port, each in flows.items()} == {40000: "", 40001: "netns:4242"}
    assert (flows[40001].interface, flows[40001].path) == ("", None)
    for port, cookie, netns in ((40000, 1, 0), (40001, 2, 4242)):
        kernel.flows.update(flow_key(port), flow(last_ns=SECOND + 1, netns=netns, cookie=cookie, **busy))
    made.tick(SECOND + 100_000_000)
    assert told(subscription) == [40000], "of the busiest only ours"


# ---- single connections ----


def test_a_row_says_everything() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    row = flow(
        3, srtt_us=250, min_rtt_us=90, cwnd=10, ssthresh=7, mss=1448, rate_delivered=20, rate_interval_us=1000, flags=1
    )
    row["counts"] = counts(3, tcp_tables.TAIL_PROBE, retransmitted_bytes=4344, timeouts=1, spurious=2, delivered=80)
    row["congestion_ns"] = (5, 4, 3, 2, 1)
    row["congestion"], row["ecn_flags"] = 3, 5
    kernel.flows.update(flow_key(40000), row)
    run(made, SECOND)
    (told_,) = (each for each in subscription.read() if isinstance(each, TcpFlow))
    assert (told_.local, told_.local_port, told_.remote, told_.remote_port) == ("10.9.0.1", 40000, "10.9.0.2", 5201)
    assert (told_.interface, told_.path, told_.state) == ("rail1", MEASURED, "established")
    assert told_.owner == Owner()
    assert told_.retransmitted == Retransmissions(tail_probe=3)
    assert (told_.retransmitted_segments, told_.retransmitted_bytes) == (3, 4344)
    assert (told_.timeouts, told_.spurious_segments, told_.delivered_segments) == (1, 2, 80)
    assert (told_.srtt_ns, told_.min_rtt_ns) == (250_000, 90_000)
    assert (told_.cwnd_segments, told_.ssthresh_segments) == (10, 7)
    assert told_.delivery_rate_bps == 20 * 1448 * 8 * 1000
    assert (told_.ecn, told_.congestion) == ("negotiated", "recovery")
    assert (told_.congestion_times.open_ns, told_.congestion_times.loss_ns) == (5, 1)
    assert (told_.first_ns, told_.last_ns, told_.drops) == (1, SECOND, {})


def test_a_stall_is_what_the_kernel_says_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows in Loss are asked about; one has ended since, and of other namespaces the kernel cannot be asked."""
    stalls = {2: Stall(3, 1_632_000_000, 1_400_000_000), 3: None}
    asked: list[int] = []

    def stall(self: TcpSource, identity: Identity) -> Stall | None:
        asked.append(identity.cookie)
        return stalls[identity.cookie]

    monkeypatch.setattr(TcpSource, "_stall", stall)
    kernel = Kernel()
    made, subscription = source_on(kernel)
    for cookie, more in enumerate(({"congestion": 3}, {}, {}, {"flags": CLOSED}, {"netns": 7}), 1):
        kernel.flows.update(flow_key(40000 + cookie), flow(**{"cookie": cookie, "congestion": 4} | more))
    run(made, SECOND)
    found = {each.local_port: each.stall for each in subscription.read() if isinstance(each, TcpFlow)}
    assert sorted(asked) == [2, 3] and len(found) == 5
    assert {port: each for port, each in found.items() if each} == {40002: stalls[2]}


def test_what_is_not_known_is_not_made_up() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.flows.update(flow_key(40000), flow(ssthresh=0x7FFFFFFF, congestion=255, state=200))
    run(made, SECOND)
    (told_,) = (each for each in subscription.read() if isinstance(each, TcpFlow))
    assert told_.srtt_ns is told_.min_rtt_ns is told_.cwnd_segments is None
    assert told_.ssthresh_segments is told_.delivery_rate_bps is None
    assert (told_.congestion, told_.state, told_.ecn) == ("unknown", "state_200", "off")


def test_only_what_was_looked_at_since_is_told_again() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.flows.update(flow_key(1), flow(last_ns=SECOND))
    kernel.flows.update(flow_key(2), flow(last_ns=SECOND, flags=CLOSED))
    run(made, SECOND)
    assert told(subscription) == [1, 2]
    run(made, 3 * SECOND)
    told(subscription)  # what was stamped shortly before the last reading may have been written after it
    run(made, 5 * SECOND)
    assert told(subscription) == []
    kernel.flows.update(flow_key(1), flow(last_ns=11 * SECOND // 2))
    run(made, 6 * SECOND)
    assert told(subscription) == [1]


def test_idle_connections_are_told_now_and_then_and_closed_ones_are_not() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.flows.update(flow_key(1), flow(last_ns=SECOND))
    kernel.flows.update(flow_key(2), flow(last_ns=SECOND, flags=CLOSED))
    for window in range(10, 19):
        run(made, window * SECOND)
    assert told(subscription) == [1, 2, 1, 1]


def test_rows_are_read_only_while_somebody_listens() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_path",))
    kernel.flows.update(flow_key(1), flow(last_ns=SECOND))
    kernel.paths.update(path_key(), counts(5))
    kernel.interfaces.update(7, counts(5))
    run(made, SECOND)
    assert windows(subscription) == {("rail1", MEASURED): (5, 5)}
    assert kernel.flows.read_at_once == []


def test_a_large_table_is_read_in_parts() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    for port in range(3 * SLICE):
        kernel.flows.update(flow_key(port), flow(last_ns=SECOND))
    made.tick(SECOND)
    assert len(told(subscription)) == SLICE
    made.tick(SECOND + 1)
    assert len(told(subscription)) == SLICE
    run(made, SECOND + 2)
    assert len(told(subscription)) == SLICE
    assert max(kernel.flows.read_at_once) == SLICE


def test_the_busiest_are_told_between_the_windows() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_flow",), tcp=Tcp(busiest=2, busiest_ms=100))
    for port, delivered in ((1, 100), (2, 300), (3, 0), (4, 200)):
        row = flow(last_ns=SECOND, rate_delivered=delivered, rate_interval_us=1000, mss=1448)
        kernel.flows.update(flow_key(port), row)
    run(made, SECOND)
    assert sorted(told(subscription)) == [1, 2, 3, 4]
    tenth = SECOND // 10
    run(made, SECOND + tenth)
    assert told(subscription) == [], "nothing was looked at since"
    for port in (1, 2, 3, 4):
        row = flow(last_ns=SECOND + tenth, rate_delivered=100, rate_interval_us=1000, mss=1448)
        kernel.flows.update(flow_key(port), row)
    run(made, SECOND + 2 * tenth + 1)
    assert sorted(told(subscription)) == [2, 4]
    kernel.flows.delete(flow_key(2))
    kernel.flows.update(flow_key(4), flow(last_ns=SECOND + 3 * tenth))
    run(made, SECOND + 4 * tenth)
    assert told(subscription) == [4], "and a row that has gone is none"


def test_of_many_busy_ones_a_slice_is_told_at_a_time() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_flow",))
    for port in range(600):
        row = flow(last_ns=SECOND, rate_delivered=100, rate_interval_us=1000, mss=1448)
        kernel.flows.update(flow_key(port), row)
    run(made, SECOND)
    now, heard = SECOND, list(told(subscription))
    for port in range(600):
        kernel.flows.update(flow_key(port), flow(last_ns=SECOND + 1))
    while now < SECOND + 250 * 10**6:
        now += 10**6
        run(made, now)
        several = told(subscription)
        assert len(several) <= busiest.SLICE
        heard += several
    assert sorted(heard) == sorted([*range(600), *range(600)]), "each once more"


def test_while_nobody_listens_the_busiest_are_not_looked_up() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("tcp_flow",))
    kernel.flows.update(flow_key(1), flow(last_ns=SECOND, rate_delivered=100, rate_interval_us=1000, mss=1448))
    run(made, SECOND)
    subscription.close()
    kernel.flows.rows.clear()
    run(made, SECOND + SECOND // 2)
    assert made._busiest.due_ns() > 10 * SECOND


ROWS = st.integers(0, 4).flatmap(
    lambda n: st.tuples(
        arrays.arrays("u1", (n, tcp_tables.KEY.itemsize)), arrays.arrays("u1", (n, tcp_tables.FLOW.itemsize))
    )
)


@given(ROWS)
def test_no_bytes_break_the_signals(raw: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    keys = raw[0].copy().view(tcp_tables.KEY).reshape(-1)
    rows = raw[1].copy().view(tcp_tables.FLOW).reshape(-1)
    asked: list[Identity] = []
    made = Rows(
        "h1",
        lambda index: f"if{index}",
        path_of,
        lambda _, __: Owner(),
        lambda one, _: asked.append(one),
        lambda *_: "",
        lambda _: Stall(1, 2, 3),
    )
    signals = list(made.signals(keys, rows, [{}] * len(rows), made.stalls(keys, rows), 1, 2))
    assert len(signals) == len(rows)
    assert len(asked) == int(((rows["flags"] & CLOSED == 0) & (rows["netns"] == 0)).sum())


@given(ROWS)
def test_connections_as_arrays_say_what_the_signals_say_whatever_the_bytes(raw: tuple[np.ndarray, np.ndarray]) -> None:  # type: ignore[type-arg]
    keys = raw[0].copy().view(tcp_tables.KEY).reshape(-1)
    rows = raw[1].copy().view(tcp_tables.FLOW).reshape(-1)

    def owner(cookie: int, _: int) -> Owner:
        return Owner(4711 + cookie % 2)

    def namespace(cookie: int, *_: int) -> str:
        return str(cookie or "")

    made = Rows("h1", str, path_of, owner, lambda *_: None, namespace, lambda _: Stall(1, 2, 3))
    stalls = made.stalls(keys, rows)
    signals = list(made.signals(keys, rows, [{}] * len(rows), stalls, 1, 2))
    found = made.connections(keys, rows, stalls, 1)
    assert found.counts.astype(np.uint64).tolist() == [[getattr(each, name) for name in COUNTS] for each in signals]
    assert found.srtt_ns.tolist() == [each.srtt_ns or 0 for each in signals]
    assert found.first_ns.astype(np.uint64).tolist() == [each.first_ns for each in signals]
    assert found.foreign.tolist() == [each.namespace != "" for each in signals]
    assert [found.stalls.get(at) for at in range(len(rows))] == [each.stall for each in signals]
    assert [found.describe(at) for at in range(len(rows))] == [
        (each.owner, each.path, each.interface) for each in signals
    ]
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711), member(4712, 1)]})
    for _ in range(3):
        traffic.take(found)
        traffic.take(replace(found, ifindex=found.ifindex[::-1].copy()))
        traffic.window(1)


def test_a_reader_in_the_process_is_given_every_connection_first_and_without_signals() -> None:
    kernel, bus, feed = Kernel(), Bus(), Feed()
    config, interfaces = AgentConfig("h1", []), Interfaces(lambda index: NAMES.get(index, f"if{index}"))
    made = TcpSource(config, cast(Loaded, kernel), interfaces, bus, path_of, feed=feed)
    for port in range(3):
        kernel.flows.update(flow_key(port), flow(last_ns=SECOND, cookie=port + 1, flags=CLOSED * (port == 2)))
    run(made, SECOND)
    given: list[list[int]] = []
    ended: list[int] = []

    def read(part: Connections) -> None:
        given.append(part.cookie.tolist())
        ended.extend(part.cookie[part.closed].tolist())

    feed.reader = read
    kernel.flows.update(flow_key(1), flow(last_ns=5 * SECOND, cookie=2))
    for second in range(5, 10):
        run(made, second * SECOND)
    assert given[0] == [1, 2, 3] and ended == [3], "also that which ended"
    assert given[1:] == [[2], [2], [], [1, 2]], "what is new since the second before the last walk, then all"


# ---- the table ----


class Clock:
    """Each look takes a millisecond."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10**6
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(table.time, "monotonic_ns", made)
    return made


def test_without_evictions_nothing_is_counted(clock: Clock) -> None:
    kernel = Kernel()
    made = 1000 - 2 * 128
    counted = Table(cast(Map, kernel.flows), lambda: made, cpus=2)
    assert counted.remembered() == (744, 0)
    for second in range(20):
        counted.tick(second * SECOND)
    assert kernel.flows.read_at_once == []


def test_evictions_are_what_was_made_and_is_not_there(clock: Clock) -> None:
    kernel = Kernel()
    made = [5000]
    for port in range(900):
        kernel.flows.update(flow_key(port), flow())
    counted = Table(cast(Map, kernel.flows), lambda: made[0], cpus=2)
    assert counted.remembered() == (1000, 4000)  # as many as there can be, until it is counted
    now_ns = counted.tick(0)
    while counted.walking:
        now_ns = counted.tick(now_ns)
    assert counted.remembered() == (900, 4100)
    made[0] += 50
    assert counted.remembered() == (950, 4100)
    made[0] += 500
    assert counted.remembered() == (1000, 4550)
    now_ns = counted.tick(20 * SECOND)
    while counted.walking:
        now_ns = counted.tick(now_ns)
    assert counted.remembered() == (900, 4650)


@pytest.mark.parametrize(("listened_to", "share"), [(True, 0.2), (False, 0.02)])
def test_reading_keeps_to_its_share_of_the_time(clock: Clock, listened_to: bool, share: float) -> None:
    kernel = Kernel()
    for port in range(900):
        kernel.flows.update(flow_key(port), flow())
    counted = Table(cast(Map, kernel.flows), lambda: 5000, cpus=2)
    if listened_to:
        counted.walk(lambda keys, rows: None)
    now_ns = counted.tick(0)
    while counted.walking:
        assert now_ns >= 10**6 / share
        due_ns = counted.tick(now_ns)
        if counted.walking:
            assert due_ns - now_ns >= 10**6 / share
        now_ns = due_ns


# ---- drops ----


def test_dropped_packets_by_reason() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, types=("packet_drops",))
    kernel.drops_by_reason.update(5, 3)
    made.read(SECOND)
    kernel.drops_by_reason.update(5, 4)
    kernel.drops_by_reason.update(6, 2)
    kernel.drops_by_reason.update(1023, 1)
    made.read(2 * SECOND)
    first, second = subscription.read()
    assert isinstance(first, PacketDrops)
    assert isinstance(second, PacketDrops)
    assert [(each.reason, each.window_packets, each.total_packets) for each in first.reasons] == [("NO_ROOM", 3, 3)]
    assert [(each.reason, each.window_packets, each.total_packets) for each in second.reasons] == [
        ("NO_ROOM", 1, 4),
        ("reason_6", 2, 2),
        ("other", 1, 1),
    ]


def test_dropped_packets_of_a_connection() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel)
    kernel.flows.update(flow_key(1), flow(skaddr=77))
    kernel.flows.update(flow_key(2), flow(skaddr=78))
    kernel.drops_by_socket.update((77, 5), 3)
    kernel.drops_by_socket.update((77, 9), 1)
    kernel.drops_latest.update(0, ((77, 5), 4))
    run(made, SECOND)
    lost = {each.local_port: each.drops for each in subscription.read() if isinstance(each, TcpFlow)}
    assert lost == {1: {"NO_ROOM": 7, "reason_9": 1}, 2: {}}


def test_a_run_of_drops_that_ends_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from the row of a CPU to the table in the meantime is counted, and once."""
    kernel = Kernel()
    kernel.drops_by_socket.update((77, 5), 3)
    kernel.drops_latest.update(0, ((77, 5), 4))
    drops, read = Drops(cast(Loaded, kernel), {}), kernel.drops_by_socket.read

    def ended() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        found = read()
        kernel.drops_by_socket.update((77, 5), 7)
        kernel.drops_latest.update(0, ((78, 5), 1))
        return found

    monkeypatch.setattr(kernel.drops_by_socket, "read", ended)
    keys, packets = drops.by_socket()
    assert dict(zip(keys["rx_sk"].tolist(), packets.tolist(), strict=True)) == {77: 7, 78: 1}


def drop_rows(*sockets: tuple[int, int, int]) -> np.ndarray:  # type: ignore[type-arg]
    """Rows of (address, cookie, first_ns)."""
    return np.array([flow(skaddr=each[0], cookie=each[1], first_ns=each[2]) for each in sockets], tcp_tables.FLOW)


def test_an_address_that_belongs_to_another_socket() -> None:
    lost = SocketDrops()
    keys = np.array([(77, 5)], tcp_tables.DROP_KEY)
    lost.refresh(keys, np.array([3]))
    assert lost.of(drop_rows((77, 1, 100), (78, 2, 100))) == [{5: 3}, {}]
    lost.refresh(keys, np.array([4]))
    assert lost.of(drop_rows((77, 9, 200), (77, 1, 100))) == [{5: 1}, {}]
    lost.refresh(keys, np.array([6]))
    assert lost.of(drop_rows((77, 1, 100), (77, 9, 200))) == [{}, {5: 3}]
    lost.refresh(keys[:0], np.array([], "u8"))
    assert lost.of(drop_rows((77, 9, 200))) == [{}]
    assert len(lost) == 0


def test_without_drop_reasons_the_rest_works() -> None:
    kernel = Kernel(has_drops=False)
    made, subscription = source_on(kernel)
    kernel.flows.update(flow_key(1), flow())
    run(made, SECOND)
    assert told(subscription) == [1]
    assert not any(name.startswith("drops") for name in made.drops())


# ---- beginning, end, and what is lost ----


def socket_with(cookie: int, segments: int, congestion: int = 0) -> sockdiag.Socket:
    raw = bytearray(248)
    raw[1] = congestion
    raw[100:104] = segments.to_bytes(4, "little")
    return sockdiag.Socket(cookie, 2, 1, "", 1, "", 2, 0, 0, 0, 0, 0, sockdiag.tcp_info(bytes(raw)))


def request_with(cookie: int, retransmits: int) -> sockdiag.Socket:
    return sockdiag.Socket(cookie, 2, 3, "", 1, "", 2, 0, 0, 0, 0, retransmits, None)


def test_what_sockets_did_before_is_told_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = (socket_with(11, 3, congestion=4), request_with(12, 2), socket_with(0, 7), socket_with(13, 0))
    monkeypatch.setattr(FakeDiagnostics, "listed", earlier)
    monkeypatch.setattr(baselines.netns, "cookie", lambda: 4711)
    kernel = Kernel()
    made, _ = source_on(kernel)
    cookies, values = kernel.accounted.read()
    assert dict(zip(cookies.tolist(), values.tolist(), strict=True)) == {11: (3, 0, 0, 1, 4), 12: (2, 0, 0, 0, 0)}
    assert made.drops()["tcp_baselines_full"] == 1
    assert kernel.settings.read()[1].tolist() == [(4711, 100_000_000, 2)]
    assert kernel.interfaces.read()[0].tolist() == [0]


def test_without_socket_diagnostics_the_rest_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> None:
        raise sockdiag.SwerveError("no socket diagnostics")

    monkeypatch.setattr(FakeDiagnostics, "__enter__", refused)
    kernel = Kernel()
    made, subscription = source_on(kernel)
    assert made.failed == {"earlier TCP connections": "no socket diagnostics"}
    kernel.flows.update(flow_key(1), flow())
    run(made, SECOND)
    run(made, 20 * SECOND)
    assert told(subscription) == [1, 1]


def test_requests_that_died_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDiagnostics, "listed", (socket_with(1, 4),))
    kernel = Kernel()
    made, _ = source_on(kernel)
    kernel.accounted.update(2, (3, 0, 100 * SECOND, 0, 0))
    made.read(399 * SECOND)
    assert len(kernel.accounted.rows) == 2
    made.read(2 * 399 * SECOND)
    assert kernel.accounted.read()[0].tolist() == [1]


def test_every_loss_has_a_name() -> None:
    kernel = Kernel()
    made, _ = source_on(kernel)
    for value, counter in enumerate(tcp_tables.COUNTERS, start=1):
        kernel.count(counter, value)
    kernel.drops_by_reason.update(1023, 20)
    kernel.drops_sockets_full.update(0, 21)
    made.read(SECOND)
    assert made.drops() == {
        "tcp_baselines_full": 0,
        "tcp_flows_full": 3,
        "tcp_paths_full": 4,
        "tcp_interfaces_full": 5,
        "tcp_lost": 6,
        "tcp_synacks_full": 7,
        "tcp_deferred": 8,
        "tcp_congestion_full": 9,
        "tcp_unsized": 10,
        "tcp_congestion_missed": 12,
        "tcp_namespaces_full": 13,
        "tcp_names_refused": 0,
        "drops_other": 20,
        "drops_sockets_full": 21,
    }


def test_ticks_keep_their_distance() -> None:
    kernel = Kernel()
    made, subscription = source_on(kernel, MEASURED, types=("tcp_path",))
    assert made.tick(SECOND - 1) == SECOND
    assert subscription.read() == []
    assert made.tick(SECOND + 5) == 2 * SECOND
    assert len(subscription.read()) == 1
    assert made.tick(10 * SECOND) == 11 * SECOND  # held up: one reading, not nine
    assert len(subscription.read()) == 1


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (bytes(10) + b"\xff\xff\x0a\x09\x00\x02", "10.9.0.2"),
        (bytes.fromhex("fd000009000000000000000000000002"), "fd00:9::2"),
        (bytes(15) + b"\x01", "::1"),
    ],
)
def test_address(raw: bytes, text: str) -> None:
    assert addresses.text(raw) == addresses.text(raw) == text
    assert addresses.texts(np.frombuffer(raw * 3, "u1").reshape(3, 16)) == [text] * 3
