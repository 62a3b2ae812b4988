"""connect.c on connections over loopback: which local ports they get, and what is counted."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import support

from pytools.errors import SwerveError
from pytools.kernel.bpf import contract
from pytools.kernel.bpf.loader import Loaded, load
from pytools.kernel.netns import inside
from steering.actuators import ports
from steering.actuators.ports import Ports
from steering.plan import Peer

pytestmark = pytest.mark.guest
HERE = "127.0.0.1"
GOOD = range(40_001, 40_021, 2)


class Listener:
    """A TCP service, and clients that stay connected until the end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.socket = stack.enter_context(socket.create_server((HERE, 0), backlog=200))
        self.peer = Peer(*self.socket.getsockname())

    def connect(self, client: socket.socket | None = None) -> int:
        """A new connection's local port."""
        client = self._stack.enter_context(socket.socket() if client is None else client)
        client.connect(self.socket.getsockname())
        self._stack.enter_context(self.socket.accept()[0])
        port: int = client.getsockname()[1]
        return port


@pytest.fixture
def stack(namespace: str) -> Iterator[contextlib.ExitStack]:
    with inside(namespace), contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    support.require("bcc")
    with load([ports.PROGRAM]) as loaded:
        yield loaded


@pytest.fixture
def chooser(stack: contextlib.ExitStack, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ports]:
    """With maps as new; what was loaded stays for the next test."""
    monkeypatch.setattr(loaded, "close", lambda: None)
    for number in range(len(contract.counters("connect"))):
        loaded.map("connect_counters").update(number, 0)
    with Ports(loaded) as made:
        made.renew(0)
        yield made
        made.offer({})


@pytest.fixture
def listener(stack: contextlib.ExitStack) -> Listener:
    return Listener(stack)


def lease(chooser: Ports, seconds: float = 60) -> None:
    chooser.renew(time.monotonic_ns() + int(seconds * 1e9))


def counted(chooser: Ports) -> dict[str, int]:
    return {name: count for name, count in chooser.counters().items() if count}


def test_connections_get_the_offered_ports_until_all_are_taken(chooser: Ports, listener: Listener) -> None:
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    taken = []
    while "in_use" not in counted(chooser):
        taken.append(listener.connect())
    chosen = taken[:-1]
    assert set(chosen) <= set(GOOD) and len(set(chosen)) == len(chosen) > 2
    assert taken[-1] not in GOOD
    assert counted(chooser) == {"chosen": len(chosen), "in_use": 1}


def test_sockets_of_ipv6_that_connect_over_ipv4_get_them_too(chooser: Ports, listener: Listener) -> None:
    lease(chooser)
    chooser.offer({listener.peer: [GOOD[0]]})
    with socket.socket(socket.AF_INET6) as client, socket.socket(socket.AF_INET6) as second:
        client.connect((f"::ffff:{HERE}", listener.peer.port))
        second.connect((f"::ffff:{HERE}", listener.peer.port))
        assert client.getsockname()[1] == GOOD[0] != second.getsockname()[1]
    assert counted(chooser) == {"chosen": 1, "in_use": 1}


def test_other_destinations_get_what_the_kernel_gives(
    chooser: Ports, listener: Listener, stack: contextlib.ExitStack
) -> None:
    other = Listener(stack)
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    assert not {other.connect() for _ in range(20)} & set(GOOD)
    assert counted(chooser) == {}


def test_sockets_of_another_namespace_are_left_alone(
    chooser: Ports, listener: Listener, stack: contextlib.ExitStack, make_namespace: Callable[[], str]
) -> None:
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    stack.enter_context(inside(make_namespace()))
    with socket.create_server((HERE, listener.peer.port)) as there, socket.create_connection(there.getsockname()) as c:
        assert c.getsockname()[1] not in GOOD
    assert counted(chooser) == {}


@pytest.mark.parametrize("how", ["port", "address", "mark", "reuse"])
def test_sockets_that_the_application_has_bound_are_left_alone(chooser: Ports, listener: Listener, how: str) -> None:
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    client = socket.socket()
    if how == "port":
        client.bind((HERE, 50_001))
    elif how == "address":
        client.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        client.bind((HERE, 0))
    elif how == "reuse":  # with one more such socket on the same port its connect() would fail
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    else:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 7)
    assert listener.connect(client) not in GOOD
    assert counted(chooser) == {"bound": 1}


def test_without_a_port_or_a_lease_the_kernel_chooses(chooser: Ports, listener: Listener) -> None:
    chooser.offer({listener.peer: GOOD})
    assert listener.connect() not in GOOD
    assert counted(chooser) == {"expired": 1}
    lease(chooser)
    chooser.offer({listener.peer: ()})
    assert listener.connect() not in GOOD
    assert counted(chooser) == {"expired": 1, "no_port": 1}


def test_an_offer_replaces_the_one_before(chooser: Ports, listener: Listener) -> None:
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    chooser.offer({listener.peer: [40_101]})
    assert listener.connect() == 40_101
    chooser.offer({})
    assert listener.connect() not in GOOD
    assert counted(chooser) == {"chosen": 1}


def test_the_kernel_chooses_again_after_the_end(chooser: Ports, listener: Listener) -> None:
    lease(chooser)
    chooser.offer({listener.peer: GOOD})
    chooser.close()
    assert listener.connect() not in GOOD


def test_more_destinations_than_there_is_room_for_are_refused(chooser: Ports) -> None:
    most = contract.constant("SWERVE_CONNECT_DESTINATIONS")
    with pytest.raises(SwerveError, match="full"):
        chooser.offer({Peer("10.0.0.1", 1 + number): () for number in range(most + 1)})
