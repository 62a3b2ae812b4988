"""Hand-made frames for programs that are run on a packet without a network."""

from __future__ import annotations

import ipaddress
import struct

UDP, TCP = 17, 6
PORT = 862
TAG_8021Q, TAG_8021AD = 0x8100, 0x88A8


def stamp_request(seq: int, ssid: int) -> bytes:
    """The base packet of RFC 8762 with the identifier of RFC 8972."""
    return struct.pack("!IQHH", seq, 0, 0, ssid).ljust(44, b"\0")


def stamp_reply(seq: int, ssid: int, reflector_seq: int = 0) -> bytes:
    """A reflected packet: the sender's sequence number lies at byte 24."""
    head = struct.pack("!IQHHQI", reflector_seq, 0, 0, ssid, 0, seq)
    return head.ljust(44, b"\0")


def udp(payload: bytes, source: int = 5000, destination: int = PORT, length: int | None = None) -> bytes:
    return struct.pack("!HHHH", source, destination, length or len(payload) + 8, 0) + payload


def ethernet(ethertype: int, payload: bytes, tags: tuple[int, ...] = ()) -> bytes:
    frame = bytes(12)
    for tag in tags:
        frame += struct.pack("!HH", tag, 7)
    return frame + struct.pack("!H", ethertype) + payload


def ipv4(
    payload: bytes,
    source: str = "10.9.0.1",
    destination: str = "10.9.0.2",
    protocol: int = UDP,
    options: bytes = b"",
    fragment: int = 0,
    ttl: int = 61,
    tags: tuple[int, ...] = (),
) -> bytes:
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x40 | (5 + len(options) // 4),
        0,
        20 + len(options) + len(payload),
        0,
        fragment,
        ttl,
        protocol,
        0,
        ipaddress.IPv4Address(source).packed,
        ipaddress.IPv4Address(destination).packed,
    )
    return ethernet(0x0800, header + options + payload, tags)


def ipv6(
    payload: bytes,
    source: str = "fd00:9::1",
    destination: str = "fd00:9::2",
    protocol: int = UDP,
    tags: tuple[int, ...] = (),
) -> bytes:
    header = struct.pack(
        "!IHBB16s16s",
        6 << 28,
        len(payload),
        protocol,
        61,
        ipaddress.IPv6Address(source).packed,
        ipaddress.IPv6Address(destination).packed,
    )
    return ethernet(0x86DD, header + payload, tags)


def mapped(address: str) -> bytes:
    """An address as the kernel programs keep it: IPv4-mapped IPv6."""
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else b"\0" * 10 + b"\xff\xff" + parsed.packed
