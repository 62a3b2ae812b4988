"""What a lab looks like: names, addresses and identifiers of hosts and rails, worked out from its size. Pure.

A host has one interface per rail and a service address on its loopback; a rail is a router with one port per
host. Every host reaches every other through one nexthop group per destination and family. A rail may have inner ways:
routers between its ports, of which it chooses one for each flow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pytools import units
from pytools.errors import UsageError

DEFAULT_QUEUE_BYTES = 65_536  # 5 ms at 100 Mbit/s, 52 ms at 10 Mbit/s
MAX_HOSTS, MAX_RAILS = 99, 8  # group ids 100+d and 200+d; 10.9.0.0/16 holds the service addresses
MAX_INNER = 8  # way K of rail R has 10.RK.0.0/16
KINDS = ("vlan", "bond", "bond-xor", "team", "vrf", "vxlan", "geneve", "gre", "sit", "wireguard")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_PLACE = r"(?:[hr][1-9][0-9]?|r[1-9]w[1-9])"
_MIN_RATE, _MAX_RATE = 10_000, 400 * 10**9
_MIN_QUEUE = 2_000  # one full frame must fit


@dataclass(frozen=True, slots=True)
class Interface:
    """A host's interface to one rail."""

    name: str
    index: int
    rail: int
    address: str
    gateway: str
    address6: str
    gateway6: str
    nexthop_id: int
    nexthop6_id: int


@dataclass(frozen=True, slots=True)
class Host:
    number: int
    name: str
    netns: str
    service: str
    service6: str
    interfaces: tuple[Interface, ...]


@dataclass(frozen=True, slots=True)
class Port:
    """A rail's interface to one host."""

    name: str
    index: int
    host: int
    address: str
    address6: str


@dataclass(frozen=True, slots=True)
class Rail:
    """One rail, or one of the ways inside a rail: a router with a port towards every host."""

    number: int
    name: str
    netns: str
    ports: tuple[Port, ...]
    inner: tuple[Rail, ...] = ()  # the ways between its ports; with none it forwards from port to port itself


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that makes one lab."""

    name: str  # tells labs apart; part of every namespace's name
    hosts: int = 4  # how many
    rails: int = 2
    rate_bit_s: int | None = 100_000_000  # rate of every rail port, towards its host; None leaves the ports unshaped
    queue_bytes: int = DEFAULT_QUEUE_BYTES  # how much waits at a port before packets are lost, whatever the rate is
    # whether the agents' configurations name the IPv6 service addresses as well. The fabric always has both
    ipv6: bool = False
    inner: int = 0  # ways inside each rail, each with ports of this rate and queue; 0 makes a rail one router
    over: str | None = None  # what a rail's interfaces are, one of `KINDS`; None for the ends of plain cables
    topology: tuple[tuple[Host, ...], tuple[Rail, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        _within("hosts", self.hosts, 2, MAX_HOSTS)
        _within("rails", self.rails, 1, MAX_RAILS)
        _within("ways inside a rail", self.inner, 0, MAX_INNER)
        if self.inner == 1:
            raise UsageError("a rail needs at least two inner paths", f"give 2 to {MAX_INNER}")
        if self.over not in (None, *KINDS):
            raise UsageError(f"a rail cannot be made over {self.over}", f"give one of {', '.join(KINDS)}")
        check_shape(self.rate_bit_s, self.queue_bytes)
        hosts = tuple(_host(self.name, number, self.rails) for number in range(1, self.hosts + 1))
        rails = tuple(_rail(self.name, number, self.hosts, self.inner) for number in range(1, self.rails + 1))
        object.__setattr__(self, "topology", (hosts, rails))


def check_name(name: str) -> None:
    """Refuse a lab name that would not fit into the names of namespaces and files."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name for a lab", "use up to 32 letters, digits, - and _")


