"""drops.c on packets that are dropped for a reason that is known: counted by number, and by socket where it is said."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support

from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.netns import inside

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
    """Other programs of the machine drop packets meanwhile: never fewer than ours, and the sum is whole."""
    before = counted(drops, "NO_SOCKET")
    with inside(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(DATAGRAMS):
            sender.sendto(b"x", ("127.0.0.1", 9))
    support.wait_until(lambda: counted(drops, "NO_SOCKET") - before >= DATAGRAMS, 5, "all are counted")
    total, other, sockets_full = drops.map("drops_counters").read_percpu_sum().tolist()
    assert total >= drops.map("drops_by_reason").read_percpu_sum().sum() - DATAGRAMS >= 0
    assert other <= total
    assert sockets_full == 0


def test_datagrams_for_a_full_socket(drops: Loaded, namespace: str) -> None:
    with (
        inside(namespace),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        receiver.bind(("127.0.0.1", 0))
        for _ in range(DATAGRAMS):
            sender.sendto(bytes(1400), receiver.getsockname())
        receiver.setblocking(False)
        taken = 0
        while True:
            try:
                receiver.recv(2000)
            except BlockingIOError:
                break
            taken += 1
        lost = DATAGRAMS - taken
        assert lost > DATAGRAMS // 2
        support.wait_until(lambda: counted(drops, "SOCKET_RCVBUFF") >= lost, 5, "all are counted")
        keys, counts = drops.map("drops_by_socket").read()
        if not has_socket():
            assert len(keys) == 0
            return
        ours = counts[(keys["reason"] == number_of("SOCKET_RCVBUFF")) & (counts == np.uint64(lost))]
        assert len(ours) == 1, "one socket lost exactly these"
