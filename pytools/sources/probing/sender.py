"""The Session-Sender: sends the probes of every path, and joins replies with the kernel's stamps into delays.

The arrays it works on are those of sessions.py. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.estimators.delays import difference, total
from pytools.estimators.windows import MISSING, Times, how_many, occurrence
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing import udp, volleys
from pytools.sources.probing.measurements import (
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
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.sessions import ANSWERED, FREE, LATE, OUTSTANDING, SEQ_WRAP, TIMED_OUT, Sessions
from pytools.sources.probing.stamps import REPLY_INGRESS, REQUEST_EGRESS, of_kinds
from pytools.sources.probing.volleys import Salvo, Volley

PRECISE_NS: Final = 100_000  # a Receive Timestamp that its writer calls worse than this was not taken in the kernel

_REPLY_ROOM: Final = 128
_BATCH: Final = 256


_Found = tuple[int, NDArray[np.intp], Times, Times, Times]  # kind, paths, differences, our stamp, when seen


class _Replies:
    """Replies of known sessions, one element each."""

    def __init__(
        self,
        rows: NDArray[np.intp],
        slots: NDArray[np.int64],
        lengths: NDArray[np.int64],
        payload: NDArray[np.uint8],
        packets: NDArray[Any],
    ) -> None:
        self.rows, self.slots, self.lengths = rows, slots, lengths
        self._payload, self.packets = payload, packets  # the same bytes

    def of(self, chosen: NDArray[np.bool_]) -> _Replies:
        """Some of them."""
        if chosen.all():
            return self
        payload = self._payload[chosen]  # picking rows of bytes is much cheaper than picking structured records
        return _Replies(self.rows[chosen], self.slots[chosen], self.lengths[chosen], payload, wire.replies(payload))


class Sender(Sessions):
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

    def __init__(
        self,
        probe: Probe,
        clocks: Clocks | None,
        families: Sequence[udp.Family],
        groups: int,
        measurements: Measurements,
    ) -> None:
        super().__init__(probe, clocks, measurements)
        self._groups = groups
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
            self.open(families)
        except BaseException:
            self.close()
            raise
        # By group, and of each group by round: every `_pair_every`th is one of coded pairs.
        self._pair_every = 1 if clocks is None else clocks.pair_every(probe)
        self._spacing_ns = 0 if clocks is None else int(clocks.spacing_us * 1000)
        self._rounds = [0] * groups
        self._singles: list[list[Salvo]] = [[] for _ in range(groups)]
        self._pairs: list[list[Salvo]] = [[] for _ in range(groups)]
        self._waiting: list[tuple[int, udp.Datagrams, int]] = []
        self._received_ns = 0

    def open(self, families: Iterable[udp.Family]) -> None:
        """Have sockets of these address families.

        Raises
        ------
        SwerveError
            If no socket can be had.
        """
        for family in families:
            for flow in range(self._probe.flows):
                if (family, flow) not in self._sockets:
                    self._sockets[family, flow] = udp.open_socket(family, 0, self._probe.dscp)
                    self._arrivals[family, flow] = udp.Datagrams(family, _BATCH, _REPLY_ROOM)

    # ---- sessions ----

    def set_paths(self, paths: Sequence[PinnedPath]) -> None:
        """Probe these paths from now on."""
        flows = self._probe.flows
        self._grow((max((pinned.index for pinned in paths), default=-1) + 1) * flows)
        dealt: dict[tuple[int, udp.Family, int], list[tuple[int, PinnedPath]]] = {}
        for pinned in paths:
            for flow in range(flows):
                row = pinned.index * flows + flow
                self._remotes[row] = udp.mapped(pinned.path.address).view(np.uint64)
                self._own_clock[row] = pinned.peer.clock != "shared"
                dealt.setdefault((row % self._groups, pinned.family, flow), []).append((row, pinned))
        numbers = {address: number for number, address in enumerate(sorted({p.path.address for p in paths}))}
        self._peer[:] = -1
        for pinned in paths:
            self._peer[pinned.index * flows : (pinned.index + 1) * flows] = numbers[pinned.path.address]
        self._singles = [[] for _ in range(self._groups)]
        self._pairs = [[] for _ in range(self._groups)]
        for (group, family, flow), sessions in dealt.items():
            sock, port = self._sockets[family, flow], self._probe.port
            self._singles[group].append((volleys.single(sock, port, sessions),))
            self._pairs[group].append(
                self._singles[group][-1] if flow else volleys.pairs(sock, port, sessions, self._spacing_ns > 0)
            )

    # ---- sending ----

    def send(self, group: int, now_ns: int) -> None:
        """Send one probe, or a coded pair where it is time for one, for each session of a group."""
        as_pairs = self._rounds[group] % self._pair_every == 0
        self._rounds[group] += 1
        leaving_ns, counting = time.monotonic_ns(), []
        for salvo in (self._pairs if as_pairs else self._singles)[group]:
            began_ns = 0
            for volley in salvo:
                while volley.spaced and time.monotonic_ns() < began_ns + self._spacing_ns:
                    pass  # microseconds: no timer is as punctual
                began_ns = time.monotonic_ns()
                sent = self._send(volley, now_ns)
                if volley is salvo[0]:
                    counting.append(volley.rows[sent & (volley.turn == 0)])
        if counting:
            rows = np.concatenate(counting)
            self._measurements.liveness.sent(leaving_ns, rows[self._first_ports(rows)] // self._probe.flows)

    def _first_ports(self, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which sessions are by the first source port of their path."""
        first: NDArray[np.bool_] = rows % self._probe.flows == 0
        return first

    def _send(self, volley: Volley, now_ns: int) -> NDArray[np.bool_]:
        """Send a volley; which of its probes were sent, in vain or not."""
        rows = volley.rows
        seq = self._next_seq[rows] + volley.turn
        slots = seq & (self._slots - 1)
        overwritten = self._state[rows, slots] == OUTSTANDING  # only after a long pause of the agent
        self._measurements.count(LOST, rows[overwritten] // self._probe.flows)
        np.maximum.at(self._next_seq, rows, seq + 1)
        self._seq[rows, slots] = seq
        self._sent_ns[rows, slots] = now_ns
        self._state[rows, slots] = OUTSTANDING
        self._part[rows, slots] = volley.parts
        for known in (self._left, self._back, self._seen, self._forward, self._reverse):
            known[rows, slots] = MISSING
        wire.write_requests(volley.packets, seq & (SEQ_WRAP - 1), volley.ssids, now_ns, volley.errors)
        refused = volley.datagrams.send(volley.sock, len(rows))
        sent = np.ones(len(rows), np.bool_)
        for place, code in refused.items():
            row, slot = rows[place], slots[place]
            if code in (errno.EAGAIN, errno.ENOBUFS):  # our own fault, not the path's
                sent[place] = False
                self._state[row, slot] = FREE
                self.drops["send_buffer_full"] += 1
            else:  # no way there any more: as lost as if the network had dropped it, and known at once
                self._state[row, slot] = TIMED_OUT
                self.drops["send_refused"] += 1
                self._measurements.count(LOST, rows[place : place + 1] // self._probe.flows)
        self._measurements.count(SENT, rows[sent] // self._probe.flows)
        header = udp.HEADER_BYTES[volley.datagrams.family]
        self.wire_bytes += how_many(sent) * (wire.PROBE_BYTES + header)
        return sent

    # ---- receiving ----

    def receive(self) -> None:
        """Take replies from the sockets; `join` works on them once the stamps have been read."""
        self._waiting = []
        for (family, flow), sock in self._sockets.items():
            datagrams = self._arrivals[family, flow]
            count = datagrams.receive(sock)
            if count:
                self._waiting.append((flow, datagrams, count))
        self._received_ns = time.monotonic_ns()

    def take_stamps(self, records: NDArray[Any]) -> None:
        """Note when requests left and replies came in, exactly."""
        about_size = records["ssid"] == wire.SIZE_SSID
        if about_size.any():
            records = records[~about_size]
        stamps = of_kinds(records, REQUEST_EGRESS, REPLY_INGRESS)
        rows, slots, known = self._sessions(stamps.ssid, stamps.remote, stamps.seq, None)
        self.drops["stray_stamps"] += len(known) - how_many(known)
        known &= self._times[stamps.kind, rows, slots] == MISSING
        chosen = np.flatnonzero(known)[::-1]  # backwards, so that of a duplicated packet the first stamp stays
        self._times[stamps.kind[chosen], rows[chosen], slots[chosen]] = stamps.at_ns[chosen]
        back = chosen[stamps.kind[chosen] == 1]
        self._seen[rows[back], slots[back]] = stamps.seen_ns[back]

    def join(self) -> None:
        """Turn the replies that `receive` took into counts and delays."""
        for flow, datagrams, count in self._waiting:
            packets = wire.replies(datagrams.payload)[:count]
            lengths = datagrams.received_lengths(count)
            self.wire_bytes += int(lengths.sum()) + count * udp.HEADER_BYTES[datagrams.family]
            whole = datagrams.received_whole(count) & (lengths >= wire.BASE_BYTES)
            whole &= (packets["error"] & 0xFF) != 0  # RFC 4656, section 4.1.2: corrupt
            of_peer = datagrams.ports(count) == self._probe.port
            seq = packets["sender_seq"].astype(np.int64)
            remotes = np.ascontiguousarray(datagrams.sources(count)).view(np.uint64).reshape(-1, 2)
            rows, slots, known = self._sessions(packets["ssid"].astype(np.int64), remotes, seq, flow)
            known &= whole & of_peer
            if not known.all():
                self.drops["malformed_replies"] += count - how_many(whole)
                self.drops["foreign_replies"] += how_many(whole & ~of_peer)
                self.drops["stray_replies"] += how_many(whole & of_peer & ~known)
            replies = _Replies(rows, slots, lengths, datagrams.payload[:count], packets)
            self._take(replies.of(known))
        self._waiting = []

    def _take(self, replies: _Replies) -> None:
        """Settle the fate of the probes answered, then measure those answered in time for the first time."""
        if not len(replies.rows):
            return
        rows, slots = replies.rows, replies.slots
        state = self._state[rows, slots]
        first = occurrence(rows * self._slots + slots) == 0
        fresh = first & (state == OUTSTANDING)
        late = first & (state == TIMED_OUT)
        self._state[rows[late], slots[late]] = LATE
        self._state[rows[fresh], slots[fresh]] = ANSWERED
        np.maximum.at(self._answered_ns, rows[fresh], self._sent_ns[rows[fresh], slots[fresh]])
        self.drops["late_replies"] += how_many(late)
        paths = rows // self._probe.flows
        self._measurements.count(DUPLICATES, paths[~fresh & ~late])
        self._measurements.count(RECEIVED, paths[fresh])
        self._note_arrivals(replies, fresh, late)
        in_time = replies.of(fresh)
        self._measurements.count(REORDERED, in_time.rows[self._reordered(in_time)] // self._probe.flows)
        self._measure(in_time)

    def _note_arrivals(self, replies: _Replies, fresh: NDArray[np.bool_], late: NDArray[np.bool_]) -> None:
        rows, slots, liveness = replies.rows, replies.slots, self._measurements.liveness
        paths, sent_ns = rows // self._probe.flows, self._sent_ns[rows, slots]
        seen_ns = self._seen[rows, slots]
        seen_ns = np.where(seen_ns == MISSING, self._received_ns, seen_ns)
        came = fresh | late
        liveness.arrived(paths[came], sent_ns[came], seen_ns[came])
        earlier = (slots - 1) & (self._slots - 1)
        follows = self._seq[rows, earlier] == self._seq[rows, slots] - 1
        passed = follows & (self._state[rows, earlier] != ANSWERED) & (self._state[rows, earlier] != FREE)
        counting = self._first_ports(rows) & ~(follows & (self._sent_ns[rows, earlier] == sent_ns))
        liveness.answered(paths[fresh], sent_ns[fresh], counting[fresh], passed[fresh])

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
        # With two clocks a delay is told once its reverse is known too: a step of a clock makes the one longer and the
        # other shorter, and only the latter gives it away.
        at_once = ~(self._own_clock[rows] & understood)
        found = [(FORWARD, paths[at_once], forward[at_once], left[at_once], self._seen[rows, slots][at_once])]
        if understood.all():
            found += self._follow_up(replies)
        else:
            found += self._follow_up(replies.of(understood)) + self._foreign(replies.of(~understood))
        # A step while the earlier probe was at the peer made that one's reverse longer, and this one's forward shorter.
        waits = ~at_once
        self._measurements.check(paths[waits], forward[waits], left[waits], self._seen[rows, slots][waits])
        kinds, *columns = zip(*found, strict=True)
        of_kind = np.repeat(kinds, [len(each) for each in columns[0]])
        self._measurements.add(of_kind, *(np.concatenate(each) for each in columns))

    def _foreign(self, replies: _Replies) -> list[_Found]:
        """Reflectors that do not follow up: their own word for when a reply left, taken in user space."""
        rows, slots, packets = replies.rows, replies.slots, replies.packets
        left, back = self._left[rows, slots], self._back[rows, slots]
        sent = wire.join_ns(packets["seconds"], packets["fraction"], packets["error"])
        reverse = np.where(left != MISSING, difference(back, sent), MISSING)
        self._reverse[rows, slots] = reverse
        both, paths = total(self._forward[rows, slots], reverse), rows // self._probe.flows
        seen = self._seen[rows, slots]
        return [(REVERSE, paths, reverse, back, seen), (ROUND_TRIP, paths, both, back, seen)]

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
        wanted &= (self._state[rows, slots] == ANSWERED) & (self._reverse[rows, slots] == MISSING)
        rows, slots, left = rows[wanted], slots[wanted], left[wanted]
        back, seen = self._back[rows, slots], self._seen[rows, replies.slots[wanted]]
        reverse = difference(back, left)
        self._reverse[rows, slots] = reverse
        forward, paths = self._forward[rows, slots], rows // self._probe.flows
        seen = np.where(seen == MISSING, self._seen[rows, slots], seen)
        later = self._own_clock[rows] & (reverse != MISSING)
        return [
            (FORWARD, paths[later], forward[later], self._left[rows, slots][later], seen[later]),
            (REVERSE, paths, reverse, back, seen),
            (ROUND_TRIP, paths, total(forward, reverse), back, seen),
        ]

    def socket_drops(self) -> int:
        """Replies that the kernel dropped because nobody read the socket in time."""
        return sum(udp.dropped(sock) for sock in self._sockets.values())

    def close(self) -> None:
        """Close the sockets."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}
