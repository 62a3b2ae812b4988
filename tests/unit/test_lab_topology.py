"""Names and addresses of a lab, worked out from its size."""

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools import config
from pytools.errors import UsageError
from pytools.lab import building, load, topology, wiring
from pytools.lab.topology import Spec, lab_of_namespace, namespace_pattern, parse_rate, rate_text


def all_addresses(spec):
    hosts, rails = spec.topology
    for host in hosts:
        yield from (host.service, host.service6)
        for each in host.interfaces:
            yield from (each.address, each.address6)
    ways = [way for rail in rails for way in rail.inner]
    for port in itertools.chain.from_iterable(each.ports for each in (*rails, *ways)):
        yield from (port.address, port.address6)


def test_the_addresses_are_those_that_were_agreed():
    hosts, rails = Spec("x", hosts=3, rails=2).topology
    assert hosts[2].service == "10.9.0.3"
    assert hosts[2].service6 == "fd00:9::3"
    assert hosts[2].netns == "swerve-x-h3"
    second = hosts[2].interfaces[1]
    assert (second.name, second.address, second.gateway) == ("rail2", "10.2.3.2", "10.2.3.1")
    assert (second.address6, second.gateway6) == ("fd00:2:3::2", "fd00:2:3::1")
    assert (second.nexthop_id, second.nexthop6_id) == (12, 22)
    assert rails[1].netns == "swerve-x-r2"
    assert [port.name for port in rails[1].ports] == ["h1", "h2", "h3"]
    assert (topology.group_id(3, 4), topology.group_id(3, 6)) == (103, 203)


def test_the_largest_lab_has_no_address_or_identifier_twice():
    spec = Spec("x", hosts=topology.MAX_HOSTS, rails=topology.MAX_RAILS, inner=topology.MAX_INNER)
    addresses = [ipaddress.ip_address(each) for each in all_addresses(spec)]
    assert len(addresses) == len(set(addresses))
    hosts, rails = spec.topology
    identifiers = [each.nexthop_id for each in hosts[0].interfaces]
    identifiers += [each.nexthop6_id for each in hosts[0].interfaces]
    identifiers += [topology.group_id(host.number, family) for host in hosts for family in (4, 6)]
    assert len(identifiers) == len(set(identifiers))
    ends = {each.index for host in hosts for each in host.interfaces}
    assert ends.isdisjoint(port.index for rail in rails for port in rail.ports)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 1},
        {"hosts": 100},
        {"rails": 0},
        {"rails": 9},
        {"inner": 1},
        {"inner": 9},
        {"rate_bit_s": 1},
        {"queue_bytes": 100},
        {"name": ""},
        {"name": "../x"},
        {"name": "x" * 33},
    ],
)
def test_a_lab_that_does_not_fit_is_refused(wrong):
    with pytest.raises(UsageError):
        Spec(**{"name": "x", **wrong})


@given(st.integers(10_000, 400 * 10**9))
def test_a_rate_is_read_back_as_it_was_written(rate):
    assert parse_rate(rate_text(rate)) == rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 10**8), ("1.5Gbit", 15 * 10**8), ("800kbit", 800_000), ("12000bit", 12_000), ("none", None)],
)
def test_rates_as_people_write_them(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "100", "100mbps", "-1mbit", "3zbit"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="100mbit"):
        parse_rate(text)


def test_the_namespaces_of_one_lab_are_not_those_of_another():
    ours = namespace_pattern("a")
    assert ours.fullmatch("swerve-a-h1")
    assert ours.fullmatch("swerve-a-r8")
    assert ours.fullmatch("swerve-a-r8w8")
    for other in ("swerve-a-h1-h1", "swerve-ab-h1", "swerve-b-h1", "swerve-a-x1", "swerve-a-h1x", "a-h1"):
        assert not ours.fullmatch(other), other
    assert lab_of_namespace("swerve-a-h1-h1") == "a-h1"
    assert lab_of_namespace("swerve-a-r1-r1w2") == "a-r1"
    assert lab_of_namespace("something") is None


def test_the_bucket_holds_a_millisecond_and_never_less_than_two_frames():
    assert wiring.burst_bytes(100_000_000) == 12_500
    assert wiring.burst_bytes(10_000) == 2 * 1514


@pytest.mark.parametrize("ipv6", [False, True])
def test_the_agents_configuration_is_valid_and_names_every_other_host(ipv6):
    hosts, _ = Spec("x", hosts=4, ipv6=ipv6).topology
    wanted = config.checked(building.agent_config(hosts[1], hosts, ipv6), "test")
    assert wanted.host == "h2"
    families = [4, 6] if ipv6 else [4]
    expected = [(name, family) for family in families for name in ("h1", "h3", "h4")]
    assert [(peer.name, ipaddress.ip_address(peer.address).version) for peer in wanted.peers] == expected
    assert {peer.clock for peer in wanted.peers} == {"shared"}


@given(st.integers(100_000, 10**10))
def test_a_load_sends_what_was_asked_for_in_short_batches(rate):
    frames, interval = load.batch_frames(rate), load.batch_interval_ns(rate)
    assert 1 <= frames <= 8
    assert frames * 1514 * 8 * 10**9 / interval == pytest.approx(rate, rel=1e-3)
