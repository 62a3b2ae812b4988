"""The Session-Reflector: answers the probes of configured peers, each with one packet of the same size.

It is stateful (RFC 8762, section 4.3): per session it counts its replies, and remembers the kernel's stamps of the
last few, so that the Receive Timestamp is exact and a later reply can tell when an earlier one left. Times are
CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Peer
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import MISSING, how_many, occurrence
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing import udp
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.stamps import REPLY_EGRESS, REQUEST_INGRESS, of_kinds

_ARRIVED, _LEFT = 0, 1
_SLOTS: Final = 256  # stamps remembered per session
_UNTOLD: Final = 8  # replies of a session that a later one may still tell of
_BATCH: Final = 256
_ROOM: Final = 9188  # longer requests are not answered: as much as IPv4 carries where frames are longest
# A Receive Timestamp that the kernel did not take is the time at which the agent looked, late by up to this.
_IMPRECISE_NS: Final = 100_000_000
# A reply to one of these could be answered in its turn: other reflectors, and services such as echo.
_LOWEST_PORT: Final = 1024
_SESSIONS_PER_PEER: Final = 256
_IDLE_NS: Final = 10_000_000_000  # a session silent for so long may give way to a new one
_REPLIES_PER_S: Final = 20_000  # to one peer; and in a burst, a tenth of that
_BURST: Final = _REPLIES_PER_S / 10


class Reflector:
    """The probe port of this host.

    Parameters
    ----------
    port : int
        The UDP port to listen on; 0 lets the kernel choose (`ports` says which), for tests.

    Raises
    ------
    SwerveError
        If the port cannot be had.
    """

    def __init__(self, port: int, dscp: int, peers: Sequence[Peer]) -> None:
        self.drops = dict.fromkeys(
            (
                "malformed_requests",
                "requests_of_no_peer",
                "requests_from_refused_port",
                "requests_over_rate",
                "requests_over_sessions",
                "unstamped_requests",
                "reply_refused",
            ),
            0,
        )
        self.ifindexes: set[int] = set()  # by which requests have come in
        self.answered = 0
        self.wire_bytes = 0  # of requests taken and replies sent, headers included
        self._port, self._dscp = port, dscp
        self._peers: dict[bytes, int] = {}  # by address: its place in the arrays, which is nobody else's ever
        self._precise_error, self._imprecise_error = np.zeros((2, 0), np.int64)
        self._tokens = np.zeros(0)
        self._tokens_at_ns = 0
        self._marks: dict[tuple[int, int], int] = {}
        self._rows: dict[bytes, int] = {}  # sender port, padding and remote address as in the stamps, then SSID
        self._free: list[int] = []
        self._allocate(0)
        self._grow()
        self._sockets: dict[udp.Family, socket.socket] = {}
        self._requests: dict[udp.Family, udp.Datagrams] = {}
        self._packets: dict[udp.Family, NDArray[Any]] = {}  # the same bytes, seen as replies
        self._waiting: list[tuple[udp.Family, int]] = []
        try:
            self.open(udp.families(peer.address for peer in peers))
        except BaseException:
            self.close()
            raise
        self.set_peers(peers)

    def open(self, families: Iterable[udp.Family]) -> None:
        """Listen for requests of these address families too.

        Raises
        ------
        SwerveError
            If the port cannot be had.
        """
        for family in families:
            if family not in self._sockets:
                self._sockets[family] = udp.open_socket(family, self._port, self._dscp)
                self._requests[family] = udp.Datagrams(family, _BATCH, _ROOM)
                self._packets[family] = wire.replies(self._requests[family].payload)

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Answer these alone; one that stays keeps its place, and with it its sessions."""
        wanted = {udp.mapped(peer.address).tobytes(): peer for peer in peers}
        for key in self._peers.keys() - wanted.keys():
            del self._peers[key]
        for session in [session for session in self._rows if session[4:20] not in wanted]:
            self._free.append(self._rows.pop(session))
        for key, peer in wanted.items():
            place = self._peers.setdefault(key, len(self._tokens))
            if place == len(self._tokens):
                self._tokens = np.append(self._tokens, _BURST)
                self._precise_error = np.append(self._precise_error, 0)
                self._imprecise_error = np.append(self._imprecise_error, 0)
            shared = peer.clock == "shared"
            self._precise_error[place] = wire.error_estimate(STAMP_BOUND_NS, shared)
            self._imprecise_error[place] = wire.error_estimate(_IMPRECISE_NS, shared)

    def set_paths(self, paths: Sequence[PinnedPath]) -> None:
        """Send replies along these: to a peer, by the interface its request came in by."""
        self._marks = {}
        for pinned in paths:
            peer = self._peers[udp.mapped(pinned.path.address).tobytes()]
            self._marks.setdefault((pinned.ifindex, peer), pinned.mark)

    # ---- sessions ----

    def _allocate(self, rows: int) -> None:
        self._peer = np.zeros(rows, np.int64)
        self._heard_ns = np.zeros(rows, np.int64)
        self._next_seq = np.zeros(rows, np.int64)
        # By our own sequence number, of the last few replies: which request each answered, and whether a later reply
        # has told yet when it left. -1: no reply.
        self._replied = np.full((rows, _UNTOLD), -1, np.int64)
        self._told = np.ones((rows, _UNTOLD), np.bool_)
        # By sender's sequence number: when [0] its request arrived, [1] our reply left.
        self._stamped_seq = np.full((2, rows, _SLOTS), -1, np.int64)
        self._stamped_ns = np.full((2, rows, _SLOTS), MISSING, np.int64)

    def _grow(self) -> None:
        names = ("_peer", "_heard_ns", "_next_seq", "_replied", "_told", "_stamped_seq", "_stamped_ns")
        old = {name: vars(self)[name] for name in names}
        have = len(self._peer)
        self._allocate(max(64, 2 * have))
        for name, value in old.items():
            vars(self)[name][(slice(None), slice(have)) if value.ndim == 3 else slice(have)] = value
        self._free.extend(range(len(self._peer) - 1, have - 1, -1))

    def _row(self, key: bytes, now_ns: int) -> int:
        """The row of a session, a new one if need be; -1 when its peer already has too many."""
        row = self._rows.get(key)
        if row is not None:
            return row
        peer = self._peers.get(key[4:20])
        if peer is None:
            return -1
        if not self._has_room(peer, now_ns):
            return -1
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._rows[key] = row
        self._peer[row], self._heard_ns[row] = peer, now_ns
        self._next_seq[row], self._replied[row], self._told[row] = 0, -1, True
        self._stamped_seq[:, row] = -1
        return row

    def _has_room(self, peer: int, now_ns: int) -> bool:
        """Whether a peer may have one session more; its longest silent one gives way."""
        mine = [(int(self._heard_ns[row]), key) for key, row in self._rows.items() if self._peer[row] == peer]
        if len(mine) < _SESSIONS_PER_PEER:
            return True
        heard_ns, key = min(mine)
        if heard_ns > now_ns - _IDLE_NS:
            return False
        self._free.append(self._rows.pop(key))
        return True

    def _rows_of(self, keys: list[bytes], now_ns: int) -> NDArray[np.intp]:
        rows = list(map(self._rows.get, keys))
        if None in rows:
            rows = [self._row(key, now_ns) for key in keys]
        return np.array(rows, np.intp)

    # ---- stamps ----

    def take_stamps(self, records: NDArray[Any], now_ns: int) -> None:
        """Note when requests came in and replies left, exactly."""
        stamps = of_kinds(records, REQUEST_INGRESS, REPLY_EGRESS)
        rows = self._rows_of(_keys(stamps.port, stamps.remote, stamps.ssid), now_ns)
        slots = stamps.seq & (_SLOTS - 1)
        new = (rows >= 0) & (self._stamped_seq[stamps.kind, rows, slots] != stamps.seq)
        chosen = np.flatnonzero(new)[::-1]  # backwards, so that of a duplicated packet the first stamp stays
        places = stamps.kind[chosen], rows[chosen], slots[chosen]
        self._stamped_seq[places] = stamps.seq[chosen]
        self._stamped_ns[places] = stamps.at_ns[chosen]

    # ---- answering ----

    def receive(self) -> None:
        """Take requests from the sockets; `answer` works on them once the stamps have been read."""
        self._waiting = []
        for family, sock in self._sockets.items():
            count = self._requests[family].receive(sock)
            if count:
                self._waiting.append((family, count))

    def answer(self, now_ns: int) -> None:
        """Reply to the requests that `receive` took."""
        for family, count in self._waiting:
            self._answer(family, self._requests[family], count, now_ns)
        self._waiting = []

    def _answer(self, family: udp.Family, datagrams: udp.Datagrams, count: int, now_ns: int) -> None:
        self.wire_bytes += int(datagrams.received_lengths(count).sum()) + count * udp.HEADER_BYTES[family]
        peers, rows = self._admit(datagrams, count, now_ns)
        count = len(rows)  # those that are answered lie in front now
        if not count:
            return
        self._heard_ns[rows] = now_ns
        lengths = datagrams.received_lengths(count)
        payload = datagrams.payload[:count]
        packets = self._packets[family][:count]
        sender_seq = packets["seq"].astype(np.int64)
        slots = sender_seq & (_SLOTS - 1)
        stamped = self._stamped_seq[_ARRIVED, rows, slots] == sender_seq
        self.drops["unstamped_requests"] += count - how_many(stamped)
        turn = occurrence(rows)
        seq = self._next_seq[rows] + turn
        self._answer_tlvs(payload, packets, lengths, *self._tell(rows, turn))
        datagrams.lengths[:count] = lengths
        wire.turn_into_replies(
            payload,
            packets,
            seq=seq & 0xFFFFFFFF,
            receive_ns=np.where(stamped, self._stamped_ns[_ARRIVED, rows, slots], now_ns),
            now_ns=now_ns,
            error=np.where(stamped, self._precise_error[peers], self._imprecise_error[peers]),
            ttl=datagrams.ttls(count),
        )
        np.maximum.at(self._next_seq, rows, seq + 1)
        self._replied[rows, seq & (_UNTOLD - 1)] = sender_seq
        self._told[rows, seq & (_UNTOLD - 1)] = False
        self._route(datagrams, count, peers)
        refused = datagrams.send(self._sockets[family], count)
        self.drops["reply_refused"] += len(refused)
        self.answered += count
        self.wire_bytes += int(lengths.sum()) + count * udp.HEADER_BYTES[family]

    def _admit(self, datagrams: udp.Datagrams, count: int, now_ns: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Keep the requests that are answered, and count the others; peer and session of each that is kept."""
        whole = datagrams.received_whole(count) & (datagrams.received_lengths(count) >= wire.BASE_BYTES)
        sources, ports = datagrams.sources(count), datagrams.ports(count)
        peers = np.array([self._peers.get(key, -1) for key in udp.keys(sources)], np.intp)
        of_peer = whole & (peers >= 0)
        wanted = of_peer & (ports >= _LOWEST_PORT) & (ports != self._port)
        if not wanted.all():
            self.drops["malformed_requests"] += count - how_many(whole)
            self.drops["requests_of_no_peer"] += how_many(whole & ~of_peer)
            self.drops["requests_from_refused_port"] += how_many(of_peer & ~wanted)
        wanted[wanted] = self._within_rate(peers[wanted], now_ns)
        ssids = self._packets[datagrams.family]["ssid"][:count]
        rows = np.full(count, -1, np.intp)
        rows[wanted] = self._rows_of(_keys(ports[wanted], sources[wanted], ssids[wanted]), now_ns)
        kept = rows >= 0
        if kept.all():
            return peers, rows
        self.drops["requests_over_sessions"] += how_many(wanted & ~kept)
        datagrams.keep(np.flatnonzero(kept))
        return peers[kept], rows[kept]

    def _within_rate(self, peers: NDArray[np.intp], now_ns: int) -> NDArray[np.bool_]:
        """Which requests their peer's share of replies still allows."""
        earned = (now_ns - self._tokens_at_ns) * _REPLIES_PER_S / 1e9
        self._tokens = np.minimum(self._tokens + earned, _BURST)
        self._tokens_at_ns = now_ns
        allowed: NDArray[np.bool_] = occurrence(peers) < self._tokens[peers].astype(np.int64)
        np.subtract.at(self._tokens, peers[allowed], 1.0)
        self.drops["requests_over_rate"] += len(peers) - how_many(allowed)
        return allowed

    def _answer_tlvs(
        self,
        payload: NDArray[np.uint8],
        packets: NDArray[Any],
        lengths: NDArray[np.int64],
        told_seq: NDArray[np.int64],
        told_left: NDArray[np.int64],
    ) -> None:
        """Set the flags of TLVs, tell those who ask when an earlier reply of their session left, shorten `lengths`."""
        asked = wire.follow_up_asked(packets, lengths)
        if asked.all():
            wire.write_follow_up(packets, told_seq & 0xFFFFFFFF, told_left)
            return
        for place in np.flatnonzero(~asked).tolist():  # about sizes, and of senders other than swerve's
            asked[place] = wire.reflect_tlvs(payload[place], int(lengths[place]))
            lengths[place] = wire.answer_size(payload[place], int(lengths[place]), _ROOM)
        wire.write_follow_up(packets, told_seq & 0xFFFFFFFF, told_left, np.flatnonzero(asked))

    def _tell(self, rows: NDArray[np.intp], turn: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which earlier reply of its session each reply tells of, and when that one left; MISSING if of none.

        The newest that has not been told of: with single probes the previous one, as RFC 8972 has it. The second reply
        to a coded pair tells of an older one, so that every reply is told of once.
        """
        told_seq, told_ns = np.zeros(len(rows), np.int64), np.full(len(rows), MISSING)
        for one in range(min(int(turn.max()) + 1, _UNTOLD)):
            places = np.flatnonzero(turn == one)
            of = rows[places]
            earlier = self._next_seq[of, None] - 1 - np.arange(_UNTOLD)  # newest first
            ring = earlier & (_UNTOLD - 1)
            asked = self._replied[of[:, None], ring]
            slots = asked & (_SLOTS - 1)
            known = (asked >= 0) & (earlier >= 0) & ~self._told[of[:, None], ring]
            known &= self._stamped_seq[_LEFT, of[:, None], slots] == asked
            newest, line = known.argmax(axis=1), np.arange(len(of))
            found = known[line, newest]
            self._told[of[found], ring[line, newest][found]] = True
            told_seq[places] = earlier[line, newest]
            left = self._stamped_ns[_LEFT, of, slots[line, newest]]
            told_ns[places] = np.where(found, left, MISSING)
        return told_seq, told_ns

    def _route(self, datagrams: udp.Datagrams, count: int, peers: NDArray[np.intp]) -> None:
        """Back by the interface the request came in by, through that path's gateway where a path is known."""
        ifindexes = datagrams.ifindexes(count)
        arrived = ifindexes.tolist()
        self.ifindexes.update(arrived)
        marks = [self._marks.get(pair, 0) for pair in zip(arrived, peers.tolist(), strict=True)]
        marked = np.array(marks, np.uint32)
        datagrams.depart(count, marked, datagrams.destinations(count), np.where(marked != 0, 0, ifindexes))

    def socket_drops(self) -> int:
        """Requests that the kernel dropped because nobody read the socket in time."""
        return sum(udp.dropped(sock) for sock in self._sockets.values())

    def close(self) -> None:
        """Close the port."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


_KEY = np.dtype([("sender_port", "<u2"), ("pad", "<u2"), ("remote", "V16"), ("ssid", "<u2"), ("end", "<u2")])


def _keys(ports: Any, remotes: NDArray[Any], ssids: Any) -> list[bytes]:
    """What tells sessions apart, as bytes: sender's port, its address, SSID."""
    keys = np.zeros(len(remotes), _KEY)
    keys["sender_port"], keys["ssid"] = ports, ssids
    keys["remote"] = np.ascontiguousarray(remotes).view("V16").ravel()
    return keys.view("V24").tolist()
