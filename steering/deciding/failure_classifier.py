"""What the silence of a path means: a dead path, a dead peer, or probing that is broken. Pure.

Only a dead path is a reason to leave it, and only its siblings can tell: the other paths to the same peer. One of them
must have answered a probe that left after the second missed one did: answers may still be under way when a peer dies,
and one probe may be lost by chance just before. It must also answer nearly all of its probes, or the silence must be
one that a path as lossy as it would show once in a million times: where every path loses many, the peer is overloaded.
A silence no longer than a recent round trip is a queue. A path that never answered is not measured.
Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytools.signals import PathLiveness
from pytools.units import duration_text

Cause = Literal["answers", "waiting", "path_dead", "peer_dead", "probe_broken", "unknown", "unmeasured"]
Way = Literal["there", "back or both", "unknown"]

_NEARLY_ALL: Final = 0.75  # share of its probes that a path must answer to testify against a sibling at once
_MOST_LOSS: Final = 0.75  # a path that loses more says nothing about another


@dataclass(frozen=True, slots=True)
class Silence:
    cause: Cause
    way: Way  # the direction that does not pass
    text: str


def classify(path: PathLiveness, siblings: Sequence[PathLiveness]) -> Silence:
    """Tell a dead path from a dead peer and from broken probing.

    Parameters
    ----------
    path : PathLiveness
        Of the path that is asked about.
    siblings : sequence of PathLiveness
        Of the other paths to the same peer; those to the same address count, others only where there are none.
    """
    alone = _without_siblings(path)
    if alone is not None:
        return alone
    peer, missed = path.path.destination, _probes(path.missed)
    second_ns = _first_missed_ns(path) + max(path.interval_ns, 0)
    way = _way(path, second_ns)
    others = [other for other in siblings if other.path.address == path.path.address] or list(siblings)
    if not others:
        return Silence(
            "unknown", way, f"{missed} missed; with one path to {peer} nothing tells a dead path from a dead peer"
        )
    answered = [other for other in others if _answered(other, second_ns)]
    answering = next((other for other in answered if _reliable(other, path)), None)
    if answering is not None:
        passes = "; probes of the peer still come in over it" if way == "there" else ""
        return Silence("path_dead", way, f"{missed} missed while {answering.path} answers{passes}")
    if answered:
        text = f"{missed} missed; {answered[0].path} answers{_share_answered(answered[0])}, too few to tell"
        return Silence("waiting", way, text)
    if any(other.missed <= 0 or other.at_ns < second_ns for other in others):
        return Silence("waiting", way, f"{missed} missed; no other path to {peer} has answered since")
    return _of_the_peer(path, others, way, second_ns)


def _without_siblings(path: PathLiveness) -> Silence | None:
    """What a path's own probes tell already; None when its siblings are to be asked."""
    missed = _probes(path.missed)
    if not has_answered(path):
        return Silence("unmeasured", "unknown", f"{missed} missed; no probe was ever answered")
    if path.missed <= 0:
        return Silence("answers", "unknown", f"{_probes(path.answered_run)} in a row answered")
    if path.silent_ns < (path.missed - 1) * path.interval_ns:
        # A sender that was kept from running sends what is overdue at once: that is one moment, not many.
        return Silence("waiting", "unknown", f"{missed} missed, but all within {duration_text(path.silent_ns)}")
    if path.longest_rtt_ns is not None and path.silent_ns <= path.longest_rtt_ns:
        longest = duration_text(path.longest_rtt_ns)
        text = f"{missed} missed within {duration_text(path.silent_ns)}; a round trip took up to {longest}"
        return Silence("waiting", "unknown", text)
    return None


def _of_the_peer(path: PathLiveness, others: Sequence[PathLiveness], way: Way, second_ns: int) -> Silence:
    """What it means that no path to a peer answers."""
    peer, missed = path.path.destination, _probes(path.missed)
    if any(_later(each.last_request_ns, second_ns, each) for each in (path, *others)):
        return Silence(
            "probe_broken", way, f"{missed} missed, on every path, but probes of {peer} come in: probing is broken"
        )
    return Silence("peer_dead", way, f"{missed} missed, on every path, and {peer} sends none: the peer is silent")


def _later(happened_ns: int | None, than_ns: int, told: PathLiveness) -> bool:
    return happened_ns is not None and than_ns < happened_ns <= told.at_ns


def _first_missed_ns(path: PathLiveness) -> int:
    """When the first of the missed probes left: after the last answer had come."""
    return max(path.at_ns - max(path.silent_ns, 0), path.last_answer_ns or 0)


def _answered(path: PathLiveness, after_ns: int) -> bool:
    """Whether a probe was answered that left after a time; an answer is at most an interval under way if not told."""
    if path.answered_sent_ns is not None:
        return _later(path.answered_sent_ns, after_ns, path)
    return _later(path.last_answer_ns, after_ns + max(path.interval_ns, 0), path)


def has_answered(path: PathLiveness) -> bool:
    """Whether any probe of a path was ever answered."""
    return path.last_answer_ns is not None or path.answered_sent_ns is not None


def _reliable(other: PathLiveness, path: PathLiveness) -> bool:
    """Whether a path answered nearly all of its probes while another one missed some."""
    weight = path.missed + path.missed_extra
    loss = other.recent_loss
    if loss is not None and 0 <= loss <= 1 - _NEARLY_ALL:
        return True
    if loss is not None and 0 <= loss <= _MOST_LOSS and other.limit is not None and weight >= other.limit > 0:
        return True
    return other.answered_run >= _NEARLY_ALL * path.missed


def _share_answered(other: PathLiveness) -> str:
    return "" if other.recent_loss is None else f" {1 - other.recent_loss:.0%} of its probes"


def _way(path: PathLiveness, after_ns: int) -> Way:
    if path.last_request_ns is None:
        return "unknown"
    return "there" if _later(path.last_request_ns, after_ns, path) else "back or both"


def _probes(count: int) -> str:
    return "1 probe" if count == 1 else f"{count} probes"
