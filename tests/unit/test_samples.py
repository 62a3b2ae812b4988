"""Application delays without a kernel: what peers send is checked, rates keep the budget, delays are the truth."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from packets import mapped

from pytools.config import AgentConfig, Peer, Samples
from pytools.estimators.offsets import Offset
from pytools.ipc.bus import Bus, Subscription
from pytools.kernel.bpf import contract
from pytools.signals import AppDelay, Path
from pytools.sources.interfaces import Interfaces
from pytools.sources.samples import batches as wire
from pytools.sources.samples import reports as sample_reports
from pytools.sources.samples.joins import GUARD_NS, OFF, PATIENCE_NS, Rates, concatenated
from pytools.sources.samples.rates import TCP_CEILING, TCP_FLOOR, RateControl, lost_of
from pytools.sources.samples.source import EGRESS, INGRESS, SampleSource, tick_ns

S, MS = 1_000_000_000, 1_000_000
START_NS = 1000 * S
TURN = 1 << 32

# ---- what comes from a peer ----

flow_rows = st.builds(
    lambda ends, ports, protocol: (*ends, *ports, protocol),
    st.tuples(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16)).map(
        lambda ends: tuple(np.frombuffer(end, np.uint8) for end in ends)
    ),
    st.tuples(st.integers(0, 65535), st.integers(0, 65535)),
    st.sampled_from([wire.TCP, wire.UDP]),
)


@st.composite
def batches(draw: st.DrawFn) -> wire.Batch:
    flows = np.array(draw(st.lists(flow_rows, max_size=5)), wire.FLOW)
    count = draw(st.integers(len(flows), 12)) if len(flows) else 0
    samples = np.zeros(count, wire.SAMPLE)
    for sample in samples:
        sample["flow"] = draw(st.integers(0, len(flows) - 1))
        sample["at_ns"] = draw(st.integers(1, (1 << 62) - 1))
        is_tcp = flows["protocol"][sample["flow"]] == wire.TCP
        sample["key"] = draw(st.integers(0, TURN - 1 if is_tcp else (1 << 64) - 1))
    return wire.Batch(draw(st.integers(0, 63)), draw(st.integers(0, 63)), flows, samples)


@given(batches())
def test_a_batch_comes_out_as_it_went_in(batch: wire.Batch) -> None:
    back = wire.decode(wire.encode(batch))
    assert (back.tcp_rate, back.udp_rate) == (batch.tcp_rate, batch.udp_rate)
    assert back.flows.tobytes() == batch.flows.tobytes()
    assert back.samples.tobytes() == batch.samples.tobytes()


@given(batches(), st.integers(0, 400), st.integers(1, 255))
def test_a_batch_with_a_byte_changed_is_refused_or_makes_sense(batch: wire.Batch, place: int, change: int) -> None:
    payload = bytearray(wire.encode(batch))
    payload[place % len(payload)] ^= change
    try:
        back = wire.decode(bytes(payload))
    except wire.BadBatchError:
        return
    assert wire.encode(back)[:6] == bytes(payload[:6])
    assert (back.samples["flow"] < len(back.flows)).all()
    assert (back.samples["at_ns"] > 0).all()
    assert set(back.flows["protocol"].tolist()) <= {wire.TCP, wire.UDP}
    is_tcp = back.flows["protocol"][back.samples["flow"]] == wire.TCP
    assert (back.samples["key"][is_tcp] < TURN).all()


@given(batches(), st.integers(0, 400))
def test_half_a_batch_is_refused(batch: wire.Batch, size: int) -> None:
    payload = wire.encode(batch)
    with pytest.raises(wire.BadBatchError):
        wire.decode(payload[: size % len(payload)])
    with pytest.raises(wire.BadBatchError):
        wire.decode(payload + b"\0")


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for payload in (noise, b"SWsb\x01" + noise, b"SWsa\x01" + noise):
        try:
            wire.decode(payload)
        except wire.BadBatchError:
            continue
        assert len(payload) == 16, "an empty batch is all that noise can be"
    with pytest.raises(wire.BadBatchError):
        wire.decode_ask(noise)


def test_a_claim_of_more_than_fits_is_refused_without_reading_it() -> None:
    for flows, samples in ((0, wire.MOST_SAMPLES + 1), (2, 1), (0xFFFFFFFF, 0xFFFFFFFF)):
        with pytest.raises(wire.BadBatchError):
            wire.decode(struct.pack("<4sBBBxII", b"SWsb", 1, 0, 0, flows, samples))


def test_asks() -> None:
    assert wire.decode_ask(wire.encode_ask(5 * S)) == 5 * S
    for bad in (wire.encode_ask(wire.MOST_LEASE_NS + 1), wire.encode_ask(1)[:-1], wire.encode_ask(1) + b"\0"):
        with pytest.raises(wire.BadBatchError):
            wire.decode_ask(bad)


@given(st.lists(flow_rows, max_size=30))
def test_distinct_flows(rows: list[Any]) -> None:
    flows = np.array(rows + rows[:7], wire.FLOW)
    named, which = wire.distinct(flows)
    assert named[which].tobytes() == flows.tobytes()
    assert len({row.tobytes() for row in named}) == len(named) == len({row.tobytes() for row in flows})


def test_many_samples_take_several_batches() -> None:
    samples = np.zeros(2 * wire.MOST_SAMPLES + 1, wire.SAMPLE)
    samples["at_ns"] = 1 + np.arange(len(samples))
    flows = np.zeros(len(samples), wire.FLOW)
    flows["protocol"], flows["source_port"] = wire.UDP, np.arange(len(samples)) // 100
    made = wire.batches(16, 3, flows, samples)
    assert [len(batch.samples) for batch in made] == [wire.MOST_SAMPLES, wire.MOST_SAMPLES, 1]
    back = [wire.decode(wire.encode(batch)) for batch in made]
    ports = np.concatenate([batch.flows["source_port"][batch.samples["flow"]] for batch in back])
    assert ports.tolist() == flows["source_port"].tolist()
    assert [len(batch.samples) for batch in wire.batches(16, 3, flows[:0], samples[:0])] == [0]


@given(st.lists(batches(), min_size=1, max_size=4))
def test_records_are_put_together_as_by_numpy(parts: list[wire.Batch]) -> None:
    for column in ("flows", "samples"):
        arrays = [getattr(part, column) for part in parts]
        whole = concatenated(arrays)
        assert whole.dtype == arrays[0].dtype
        assert whole.tobytes() == np.concatenate(arrays).tobytes()


# ---- rates ----


@given(st.floats(0, 3e10), st.floats(0, 3e7), st.integers(100, 100_000))
def test_rates_come_to_rest_within_the_budget(bytes_per_s: float, datagrams_per_s: float, per_s: int) -> None:
    control = RateControl(per_s)
    control.start(START_NS)
    settled = []
    for turn in range(1200):
        tcp = int(bytes_per_s / (1 << control.tcp) / 5)
        udp = int(datagrams_per_s / (1 << control.udp) / 5)
        control.observe(START_NS + (turn + 1) * 200 * MS, tcp, udp, 0)
        if turn >= 1000:
            settled.append((control.tcp, control.udp))
    assert len(set(settled)) == 1, "rates that swing"
    tcp_rate, udp_rate = settled[0]
    total = bytes_per_s / (1 << tcp_rate) + datagrams_per_s / (1 << udp_rate)
    if tcp_rate < TCP_CEILING:
        assert total <= per_s + 11  # what is counted are whole samples of a fifth of a second
    if tcp_rate > TCP_FLOOR and udp_rate > 0:
        assert total >= 0.2 * per_s, "no finer than it might be"


def test_a_flood_is_answered_at_once() -> None:
    control = RateControl(2000)
    control.start(START_NS)
    before = (control.tcp, control.udp)
    control.observe(START_NS + 200 * MS, 8000, 10, 0)
    assert control.tcp == before[0] + 5
    assert control.udp == before[1]


def test_buffers_that_hold_several_bytes_make_the_rate_coarser() -> None:
    control = RateControl(100_000)
    control.start(START_NS)
    for second in range(1, 30):
        big = 1 << max(0, 18 - control.tcp)  # BIG TCP: 256 KiB in a buffer
        control.observe(START_NS + second * S, 1000, 0, 1000 if big > 1 else 0)
    assert control.tcp == 18


@given(st.integers(10, 600_000), st.integers(1, 1_000_000))
def test_ticks_divide_a_window_and_leave_room_in_the_ring(window_ms: int, per_s: int) -> None:
    tick = tick_ns(window_ms * MS, per_s)
    assert 200 * MS <= tick <= 500 * MS
    if tick > 200 * MS:
        assert 2 * tick <= window_ms * MS
        assert window_ms * MS % tick < window_ms * MS // tick, "even parts, but for the rounding"
        assert 2 * per_s * tick <= 6553 * S


# ---- the rates that were in force ----


@given(st.lists(st.tuples(st.integers(0, 3 * S), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 5 * S))
def test_the_coarsest_rate_since(changes: list[tuple[int, int]], ago_ns: int) -> None:
    rates, now_ns, log = Rates(), START_NS, [(0, OFF)]
    for later_ns, rate in changes:
        now_ns += later_ns
        rates.note(now_ns, rate, 0)
        log.append((now_ns, rate))
    since = now_ns - ago_ns
    ends = [at for at, _ in log[1:]] + [now_ns + 1]
    expected = max(rate for (_, rate), end in zip(log, ends, strict=True) if end > since)
    assert rates.coarsest(since)[0] == expected


# ---- two hosts ----

RECORD = np.dtype(
    [
        ("ts_ns", "u8"),
        ("seen_ns", "u8"),
        ("key", "u8"),
        ("local", [("bytes", "u1", 16)]),
        ("remote", [("bytes", "u1", 16)]),
        ("local_port", "u2"),
        ("remote_port", "u2"),
        ("ifindex", "u4"),
        ("protocol", "u1"),
        ("direction", "u1"),
        ("rate", "u1"),
        ("pad", "u1", 5),
    ]
)
ADDRESSES = {"a": "10.9.0.1", "b": "10.9.0.2"}
IFINDEX = 11


class KernelMap:
    """As much of a map as the source uses."""

    def __init__(self) -> None:
        self.key = np.dtype([("bytes", "u1", 16)])
        self.entries: dict[Any, Any] = {}
        self.counts = np.zeros(6, np.int64)

    def update(self, key: Any, value: Any) -> None:
        self.entries[key.tobytes() if hasattr(key, "tobytes") else key] = value

    def read_percpu_sum(self) -> NDArray[np.int64]:
        return self.counts.copy()


class Kernel:
    """A host's hooks: takes samples as sample.c would, by the settings that the source made."""

    def __init__(self) -> None:
        self.maps = {name: KernelMap() for name in ("sample_counters", "sample_settings", "sample_peers")}
        self.records: list[Any] = []
        self._event = os.eventfd(0)  # what a real ring is to epoll(7)

    def __del__(self) -> None:
        os.close(self._event)

    def fileno(self) -> int:
        return self._event

    def map(self, name: str) -> KernelMap:
        return self.maps[name]

    def ring(self, _name: str, _record: str) -> Kernel:
        return self

    def read(self) -> NDArray[Any]:
        records, self.records = self.records, []
        return np.array(records, RECORD)

    def see(self, local: str, remote: str, port: int, key: int, direction: int, at: tuple[int, int]) -> None:
        directions, tcp_rate, _, _ = self.maps["sample_settings"].entries.get(0, (0, OFF, OFF, 0))
        allowed = self.maps["sample_peers"].entries.get(mapped(remote), 0)
        if not directions & allowed & direction or key % (1 << tcp_rate):
            return
        ends = [(np.frombuffer(mapped(address), np.uint8),) for address in (local, remote)]
        ports = (port, 80) if direction == EGRESS else (80, port)
        self.records.append((*at, key, *ends, *ports, IFINDEX, wire.TCP, direction, tcp_rate, np.zeros(5, np.uint8)))


