"""The bursts that share the links in benchmarks, and the sentences of a process that holds packets."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytools.errors import UsageError
from pytools.lab import bursts, faults
from pytools.lab.topology import Spec

RATE = 20_000_000


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_bursts_come_to_the_share_towards_every_host(share: float) -> None:
    sent = dict.fromkeys((1, 2, 3), 0)
    last_ns = 0
    for burst in islice(bursts.schedule(3, RATE, share, 5), 60_000):
        sent[burst.destination] += burst.payload_bytes
        last_ns = burst.at_ns
    for payload in sent.values():
        assert payload * 8 * 10**9 / last_ns / RATE == pytest.approx(share * 1448 / 1547, rel=0.1)


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 2**32), st.integers(1_000_000, 10**9))
def test_bursts_are_in_order_between_two_hosts_that_are_there(hosts: int, seed: int, rate: int) -> None:
    found = list(islice(bursts.schedule(hosts, rate, 0.5, seed), 500))
    assert [each.at_ns for each in found] == sorted(each.at_ns for each in found)
    assert all(each.source != each.destination for each in found)
    assert {each.source for each in found} == {each.destination for each in found} == set(range(1, hosts + 1))
    sizes = [each.payload_bytes for each in found]
    assert min(sizes) >= 1448
    assert max(sizes) > 4 * sorted(sizes)[len(sizes) // 2], "the tail is heavy"
    assert found == list(islice(bursts.schedule(hosts, rate, 0.5, seed), 500))


def test_the_mean_is_that_of_the_sizes_drawn() -> None:
    sizes = [each.payload_bytes for each in islice(bursts.schedule(2, RATE, 0.5, 1), 100_000)]
    assert sum(sizes) / len(sizes) == pytest.approx(min(sizes) * bursts.mean_in_smallest(), rel=0.02)


@pytest.mark.parametrize("share", [0, -0.1, 1, 40, float("nan")])
def test_a_share_that_cannot_be_kept_is_refused(share: float) -> None:
    with pytest.raises(UsageError) as caught:
        bursts.check_share(share)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("rail", "source", "destination", "extra_us"),
    [(3, 1, 2, 10), (1, 1, 1, 10), (1, 1, 9, 10), (1, 1, 2, 0), (1, 1, 2, 2_000_000), (1, 1, 2, float("nan"))],
)
def test_a_longer_way_that_cannot_be_is_refused_before_anything_is_made(
    rail: int, source: int, destination: int, extra_us: float
) -> None:
    with pytest.raises(UsageError) as caught:
        faults.longer_way(Spec("not-there", hosts=3), rail, source, destination, extra_us)
    assert caught.value.next_step
