"""STAMP packets that user space writes and reads itself: probes, and those of a chosen size.

RFC 8762 unauthenticated, with session identifier and TLVs of RFC 8972. docs/probes.md lists the deviations.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

BASE_BYTES: Final = 44  # RFC 8762, sections 4.2.1 and 4.3.1
TLV_TYPE, TLV_BYTES = 253, 28  # of a probe, ours, of those for private use
NONCE_BYTES: Final = 8  # it begins with
EXTRA_PADDING: Final = 1  # TLV type, RFC 8972 section 5
REPLY_SIZE: Final = 252  # ours, of those for private use
UNRECOGNISED, MALFORMED = 0x80, 0x40  # TLV flags U and M, RFC 8972 section 4

# The session of probes that ask how large a packet may be: delays, losses and clocks never see it.
SIZE_SSID: Final = 0xFFFF

_SYNCHRONISED, _PTP = 0x8000, 0x4000  # error estimate: S and Z, RFC 4656 section 4.1.2, RFC 8186 section 2.3
_TLV_HEADER = 4
NONCE_AT: Final = BASE_BYTES + _TLV_HEADER
PROBE_BYTES: Final = NONCE_AT + TLV_BYTES  # UDP payload
_REPLY_SIZE_BYTES = 4
_REPLY_SIZE = struct.Struct("!BBHHH")  # TLV: flags, type, length; whether the reply shall be short; longest answered
_SIZE_BASE = struct.Struct("!IIIHH28x")
SHORT_REPLY_BYTES: Final = BASE_BYTES + _REPLY_SIZE.size
SMALLEST_SIZED_BYTES: Final = SHORT_REPLY_BYTES + _TLV_HEADER  # of a request, with an empty padding


def error_estimate(bound_ns: int, synchronised: bool) -> int:
    """The Error Estimate field for PTPv2 timestamps that are good to `bound_ns`, rounded up."""
    multiplier = max(1, -(-bound_ns * (1 << 32) // 1_000_000_000))
    scale = 0
    while multiplier > 255:
        multiplier = (multiplier + 1) // 2
        scale += 1
    return (_SYNCHRONISED if synchronised else 0) | _PTP | scale << 8 | multiplier


def probe(seq: int, error_estimate: int, ssid: int, nonce: bytes = bytes(NONCE_BYTES)) -> bytes:
    """The payload of a probe, without its timestamp."""
    base = struct.pack("!I8xHH28x", seq, error_estimate, ssid)
    return base + struct.pack("!BBH", UNRECOGNISED, TLV_TYPE, TLV_BYTES) + nonce.ljust(TLV_BYTES, b"\0")


def size_request(payload_bytes: int, seq: int, now_ns: int, short_reply: bool) -> bytes:
    """A request of exactly this many bytes: base, our TLV about the reply's size, padding.

    Parameters
    ----------
    payload_bytes : int
        At least SMALLEST_SIZED_BYTES.
    short_reply : bool
        Have the reflector leave the padding out, so that only the way there has to take the size.
    """
    seconds, nanoseconds = divmod(now_ns, 1_000_000_000)
    base = _SIZE_BASE.pack(seq, seconds & 0xFFFFFFFF, nanoseconds, error_estimate(0, False), SIZE_SSID)
    tlv = _REPLY_SIZE.pack(UNRECOGNISED, REPLY_SIZE, _REPLY_SIZE_BYTES, short_reply, 0)
    padding = payload_bytes - SMALLEST_SIZED_BYTES
    return base + tlv + struct.pack("!BBH", UNRECOGNISED, EXTRA_PADDING, padding) + bytes(padding)


class SizeReply(NamedTuple):
    """What a reply to a `size_request` says."""

    seq: int  # of the request
    longest: int  # request that the reflector answers; 0: it does not know the TLV


def size_reply(payload: bytes) -> SizeReply | None:
    """Read a reply, perhaps only its beginning; None when it is none of a size session."""
    if len(payload) < BASE_BYTES:
        return None
    (seq,) = struct.unpack_from("!I", payload, 24)
    if len(payload) < SHORT_REPLY_BYTES:
        return SizeReply(seq, 0)
    flags, kind, value_bytes, _, longest = _REPLY_SIZE.unpack_from(payload, BASE_BYTES)
    known = kind == REPLY_SIZE and value_bytes == _REPLY_SIZE_BYTES and not flags & (UNRECOGNISED | MALFORMED)
    return SizeReply(seq, longest if known else 0)
