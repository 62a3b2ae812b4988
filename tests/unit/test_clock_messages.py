"""What crosses hosts about clocks: whole messages arrive whole, and nothing else gets in."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oscillators import SECOND_NS, Crystal, edges_of

from pytools.estimators.offsets import UNBOUNDED_NS
from pytools.sources.clocks.messages import (
    MOST_NS,
    VERSION,
    Clocks,
    Edge,
    Edges,
    HostClock,
    decode_clocks,
    decode_edges,
    encode,
)
from pytools.sources.clocks.timescale import Timescale

HALF_NS = SECOND_NS // 2
AT_NS = 3_000 * SECOND_NS
EDGE = Edge("h2", AT_NS, -3 * 10**8, 12_345.6, 8.0, 5.0, 250, -300_002_000, -299_998_000, 80, 20, False)
CLOCK = HostClock("h2", AT_NS, -3 * 10**8, -12.5, 8.0, 5.0, 250, 1_900, "synchronised", None, 3, 240, 60, 1)

names = st.sampled_from(["h1", "h2", "h3", "evil"]) | st.text(min_size=1, max_size=60)
times = st.integers(-MOST_NS, MOST_NS)
errors = st.integers(0, UNBOUNDED_NS)
rates, sigmas, measured = st.floats(-1e7, 1e7), st.floats(0, 1e12), st.floats(1e-4, 1e9)
counts = st.integers(0, 2**40)
edges = st.builds(
    Edge, names, times, times, rates, measured, measured, errors, times, times, counts, counts, st.booleans()
)
host_clocks = st.builds(
    HostClock,
    *(names, times, times, rates, sigmas, sigmas, errors, errors),
    *(st.sampled_from(["synchronised", "holdover", "free_running"]), st.none() | rates, *[counts] * 4),
)


def message_of_edges(*changed: Edge) -> Edges:
    return Edges(VERSION, 0.0, list(changed))


def message_of_clocks(*changed: HostClock) -> Clocks:
    return Clocks(VERSION, 1_800_000_000 * SECOND_NS, list(changed))


@given(st.none() | rates, st.lists(edges, max_size=8))
def test_edges_arrive_as_they_were_sent(slew: float | None, told: list[Edge]) -> None:
    message = Edges(VERSION, slew, told)
    assert decode_edges(encode(message)) == message


@given(st.integers(-(2**62), 2**62), st.lists(host_clocks, max_size=8))
def test_clocks_arrive_as_they_were_sent(ahead: int, told: list[HostClock]) -> None:
    message = Clocks(VERSION, ahead, told)
    assert decode_clocks(encode(message)) == message


def test_a_clock_of_today_is_taken() -> None:
    assert decode_edges(encode(message_of_edges(EDGE))) is not None
    assert decode_clocks(encode(message_of_clocks(CLOCK))) is not None


def test_a_fleet_fits() -> None:
    many = [replace(EDGE, peer=f"host{number:05d}") for number in range(4096)]
    assert decode_edges(encode(message_of_edges(*many))) is not None
    assert decode_edges(encode(message_of_edges(*many, EDGE))) is None, "one more than is taken"


def test_every_name_that_a_configuration_takes_is_taken_here() -> None:
    longest = "h" * 255
    assert decode_edges(encode(message_of_edges(replace(EDGE, peer=longest)))) is not None
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, host=longest)))) is not None


@given(st.binary(max_size=400))
@example(b"\x93\x01\xc0\xdd\xff\xff\xff\xff")  # a list that says it is four thousand million long
@example(b"\x93\x01\xc0\xdc\xff\xff")
@example(b"\x91" * 100_000)  # nested deeper than any stack
@example(b"\xdb\xff\xff\xff\xff")
@example(b"\xc1")
def test_arbitrary_bytes_are_refused_without_a_word(payload: bytes) -> None:
    """A whole message is not found by chance."""
    assert decode_edges(payload) is None
    assert decode_clocks(payload) is None


@settings(max_examples=500)
@given(st.data())
def test_a_message_with_damage_is_refused_or_is_a_whole_message(data: st.DataObject) -> None:
    whole = encode(data.draw(st.sampled_from([message_of_edges(EDGE, EDGE), message_of_clocks(CLOCK, CLOCK)])))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for payload in (bytes(damaged), cut, bytes(damaged) + cut):
        for decode in (decode_edges, decode_clocks):
            found = decode(payload)
            if found is not None:
                assert decode(encode(found)) == found  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("field", ["drift_ppb", "sigma_ns", "drift_sigma_ppb"])
def test_numbers_that_are_none_or_too_large_are_refused(field: str, value: float) -> None:
    assert decode_edges(encode(message_of_edges(EDGE, replace(EDGE, **{field: value})))) is None
    assert decode_clocks(encode(message_of_clocks(CLOCK, replace(CLOCK, **{field: value})))) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_slew_that_is_no_number_is_refused(value: float) -> None:
    assert decode_edges(encode(Edges(VERSION, value, [EDGE]))) is None
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, slew_ppb=value)))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch_ns": MOST_NS + 1},
        {"epoch_ns": -(2**63)},
        {"offset_ns": 2**63},
        {"bound_ns": -1},
        {"bound_ns": UNBOUNDED_NS + 1},
        {"sigma_ns": -1.0},
        {"drift_sigma_ppb": -1.0},
        {"drift_ppb": 2e7},
        {"pairs_kept": -1},
        {"pairs_kept": 2**41},
        {"offset_ns": 1.5},
        {"offset_ns": True},
        {"offset_ns": "7"},
        {"offset_ns": None},
        {"drift_ppb": "7"},
    ],
    ids=str,
)
def test_what_is_out_of_its_range_or_of_another_type_is_refused(changes: dict[str, Any]) -> None:
    assert decode_edges(encode(message_of_edges(replace(EDGE, **changes)))) is None
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, **changes)))) is None


@pytest.mark.parametrize("name", ["", "h" * 256, 7, None, b"h2"])
def test_names_that_are_none_or_too_long_are_refused(name: Any) -> None:
    assert decode_edges(encode(message_of_edges(replace(EDGE, peer=name)))) is None
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, host=name)))) is None


@pytest.mark.parametrize(
    "changes", [{"sigma_ns": 0.0}, {"drift_sigma_ppb": 0.0}, {"stepped": 1}, {"stepped": None}], ids=str
)
def test_an_edge_without_error_or_without_a_word_on_steps_is_refused(changes: dict[str, Any]) -> None:
    assert decode_edges(encode(message_of_edges(replace(EDGE, **changes)))) is None


def test_an_edge_across_a_step_does_not_keep_the_others_from_being_heard() -> None:
    """Its hard interval may be empty: no line fits both sides of a step."""
    across = replace(EDGE, hard_low_ns=EDGE.offset_ns + 1, hard_high_ns=EDGE.offset_ns - 10_000_000, stepped=True)
    assert decode_edges(encode(message_of_edges(EDGE, across))) == message_of_edges(EDGE, across)


def test_a_state_that_is_none_is_refused() -> None:
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, state="perfect")))) is None  # type: ignore[arg-type]
    assert decode_clocks(encode(message_of_clocks(replace(CLOCK, hard_bound_ns=UNBOUNDED_NS)))) is not None


@pytest.mark.parametrize("version", [0, VERSION + 1, -1, 2**70])
def test_another_version_is_refused(version: int) -> None:
    raw = msgspec.msgpack.encode([version, None, []]) if version < 2**63 else struct.pack(">BBQ", 0x93, 0xCF, 2**64 - 1)
    assert decode_edges(raw) is None
    assert decode_clocks(msgspec.msgpack.encode([min(version, 2**62), 0, []])) is None


def test_one_kind_of_message_is_not_taken_for_the_other() -> None:
    assert decode_clocks(encode(message_of_edges(EDGE))) is None
    assert decode_edges(encode(message_of_clocks(CLOCK))) is None


@settings(max_examples=60)
@given(st.lists(edges, min_size=1, max_size=6), times)
def test_whatever_is_taken_never_stops_the_one_who_solves(told: list[Edge], clock_ns: int) -> None:
    """A host that holds the key and tells nonsense does harm to itself only; its clocks are told or refused whole."""
    crystals = {name: Crystal(10**8 * place) for place, name in enumerate(("h1", "h2", "h3"))}
    scale = Timescale("h1", HALF_NS, "")
    for host in crystals:
        scale.hear(host, edges_of(host, crystals, AT_NS), AT_NS)
    scale.hear("evil", message_of_edges(*told), AT_NS)
    found = scale.solve(crystals["h1"].at(AT_NS), AT_NS, 0)
    scale.adopt("h1", found, AT_NS)
    for peer in ("h2", "h3", "evil", told[0].peer):
        scale.between(peer, clock_ns, told[0])
    assert decode_clocks(encode(found)) == found