class World:
    """Hosts a and b, each with its agent; b's clock is what `ahead` says. a sends to b."""

    def __init__(self, ahead: Callable[[int], int] = lambda _: 0, shared: bool = False, per_s: int = 2000) -> None:
        self.now_ns = START_NS
        self.ahead = ahead
        self.mail: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        self.offset: Offset | None = None
        self.kernels = {name: Kernel() for name in "ab"}
        self.buses = {name: Bus() for name in "ab"}
        interfaces = Interfaces({IFINDEX: "rail1"}.__getitem__)
        self.sources = {}
        for name, other in ("ab", "ba"):
            peer = Peer(other, ADDRESSES[other], "shared" if shared else "free_running")
            config = AgentConfig(host=name, peers=[peer], samples=Samples(per_s=per_s))
            self.sources[name] = SampleSource(
                config,
                self.kernels[name],  # type: ignore[arg-type]
                interfaces,
                self.buses[name],
                self._hosts(name, other),
                lambda _: self.offset,
                lambda remote, interface: Path("a", "b", remote, "", interface),
            )

    def _hosts(self, name: str, other: str) -> Any:
        def send(topic: str, payload: bytes, to: str | None = None) -> None:
            assert to in (None, other)
            self.mail.setdefault((other, topic), []).append((name, payload))

        return SimpleNamespace(send=send, receive=lambda topic: self.mail.pop((name, topic), []))

    def pass_by(self, host: str, at_ns: int, key: int, port: int) -> None:
        local, remote = (ADDRESSES[each] for each in ("ab" if host == "a" else "ba"))
        stamp = at_ns + (self.ahead(at_ns) if host == "b" else 0)
        direction = EGRESS if host == "a" else INGRESS
        self.kernels[host].see(local, remote, port, key, direction, (stamp, at_ns))

    def send(self, key: int, delay_ns: int | None = 10_000, port: int = 5000, times: int = 1) -> None:
        """A byte leaves a; it arrives at b after the delay, or not at all."""
        for _ in range(times):
            self.pass_by("a", self.now_ns, key % TURN, port)
        if delay_ns is not None:
            self.pass_by("b", self.now_ns + delay_ns, key % TURN, port)

    def tick(self, after_ns: int = 200 * MS) -> None:
        self.now_ns += after_ns
        for source in self.sources.values():
            assert source.tick(self.now_ns) > self.now_ns

    def run(self, seconds: float, each: Callable[[int], None] = lambda _: None) -> None:
        for step in range(round(seconds * 5)):
            for part in range(10):
                self.now_ns += 2 * MS
                each(step * 10 + part)
            self.tick(180 * MS)

    def drops(self) -> dict[str, int]:
        return {name: count for name, count in self.sources["a"].drops().items() if count}


