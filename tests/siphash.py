"""SipHash-2-4 in Python, written from the paper (Aumasson and Bernstein, 2012): what the kernel's is compared with."""

from __future__ import annotations

import struct

_ALL = (1 << 64) - 1


def siphash_2_4(key: bytes, data: bytes) -> bytes:
    low, high = struct.unpack("<QQ", key)
    state = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        state[3] ^= word
        _rounds(state, 2)
        state[0] ^= word
    state[2] ^= 0xFF
    _rounds(state, 4)
    return struct.pack("<Q", state[0] ^ state[1] ^ state[2] ^ state[3])


def _rounds(state: list[int], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = (v0 + v1) & _ALL
        v1 = _rotated(v1, 13) ^ v0
        v0 = _rotated(v0, 32)
        v2 = (v2 + v3) & _ALL
        v3 = _rotated(v3, 16) ^ v2
        v0 = (v0 + v3) & _ALL
        v3 = _rotated(v3, 21) ^ v0
        v2 = (v2 + v1) & _ALL
        v1 = _rotated(v1, 17) ^ v2
        v2 = _rotated(v2, 32)
    state[:] = v0, v1, v2, v3


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & _ALL
