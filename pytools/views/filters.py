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
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args

import msgspec

from pytools import signals as sig
from pytools.errors import UsageError


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
VERDICTS: Final[tuple[str, ...]] = get_args(sig.RdmaVerdict)
_DEVICE_BYTES: Final = 63
_MAPPED: Final = ipaddress.IPv6Network("::ffff:0:0/96")  # IPv4-mapped IPv6 addresses


def _network(option: str, text: str) -> Network:
    try:
        network = ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        raise UsageError(
            f"{option}: {text!r} is neither an address nor a prefix", "write it like 10.9.0.0/16, 10.9.0.2 or fd00::/8"
        ) from None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        return ipaddress.ip_network((int(network.network_address) & 0xFFFFFFFF, network.prefixlen - 96))
    return network


def _number(most: int, option: str, number: int) -> int:
    if not 1 <= number <= most:
        raise UsageError(f"{option} {number}: there is no such number", f"it is within 1 and {most}")
    return number


def _text(option: str, text: str) -> str:
    if not text.strip():
        raise UsageError(f"{option} is empty", "give a part of the name, or leave the option out")
    return text


def _interface(option: str, name: str) -> str:
    # A device of RDMA may have the longer name, and is given with the same option.
    if not name or len(name.encode()) > _DEVICE_BYTES or any(char.isspace() or char == "/" for char in name):
        raise UsageError(f"{option}: {name!r} cannot be the name of one", "`swerve links` lists those that carry paths")
    return name


def _verdict(_option: str, word: str) -> str:
    return chosen(word, VERDICTS, "verdict")


@functools.lru_cache(maxsize=65536)
def _inside(network: Network, text: str) -> bool:
    """Whether a signal's address is in a prefix; an IPv4-mapped one is an IPv4 address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # none, or not known
        return False
    plain = getattr(address, "ipv4_mapped", None) or address
    return plain.version == network.version and plain in network


def _part(text: str, whole: object) -> bool:
    return text.lower() in str(whole).lower()


def _gpu(text: str, known: object) -> bool:
    """Whether it is the index or the beginning of the UUID, as `nvidia-smi -i` takes them."""
    whole = str(known).lower()
    return text.lower() == whole or (whole.startswith("gpu-") and whole.startswith(text.lower()))


class _Filter(NamedTuple):
    """How a filter's values are read, with the name of the option, and which properties fit one."""

    read: Callable[[str, Any], Any]
    fits: Callable[[Any, Any], bool]
    lasts: bool = False  # the answer does not change while a connection or a queue pair lives


FILTERS: Final[Mapping[str, _Filter]] = {
    "dst": _Filter(_network, _inside, lasts=True),
    "src": _Filter(_network, _inside, lasts=True),
    "port": _Filter(functools.partial(_number, 65535), operator.eq, lasts=True),
    "pid": _Filter(functools.partial(_number, 1 << 22), operator.eq, lasts=True),
    "command": _Filter(_text, _part),
    "interface": _Filter(_interface, operator.eq),  # devices of RDMA among them
    "path": _Filter(_text, _part),
    "verdict": _Filter(_verdict, operator.eq),
    "host": _Filter(_text, _part),  # whose clock it is
    "pod": _Filter(_text, _part),  # network namespaces
    "job": _Filter(_text, _part),
    "gpu": _Filter(_text, _gpu),
    "reason": _Filter(_text, _part),  # of dropped packets
}


@dataclass(frozen=True)
class Filters:
    """What is asked for: values by the name of the filter, in the order of `FILTERS`; none is without values."""

    wanted: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.wanted)

    def passes(self, signal: sig.AnySignal) -> bool:
        """Whether the signal has all that is asked for."""
        has = TRAITS.get(type(signal), {})
        return all(
            name in has and any(FILTERS[name].fits(one, other) for other in has[name](signal) for one in values)
            for name, values in self.wanted.items()
        )

    def select(self, signals: Iterable[sig.AnySignal]) -> list[sig.AnySignal]:
        """The signals that pass; of one that is a table itself only the rows that pass."""
        return [self._narrowed(signal) for signal in signals if self.passes(signal)]

    def _narrowed(self, signal: sig.AnySignal) -> sig.AnySignal:
        if not self or not isinstance(signal, sig.PacketDrops):
            return signal
        texts = self.wanted["reason"]  # the only filter that it passes
        rows = [row for row in signal.reasons if any(FILTERS["reason"].fits(text, row.reason) for text in texts)]
        return msgspec.structs.replace(signal, reasons=rows)

    def lasting(self) -> Filters:
        """Those whose answer does not change while a connection or a queue pair lives."""
        return Filters({name: values for name, values in self.wanted.items() if FILTERS[name].lasts})

    def __str__(self) -> str:
        """As they are written on the command line."""
        return " ".join(f"--{name} {value}" for name, values in self.wanted.items() for value in values)


