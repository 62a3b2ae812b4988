"""What a driver's statistics mean: pause frames and their durations by priority, and signs of trouble.

Drivers name alike things differently; the tables below know the names of mlx5, bnxt, ice, i40e, ixgbe, cxgb4, ENA and
veth, and what many others have in common. A frame that starts a pause counts (XOFF), one that only ends it does not
(XON), where the driver tells them apart. Durations are microseconds.

`Statistics` reads them, in one thread and its own network namespace; the rest is pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytools.kernel.ethtool import Ethtool
from pytools.signals import Pause

Part = Literal["received", "sent", "received_duration_us", "sent_duration_us"]
Pauses = Mapping[int | None, Pause]

_DIRECTIONS: Mapping[str, Literal["received", "sent"]] = {"r": "received", "t": "sent"}
# Each has a group `way` (the first letter decides) and, when it is of one priority, a group `priority`.
_FRAMES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<way>[rt])x_prio(?P<priority>\d)_pause",  # mlx5, and others that took its names
        r"(?P<way>[rt])x_pfc_ena_frames_pri(?P<priority>\d)",  # bnxt
        r"(?P<way>[rt])x_priority_(?P<priority>\d)_xoff(\.nic)?",  # ice
        r"port\.(?P<way>[rt])x_priority_(?P<priority>\d)_xoff(_[rt]x)?",  # i40e
        r"(?P<way>[rt])x_pb_(?P<priority>\d)_pxoff",  # ixgbe
        r"(?P<way>[RT])xPPP(?P<priority>\d)Frames",  # cxgb4
        r"mac_(?P<way>[rt])x_pfc_pri(?P<priority>\d)_pkt_num",  # hns3
        r"(?P<way>[rt])x_pause_ctrl_phy",  # mlx5
        r"(?P<way>[rt])x_pause(_frames|_pkts)?",  # bnxt, and common
        r"(?P<way>[rt])x_global_pause",  # mlx5
        r"(?P<way>[RT])xPauseFrames",  # cxgb4
        r"(?P<way>[rt])x_flow_control_xoff",  # ixgbe, igb
        r"(port\.)?link_xoff_(?P<way>[rt])x(\.nic)?",  # ice, i40e
        r"mac_(?P<way>[rt])x_mac_pause_num",  # hns3
    )
)
_DURATIONS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<way>[rt])x_prio(?P<priority>\d)_pause_duration",  # mlx5
        r"pfc_pri(?P<priority>\d)_(?P<way>[rt])x_duration_us",  # bnxt
        r"(?P<way>[rt])x_global_pause_duration",  # mlx5
    )
)
# A driver that counted a pause storm itself.
_STORMS: Final = re.compile(r"[rt]x_pause_storm_\w+_events|pfc_wd_storms_detected_p\d")
# What tells of trouble when it is not zero: words that drivers use for it, wherever in the name, whatever the case.
_TROUBLE: Final = re.compile(
    r"drop|discard|err(or)?s?(?![a-z])|errors|errorframes|crc|fcs|symbol|jabber|fragment|runt|undersize|oversize|too_?long|truncat"
    r"|trunc(?![a-z])|miss(ed|es)|no_buf|no_dma|out_of_buf|oom|alloc_fail|overrun|underrun|fault|stall|lost|time_?out"
    r"|exceeded|link_down|thres|bad_|illegal|uncorrect|hang|stuck|unplug|high_temp|wd_expired|suspend|prio\d_marked",
    re.IGNORECASE,
)
# One ring's share of a total that the driver gives as well. Where there are only rings (veth, virtio), they stay.
_RING: Final = re.compile(r"(ch|rx|tx|rq|sq|cq|xsk|ptp_)\d+_|\[\d+\]:|queue_\d+_|[rt]x-\d+[.:]|[rt]x_xdp_")
_HELD_BIT_TIMES: Final = 65_535 * 512  # that one frame can pause for: its quanta, of 512 bit times each


@dataclass(frozen=True, slots=True)
class Meaning:
    """Where in a driver's list the statistics are that matter."""

    pauses: tuple[tuple[int, int | None, Part], ...]  # place, priority, part
    storms: tuple[int, ...]
    trouble: tuple[tuple[int, str], ...]

    def __bool__(self) -> bool:
        return bool(self.pauses or self.storms or self.trouble)


def meaning_of(names: Sequence[str]) -> Meaning:
    """What the statistics of these names tell; names that tell nothing are left out."""
    pauses, storms, trouble = [], [], []
    for place, name in enumerate(names):
        pause = _pause_of(name)
        if pause is not None:
            pauses.append((place, *pause))
        elif _STORMS.fullmatch(name):
            storms.append(place)
            trouble.append((place, name))
        elif _TROUBLE.search(name) and not _RING.match(name):
            trouble.append((place, name))
    return Meaning(tuple(pauses), tuple(storms), tuple(trouble))


