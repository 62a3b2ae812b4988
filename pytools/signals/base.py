"""What signals of several kinds share: the header of each, paths, owners, quantiles.

The other modules of this package import this one; it imports none of them.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypedDict

import msgspec

SCHEMA_VERSION = 3

ClockState = Literal["synchronised", "holdover", "free_running"]


class Path(msgspec.Struct, frozen=True, order=True):
    """Source host to destination host through one nexthop: what is measured, and what is steered."""

    source: str  # host that sends
    destination: str  # host that receives
    address: str  # the destination's address that is probed
    gateway: str  # of the nexthop; empty if on-link
    interface: str  # by which packets leave the source

    def __str__(self) -> str:
        return f"{self.source}>{self.destination} dev {self.interface}" + (
            f" via {self.gateway}" if self.gateway else ""
        )


def nexthop_name(gateway: str, interface: str) -> str:
    """What a person calls a nexthop; the gateway is empty when it is on-link."""
    return f"{gateway} dev {interface}" if gateway else f"dev {interface}"


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution of delays."""

    samples: int  # in the distribution
    p50_ns: int | None  # nearest rank, as all here
    p90_ns: int | None  # 90th percentile
    p99_ns: int | None  # 99th percentile
    max_ns: int | None  # largest


class Owner(msgspec.Struct, frozen=True):
    """Who holds a socket or a queue pair. Unknown parts are 0 or empty."""

    pid: int = 0  # process; 0 if unknown
    command: str = ""  # its name
    cgroup: str = ""  # path below the root of the hierarchy
    container: str = ""  # identifier in the group's name


class Signal(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # refers to nothing that refers to it
    """What every fact carries."""

    host: str
    at_ns: int
    unix_ns: int
    schema: Annotated[int, msgspec.Meta(le=SCHEMA_VERSION)] = SCHEMA_VERSION  # a later one may mean something else


class Header(TypedDict):
    """What every `Signal` begins with."""

    host: str
    at_ns: int
    unix_ns: int


def header(host: str, at_ns: int) -> Header:
    """The header of a signal that is made now; `at_ns` is what it is about."""
    return {"host": host, "at_ns": at_ns, "unix_ns": time.time_ns()}
