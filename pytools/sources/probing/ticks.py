"""What a tick sends: frames of probes, built in the memory that the pacer sends them from. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from pytools.config import Probe
from pytools.estimators.windows import occurrence
from pytools.sources.probing.frames import Frames
from pytools.sources.probing.paths import Session
from pytools.sources.probing.schedule import Group, Schedule
from pytools.sources.probing.sessions import EXTRA, FIRST, SECOND, SINGLE

LEAST_HALVED_NS: Final = 6_000_000  # an interval: in a shorter one there is no room for more ticks

Volley = Sequence[tuple[Session, int]]  # probes that leave at once, and the part that each has in a coded pair
Salvo = Sequence[tuple[Volley, int]]  # and how long after the one before each is to leave


class Messages(NamedTuple):
    """All probes of one family that leave in a tick, at each of several ticks."""

    frames: Frames
    groups: Sequence[Sequence[Group]]  # of each time, how the schedule knows what leaves at one moment
    within: slice  # which probes of their kind of ticks they are


class Kind:
    """Ticks of one kind: all that they send.

    Parameters
    ----------
    salvo : Salvo
        What each sends; the probes of one session in the order in which they leave.
    times : int
        Room for so many of them, in the memory of `schedule`.
    rows : int
        Sessions that there are.

    Attributes
    ----------
    turns : ndarray of int
        Which probe of its session in the tick each is, from 0.
    at : ndarray of int, shape (times, probes)
        Where in the flat arrays the probes of each time are.
    by_session : ndarray of int64
        How many each session sends in one.
    by_path : ndarray of int64, shape (2, paths)
        The same for each path, and how many of them count for silence, if only as extra ones.

    Raises
    ------
    UsageError
        If there is no room for it.
    """

    def __init__(self, salvo: Salvo, times: int, probe: Probe, schedule: Schedule, rows: int) -> None:
        self.messages, self.times = list[Messages](), times
        probes = list[tuple[Session, int]]()
        families = dict.fromkeys(session.pinned.family for volley, _ in salvo for session, _ in volley)
        for family in families if times else ():
            volleys = [([each for each in volley if each[0].pinned.family == family], after) for volley, after in salvo]
            begin, ends = len(probes), accumulate(len(volley) for volley, _ in volleys)
            probes += [each for volley, _ in volleys for each in volley]
            sessions = [each if part == SINGLE else replace(each, counts=False) for each, part in probes[begin:]]
            made = Frames(family, sessions, probe.port, probe.dscp, times, schedule)
            cuts = [
                (slice(end - len(volley), end), after)
                for end, (volley, after) in zip(ends, volleys, strict=True)
                if volley
            ]
            groups = [[schedule.group(headers[cut], after) for cut, after in cuts] for headers in made.headers]
            self.messages.append(Messages(made, groups, slice(begin, len(probes))))
        self.rows = np.array([session.row for session, _ in probes], np.intp)
        self.parts, self.paths = np.array([part for _, part in probes], np.uint8), self.rows // probe.flows
        self.turns = occurrence(self.rows)
        self.counts = ((self.parts == SINGLE) | (self.parts == EXTRA)) & (self.rows % probe.flows == 0)  # for silence
        self.at = np.zeros((times, len(self.rows)), np.intp)
        self.by_session = np.bincount(self.rows, minlength=rows)
        self.by_path = np.array(
            [np.bincount(paths, minlength=-(-rows // probe.flows)) for paths in (self.paths, self.paths[self.counts])]
        )
        self.wire_bytes = sum(made.frames.wire_bytes * made.frames.headers.shape[1] for made in self.messages)


def halves(sessions: Sequence[Session], interval_ns: int) -> list[Sequence[Session]]:
    """The sessions that begin an interval, and those that are probed in its middle: all of a peer at once."""
    peers = sorted({each.pinned.path.destination for each in sessions})
    if len(peers) == 1 or interval_ns < LEAST_HALVED_NS:
        return [sessions]
    return [[each for each in sessions if each.pinned.path.destination in half] for half in (peers[::2], peers[1::2])]


def one_each(sessions: Sequence[Session], part: int = SINGLE) -> Salvo:
    return (([(each, part) for each in sessions], 0),)


def with_pairs(sessions: Sequence[Session], spacing_ns: int) -> Salvo:
    """A coded pair for the first session of each path whose peer has its own clock, one probe for all others."""
    paired = [each for each in sessions if _is_paired(each)]
    if spacing_ns and paired:
        single, first, second = (
            [(each, part) for each in chosen]
            for chosen, part in ((sessions, SINGLE), (paired, FIRST), (paired, SECOND))
        )
        return (single, 0), (first, 0), (second, spacing_ns)
    parts = [(each, part) for each in sessions for part in ((SINGLE, FIRST, SECOND) if _is_paired(each) else (SINGLE,))]
    return ((parts, 0),)


def _is_paired(session: Session) -> bool:
    return session.counts and not session.pinned.shared_clock
