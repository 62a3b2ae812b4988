"""Which signals a person asks for; applied alike to tables and to JSON.

A signal passes when it has every property that is asked for. One that cannot have it (a path has no process) does not
pass. Of several values of one kind any will do. Pure.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, get_args

from pytools.errors import UsageError
from pytools.signals import (
    AnySignal,
    AppDelay,
    Clock,
    ClockEdge,
    HoldState,
    Job,
    Link,
    LinkEvent,
    Path,
    PathDelay,
    PathEcn,
    PathLiveness,
    PathMtu,
    PathState,
    PathWay,
    ProbeSamples,
    RdmaPort,
    RdmaQueuePair,
    RdmaVerdict,
    TcpFlow,
    TcpNamespace,
    TcpPath,
)


def chosen(word: str, words: Iterable[str], what: str) -> str:
    """The word as it is written among `words`, whatever its case.

    Raises
    ------
    UsageError
        If it is none of them; names the nearest, and all there are.
    """
    known = list(dict.fromkeys(words))
    for each in known:
        if each.lower() == word.lower():
            return each
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"there is no {what} {word!r}", f"{hint}there are: {', '.join(known)}")


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
VERDICTS: Final[tuple[str, ...]] = get_args(RdmaVerdict)
_DEVICE_BYTES: Final = 63
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")  # IPv4 addresses in IPv6 clothes


class Traits(NamedTuple):
    """The properties of one signal that can be asked for, each under the name of its filter."""

    dst: tuple[str, ...] = ()
    src: tuple[str, ...] = ()
    port: tuple[int, ...] = ()
    pid: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    interface: tuple[str, ...] = ()  # devices of RDMA among them
    path: tuple[Path, ...] = ()
    verdict: tuple[str, ...] = ()
    host: tuple[str, ...] = ()  # whose clock it is
    pod: tuple[str, ...] = ()  # network namespaces
    job: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filters:
    """What is asked for; an empty field asks for nothing."""

    dst: tuple[Network, ...] = ()
    src: tuple[Network, ...] = ()
    port: tuple[int, ...] = ()
    pid: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    interface: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    verdict: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    pod: tuple[str, ...] = ()
    job: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != _NOTHING

    def passes(self, signal: AnySignal) -> bool:
        """Whether the signal has all that is asked for."""
        if not self:
            return True
        has = traits(signal)
        return all(
            any(fits(one, other) for other in getattr(has, name) for one in wanted)
            for name, fits in _FITS.items()
            if (wanted := getattr(self, name))
        )

    def lasting(self) -> Filters:
        """Those whose answer does not change while a connection or a queue pair lives."""
        return replace(self, command=(), path=(), interface=(), verdict=(), host=(), pod=(), job=())

    def __str__(self) -> str:
        """As they are written on the command line."""
        asked = ((name, value) for name in Traits._fields for value in getattr(self, name))
        return " ".join(f"--{name} {value}" for name, value in asked)


_NOTHING: Final = Filters()


def _part(text: str, whole: object) -> bool:
    return text.lower() in str(whole).lower()


@functools.lru_cache(maxsize=65536)
def _inside(network: Network, text: str) -> bool:
    address = _address(text)
    return address is not None and address.version == network.version and address in network


def _address(text: str) -> Address | None:
    """The address in a signal (an IPv4 address in IPv6 clothes is one of IPv4); None where it is empty or none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


# Name of a filter -> whether what is asked for fits what a signal has.
_FITS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "dst": _inside,
    "src": _inside,
    "port": operator.eq,
    "pid": operator.eq,
    "command": _part,
    "interface": operator.eq,
    "path": _part,
    "verdict": operator.eq,
    "host": _part,
    "pod": _part,
    "job": _part,
}


