"""Teams as one that hashes flows over its ports, or not, by the options that a daemon would have set."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import support

from pytools.kernel.netlink import teams
from pytools.kernel.netlink.links import Tables
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside

PORTS = ("v0", "v1")


@pytest.mark.guest(only=True)
@pytest.mark.parametrize(
    ("options", "hashes"),
    [
        ({"mode": "loadbalance"}, True),
        ({"mode": "loadbalance", "lb_tx_method": "hash_to_port_mapping"}, False),
        ({"mode": "activebackup"}, False),
    ],
    ids=["loadbalance", "balanced by a daemon", "activebackup"],
)
def test_a_team_hashes_flows_in_one_mode_only(
    make_namespace: Callable[[], str], options: dict[str, str], hashes: bool
) -> None:
    near, far = make_namespace(), make_namespace()
    ip = support.Namespace(near).ip
    ip("link", "add", "team0", "type", "team")
    with inside(near), Netlink() as netlink:
        for name, value in options.items():
            teams.set_option(socket.if_nametoindex("team0"), name, value)
        for port in PORTS:
            support.join(near, far, port)
            ip("link", "set", "dev", port, "down")
            ip("link", "set", "dev", port, "master", "team0")
        bundles = Tables(netlink).stack().bundles
    assert [each.ports for each in bundles.values()] == ([PORTS] if hashes else [])