def one_path(world: World, seconds: float = 8, **how: Any) -> list[AppDelay]:
    """The signals of a stream of megabytes from a to b, once everything has settled."""
    subscription = world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.run(5, lambda n: world.send(n << 20, **how))
    subscription.read()
    world.run(seconds, lambda n: world.send((1000 + n) << 20, **how))
    return [signal for signal in subscription.read() if isinstance(signal, AppDelay)]


def test_hosts_that_nobody_asks_sample_nothing() -> None:
    world = World()
    world.run(3, lambda n: world.send(n << 20))
    assert all(kernel.maps["sample_settings"].entries.get(0, (0,))[0] == 0 for kernel in world.kernels.values())
    assert not world.mail
    assert world.drops() == {}


def test_the_sender_samples_what_it_sends_and_the_receiver_what_it_receives_for_as_long_as_it_is_wanted() -> None:
    world, subscription = listening()
    world.run(3, lambda n: world.send(n << 20))
    asked = {name: kernel.maps["sample_settings"].entries[0][0] for name, kernel in world.kernels.items()}
    assert asked == {"a": EGRESS, "b": INGRESS}
    assert world.kernels["b"].maps["sample_peers"].entries[mapped(ADDRESSES["a"])] == INGRESS
    subscription.close()
    world.run(7, lambda n: world.send(n << 20))
    assert all(kernel.maps["sample_settings"].entries[0][0] == 0 for kernel in world.kernels.values())


