"""How often to sample, so that the samples of both directions and protocols together stay within a budget.

A rate is a number of zero bits (struct swerve_sample_settings): one more halves the samples. Pure; times are
nanoseconds that the caller passes in.
"""

from __future__ import annotations

from typing import Final

TCP_FLOOR: Final = 16  # 64 KiB: what a buffer holds at most, unless the device was told otherwise (BIG TCP)
TCP_CEILING, UDP_CEILING = 28, 28  # of TCP: far below half a turn of the sequence numbers
_MOST_FLOOR: Final = 20
_TCP_START, _UDP_START = 18, 6
_JUDGED_NS: Final = 1_000_000_000
_ROOM: Final = 0.7  # of the budget: a finer rate must fit into that, so that rates do not swing
_QUIET: Final = 3  # judgements in a row that a finer rate would fit into the budget, before it is tried
_BURST: Final = 20  # samples that a short look may see beyond the budget
_MULTIPLE: Final = 0.02  # share of buffers with several bytes to sample from which on the rate is too fine for them


def lost_of(lost: int, tcp: int, udp: int) -> int:
    """How many of the samples that were lost were of TCP: as large a part as of those that were recorded."""
    return lost * tcp // (tcp + udp) if tcp + udp else lost // 2


class RateControl:
    """The two rates, adapted to what was recorded: coarser at once, finer by one when it has been quiet for a while."""

    def __init__(self, per_s: int) -> None:
        self.tcp, self.udp = _TCP_START, _UDP_START  # the rates: zero bits of what is sampled, see above
        self._per_s = per_s
        self.floor = TCP_FLOOR  # the finest rate of TCP
        self._looked_ns = self._judged_ns = 0
        self._quiet = {"tcp": 0, "udp": 0}
        self._tcp = self._udp = self._multiple = 0  # recorded since the last judgement

    def start(self, now_ns: int) -> None:
        """Forget what was recorded before now."""
        self._looked_ns = self._judged_ns = now_ns
        self._tcp = self._udp = self._multiple = 0

    def observe(self, now_ns: int, tcp: int, udp: int, multiple: int) -> None:
        """Take in how many samples were recorded since the last call, and how many TCP buffers held several."""
        elapsed_s = max(now_ns - self._looked_ns, 1) / 1e9
        self._looked_ns = now_ns
        if tcp + udp > 2 * self._per_s * elapsed_s + _BURST:
            self._coarser(tcp / elapsed_s, udp / elapsed_s)
            self.start(now_ns)
            return
        self._tcp, self._udp, self._multiple = self._tcp + tcp, self._udp + udp, self._multiple + multiple
        if now_ns - self._judged_ns >= _JUDGED_NS:
            self._judge((now_ns - self._judged_ns) / 1e9)
            self.start(now_ns)

    def _judge(self, elapsed_s: float) -> None:
        if self._multiple > _MULTIPLE * self._tcp and self._tcp >= _BURST and self.tcp == self.floor < _MOST_FLOOR:
            self.floor += 1
            self.tcp += 1
            return
        tcp, udp = self._tcp / elapsed_s, self._udp / elapsed_s
        if tcp + udp > self._per_s:
            self._coarser(tcp, udp)
            return
        room = _ROOM * self._per_s
        for name, floor, recorded in sorted((("tcp", self.floor, tcp), ("udp", 0, udp)), key=lambda each: each[2]):
            if getattr(self, name) == floor or tcp + udp + recorded > room:
                self._quiet[name] = 0
                continue
            self._quiet[name] += 1
            if self._quiet[name] >= _QUIET:
                self._quiet[name] = 0
                setattr(self, name, getattr(self, name) - 1)
                room -= recorded

    def _coarser(self, tcp: float, udp: float) -> None:
        """Halve whichever is more, until what is left fits."""
        self._quiet = {"tcp": 0, "udp": 0}
        while tcp + udp > self._per_s:
            if tcp >= udp and self.tcp < TCP_CEILING:
                self.tcp, tcp = self.tcp + 1, tcp / 2
            elif self.udp < UDP_CEILING:
                self.udp, udp = self.udp + 1, udp / 2
            else:
                return
