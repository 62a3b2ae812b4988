"""Probes as Ethernet frames: every header field, and checksums against a plain sum (RFC 1071)."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import socket
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from packets import OwnMemory

from pytools.config import Peer
from pytools.errors import CapabilityError
from pytools.signals import Path
from pytools.sources.probing import frames, stamp_packet, udp
from pytools.sources.probing.frames import Frame, Frames
from pytools.sources.probing.paths import PinnedPath, Session

PORT, SOURCE_PORT = 862, 40_001
ADDRESSES = {4: ("10.9.0.1", "10.9.0.2"), 6: ("fd00:9::1", "fd00:9::2")}
IP_BYTES = {4: 20, 6: 40}
ETHERTYPE = {4: 0x0800, 6: 0x86DD}
BOTH = pytest.mark.parametrize("family", [4, 6])


def summed(data: bytes) -> int:
    """The one's complement sum of 16-bit words; 0xFFFF over what carries its own right checksum."""
    total = sum(int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big") for at in range(0, len(data), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@dataclass(frozen=True)
class Parsed:
    """A frame, read field by field."""

    destination_mac: bytes
    source_mac: bytes
    dscp: int
    addresses: tuple[str, str]
    ports: tuple[int, int]
    checksum: int
    payload: bytes


def parsed(frame: bytes, family: int) -> Parsed:
    """Read a frame; what must hold of every frame is checked here."""
    assert frame[12:14] == ETHERTYPE[family].to_bytes(2, "big")
    network, datagram = frame[14 : 14 + IP_BYTES[family]], frame[14 + IP_BYTES[family] :]
    if family == 4:
        first, tos, total, identifier, fragment, ttl, protocol = struct.unpack_from("!BBHHHBB", network)
        assert (first, total, identifier, fragment) == (0x45, 20 + len(datagram), 0, 0x4000), "do not fragment"
        assert summed(network) == 0xFFFF
        ends = network[12:16], network[16:20]
    else:
        first, length, protocol, ttl = struct.unpack_from("!IHBB", network)
        assert (first >> 28, first & 0xFFFFF, length) == (6, 0, len(datagram))
        tos, ends = (first >> 20) & 0xFF, (network[8:24], network[24:40])
    assert (ttl, protocol, tos & 3) == (255, socket.IPPROTO_UDP, 0)
    source_port, port, length, checksum = struct.unpack_from("!HHHH", datagram)
    assert length == len(datagram)
    assert checksum != 0, "none is not allowed in IPv6, and probe.c updates it in both"
    assert summed(b"".join(ends) + struct.pack("!II", socket.IPPROTO_UDP, len(datagram)) + datagram) == 0xFFFF
    source, destination = (str(ipaddress.ip_address(end)) for end in ends)
    return Parsed(frame[:6], frame[6:12], tos >> 2, (source, destination), (source_port, port), checksum, datagram[8:])


def pinned(family: Any, index: int = 0x0203, ifindex: int = 5, clock: Any = "free_running") -> PinnedPath:
    source, destination = ADDRESSES[family]
    path = Path("h1", "h2", destination, "", "rail1")
    return PinnedPath(index, path, Peer("h2", destination, clock=clock), family, ifindex, source, None, False)


def session(family: int, row: int = 0, path: int = 0, counts: bool = True, **of_path: Any) -> Session:
    return Session(pinned(family, path, **of_path), SOURCE_PORT, row, counts)


@dataclass
class Read:
    """Messages as the kernel reads them: by the pointers of each."""

    frames: list[bytes]
    names: list[bytes]

    @classmethod
    def of(cls, headers: NDArray[Any]) -> Read:
        read = cls([], [])
        for header in headers:
            assert (header["vector_count"], header["control"], header["control_bytes"], header["bytes"]) == (1, 0, 0, 0)
            base, length = np.frombuffer(ctypes.string_at(int(header["vectors"]), udp.VECTOR.itemsize), udp.VECTOR)[0]
            read.frames.append(ctypes.string_at(int(base), int(length)))
            read.names.append(ctypes.string_at(int(header["name"]), int(header["name_bytes"])))
        return read


def made_of(family: Any, sessions: list[Session], dscp: int = 0, times: int = 1) -> Frames:
    return Frames(family, sessions, PORT, dscp, times, OwnMemory())


def filled(made: Frames, seq: list[int], place: int = 0) -> Read:
    made.headers["bytes"][place] = -1  # of the last time
    made.fill(np.array([place]), np.array([seq], np.int64))
    return Read.of(made.headers[place])


@BOTH
@pytest.mark.parametrize("dscp", [0, 46, 63])
def test_a_probe_has_all_its_headers_and_right_checksums(family: Any, dscp: int) -> None:
    sessions = [session(family, clock="shared"), session(family, 4095, 0x0102, counts=False, ifindex=7)]
    made = made_of(family, sessions, dscp, 3)
    messages = filled(made, [0, 0xFFFFFFFE], 2)
    assert made.wire_bytes == 14 + IP_BYTES[family] + 8 + 76
    for frame, sent, seq in zip(messages.frames, sessions, (0, 0xFFFFFFFE), strict=True):
        assert len(frame) == made.wire_bytes
        read = parsed(frame, family)
        assert read.destination_mac == bytes(3) + bytes([sent.counts]) + sent.pinned.index.to_bytes(2, "big")
        assert read.source_mac == bytes(6)
        assert (read.dscp, read.addresses, read.ports) == (dscp, ADDRESSES[family], (SOURCE_PORT, PORT))
        estimate = 0xC1D7 if sent.pinned.shared_clock else 0x41D7  # 2 * 215 / 2^32 s: good to 100 ns
        assert struct.unpack_from("!IQHH", read.payload) == (seq, 0, estimate, sent.row + 1)
        assert read.payload[16:44] == bytes(28), "must be zero"
        assert read.payload[44:48] == struct.pack("!BBH", 0x80, stamp_packet.TLV_TYPE, stamp_packet.TLV_BYTES)
        assert read.payload[56:] == bytes(20)
        assert len(read.payload) == stamp_packet.PROBE_BYTES == 48 + stamp_packet.TLV_BYTES


@BOTH
def test_each_message_names_its_interface_and_protocol(family: Any) -> None:
    messages = filled(made_of(family, [session(family, ifindex=3), session(family, 1, ifindex=70_000)]), [1, 2])
    address = "=H2siHBB8s"  # struct sockaddr_ll
    wanted = [
        (socket.AF_PACKET, ETHERTYPE[family].to_bytes(2, "big"), ifindex, 0, 0, 0, bytes(8)) for ifindex in (3, 70_000)
    ]
    assert [struct.unpack(address, name) for name in messages.names] == wanted


@BOTH
def test_every_probe_has_a_nonce_of_its_own_and_its_checksum_covers_it(family: Any) -> None:
    """Over many random nonces and numbers, so that each carry of the sum occurs."""
    made = made_of(family, [session(family, row, row) for row in range(50)], times=4)
    random, nonces = np.random.default_rng(862), set()
    for turn in range(5):
        places, seq = np.array([3, 0, 2, 1]), random.integers(0, 1 << 32, (4, 50))
        made.fill(places, seq)
        for place, numbers in zip(places, seq.tolist(), strict=True):
            read = [parsed(frame, family) for frame in Read.of(made.headers[place]).frames]
            assert [int.from_bytes(each.payload[:4], "big") for each in read] == numbers
            nonces |= {each.payload[48:56] for each in read}
        assert len(nonces) == (turn + 1) * 200
    assert len(nonces) == 1000


def test_what_became_of_each_message_is_found_at_its_place() -> None:
    made = made_of(4, [session(4), session(4, 1)], times=3)
    made.headers["bytes"][1] = 114, -errno.ENXIO
    assert made.results(np.array([0, 1])).tolist() == [[0, 0], [114, -errno.ENXIO]]


def test_without_the_capability_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> socket.socket:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(frames.socket, "socket", refuse)
    with pytest.raises(CapabilityError, match="Operation not permitted") as caught:
        frames.open_socket()
    assert "CAP_NET_RAW" in caught.value.next_step


# ---- one at a time ----


@given(family=st.sampled_from([4, 6]), payload=st.binary(max_size=300), dscp=st.integers(0, 63))
def test_a_frame_goes_around_any_payload(family: Any, payload: bytes, dscp: int) -> None:
    frame = Frame(Session(pinned(family), SOURCE_PORT), PORT, dscp)
    read = parsed(frame.around(payload), family)
    assert frame.address == ("rail1", ETHERTYPE[family])
    assert (read.payload, read.dscp, read.ports) == (payload, dscp, (SOURCE_PORT, PORT))
    assert read.addresses == ADDRESSES[family]
    assert read.destination_mac == bytes([0, 0, 0, 0, 2, 3]), "it does not count for silence"


@BOTH
@pytest.mark.parametrize("size", [0, 1, 2, 55, 56, 57, 1471, 1472, 9167, 9188])
def test_sizes_odd_and_even_have_right_checksums(family: Any, size: int) -> None:
    for filling in (b"\0", b"\xff"):
        read = parsed(Frame(Session(pinned(family), SOURCE_PORT), PORT, 0).around(filling * size), family)
        assert read.payload == filling * size


@BOTH
@pytest.mark.parametrize("behind", [b"", b"\0"])
def test_a_checksum_that_comes_out_as_zero_is_sent_as_all_ones(family: Any, behind: bytes) -> None:
    """RFC 768: zero says that there is none."""
    frame = Frame(Session(pinned(family), SOURCE_PORT), PORT, 0)
    checksum = parsed(frame.around(bytes(2) + behind), family).checksum
    assert parsed(frame.around(checksum.to_bytes(2, "big") + behind), family).checksum == 0xFFFF
