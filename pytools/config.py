"""The agent's configuration file: YAML to a frozen, checked record.

Units are in the names. Read once at start; nothing here touches the kernel.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal

import msgspec

from pytools import directories, yaml_text
from pytools.directories import read_obeyed
from pytools.errors import UsageError, not_permitted

_MAX_BYTES: Final = 1 << 22  # some 60,000 peers


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

    short_ms: float = 90.0  # what steering reacts to: five probes, so that three of them are a median
    long_ms: float = 1000.0  # what people read
    base_s: float = 30.0  # window of the base delay behind a queueing delay

    @property
    def long_ns(self) -> int:
        """The long window, which is also how often most signals are told."""
        return int(self.long_ms * 1e6)


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How clocks are compared. A coded pair is two probes a set spacing apart, behind a third that leads them."""

    pair_interval_ms: float = 40.0  # a pair per path and interval; rounded to whole probe intervals
    spacing_us: float = 0.0  # between the two probes of a pair; 0: as close as they will go
    tolerance_ns: int = 150  # a pair whose spacing changed by more on its way is rejected
    window_ms: float = 2000.0  # what a line is fitted to
    interval_ms: float = 500.0  # how often; four times as often after a step, a doubt or a new path
    asymmetry_share: float = 0.1  # stated allowance: directions differ by no more than this share of the round trip
    reference: str = ""  # the host whose clock is the common one; empty: elected, the first by name that is heard
    chrony_socket: str = ""  # feed the estimate to chrony's SOCK reference clock there

    def pair_every(self, probe: Probe) -> int:
        """Every Nth probe of a path is sent as a pair."""
        return max(1, round(self.pair_interval_ms / probe.interval_ms))


class HostBus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How agents talk to each other; without a key file they do not."""

    port: int = 7447
    key_file: str = ""  # at least 32 bytes that all hosts share; readable by its owner alone


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How application packets are sampled."""

    enabled: bool = True  # needs the bus between hosts
    per_s: int = 2000  # budget: samples a second, both directions; the rate adapts


class Tcp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How TCP connections are followed."""

    flows: int = 131_072  # remembered at most; beyond, the least recently used go
    refresh_ms: float = 100.0  # how often the figures of a busy connection are taken
    busiest: int = 1024  # so many connections are told more often than once per long window, while somebody listens
    busiest_ms: float = 100.0  # how often


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How interfaces are watched."""

    interval_ms: float = 250.0  # counters and queues; events come at once
    mtu_interval_s: float = 1.0  # a packet of full size per path so often; 0: none
    flap_window_s: float = 60.0  # carrier lost and found again within it is a flap


class Rdma(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How RDMA is watched."""

    uprobes: Literal["auto", "off"] = "auto"  # breakpoints in the providers: not for processes that post a lot
    tap: bool = True  # serve the memory in which tapped processes count
    tap_tables_per_user: int = 4  # of 512 queue pairs each, one at least per process; root has more
    interval_ms: float = 10.0  # reading of the queue pairs while any is busy
    budget_per_s: int = 20_000  # requests timed a second by one queue pair's process, at most
    congested_share: float = 0.5  # of the mean bandwidth: below is half of "congested"
    congested_backlog: float = 2.0  # times the mean of outstanding bytes: above is the other half
    mean_ms: float = 50.0  # what "mean" reaches back
    dead_ms: float = 200.0  # outstanding and nothing completed for so long


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of what was told is kept (docs/recording.md)."""

    hours: float = 24.0  # older records go; 0: nothing is recorded
    fine_mib: float = 64.0  # compressed: every record, for the last minutes or hours
    coarse_mib: float = 192.0  # the same without short windows, which reaches further back
    directory: str = ""  # empty: `recording` in the instance's state directory


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    host: str
    peers: list[Peer]
    probe: Probe = Probe()
    windows: Windows = Windows()
    clocks: Clocks = Clocks()
    bus: HostBus = HostBus()
    samples: Samples = Samples()
    tcp: Tcp = Tcp()
    links: Links = Links()
    rdma: Rdma = Rdma()
    recording: Recording = Recording()
    virtual_clock: str = ""  # labs only: the file that says how this host's stamping clock runs


def load(path: Path) -> AgentConfig:
    """Read and check a configuration.

    Raises
    ------
    UsageError
        If the file is missing, is not YAML, or has a field that does not fit; names the field.
    RefusedError
        If somebody else could have written it: it says whom to probe and where a key is.
    CapabilityError
        If this user may not read it.
    """
    try:
        text = read_obeyed(path, _MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            hint = f"is it the right file? ({directories.page('config.md')})"
            raise UsageError(f"{path}: larger than {_MAX_BYTES} bytes", hint)
        config = msgspec.convert(yaml_text.values(text), AgentConfig)
    except PermissionError as error:
        raise not_permitted(error, path) from None
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}", f"write it, or name another with --config ({directories.page('config.md')})"
        ) from None
    except (yaml_text.NotYamlError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}", f"correct it ({directories.page('config.md')})") from None
    return checked(config, str(path))


