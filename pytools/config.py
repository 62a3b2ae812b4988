"""The agent's configuration file: YAML to a frozen, checked record.

A file with the names of the record, as earlier versions had them, is read too. Read at the start and on a reload;
nothing here touches the kernel. Comments of fields become docs/config.txt.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

from pytools import directories
from pytools.config_units import key_of, quantity, unit_of, written
from pytools.directories import read_obeyed
from pytools.errors import UsageError, not_permitted
from pytools.yaml_reader import Location, NotYamlError, Reader, decoded

_MAX_BYTES: Final = 1 << 22  # some 60,000 peers
FILLED_IN: Final = frozenset({"host"})  # fields without a default that a file may leave out all the same


class Within(NamedTuple):
    """The range of a number, both ends in it."""

    least: float
    most: float


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host that is probed, and whose probes are answered; with several addresses, an entry for each."""

    name: str  # name of the peer; with a cluster key, the `host` of its own configuration
    # address that is probed, IPv4 or IPv6, unique to the host; the paths are the nexthops of the route to it
    address: str
    # `shared` if both ends read the same clock (namespaces of one machine); else the clocks are compared
    clock: Literal["shared", "free_running"] = "free_running"


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How paths are probed."""

    port: Annotated[int, Within(1, 65535)] = 862  # UDP port of the reflectors (RFC 8762, section 4.1)
    interval_ms: Annotated[float, Within(1, 60_000)] = 20.0  # one probe per path, source port and interval
    timeout_ms: Annotated[float, Within(10, 60_000)] = 1000.0  # a probe without a reply in this time is lost
    dscp: Annotated[int, Within(0, 63)] = 0  # traffic class of the probes; they measure the queue of this class only
    # source ports per path; more than one samples ECMP behind the nexthop
    flows: Annotated[int, Within(1, 16)] = 1
    # probes a second of this host, at most, that look for hidden ways behind the first hop; 0: none
    sweep_per_s: Annotated[int, Within(0, 40)] = 20


class Windows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Intervals that figures cover."""

    # window for steering: five probes, so that a median above a threshold needs three
    short_ms: Annotated[float, Within(10, 60_000)] = 90.0
    long_ms: Annotated[float, Within(10, 600_000)] = 1000.0  # window for people
    base_s: Annotated[float, Within(1, 3600)] = 30.0  # window of the base delay behind a queueing delay

    @property
    def long_ns(self) -> int:
        """The long window, which is also how often most signals are told."""
        return int(self.long_ms * 1e6)


class Clocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How clocks are compared: by coded pairs, two probes a set spacing apart behind a third that leads them."""

    # one pair per path and interval, in whole probe intervals; it costs two probes
    pair_interval_ms: Annotated[float, Within(1, 60_000)] = 40.0
    # time between the two probes of a pair, during which the sender busy-waits; 0s: the shortest possible
    spacing_us: Annotated[float, Within(0, 10_000)] = 0.0
    # a pair whose spacing changed by more is rejected; use more on hosts with noisy timestamps
    tolerance_ns: Annotated[int, Within(1, 1_000_000)] = 150
    # window of a clock fit: a longer one averages more, and relies on the oscillators longer
    window_ms: Annotated[float, Within(100, 600_000)] = 2000.0
    # how often one path to each peer is fitted and all clocks are solved, 10ms to `clocks.window`; several paths to a
    # peer take two turns; eight times as often after a step, a contradiction or a new path; 0s: half of `clocks.window`
    interval_ms: Annotated[float, Within(0, 600_000)] = 0.0
    # assumed limit: the two directions differ by no more than this share of the smallest round trip
    asymmetry_share: Annotated[float, Within(0, 1)] = 0.1
    reference: str = ""  # the reference host; empty: elected, the first by name that sends
    chrony_socket: str = ""  # absolute path of chrony's SOCK reference clock, which gets the estimate

    @property
    def round_ms(self) -> float:
        """From one round of fits to the next."""
        return self.interval_ms or self.window_ms / 2

    def pair_every(self, probe: Probe) -> int:
        """Every Nth probe of a path is sent as a pair."""
        return max(1, round(self.pair_interval_ms / probe.interval_ms))


class HostBus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How agents talk to each other."""

    port: Annotated[int, Within(1, 65535)] = 7447  # TCP port of all agents, on the addresses towards the peers
    # absolute path of the cluster key; without it there is no bus, and probes are not authenticated
    key_file: str = ""


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How application packets are sampled."""

    enabled: bool = True  # sample application packets while somebody subscribes; needs the bus
    per_s: Annotated[int, Within(1, 1_000_000)] = 2000  # samples a second, both directions together; the rate adapts


class Tcp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How TCP connections are followed."""

    # size of the connection table, about 400 bytes each, allocated at the start; the least recently used go
    flows: Annotated[int, Within(64, 4_000_000)] = 131_072
    # how often a busy connection is updated; retransmissions update it at once
    refresh_ms: Annotated[float, Within(1, 60_000)] = 100.0
    # connections that are reported more often than once per long window, to subscribers; 0: none
    busiest: Annotated[int, Within(0, 100_000)] = 1024
    busiest_ms: Annotated[float, Within(10, 60_000)] = 100.0  # interval of these reports
    # network namespaces whose connections are followed: `all` of the machine, with pods and containers; `own`, the
    # agent's; `auto`: all for an agent in the initial namespace, else its own
    namespaces: Literal["auto", "all", "own"] = "auto"


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How interfaces are watched."""

    # interval of reading counters and queues; events come at once
    interval_ms: Annotated[float, Within(10, 60_000)] = 250.0
    # interval of full-size packets per path, at most 50 a second over all paths; 0s: none
    mtu_interval_s: Annotated[float, Within(0, 3600)] = 1.0
    flap_window_s: Annotated[float, Within(1, 3600)] = 60.0  # a carrier lost and found within this time is a flap


class Rdma(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How RDMA is watched."""

    uprobes: Literal["auto", "off"] = "auto"  # breakpoints in the providers; `off` if processes post a lot
    tap: bool = True  # serve tables to tapped processes
    # tables of 512 queue pairs for all tapped processes of one user, one per process at least; root may have 256
    tap_tables_per_user: Annotated[int, Within(1, 256)] = 4
    interval_ms: Annotated[float, Within(1, 10_000)] = 10.0  # interval of reading the queue pairs while any is busy
    # timed requests a second of one process, at most; 0: counters only
    budget_per_s: Annotated[int, Within(0, 10_000_000)] = 20_000
    # `congested` needs bandwidth below this share of its recent mean
    congested_share: Annotated[float, Within(0.01, 1)] = 0.5
    # and outstanding bytes above this multiple of their recent mean
    congested_backlog: Annotated[float, Within(1, 1000)] = 2.0
    mean_ms: Annotated[float, Within(1, 60_000)] = 50.0  # time constant of these means
    # `dead`: outstanding requests and no completion for this time
    dead_ms: Annotated[float, Within(1, 600_000)] = 200.0


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How GPUs are watched."""

    enabled: bool = True  # read GPUs through NVML while somebody subscribes
    # relate the timers of the GPUs to the host's clock all the time; a process of its own holds a CUDA context on each
    clock: bool = False


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much the flight recorder keeps."""

    hours: Annotated[float, Within(0, 10_000)] = 24.0  # length of the recording; 0s: none
    # compressed space for all records of recent minutes or hours
    fine_mib: Annotated[float, Within(1, 1_000_000)] = 64.0
    # compressed space for older records without short windows
    coarse_mib: Annotated[float, Within(1, 1_000_000)] = 192.0
    directory: str = ""  # absolute path; empty: `recording` in the instance's state directory


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of it."""

    # name of this host in every signal, 1 to 255 bytes; with a cluster key, as the peers name it; without it the
    # environment's SWERVE_HOST, else the kernel's hostname, and the peers of that name are left out
    host: str
    peers: list[Peer]  # hosts that are probed, and whose probes are answered; one entry per address
    probe: Probe = Probe()
    windows: Windows = Windows()
    clocks: Clocks = Clocks()
    bus: HostBus = HostBus()
    samples: Samples = Samples()
    tcp: Tcp = Tcp()
    links: Links = Links()
    rdma: Rdma = Rdma()
    gpu: Gpu = Gpu()
    recording: Recording = Recording()
    virtual_clock: str = ""  # labs only: the file that defines this host's virtual clock


_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    name: kind
    for name, kind in get_type_hints(AgentConfig).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}


def own_name() -> str:
    """The name of a host whose configuration leaves it out; in a cluster the manager may know a better one."""
    return os.environ.get("SWERVE_HOST") or os.uname().nodename


def load(path: Path) -> AgentConfig:
    """Read and check a configuration; `read` without the hints.

    Raises
    ------
    SwerveError
        As `read`.
    """
    return read(path)[0]


def read(path: Path) -> tuple[AgentConfig, tuple[str, ...]]:
    """A checked configuration, and hints how to write what is in the spelling of earlier versions.

    Raises
    ------
    UsageError
        If the file is missing, is not YAML, or has a field that does not fit; names the line and the field.
    RefusedError
        If somebody else could have written it: it says whom to probe and where a key is.
    CapabilityError
        If this user may not read it.
    """
    page = directories.page("config.md")
    try:
        text = read_obeyed(path, _MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise UsageError(f"{path}: larger than {_MAX_BYTES} bytes", f"is it the right file? ({page})")
        reader = Reader(aliases=True)
        raw, hints = _as_record(reader.read(decoded(text)), reader)
        for_all_hosts = isinstance(raw, dict) and "host" not in raw
        if for_all_hosts:
            raw["host"] = own_name()
    except PermissionError as error:
        raise not_permitted(error, path) from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"write it, or name another with --config ({page})") from None
    except NotYamlError as error:
        raise UsageError(f"{path}:{error.line}: {error}", f"correct it ({page})") from None
    problems, config = reader.problems, None
    try:
        config = msgspec.convert(raw, AgentConfig) if not problems else None
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        problems = [reader.problem(_location(place.rstrip("`")), what)]
    if config is None or problems:
        raise UsageError(min(problems).text(str(path)), f"correct it ({page})")
    config = checked(config, str(path), reader)
    if for_all_hosts:  # only then: elsewhere a peer of the own name is a mistake
        others = [peer for peer in config.peers if peer.name != config.host]
        config = msgspec.structs.replace(config, peers=others)
    return config, hints


def as_file(config: AgentConfig) -> dict[str, Any]:
    """A configuration as plain values, named and written as in a file."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    for section, value in found.items():
        if isinstance(value, dict):
            found[section] = {key_of(name): written(name, each) for name, each in value.items()}
    return found


