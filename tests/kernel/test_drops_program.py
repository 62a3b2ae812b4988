"""drops.c on packets that are dropped for a reason that is known: counted by number, and by socket where it is said."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.netns import inside
from pytools.sources.tcp.drops import Drops

FORMAT = Path("/sys/kernel/tracing/events/skb/kfree_skb/format")
DATAGRAMS = 50
pytestmark = pytest.mark.guest


def number_of(reason: str) -> int:
    """The running kernel's number for a reason, from the event's own format."""
    found = re.search(rf'{{ (\d+), "{reason}" }}', FORMAT.read_text())
    assert found is not None, f"this kernel has no reason {reason}"
    return int(found.group(1))


def has_socket() -> bool:
    return " rx_sk;" in FORMAT.read_text()


@pytest.fixture
def drops() -> Iterator[Loaded]:
    support.require("bcc", "tracefs")
    with load([Program("drops.c", (), {"SWERVE_DROPS_RX_SK": 1} if has_socket() else {})]) as loaded:
        assert loaded.failed == {}
        assert set(loaded.tracepoints) == {"kfree_skb"}
        yield loaded


def counted(drops: Loaded, reason: str) -> int:
    return int(drops.map("drops_by_reason").read_percpu_sum()[number_of(reason)])


def test_datagrams_for_no_socket(drops: Loaded, namespace: str) -> None:
    """Other programs of the machine drop packets meanwhile: never fewer than ours."""
    before = counted(drops, "NO_SOCKET")
    with inside(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(DATAGRAMS):
            sender.sendto(b"x", ("127.0.0.1", 9))
    support.wait_until(lambda: counted(drops, "NO_SOCKET") - before >= DATAGRAMS, 20, "all are counted")
    assert drops.map("drops_sockets_full").read_percpu_sum().tolist() == [0]


def full_socket(stack: contextlib.ExitStack) -> socket.socket:
    """A receiver that has room for a datagram or two."""
    receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    receiver.bind(("127.0.0.1", 0))
    receiver.setblocking(False)
    return receiver


def received(receiver: socket.socket) -> int:
    """How many datagrams wait there."""
    for taken in itertools.count():
        try:
            receiver.recv(2000)
        except BlockingIOError:
            return taken
    raise AssertionError


def test_datagrams_for_full_sockets(drops: Loaded, namespace: str) -> None:
    """Runs of drops, of one socket and then of the other: what is counted in the table and what waits to be."""
    with inside(namespace), contextlib.ExitStack() as stack:
        sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        receivers = [full_socket(stack) for _ in range(2)]
        for sent in range(2 * DATAGRAMS):
            sender.sendto(bytes(1400), receivers[sent // 10 % 2].getsockname())
        lost = sorted(DATAGRAMS - received(each) for each in receivers)
        assert lost[0] > DATAGRAMS // 2
        support.wait_until(lambda: counted(drops, "SOCKET_RCVBUFF") >= sum(lost), 20, "all are counted")
        keys, packets = Drops(drops, {}).by_socket()
        if not has_socket():
            assert len(keys) == 0
            return
        overflowing = keys["reason"] == number_of("SOCKET_RCVBUFF")
        by_socket: Counter[int] = Counter()
        for address, count in zip(keys["rx_sk"][overflowing].tolist(), packets[overflowing].tolist(), strict=True):
            by_socket[address] += count
        assert not Counter(lost) - Counter(by_socket.values()), "each lost exactly these"
