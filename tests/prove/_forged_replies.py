"""Replies that no reflector of ours has sent: guessed, spoofed, replayed, mutated ones, made from a true one. Pure."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import _stamp_check as check
from _mutated_requests import cut, flip_bits
from _stamp_check import BASE_BYTES

_SECOND: Final = 10**9


class Forged(NamedTuple):
    """A frame, the interface it comes in by (0: its path's), and how many packets GRO is said to have merged."""

    frame: bytes
    ifindex: int = 0
    segments: int = 0


class Seen(NamedTuple):
    """What a forger may have seen."""

    frame: bytes  # the true reply
    old: bytes  # the reply to an earlier probe of the same session, whose slot is another probe's now
    answered: bytes  # a reply that was taken already
    shared: bool  # whether both ends read one clock
    other_ifindex: int


def forged(kind: str, seen: Seen, chance: random.Random) -> Forged:
    """One forgery of a kind."""
    return KINDS[kind](seen, chance)


def _with_payload(frame: bytes, at: int, data: bytes) -> bytes:
    """With other bytes in the payload, and a checksum that fits."""
    packet = check.parse(frame)
    assert packet is not None
    at += packet.udp + 8
    return check.mended(frame[:at] + data + frame[at + len(data) :])


def _guessed(seen: Seen, chance: random.Random) -> Forged:
    """Right addresses and ports; of sequence number, timestamp and nonce at least one is a guess."""
    frame, guesses = seen.frame, chance.randrange(1, 8)
    if guesses & 1:
        frame = _with_payload(frame, 24, chance.randbytes(4))
    if guesses & 2:
        stamp = struct.unpack_from("!II", frame, len(frame) - 72 + 28)
        frame = _with_payload(frame, 28, struct.pack("!II", stamp[0], chance.randrange(_SECOND)))
    if guesses & 4 or frame == seen.frame:
        frame = _with_payload(frame, BASE_BYTES + 4, chance.randbytes(8))
    return Forged(frame)


def _near(seen: Seen, chance: random.Random) -> Forged:
    """The number of a neighbouring probe or session, everything else as it is."""
    (seq,) = struct.unpack_from("!I", seen.frame, len(seen.frame) - 72 + 24)
    step = chance.choice((1, -1, 2, -2, 64, -64, 1 << 20, -(1 << 20), 1 << 31))
    return Forged(_with_payload(seen.frame, 24, struct.pack("!I", (seq + step) % (1 << 32))))


def _spoofed(seen: Seen, chance: random.Random) -> Forged:
    """Another source address, or another session identifier."""
    packet = check.parse(seen.frame)
    assert packet is not None
    if chance.random() < 0.2:
        (ssid,) = struct.unpack_from("!H", packet.payload, 14)
        return Forged(_with_payload(seen.frame, 14, struct.pack("!H", ssid ^ chance.randrange(1, 1 << 16) or 1 << 15)))
    at = packet.network + (12 if packet.version == 4 else 8)
    source = bytearray(packet.source)
    source[chance.randrange(len(source))] ^= chance.randrange(1, 256)
    return Forged(check.mended(seen.frame[:at] + bytes(source) + seen.frame[at + len(source) :]))


def _junk(seen: Seen, chance: random.Random) -> Forged:
    """Any payload, to the right port from the right host."""
    packet = check.parse(seen.frame)
    assert packet is not None
    data = chance.randbytes(chance.randrange(200))
    return Forged(check.mended(seen.frame[: packet.udp + 8] + data, lengths=True))


def _impossible(seen: Seen, chance: random.Random) -> Forged:
    """The right numbers, and times that cannot be."""
    sent, came, left = (_read(seen.frame, at) for at in (28, 16, 4))
    early = (
        chance.randrange(2_000_000, 300 * _SECOND) if chance.random() < 0.5 else chance.randrange(2_000_000, _SECOND)
    )
    how = chance.randrange(4 if seen.shared else 2)
    if how == 0:  # kept for longer than it was away
        left = came + 10 * _SECOND + early
    elif how == 1:  # left before it came
        came = left + early
    elif how == 2:  # came before it was sent
        came = max(sent - early, 0)
        left = max(left - early, came)
    else:  # left after it was back
        left += 10 * _SECOND + early
        came = left
    frame = _with_payload(seen.frame, 16, struct.pack("!II", *divmod(came, _SECOND)))
    return Forged(_with_payload(frame, 4, struct.pack("!II", *divmod(left, _SECOND))))


def _read(frame: bytes, at: int) -> int:
    packet = check.parse(frame)
    assert packet is not None
    seconds, fraction = struct.unpack_from("!II", packet.payload, at)
    return int(seconds * _SECOND + fraction)


def _without_tlv(seen: Seen, chance: random.Random) -> Forged:
    """As a foreign reflector's that leaves our TLV out, or does not understand it."""
    if chance.random() < 0.5:
        return Forged(_with_payload(seen.frame, BASE_BYTES, bytes([chance.choice((0x80, 0x40, 0xC0))])))
    packet = check.parse(seen.frame)
    assert packet is not None
    keep = chance.randrange(BASE_BYTES, 72)
    return Forged(check.mended(seen.frame[: packet.udp + 8 + keep], lengths=True))


def _truncated(seen: Seen, chance: random.Random) -> Forged:
    """Cut, and its headers say nothing of it."""
    return Forged(cut(seen.frame, chance))


def _flipped(seen: Seen, chance: random.Random) -> Forged:
    """Bits of it are others. Flips that cancel each other out in every checksum are left out: nobody can tell."""
    while True:
        frame = flip_bits(seen.frame, chance)
        one, other = check.parse(seen.frame), check.parse(frame)
        assert one is not None
        if other is None or not (other.header_right and other.checksum_right) or one.payload == other.payload:
            return Forged(frame)


KINDS: Final[dict[str, Callable[[Seen, random.Random], Forged]]] = {
    "guessed numbers": _guessed,
    "near numbers": _near,
    "spoofed source": _spoofed,
    "junk": _junk,
    "impossible times": _impossible,
    "no TLV": _without_tlv,
    "truncated": _truncated,
    "bit flips": _flipped,
    "replayed, old": lambda seen, _: Forged(seen.old),
    "replayed, answered": lambda seen, _: Forged(seen.answered),
    "wrong interface": lambda seen, _: Forged(seen.frame, ifindex=seen.other_ifindex),
    "merged": lambda seen, chance: Forged(seen.frame, segments=chance.randrange(2, 6)),
}