def check_shape(rate_bit_s: int | None, queue_bytes: int) -> None:
    """Refuse a rate or a queue that the shaper cannot keep."""
    if rate_bit_s is not None:
        _within("rate in bit/s", rate_bit_s, _MIN_RATE, _MAX_RATE)
    _within("queue in bytes", queue_bytes, _MIN_QUEUE, 1 << 30)


def parse_rate(text: str) -> int | None:
    """Bits per second of `100mbit`, `1.5gbit`, …; None of `none`.

    Raises
    ------
    UsageError
        If it is neither.
    """
    if text.lower() == "none":
        return None
    try:
        return units.parse_rate(text.lower())
    except ValueError:
        raise UsageError(f"{text!r} is not a rate", "write it like 100mbit, 1.5gbit, 800kbit, or none") from None


def rate_text(rate_bit_s: int | None) -> str:
    return "none" if rate_bit_s is None else units.rate_yaml(rate_bit_s)


def namespace_pattern(name: str) -> re.Pattern[str]:
    """What the names of a lab's namespaces look like, however large it is, and no other lab's."""
    return re.compile(rf"swerve-{re.escape(name)}-{_PLACE}")


def lab_of_namespace(netns: str) -> str | None:
    match = re.fullmatch(rf"swerve-(.+)-{_PLACE}", netns)
    return match[1] if match else None


def rail_of(spec: Spec, number: int, inner: int | None = None) -> Rail:
    """A rail (or one of the ways inside it) by its number, or a sentence that says which there are."""
    rails = spec.topology[1]
    if not 1 <= number <= len(rails):
        raise UsageError(f"lab {spec.name} has no rail {number}", f"rails are 1 to {len(rails)}")
    rail = rails[number - 1]
    if inner is None:
        return rail
    if not rail.inner:
        raise UsageError(f"the rails of lab {spec.name} have no inner paths", "create the lab with --inner 2")
    if not 1 <= inner <= len(rail.inner):
        raise UsageError(f"rail {number} has no inner path {inner}", f"they are 1 to {len(rail.inner)}")
    return rail.inner[inner - 1]


def host_of(spec: Spec, number: int) -> Host:
    """A host by its number, or a sentence that says which there are."""
    hosts = spec.topology[0]
    if not 1 <= number <= len(hosts):
        raise UsageError(f"lab {spec.name} has no host h{number}", f"hosts are h1 to h{len(hosts)}")
    return hosts[number - 1]


def group_id(destination: int, family: int) -> int:
    """Id of the nexthop group that a host uses towards a destination."""
    return (100 if family == 4 else 200) + destination


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{what} is {value}, which a lab cannot have", f"give {low} to {high}")


def _host(lab: str, number: int, rails: int) -> Host:
    return Host(
        number=number,
        name=f"h{number}",
        netns=f"swerve-{lab}-h{number}",
        service=f"10.9.0.{number}",
        service6=f"fd00:9::{number:x}",
        interfaces=tuple(_interface(number, rail) for rail in range(1, rails + 1)),
    )


def _interface(host: int, rail: int) -> Interface:
    return Interface(
        name=f"rail{rail}",
        index=10 + rail,
        rail=rail,
        address=f"10.{rail}.{host}.2",
        gateway=f"10.{rail}.{host}.1",
        address6=f"fd00:{rail}:{host:x}::2",
        gateway6=f"fd00:{rail}:{host:x}::1",
        nexthop_id=10 + rail,
        nexthop6_id=20 + rail,
    )


def _rail(lab: str, number: int, hosts: int, inner: int) -> Rail:
    name = f"r{number}"
    ways = tuple(
        Rail(way, f"{name}w{way}", f"swerve-{lab}-{name}w{way}", _ports(f"{number}{way}", hosts))
        for way in range(1, inner + 1)
    )
    return Rail(number, name, f"swerve-{lab}-{name}", _ports(f"{number}", hosts), ways)


def _ports(place: str, hosts: int) -> tuple[Port, ...]:
    return tuple(
        Port(f"h{host}", 100 + host, host, f"10.{place}.{host}.1", f"fd00:{place}:{host:x}::1")
        for host in range(1, hosts + 1)
    )
