"""Faults that no key alone has: names and priorities given twice, keys that do not go together. Pure.

They are looked for in what the file has, not in the model, so that they are named together with all other faults.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Final

from pytools.yaml_reader import Location, Problem, Reader, dotted
from steering.policy.actions import FLOW_KINDS, KINDS, STANDING_KINDS, WEIGHT_KINDS
from steering.policy.conditions import OF_JOBS
from steering.policy.hooks import HOOK_KINDS

_FLOW_SCOPES: Final = ("flows", "processes", "cgroups")


def inconsistencies(raw: Any, reader: Reader) -> Iterator[Problem]:
    """Every such fault of a file, whatever else is wrong with it."""
    found = raw.get("rules") if isinstance(raw, dict) else None
    rules = found if isinstance(found, list) else []
    if isinstance(raw, dict) and not {"rules", "ports", "labels"} & raw.keys():
        yield _problem((), '"rules" is missing; expected rules, ports or labels', reader)
    yield from _names(rules, reader)
    yield from _priorities(rules, reader)
    top = raw if isinstance(raw, dict) else {}
    yield from _labels(top.get("manage"), rules, "labels" in top, reader)
    yield from _hooks(top.get("hooks"), rules, reader)
    acts = [rule.get("then") for rule in rules if isinstance(rule, dict)]
    if "bonds" in top and not any(isinstance(then, dict) and then.keys() & set(WEIGHT_KINDS) for then in acts):
        yield _problem(("bonds",), "it never acts: expected a rule with shift or drain, which says when", reader)
    for i, rule in enumerate(rules):
        if isinstance(rule, dict):
            then = rule.get("then")
            if "when" not in rule and not (isinstance(then, dict) and then.keys() & set(STANDING_KINDS)):
                yield _problem(("rules", i, "when"), '"when" is missing; expected a condition', reader)
            yield from _for_or_samples(rule.get("when"), ("rules", i, "when"), reader)
            yield from _actions(rule, ("rules", i), reader)


def _problem(at: Location, what: str, reader: Reader, hint: str = "") -> Problem:
    line = next((reader.lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in reader.lines), 1)
    return Problem(line, dotted(at), what, hint)


def _one_of(node: dict[str, Any], kinds: tuple[str, ...], at: Location, reader: Reader) -> Iterator[Problem]:
    """A mapping with more or less than one of these keys."""
    if len(given := [key for key in node if key in kinds]) != 1:
        what = f"expected exactly one of {', '.join(kinds)}, got {' and '.join(given) or 'none'}"
        yield _problem((*at, *given[1:2]), what, reader)


def _hooks(hooks: Any, rules: list[Any], reader: Reader) -> Iterator[Problem]:
    """Hooks of no kind or of several, and names of hooks that are none."""
    found = hooks if isinstance(hooks, dict) else {}
    for name, hook in found.items():
        if isinstance(hook, dict):
            yield from _one_of(hook, HOOK_KINDS, ("hooks", name), reader)
            if isinstance(where := hook.get("kubernetes"), dict):
                yield from _one_of(where, ("taint", "condition"), ("hooks", name, "kubernetes"), reader)
    for i, rule in enumerate(rules):
        then = rule.get("then") if isinstance(rule, dict) else None
        names = then.get("notify") if isinstance(then, dict) else None
        for n, name in enumerate(names if isinstance(names, list) else []):
            if isinstance(name, str) and name not in found:
                what = f'"{name}" is not a hook; expected {" or ".join(map(str, found)) or "one that hooks has"}'
                near = difflib.get_close_matches(name, map(str, found), n=1)
                yield _problem(("rules", i, "then", "notify", n), what, reader, *near)


def _names(rules: list[Any], reader: Reader) -> Iterator[Problem]:
    """Rules that bear the name of an earlier one: an act would not say which of them it was made under."""
    first: dict[str, int] = {}
    for i, rule in enumerate(rules):
        name = rule.get("name") if isinstance(rule, dict) else None
        if not isinstance(name, str):
            continue
        at = ("rules", i, "name")
        if name in first:
            what = f'"{name}" is the name of the rule in line {first[name]} already; expected another'
            yield _problem(at, what, reader)
        first.setdefault(name, reader.lines[at])


def _priorities(rules: list[Any], reader: Reader) -> Iterator[Problem]:
    """Rules without a priority among some with one, and priorities given twice: the order would not be clear."""
    given = [rule.get("priority") if isinstance(rule, dict) else None for rule in rules]
    if all(priority is None for priority in given):
        return
    first: dict[int, int] = {}
    for i, priority in enumerate(given):
        at = ("rules", i, "priority")
        if priority is None and at not in reader.lines:
            what = '"priority" is missing; expected one in every rule, or in none and the order of the file counts'
            yield _problem(at, what, reader)
        if isinstance(priority, bool) or not isinstance(priority, int):
            continue
        if priority in first:
            what = f"{priority} is the priority of the rule in line {first[priority]} already; expected another"
            yield _problem(at, what, reader)
        first.setdefault(priority, reader.lines[at])


def _labels(manage: Any, rules: list[Any], beside: bool, reader: Reader) -> Iterator[Problem]:
    """Rules that relabel beside `labels`, or where all prefixes are of IPv4, which has no flow labels."""
    managed = manage.get("destinations") if isinstance(manage, dict) else None
    for i, rule in enumerate(rules):
        then, scope = (rule.get(key) if isinstance(rule, dict) else None for key in ("then", "scope"))
        if not isinstance(then, dict) or "relabel" not in then:
            continue
        if beside:
            what = "expected only without labels: both would choose the label of one connection"
            yield _problem(("rules", i, "then", "relabel"), what, reader)
        scope = scope if isinstance(scope, dict) else {}
        flows = scope.get("flows")
        for where, prefixes in (
            ("manage.destinations", managed),
            ("scope.destinations", scope.get("destinations")),
            ("scope.flows.remote", flows.get("remote") if isinstance(flows, dict) else None),
        ):
            given = prefixes if isinstance(prefixes, list) else []
            if given and all(isinstance(each, str) and ":" not in each for each in given):
                what = f"it never acts: IPv4 has no flow labels; expected an IPv6 prefix in {where}"
                yield _problem(("rules", i, "then", "relabel"), what, reader)


def _for_or_samples(when: Any, at: Location, reader: Reader) -> Iterator[Problem]:
    """Leaves that count both time and samples."""
    if isinstance(when, list):
        for i, part in enumerate(when):
            yield from _for_or_samples(part, (*at, i), reader)
    elif isinstance(when, dict):
        for key in ("all", "any", "not"):
            yield from _for_or_samples(when.get(key), (*at, key), reader)
        if "for" in when and "samples" in when:
            yield _problem((*at, "samples"), "expected either for or samples, not both", reader)


def _of_jobs(when: Any, at: Location) -> Iterator[Location]:
    """Where leaves are that are about jobs."""
    if isinstance(when, list):
        for i, part in enumerate(when):
            yield from _of_jobs(part, (*at, i))
    elif isinstance(when, dict):
        for key in ("all", "any", "not"):
            yield from _of_jobs(when.get(key), (*at, key))
        if when.get("signal") in OF_JOBS:
            yield (*at, "signal")


def _actions(rule: dict[str, Any], at: Location, reader: Reader) -> Iterator[Problem]:
    """More or less than one action, and what does not go with it."""
    then = rule.get("then")
    if not isinstance(then, dict):
        return
    kinds = [kind for kind in then if kind in KINDS] or ["alert"] * ("notify" in then)
    if not kinds and then:
        return  # said of its keys already
    if len(kinds) != 1:
        yield from _one_of(then, KINDS, (*at, "then"), reader)
        return
    kind = kinds[0]
    scope = rule.get("scope")
    if isinstance(scope, dict) and kind not in FLOW_KINDS:
        what = (
            f"expected only with {', '.join(FLOW_KINDS[:-1])} or {FLOW_KINDS[-1]}: {kind} does not choose among flows"
        )
        for key in (key for key in _FLOW_SCOPES if key in scope):
            yield _problem((*at, "scope", key), what, reader)
    if kind != "alert":
        for where in _of_jobs(rule.get("when"), (*at, "when")):
            what = "expected only with alert or notify: it says nothing about the path, so that moving helps nobody"
            yield _problem(where, what, reader)
    if kind in STANDING_KINDS:
        for key, node, where in (("when", rule, at), ("return", rule, at), ("notify", then, (*at, "then"))):
            if key in node and (kind, key) != ("hold", "when"):
                what = f"expected only without {kind}, which acts while the paths are healthy"
                yield _problem((*where, key), what, reader)
    if "return" in rule and kind == "alert" and "notify" not in then:
        what = "expected only with what moves something: from an alert nothing comes back"
        yield _problem((*at, "return"), what, reader)
    shift = then.get("shift")
    if isinstance(shift, dict) and "share" in shift and shift.get("by") in ("capacity", "headroom"):
        what = f"expected either share or by: {shift['by']}, not both"
        yield _problem((*at, "then", "shift", "share"), what, reader)
