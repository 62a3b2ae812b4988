"""The overlay beside the rules and routes of Cilium 1.18: the look-up of `local` moved, proxies, a table for each NIC.

They are laid by hand, as its source does (pkg/datapath/linux/linux_defaults, pkg/proxy/routes.go): all say that they
are the kernel's.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from overlay_kit import MANAGED, PREFIX, Host, gateway

_KERNEL = ("proto", "kernel")
ALTERNATIVE = {family: [{"via": gateway(family, 2), "dev": "rail2"}] for family in (4, 6)}
_POD = {4: "10.9.5.7", 6: "fd00:9::5:7"}
_ROUTER = {4: "10.9.5.1", 6: "fd00:9::5:1"}  # of cilium_host
_AFTER_PROXY = {4: _ROUTER[4], 6: "fe80::2"}  # where what a proxy sends goes; in IPv6 cilium_net
_OF_POD = {family: ("from", pod, "iif", "lxc1") for family, pod in _POD.items()}
_TO_PROXY, _FROM_PROXY, _NODE_PORT = "0x200/0xf00", "0xa00/0xf00", "0x80/0x80"


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def host(request, namespace):
    made = Host(namespace, request.param)
    for name, other in ("cilium_host", "cilium_net"), ("lxc1", "eth0"):
        made.ip("link", "add", name, "type", "veth", "peer", "name", other)
        made.ip("link", "set", "dev", name, "up")
        made.ip("link", "set", "dev", other, "up")
    made.write(f"net/ipv{made.family}/conf/all/forwarding", 1)
    lay(made)
    yield made
    if made.overlay is not None:
        made.overlay.close()
        made.netlink.close()


def lay(host):
    """All of it: a node that routes natively, and a pod whose packets leave by a NIC of its own."""
    family, router = host.family, _ROUTER[host.family]
    length = 32 if family == 4 else 128
    host.ip("address", "add", f"{router}/{length}", "dev", "cilium_host", *(() if family == 4 else ("nodad",)))
    host.rule("add", "lookup", "local", "pref", "100", *_KERNEL)
    host.rule("del", "pref", "0")
    for pref, words in (
        (9, ("fwmark", _TO_PROXY, "lookup", "2004")),
        (10, ("fwmark", _FROM_PROXY, "lookup", "2005")),
        (20, ("to", f"{_POD[family]}/{length}", "lookup", "main")),
        (109, ("fwmark", _NODE_PORT, "lookup", "main")),
        (111, ("from", f"{_POD[family]}/{length}", "lookup", "11")),
    ):
        host.rule("add", "pref", str(pref), *words, *_KERNEL)
    host.route("add", "local", "default", "dev", "lo", "table", "2004", *_KERNEL)
    host.route("add", _AFTER_PROXY[family], "dev", "cilium_host", "table", "2005", *_KERNEL)
    host.route("add", "default", "via", _AFTER_PROXY[family], "dev", "cilium_host", "table", "2005", *_KERNEL)
    host.route("add", gateway(family, 1), "dev", "rail1", "table", "11", *_KERNEL)
    host.route("add", "default", *host.hop(1), "table", "11", *_KERNEL)
    host.route("add", f"{_POD[family]}/{length}", "dev", "lxc1", *_KERNEL)
    host.route("add", PREFIX[family], *host.hop(1), *_KERNEL)


def ways(host):
    """By which interfaces packets to the peer leave, by what they are."""
    looked_up = {
        "of the host": (),
        "of a pod": _OF_POD[host.family],
        "of node ports": ("mark", "0x80"),
        "from the proxy": ("mark", "0xa00"),
        "to the proxy": ("mark", "0x200"),
    }
    return {name: host.way(*words) for name, words in looked_up.items()}


def test_a_nic_whose_gateway_only_its_own_table_knows_is_left(host):
    """As the further NICs that Cilium has on AWS: they have no address, so no route of `main` leads to the gateway."""
    family, far = host.family, "10.8.0.1" if host.family == 4 else "fd00:8::1"
    host.add_rail(3)
    host.ip(f"-{family}", "address", "flush", "dev", "rail3", "scope", "global")
    host.route("add", far, "dev", "rail3", "table", "11", *_KERNEL)
    host.route("replace", "default", "via", far, "dev", "rail3", "table", "11", *_KERNEL)
    before, found = host.others(), host.start(alternatives=ALTERNATIVE[family])
    assert host.way(*_OF_POD[family]) == "rail3" and not any(far in event for event in found.events)
    [group] = [each for each in found.groups.values() if any(m.interface == "rail3" for m in each.members)]
    host.leave(3, replace(found, groups={group.target: group}))
    assert host.way(*_OF_POD[family]) == "rail2" and host.others() == before
    host.put_back(group)
    assert host.way(*_OF_POD[family]) == "rail3" and not host.rules()


def test_without_another_hop_nothing_is_steered_and_each_table_has_its_reason(host):
    found, before = host.start(), host.others()
    assert not found.groups and not host.rules() and host.others() == before
    assert {name for name, why in found.refused.items() if why.startswith("it has one hop")} == {
        PREFIX[host.family],
        f"{MANAGED[host.family]} in table 2005",
        f"{MANAGED[host.family]} in table 11",
    }


def test_an_act_moves_what_left_by_the_rail_and_nothing_that_is_the_proxys(host):
    first, before = ways(host), host.others()
    assert first == {
        "of the host": "rail1",
        "of a pod": "rail1",
        "of node ports": "rail1",
        "from the proxy": "cilium_host",
        "to the proxy": "lo",
    }
    found = host.start(alternatives=ALTERNATIVE[host.family])
    groups = [group for group in found.groups.values() if any(m.interface == "rail1" for m in group.members)]
    for group in groups:
        [other] = [member.nexthop_id for member in group.members if member.interface == "rail2"]
        assert host.overlay.apply(group.target, ((other, 1),))
    moved = {"of the host": "rail2", "of a pod": "rail2", "of node ports": "rail2"}
    assert ways(host) == {**first, **moved} and host.others() == before
    pod = json.loads(host.ip(f"-{host.family}", "-j", "route", "get", _POD[host.family]))[0]["dev"]
    assert pod == "lxc1", "a pod of this host is reached as before"
    for group in groups:
        assert host.overlay.apply(group.target, group.original)
    assert ways(host) == first and not host.rules()
    host.overlay.close()
    assert host.ours() == 0 and host.others() == before
