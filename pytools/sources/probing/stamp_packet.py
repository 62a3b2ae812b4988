"""STAMP on the wire: RFC 8762 unauthenticated, with session identifier and Follow-Up TLV of RFC 8972.

Pure functions and layouts over arrays of packets; times are int64 nanoseconds of whichever clock the writer
has. docs/probes.md says where and why we deviate from the RFCs.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING

BASE_BYTES: Final = 44  # RFC 8762, sections 4.2.1 and 4.3.1
FOLLOW_UP_BYTES: Final = 20  # RFC 8972, section 4.7, with the TLV header
PROBE_BYTES: Final = BASE_BYTES + FOLLOW_UP_BYTES

EXTRA_PADDING, FOLLOW_UP = 1, 7  # TLV types, RFC 8972 section 5
REPLY_SIZE = 252  # ours, of those for private use
UNRECOGNISED, MALFORMED = 0x80, 0x40  # TLV flags U and M, RFC 8972 section 4
SOFTWARE_LOCAL = 2  # timestamping method, RFC 8972 section 5: neither the interface's hardware nor another host

# The session of probes that ask how large a packet may be: delays, losses and clocks never see it.
SIZE_SSID: Final = 0xFFFF

_SYNCHRONISED, _PTP = 0x8000, 0x4000  # error estimate: S and Z, RFC 4656 section 4.1.2, RFC 8186 section 2.3
_TLV_HEADER = 4
_REPLY_SIZE_BYTES = 4
_REPLY_SIZE = struct.Struct(
    "!BBHHH"
)  # the TLV: flags, type, length; whether the reply shall be short; longest answered
_SIZE_BASE = struct.Struct("!IIIHH28x")
SHORT_REPLY_BYTES: Final = BASE_BYTES + _REPLY_SIZE.size
SMALLEST_SIZED_BYTES: Final = SHORT_REPLY_BYTES + _TLV_HEADER  # of a request, with an empty padding

_FOLLOW_UP_FIELDS = [
    ("tlv_flags", "u1", 44),
    ("tlv_type", "u1", 45),
    ("tlv_length", ">u2", 46),
    ("follow_up_seq", ">u4", 48),
    ("follow_up_seconds", ">u4", 52),
    ("follow_up_fraction", ">u4", 56),
    ("follow_up_method", "u1", 60),
    ("follow_up_reserved", "V3", 61),
]
_REQUEST_FIELDS = [
    ("seq", ">u4", 0),
    ("seconds", ">u4", 4),
    ("fraction", ">u4", 8),
    ("error", ">u2", 12),
    ("ssid", ">u2", 14),
    ("mbz", "V28", 16),
    *_FOLLOW_UP_FIELDS,
]
_REPLY_FIELDS = [
    ("seq", ">u4", 0),
    ("seconds", ">u4", 4),
    ("fraction", ">u4", 8),
    ("error", ">u2", 12),
    ("ssid", ">u2", 14),
    ("receive_seconds", ">u4", 16),
    ("receive_fraction", ">u4", 20),
    ("sender_seq", ">u4", 24),
    ("sender_seconds", ">u4", 28),
    ("sender_fraction", ">u4", 32),
    ("sender_error", ">u2", 36),
    ("sender_ttl", "u1", 40),
    *_FOLLOW_UP_FIELDS,
]


@functools.cache
def _layout(reflected: bool, itemsize: int) -> np.dtype[Any]:
    names, formats, offsets = zip(*(_REPLY_FIELDS if reflected else _REQUEST_FIELDS), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


def requests(payload: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows of at least PROBE_BYTES, seen as packets of a Session-Sender; shares memory with `payload`."""
    return np.frombuffer(payload, _layout(False, payload.shape[1]))


def replies(payload: NDArray[np.uint8]) -> NDArray[Any]:
    """Rows of at least PROBE_BYTES, seen as packets of a Session-Reflector; shares memory with `payload`."""
    return np.frombuffer(payload, _layout(True, payload.shape[1]))


