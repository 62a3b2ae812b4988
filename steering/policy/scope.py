"""Where a rule holds: paths, destinations, interfaces, nexthops; for rules about flows also which flows. Pure.

Everything that is named must fit; of a list, one entry. What is not named fits everything.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pytools.signals import Owner, Path
from steering.plan import FlowKey
from steering.policy.base import Address, Model, Prefix, Some

_HIGHEST_PORT: Final = 65_535
_PROTOCOLS: Final = {6: "tcp", 17: "udp"}

Glob = Annotated[str, Field(strict=True, min_length=1, max_length=256)]
PathGlob = Annotated[
    str, Field(strict=True, max_length=512, pattern=r"^[^>\s]+>[^>\s]+$", examples=["h1>h2", "*>storage-*"])
]


def _ports(value: object) -> tuple[int, ...]:
    given: list[Any] = value if isinstance(value, list) else [value]
    if not given or any(isinstance(p, bool) or not isinstance(p, int) or not 0 < p <= _HIGHEST_PORT for p in given):
        raise PydanticCustomError("ports", "not a port", {"given": value})
    return tuple(given)


Ports = Annotated[
    tuple[int, ...],
    BeforeValidator(_ports),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": _HIGHEST_PORT},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": _HIGHEST_PORT}},
            ]
        }
    ),
]


class Flows(Model):
    """Which flows, by their addresses; only with pin, spread and relabel."""

    protocol: Literal["tcp", "udp", "any"] = Field(default="any", description="transport protocol")
    remote_port: Ports = Field(default=(), description="ports of the far end")
    local_port: Ports = Field(default=(), description="ports of this host")
    remote: Some[Prefix] = Field(default=(), description="prefixes of the far end")

    def covers(self, flow: FlowKey) -> bool:
        """Whether a flow is meant."""
        return (
            self.protocol in ("any", _PROTOCOLS.get(flow.protocol))
            and (not self.remote_port or flow.remote_port in self.remote_port)
            and (not self.local_port or flow.local_port in self.local_port)
            and (not self.remote or inside(flow.remote, self.remote))
        )


class Scope(Model):
    """Where the rule applies: all keys must match, and one entry of each list; without a key, everything matches."""

    paths: Some[PathGlob] = Field(default=(), description="source>destination, names of hosts with * and ?")
    destinations: Some[Prefix] = Field(default=(), description="prefixes that contain the peer's probed address")
    interfaces: Some[Glob] = Field(default=(), description="names of interfaces with * and ?")
    nexthops: Some[Address] = Field(default=(), description="addresses of gateways")
    flows: Flows = Field(default_factory=Flows)
    processes: Some[Glob] = Field(
        default=(),
        description="names of commands with * and ?; only with pin, spread and relabel; a flow of unknown owner does "
        "not match",
    )
    cgroups: Some[Glob] = Field(
        default=(),
        description="control groups with * and ?; only with pin, spread and relabel; a flow of unknown owner does not "
        "match",
    )

    def covers(self, path: Path) -> bool:
        """Whether a path is meant."""
        return (
            _one_of(f"{path.source}>{path.destination}", self.paths)
            and (not self.destinations or inside(path.address, self.destinations))
            and _one_of(path.interface, self.interfaces)
            and (not self.nexthops or _address(path.gateway) in self.nexthops)
        )

    def covers_flow(self, flow: FlowKey, owner: Owner | None = None) -> bool:
        """Whether a flow is meant; one whose owner is not known is not, where owners are named."""
        command, cgroup = (owner.command, owner.cgroup) if owner else ("", "")
        return (
            self.flows.covers(flow)
            and (not self.processes or (bool(command) and _one_of(command, self.processes)))
            and (not self.cgroups or (bool(cgroup) and _one_of(cgroup, self.cgroups)))
        )


def _one_of(text: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(text, glob) for glob in globs)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return ""


@lru_cache(maxsize=4096)
def inside(address: str, prefixes: tuple[str, ...]) -> bool:
    """Whether an address lies in one of these prefixes."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    nets = [ipaddress.ip_network(prefix) for prefix in prefixes]
    return any(found.version == net.version and found in net for net in nets)
