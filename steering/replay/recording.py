"""The lines of a recording as signals: what is not needed is skipped, what is broken is counted.

One line at a time: a recording may be larger than memory, or no recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from pytools.recording.reader import Read
from pytools.signals import AnySignal, decode
from steering.policy.model import Policy, signals_of

_LATEST_NS: Final = 1 << 62  # times beyond are none; sums of two still fit 64 bits


def kinds_of(policy: Policy) -> frozenset[str]:
    """The kinds of signals that a replay needs: a controller asks the kernel for the rest."""
    of_kernel = {"nexthop_group"} | ({"link"} if policy.bonds is not None else set())
    return signals_of(policy) | of_kernel | {"act"}


class _Head(msgspec.Struct):
    type: str
    host: str = ""


_head = msgspec.json.Decoder(_Head)


@dataclass(slots=True)
class Counts:
    lines: int = 0
    used: int = 0
    not_needed: int = 0  # of kinds that the policy does not look at
    other_hosts: dict[str, int] = field(default_factory=dict)
    broken: int = 0  # no signal of this schema
    first_broken: int = 0  # its number among the lines that were handed on; 0: it was not
    why_broken: str = ""
    schemas: set[int] = field(default_factory=set)


class Recording:
    """The signals of one host in a recording, in the order of its lines.

    Parameters
    ----------
    lines : iterable of bytes
        Is read once.
    told : Read
        What whoever takes the lines apart counts meanwhile.
    kinds : frozenset of str
        The signals that are needed, by their tags.
    host : str
        Whose signals; empty for the first host in it.
    """

    def __init__(self, lines: Iterable[bytes], told: Read, kinds: frozenset[str], host: str = "") -> None:
        self._lines, self._told, self._kinds, self.host = lines, told, kinds, host
        self.counts = Counts()

    def __iter__(self) -> Iterator[AnySignal]:
        counts = self.counts
        for line in self._lines:
            counts.lines += 1
            signal = self._signal(line)
            if signal is not None:
                counts.used += 1
                counts.schemas.add(signal.schema)
                yield signal
        counts.broken += self._told.broken
        if self._told.broken and not counts.why_broken:
            counts.why_broken = "too long for a line, or cannot be unpacked"

    def _signal(self, line: bytes) -> AnySignal | None:
        try:
            head = _head.decode(line)
            if head.type not in self._kinds:
                self.counts.not_needed += 1
                return None
            if head.host and self.host and head.host != self.host:
                others = self.counts.other_hosts
                if head.host in others or len(others) < 100:
                    others[head.host] = others.get(head.host, 0) + 1
                return None
            signal = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._break(str(error))
            return None
        if not (0 <= signal.at_ns < _LATEST_NS and 0 <= signal.unix_ns < _LATEST_NS):
            self._break("a time that is none")
            return None
        self.host = self.host or signal.host
        return signal

    def _break(self, why: str) -> None:
        self.counts.broken += 1
        if self.counts.broken == 1:
            self.counts.first_broken, self.counts.why_broken = self.counts.lines, why[:200]
