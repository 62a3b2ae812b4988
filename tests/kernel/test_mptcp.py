"""Subflows of an MPTCP connection are listed, added from another port of the same address, and ended; it lives on."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
import support

from pytools.kernel.netlink.mptcp import PathManager
from pytools.kernel.netns import inside
from pytools.lab import namespaces

IPPROTO_MPTCP, PORT = 262, 7000
NEAR, FAR = "10.77.1.1", "10.77.1.2"


def echo(client, server):
    """Bytes go both ways."""
    for one, other in ((client, server), (server, client)):
        one.send(b"x")
        assert other.recv(10) == b"x"


def established(manager, port):
    """The subflow from a port, once there is one."""
    return next((each for each in manager.subflows() if each.local_port == port and each.established), None)


@pytest.mark.guest
def test_a_subflow_is_replaced_by_one_from_another_port(make_namespace):
    if not Path("/proc/sys/net/mptcp/pm_type").exists():
        pytest.skip("this kernel has no userspace path manager of MPTCP")
    near, far = make_namespace(), make_namespace()
    support.join(near, far, "v")
    for netns, address in ((near, NEAR), (far, FAR)):
        support.ip(netns, f"address add {address}/24 dev v", "link set v up")
    namespaces.set_sysctls(near, {"mptcp/pm_type": 1})
    with contextlib.ExitStack() as stack:
        with inside(far):
            listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP))
        listener.bind((FAR, PORT))
        listener.listen()
        with inside(near):
            plain = stack.enter_context(socket.socket())
            client = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP))
            for each in (plain, client):
                each.settimeout(10)
                each.connect((FAR, PORT))
            manager = stack.enter_context(PathManager())
        stack.enter_context(listener.accept()[0])
        server = stack.enter_context(listener.accept()[0])
        server.settimeout(10)
        echo(client, server)
        for number in (1, 2, 3):
            (old,) = manager.subflows()
            assert manager.create(old, 40_000 + number, number) == ""
            new = support.wait_until(lambda: established(manager, 40_000 + number), 10, "it is established")  # noqa: B023
            assert (new.token, new.local_id, new.local) == (old.token, number, NEAR)
            assert manager.destroy(old) == ""
            support.wait_until(lambda: len(list(manager.subflows())) == 1, 10, "the other is gone")
            echo(client, server)
        (last,) = manager.subflows()
        assert "changing subflows" in manager.create(last, last.local_port, 9)
