"""The agent's configuration file: YAML to a frozen, checked record.

Units are in the names. Read once at start; nothing here touches the kernel.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from pytools.errors import UsageError


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host that is probed, and whose probes are answered."""

    name: str
    address: str
    clock: Literal["shared", "free_running"] = "free_running"  # shared: both ends read the same clock


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How paths are probed."""

    port: int = 862  # RFC 8762, section 4.1
    interval_ms: float = 20.0
    timeout_ms: float = 1000.0  # a probe not answered by then is lost
    dscp: int = 0
    flows: int = 1  # source ports per path: more than one samples what a hash behind the nexthop does


class Windows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Over which time figures are given."""

    short_ms: float = 80.0  # what steering reacts to
    long_ms: float = 1000.0  # what people read
    base_s: float = 30.0  # how far back the minimum behind a queueing delay reaches


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    host: str
    peers: list[Peer]
    probe: Probe = Probe()
    windows: Windows = Windows()


def load(path: Path) -> AgentConfig:
    """Read and check a configuration.

    Raises
    ------
    UsageError
        If the file is missing, is not YAML, or has a field that does not fit; names the field.
    """
    try:
        raw = yaml.safe_load(path.read_text())
        config = msgspec.convert(raw, AgentConfig)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", "write it, or name another with --config (docs/config.md)"
        ) from None
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}", "correct it (docs/config.md)") from None
    return checked(config, str(path))


def checked(config: AgentConfig, where: str) -> AgentConfig:
    """The same configuration, once its values are known to make sense.

    Raises
    ------
    UsageError
        If an address is no address, a name or address is used twice, or a number is out of its range.
    """
    for peer in config.peers:
        try:
            ipaddress.ip_address(peer.address)
        except ValueError:
            raise UsageError(f"{where}: peer {peer.name}: {peer.address!r} is not an IP address") from None
    for what, values in (
        ("address", [ipaddress.ip_address(peer.address) for peer in config.peers]),
        ("name", [(peer.name, ":" in peer.address) for peer in config.peers]),
    ):
        if len(set(values)) != len(values):
            raise UsageError(f"{where}: a peer's {what} is used twice", "keep one entry per peer and family")
    probe = config.probe
    for name, value, low, high in (
        ("probe.port", probe.port, 1, 65535),
        ("probe.interval_ms", probe.interval_ms, 1, 60_000),
        ("probe.timeout_ms", probe.timeout_ms, 10, 60_000),
        ("probe.dscp", probe.dscp, 0, 63),
        ("probe.flows", probe.flows, 1, 16),
        ("windows.short_ms", config.windows.short_ms, 10, 60_000),
        ("windows.long_ms", config.windows.long_ms, 10, 600_000),
        ("windows.base_s", config.windows.base_s, 1, 3600),
    ):
        if not low <= value <= high:
            raise UsageError(f"{where}: {name} is {value}, must be within {low} and {high}")
    return config
