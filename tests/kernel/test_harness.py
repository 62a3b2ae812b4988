"""The harness itself: joined namespaces carry packets, and the inventory sees what is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import leaks
import pytest
import support


@pytest.mark.guest
def test_joined_namespaces_carry_packets(veth_pair: tuple[str, str]) -> None:
    support.require("ping")
    for address in ("10.77.0.2", "fd77::2"):
        support.run(["ip", "netns", "exec", veth_pair[0], "ping", "-c", "1", "-W", "5", address])


def test_inventory_sees_what_is_left(make_namespace: Callable[[], str], unique_name: Callable[[], str]) -> None:
    before = leaks.inventory()
    name, link = make_namespace(), unique_name()
    held = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    support.run(["ip", "link", "add", link, "type", "veth", "peer", "name", f"{link}p"])
    try:
        support.run(["tc", "qdisc", "add", "dev", link, "clsact"])
        support.run(["ip", "rule", "add", "priority", "5999", "fwmark", "0x1", "table", "29999", "protocol", "201"])
        seen = "\n".join(leaks.inventory() - before)
    finally:
        support.run(["ip", "rule", "delete", "priority", "5999", "table", "29999"], check=False)
        support.run(["ip", "link", "delete", link])
        held.communicate(b"\n")
    assert f"/run/netns/{name}" in seen
    assert f"process {held.pid}" in seen
    assert f"link {link}" in seen
    assert f"qdisc on {link}" in seen
    assert "rule 5999" in seen
    assert not {line for line in leaks.inventory() - before if name not in line}
