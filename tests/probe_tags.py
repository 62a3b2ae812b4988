"""Probes and replies with a tag, as hosts that share a key send them."""

from __future__ import annotations

import struct

import packets as p
from probe_kit import SENDER_PORT, request
from siphash import siphash_2_4

SWERVE = 253
KEY, OTHER_KEY = bytes(range(16)), bytes(range(1, 17))
REQUEST, REPLY = 1, 2
BUILD = {4: p.ipv4, 6: p.ipv6}
ENDS = {4: ("10.9.0.1", "10.9.0.2"), 6: ("fd00:9::1", "fd00:9::2")}
TAG_AT = 68  # what is before it from 48 on is hashed as whole words


def words(said: bytes) -> bytes:
    """The nonce and what follows it, the last 32 bits as a little-endian word of 64."""
    return said[:-4] + struct.pack("<Q", int.from_bytes(said[-4:]))


def ends_of(direction: int, ports: tuple[int, int], source: str, destination: str) -> bytes:
    head = struct.pack("<Q", direction << 32 | ports[0] << 16 | ports[1])
    return head + p.mapped(source) + p.mapped(destination)


def signed_request(family: int, key: bytes = KEY, payload: bytes = b"") -> bytes:
    """The payload of a probe as a swerve with this key would send it."""
    payload = payload or request((SWERVE, bytes(range(100, 108)) + bytes(20)))
    said = ends_of(REQUEST, (SENDER_PORT, p.PORT), *ENDS[family]) + payload[:16] + words(payload[48:TAG_AT])
    return payload[:TAG_AT] + siphash_2_4(key, said) + payload[TAG_AT + 8 :]


def reply_tag(payload: bytes, source: str, destination: str, key: bytes = KEY) -> bytes:
    said = ends_of(REPLY, (p.PORT, SENDER_PORT), source, destination) + payload[:40] + words(payload[48:TAG_AT])
    return siphash_2_4(key, said)


def framed(family: int, payload: bytes) -> bytes:
    return p.with_checksums(BUILD[family](p.udp(payload, SENDER_PORT)))
