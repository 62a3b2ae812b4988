"""The state of a path's link for one word of the policy: from events, and from the reports that repeat it. Pure.

An event is told once, and may be missed (a restart); the report says the same a second later. The newer of both counts.
Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytools.units import duration_text
from steering.deciding.evidence import Facts
from steering.policy.conditions import OPPOSITES, LinkWord
from steering.policy.conditions_text import LINK_WORDS

REPORT_LIVES_NS: Final = 5_000_000_000  # reports come once per long window of the agent, a second unless configured


@dataclass(frozen=True, slots=True)
class State:
    """Whether something is the matter with a link."""

    bad: bool
    at_ns: int  # of the newest fact behind it
    since_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class _Report:
    bad: bool
    at_ns: int
    text: str


def link_state(word: LinkWord, hold: int, facts: Facts, now: int) -> State | None:
    """What is known of a link under one word; None when nothing is.

    Parameters
    ----------
    word : str
        The event that begins the state.
    hold : int
        How long it lasts, in nanoseconds, for a word without an opposite.
    """
    return _until_its_opposite(word, facts) if word in OPPOSITES else _held(word, hold, facts, now)


def _held(word: LinkWord, hold: int, facts: Facts, now: int) -> State | None:
    event, report = facts.event(word), facts.link
    if event is not None:
        happened = min(event.happened_ns, event.at_ns)
        ago = duration_text(max(now - happened, 0))
        if now - happened < hold:
            at_ns = max(event.at_ns, report.at_ns if report else 0)
            return State(True, at_ns, happened, f"{event.detail or LINK_WORDS[word]}, {ago} ago")
        if report is not None and report.at_ns > event.at_ns:
            return State(False, report.at_ns, happened + hold, f"no {word.replace('_', ' ')} for {ago}")
        return None
    if report is None:
        return None
    return State(False, report.at_ns, report.at_ns, f"no {word.replace('_', ' ')}")


def _until_its_opposite(word: LinkWord, facts: Facts) -> State | None:
    begins = (word, "removed") if word == "carrier_lost" else (word,)
    event, report = facts.event(*begins, OPPOSITES[word]), _report(word, facts)
    if event is None and report is None:
        return None
    if event is None or (report is not None and report.at_ns > event.at_ns):
        assert report is not None
        began = event is not None and (event.what in begins) == report.bad
        since_ns = min(event.happened_ns, event.at_ns) if event is not None and began else report.at_ns
        return State(report.bad, report.at_ns, since_ns, report.text)
    bad = event.what in begins
    happened = min(event.happened_ns, event.at_ns)
    return State(bad, event.at_ns, happened, event.detail or event.what.replace("_", " "))


def _report(word: LinkWord, facts: Facts) -> _Report | None:
    """What the periodic reports say under this word."""
    link, mtu, ports = facts.link, facts.mtu, facts.ports
    match word:
        case "carrier_lost" if link is not None:
            text = f"{link.interface} has {'its' if link.carrier else 'no'} carrier"
            return _Report(not link.carrier, link.at_ns, text)
        case "neighbour_failed" if link is not None:
            neighbour = facts.path.gateway or facts.path.address
            failed = neighbour in link.failed_neighbours
            return _Report(failed, link.at_ns, f"{neighbour} {'does not answer' if failed else 'answers'}")
        case "mtu_mismatch" if mtu is not None and mtu.state != "unknown":
            sizes = f"packets of {mtu.interface_mtu_bytes} bytes"
            passes = "pass" if mtu.state == "agrees" else "do not pass"
            return _Report(mtu.state == "mismatch", mtu.at_ns, f"{sizes} {passes}")
        case "port_down" if ports:
            down = [port for port in ports if port.state != "active"]
            newest = max(port.at_ns for port in ports)
            told = (down or list(ports))[0]
            return _Report(bool(down), newest, f"{told.device} port {told.port} is {told.state}")
        case _:
            return None
