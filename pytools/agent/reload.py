"""Reload of the configuration: which changes a running agent applies, and which need a restart.

Changes of peers, and of keys that belong to one source, are applied live: that source is restarted, all others go on.
Every other changed key is named and ignored. Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import selectors
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from pytools.config import AgentConfig, Peer
from pytools.sources.source import Source

# Field of the configuration -> the part that is restarted for it.
LIVE: Final[Mapping[str, str]] = {
    "recording.hours": "recording",
    "recording.fine_mib": "recording",
    "recording.coarse_mib": "recording",
    "recording.directory": "recording",
    "gpu.enabled": "gpu",
    "gpu.clock": "gpu",
    "links.interval_ms": "links",
    "links.flap_window_s": "links",
    "peers": "peers",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a new configuration."""

    config: AgentConfig  # what holds from now on: the old one, where it cannot change live
    parts: tuple[str, ...]  # that are restarted
    changed: tuple[str, ...]  # fields that are taken up
    waiting: Mapping[str, str]  # fields that are not, and why
    _both: tuple[AgentConfig, AgentConfig]

    def taken(self, failed: Mapping[str, str]) -> list[str]:
        """The fields that are applied, when these parts could not be restarted."""
        return [name for name in self.changed if LIVE[name] not in failed]

    def holds(self, failed: Mapping[str, str]) -> AgentConfig:
        return _merged(*self._both, self.taken(failed))


def plan(old: AgentConfig, new: AgentConfig) -> Plan:
    """Tell what can change live from what cannot."""
    differing = [name for name, value in _fields(new).items() if _fields(old)[name] != value]
    waiting = {name: "it is read at the start alone" for name in differing if name not in LIVE}
    if "peers" in differing and (why := _why_not(old, new.peers)):
        waiting["peers"] = why
    changed = [name for name in differing if name not in waiting]
    parts = tuple(dict.fromkeys(LIVE[name] for name in changed))
    return Plan(_merged(old, new, changed), parts, tuple(changed), waiting, (old, new))


def _why_not(before: AgentConfig, after: Sequence[Peer]) -> str:
    """Why a running agent cannot take these peers; empty when it can."""
    had, has = (any(peer.clock != "shared" for peer in peers) for peers in (before.peers, after))
    if has and not had:
        return "the first peer with a clock of its own: clocks are not compared yet"
    if before.bus.key_file:
        return "the bus between hosts is opened for the peers that it began with"
    return ""


def _fields(config: AgentConfig) -> dict[str, Any]:
    """By dotted name; peers as one, in whatever order."""
    found: dict[str, Any] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, msgspec.Struct):
            found |= {f"{name}.{inner}": getattr(value, inner) for inner in value.__struct_fields__}
        else:
            found[name] = value
    return found | {"peers": {peer.address: peer for peer in config.peers}}


def _merged(old: AgentConfig, new: AgentConfig, changed: Sequence[str]) -> AgentConfig:
    """The old one with these fields of the new."""
    merged = old
    for name in changed:
        section, _, inner = name.partition(".")
        value = getattr(new, section)
        if inner:
            value = msgspec.structs.replace(getattr(merged, section), **{inner: getattr(value, inner)})
        merged = msgspec.structs.replace(merged, **{section: value})
    return merged


_NEVER_NS: Final = 1 << 62
_S = TypeVar("_S", bound=Source)


class Slot(Generic[_S]):
    """A source that may be restarted while the others go on; its drop counters include those before.

    Parameters
    ----------
    make : callable
        Makes the source for a configuration; None where it wants none.
    """

    def __init__(self, make: Callable[[AgentConfig], _S | None], config: AgentConfig) -> None:
        self._make, self._config = make, config
        self._selector: selectors.BaseSelector | None = None
        self._files: set[Any] = set()
        self._lost: Counter[str] = Counter()  # by those before
        self.source = make(config)  # the one that works now; None where none is wanted

    def register(self, selector: selectors.BaseSelector) -> None:
        """Keep the selector for those to come."""
        self._selector = selector
        before = set(selector.get_map())
        if self.source is not None:
            self.source.register(selector)
        self._files = set(selector.get_map()) - before

    def tick(self, now_ns: int) -> int:
        return now_ns + _NEVER_NS if self.source is None else self.source.tick(now_ns)

    def drops(self) -> dict[str, int]:
        """Of this source and of those before it."""
        now = self.source.drops() if self.source is not None else {}
        return {name: self._lost[name] + now.get(name, 0) for name in self._lost.keys() | now.keys()}

    def renew(self, config: AgentConfig) -> None:
        """Make the source for another configuration; if that fails, for the one before.

        Raises
        ------
        SwerveError
            If it failed.
        """
        self._end()
        try:
            self.source = self._make(config)
            self._config = config
        except BaseException:
            self.source = self._make(self._config)
            raise
        finally:
            if self._selector is not None:
                self.register(self._selector)

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self.source is None:
            return
        source, self.source = self.source, None
        if self._selector is not None:
            for file in self._files & set(self._selector.get_map()):
                self._selector.unregister(file)
        self._files = set()
        source.close()
        self._lost.update(source.drops())
