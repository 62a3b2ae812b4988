"""The Session-Sender: sends the probes of every path, and joins replies with the kernel's stamps into delays.

A session is one path and one source port. Its row in the arrays is `path index * flows + flow`, its SSID the row
plus one. What is known of a probe lies in the row's slot `sequence number mod slots`. Times are CLOCK_MONOTONIC
nanoseconds. One thread.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Probe
from pytools.errors import UsageError
from pytools.estimators.delays import STAMP_BOUND_NS, difference, total
from pytools.estimators.windows import MISSING, Times, how_many, occurrence, power_of_two
from pytools.sources import stamp_packet as wire
from pytools.sources import udp
from pytools.sources.measurements import (
    DUPLICATES,
    FORWARD,
    LOST,
    RECEIVED,
    REORDERED,
    REVERSE,
    ROUND_TRIP,
    SENT,
    Measurements,
)
from pytools.sources.paths import PinnedPath
from pytools.sources.stamps import REPLY_INGRESS, REQUEST_EGRESS, of_kinds

PRECISE_NS: Final = 100_000  # a Receive Timestamp that its writer calls worse than this was not taken in the kernel

_FREE, _OUTSTANDING, _ANSWERED, _TIMED_OUT, _LATE = range(5)
# Sequence numbers of different sessions start this far apart, so that a reflector that knows no SSID (it sends back
# zero) still says with the sequence number which session it answers.
_SEQ_STRIDE: Final = 1 << 20
_SEQ_WRAP: Final = 1 << 32
_MOST_SLOTS: Final = 65_536
_REPLY_ROOM: Final = 128
_BATCH: Final = 256


_Found = tuple[int, NDArray[np.intp], Times, Times]  # kind, paths, delays, when seen


@dataclass(frozen=True)
class _Volley:
    """Sessions whose probes leave in one system call: same family, same source port, same moment."""

    rows: NDArray[np.intp]
    ssids: NDArray[np.int64]
    errors: NDArray[np.int64]
    sock: socket.socket
    datagrams: udp.Datagrams
    packets: NDArray[Any]
    everything: NDArray[np.intp]


class _Replies:
    """Replies of known sessions, one element each."""

    def __init__(
        self,
        rows: NDArray[np.intp],
        slots: NDArray[np.int64],
        payload: NDArray[np.uint8],
        lengths: NDArray[np.int64],
    ) -> None:
        self.rows, self.slots, self.lengths = rows, slots, lengths
        self._payload = payload  # picking rows of bytes is much cheaper than picking structured records
        self.packets = wire.replies(payload)

    def of(self, chosen: NDArray[np.bool_]) -> _Replies:
        """Some of them."""
        if chosen.all():
            return self
        return _Replies(self.rows[chosen], self.slots[chosen], self._payload[chosen], self.lengths[chosen])


class Sender:
    """All sessions of this host.

    Parameters
    ----------
    groups : int
        Into how many groups the sessions are dealt, so that probes do not leave in one burst.

    Raises
    ------
    UsageError
        If more probes could be under way than there is room for.
    SwerveError
        If no socket can be had.
    """

    def __init__(self, probe: Probe, families: Sequence[udp.Family], groups: int, measurements: Measurements) -> None:
        self._probe, self._groups, self._measurements = probe, groups, measurements
        self._timeout_ns = int(probe.timeout_ms * 1e6)
        self._slots = max(64, power_of_two((probe.timeout_ms + 1000) / probe.interval_ms + 8))
        if self._slots > _MOST_SLOTS:
            raise UsageError(
                f"with a timeout of {probe.timeout_ms:g} ms and an interval of {probe.interval_ms:g} ms too many "
                "probes are under way",
                "shorten probe.timeout_ms or probe less often",
            )
        self.drops = dict.fromkeys(
            (
                "malformed_replies",
                "foreign_replies",
                "stray_replies",
                "late_replies",
                "imprecise_replies",
                "unstamped_probes",
                "stray_stamps",
                "send_refused",
                "send_buffer_full",
            ),
            0,
        )
        self.wire_bytes = 0  # of requests sent and replies taken, headers included
        self._sockets: dict[tuple[udp.Family, int], socket.socket] = {}
        self._arrivals: dict[tuple[udp.Family, int], udp.Datagrams] = {}
        try:
            for family in families:
                for flow in range(probe.flows):
                    self._sockets[family, flow] = udp.open_socket(family, 0, probe.dscp)
                    self._arrivals[family, flow] = udp.Datagrams(family, _BATCH, _REPLY_ROOM)
        except BaseException:
            self.close()
            raise
        self._volleys: list[list[_Volley]] = [[] for _ in range(groups)]
        self._waiting: list[tuple[int, udp.Datagrams, int]] = []
        self._allocate(0)
        self._grow(64)

    # ---- sessions ----

    def _allocate(self, rows: int) -> None:
        """The arrays, [row] and [row, slot], for no session yet."""
        self._next_seq = np.zeros(rows, np.int64)
        self._highest = np.full(rows, -1, np.int64)  # sequence number answered so far
        self._answered_ns = np.zeros(rows, np.int64)  # when the latest probe that was answered had been sent
        self._peer = np.full(rows, -1, np.intp)  # sessions with the same address have the same number
        self._told = np.zeros(rows, np.int64)  # raw results were given out up to here
        self._remotes = np.zeros((rows, 2), np.uint64)  # zero: no session
        grid = (rows, self._slots)
        self._state = np.full(grid, _FREE, np.uint8)
        self._seq = np.full(grid, -1, np.int64)
        self._sent_ns = np.zeros(grid, np.int64)
        # Exact egress of the request, exact ingress of the reply; one array, and each of them by name.
        self._times = np.full((2, *grid), MISSING, np.int64)
        self._left, self._back = self._times
        self._forward = np.full(grid, MISSING, np.int64)
        self._reverse = np.full(grid, MISSING, np.int64)
        # By the reflector's sequence number: which of ours it answered.
        self._reflected_seq = np.full(grid, -1, np.int64)
        self._reflected_slot = np.zeros(grid, np.int64)

    def _grow(self, rows: int) -> None:
        """Have at least this many rows; doubles, so that it is rare."""
        have = len(self._next_seq)
        if rows <= have:
            return
        old = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        self._allocate(max(rows, 2 * have))
        self._next_seq[:] = np.arange(len(self._next_seq)) % 4096 * _SEQ_STRIDE
        for name, value in old.items():
            vars(self)[name][(slice(None), slice(have)) if value.ndim == 3 else slice(have)] = value

    def set_paths(self, paths: Sequence[PinnedPath]) -> None:
        """Probe these paths from now on."""
        flows = self._probe.flows
        self._grow((max((pinned.index for pinned in paths), default=-1) + 1) * flows)
        dealt: dict[tuple[int, udp.Family, int], list[tuple[int, PinnedPath]]] = {}
        for pinned in paths:
            for flow in range(flows):
                row = pinned.index * flows + flow
                self._remotes[row] = udp.mapped(pinned.path.address).view(np.uint64)
                dealt.setdefault((row % self._groups, pinned.family, flow), []).append((row, pinned))
        numbers = {address: number for number, address in enumerate(sorted({p.path.address for p in paths}))}
        self._peer[:] = -1
        for pinned in paths:
            self._peer[pinned.index * flows : (pinned.index + 1) * flows] = numbers[pinned.path.address]
        self._volleys = [[] for _ in range(self._groups)]
        for (group, family, flow), sessions in dealt.items():
            self._volleys[group].append(self._volley(family, flow, sessions))

    def _volley(self, family: udp.Family, flow: int, sessions: list[tuple[int, PinnedPath]]) -> _Volley:
        """Everything about these sessions' requests that stays the same."""
        datagrams = udp.Datagrams(family, len(sessions), wire.PROBE_BYTES)
        own_width = slice(12, 16) if family == 4 else slice(0, 16)
        rows = np.array([row for row, _ in sessions], np.intp)
        remotes = np.array([udp.mapped(pinned.path.address) for _, pinned in sessions])
        sources = np.array([udp.mapped(pinned.source) for _, pinned in sessions])
        datagrams.names["address"] = remotes[:, own_width]
        datagrams.names["port"] = self._probe.port
        datagrams.depart(slice(None), [pinned.mark for _, pinned in sessions], sources[:, own_width])
        packets = wire.requests(datagrams.payload)
        wire.prepare_requests(packets)
        shared = [pinned.peer.clock == "shared" for _, pinned in sessions]
        errors = np.array([wire.error_estimate(STAMP_BOUND_NS, each) for each in shared])
        everything = np.arange(len(sessions))
        return _Volley(rows, rows + 1, errors, self._sockets[family, flow], datagrams, packets, everything)

    # ---- sending ----

    def send(self, group: int, now_ns: int) -> None:
        """Send one probe for each session of a group."""
        for volley in self._volleys[group]:
            rows = volley.rows
            seq = self._next_seq[rows]
            slots = seq & (self._slots - 1)
            overwritten = self._state[rows, slots] == _OUTSTANDING  # only after a long pause of the agent
            self._measurements.count(LOST, rows[overwritten] // self._probe.flows)
            self._next_seq[rows] = seq + 1
            self._seq[rows, slots] = seq
            self._sent_ns[rows, slots] = now_ns
            self._state[rows, slots] = _OUTSTANDING
            for known in (self._left, self._back, self._forward, self._reverse):
                known[rows, slots] = MISSING
            wire.write_requests(volley.packets, seq & (_SEQ_WRAP - 1), volley.ssids, now_ns, volley.errors)
            refused = volley.datagrams.send(volley.sock, volley.everything)
            sent = np.ones(len(rows), np.bool_)
            for place, code in refused.items():
                row, slot = rows[place], slots[place]
                if code in (errno.EAGAIN, errno.ENOBUFS):  # our own fault, not the path's
                    sent[place] = False
                    self._state[row, slot] = _FREE
                    self.drops["send_buffer_full"] += 1
                else:  # no way there any more: as lost as if the network had dropped it, and known at once
                    self._state[row, slot] = _TIMED_OUT
                    self.drops["send_refused"] += 1
                    self._measurements.count(LOST, rows[place : place + 1] // self._probe.flows)
            self._measurements.count(SENT, rows[sent] // self._probe.flows)
            header = udp.HEADER_BYTES[volley.datagrams.family]
            self.wire_bytes += how_many(sent) * (wire.PROBE_BYTES + header)

    # ---- receiving ----

    def receive(self) -> None:
        """Take replies from the sockets; `join` works on them once the stamps have been read."""
        self._waiting = []
        for (family, flow), sock in self._sockets.items():
            datagrams = self._arrivals[family, flow]
            count = datagrams.receive(sock)
            if count:
                self._waiting.append((flow, datagrams, count))

    def take_stamps(self, records: NDArray[Any]) -> None:
        """Note when requests left and replies came in, exactly."""
        stamps = of_kinds(records, REQUEST_EGRESS, REPLY_INGRESS)
        rows, slots, known = self._sessions(stamps.ssid, stamps.remote, stamps.seq, None)
        self.drops["stray_stamps"] += len(known) - how_many(known)
        known &= self._times[stamps.kind, rows, slots] == MISSING
        chosen = np.flatnonzero(known)[::-1]  # backwards, so that of a duplicated packet the first stamp stays
        self._times[stamps.kind[chosen], rows[chosen], slots[chosen]] = stamps.at_ns[chosen]

    def _sessions(
        self, ssids: NDArray[np.int64], remotes: NDArray[np.uint64], seq: NDArray[np.int64], flow: int | None
    ) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.bool_]]:
        """Row and slot of each packet, and whether it belongs to a probe that we remember."""
        rows = ssids - 1
        without = ssids == 0
        if without.any():
            rows[without] = self._rows_by_sequence(remotes[without], seq[without])
        known = (rows >= 0) & (rows < len(self._next_seq))
        rows = np.where(known, rows, 0)
        slots = seq & (self._slots - 1)
        known &= (self._seq[rows, slots] & (_SEQ_WRAP - 1)) == seq
        known &= self._state[rows, slots] != _FREE
        known &= _same(self._remotes[rows], remotes)
        if flow is not None:
            known &= rows % self._probe.flows == flow
        return rows, slots, known

    def _rows_by_sequence(self, remotes: NDArray[np.uint64], seq: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sessions of packets without SSID: the one with this peer that is near this number; -1 if not just one."""
        behind = (self._next_seq[None, :] - 1 - seq[:, None]) & (_SEQ_WRAP - 1)
        fits = (behind < self._slots) & (self._remotes[None, :, :] == remotes[:, None, :]).all(axis=2)
        return np.where(fits.sum(axis=1) == 1, fits.argmax(axis=1), -1)

    def join(self) -> None:
        """Turn the replies that `receive` took into counts and delays."""
        for flow, datagrams, count in self._waiting:
            packets = wire.replies(datagrams.payload)[:count]
            lengths = datagrams.received_lengths(count)
            self.wire_bytes += int(lengths.sum()) + count * udp.HEADER_BYTES[datagrams.family]
            whole = datagrams.received_whole(count) & (lengths >= wire.BASE_BYTES)
            whole &= (packets["error"] & 0xFF) != 0  # RFC 4656, section 4.1.2: corrupt
            of_peer = datagrams.ports(count) == self._probe.port
            self.drops["malformed_replies"] += count - how_many(whole)
            self.drops["foreign_replies"] += how_many(whole & ~of_peer)
            seq = packets["sender_seq"].astype(np.int64)
            remotes = np.ascontiguousarray(datagrams.sources(count)).view(np.uint64).reshape(-1, 2)
            rows, slots, known = self._sessions(packets["ssid"].astype(np.int64), remotes, seq, flow)
            known &= whole & of_peer
            self.drops["stray_replies"] += how_many(whole & of_peer & ~known)
            payload = datagrams.payload[:count, : wire.PROBE_BYTES][known]
            self._take(_Replies(rows[known], slots[known], payload, lengths[known]))
        self._waiting = []

    def _take(self, replies: _Replies) -> None:
        """Settle the fate of the probes answered, then measure those answered in time for the first time."""
        if not len(replies.rows):
            return
        rows, slots = replies.rows, replies.slots
        state = self._state[rows, slots]
        first = occurrence(rows * self._slots + slots) == 0
        fresh = first & (state == _OUTSTANDING)
        late = first & (state == _TIMED_OUT)
        self._state[rows[late], slots[late]] = _LATE
        self._state[rows[fresh], slots[fresh]] = _ANSWERED
        np.maximum.at(self._answered_ns, rows[fresh], self._sent_ns[rows[fresh], slots[fresh]])
        self.drops["late_replies"] += how_many(late)
        paths = rows // self._probe.flows
        self._measurements.count(DUPLICATES, paths[~fresh & ~late])
        self._measurements.count(RECEIVED, paths[fresh])
        in_time = replies.of(fresh)
        self._measurements.count(REORDERED, in_time.rows[self._reordered(in_time)] // self._probe.flows)
        self._measure(in_time)

    def _reordered(self, replies: _Replies) -> NDArray[np.bool_]:
        """Which replies came after the reply to a later probe of their session."""
        rows, seq = replies.rows, self._seq[replies.rows, replies.slots]
        behind = seq < self._highest[rows]
        if len(rows) > 1:
            order = np.argsort(rows, kind="stable")
            ranked = (rows[order] << 44) + seq[order]  # rows ascend, so only the same row can be ahead
            behind[order[1:]] |= ranked[1:] < np.maximum.accumulate(ranked)[:-1]
        np.maximum.at(self._highest, rows, seq)
        return behind

    def _measure(self, replies: _Replies) -> None:
        rows, slots, packets = replies.rows, replies.slots, replies.packets
        if not len(rows):
            return
        left, back = self._left[rows, slots], self._back[rows, slots]
        stamped = (left != MISSING) & (back != MISSING)
        self.drops["unstamped_probes"] += len(rows) - how_many(stamped)
        understood = (replies.lengths >= wire.PROBE_BYTES) & (packets["tlv_type"] == wire.FOLLOW_UP)
        understood &= (packets["tlv_flags"] & (wire.UNRECOGNISED | wire.MALFORMED)) == 0
        precise = wire.error_bound_ns(packets["error"]) <= PRECISE_NS
        self.drops["imprecise_replies"] += how_many(understood & ~precise)
        received = wire.join_ns(packets["receive_seconds"], packets["receive_fraction"], packets["error"])
        forward = np.where(stamped & (precise | ~understood), difference(received, left), MISSING)
        self._forward[rows, slots] = forward
        paths = rows // self._probe.flows
        self._measurements.foreign[paths] = ~understood
        found = [(FORWARD, paths, forward, back)]
        if understood.all():
            found += self._follow_up(replies)
        else:
            found += self._follow_up(replies.of(understood)) + self._foreign(replies.of(~understood))
        kinds, of_paths, values, seen = zip(*found, strict=True)
        of_kind = np.repeat(kinds, [len(each) for each in of_paths])
        self._measurements.add(of_kind, *(np.concatenate(each) for each in (of_paths, values, seen)))

    def _foreign(self, replies: _Replies) -> list[_Found]:
        """Reflectors that do not follow up: their own word for when a reply left, taken in user space."""
        rows, slots, packets = replies.rows, replies.slots, replies.packets
        left, back = self._left[rows, slots], self._back[rows, slots]
        sent = wire.join_ns(packets["seconds"], packets["fraction"], packets["error"])
        reverse = np.where(left != MISSING, difference(back, sent), MISSING)
        self._reverse[rows, slots] = reverse
        both, paths = total(self._forward[rows, slots], reverse), rows // self._probe.flows
        return [(REVERSE, paths, reverse, back), (ROUND_TRIP, paths, both, back)]

    def _follow_up(self, replies: _Replies) -> list[_Found]:
        """The reverse delay of earlier probes: these replies say exactly when the earlier replies left."""
        rows, packets = replies.rows, replies.packets
        mask = self._slots - 1
        reflected = packets["seq"].astype(np.int64)
        self._reflected_seq[rows, reflected & mask] = reflected
        self._reflected_slot[rows, reflected & mask] = replies.slots
        earlier = packets["follow_up_seq"].astype(np.int64)
        left = wire.join_ns(packets["follow_up_seconds"], packets["follow_up_fraction"], packets["error"])
        slots = self._reflected_slot[rows, earlier & mask]
        wanted = (left != MISSING) & (self._reflected_seq[rows, earlier & mask] == earlier)
        wanted &= (self._state[rows, slots] == _ANSWERED) & (self._reverse[rows, slots] == MISSING)
        rows, slots, left = rows[wanted], slots[wanted], left[wanted]
        back, seen = self._back[rows, slots], self._back[rows, replies.slots[wanted]]
        reverse = difference(back, left)
        self._reverse[rows, slots] = reverse
        both, paths = total(self._forward[rows, slots], reverse), rows // self._probe.flows
        seen = np.where(seen == MISSING, back, seen)
        return [(REVERSE, paths, reverse, seen), (ROUND_TRIP, paths, both, seen)]

    # ---- time passing ----

    def expire(self, now_ns: int) -> None:
        """Count probes as lost that were not answered within the timeout."""
        overdue = (self._state == _OUTSTANDING) & (self._sent_ns < now_ns - self._timeout_ns)
        if overdue.any():
            self._state[overdue] = _TIMED_OUT
            self._measurements.count(LOST, np.nonzero(overdue)[0] // self._probe.flows)

    def overtaken(self, since_ns: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Probes sent since then, unanswered although a later one to the same peer by another path is answered.

        Such a probe has been delayed, both ways together, by at least the time between the two sends more than the
        other; and that neither we nor the peer are asleep, the other shows.

        Returns
        -------
        paths : ndarray of int, shape (n,)
            Path index of each.
        leads_ns : ndarray of int64, shape (n,)
            How much later the latest that was answered had been sent.
        """
        other = latest_of_others(self._answered_ns, self._peer, self._probe.flows)
        leads = other[:, None] - self._sent_ns
        chosen = (self._state == _OUTSTANDING) & (self._sent_ns >= since_ns) & (leads > 0)
        rows, slots = np.nonzero(chosen)
        return rows // self._probe.flows, leads[rows, slots]

    def results(self, now_ns: int) -> list[tuple[int, list[tuple[int, int, int | None, int | None]]]]:
        """Raw results since the last call: per session its path index, and (seq, sent, forward, reverse) per probe.

        A probe is given out once nothing more is to be learnt about it.
        """
        patience_ns = int(3 * self._probe.interval_ms * 1e6) + 50_000_000  # for the follow-up of a reply
        told = []
        for row in range(len(self._next_seq)):
            entries = self._results_of(row, now_ns - patience_ns)
            if entries:
                told.append((row // self._probe.flows, entries))
        return told

    def _results_of(self, row: int, hopeless_ns: int) -> list[tuple[int, int, int | None, int | None]]:
        entries: list[tuple[int, int, int | None, int | None]] = []
        next_seq = int(self._next_seq[row])
        for seq in range(max(int(self._told[row]), next_seq - self._slots), next_seq):
            slot = seq & (self._slots - 1)
            state = self._state[row, slot]
            forward, reverse = _value(self._forward[row, slot]), _value(self._reverse[row, slot])
            waits = state == _ANSWERED and reverse is None and self._sent_ns[row, slot] > hopeless_ns
            if state == _OUTSTANDING or waits:
                break
            self._told[row] = seq + 1
            if self._seq[row, slot] == seq and state != _FREE:
                # Without a stamp, the time of the call; no delay of ours rests on it.
                sent_ns = _value(self._left[row, slot]) or int(self._sent_ns[row, slot])
                entries.append((seq & (_SEQ_WRAP - 1), sent_ns, forward, reverse))
        return entries

    def skip_results(self) -> None:
        """Let `results` begin with the probes sent from now on."""
        self._told[:] = self._next_seq

    def socket_drops(self) -> int:
        """Replies that the kernel dropped because nobody read the socket in time."""
        return sum(udp.dropped(sock) for sock in self._sockets.values())

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def latest_of_others(times_ns: NDArray[np.int64], peers: NDArray[np.intp], flows: int) -> NDArray[np.int64]:
    """For each session the largest time among sessions with the same peer over other paths; 0 where there is none.

    Parameters
    ----------
    times_ns : ndarray of int64, shape (sessions,)
        Above 0 where there is one.
    peers : ndarray of int, shape (sessions,)
        Which peer a session is with, -1 for none.
    flows : int
        Sessions per path; those of one path follow each other.
    """
    paths = np.arange(len(times_ns)) // flows
    best, best_path = np.zeros((2, int(peers.max(initial=-1)) + 2), np.int64)  # the last place is that of no peer
    np.maximum.at(best, peers, times_ns)
    of_best = times_ns == best[peers]
    best_path[peers[of_best]] = paths[of_best]
    elsewhere = paths != best_path[peers]
    second = np.zeros_like(best)
    np.maximum.at(second, peers[elsewhere], times_ns[elsewhere])
    found: NDArray[np.int64] = np.where(peers < 0, 0, np.where(elsewhere, best[peers], second[peers]))
    return found


def _same(one: NDArray[np.uint64], other: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Row by row, whether two lists of addresses agree."""
    equal: NDArray[np.bool_] = (one[:, 0] == other[:, 0]) & (one[:, 1] == other[:, 1])
    return equal


def _value(time_ns: Any) -> int | None:
    return None if time_ns == MISSING else int(time_ns)