@dataclass(frozen=True)
class Query:
    """Filters and order of one table; the usual order where none is asked for."""

    filters: Filters = field(default_factory=Filters)
    sort: str | None = None

    def said(self) -> str:
        """The filters behind a title; empty when there are none."""
        return f" ({self.filters})" if self.filters else ""

    def none_passes(self, host: str) -> str:
        """Why no row is shown where filters let none of a host's pass; empty when there are no filters."""
        return f"{host}: nothing passes {self.filters}" if self.filters else ""


def parse(**given: Sequence[Any]) -> Filters:
    """Filters from words of the command line, by name.

    Raises
    ------
    UsageError
        If something is not what it should be, or nothing could ever pass; says what to do instead.
    """
    wanted = {
        name: tuple(each.read(f"--{name}", value) for value in values)
        for name, each in FILTERS.items()
        if (values := given.get(name))
    }
    src, dst = ({network.version for network in wanted.get(name, ())} for name in ("src", "dst"))
    if src and dst and not src & dst:
        raise UsageError(
            f"no packet goes from {' or '.join(given['src'])} to {' or '.join(given['dst'])}: these are two families "
            "of addresses",
            "give prefixes of one family, or leave out --src or --dst",
        )
    return Filters(wanted)


Has = Callable[[Any], Iterable[Any]]


def _addresses(paths: Iterable[sig.Path]) -> tuple[str, ...]:
    return tuple(path.address for path in paths)


def _known(path: sig.Path | None) -> tuple[sig.Path, ...]:
    return () if path is None else (path,)


def _of_paths(paths: Callable[[Any], Sequence[sig.Path]], interface: Callable[[Any], str]) -> dict[str, Has]:
    return {"dst": lambda row: _addresses(paths(row)), "interface": lambda row: (interface(row),), "path": paths}


_OF_PATH: Final = _of_paths(lambda row: (row.path,), lambda row: row.path.interface)
_OF_INTERFACE: Final = _of_paths(lambda row: row.paths, lambda row: row.interface)
_OF_POD: Final[dict[str, Has]] = {"pod": lambda row: (row.namespace,)}
_OF_OWNER: Final[dict[str, Has]] = {
    "pid": lambda row: (row.owner.pid,),
    "command": lambda row: (row.owner.command,),
    "path": lambda row: _known(row.path),
}


# What can be asked of the signals of a kind, by the name of the filter.
TRAITS: Final[Mapping[type, Mapping[str, Has]]] = {
    sig.TcpFlow: {
        "dst": lambda row: (row.remote,),
        "src": lambda row: (row.local,),
        "port": lambda row: (row.local_port, row.remote_port),
        "interface": lambda row: (row.interface,),
        **_OF_OWNER,
        **_OF_POD,
    },
    sig.RdmaQueuePair: {
        "dst": lambda row: (row.remote,),
        "interface": lambda row: (row.device, *(path.interface for path in _known(row.path))),
        "verdict": lambda row: (row.verdict,),
        **_OF_OWNER,
    },
    sig.AppDelay: {  # of all flows of a path together neither addresses nor ports are known but the path's
        "dst": lambda row: (row.remote,) if row.remote else _addresses(_known(row.path)),
        "src": lambda row: (row.local,) if row.local else (),
        "port": lambda row: (row.local_port, row.remote_port) if row.local else (),
        "interface": lambda row: [path.interface for path in _known(row.path)],
        "path": lambda row: _known(row.path),
    },
    sig.TcpNamespace: _OF_POD,
    sig.TcpPath: _of_paths(lambda row: _known(row.path), lambda row: row.interface),
    **dict.fromkeys((sig.Link, sig.LinkEvent), _OF_INTERFACE),
    **dict.fromkeys(
        (
            sig.PathMtu,
            sig.PathEcn,
            sig.PathDelay,
            sig.PathLiveness,
            sig.PathState,
            sig.PathWay,
            sig.HoldState,
            sig.ProbeSamples,
        ),
        _OF_PATH,
    ),
    sig.ClockEdge: {**_OF_PATH, "host": lambda row: (row.path.destination,)},
    sig.Clock: {"host": lambda row: (row.of,)},
    sig.Job: {
        "dst": lambda row: _addresses(each.path for each in row.paths if each.path is not None),
        "pid": lambda row: [each.owner.pid for each in row.ranks],
        "command": lambda row: [each.owner.command for each in row.ranks],
        "interface": lambda row: [each.interface for each in row.paths],
        "path": lambda row: [each.path for each in row.paths if each.path is not None],
        "pod": lambda row: [each.pod for each in row.ranks],
        "job": lambda row: (row.job,),
    },
    sig.Gpu: {"gpu": lambda row: (row.gpu, row.uuid), "pid": lambda row: row.processes},
    sig.GpuClock: {"gpu": lambda row: (row.uuid,)},
    sig.PacketDrops: {"reason": lambda row: [each.reason for each in row.reasons]},
    sig.RdmaPort: {"interface": lambda row: (row.device, row.interface)},
}