def test_delays_of_one_clock_are_exact() -> None:
    signals = one_path(World(shared=True), delay_ns=12_345)
    paths = [signal for signal in signals if not signal.local]
    flows = [signal for signal in signals if signal.local]
    assert len(paths) == len(flows) >= 7
    for signal in signals:
        assert signal.path == Path("a", "b", "10.9.0.2", "", "rail1")
        assert (signal.clock, signal.bound_ns, signal.hard_bound_ns) == ("synchronised", 200, 200)
        assert (signal.owd.p50_ns, signal.owd.p99_ns, signal.owd.max_ns) == (12_345,) * 3
        assert (signal.queueing.p50_ns, signal.queueing.max_ns) == (0, 0)
        assert signal.sampled == signal.joined == signal.owd.samples > 0
        assert signal.ambiguous == signal.unmatched == 0
    assert {(flow.local, flow.local_port, flow.remote, flow.remote_port) for flow in flows} == {
        ("10.9.0.1", 5000, "10.9.0.2", 80)
    }


@pytest.mark.slow
@settings(max_examples=40)  # each is two seconds of a world
@given(st.integers(-S, S), st.integers(-50_000, 50_000), st.integers(0, 50 * MS))
def test_the_peers_clock_is_taken_out(offset_ns: int, drift_ppb: int, delay_ns: int) -> None:
    """Shifting a clock, or letting it drift, changes no delay."""

    def ahead(at_ns: int) -> int:
        return offset_ns + (at_ns - START_NS) * drift_ppb // 10**9

    world = World(ahead)
    world.offset = Offset(START_NS, offset_ns, float(drift_ppb), 1.0, 0.0, bound_ns=50, hard_bound_ns=1000)
    signals = one_path(world, 2, delay_ns=delay_ns)
    assert signals
    for signal in signals:
        assert (signal.bound_ns, signal.hard_bound_ns) == (250, 1200)
        assert signal.owd.p50_ns is not None
        assert abs(signal.owd.p50_ns - delay_ns) <= 2


