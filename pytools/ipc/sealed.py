"""Messages between hosts: how they are laid out, signed, and told from replayed ones. Pure; no clock is read here.

A host speaks in sessions, one per start, named at random. The first message of a session that is believed is the answer
to a challenge: a fresh random number that only the living holder of the key can have signed. From there on sequence
numbers only rise. So nothing recorded earlier is ever accepted, whoever was restarted meanwhile, and no two
clocks need to agree. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

MAX_PAYLOAD: Final = 1 << 19
MAX_NAME: Final = 255  # bytes, of a host or a topic

_MAGIC: Final = b"swv1"  # names the format; another layout has another one
_HEAD: Final = struct.Struct(">4sBBBB16sQ")  # magic, kind, lengths of sender, recipient and topic, session, sequence
_TAG_BYTES: Final = hashlib.sha256().digest_size
_NONCE_BYTES: Final = 16
MAX_BYTES: Final = _HEAD.size + 3 * MAX_NAME + MAX_PAYLOAD + _TAG_BYTES

_ASK_NS: Final = 1_000_000_000  # a peer that is not confirmed, or silent, is challenged so often
_ASK_AGAIN_NS: Final = 200_000_000  # and no more often when an unknown session speaks
_ANSWER_NS: Final = 50_000_000  # a peer gets no more than one answer in this time
_CHALLENGE_NS: Final = 5_000_000_000  # an answer that comes later than this proves too little
_SILENT_NS: Final = 4_000_000_000
_BELIEVES_NS: Final = 2_000_000_000
_GONE_NS: Final = 10_000_000_000


Replies = list[tuple[str, bytes]]  # (to whom, message)


class Kind(IntEnum):
    DATA = 0
    CHALLENGE = 1
    ANSWER = 2


class Message(NamedTuple):
    """One message, before or after its way."""

    kind: Kind
    sender: str
    to: str
    topic: str
    session: bytes
    sequence: int
    payload: bytes


class Received(NamedTuple):
    """A message that was believed."""

    sender: str
    topic: str
    payload: bytes


def encode(message: Message, key: bytes) -> bytes:
    """The message with its signature behind it."""
    names = [name.encode() for name in (message.sender, message.to, message.topic)]
    lengths = map(len, names)
    head = _HEAD.pack(_MAGIC, message.kind, *lengths, message.session, message.sequence)
    signed = b"".join((head, *names, message.payload))
    return signed + hmac.digest(key, signed, "sha256")


def decode(raw: bytes) -> Message | None:
    """What the bytes say, not yet believed; None if they are no message. Never raises."""
    if not _HEAD.size + _TAG_BYTES <= len(raw) <= MAX_BYTES:
        return None
    magic, kind, sender_end, to_end, topic_end, session, sequence = _HEAD.unpack_from(raw)
    sender_end += _HEAD.size
    to_end += sender_end
    topic_end += to_end
    if magic != _MAGIC or topic_end > len(raw) - _TAG_BYTES:
        return None
    try:
        return Message(
            Kind(kind),
            raw[_HEAD.size : sender_end].decode(),
            raw[sender_end:to_end].decode(),
            raw[to_end:topic_end].decode(),
            session,
            sequence,
            raw[topic_end:-_TAG_BYTES],
        )
    except ValueError:  # an unknown kind, or a name that is not UTF-8
        return None


def is_signed(raw: bytes, key: bytes) -> bool:
    """Whether the holder of the key made these bytes."""
    signature = hmac.digest(key, memoryview(raw)[:-_TAG_BYTES], "sha256")
    return hmac.compare_digest(signature, raw[-_TAG_BYTES:])


def derived(secret: bytes, purpose: str) -> bytes:
    """A key of its own for each purpose, so that none says anything about another."""
    return hmac.digest(secret, b"swerve " + purpose.encode(), "sha256")


@dataclass
class _Peer:
    session: bytes = b""  # the one we believe; empty: none yet
    newest: int = 0  # its last sequence number
    heard_ns: int = 0
    challenge: bytes = b""  # not answered yet
    made_ns: int = 0
    asked_ns: int = -_GONE_NS
    believed_ns: int = 0
    believes: bool = False  # that session has had our answer to a challenge
    stranger: bytes = b""  # another session that has had one
    answered_ns: int = -_GONE_NS
    sent: int = 0  # our last sequence number


@dataclass
class Sealer:
    """One host's end: signs what goes out, judges what comes in."""

    host: str
    peers: Iterable[str]  # the names of those who are believed
    key: bytes  # shared by all
    random: Callable[[int], bytes] = os.urandom  # gives so many random bytes
    refused: Counter[str] = field(default_factory=Counter)  # by cause

    def __post_init__(self) -> None:
        self._peers = {name: _Peer() for name in self.peers if name != self.host}
        self._session = self.random(16)

    def seal(self, topic: str, payload: bytes, to: str) -> bytes:
        """A signed message to one peer."""
        return self._seal(Kind.DATA, topic, payload, to)

    def confirmed(self, name: str, now_ns: int) -> bool:
        """Whether this peer has proved that it lives, was heard lately, and believes us as well.

        It does once our answer to its challenge is on the way: what we send from then on arrives after that. Time
        passes for an answer as well, or whoever repeats old challenges at the right moment could mute us.
        """
        peer = self._peers[name]
        if not peer.session or now_ns - peer.heard_ns >= _GONE_NS:
            return False
        return peer.believes or now_ns - peer.believed_ns >= _BELIEVES_NS

    def asks(self, now_ns: int) -> Replies:
        """The challenges that are due: (peer, message)."""
        return [
            (name, self._challenge(name, peer, now_ns))
            for name, peer in self._peers.items()
            if now_ns - peer.asked_ns >= _ASK_NS and (not peer.session or now_ns - peer.heard_ns >= _SILENT_NS)
        ]

    def open(self, raw: bytes, now_ns: int) -> tuple[Received | None, Replies]:
        """Judge a message: what it brought if it is believed, and what is to be sent in return."""
        message = decode(raw)
        if message is None:
            return self._refuse("oversize" if len(raw) > MAX_BYTES else "malformed")
        peer = self._peers.get(message.sender)
        if peer is None:
            return self._refuse("foreign")
        if not is_signed(raw, self.key):
            return self._refuse("forged")
        if message.to != self.host:
            return self._refuse("misdirected")
        return self._judge(message, peer, now_ns)

    def _judge(self, message: Message, peer: _Peer, now_ns: int) -> tuple[Received | None, Replies]:
        """A message that a holder of the key has made, for us, at some time."""
        if message.kind == Kind.CHALLENGE:
            return self._take_challenge(message, peer, now_ns)
        if message.session != peer.session:
            if message.kind == Kind.ANSWER:
                return self._take_answer(message, peer, now_ns)
            return self._refuse("unconfirmed", self._ask_again(message.sender, peer, now_ns))
        if not self._is_next(message, peer, now_ns):
            return self._refuse("replayed")
        if message.kind == Kind.ANSWER:
            peer.challenge = b""
            return None, []  # all that it had to say is that its sender lives
        return Received(message.sender, message.topic, message.payload), []

    def _is_next(self, message: Message, peer: _Peer, now_ns: int) -> bool:
        """Whether this is newer than all before it; notes it, and counts what is missing between."""
        if message.sequence <= peer.newest:
            return False
        self.refused["lost"] += message.sequence - peer.newest - 1
        peer.newest = message.sequence
        peer.heard_ns = now_ns
        return True

    def _take_challenge(self, message: Message, peer: _Peer, now_ns: int) -> tuple[Received | None, Replies]:
        # Whoever replays a challenge gets an answer that is of no use: nobody waits for that number any more.
        if len(message.payload) != _NONCE_BYTES:
            return self._refuse("malformed")
        replies: Replies = []
        if now_ns - peer.answered_ns >= _ANSWER_NS:
            peer.answered_ns = now_ns
            replies.append((message.sender, self._seal(Kind.ANSWER, "", message.payload, message.sender)))
            if message.session == peer.session:
                peer.believes = True
            else:
                peer.stranger = message.session
        if message.session != peer.session:
            replies += self._ask_again(message.sender, peer, now_ns)
        elif not self._is_next(message, peer, now_ns):
            return self._refuse("replayed")
        return None, replies

    def _take_answer(self, message: Message, peer: _Peer, now_ns: int) -> tuple[Received | None, Replies]:
        fresh = peer.challenge and now_ns - peer.made_ns < _CHALLENGE_NS
        if not fresh or not hmac.compare_digest(message.payload, peer.challenge):
            return self._refuse("replayed")
        peer.session, peer.newest, peer.challenge = message.session, message.sequence, b""
        peer.believes = peer.stranger == message.session
        peer.believed_ns = peer.heard_ns = now_ns
        return None, []

    def _ask_again(self, name: str, peer: _Peer, now_ns: int) -> Replies:
        if now_ns - peer.asked_ns < _ASK_AGAIN_NS:
            return []
        return [(name, self._challenge(name, peer, now_ns))]

    def _challenge(self, name: str, peer: _Peer, now_ns: int) -> bytes:
        peer.asked_ns = now_ns
        if not peer.challenge or now_ns - peer.made_ns >= _CHALLENGE_NS:  # a slow answer to the last one still counts
            peer.challenge, peer.made_ns = self.random(_NONCE_BYTES), now_ns
        return self._seal(Kind.CHALLENGE, "", peer.challenge, name)

    def _seal(self, kind: Kind, topic: str, payload: bytes, to: str) -> bytes:
        peer = self._peers[to]
        peer.sent += 1
        return encode(Message(kind, self.host, to, topic, self._session, peer.sent, payload), self.key)

    def _refuse(self, cause: str, replies: Replies | None = None) -> tuple[None, Replies]:
        self.refused[cause] += 1
        return None, replies or []
