"""Flows as the kernel's table keeps them, and which can be steered at all. Pure."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steering.plan import FlowKey

TCP: Final = 6
UDP: Final = 17
_MAPPED = b"\0" * 10 + b"\xff\xff"
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


@dataclass(frozen=True, slots=True)
class Address:
    version: int
    mapped: bytes  # as the kernel programs keep it: IPv6, or IPv4 mapped into it
    one_receiver: bool
    loopback: bool


@functools.lru_cache(maxsize=4096)
def address(text: str) -> Address:
    """An address taken apart.

    Raises
    ------
    ValueError
        If it is none.
    """
    parsed = ipaddress.ip_address(text)
    packed = parsed.packed if parsed.version == 6 else _MAPPED + parsed.packed
    return Address(parsed.version, packed, not parsed.is_multicast and parsed != _BROADCAST, parsed.is_loopback)


def objection(flow: FlowKey) -> str:
    """Why a flow cannot be steered; empty when it can."""
    try:
        local, remote = address(flow.local), address(flow.remote)
    except ValueError as error:
        return str(error)
    reason = ""
    if local.version != remote.version:
        reason = "its addresses are of two families"
    elif flow.protocol not in (TCP, UDP):
        reason = "only TCP and UDP have flows here"
    elif not (0 < flow.local_port < 65536 and 0 < flow.remote_port < 65536):
        reason = "a port is missing"
    elif not remote.one_receiver:
        reason = "it has many receivers"
    elif remote.loopback or remote == local:
        reason = "it does not leave this host"
    return reason


def encoded(flows: Sequence[FlowKey], key: np.dtype[Any]) -> NDArray[Any]:
    """Keys of the table, laid out as the compiled type."""
    keys = np.zeros(len(flows), key)
    for end in ("local", "remote"):
        packed = b"".join(address(getattr(flow, end)).mapped for flow in flows)
        keys[end]["bytes"] = np.frombuffer(packed, np.uint8).reshape(-1, 16)
    for name in ("local_port", "remote_port", "protocol"):
        keys[name] = [getattr(flow, name) for flow in flows]
    return keys


def hashes(keys: NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """What the kernel finds keys by, computed as `struct swerve_steer_set` says."""
    found = np.full(len(keys), seed, np.uint64)
    for word in keys.view(np.uint64).reshape(len(keys), keys.itemsize // 8).T:
        found = (found ^ word) * _GOLDEN_RATIO
        found ^= found >> np.uint64(32)
    return found


def decoded(key: Any) -> FlowKey:
    """The flow that a key of the table stands for."""
    local, remote = (_text(key[end]["bytes"].tobytes()) for end in ("local", "remote"))
    return FlowKey(int(key["protocol"]), local, int(key["local_port"]), remote, int(key["remote_port"]))


@functools.lru_cache(maxsize=4096)
def _text(packed: bytes) -> str:
    return str(ipaddress.ip_address(packed[12:] if packed.startswith(_MAPPED) else packed))
