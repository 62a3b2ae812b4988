"""Hand-made frames for programs that are run on a packet without a network."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

UDP, TCP = 17, 6
PORT = 862
TAG_8021Q, TAG_8021AD = 0x8100, 0x88A8
TAGS = {"untagged": (), "802.1Q": (TAG_8021Q,), "802.1ad over 802.1Q": (TAG_8021AD, TAG_8021Q)}


class OwnMemory:
    """Messages put together and sent by one process."""

    def array(self, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
        return np.zeros(shape, kind)

    def addresses(self, array: NDArray[Any]) -> NDArray[np.uint64]:
        return (array.ctypes.data + np.arange(len(array)) * array.strides[0]).astype(np.uint64)


def send_message(sock: socket.socket, header: NDArray[Any]) -> None:
    """Send one message as sendmmsg(2) takes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sendmmsg(sock.fileno(), ctypes.c_void_p(header.ctypes.data), 1, socket.MSG_DONTWAIT) != 1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def stamp_request(seq: int, ssid: int) -> bytes:
    """The base packet of RFC 8762 with the identifier of RFC 8972."""
    return struct.pack("!IQHH", seq, 0, 0, ssid).ljust(44, b"\0")


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
    header += options
    header = header[:10] + ipv4_checksum(header) + header[12:]
    return ethernet(0x0800, header + payload, tags)


def ipv6(
    payload: bytes,
    source: str = "fd00:9::1",
    destination: str = "fd00:9::2",
    protocol: int = UDP,
    tags: tuple[int, ...] = (),
) -> bytes:
    """A UDP payload that is whole gets its checksum, which IPv6 does not go without."""
    whole = protocol == UDP and len(payload) >= 8 and struct.unpack_from("!H", payload, 4)[0] == len(payload)
    header = struct.pack(
        "!IHBB16s16s",
        6 << 28,
        len(payload),
        protocol,
        61,
        ipaddress.IPv6Address(source).packed,
        ipaddress.IPv6Address(destination).packed,
    )
    if whole and payload[6:8] == b"\0\0":
        payload = with_checksums(ethernet(0x86DD, header + payload))[14 + len(header) :]
    return ethernet(0x86DD, header + payload, tags)


def with_checksums(frame: bytes) -> bytes:
    """The same frame, which has neither tags nor options, with right checksums of IPv4 and UDP."""
    out, ipv4_header = bytearray(frame), frame[12:14] == b"\x08\x00"
    transport = 34 if ipv4_header else 54
    if ipv4_header:
        out[24:26] = bytes(2)
        out[24:26] = struct.pack("!H", _checksum(bytes(out[14:34])))
    length = struct.unpack_from("!H", frame, transport + 4)[0]
    ends = frame[26:34] if ipv4_header else frame[22:54]
    out[transport + 6 : transport + 8] = bytes(2)
    pseudo = ends + struct.pack("!HH", UDP, length) + bytes(out[transport : transport + length])
    out[transport + 6 : transport + 8] = struct.pack("!H", _checksum(pseudo) or 0xFFFF)
    return bytes(out)


def ipv4_checksum(header: bytes) -> bytes:
    """What belongs into the checksum field of this header."""
    return struct.pack("!H", _checksum(header[:10] + bytes(2) + header[12:]))


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def mapped(address: str) -> bytes:
    """An address as the kernel programs keep it: IPv4-mapped IPv6."""
    parsed = ipaddress.ip_address(address)
    return parsed.packed if parsed.version == 6 else b"\0" * 10 + b"\xff\xff" + parsed.packed
