"""The wire format: what is written is read again, and no bytes from outside break the reader."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.windows import MISSING
from pytools.sources.probing import stamp_packet as wire

PTP_ERROR = wire.error_estimate(200, False)


def one_request(seq: int = 5, ssid: int = 9, now_ns: int = 3_000_000_007, room: int = 64) -> np.ndarray:
    payload = np.zeros((1, room), np.uint8)
    packets = wire.requests(payload)
    wire.prepare_requests(packets)
    wire.write_requests(packets, np.array([seq]), np.array([ssid]), now_ns, PTP_ERROR)
    return payload


def turned(payload: np.ndarray, **changes: object) -> np.ndarray:
    facts = {
        "seq": np.array([77]),
        "receive_ns": np.array([4_000_000_001]),
        "now_ns": 4_000_000_900,
        "error": np.array([PTP_ERROR]),
        "ttl": np.array([61]),
    } | changes
    packets = wire.replies(payload)
    wire.turn_into_replies(payload, packets, **facts)  # type: ignore[arg-type]
    return packets


@given(bound_ns=st.integers(0, 10**15), synchronised=st.booleans())
def test_an_error_estimate_never_claims_less_than_the_bound_nor_much_more(bound_ns: int, synchronised: bool) -> None:
    field = np.array([wire.error_estimate(bound_ns, synchronised)], np.uint16)
    (claimed,) = wire.error_bound_ns(field)
    assert bound_ns <= claimed <= bound_ns * 1.02 + 1
    assert wire.is_synchronised(field)[0] == synchronised
    assert field[0] & 0x4000, "our timestamps are PTPv2 truncated"
    assert field[0] & 0xFF, "a multiplier of zero means corrupt"


def test_a_multiplier_of_zero_is_no_bound() -> None:
    assert wire.error_bound_ns(np.array([0x4500], np.uint16))[0] == MISSING


@given(time_ns=st.integers(1, 2**32 * 10**9 - 1))
def test_a_time_survives_the_wire_to_the_nanosecond(time_ns: int) -> None:
    seconds, fraction = wire.split_ns(np.array([time_ns]))
    assert wire.join_ns(seconds, fraction, np.array([PTP_ERROR]))[0] == time_ns


def test_an_ntp_timestamp_is_told_apart_by_the_error_estimate() -> None:
    half = np.array([1 << 31], np.uint32)
    joined = wire.join_ns(np.array([10], np.uint32), half, np.array([0x0001], np.uint16))
    assert joined[0] == 10_500_000_000


def test_a_timestamp_of_zero_is_no_time() -> None:
    zero = np.zeros(1, np.uint32)
    assert wire.join_ns(zero, zero, np.array([PTP_ERROR]))[0] == MISSING


def test_a_request_asks_for_a_follow_up_and_is_zero_where_it_must_be() -> None:
    payload = one_request()
    assert payload.shape == (1, 64)
    packet = wire.requests(payload)
    assert wire.follow_up_asked(packet, np.array([64])).all()
    assert (packet["tlv_flags"], packet["tlv_type"], packet["tlv_length"]) == (0x80, 7, 16)
    assert bytes(payload[0, 16:44]) == bytes(28)
    assert bytes(payload[0, 48:64]) == bytes(16)


def test_a_reply_carries_what_the_request_said() -> None:
    payload = one_request(seq=0xFFFFFFFE, ssid=65535, now_ns=12_345_678_901)
    head = payload[0, :14].copy()
    packet = turned(payload)
    assert bytes(payload[0, 24:38]) == bytes(head)
    assert packet["sender_seq"][0] == 0xFFFFFFFE
    assert packet["ssid"][0] == 65535
    assert packet["sender_ttl"][0] == 61
    assert packet["seq"][0] == 77
    received = wire.join_ns(packet["receive_seconds"], packet["receive_fraction"], packet["error"])
    assert received[0] == 4_000_000_001
    assert bytes(payload[0, 38:40]) == bytes(2)
    assert bytes(payload[0, 41:44]) == bytes(3)


@pytest.mark.parametrize(("sent_ns", "known"), [(9_000_000_123, True), (MISSING, False)])
def test_the_follow_up_tells_the_earlier_departure_or_nothing(sent_ns: int, known: bool) -> None:
    packet = turned(one_request())
    wire.write_follow_up(packet, np.array([76]), np.array([sent_ns]))
    told = wire.join_ns(packet["follow_up_seconds"], packet["follow_up_fraction"], packet["error"])
    assert told[0] == sent_ns
    assert packet["tlv_flags"][0] == 0
    assert packet["follow_up_seq"][0] == (76 if known else 0)
    assert packet["follow_up_method"][0] == (wire.SOFTWARE_LOCAL if known else 0)


def tlv(kind: int, value: bytes, flags: int = 0x80, length: int | None = None) -> bytes:
    return bytes([flags, kind]) + (len(value) if length is None else length).to_bytes(2, "big") + value


def reflected(*tlvs: bytes) -> tuple[bytes, bool]:
    raw = bytes(44) + b"".join(tlvs)
    packet = np.zeros(256, np.uint8)
    packet[: len(raw)] = np.frombuffer(raw, np.uint8)
    asked = wire.reflect_tlvs(packet, len(raw))
    assert not packet[len(raw) :].any(), "nothing beyond the packet may be touched"
    assert bytes(packet[:44]) == bytes(44)
    return bytes(packet[44 : len(raw)]), asked


def test_padding_is_understood_and_other_tlvs_are_not() -> None:
    flags, asked = reflected(tlv(1, bytes(8)), tlv(2, bytes(4)), tlv(200, b""))
    assert (flags[0], flags[12], flags[20]) == (0, 0x80, 0x80)
    assert not asked


def test_a_follow_up_is_answered_as_the_first_only() -> None:
    assert reflected(tlv(7, bytes(16)), tlv(1, bytes(3)))[1]
    second, asked = reflected(tlv(1, bytes(4)), tlv(7, bytes(16)))
    assert not asked
    assert second[8] == 0x80


def test_a_tlv_that_does_not_fit_is_marked_malformed_and_ends_the_list() -> None:
    flags, _ = reflected(tlv(1, bytes(4), length=5))
    assert flags[0] == 0x40
    flags, asked = reflected(tlv(7, bytes(8)), tlv(1, bytes(4), flags=0xFF))
    assert (flags[0], flags[12], asked) == (0x40, 0xFF, False)


@given(st.binary(max_size=200))
def test_any_bytes_after_the_base_only_change_in_flags(tail: bytes) -> None:
    packet = np.zeros(300, np.uint8)
    packet[44 : 44 + len(tail)] = np.frombuffer(tail, np.uint8)
    asked = wire.reflect_tlvs(packet, 44 + len(tail))
    after = bytes(packet[44 : 44 + len(tail)])
    changed = [place for place in range(len(tail)) if after[place] != tail[place]]
    offset, flag_places = 0, set()
    while offset + 4 <= len(tail):
        flag_places.add(offset)
        offset += 4 + int.from_bytes(tail[offset + 2 : offset + 4], "big")
    assert set(changed) <= flag_places
    assert not packet[44 + len(tail) :].any()
    assert asked <= (len(tail) >= 20)


@given(st.binary(min_size=128, max_size=128))
def test_any_bytes_can_be_read_as_a_reply(raw: bytes) -> None:
    packet = wire.replies(np.frombuffer(raw, np.uint8).reshape(1, 128).copy())
    joined = wire.join_ns(packet["receive_seconds"], packet["receive_fraction"], packet["error"])
    assert joined[0] == MISSING or joined[0] >= 0
    bound = wire.error_bound_ns(packet["error"])
    assert bound[0] == MISSING or bound[0] >= 0


# ---- probes about size ----


def answered(request: bytes, longest: int = 9188) -> bytes:
    """What our reflector makes of one request."""
    row = np.zeros(max(len(request), 64), np.uint8)
    row[: len(request)] = np.frombuffer(request, np.uint8)
    wire.reflect_tlvs(row, len(request))
    length = wire.answer_size(row, len(request), longest)
    payload = row[None, :]
    turned(payload)
    return payload[0, :length].tobytes()


@given(payload_bytes=st.integers(wire.SMALLEST_SIZED_BYTES, 9188), short=st.booleans(), seq=st.integers(0, 2**32 - 1))
def test_a_request_has_the_size_asked_for_and_its_reply_the_same_or_as_little_as_can_be(
    payload_bytes: int, short: bool, seq: int
) -> None:
    request = wire.size_request(payload_bytes, seq, 5_000_000_000, short)
    assert len(request) == payload_bytes
    reply = answered(request)
    assert len(reply) == (wire.SHORT_REPLY_BYTES if short else payload_bytes) <= len(request)
    assert wire.size_reply(reply) == (seq, 9188)
    assert int.from_bytes(request[14:16], "big") == wire.SIZE_SSID


def test_a_reflector_that_does_not_know_the_tlv_is_told_by_what_comes_back() -> None:
    request = wire.size_request(200, 7, 0, short_reply=True)
    untouched = request[:24] + request[:4] + request[28:]
    assert wire.size_reply(untouched) == (7, 0)
    assert wire.size_reply(untouched[:44]) == (7, 0), "base only"
    assert wire.size_reply(untouched[:43]) is None


def test_the_tlv_is_understood_in_front_and_whole_only() -> None:
    request = bytearray(wire.size_request(200, 7, 0, short_reply=True))
    behind = bytes(request[:44]) + bytes(request[52:]) + bytes(request[44:52])
    cut = bytearray(request)
    cut[46:48] = (3).to_bytes(2, "big")
    for odd in (behind, bytes(cut)):
        assert len(answered(odd)) == len(odd), "answered like any other's, at full size"


@given(request=st.binary(min_size=44, max_size=300), longest=st.integers(0, 65_535))
def test_no_request_makes_a_reply_longer_than_itself(request: bytes, longest: int) -> None:
    row = np.zeros(300, np.uint8)
    row[: len(request)] = np.frombuffer(request, np.uint8)
    wire.reflect_tlvs(row, len(request))
    assert 44 <= wire.answer_size(row, len(request), longest) <= len(request)
    assert not row[len(request) :].any(), "nothing is written behind the packet"
