"""Where packets may be held: `then: hold` of the policy, and which paths it comes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import mentions

from pytools.signals import Path
from pytools.units import SECOND
from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.deciding.holds import holds, needed
from steering.deciding.overrides import Override, Overrides
from steering.deciding.rule_eval import Reading
from steering.plan import Group, Hold, HoldLimits, Member, weights_of
from steering.policy.explanation import explain
from steering.policy.file import parse
from steering.policy.model import signals_of

HEAD = "version: 1\nmanage: {destinations: [10.9.0.0/16, 'fd00:9::/64']}\nrules:\n"
PLAIN = HEAD + "  - {name: short-queues, then: {hold: {}}}\n"
DRAIN = "  - {name: full, when: {signal: queueing_delay, above: 5ms, clear_below: 1ms}, then: {drain: {}}}\n"
NOW = 1_000_000_000_000
DEFAULTS = HoldLimits(threshold_ns=1_000_000, longest_ns=50_000_000, fresh_ns=200_000_000, floor=125_000, gain=256)


def path(rail: int, address: str = "10.9.0.2") -> Path:
    return Path("h1", "h2", address, f"10.{rail}.1.1", f"rail{rail}")


def group(target: str, address: str) -> Group:
    members = tuple(Member(10 + rail, f"10.{rail}.1.1", f"rail{rail}", 1) for rail in (1, 2))
    paths = tuple((10 + rail, path(rail, address)) for rail in (1, 2))
    return Group(target, (f"{address}/32",), members, weights_of((m.nexthop_id, 1) for m in members), paths)


def well(*addresses: str) -> dict[Path, PathHealth]:
    return {path(1, address): PathHealth("healthy", NOW, seen_ns=NOW) for address in addresses}


def test_a_path_in_scope_is_held_towards_its_measured_address_alone() -> None:
    policy = parse(PLAIN)
    four, six = path(1), path(1, "fd00:9::2")
    found = holds(policy, well("10.9.0.2", "fd00:9::2", "10.8.0.2"), [])  # the last is not managed
    assert found == (
        Hold(four, ("10.9.0.2/32",), DEFAULTS, "short-queues"),
        Hold(six, ("fd00:9::2/128",), DEFAULTS, "short-queues"),
    )
    assert needed(policy) and signals_of(policy) == {"path_delay"}


def test_every_key_is_passed_on_and_the_first_rule_that_covers_a_path_counts() -> None:
    text = HEAD + (
        "  - {name: one, scope: {destinations: [10.9.0.3/32]}, then: {hold: {threshold: 500us, longest: 50ms, "
        "floor: 8mbit, fresh: 1s, qdisc: fq}}}\n  - {name: two, then: {hold: {}}}\n"
    )
    one, two = holds(parse(text), well("10.9.0.3", "10.9.0.2"), [])[::-1]
    assert (one.under, one.install, two.under, two.install) == ("one", True, "two", False)
    assert one.limits == HoldLimits(500_000, 50_000_000, SECOND, 1_000_000, 256)


def test_without_such_a_rule_nothing_is_held() -> None:
    policy = parse(HEAD + DRAIN)
    assert not needed(policy)
    assert holds(policy, well("10.9.0.2"), []) == ()


@pytest.mark.parametrize("state", ["healthy", "suspect", "drained", "returning", "unmeasured"])
def test_a_path_is_held_in_every_state_but_unmeasured(state: str) -> None:
    found = holds(parse(PLAIN), {path(1): PathHealth(state, NOW, seen_ns=NOW)}, [])  # type: ignore[arg-type]
    assert len(found) == (state != "unmeasured")


def test_a_path_along_which_nothing_passes_is_not_held() -> None:
    for failure in (True, False):
        reading = Reading(Verdict.BAD, "silent", failure=failure)
        found = holds(parse(PLAIN), {path(1): PathHealth("suspect", NOW, (reading,), seen_ns=NOW)}, [])
        assert len(found) == (not failure)


def test_a_target_that_the_operator_holds_is_left_alone() -> None:
    mine, other = group("nexthop_group:1", "10.9.0.2"), group("nexthop_group:2", "10.9.0.3")
    orders = Overrides((Override("hold", target=mine.target),))
    known = {each: PathHealth("healthy", NOW, seen_ns=NOW) for one in (mine, other) for _, each in one.paths}
    assert [each.path.address for each in holds(parse(PLAIN), known, [mine, other], orders)] == ["10.9.0.3"] * 2
    assert len(holds(parse(PLAIN), known, [mine, other])) == 4


@given(st.permutations(["10.9.0.2", "10.9.0.3", "10.9.1.1", "fd00:9::2"]))
def test_the_order_of_the_paths_does_not_matter(addresses: list[str]) -> None:
    assert holds(parse(PLAIN), well(*addresses), []) == holds(parse(PLAIN), well(*sorted(addresses)), [])


def test_explained_it_says_what_waits_for_how_long_and_where() -> None:
    (line,) = [each for each in explain(parse(PLAIN)).splitlines() if each.startswith("1. ")]
    how = ("short-queues", "on a path", "packets wait at this host", "at most 50 ms", "more than 1 ms", "1 Mbit/s")
    assert mentions(line, *how, "per destination", "moves nothing", "only", "fq", "200 ms after the last measurement")
    assert "fq is put on its interface meanwhile" in explain(parse(PLAIN.replace("{}", "{qdisc: fq}")))
