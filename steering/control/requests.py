"""What may be asked of a running controller, and what it answers: one JSON object each. Pure.

A request is one packet of a SOCK_SEQPACKET socket, and so is the reply. Durations are nanoseconds, 0 for without end.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from pytools.errors import SwerveError, UsageError

SOCKET: Final = "control.sock"  # beside the lock: whoever holds that may replace it
MOST_BYTES: Final = 1 << 16
REPLY_BYTES: Final = 96 << 10  # half of what a socket takes in one packet by default
_LINES, _LINE_CHARS = 10, 1000  # of a reply that must be cut; JSON takes 6 bytes for a character at most
MOST_UNDONE: Final = 100
AGAIN: Final = "again"  # among the facts of a refusal that may be none a moment later

Text = Annotated[str, msgspec.Meta(max_length=200)]
Name = Annotated[str, msgspec.Meta(max_length=100)]
Place = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]  # interface, gateway, or gateway%interface
Duration = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something an operator wants."""


class Drain(Request, frozen=True, tag="drain"):
    """Take an interface or a gateway out of use."""

    leaves_by: Place
    to: Name = ""  # only in the targets that carry routes to this prefix
    for_ns: Duration = 0
    why: Text = ""


class Undrain(Request, frozen=True, tag="undrain"):
    """Take such an order back."""

    leaves_by: Place
    to: Name = ""


class Hold(Request, frozen=True, tag="hold"):
    """Leave a target as it is; empty for all of them."""

    target: Name = ""
    for_ns: Duration = 0
    why: Text = ""


class Unhold(Request, frozen=True, tag="unhold"):
    """Take such an order back."""

    target: Name = ""


class FlowRequest(Request, frozen=True):
    """Something about one flow, by its five fields."""

    protocol: Annotated[int, msgspec.Meta(ge=0, le=255)]
    local: Name
    local_port: Port
    remote: Name
    remote_port: Port


class PinFlow(FlowRequest, frozen=True, tag="pin"):
    via: Place
    for_ns: Annotated[int, msgspec.Meta(gt=0, le=1 << 53)]
    why: Text = ""


class UnpinFlow(FlowRequest, frozen=True, tag="unpin"):
    """Remove a pin; the flow follows the routing table again."""


class Undo(Request, frozen=True, tag="undo"):
    """Take the last acts back, and hold their targets for a while."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_UNDONE)] = 1
    hold_ns: Duration = 600_000_000_000


class Status(Request, frozen=True, tag="status"):
    """What a controller knows that is not on disk."""


AnyRequest: TypeAlias = Drain | Undrain | Hold | Unhold | PinFlow | UnpinFlow | Undo | Status


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was done, or why not."""

    code: int = 0  # exit code of the command that asked: 0 done, 1 failed, 2 usage error, 4 refused by a guard
    lines: list[str] = []  # what was done; of an error, what is wrong
    next_step: str = ""
    facts: dict[str, Any] = {}


_Packet = TypeVar("_Packet")
_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)
_reply_decoder = msgspec.json.Decoder(Reply)


def _decoded(decoder: msgspec.json.Decoder[_Packet], data: bytes, what: str) -> _Packet:
    """What a packet holds; ValueError if it is no such packet."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(str(error) or f"not a {what}") from None


def decode(data: bytes) -> AnyRequest:
    """A request from its packet; ValueError if it is none."""
    return _decoded(_decoder, data, "request")


def encode(request: AnyRequest) -> bytes:
    """A request as a packet.

    Raises
    ------
    UsageError
        If it holds what is no text.
    """
    try:
        return msgspec.json.encode(request)
    except UnicodeEncodeError:
        raise UsageError("not UTF-8 text", "see what was typed, and the locale") from None


def encode_reply(reply: Reply) -> bytes:
    """A reply as a packet that fits: facts are left out and text is cut where they do not."""
    data = msgspec.json.encode(reply)
    if len(data) <= REPLY_BYTES:
        return data
    said = [line[:_LINE_CHARS] for line in reply.lines[:_LINES]]
    if len(reply.lines) > _LINES:
        said.append(f"and {len(reply.lines) - _LINES} more, too many to send")
    return msgspec.json.encode(Reply(reply.code, said, reply.next_step[:_LINE_CHARS]))


def decode_reply(data: bytes) -> Reply:
    """A reply from its packet; ValueError if it is none."""
    return _decoded(_reply_decoder, data, "reply")


def refusal(error: SwerveError) -> Reply:
    return Reply(error.exit_code, [error.what], error.next_step)