def test_a_turn_that_began_before_its_batches_joins_them() -> None:
    """An agent that waits for a processor reads what came in, and what left, long after its turn began."""
    world, subscription = listening()
    world.run(5, lambda n: world.send(n << 20))
    subscription.read()
    for n in range(1000, 1050):
        began_ns = world.now_ns
        world.now_ns += 100 * MS
        world.send(n << 20)
        world.now_ns += 100 * MS
        world.sources["b"].tick(world.now_ns)
        world.sources["a"].tick(began_ns)
    signals = [signal for signal in subscription.read() if isinstance(signal, AppDelay) and not signal.local]
    assert sum(signal.joined for signal in signals) >= 40
    assert sum(signal.unmatched for signal in signals) == 0
    assert "app_strays" not in world.drops()


def test_queueing_is_the_excess_over_the_recent_minimum() -> None:
    world, subscription = listening()
    world.run(10, lambda n: world.send(n << 20, delay_ns=1000 * (10 + n % 10)))
    last = [signal for signal in subscription.read() if isinstance(signal, AppDelay)][-1]
    assert (last.owd.p50_ns, last.owd.p90_ns, last.owd.max_ns) == (14_000, 18_000, 19_000)
    assert (last.queueing.p50_ns, last.queueing.p90_ns, last.queueing.max_ns) == (4_000, 8_000, 9_000)


@pytest.mark.parametrize(("state", "queueing"), [("holdover", 0), ("free_running", None), (None, None)])
def test_no_fact_from_clocks_that_are_not_synchronised(state: Any, queueing: int | None) -> None:
    world = World()
    world.offset = state and Offset(START_NS, 0, 0.0, 1.0, 0.0, 50, 1000, state)
    signals = one_path(world, 2)
    assert signals
    for signal in signals:
        assert signal.clock == (state or "free_running")
        assert (signal.owd.p50_ns, signal.bound_ns, signal.hard_bound_ns) == (None, None, None)
        assert signal.owd.samples == signal.joined > 0
        assert signal.queueing.p50_ns == queueing


@pytest.mark.parametrize(("error_ns", "owd"), [(0, 100), (250, 0), (349, 0), (351, None), (10 * MS, None)])
def test_nothing_negative_is_a_fact(error_ns: int, owd: int | None) -> None:
    world = World()
    world.offset = Offset(START_NS, error_ns, 0.0, 1.0, 0.0, bound_ns=50, hard_bound_ns=1000)
    signals = one_path(world, 2, delay_ns=100)
    assert {signal.owd.p50_ns for signal in signals} == {owd}
    assert ("app_contradicted" in world.drops()) == (owd is None)