def error_estimate(bound_ns: int, synchronised: bool) -> int:
    """The Error Estimate field for PTPv2 timestamps that are good to `bound_ns`, rounded up."""
    multiplier = max(1, -(-bound_ns * (1 << 32) // 1_000_000_000))
    scale = 0
    while multiplier > 255:
        multiplier = (multiplier + 1) // 2
        scale += 1
    return (_SYNCHRONISED if synchronised else 0) | _PTP | scale << 8 | multiplier


def error_bound_ns(error: NDArray[Any]) -> NDArray[np.int64]:
    """What an Error Estimate claims, in nanoseconds rounded up; MISSING where the multiplier is 0."""
    field = error.astype(np.int64)
    multiplier, scale = field & 0xFF, (field >> 8) & 0x3F
    seconds = multiplier * np.exp2(scale - 32.0)
    bound = np.ceil(np.minimum(seconds * 1e9, 9e18)).astype(np.int64)
    return np.where(multiplier == 0, MISSING, bound)


def is_synchronised(error: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the writer calls its clock synchronised (S)."""
    return np.asarray(error & _SYNCHRONISED, np.bool_)


def split_ns(time_ns: Any) -> tuple[Any, Any]:
    """Seconds and nanoseconds, as PTPv2 truncated has them."""
    return time_ns // 1_000_000_000, time_ns % 1_000_000_000


def join_ns(seconds: NDArray[Any], fraction: NDArray[Any], error: NDArray[Any]) -> NDArray[np.int64]:
    """Nanoseconds of a timestamp, PTPv2 truncated or NTP as the error estimate beside it says (Z).

    A timestamp of zero means that the writer had none: MISSING.
    """
    whole, part = seconds.astype(np.int64), fraction.astype(np.int64)
    nanoseconds = np.where((error & _PTP) != 0, part, (part * 1_000_000_000) >> 32)
    return np.where((whole | part) == 0, MISSING, whole * 1_000_000_000 + nanoseconds)


def prepare_requests(packets: NDArray[Any]) -> None:
    """Write what never changes into the requests of a sender."""
    packets["tlv_flags"] = UNRECOGNISED  # set by the sender, cleared by a reflector that understands the TLV
    packets["tlv_type"] = FOLLOW_UP
    packets["tlv_length"] = FOLLOW_UP_BYTES - _TLV_HEADER


def write_requests(packets: NDArray[Any], seq: NDArray[Any], ssid: NDArray[Any], now_ns: int, error: Any) -> None:
    """Write what changes from one request to the next."""
    packets["seq"] = seq
    packets["seconds"], packets["fraction"] = split_ns(now_ns)
    packets["error"] = error
    packets["ssid"] = ssid


def follow_up_asked(packets: NDArray[Any], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which packets have one TLV after the base, a whole Follow-Up TLV: those that swerve sends."""
    asked: NDArray[np.bool_] = (
        (lengths == PROBE_BYTES)
        & (packets["tlv_type"] == FOLLOW_UP)
        & (packets["tlv_length"] == FOLLOW_UP_BYTES - _TLV_HEADER)
    )
    return asked


def turn_into_replies(
    payload: NDArray[np.uint8],
    packets: NDArray[Any],
    *,
    seq: NDArray[Any],
    receive_ns: NDArray[np.int64],
    now_ns: int,
    error: NDArray[Any],
    ttl: NDArray[Any],
) -> None:
    """Make the reply of each request in the request's own bytes; TLVs stay as they are.

    Parameters
    ----------
    payload : ndarray of uint8, shape (n, at least PROBE_BYTES)
        The requests.
    packets : ndarray
        The same, seen through `replies`.
    receive_ns : ndarray of int64
        When each request came in, as good as `error` says.
    """
    payload[:, 24:38] = payload[:, :14]  # the sender's sequence number, timestamp and error estimate
    payload[:, 38:BASE_BYTES] = 0
    packets["sender_ttl"] = ttl
    packets["seq"] = seq
    packets["seconds"], packets["fraction"] = split_ns(now_ns)
    packets["error"] = error
    packets["receive_seconds"], packets["receive_fraction"] = split_ns(receive_ns)


def write_follow_up(
    packets: NDArray[Any], seq: NDArray[Any], sent_ns: NDArray[np.int64], chosen: NDArray[np.intp] | slice = slice(None)
) -> None:
    """Answer the Follow-Up TLV of the packets chosen: when the reply numbered `seq` left; zeros where that is MISSING.

    Parameters
    ----------
    packets, seq, sent_ns : ndarray
        All packets, and what to tell in each.
    """
    known = sent_ns[chosen] != MISSING
    seconds, fraction = split_ns(np.where(known, sent_ns[chosen], 0))
    packets["tlv_flags"][chosen] = 0
    packets["follow_up_seq"][chosen] = np.where(known, seq[chosen], 0)
    packets["follow_up_seconds"][chosen], packets["follow_up_fraction"][chosen] = seconds, fraction
    packets["follow_up_method"][chosen] = np.where(known, SOFTWARE_LOCAL, 0)
    packets["follow_up_reserved"][chosen] = np.void(bytes(3))


def reflect_tlvs(packet: NDArray[np.uint8], length: int) -> bool:
    """Set the flags of the TLVs of one packet that is not of our own making (RFC 8972, section 4).

    A Follow-Up TLV is answered as the first of all only, and so is ours about the reply's size. Extra Padding is
    understood, everything else is not.
    Bytes that are no TLVs (the padding of a TWAMP Light sender) go back as they came, apart from these flags.

    Returns
    -------
    bool
        Whether the first TLV is a whole Follow-Up TLV, which the caller answers.
    """
    offset, follow_up_first = BASE_BYTES, False
    while offset + _TLV_HEADER <= length:
        kind = int(packet[offset + 1])
        value_bytes = int(packet[offset + 2]) << 8 | int(packet[offset + 3])
        flags = 0
        if offset + _TLV_HEADER + value_bytes > length:
            packet[offset] = MALFORMED
            return follow_up_first
        if kind == FOLLOW_UP and offset == BASE_BYTES:
            follow_up_first = value_bytes == FOLLOW_UP_BYTES - _TLV_HEADER
            flags = 0 if follow_up_first else MALFORMED
        elif kind == REPLY_SIZE and offset == BASE_BYTES:
            flags = 0 if value_bytes == _REPLY_SIZE_BYTES else MALFORMED
        elif kind != EXTRA_PADDING:
            flags = UNRECOGNISED
        packet[offset] = flags
        if flags == MALFORMED:
            return False
        offset += _TLV_HEADER + value_bytes
    return follow_up_first


def size_request(payload_bytes: int, seq: int, now_ns: int, short_reply: bool) -> bytes:
    """A request of exactly this many bytes: base, our TLV about the reply's size, padding.

    Parameters
    ----------
    payload_bytes : int
        At least SMALLEST_SIZED_BYTES.
    short_reply : bool
        Have the reflector leave the padding out, so that only the way there has to take the size.
    """
    seconds, nanoseconds = split_ns(now_ns)
    base = _SIZE_BASE.pack(seq, seconds & 0xFFFFFFFF, nanoseconds, error_estimate(0, False), SIZE_SSID)
    tlv = _REPLY_SIZE.pack(UNRECOGNISED, REPLY_SIZE, _REPLY_SIZE_BYTES, short_reply, 0)
    padding = payload_bytes - SMALLEST_SIZED_BYTES
    return base + tlv + struct.pack("!BBH", UNRECOGNISED, EXTRA_PADDING, padding) + bytes(padding)


def answer_size(packet: NDArray[np.uint8], length: int, longest: int) -> int:
    """Answer our TLV, if the request begins with it and `reflect_tlvs` has found it whole.

    Parameters
    ----------
    longest : int
        The longest request that this reflector answers, which it tells.

    Returns
    -------
    int
        How many bytes the reply has: never more than the request.
    """
    tlv = packet[BASE_BYTES:SHORT_REPLY_BYTES]
    if length < SHORT_REPLY_BYTES or tlv[1] != REPLY_SIZE or tlv[0] & (UNRECOGNISED | MALFORMED):
        return length
    short = bool(tlv[5] & 1)
    tlv[6], tlv[7] = longest >> 8, longest & 0xFF
    return SHORT_REPLY_BYTES if short else length


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