def _pause_of(name: str) -> tuple[int | None, Part] | None:
    for patterns, durations in ((_FRAMES, False), (_DURATIONS, True)):
        for pattern in patterns:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            groups = match.groupdict()
            way = _DIRECTIONS[groups["way"].lower()]
            part: Part = way if not durations else f"{way}_duration_us"  # type: ignore[assignment]
            return (int(groups["priority"]) if groups.get("priority") else None), part
    return None


def pauses_of(meaning: Meaning, values: Sequence[int]) -> dict[int | None, Pause]:
    """Pause counts by priority (None: of the whole link); a link's two names for one thing count once."""
    parts: dict[int | None, dict[Part, int]] = {}
    for place, priority, part in meaning.pauses:
        found = parts.setdefault(priority, {})
        found[part] = max(found.get(part, 0), int(values[place]))
    return {priority: Pause(priority=priority, **found) for priority, found in parts.items()}


def trouble_of(meaning: Meaning, values: Sequence[int]) -> dict[str, int]:
    """The statistics that tell of trouble and are not zero, by the driver's names."""
    return {name: int(values[place]) for place, name in meaning.trouble if values[place]}


def storms_of(meaning: Meaning, values: Sequence[int]) -> int:
    """Pause storms that the driver counted itself."""
    return sum(int(values[place]) for place in meaning.storms)


def listed(pauses: Pauses) -> list[Pause]:
    """By priority, the whole link last."""
    return [pauses[key] for key in sorted(pauses, key=lambda each: (each is None, each or 0))]


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a window one direction of one priority was held by pause frames."""

    priority: int | None
    way: Literal["received", "sent"]
    share: float  # of the window
    frames: int
    exact: bool  # from durations; otherwise the most that so many frames can hold


def held(before: Pauses, now: Pauses, window_ns: int, speed_mbps: int | None) -> Iterable[Held]:
    """How long pauses held the link within a window, by priority and direction; only where frames or time passed."""
    for priority, pause in now.items():
        past = before.get(priority)
        if past is None or window_ns <= 0:
            continue
        for way in ("received", "sent"):
            frames = _grown(getattr(past, way), getattr(pause, way))
            duration_us = _grown(getattr(past, f"{way}_duration_us"), getattr(pause, f"{way}_duration_us"))
            if duration_us is not None:
                if duration_us:
                    yield Held(priority, way, duration_us * 1000 / window_ns, frames or 0, True)
            elif frames and speed_mbps:
                yield Held(priority, way, frames * _HELD_BIT_TIMES * 1000 / speed_mbps / window_ns, frames, False)


def _grown(before: int | None, now: int | None) -> int | None:
    """By how much a counter grew; from zero when it was set back."""
    if before is None or now is None:
        return None
    return now - before if now >= before else now


NOTHING: Final = Meaning((), (), ())


_NAMES_AGAIN_NS: Final = 60_000_000_000  # a driver may rename its statistics without having more of them


@dataclass(frozen=True, slots=True)
class _Names:
    count: int
    meaning: Meaning
    read_ns: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a driver counts, and what that means."""

    meaning: Meaning
    values: Sequence[int]
    speed_mbps: int | None


class Statistics:
    """Asks the drivers of interfaces for what matters."""

    def __init__(self, ethtool: Ethtool) -> None:
        self._ethtool = ethtool
        self._names: dict[int, _Names] = {}
        self.failed = 0  # readings that a driver refused although it has statistics

    def read(self, index: int, interface: str, now_ns: int) -> Reading:
        """One reading; a driver without statistics that matter is asked for the speed alone."""
        speed_mbps = self._ethtool.speed_mbps(interface)
        count = self._ethtool.count(interface)
        names = self._names.get(index)
        if names is None or names.count != count or now_ns - names.read_ns > _NAMES_AGAIN_NS:
            listed = self._ethtool.names(interface, count) if count else []
            if count and not listed:
                self.failed += 1
                return Reading(NOTHING, (), speed_mbps)
            meaning = meaning_of(listed)
            names = self._names[index] = _Names(count, meaning, now_ns)
        values = self._ethtool.values(interface, count) if names.meaning else None
        if values is None:
            self.failed += bool(names.meaning)
            return Reading(NOTHING, (), speed_mbps)
        return Reading(names.meaning, values.tolist(), speed_mbps)

    def forget(self, index: int) -> None:
        """The interface is gone, or watched no more."""
        self._names.pop(index, None)

    def close(self) -> None:
        self._ethtool.close()
