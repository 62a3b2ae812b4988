"""Conditions in words: when they hold, and when they are clear. Pure."""

from __future__ import annotations

from typing import Final

from pytools.units import duration_text
from steering.policy.conditions import (
    All,
    AnyLeaf,
    AnyOf,
    CeShare,
    Condition,
    JobSteps,
    Late,
    LinkState,
    MeasuredDelay,
    MeasuredShare,
    Not,
    Rdma,
    Retransmits,
    Silence,
    WithThreshold,
    figures_of,
    part_of,
    samples_of,
)
from steering.policy.levels import OfAbove, Usual

LINK_WORDS: Final = {
    "carrier_lost": "its link has no carrier",
    "neighbour_failed": "the neighbour does not answer",
    "mtu_mismatch": "packets of full size do not come through",
    "port_down": "the RDMA port is not active",
    "flap": "its link flapped",
    "queue_full": "the interface's queue was full",
    "pause_storm": "pause frames held the link",
    "gid_changed": "an address of the RDMA port changed",
}
_CLEARED: Final = {
    "carrier_lost": "the carrier is back",
    "neighbour_failed": "the neighbour answers",
    "mtu_mismatch": "they come through",
    "port_down": "the port is active",
}
_CAUSES: Final = {
    "any": "",
    "fast": " by fast retransmission",
    "timeout": " after a timeout",
    "tail_probe": " by tail probes",
    "syn": " in handshakes",
}


def condition_text(condition: Condition) -> str:
    """When a condition holds, in words."""
    match condition:
        case All():
            return _joined("and", [condition_text(part) for part in condition.all])
        case AnyOf():
            return _joined("or", [condition_text(part) for part in condition.any])
        case Not():
            return f"not ({condition_text(condition.not_)})"
        case _:
            lasting = f" for {duration_text(condition.for_)}" if condition.for_ else ""
            often = f" {condition.fall} times in a row" if condition.fall > 1 else ""
            return f"{_holds(condition)}{_counted(condition)}{lasting}{often}"


def clear_text(condition: Condition) -> str:
    """When a condition has cleared, in words."""
    match condition:
        case All():
            return _joined("or", [clear_text(part) for part in condition.all])
        case AnyOf():
            return _joined("and", [clear_text(part) for part in condition.any])
        case Not():
            return condition_text(condition.not_)
        case _:
            return _clears(condition)


def _counted(leaf: AnyLeaf) -> str:
    many = samples_of(leaf)
    return f" in {many} samples at least" if many > 1 else ""


def _joined(word: str, parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else "(" + f") {word} (".join(parts) + ")"


def _holds(leaf: AnyLeaf) -> str:  # noqa: PLR0911
    match leaf:
        case MeasuredDelay() | MeasuredShare():
            return leaf.measure.holds.format(quantile=part_of(leaf), above=_above(leaf))
        case Silence():
            return f"{leaf.missed} probes in a row are unanswered while other paths to the peer answer"
        case Retransmits():
            return f"more than {_above(leaf)} of the TCP segments are retransmitted{_CAUSES[leaf.cause]}"
        case CeShare():
            return f"more than {_above(leaf)} of the packets {_way(leaf)} are marked by a queue (ECN CE)"
        case LinkState():
            return LINK_WORDS[leaf.event]
        case Rdma():
            some = f"at least {leaf.share:.0%} of" if leaf.share else "any of"
            return f"{some} its queue pairs are {leaf.verdict.replace('_', ' ')}"

        case JobSteps():
            cause = "anything" if leaf.cause == "any" else f"cause {leaf.cause}"
            return f"{cause} explains at least {leaf.at_least:.0%} of the step of a job that uses it"
        case Late():
            return f"a late rank costs at least {leaf.at_least:.0%} of the step of a job that uses it"


def _above(leaf: WithThreshold) -> str:
    text, level = figures_of(leaf).text, leaf.above
    if not isinstance(level, Usual):
        return text(level)
    times = f"{level.factor:g} × " if level.factor != 1 else ""
    plus = f" + {text(level.plus)}" if level.plus else ""
    return (
        f"{times}its usual {level.quantile}{plus} (at least {text(level.at_least)}, at most {text(level.at_most)}; "
        f"{text(level.until_learned)} until that is learnt)"
    )


def _below(leaf: WithThreshold) -> str:
    level = leaf.clear_below
    return f"{level.factor:.3g} of that threshold" if isinstance(level, OfAbove) else figures_of(leaf).text(level)


def _clears(leaf: AnyLeaf) -> str:  # noqa: PLR0911
    match leaf:
        case MeasuredDelay() | MeasuredShare():
            return leaf.measure.clears.format(below=_below(leaf))
        case Silence():
            return "its probes are answered"
        case Retransmits():
            return f"less than {_below(leaf)} of the segments are retransmitted{_CAUSES[leaf.cause]}"
        case CeShare():
            return f"less than {_below(leaf)} of the packets {_way(leaf)} are marked"
        case LinkState():
            return _CLEARED.get(leaf.event, f"that is {duration_text(leaf.hold)} ago")
        case Rdma():
            return f"less than {leaf.clear_below:.0%} of them are" if leaf.clear_below else "none of them is"
        case JobSteps():
            return "that was measured and explains less"
        case Late():
            return "all ranks here were compared and none is so late"


def _way(leaf: CeShare) -> str:
    return "on the way there" if leaf.direction == "out" else "on the way back"
