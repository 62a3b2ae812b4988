"""Requests of STAMP senders, and what becomes of them on a bad way or in bad hands. Pure; seeded by the caller."""

from __future__ import annotations

import ipaddress
import random
import struct
from typing import Final, NamedTuple

import _stamp_check as check
from _stamp_check import PORT, SIZE_TLV, SWERVE_TLV, SWERVE_TLV_BYTES

PEERS: Final = tuple(f"10.9.1.{number}" for number in range(1, 65)) + tuple(
    f"fd00:9:1::{number:x}" for number in range(1, 65)
)  # many, so that none exceeds its rate
OURS: Final = ("10.9.0.2", "fd00:9::2")
_OPTION: Final = b"\x01" * 4
_TAGS: Final = ((), (), (0x8100,), (0x88A8, 0x8100))
_KINDS: Final = (SWERVE_TLV, SIZE_TLV, check.PADDING, 2, 99, 255)


class Mutated(NamedTuple):
    """A frame, what was done to it, and how many packets GRO is said to have merged into it."""

    frame: bytes
    how: str
    segments: int = 0


def packed(addresses: tuple[str, ...]) -> frozenset[bytes]:
    """Addresses as packets carry them."""
    return frozenset(ipaddress.ip_address(each).packed for each in addresses)


def whole(chance: random.Random) -> bytes:
    """A request as one of several kinds of sender would send it."""
    source = chance.choice(PEERS)
    ours = OURS[":" in source]
    ssid = chance.getrandbits(16)
    payload, kind = b"", chance.randrange(4)
    if kind == 0:
        payload = tlv(SWERVE_TLV, chance.randbytes(8).ljust(SWERVE_TLV_BYTES, b"\0"))
    elif kind == 1:
        ssid, payload = check.SIZE_SESSION, tlv(SIZE_TLV, struct.pack("!HH", chance.getrandbits(1), 0))
        payload += tlv(check.PADDING, bytes(chance.randrange(0, 1200)))
    elif kind == 2:
        payload = b"".join(_any_tlv(chance) for _ in range(chance.randrange(11)))
    base = struct.pack(
        "!IIIHH28x", chance.getrandbits(32), chance.getrandbits(31), chance.randrange(10**9), 0x4001, ssid
    )
    return check.build(
        source,
        ours,
        (chance.randrange(1024, 65536), PORT),
        base + payload,
        tags=chance.choice(_TAGS),
        options=_OPTION * (chance.randrange(11) if ":" not in source and chance.random() < 0.2 else 0),
        traffic_class=chance.getrandbits(8),
        ttl=chance.randrange(1, 256),
        ethernet=bytes(6) + chance.randbytes(6),
    )


def tlv(kind: int, value: bytes) -> bytes:
    """As a sender writes it: with U."""
    return struct.pack("!BBH", 0x80, kind, len(value)) + value


def _any_tlv(chance: random.Random) -> bytes:
    length = chance.choice((0, 1, 3, 4, 7, 28, 28, 60))
    return struct.pack("!BBH", chance.getrandbits(8), chance.choice(_KINDS), length) + chance.randbytes(length)


# ---- what becomes of them ----


def mutated(chance: random.Random) -> Mutated:
    """One request, as it comes in: half of those that were changed have lengths and checksums that fit again."""
    frame = whole(chance)
    how = chance.choice(("whole", "bits", "bits", "bytes", "cut", "longer", "header", "tlvs", "merged"))
    if how == "merged":
        return Mutated(frame, how, chance.randrange(2, 6))
    if how == "whole":
        return Mutated(_without_checksum(frame) if chance.random() < 0.2 else frame, how)
    changed = _CHANGES[how](frame, chance)
    ending = chance.random()
    if ending < 0.5:
        changed = check.mended(changed, lengths=chance.random() < 0.5)
    elif ending < 0.6:
        changed = _without_checksum(check.mended(changed))
    return Mutated(changed, how)


def flip_bits(frame: bytes, chance: random.Random) -> bytes:
    """Up to eight bits, anywhere."""
    changed = bytearray(frame)
    for _ in range(chance.randrange(1, 9)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def set_bytes(frame: bytes, chance: random.Random) -> bytes:
    """Up to six bytes, from the network header on."""
    changed = bytearray(frame)
    for _ in range(chance.randrange(1, 7)):
        changed[chance.randrange(12, len(changed))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.getrandbits(8)))
    return bytes(changed)


def cut(frame: bytes, chance: random.Random) -> bytes:
    """Its end is missing. The kernel's test run takes no packet without a whole network header."""
    packet = check.parse(frame)
    assert packet is not None
    return frame[: chance.randrange(packet.udp, len(frame))]


def longer(frame: bytes, chance: random.Random) -> bytes:
    """Something follows."""
    return frame + chance.randbytes(chance.randrange(1, 200))


def _other_header(frame: bytes, chance: random.Random) -> bytes:
    """One field of the headers is another."""
    packet = check.parse(frame)
    assert packet is not None
    changed = bytearray(frame)
    network, udp = packet.network, packet.udp
    four = packet.version == 4
    fields = {
        "source": (network + (12 if four else 8), len(packet.source)),
        "destination": (network + (16 if four else 24), len(packet.source)),
        "first": (network, 1),
        "length": (network + (2 if four else 4), 2),
        "fragment": (network + (6 if four else 1), 2),
        "protocol": (network + (9 if four else 6), 1),
        "ports": (udp, 4),
        "source port": (udp, 2),
        "UDP length": (udp + 4, 2),
        "checksum": (udp + 6, 2),
        "kind": (network - 2, 2),
    }
    at, size = fields[chance.choice(tuple(fields))]
    value = chance.randbytes(size)
    if chance.random() < 0.3:
        value = chance.choice((bytes(size) + PORT.to_bytes(2, "big"), bytes(size), bytes([255]) * size))[-size:]
    changed[at : at + size] = value
    return bytes(changed)


def _other_tlvs(frame: bytes, chance: random.Random) -> bytes:
    """What follows the base packet is anything."""
    packet = check.parse(frame)
    assert packet is not None
    head = frame[: packet.udp + 8 + check.BASE_BYTES]
    tail = b"".join(_any_tlv(chance) for _ in range(chance.randrange(12))) + chance.randbytes(chance.randrange(8))
    return check.mended(head + tail, lengths=True)


def _without_checksum(frame: bytes) -> bytes:
    packet = check.parse(frame)
    return frame if packet is None else frame[: packet.udp + 6] + bytes(2) + frame[packet.udp + 8 :]


_CHANGES: Final = {
    "bits": flip_bits,
    "bytes": set_bytes,
    "cut": cut,
    "longer": longer,
    "header": _other_header,
    "tlvs": _other_tlvs,
}
