"""What a tick sends: frames of probes, built in the memory that the pacer sends them from. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from pytools.config import Clocks, Probe
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import occurrence
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing.frames import Frames, Lane
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.schedule import Group, Schedule
from pytools.sources.probing.sessions import EXTRA, FIRST, SECOND, SINGLE

LEAST_HALVED_NS: Final = 6_000_000  # an interval: in a shorter one there is no room for more ticks

Session = tuple[int, PinnedPath]  # its row, and its path
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
    probes : sequence of (int, int)
        Row and part (SINGLE, FIRST, SECOND or EXTRA) of each; those of one session in the order in which they leave.

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
    """

    def __init__(
        self, messages: Sequence[Messages], probes: Sequence[tuple[int, int]], times: int, sessions: int, flows: int
    ) -> None:
        self.messages, self.times = messages, times
        self.rows, parts = np.array(probes, np.intp).reshape(-1, 2).T
        self.parts, self.paths, self.turns = parts.astype(np.uint8), self.rows // flows, occurrence(self.rows)
        self.counts = ((parts == SINGLE) | (parts == EXTRA)) & (self.rows % flows == 0)  # for silence
        self.at = np.zeros((times, len(self.rows)), np.intp)
        self.by_session = np.bincount(self.rows, minlength=sessions)
        self.by_path = np.array(
            [np.bincount(paths, minlength=sessions // flows) for paths in (self.paths, self.paths[self.counts])]
        )
        self.wire_bytes = sum(made.frames.wire_bytes * made.frames.headers.shape[1] for made in messages)


def halves(sessions: Sequence[Session], interval_ns: int) -> list[Sequence[Session]]:
    """The sessions that begin an interval, and those that are probed in its middle: all of a peer at once."""
    peers = sorted({pinned.path.destination for _, pinned in sessions})
    if len(peers) == 1 or interval_ns < LEAST_HALVED_NS:
        return [sessions]
    return [[each for each in sessions if each[1].path.destination in half] for half in (peers[::2], peers[1::2])]


def one_each(sessions: Sequence[Session], part: int = SINGLE) -> Salvo:
    """One probe for each session."""
    return (([(each, part) for each in sessions], 0),)


class TickLayout:
    """Puts ticks together.

    Parameters
    ----------
    clocks : Clocks, optional
        How coded pairs are sent; None when no peer has a clock of its own.
    """

    def __init__(self, probe: Probe, clocks: Clocks | None, schedule: Schedule) -> None:
        self._probe, self._schedule = probe, schedule
        self._spacing_ns = 0 if clocks is None else int(clocks.spacing_us * 1000)

    def with_pairs(self, sessions: Sequence[Session]) -> Salvo:
        """A coded pair for the first session of each path whose peer has its own clock, one probe for all others."""
        paired = [each for each in sessions if self._is_paired(each)]
        if self._spacing_ns and paired:
            single, first, second = (
                [(each, part) for each in chosen]
                for chosen, part in ((sessions, SINGLE), (paired, FIRST), (paired, SECOND))
            )
            return (single, 0), (first, 0), (second, self._spacing_ns)
        parts = [
            (each, part)
            for each in sessions
            for part in ((SINGLE, FIRST, SECOND) if self._is_paired(each) else (SINGLE,))
        ]
        return ((parts, 0),)

    def _is_paired(self, session: Session) -> bool:
        row, pinned = session
        return pinned.peer.clock != "shared" and row % self._probe.flows == 0

    def kind(self, salvo: Salvo, times: int, sessions: int, ports: Sequence[int]) -> Kind:
        """Ticks that send this, with room for so many of them; `sessions` are all that there are.

        Parameters
        ----------
        ports : sequence of int
            The source ports, by flow.

        Raises
        ------
        UsageError
            If there is no room for it.
        """
        messages, parts = list[Messages](), list[tuple[int, int]]()
        families = dict.fromkeys(pinned.family for volley, _ in salvo for (_, pinned), _ in volley)
        for family in families if times else ():
            volleys = [([each for each in volley if each[0][1].family == family], after) for volley, after in salvo]
            probes = [probe for volley, _ in volleys for probe in volley]
            lanes = [self._lane(session, part, ports) for session, part in probes]
            made = Frames(family, lanes, self._probe.port, self._probe.dscp, times, self._schedule)
            ends = accumulate(len(volley) for volley, _ in volleys)
            cuts = [
                (slice(end - len(volley), end), after)
                for end, (volley, after) in zip(ends, volleys, strict=True)
                if volley
            ]
            groups = [[self._schedule.group(headers[cut], after) for cut, after in cuts] for headers in made.headers]
            messages.append(Messages(made, groups, slice(len(parts), len(parts) + len(lanes))))
            parts += [(row, part) for (row, _), part in probes]
        return Kind(messages, parts, times, sessions, self._probe.flows)

    def _lane(self, session: Session, part: int, ports: Sequence[int]) -> Lane:
        row, pinned = session
        flow = row % self._probe.flows
        return Lane(
            session=row,
            path=pinned.index,
            ifindex=pinned.ifindex,
            source=pinned.source,
            destination=pinned.path.address,
            source_port=ports[flow],
            error_estimate=wire.error_estimate(STAMP_BOUND_NS, pinned.peer.clock == "shared"),
            counts=part == SINGLE and flow == 0,  # one an interval: three lost at once are no silence
        )