def test_a_clock_that_becomes_synchronised_speaks_only_for_what_comes_after() -> None:
    world = World()
    world.offset = Offset(START_NS, 0, 0.0, 1.0, 0.0, 50, 1000, "free_running")
    subscription = world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.run(6, lambda n: world.send(n << 20))
    subscription.read()
    world.offset = Offset(START_NS, 0, 0.0, 1.0, 0.0, 50, 1000)
    world.run(3, lambda n: world.send((500 + n) << 20))
    states = [signal.clock for signal in subscription.read() if isinstance(signal, AppDelay) and not signal.local]
    assert states[0] == "free_running"
    assert set(states[1:]) == {"synchronised"}


def listening() -> tuple[World, Subscription]:
    world = World(shared=True)
    return world, world.buses["a"].subscribe(frozenset({"app_delay"}))


def counts(signals: list[AppDelay]) -> dict[str, int]:
    whole = [signal for signal in signals if not signal.local]
    return {
        name: sum(getattr(signal, name) for signal in whole) for name in ("sampled", "joined", "ambiguous", "unmatched")
    }


def counts_in(subscription: Subscription) -> dict[str, int]:
    return counts([signal for signal in subscription.read() if isinstance(signal, AppDelay)])


def test_lost_retransmitted_and_good_bytes_are_counted_apart() -> None:
    world = World(shared=True)

    def each(n: int) -> None:
        key = (5000 + n) << 20
        if n % 10 == 3:
            world.send(key, None)  # lost, never to be seen
        elif n % 10 == 7:
            world.send(key, None)  # lost, and retransmitted
            world.send(key)
        else:
            world.send(key)

    subscription = world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.run(4, lambda n: world.send(n << 20))
    world.run(4)
    subscription.read()
    world.run(4, each)
    world.run(4)
    assert counts_in(subscription) == {"sampled": 220, "joined": 160, "ambiguous": 40, "unmatched": 20}


def test_a_fast_stream_wraps_and_is_still_joined() -> None:
    """A gigabyte each 200 ms: the numbers come again within what is remembered."""
    world, subscription = listening()
    for n in range(80):
        world.send(n << 30, times=2 if n == 40 else 1)
        world.tick()
    world.run(3)
    signals = [signal for signal in subscription.read() if isinstance(signal, AppDelay)]
    found = counts(signals)
    assert found["joined"] > 60
    assert (found["ambiguous"], found["unmatched"]) == (2, 0), "those sent twice, and nothing a turn later"
    assert {signal.owd.p50_ns for signal in signals} == {10_000}


def test_a_receiver_that_samples_less_makes_nothing_unmatched() -> None:
    world, subscription = listening()
    world.sources["b"].control.tcp = 23
    world.sources["b"].control.floor = 23

    def each(n: int) -> None:
        world.send(n << 20)

    world.run(10, each)
    found = counts_in(subscription)
    assert found["unmatched"] == found["ambiguous"] == 0
    assert found["joined"] > 20
    assert world.drops()["app_peer_coarser"] > 100


def test_a_silent_peer_makes_nothing_unmatched() -> None:
    world, subscription = listening()
    for _ in range(50):
        world.now_ns += 1
        world.send((world.now_ns % 4096) << 20, None)
        world.now_ns += 200 * MS
        world.sources["a"].tick(world.now_ns)
    assert subscription.read() == []
    assert world.drops()["app_peer_silent"] > 20


def test_a_lost_record_casts_doubt_on_what_waits() -> None:
    world, subscription = listening()
    world.run(5, lambda n: world.send(n << 20))
    world.run(3)
    subscription.read()
    world.send(7000 << 20, None)
    world.sources["a"].tick(world.now_ns)
    world.kernels["a"].maps["sample_counters"].counts[1] += 1  # and what was lost was its retransmission
    world.now_ns += 300 * MS
    world.pass_by("b", world.now_ns, (7000 << 20) % TURN, 5000)
    world.run(4)
    assert counts_in(subscription) == {"sampled": 1, "joined": 0, "ambiguous": 1, "unmatched": 0}


