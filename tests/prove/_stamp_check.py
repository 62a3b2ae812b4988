"""UDP packets and STAMP (RFC 8762, RFC 8972) by the book: builds frames, takes them apart, and judges replies.

Shares no code with swerve, so that an error is not made twice. Pure.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from packet_runs import LOOPBACK

PORT: Final = 862
BASE_BYTES: Final = 44
SWERVE_TLV, SIZE_TLV, PADDING = 253, 252, 1
SIZE_SESSION: Final = 0xFFFF
LONGEST_REQUEST: Final = 9188
LOWEST_PORT: Final = 1024
_TAGS: Final = (0x8100, 0x88A8)
_IPV4, _IPV6, _UDP = 0x0800, 0x86DD, 17
SWERVE_TLV_BYTES: Final = 28
_TLV_BYTES: Final = {SWERVE_TLV: SWERVE_TLV_BYTES, SIZE_TLV: 4}
_MOST_TLVS: Final = 8  # what lies behind them goes back as it came (docs/probes.md)


@dataclass(frozen=True, slots=True)
class Packet:
    """A UDP packet in an Ethernet frame, as its headers describe it."""

    frame: bytes
    network: int  # offset
    udp: int
    source: bytes
    destination: bytes
    ttl: int
    traffic_class: int
    fragment: bool
    network_bytes: int  # from the network header on, as that header says
    header_right: bool  # checksum
    ports: tuple[int, int]
    udp_bytes: int  # as the UDP header says

    @property
    def version(self) -> int:
        return 4 if len(self.source) == 4 else 6

    @property
    def payload(self) -> bytes:
        return self.frame[self.udp + 8 : self.udp + self.udp_bytes]

    @property
    def whole(self) -> bool:
        """Whether its lengths agree with each other and with the frame."""
        within = self.network + self.network_bytes <= len(self.frame)
        return within and 8 <= self.udp_bytes <= self.network_bytes - (self.udp - self.network)

    @property
    def checksum(self) -> int:
        """Of UDP, as it stands."""
        return int.from_bytes(self.frame[self.udp + 6 : self.udp + 8], "big")

    @property
    def checksum_right(self) -> bool:
        """Of UDP; IPv4 may do without."""
        if self.checksum == 0:
            return self.version == 4
        return self.checksum_error == 0

    @property
    def checksum_to_come(self) -> bool:
        """Whether it is of addresses and length alone: between hosts of one machine an offload computes the rest."""
        pseudo = self.source + self.destination + struct.pack("!II", self.udp_bytes, _UDP)
        return (self.checksum - _sum(pseudo)) % 0xFFFF == 0

    @property
    def checksum_error(self) -> int:
        """By how much the UDP checksum is wrong, modulo 65,535."""
        pseudo = self.source + self.destination + struct.pack("!II", self.udp_bytes, _UDP)
        return _sum(pseudo + self.frame[self.udp : self.udp + self.udp_bytes])


def parse(frame: bytes) -> Packet | None:
    """Take a frame apart; None without a whole network header and a whole UDP header, as in a later fragment."""
    network, (kind,) = 14, struct.unpack_from("!H", frame, 12)
    for _ in range(2):
        if kind in _TAGS and len(frame) >= network + 4:
            (kind,) = struct.unpack_from("!H", frame, network + 2)
            network += 4
    if kind == _IPV4 and len(frame) >= network + 20:
        first, tos, total, fragments, ttl, protocol = struct.unpack_from("!BBH2xHBB", frame, network)
        udp = network + (first & 15) * 4
        if first >> 4 != 4 or first & 15 < 5 or protocol != _UDP or fragments & 0x1FFF or len(frame) < udp + 8:
            return None
        source, destination = frame[network + 12 : network + 16], frame[network + 16 : network + 20]
        right, fragment = _sum(frame[network:udp]) == 0, bool(fragments & 0x2000)
    elif kind == _IPV6 and len(frame) >= network + 40:
        head, length, protocol, ttl = struct.unpack_from("!IHBB", frame, network)
        udp, total, tos = network + 40, length + 40, head >> 20 & 0xFF
        if head >> 28 != 6 or protocol != _UDP or len(frame) < udp + 8:
            return None
        source, destination = frame[network + 8 : network + 24], frame[network + 24 : network + 40]
        right, fragment = True, False
    else:
        return None
    sender, receiver, udp_bytes = struct.unpack_from("!HHH", frame, udp)
    ports = sender, receiver
    return Packet(frame, network, udp, source, destination, ttl, tos, fragment, total, right, ports, udp_bytes)


# ---- building ----


def build(
    source: str,
    destination: str,
    ports: tuple[int, int],
    payload: bytes,
    tags: tuple[int, ...] = (),
    options: bytes = b"",
    traffic_class: int = 0,
    ttl: int = 64,
    ethernet: bytes = bytes(12),
) -> bytes:
    """A frame with right lengths and checksums."""
    ends = ipaddress.ip_address(source).packed, ipaddress.ip_address(destination).packed
    length = 8 + len(payload)
    if len(ends[0]) == 4:
        head = (0x45 + len(options) // 4, traffic_class, 20 + len(options) + length, 1, 0x4000, ttl, _UDP, 0)
        network, kind = struct.pack("!BBHHHBBH", *head) + b"".join(ends) + options, _IPV4
    else:
        network, kind = struct.pack("!IHBB", 6 << 28 | traffic_class << 20, length, _UDP, ttl) + b"".join(ends), _IPV6
    frame = ethernet + b"".join(struct.pack("!HH", tag, 7) for tag in tags) + struct.pack("!H", kind)
    return mended(frame + network + struct.pack("!HHHH", *ports, length, 0) + payload)


def mended(frame: bytes, lengths: bool = False) -> bytes:
    """The frame with right checksums (and lengths, as long as the frame is); what is no UDP packet stays as it is."""
    packet = parse(frame)
    if packet is None:
        return frame
    changed = bytearray(frame)
    if lengths:
        at, less = (2, 0) if packet.version == 4 else (4, 40)
        struct.pack_into("!H", changed, packet.network + at, (len(frame) - packet.network - less) & 0xFFFF)
        struct.pack_into("!H", changed, packet.udp + 4, (len(frame) - packet.udp) & 0xFFFF)
    if packet.version == 4:
        struct.pack_into("!H", changed, packet.network + 10, 0)
        struct.pack_into("!H", changed, packet.network + 10, 0xFFFF - _sum(changed[packet.network : packet.udp]))
    struct.pack_into("!H", changed, packet.udp + 6, 0)
    whole = parse(bytes(changed))
    assert whole is not None
    struct.pack_into("!H", changed, packet.udp + 6, 0xFFFF - whole.checksum_error)
    return bytes(changed)


def _sum(data: bytes | bytearray) -> int:
    """The Internet checksum's sum (RFC 1071), modulo 65,535: 0 over what has its checksum right in it."""
    return int.from_bytes(data, "big") * (256 if len(data) % 2 else 1) % 0xFFFF


