"""What user space writes into STAMP packets and reads from them: error estimates, and probes of a chosen size."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.sources.probing import stamp_packet as wire


@given(bound_ns=st.integers(0, 10**15), synchronised=st.booleans())
def test_an_error_estimate_never_claims_less_than_the_bound_nor_much_more(bound_ns: int, synchronised: bool) -> None:
    """RFC 4656, section 4.1.2: the error is Multiplier * 2^(Scale - 32) seconds."""
    field = wire.error_estimate(bound_ns, synchronised)
    assert 0 <= field <= 0xFFFF
    multiplier, scale = field & 0xFF, (field >> 8) & 0x3F
    claimed = -(-multiplier * (1 << scale) * 1_000_000_000 // (1 << 32))
    assert bound_ns <= claimed <= bound_ns * 1.02 + 1
    assert bool(field & 0x8000) == synchronised
    assert field & 0x4000, "our timestamps are PTPv2 truncated"
    assert multiplier, "a multiplier of zero means corrupt"


# ---- probes of a chosen size ----


def answered(request: bytes, longest: int = 9188) -> bytes:
    """The reply of a reflector that understands the size TLV."""
    reply = request[:24] + request[:14] + bytes(6) + b"\0" + request[45:50] + struct.pack("!H", longest) + request[52:]
    return reply[: wire.SHORT_REPLY_BYTES] if request[49] & 1 else reply


@given(payload_bytes=st.integers(wire.SMALLEST_SIZED_BYTES, 9188), short=st.booleans(), seq=st.integers(0, 2**32 - 1))
def test_a_request_has_the_size_asked_for_and_its_reply_the_same_or_as_little_as_can_be(
    payload_bytes: int, short: bool, seq: int
) -> None:
    request = wire.size_request(payload_bytes, seq, 5_000_000_000, short)
    assert len(request) == payload_bytes
    reply = answered(request)
    assert len(reply) == (wire.SHORT_REPLY_BYTES if short else payload_bytes) <= len(request)
    assert wire.size_reply(reply) == (seq, 9188)
    assert wire.size_reply(reply[: wire.SHORT_REPLY_BYTES]) == (seq, 9188), "its beginning is enough"
    assert int.from_bytes(request[14:16], "big") == wire.SIZE_SSID


@pytest.mark.parametrize("short", [False, True])
def test_a_size_request_is_a_stamp_packet_with_two_tlvs(short: bool) -> None:
    request = wire.size_request(200, 0xFFFFFFFE, (1 << 32) * 1_000_000_000 + 5_000_000_007, short)
    assert struct.unpack_from("!IIIHH", request) == (0xFFFFFFFE, 5, 7, wire.error_estimate(0, False), wire.SIZE_SSID)
    assert request[16:44] == bytes(28), "must be zero"
    assert struct.unpack_from("!BBHHH", request, 44) == (0x80, wire.REPLY_SIZE, 4, short, 0)
    assert struct.unpack_from("!BBH", request, 52) == (0x80, wire.EXTRA_PADDING, 200 - 56)
    assert request[56:] == bytes(200 - 56)


def test_a_reflector_that_does_not_know_the_tlv_is_told_by_what_comes_back() -> None:
    request = wire.size_request(200, 7, 0, short_reply=True)
    untouched = request[:24] + request[:4] + request[28:]
    assert wire.size_reply(untouched) == (7, 0)
    assert wire.size_reply(untouched[:44]) == (7, 0), "base only"
    assert wire.size_reply(untouched[:43]) is None


@pytest.mark.parametrize(
    ("at", "data"),
    [(44, b"\x80"), (44, b"\x40"), (45, b"\x01"), (46, b"\x00\x03")],
    ids=["unrecognised", "malformed", "another type", "another length"],
)
def test_only_a_whole_tlv_in_front_says_what_the_reflector_answers(at: int, data: bytes) -> None:
    reply = answered(wire.size_request(200, 7, 0, short_reply=False))
    assert wire.size_reply(reply) == (7, 9188)
    assert wire.size_reply(reply[:at] + data + reply[at + len(data) :]) == (7, 0)


@given(st.binary(max_size=128))
def test_any_bytes_can_be_read_as_a_reply(raw: bytes) -> None:
    reply = wire.size_reply(raw)
    assert (reply is None) == (len(raw) < wire.BASE_BYTES)
    if reply is not None:
        assert reply.seq == int.from_bytes(raw[24:28], "big")
        assert 0 <= reply.longest <= 0xFFFF
