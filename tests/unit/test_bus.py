"""The bus inside one process, and the lines that cross its socket."""

from __future__ import annotations

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from pytools import bus as buses
from pytools import signals
from pytools.bus import TYPES, Bus
from pytools.errors import UsageError
from pytools.wire import LINE_BYTES, Lines


def test_every_type_of_signal_has_a_sample_and_a_tag() -> None:
    tags = {signals.encode(each).split(b'"')[3].decode() for each in samples.one_of_each()}
    assert tags == TYPES


def test_a_subscriber_gets_what_it_asked_for_in_order() -> None:
    bus = Bus()
    subscription = bus.subscribe(frozenset({"act", "tcp_path"}))
    for at_ns in (1, 2):
        for signal in samples.one_of_each(at_ns):
            bus.publish(signal)
    got = subscription.read()
    assert [type(each).__name__ for each in got] == ["TcpPath", "Act", "TcpPath", "Act"]
    assert [each.at_ns for each in got] == [1, 1, 2, 2]
    assert subscription.read() == []


def test_all_types_means_all() -> None:
    bus = Bus()
    subscription = bus.subscribe(None)
    for signal in samples.one_of_each():
        bus.publish(signal)
    assert subscription.read() == samples.one_of_each()


def test_wanted_follows_the_subscriptions() -> None:
    bus = Bus()
    assert not bus.wanted("self")
    first = bus.subscribe(frozenset({"self"}))
    second = bus.subscribe(None)
    first.close()
    assert bus.wanted("self") and bus.wanted("act")
    second.close()
    second.close()
    assert not bus.wanted("self")


def test_a_full_subscription_drops_the_newest_and_counts() -> None:
    bus = Bus()
    subscription = bus.subscribe(None, capacity=3)
    for at_ns in range(10):
        bus.publish(samples.tcp_path(at_ns=at_ns))
    assert [each.at_ns for each in subscription.read()] == [0, 1, 2]
    assert subscription.dropped == 7
    bus.publish(samples.tcp_path(at_ns=10))
    assert [each.at_ns for each in subscription.read()] == [10]


def test_closing_while_a_signal_is_handed_on_disturbs_nobody() -> None:
    bus = Bus()
    seen: list[int] = []
    bus.add("first", None, lambda _: bus.remove("second"))
    bus.add("second", None, lambda published: seen.append(published.signal.at_ns))
    bus.publish(samples.act(at_ns=1))
    bus.publish(samples.act(at_ns=2))
    assert seen == [1]


def test_an_unknown_type_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(UsageError, match=r"no such signal type: pathdelay; one of act, .*path_delay"):
        Bus().subscribe(frozenset({"pathdelay"}))


def test_nothing_is_encoded_unless_somebody_wants_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[object] = []

    def counting(signal: signals.AnySignal) -> bytes:
        encoded.append(signal)
        return signals.encode(signal)

    monkeypatch.setattr(buses, "encode", counting)
    bus = Bus()
    bus.publish(samples.act())
    bus.subscribe(None)
    bus.publish(samples.act())
    assert encoded == []
    lines: list[bytes] = []
    for reader in range(3):
        bus.add(reader, frozenset({"act"}), lambda published: lines.append(published.line()))
    bus.publish(samples.act())
    assert len(encoded) == 1
    assert lines == [signals.encode(samples.act()) + b"\n"] * 3


@given(st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.data())
def test_lines_survive_any_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader, got = Lines(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert got == [line for line in lines if line]
    assert reader.oversized == 0


def test_a_line_without_end_is_thrown_away_and_the_next_one_is_read() -> None:
    reader = Lines()
    got = []
    for _ in range(LINE_BYTES // 1000 + 2):
        got += reader.feed(b"x" * 1000)
    got += reader.feed(b"tail\nnext\n")
    assert got == [b"next"]
    assert reader.oversized == 1
