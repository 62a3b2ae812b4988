"""Rails with ways inside: both families pass, flows spread over the ways, each is harmed and healed on its own."""

from __future__ import annotations

import json
import socket

import pytest
import support
from click.testing import CliRunner

from pytools.errors import UsageError
from pytools.kernel.netns import inside
from pytools.lab import Lab, cli

pytestmark = pytest.mark.beside

FLOWS, PORT, PAYLOAD = 64, 7777, 500
LAB = {"hosts": 3, "rate": "50mbit", "queue_bytes": 262_144, "inner": 2}
NEEDS = ("ping",)


def addresses(host):
    yield from (host.service, host.service6)
    for each in host.interfaces:
        yield from (each.address, each.address6)


def spread(lab, address, flows=FLOWS, source_address=""):
    """Send a datagram from h1 by each of many source ports; how many arrived, and bytes by rail and way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    before = support.bytes_of_inner_ways(lab)
    with inside(lab.hosts[1].netns), socket.socket(family, socket.SOCK_DGRAM) as sink:
        sink.bind((address, PORT))
        sink.settimeout(1 * support.slow_factor())
        with inside(lab.hosts[0].netns):
            sources = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(flows)]
        arrived = 0
        for source in sources:
            if source_address:
                source.bind((source_address, 0))
            source.sendto(bytes(PAYLOAD), (address, PORT))
        try:
            while arrived < flows:
                sink.recv(PAYLOAD)
                arrived += 1
        except TimeoutError:
            pass
        for source in sources:
            source.close()
    return arrived, {place: each - before[place] for place, each in support.bytes_of_inner_ways(lab).items()}


def test_every_address_is_reached_in_both_families(lab):
    for address in [*addresses(lab.hosts[1]), *addresses(lab.hosts[2])]:
        assert support.pings(lab.hosts[0], address), address
    assert support.pings(lab.hosts[0], lab.hosts[0].interfaces[0].gateway)


@pytest.mark.parametrize("version", [4, 6])
def test_flows_spread_over_the_ways_of_a_rail(lab, version):
    end = lab.hosts[1].interfaces[0]
    address = end.address if version == 4 else end.address6
    assert support.pings(lab.hosts[0], address)
    arrived, taken = spread(lab, address)
    assert arrived == FLOWS
    for way in (1, 2):
        assert taken[1, way] > 10 * PAYLOAD, "of 64 flows fewer than ten have a chance of 1 in 10^9"
        assert taken[2, way] < PAYLOAD, "neighbours only"


@pytest.mark.parametrize("version", [4, 6])
def test_what_hosts_spread_over_rails_is_spread_again_within_them(lab, version):
    """The source address is known when the host chooses, so a rail that hashed like the host would choose alike."""
    own, address = ((each.service, each.service6)[version == 6] for each in lab.hosts[:2])
    assert support.pings(lab.hosts[0], address)
    arrived, taken = spread(lab, address, 2 * FLOWS, own)
    assert arrived == 2 * FLOWS
    assert min(taken.values()) > 8 * PAYLOAD, taken


def test_one_flow_label_takes_one_way_and_another_may_take_another(lab):
    """All else is the same: the source port as well."""
    address = lab.hosts[1].interfaces[0].address6
    assert support.pings(lab.hosts[0], address)
    taken = set()
    with inside(lab.hosts[0].netns), socket.socket(socket.AF_INET6, socket.SOCK_RAW, 253) as raw:
        for label in [*range(1, 21), *range(1, 21)]:
            lease = socket.inet_pton(socket.AF_INET6, address) + label.to_bytes(4) + b"\0\xff\1\0" + bytes(8)
            raw.setsockopt(socket.IPPROTO_IPV6, 32, lease)  # IPV6_FLOWLABEL_MGR: get, anyone's, create
            before = support.bytes_of_inner_ways(lab)
            raw.setsockopt(socket.IPPROTO_IPV6, 33, 1)  # IPV6_FLOWINFO_SEND
            raw.sendto(bytes(PAYLOAD), (address, 0, label, 0))
            support.wait_until(lambda: support.bytes_of_inner_ways(lab) != before, 20, "it has passed")  # noqa: B023
            after = support.bytes_of_inner_ways(lab)
            ((_, way),) = [place for place in after if after[place] - before[place] >= PAYLOAD]
            taken.add((label, way))
    assert len(taken) == 20, "the same label takes the same way"
    assert {way for _, way in taken} == {1, 2}


@pytest.mark.parametrize("version", [4, 6])
def test_a_blackholed_way_loses_its_flows_and_no_others_until_it_is_healed(lab, version):
    end = lab.hosts[1].interfaces[0]
    address = end.address if version == 4 else end.address6
    assert support.pings(lab.hosts[0], address)
    lab.blackhole(1, (1, 2), inner=2)
    arrived, taken = spread(lab, address)
    assert 10 < arrived < FLOWS - 10
    assert taken[1, 2] < PAYLOAD
    shown = lab.show()["rails"][0]
    assert [way["ports"][0]["loses_packets_to"] == [] for way in shown["inner"]] == [True, False]
    assert all(port["loses_packets_to"] == [] for port in shown["ports"])
    lab.heal(1)
    assert spread(lab, address)[0] == FLOWS


def test_one_way_is_congested_by_the_command_and_healed(lab):
    words = ["congest", "--name", lab.name, "--rail", "1", "--inner", "2", "--rate", "5mbit", "--toward", "h2"]
    assert CliRunner().invoke(cli.lab, words).exit_code == 0
    shown = json.loads(CliRunner().invoke(cli.lab, ["show", "--name", lab.name, "-j"]).output)
    rates = [[port["rate_bit_s"] for port in way["ports"]] for way in shown["rails"][0]["inner"]]
    assert rates == [[50_000_000] * 3, [50_000_000, 5_000_000, 50_000_000]]
    assert "r1w2" in CliRunner().invoke(cli.lab, ["show", "--name", lab.name]).output
    lab.heal()
    rates = [port["rate_bit_s"] for way in lab.show()["rails"][0]["inner"] for port in way["ports"]]
    assert rates == [50_000_000] * 6


def test_a_longer_way_still_leads_through_the_ways(lab):
    support.require("netns")
    address = lab.hosts[1].interfaces[0].address6
    assert support.pings(lab.hosts[0], address)
    lab.delay(1, 1, 2, 20_000)
    before = support.bytes_of_inner_ways(lab)
    assert float(lab.run(lab.hosts[0], ["ping", "-n", "-c3", "-i0.2", address]).split("= ")[-1].split("/")[0]) >= 20
    after = support.bytes_of_inner_ways(lab)
    assert sum(after.values()) - sum(before.values()) >= 3 * 100
    lab.heal()


def test_what_is_not_there_is_refused(lab, unique_name):
    with pytest.raises(UsageError, match="no inner path 3"):
        lab.blackhole(1, inner=3)
    with pytest.raises(UsageError, match="at least two inner paths"):
        Lab.up(unique_name(), inner=1)
    with Lab.up(unique_name(), hosts=2, rails=1) as plain:
        assert "inner" not in plain.show()["rails"][0]
        with pytest.raises(UsageError, match="have no inner paths"):
            plain.congest(1, "5mbit", inner=1)


def test_nothing_is_left_of_the_ways(unique_name):
    name = unique_name()
    Lab.up(name, hosts=2, rails=2, inner=3)
    assert Lab.open(name).spec.inner == 3
    Lab.open(name).heal()  # there are more ways than rails
    assert CliRunner().invoke(cli.lab, ["down", "--name", name]).exit_code == 0
    assert name not in support.run(["ip", "netns"]).stdout