def traits(signal: AnySignal) -> Traits:
    """What can be asked of a signal."""
    found = Traits()
    match signal:
        case TcpFlow():
            found = Traits(
                dst=(signal.remote,),
                src=(signal.local,),
                port=(signal.local_port, signal.remote_port),
                pid=(signal.owner.pid,),
                command=(signal.owner.command,),
                interface=(signal.interface,),
                path=_known(signal.path),
                pod=(signal.namespace,),
            )
        case RdmaQueuePair():
            paths = _known(signal.path)
            found = Traits(
                dst=(signal.remote,),
                pid=(signal.owner.pid,),
                command=(signal.owner.command,),
                interface=(signal.device, *(path.interface for path in paths)),
                path=paths,
                verdict=(signal.verdict,),
            )
        case AppDelay():  # of all flows of a path together neither addresses nor ports are known but the path's
            paths = _known(signal.path)
            found = Traits(
                dst=(signal.remote,) if signal.remote else tuple(path.address for path in paths),
                src=(signal.local,) if signal.local else (),
                port=(signal.local_port, signal.remote_port) if signal.local else (),
                interface=tuple(path.interface for path in paths),
                path=paths,
            )
        case TcpNamespace():
            found = Traits(pod=(signal.namespace,))
        case TcpPath():
            found = _of_paths(_known(signal.path), signal.interface)
        case Link() | LinkEvent():
            found = _of_paths(tuple(signal.paths), signal.interface)
        case PathMtu() | PathEcn() | PathDelay() | PathLiveness() | PathState() | PathWay():
            found = _of_paths((signal.path,), signal.path.interface)
        case HoldState() | ProbeSamples():
            found = _of_paths((signal.path,), signal.path.interface)
        case ClockEdge():
            found = _of_paths((signal.path,), signal.path.interface)._replace(host=(signal.path.destination,))
        case Clock():
            found = Traits(host=(signal.of,))
        case Job():
            paths = tuple(each.path for each in signal.paths if each.path is not None)
            found = Traits(
                dst=tuple(path.address for path in paths),
                pid=tuple(each.owner.pid for each in signal.ranks),
                command=tuple(each.owner.command for each in signal.ranks),
                interface=tuple(each.interface for each in signal.paths),
                path=paths,
                pod=tuple(each.pod for each in signal.ranks),
                job=(signal.job,),
            )
        case RdmaPort():
            found = Traits(interface=(signal.device, signal.interface))
    return found


def _known(path: Path | None) -> tuple[Path, ...]:
    return () if path is None else (path,)


def _of_paths(paths: tuple[Path, ...], interface: str) -> Traits:
    return Traits(dst=tuple(path.address for path in paths), interface=(interface,), path=paths)


def parse(
    *,
    dst: Sequence[str] = (),
    src: Sequence[str] = (),
    port: Sequence[int] = (),
    pid: Sequence[int] = (),
    command: Sequence[str] = (),
    interface: Sequence[str] = (),
    path: Sequence[str] = (),
    verdict: Sequence[str] = (),
    host: Sequence[str] = (),
    pod: Sequence[str] = (),
    job: Sequence[str] = (),
) -> Filters:
    """Filters from words of the command line.

    Raises
    ------
    UsageError
        If something is not what it should be, or nothing could ever pass; says what to do instead.
    """
    networks = {"--dst": tuple(map(_network("--dst"), dst)), "--src": tuple(map(_network("--src"), src))}
    families = [{network.version for network in each} for each in networks.values()]
    if all(families) and not families[0] & families[1]:
        raise UsageError(
            f"no packet goes from {' or '.join(src)} to {' or '.join(dst)}: these are two families of addresses",
            "give prefixes of one family, or leave out --src or --dst",
        )
    for number, option, most in (
        *((each, "--port", 65535) for each in port),
        *((each, "--pid", 1 << 22) for each in pid),
    ):
        if not 1 <= number <= most:
            raise UsageError(f"{option} {number}: there is no such number", f"it is within 1 and {most}")
    for option, texts in (("--command", command), ("--path", path), ("--host", host), ("--pod", pod), ("--job", job)):
        if not all(map(str.strip, texts)):
            raise UsageError(f"{option} is empty", "give a part of the name, or leave the option out")
    return Filters(
        networks["--dst"],
        networks["--src"],
        tuple(port),
        tuple(pid),
        tuple(command),
        tuple(map(_interface, interface)),
        tuple(path),
        tuple(chosen(each, VERDICTS, "verdict") for each in verdict),
        tuple(host),
        tuple(pod),
        tuple(job),
    )


def _network(option: str) -> Callable[[str], Network]:
    def one(text: str) -> Network:
        try:
            network = ipaddress.ip_network(text.strip("[]"), strict=False)
        except ValueError:
            raise UsageError(
                f"{option}: {text!r} is neither an address nor a prefix",
                "write it like 10.9.0.0/16, 10.9.0.2 or fd00::/8",
            ) from None
        if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
            return ipaddress.ip_network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
        return network

    return one


def _interface(name: str) -> str:
    # A device of RDMA may have the longer name, and is given with the same option.
    if not name or len(name.encode()) > _DEVICE_BYTES or any(char.isspace() or char == "/" for char in name):
        raise UsageError(
            f"--interface: {name!r} cannot be the name of one", "`swerve links` lists those that carry paths"
        )
    return name