# ---- judging ----


def refusal(request: Packet | None, peers: frozenset[bytes], ours: frozenset[bytes], link: bytes) -> str:
    """Why a frame must not be answered; empty for a request of a peer to this host, whose link address is given."""
    if request is None:
        return "no UDP packet"
    fits = request.whole and BASE_BYTES + 8 <= request.udp_bytes <= LONGEST_REQUEST + 8
    reasons = {
        "on another port": request.ports[1] != PORT,
        "not of a peer": request.source not in peers,
        "to another link address": request.frame[:6] != link,
        "malformed": request.fragment or not fits,
        "of a port that might answer": request.ports[0] < LOWEST_PORT or request.ports[0] == PORT,
        "corrupt": not (request.header_right and (request.checksum_right or request.checksum_to_come)),
        "not to this host": request.destination not in ours,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def faults(request: Packet, frame: bytes, times_ns: tuple[int, int], estimate: int) -> Iterator[str]:
    """What is wrong with a reply; nothing when it is the one that RFC 8762 and RFC 8972 want.

    Parameters
    ----------
    times_ns : (int, int)
        When the request was handed over, and when the reply was there.
    estimate : int
        The Error Estimate that replies carry.
    """
    reply = parse(frame)
    if len(frame) > len(request.frame):
        yield "longer than the request"
    if reply is None or not reply.whole or reply.fragment:
        yield "no whole UDP packet"
        return
    if frame[:12] != request.frame[6:12] + request.frame[:6] or reply.network != request.network:
        yield "link addresses"
    if frame[12 : reply.network] != request.frame[12 : request.network]:
        yield "tags"
    if (reply.source, reply.destination) != (request.destination, request.source):
        yield "addresses"
    if reply.ports != (PORT, request.ports[0]):
        yield "ports"
    if (reply.ttl, reply.traffic_class) != (255, request.traffic_class & 0xFC):
        yield "TTL or traffic class"
    if not reply.header_right or not (reply.checksum_right or request.checksum_to_come):
        yield "checksum"
    if reply.udp_bytes > request.udp_bytes:
        yield "UDP longer than the request"
    if (reply.checksum == 0) != (request.checksum == 0):
        yield "checksum made up"
    yield from _stamp_faults(request.payload, reply.payload, request.ttl, times_ns, estimate)


def _stamp_faults(asked: bytes, told: bytes, ttl: int, times_ns: tuple[int, int], estimate: int) -> Iterator[str]:
    if len(told) < BASE_BYTES:
        yield "base"
        return
    wanted = asked[:4] + told[4:12] + struct.pack("!H", estimate) + asked[14:16] + told[16:24] + asked[:14]
    if told[:BASE_BYTES] != wanted + bytes(2) + bytes([ttl]) + bytes(3):
        yield "base"
    left, came = (seconds * 10**9 + ns for seconds, ns in (struct.unpack_from("!II", told, at) for at in (4, 16)))
    if not times_ns[0] <= came <= left <= times_ns[1]:
        yield "times"
    expected, short = _tlvs(asked[BASE_BYTES:], told[BASE_BYTES:], asked[:4])
    if short:
        expected = expected[:8]
    if told[BASE_BYTES:] != expected:
        yield "TLVs"


def _tlvs(asked: bytes, told: bytes, seq: bytes) -> tuple[bytes, bool]:
    """The TLVs that a reply has to have, and whether only the first is to come back.

    What is the reflector's own to say is taken from the reply.
    """
    made, at, short = bytearray(asked), 0, False
    for number in range(_MOST_TLVS):
        if at + 4 > len(asked):
            break
        kind, length = asked[at + 1], int.from_bytes(asked[at + 2 : at + 4], "big")
        end = at + 4 + length
        own = number == 0 and kind in _TLV_BYTES
        if end > len(asked) or (own and length != _TLV_BYTES[kind]):
            made[at] = 0x40  # M, and nothing behind it is looked at
            break
        made[at] = 0 if own or kind == PADDING else 0x80  # U
        if own and kind == SWERVE_TLV:
            made[at + 12 : at + 16] = told[at + 12 : at + 16].ljust(4, b"\0")
            # The interface that it came in by, none that has lost its carrier, no request by another interface; whoever
            # has no key signs nothing.
            made[at + 16 : at + 32] = struct.pack("!HH4s8x", LOOPBACK, 0, seq)
        elif own:
            made[at + 6 : at + 8] = struct.pack("!H", LONGEST_REQUEST)
            short = bool(asked[at + 5] & 1)
        at = end
    return bytes(made), short
