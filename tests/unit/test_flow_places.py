"""Places in the table of steered flows: never two flows in one, all or none, whatever comes and goes."""

from __future__ import annotations

import ipaddress
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pytools.errors import RefusedError
from steering.actuators import flow_keys
from steering.actuators.flow_places import Place, Places
from steering.plan import FlowKey

KEY = np.dtype(
    [
        ("local", [("bytes", "u1", (16,))]),
        ("remote", [("bytes", "u1", (16,))]),
        ("local_port", "u2"),
        ("remote_port", "u2"),
        ("protocol", "u1"),
        ("pad", "u1", (3,)),
    ]
)
ports = st.integers(1, 65535)
v4 = st.ip_addresses(v=4).map(str)
v6 = st.ip_addresses(v=6).filter(lambda each: each.ipv4_mapped is None).map(str)
flows = st.one_of(
    st.builds(FlowKey, st.sampled_from((6, 17)), v4, ports, v4, ports),
    st.builds(FlowKey, st.sampled_from((6, 17)), v6, ports, v6, ports),
)


def flow(number: int) -> FlowKey:
    return FlowKey(6, "10.0.0.1", 1 + number, "10.0.0.2", 443)


@given(st.lists(flows, max_size=20))
def test_a_key_says_which_flow_it_is(some: list[FlowKey]) -> None:
    keys = flow_keys.encoded(some, KEY)
    assert [flow_keys.decoded(key) for key in keys] == some
    assert not keys["pad"].any()


@given(st.lists(flows, min_size=1, max_size=20), st.integers(0, (1 << 64) - 1))
def test_hashes_are_those_of_the_contract(some: list[FlowKey], seed: int) -> None:
    keys = flow_keys.encoded(some, KEY)
    expected = []
    for key in keys:
        value = seed
        for word in np.frombuffer(key.tobytes(), np.uint64).tolist():
            value = (value ^ word) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
            value ^= value >> 32
        expected.append(value)
    assert flow_keys.hashes(keys, seed).tolist() == expected


def test_flows_spread_over_the_sets() -> None:
    """A full table of flows that differ in a port alone: hardly a set holds more than its ways."""
    keys = flow_keys.encoded([flow(n) for n in range(4096)], KEY)
    for seed in (0, 1, 0x123456789ABCDEF0):
        sets = np.bincount((flow_keys.hashes(keys, seed) & np.uint64(4095)).astype(int), minlength=4096)
        assert sets.max() <= 8
        assert 0.30 < (sets == 0).mean() < 0.43, "as chance has it: 1/e"


def test_addresses_that_are_none() -> None:
    for text in ("", "peer", "10.0.0", "10.0.0.256", "fd00::g"):
        with pytest.raises(ValueError, match=text or "''"):
            flow_keys.address(text)
    assert flow_keys.address("10.0.0.1").mapped == ipaddress.ip_address("::ffff:10.0.0.1").packed


def test_a_full_set_refuses_all_and_keeps_nothing() -> None:
    places = Places(rows=16, sets=4, ways=2)
    places.take([flow(0)], [0x5_0000_0001])
    with pytest.raises(RefusedError, match="very rare"):
        places.take([flow(n) for n in (1, 2, 3)], [0x7_0000_0002, 0x7_0000_0001, 0x9_0000_0001])
    assert list(places) == [flow(0)]
    with pytest.raises(RefusedError):  # two tags that the kernel could not tell apart
        places.take([flow(1)], [0x5_0000_0005])
    assert len(places.take([flow(n) for n in (1, 2, 3)], [0x7_0000_0002, 0x7_0000_0001, 0x9_0000_0000])) == 3


def test_rows_rest_before_they_are_used_again() -> None:
    places = Places(rows=4, sets=4, ways=2)
    (first,) = places.take([flow(0)], [0])
    places.give_back([flow(0)])
    rows = [places.take([flow(n)], [n << 33 | n])[0].row for n in (1, 2, 3)]
    assert first.row not in rows
    assert places.take([flow(4)], [0])[0].row == first.row


class Machine(RuleBasedStateMachine):
    """Against a plain dictionary; hashes are drawn so that sets and tags collide often."""

    @initialize()
    def begin(self) -> None:
        self.places = Places(rows=12, sets=4, ways=4)
        self.model: dict[FlowKey, Place] = {}
        self.number = 0

    @rule(seed=st.integers(0, 1 << 32), count=st.integers(0, 5))
    def take(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        wanted = [flow(self.number + n) for n in range(count)]
        self.number += count
        hashes = [chance.randrange(12) << 33 | chance.randrange(8) for _ in wanted]
        try:
            made = self.places.take(wanted, hashes)
        except RefusedError:
            return
        for one, place, value in zip(wanted, made, hashes, strict=True):
            assert (place.set, place.tag, place.entry & 0xFFFFFFFF) == (value & 3, value >> 32 | 1, place.row)
            self.model[one] = place

    @rule(seed=st.integers(0, 1 << 32))
    def give_back(self, seed: int) -> None:
        gone = random.Random(seed).sample(list(self.model), len(self.model) // 2)
        self.places.give_back(gone)
        for each in gone:
            del self.model[each]

    @invariant()
    def they_agree(self) -> None:
        assert {each: self.places[each] for each in self.places} == self.model
        assert self.places.room_for(12 - len(self.model))
        assert not self.places.room_for(13 - len(self.model))
        for names in (lambda p: p.row, lambda p: (p.set, p.way), lambda p: (p.set, p.tag)):
            assert len({names(place) for place in self.model.values()}) == len(self.model)


TestPlaces = Machine.TestCase
