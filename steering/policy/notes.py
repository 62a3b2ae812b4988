"""What is valid in a policy, and does harm where many hosts share the rails (docs/herd.md)."""

from __future__ import annotations

from collections.abc import Iterator

from pytools import directories
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.conditions import leaves
from steering.policy.model import Policy, Rule


def notes(policy: Policy) -> list[str]:
    """What is worth a thought about the rules that act on load, one line each. Failures have to act at once."""
    return [note for rule in policy.rules for note in _notes(policy, rule)]


def _notes(policy: Policy, rule: Rule) -> Iterator[str]:
    if rule.then.kind not in WEIGHT_KINDS or all(leaf.failure for leaf in leaves(rule.when)):
        return
    if rule.then.shift is None or rule.then.shift.step == 1:
        yield (
            f"{rule.name}: takes {_what(rule)} in one act; with many hosts on the same rails that oscillates "
            f"({directories.page('herd.md')}): shift: {{share: 0, step: 0.1, settle: 1s}} and safety.herd.jitter: 1s"
        )
    elif not policy.safety.herd.jitter:
        yield (
            f"{rule.name}: goes down in steps, but many hosts on the same rails take each of them at the same instant "
            f"({directories.page('herd.md')}): safety.herd.jitter: 1s"
        )


def _what(rule: Rule) -> str:
    shift = rule.then.shift
    if shift is None or shift.by == "share":
        return f"{1 - rule.then.share:.0%} of the weight" if rule.then.share else "the whole weight"
    return "all that it takes"