def test_while_a_rate_is_new_what_the_old_one_left_out_is_not_used() -> None:
    """Its first transmission may have been left out, so the second looks like the only one."""
    world, subscription = listening()
    world.run(6, lambda n: world.send(n << 20))
    rate = world.sources["a"].control.tcp
    world.run(3)
    subscription.read()
    world.sources["a"].control.tcp = world.sources["b"].control.tcp = rate + 8
    world.sources["a"].control.floor = world.sources["b"].control.floor = rate + 8
    world.run(2)
    key = 3 << rate
    world.send(key)  # sampled by neither
    for source in world.sources.values():
        source.control.tcp = source.control.floor = rate
    world.tick()
    world.tick()
    world.pass_by("a", world.now_ns, key, 5000)
    world.now_ns += 1000
    world.pass_by("b", world.now_ns, key, 5000)  # the first one, which was on its way for 400 ms
    world.run(4)
    assert [signal for signal in subscription.read() if isinstance(signal, AppDelay) and signal.joined] == []
    assert world.drops()["app_rate_changed"] > 0


def test_the_busiest_flows_are_told_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_reports, "MOST_FLOWS", 3)
    world = World(shared=True, per_s=100_000)
    subscription = world.buses["a"].subscribe(frozenset({"app_delay"}))

    def each(n: int) -> None:
        for flow in range(6):
            for part in range(flow + 1):
                world.send((n * 8 + part) << 20, port=5000 + flow)

    world.run(6, each)
    flows = [signal for signal in subscription.read() if isinstance(signal, AppDelay) and signal.local]
    assert {flow.local_port for flow in flows} == {5003, 5004, 5005}
    windows = len({flow.at_ns for flow in flows})
    assert world.drops()["app_flows_left_out"] == 3 * windows


def test_a_peer_speaks_only_of_its_own_addresses() -> None:
    world = World(shared=True)
    world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.run(3, lambda n: world.send(n << 20))
    flows, samples = np.zeros(1, wire.FLOW), np.zeros(1, wire.SAMPLE)
    flows["protocol"], samples["at_ns"] = wire.TCP, 1
    world.mail["a", wire.BATCHES] = [("b", wire.encode(wire.Batch(20, 8, flows, samples))), ("b", b"noise")]
    world.mail["a", wire.ASKS] = [("b", b"noise")]
    world.tick()
    assert world.drops()["app_foreign"] == 1
    assert world.drops()["app_refused"] == 2


def test_samples_that_were_lost_count_for_the_protocols_of_those_that_were_not() -> None:
    assert [lost_of(100, *recorded) for recorded in ((0, 50), (30, 10), (5, 0), (0, 0))] == [0, 75, 100, 50]
    world, seen = World(), list[tuple[int, ...]]()
    kernel, subscription = world.kernels["a"], world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.tick()
    world.sources["a"].control.observe = lambda _, *counts: seen.append(counts)  # type: ignore[method-assign]
    for number in range(10):
        world.send(number << 20)
    kernel.records = [(*each[:8], wire.UDP, *each[9:]) for each in kernel.records]
    kernel.maps["sample_counters"].counts[list(contract.counters("sample")).index("ring_full")] += 40
    world.tick()
    assert seen == [(0, 50, 0)]
    subscription.close()


@pytest.mark.slow
def test_the_budget_holds_over_both_directions() -> None:
    world = World(shared=True, per_s=500)
    for name in "ab":
        world.buses[name].subscribe(frozenset({"app_delay"}))
    kernel, seen, turn = world.kernels["a"], 0, 0
    local, remote = ADDRESSES.values()
    for tick in range(100):
        for _ in range(10):
            world.now_ns += 20 * MS
            for _ in range(100):  # 5 GB/s, there and back
                turn += 1
                world.send(turn << 20)
                at = (world.now_ns, world.now_ns)
                kernel.see(local, remote, 6000, (turn << 20) % TURN, INGRESS, at)
        if tick >= 50:
            seen += len(kernel.records)
        world.tick(0)
    assert {record[9] for record in kernel.records} <= {EGRESS, INGRESS}
    assert 100 * 10 <= seen <= 500 * 10


def test_memory_is_bounded_by_what_is_remembered() -> None:
    world = World(shared=True)
    world.buses["a"].subscribe(frozenset({"app_delay"}))
    world.run(20, lambda n: world.send(n << 20, port=n % 50_000))
    joins = world.sources["a"].joins
    remembered_s = (PATIENCE_NS + GUARD_NS) / 1e9
    assert 0 < joins.waiting <= remembered_s * 50
    assert len(joins.flows) <= 2 * remembered_s * 50