def _as_record(raw: Any, reader: Reader) -> tuple[Any, tuple[str, ...]]:
    """The values of a file under the names of the record, and how to write those that are in the old spelling."""
    hints: list[str] = []
    if not isinstance(raw, dict):
        return raw, ()
    return {section: _section(section, value, reader, hints) for section, value in raw.items()}, tuple(hints)


def _section(section: str, raw: Any, reader: Reader, hints: list[str]) -> Any:
    kind = _SECTIONS.get(section)
    if kind is None or not isinstance(raw, dict):
        return raw
    found = dict(raw)
    for name in (each.name for each in msgspec.structs.fields(kind)):
        key, at = key_of(name), (section, key_of(name))
        if key == name:
            continue
        if name in found:
            if key in found:
                reader.problems.append(reader.problem((section, name), f"given twice: {key} is the same"))
            elif isinstance(found[name], int | float):
                said, line = f"{section}.{name}: {found[name]}", reader.lines[section, name]
                hints.append(f"line {line}: write {said} as {section}.{key}: {written(name, found[name])}")
        elif key in found:
            try:
                found[name] = quantity(name, found[key])
            except ValueError:
                example = "64MiB" if unit_of(name) == "mib" else "20ms"
                reader.problems.append(
                    reader.problem(at, f"expected a number with its unit, such as {example}, got {found[key]!r}")
                )
            del found[key]
    return found


def _location(path: str) -> Location:
    """Where in the file `.probe.port` or `.peers[0].name` is."""
    parts = re.findall(r"\.(\w+)|\[(\d+)\]", path)
    return tuple(int(number) if number else key_of(name) for name, number in parts)


def checked(config: AgentConfig, where: str, reader: Reader | None = None) -> AgentConfig:
    """The same configuration, once its values are known to make sense.

    Raises
    ------
    UsageError
        If an address is no address, an address is used twice, or a number is out of its range.
    """

    def wrong(field: str, what: str, step: str = "") -> UsageError:
        names = (tuple(field.split(".")), tuple(key_of(field).split(".")))
        line = next((f":{reader.lines[at]}" for at in names if at in reader.lines), "") if reader else ""
        return UsageError(f"{where}{line}: {what}", step)

    for number, peer in enumerate(config.peers):
        if why := _no_hosts_address(peer.address):
            line = f":{reader.lines.get(('peers', number, 'address'), 1)}" if reader else ""
            said = f"peer {peer.name}: {peer.address!r} is {why}"
            raise UsageError(f"{where}{line}: {said}", "name an address of that host")
    if len({ipaddress.ip_address(peer.address) for peer in config.peers}) != len(config.peers):
        raise wrong("peers", "a peer's address is used twice", "keep one entry per address")
    for field, value, low, high in _ranges(config):
        if not low <= value <= high:
            said, least, most = (written(field, each) for each in (value, low, high))
            raise wrong(field, f"{key_of(field)} is {said}, must be within {least} and {most}")
    for field, what, name in _names(config):
        if not (name.isprintable() and 1 <= len(name.encode()) <= 255):
            raise wrong(field, f"{what} is {name!r}", "a name has 1 to 255 bytes of printable text")
    for field, path, limit in (
        ("clocks.chrony_socket", config.clocks.chrony_socket, 107),  # the path of a socket has room for no more
        ("bus.key_file", config.bus.key_file, 4095),
        ("recording.directory", config.recording.directory, 4000),
    ):
        if path and not (path.startswith("/") and path.isprintable() and len(path.encode()) <= limit):
            step = f"name an absolute path of at most {limit} printable bytes"
            raise wrong(field, f"{field} is {path!r}", step)
    return config


def _ranges(config: AgentConfig) -> Iterator[tuple[str, float, float, float]]:
    """Of each number with a range: field, value, least and most."""
    for section, kind in _SECTIONS.items():
        for name, hint in get_type_hints(kind, include_extras=True).items():
            value = getattr(getattr(config, section), name)
            for within in getattr(hint, "__metadata__", ()):
                yield f"{section}.{name}", value, within.least, within.most
    yield "clocks.interval_ms", config.clocks.round_ms, 10, config.clocks.window_ms


def _names(config: AgentConfig) -> Iterator[tuple[str, str, str]]:
    """Names of hosts: field, what it is, and the name. They travel between hosts behind a length of one byte."""
    yield "host", "host", config.host
    for peer in config.peers:
        yield "peers", "a peer's name", peer.name
    if config.clocks.reference:
        yield "clocks.reference", "clocks.reference", config.clocks.reference


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