def checked(config: AgentConfig, where: str) -> AgentConfig:
    """The same configuration, once its values are known to make sense.

    Raises
    ------
    UsageError
        If an address is no address, a name or address is used twice, or a number is out of its range.
    """
    for peer in config.peers:
        if why := _no_hosts_address(peer.address):
            raise UsageError(f"{where}: peer {peer.name}: {peer.address!r} is {why}", "name an address of that host")
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
        ("clocks.pair_interval_ms", config.clocks.pair_interval_ms, 1, 60_000),
        ("clocks.spacing_us", config.clocks.spacing_us, 0, 10_000),
        ("clocks.tolerance_ns", config.clocks.tolerance_ns, 1, 1_000_000),
        ("clocks.window_ms", config.clocks.window_ms, 100, 600_000),
        ("clocks.interval_ms", config.clocks.interval_ms, 10, config.clocks.window_ms),
        ("clocks.asymmetry_share", config.clocks.asymmetry_share, 0, 1),
        ("bus.port", config.bus.port, 1, 65535),
        ("samples.per_s", config.samples.per_s, 1, 1_000_000),
        ("tcp.flows", config.tcp.flows, 64, 4_000_000),
        ("tcp.refresh_ms", config.tcp.refresh_ms, 1, 60_000),
        ("tcp.busiest", config.tcp.busiest, 0, 100_000),
        ("tcp.busiest_ms", config.tcp.busiest_ms, 10, 60_000),
        ("links.interval_ms", config.links.interval_ms, 10, 60_000),
        ("links.mtu_interval_s", config.links.mtu_interval_s, 0, 3600),
        ("links.flap_window_s", config.links.flap_window_s, 1, 3600),
        ("rdma.interval_ms", config.rdma.interval_ms, 1, 10_000),
        ("rdma.tap_tables_per_user", config.rdma.tap_tables_per_user, 1, 256),
        ("rdma.budget_per_s", config.rdma.budget_per_s, 0, 10_000_000),
        ("rdma.congested_share", config.rdma.congested_share, 0.01, 1),
        ("rdma.congested_backlog", config.rdma.congested_backlog, 1, 1000),
        ("rdma.mean_ms", config.rdma.mean_ms, 1, 60_000),
        ("rdma.dead_ms", config.rdma.dead_ms, 1, 600_000),
        ("recording.hours", config.recording.hours, 0, 10_000),
        ("recording.fine_mib", config.recording.fine_mib, 1, 1_000_000),
        ("recording.coarse_mib", config.recording.coarse_mib, 1, 1_000_000),
    ):
        if not low <= value <= high:
            raise UsageError(f"{where}: {name} is {value}, must be within {low} and {high}")
    _check_texts(config, where)
    return config


def _no_hosts_address(text: str) -> str:
    """Why a text cannot be the address by which a host is reached from everywhere; empty when it can."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "not an IP address"
    if isinstance(address, ipaddress.IPv6Address) and (address.ipv4_mapped or address.is_link_local):
        return "an IPv4-mapped IPv6 address" if address.ipv4_mapped else "of one link alone"
    if address.is_unspecified or address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        return "not of one host"
    return ""


def _check_texts(config: AgentConfig, where: str) -> None:
    """Names travel between hosts behind a length of one byte; a socket's path has room for 107 bytes."""
    names = [("host", config.host), *(("a peer's name", peer.name) for peer in config.peers)]
    for what, name in [*names, *([("clocks.reference", config.clocks.reference)] if config.clocks.reference else [])]:
        if not (name.isprintable() and 1 <= len(name.encode()) <= 255):
            raise UsageError(f"{where}: {what} is {name!r}", "a name has 1 to 255 bytes of printable text")
    for what, path, limit in (
        ("clocks.chrony_socket", config.clocks.chrony_socket, 107),
        ("bus.key_file", config.bus.key_file, 4095),
        ("recording.directory", config.recording.directory, 4000),
    ):
        if path and not (path.startswith("/") and path.isprintable() and len(path.encode()) <= limit):
            raise UsageError(
                f"{where}: {what} is {path!r}", f"name an absolute path of at most {limit} printable bytes"
            )
