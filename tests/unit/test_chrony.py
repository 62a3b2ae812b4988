"""What is said to chronyd, when nothing may be said, and what happens while nobody listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.errors import UsageError
from pytools.signals import Clock
from pytools.sources.clocks.chrony import SAMPLE, ChronyFeed, correction_ns, encode_sample, realtime_difference_ns

SECOND_NS = 1_000_000_000
UNIX_NS = 1_795_211_700_123_456_789
CLOCK = Clock(
    host="a",
    at_ns=0,
    unix_ns=0,
    of="b",
    reference="a",
    epoch_ns=50 * SECOND_NS,
    state="synchronised",
    offset_ns=1000,
    drift_ppb=5000.0,
    bound_ns=50,
    hard_bound_ns=2000,
    slew_ppb=0.0,
    neighbours=1,
    pairs_kept=100,
    pairs_rejected=0,
    outlier_edges=0,
)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as end:
        end.bind(str(tmp_path / "chrony.sock"))
        yield end


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[ChronyFeed]:
    feed = ChronyFeed(str(tmp_path / "chrony.sock"))
    yield feed
    feed.close()


def test_the_correction_is_the_references_time_minus_ours() -> None:
    # Ours read 51 s, 1 us + 5 us ahead of the reference's stamping clock, which read 6 us less.
    at_ns, ours_ns, reference_ns = 51 * SECOND_NS, UNIX_NS, UNIX_NS + 3 * SECOND_NS
    reference_reads = at_ns - 6000
    expected = (reference_reads + reference_ns) - (at_ns + ours_ns)
    assert correction_ns(CLOCK, at_ns, ours_ns, reference_ns) == expected == 3 * SECOND_NS - 6000


@given(offset_ns=st.integers(-(10**9), 10**9), ours=st.integers(0, 2**61), reference=st.integers(0, 2**61))
def test_the_correction_keeps_nanoseconds_of_any_epoch(offset_ns: int, ours: int, reference: int) -> None:
    clock = msgspec.structs.replace(CLOCK, offset_ns=offset_ns, drift_ppb=0.0)
    assert correction_ns(clock, 10**18, ours, reference) == reference - ours - offset_ns


@pytest.mark.parametrize(
    "change",
    [
        {"state": "holdover"},
        {"state": "free_running"},
        {"reference": "b"},  # the reference has nobody to follow here
        {"offset_ns": None},
        {"drift_ppb": None},
    ],
)
def test_nothing_is_said_of_a_clock_that_is_not_synchronised(change: dict[str, object]) -> None:
    assert correction_ns(msgspec.structs.replace(CLOCK, **change), 51 * SECOND_NS, 0, 0) is None


def test_the_difference_of_the_clocks_is_taken_from_the_narrowest_reading() -> None:
    monotonic = iter([0, 900, 1000, 1010, 2000, 2500, 3000, 3400, 4000, 4800])
    realtime = iter([100_800, 101_005, 102_400, 103_300, 104_700])
    assert realtime_difference_ns(lambda: next(monotonic), lambda: next(realtime)) == 100_000


def test_a_sample_has_chronys_layout() -> None:
    sample = encode_sample(UNIX_NS, -123_456_789)
    assert len(sample) == 40
    assert SAMPLE.unpack(sample) == (1_795_211_700, 123_456, -0.123456789, 0, 0, 0, 0x534F434B)


def test_samples_arrive_once_a_second(feed: ChronyFeed, listener: socket.socket) -> None:
    handed = [feed.send(7 + tick * SECOND_NS // 4, UNIX_NS, tick) for tick in range(9)]
    assert handed == [True, False, False, False, True, False, False, False, True]
    offsets = [SAMPLE.unpack(listener.recv(100))[2] for _ in range(3)]
    assert offsets == [0.0, 4e-9, 8e-9]
    with pytest.raises(BlockingIOError):
        listener.recv(100)
    assert (feed.sent, feed.drops()) == (3, {"chrony_samples_lost": 0})


def test_a_coarse_period_still_comes_to_one_a_second(feed: ChronyFeed, listener: socket.socket) -> None:
    handed = 0
    for tick in range(101):  # 30 s
        if feed.send(tick * 300_000_000, UNIX_NS, 0):
            handed += len(listener.recv(100)) == SAMPLE.size
    assert 30 <= handed <= 31


def test_nothing_to_say_is_no_loss(feed: ChronyFeed) -> None:
    assert not feed.send(0, UNIX_NS, None)
    assert feed.drops() == {"chrony_samples_lost": 0}


def test_a_listener_may_come_late_go_and_come_back(feed: ChronyFeed, tmp_path: Path) -> None:
    path = tmp_path / "chrony.sock"

    def listen() -> socket.socket:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        end.bind(str(path))
        return end

    assert not feed.send(0, UNIX_NS, 1)  # not there
    with listen() as end:
        assert feed.send(1 * SECOND_NS, UNIX_NS, 2)
        assert SAMPLE.unpack(end.recv(100))[2] == 2e-9
    assert not feed.send(2 * SECOND_NS, UNIX_NS, 3)  # there, but refused
    path.unlink()
    with listen() as end:
        assert feed.send(3 * SECOND_NS, UNIX_NS, 4)
        assert SAMPLE.unpack(end.recv(100))[2] == 4e-9
    assert (feed.sent, feed.drops()) == (2, {"chrony_samples_lost": 2})


def test_a_listener_that_does_not_read_never_blocks(feed: ChronyFeed, listener: socket.socket) -> None:
    handed = [feed.send(second * SECOND_NS, UNIX_NS, 0) for second in range(2000)]
    assert handed[0]
    assert not handed[-1]
    assert feed.sent + feed.drops()["chrony_samples_lost"] == 2000


@pytest.mark.parametrize("path", ["", "chrony.sock", "/" + "x" * 107])
def test_what_cannot_be_a_socket_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"clocks\.chrony_socket"):
        ChronyFeed(path)
