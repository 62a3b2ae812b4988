"""The bus inside one process, and the lines that cross its socket."""

from __future__ import annotations

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st

from pytools import signals
from pytools.errors import UsageError
from pytools.ipc import bus as buses
from pytools.ipc.bus import TYPES, Bus
from pytools.ipc.outbox import Outbox
from pytools.ipc.wire import LINE_BYTES, URGENT, Lines, is_pressing


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


def test_who_reads_no_details_has_nobody_look_closely() -> None:
    bus = Bus()
    bus.add("recorder", None, lambda _: None)
    assert bus.wanted("path_delay") and not bus.wanted("path_delay", details=True)
    controller = bus.subscribe(frozenset({"path_delay"}))
    assert bus.wanted("path_delay", details=True) and not bus.wanted("act", details=True)
    controller.close()
    assert not bus.wanted("path_delay", details=True)
    bus.add("client", frozenset({"path_delay"}), lambda _: None, details=True)
    bus.add("client", frozenset({"path_delay"}), lambda _: None)  # it asks again, for less
    assert bus.wanted("path_delay") and not bus.wanted("path_delay", details=True)


def test_a_full_subscription_drops_the_newest_and_counts() -> None:
    bus = Bus()
    subscription = bus.subscribe(None, capacity=3)
    for at_ns in range(10):
        bus.publish(samples.tcp_path(at_ns=at_ns))
    assert [each.at_ns for each in subscription.read()] == [0, 1, 2]
    assert subscription.dropped == 7
    bus.publish(samples.tcp_path(at_ns=10))
    assert [each.at_ns for each in subscription.read()] == [10]


def test_others_do_not_keep_urgent_signals_out() -> None:
    bus = Bus()
    subscription = bus.subscribe(None, capacity=3)
    for at_ns in range(5):
        bus.publish(samples.tcp_path(at_ns=at_ns))
        bus.publish(samples.path_liveness(at_ns=at_ns))
    got = [(type(each).__name__, each.at_ns) for each in subscription.read()]
    assert got == [(name, at_ns) for at_ns in range(3) for name in ("TcpPath", "PathLiveness")]
    assert (subscription.dropped, subscription.dropped_urgent) == (4, 2)
    for at_ns in range(3):
        bus.publish(samples.act(at_ns=at_ns))
    assert len(subscription.read()) == 3


def test_urgent_signals_are_what_the_pages_say() -> None:
    assert URGENT <= TYPES
    missing = samples.path_liveness(missed=2)
    pressing = [type(each).__name__ for each in [*samples.one_of_each(), missing] if is_pressing(each)]
    assert pressing == ["LinkEvent", "Act", "PathLiveness"]


# ---- what waits for one client ----


def test_a_client_that_keeps_up_gets_all_in_order() -> None:
    box = Outbox(1000, 100)
    for number, urgent in enumerate([False, True, False, False, True]):
        box.put(b"%d\n" % number, urgent)
    assert box.take() == b"0\n1\n2\n3\n4\n"
    box.sent(10)
    assert not box


def test_urgent_lines_overtake_those_of_a_client_that_is_behind() -> None:
    box = Outbox(1000, 8)
    for number in range(6):
        box.put(b"b%d\n" % number, urgent=False)
    box.put(b"u1\n", urgent=True)
    box.put(b"u2\n", urgent=True)
    assert box.behind
    assert box.take(urgent_only=True) == b"u1\nu2\n"
    box.sent(4)
    box.put(b"u3\n", urgent=True)
    assert box.take(urgent_only=True) == b"2\nu3\n", "a line that was begun is ended first"
    box.sent(5)
    assert box.take() == b"b0\nb1\nb2\n"
    box.sent(4)
    box.put(b"u4\n", urgent=True)
    assert box.take() == b"1\nu4\nb2\n"


def test_a_blocked_client_is_behind_however_little_waits() -> None:
    box = Outbox(1000, 100)
    box.put(b"b1\n", urgent=False)
    box.take()
    box.sent(0)
    box.put(b"u1\n", urgent=True)
    assert box.behind and box.take() == b"u1\nb1\n"
    box.sent(6)
    assert not box.behind and not box


def test_each_kind_has_its_own_bound() -> None:
    box = Outbox(10, 100)
    box.put(b"123456789\n", urgent=False)
    assert not box.fits(b"\n", urgent=False) and box.fits(b"123456789\n", urgent=True)
    box.put(b"123456789\n", urgent=True)
    assert not box.fits(b"\n", urgent=True)


@given(st.lists(st.booleans() | st.tuples(st.booleans(), st.integers(0, 60)), max_size=120))
def test_lines_arrive_whole_and_once_and_urgent_ones_overtake_only(steps: list[bool | tuple[bool, int]]) -> None:
    box, stream, put = Outbox(10_000, 40), b"", dict[bytes, bool]()
    behind_at: dict[bytes, int] = {}  # of an urgent line that was put while behind: how much had been sent
    for step in [*steps, *[(False, 60)] * 200]:
        if isinstance(step, bool):
            line = b"%s%d" % (b"u" if step else b"b", len(put))
            put[line] = step
            if step and box.behind:
                behind_at[line] = len(stream)
            box.put(line + b"\n", step)
        else:
            urgent_only, room = step
            chunk = box.take(urgent_only)
            stream += chunk[:room]
            box.sent(min(room, len(chunk)))
    got = stream.split(b"\n")[:-1]
    assert sorted(got) == sorted(put) and not box
    for urgent in (True, False):
        assert [each for each in got if put[each] is urgent] == [each for each in put if put[each] is urgent]
    if not behind_at:
        return
    for line, sent in behind_at.items():
        between = stream[sent : stream.index(line + b"\n")].split(b"\n")[
            1 if sent and stream[sent - 1 : sent] != b"\n" else 0 :
        ]
        assert all(each.startswith(b"u") for each in between if each), "no line that was not begun is ahead of it"


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
