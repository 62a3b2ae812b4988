"""What is wanted of a group, and the limits that hold whatever the rules say."""

from __future__ import annotations

import dataclasses

import policy_kit as kit
from msgspec.structs import replace
from steering_kit import MS, ORIGINAL, POLICY, SECOND, TARGET, facts, group, measured, path
from support import mentions

from steering.deciding import health, transitions
from steering.deciding.capacity import Estimate
from steering.deciding.decide import decide
from steering.deciding.overrides import Override, Overrides
from steering.policy.file import parse

NOW = 10**12
POLICY_OF_TWO = parse(POLICY)
FAILING = parse(
    POLICY
    + """\
  - name: silent-path
    when: {signal: silence, missed: 3, lasting: 0ms, for: 40ms}
    then: {drain: {}}
"""
)


def state(policy, queueing_ns=0, for_ns=SECOND, then="", now=NOW, **measurement):
    """The health of a path that measured the same until now; `then` drains or returns it."""
    known = health.unknown(now - for_ns)
    at = now - for_ns
    while at <= now:
        known = transitions.observe(policy, known, facts(measured(path(), at, queueing_ns, **measurement)), at)
        at += 20 * MS
    if then:
        rule = 0
        share = policy.rules[rule].return_.steps[0] if then == "returning" else 0.0
        known = replace(known, state=then, rule=rule, share=share, strikes=1, step_since=now, clear_since=None)
    return known


def good(policy=POLICY_OF_TWO):
    return state(policy)


def bad(policy=POLICY_OF_TWO, for_ns=SECOND):
    return state(policy, 20 * MS, for_ns)


def one(policy, paths, known):
    (plan,) = decide(policy, paths, [known], NOW)
    return plan


def two_rails(first, second, **fields):
    known = group({1: [path(1)], 2: [path(2)]}, **fields)
    return one(POLICY_OF_TWO, {path(1): first, path(2): second}, known)


def test_healthy_paths_keep_the_original_weights():
    plan = two_rails(good(), good())
    assert (plan.after, plan.granted, plan.held) == (ORIGINAL, (), ())


def test_a_bad_path_is_taken_out_and_the_plan_says_why():
    plan = two_rails(bad(), good())
    assert plan.after == ((12, 1),)
    assert plan.granted == ((path(1), 0.0),)
    assert plan.under == "leave-congested-rail"
    assert mentions(plan.because, str(path(1)), "queueing delay", "p50", "20 ms ± 1 us", "above 5 ms", "for 1 s")
    assert plan.paths == (path(1),)


def test_when_everything_looks_bad_nothing_is_changed():
    plan = two_rails(bad(), bad())
    assert plan.after == ORIGINAL
    assert plan.held and all(mentions(why, "held", "every path to h2", "bad") for _, why in plan.held)


def test_when_the_last_path_turns_bad_too_it_stays():
    down = state(POLICY_OF_TWO, 0, then="drained")
    plan = two_rails(down, bad(), current={12: 1})
    assert plan.after == ((12, 1),)
    [(where, why)] = plan.held
    assert where == path(2) and mentions(why, "held", "no healthy path", "whole weight")


def test_nothing_is_shifted_toward_a_path_that_is_only_coming_back():
    coming = state(POLICY_OF_TWO, 0, then="returning")
    plan = two_rails(coming, bad(), current={11: 1, 12: 10})
    assert plan.after == ((11, 1), (12, 10))
    assert [each for each, _ in plan.held] == [path(2)]


def test_nothing_is_shifted_toward_a_path_that_answers_nothing():
    dead = replace(state(POLICY_OF_TWO, None, received=0, lost=5), state="healthy", answered=True)
    plan = two_rails(bad(), dead)
    assert plan.after == ORIGINAL
    assert "there is no measurement" in plan.held[0][1]


def test_a_path_that_never_answered_freezes_the_group():
    """Its weight would grow; what was taken from another path stays where it is."""
    never = state(POLICY_OF_TWO, None, received=0, lost=5)
    plan = two_rails(bad(), never, current={11: 5, 12: 10})
    assert plan.after == ((11, 5), (12, 10)) and not plan.lifted
    assert mentions(plan.because, "hold", str(path(2)), "no probe", "answered")


def test_a_path_that_never_answered_does_not_count_where_the_operator_drained_it():
    never = state(POLICY_OF_TWO, None, received=0, lost=5)
    known = group({rail: [path(rail)] for rail in (1, 2, 3)})
    paths = {path(1): bad(), path(2): good(), path(3): never}
    order = Overrides((Override("drain", interface="rail3"),))
    policy = parse(POLICY.replace("max_drained_share: 0.5", "max_drained_share: 0.7"))
    (free,) = decide(policy, paths, [known], NOW)
    (ordered,) = decide(policy, paths, [known], NOW, overrides=order)
    assert free.after == known.original
    assert ordered.after == ((12, 1),)


def test_nothing_is_shifted_toward_a_path_that_was_never_measured():
    plan = one(POLICY_OF_TWO, {path(1): bad()}, group({1: [path(1)], 2: []}))
    assert plan.after == ORIGINAL
    assert mentions(plan.because, "hold", "no measurement", "10.9.0.2", "10.2.1.1", "rail2")
    assert plan.held == ((path(1), plan.because),)


def test_nothing_is_shifted_toward_a_path_that_is_suspect_itself():
    plan = two_rails(bad(), bad(for_ns=20 * MS))
    assert plan.after == ORIGINAL


def after_trouble(bad_for_ns, good_for_ns, policy=POLICY_OF_TWO):
    """The health of a path that was bad for so long, and then good for so long."""
    known = health.unknown(NOW - bad_for_ns - good_for_ns)
    for at in range(NOW - bad_for_ns - good_for_ns, NOW + 1, 20 * MS):
        queueing_ns = 20 * MS if at <= NOW - good_for_ns else 0
        known = transitions.observe(policy, known, facts(measured(path(), at, queueing_ns)), at)
    return known


def test_a_path_that_was_bad_a_moment_ago_takes_no_load_until_it_was_good_for_as_long_as_it_takes_to_be_bad():
    soon = two_rails(bad(), after_trouble(SECOND, 20 * MS))
    assert soon.after == ORIGINAL
    [(where, why)] = soon.held
    assert where == path(1) and mentions(why, "held", "other paths", "bad a moment ago")
    assert two_rails(bad(), after_trouble(SECOND, 40 * MS)).after == ((12, 1),)


def test_a_path_that_was_bad_only_for_a_moment_takes_load_at_once():
    assert two_rails(bad(), after_trouble(20 * MS, 20 * MS)).after == ((12, 1),)


def test_a_path_that_was_bad_a_moment_ago_takes_over_from_one_that_failed():
    recent = after_trouble(SECOND, 20 * MS, FAILING)
    plan = one(FAILING, {path(1): dead("suspect"), path(2): recent}, group({1: [path(1)], 2: [path(2)]}))
    assert plan.after == ((12, 1),)


def test_a_stale_path_freezes_the_group():
    old = state(POLICY_OF_TWO, 0, now=NOW - SECOND)
    plan = two_rails(bad(), old, current={11: 5, 12: 10})
    assert plan.after == ((11, 5), (12, 10))
    assert plan.because.startswith("hold: no fresh measurement of h1>h2 dev rail2")


def test_a_path_that_fell_silent_gives_the_group_its_original_weights_back():
    gone = transitions.advance(POLICY_OF_TWO, state(POLICY_OF_TWO, 0, now=NOW - 10 * SECOND), NOW)
    assert gone.state == "unmeasured"
    down = state(POLICY_OF_TWO, 20 * MS, then="drained")
    plan = two_rails(down, gone, current={12: 1})
    assert plan.after == ORIGINAL
    assert plan.lifted == {path(1)}, "to go down again it must be bad again, within the limits"
    assert plan.paths == (path(2),)


def dead(then="drained"):
    """A path that answers nothing while its sibling does, taken down under the rule about failures."""
    known = health.unknown(NOW - SECOND)
    for at in range(NOW - SECOND, NOW + 1, 20 * MS):
        seen = replace(
            facts(measured(path(), at, None, received=0, lost=5)),
            liveness=kit.liveness(path(), at, 5),
            siblings=(kit.liveness(path(2), at, answered_sent_ns=at),),
        )
        known = transitions.observe(FAILING, known, seen, at)
    assert known.failed
    return replace(known, state=then, rule=1, share=0.0) if then == "drained" else known


def unmeasured():
    return transitions.advance(FAILING, state(FAILING, 0, now=NOW - 10 * SECOND), NOW)


def test_what_is_known_to_be_dead_stays_out_when_another_path_falls_silent():
    known = group({rail: [path(rail)] for rail in (1, 2, 3)}, current={12: 1, 13: 1})
    down = state(FAILING, 20 * MS, then="drained")
    plan = one(FAILING, {path(1): dead(), path(2): down, path(3): unmeasured()}, known)
    assert plan.after == ((12, 1), (13, 1))
    assert mentions(plan.because, "original weights", f"{path(3)} is not measured", "without 10.1.1.1", "rail1", "dead")
    assert plan.lifted == {path(2)}
    alone = one(FAILING, {path(1): dead(), path(2): unmeasured()}, group({1: [path(1)], 2: [path(2)]}))
    assert alone.after == ((12, 1),)


def test_nothing_is_taken_out_for_being_dead_without_a_measured_path_to_go_to():
    plan = one(FAILING, {path(1): dead("suspect"), path(2): unmeasured()}, group({1: [path(1)], 2: [path(2)]}))
    assert plan.after == ORIGINAL


def test_when_only_dead_paths_are_left_they_are_put_back():
    also_dead = dead()
    paths = {1: [path(1), path(1, "h3")], 2: [path(2)]}
    states = {path(1): also_dead, path(1, "h3"): unmeasured(), path(2): also_dead}
    assert one(FAILING, states, group(paths, current={12: 1})).after == ORIGINAL


def balanced(carries, first):
    policy = parse(POLICY.replace("{share: 0}", "{by: capacity}"))
    known = group({1: [path(1)], 2: [path(2)]})
    capacities = {f"rail{rail}": Estimate(bps, bps, NOW, True) for rail, bps in carries.items()}
    paths = {path(1): first(policy), path(2): good(policy)}
    (plan,) = decide(policy, paths, [known], NOW, capacities)
    return plan


def test_a_path_that_carries_as_much_as_any_is_not_taken_down():
    plan = balanced({1: 9e6, 2: 6e6}, bad)
    assert plan.after == ORIGINAL
    assert plan.granted == ()
    [(where, why)] = plan.held
    assert where == path(1) and mentions(why, "held", "carries", "as much as any")
    assert balanced({1: 6e6, 2: 6e6 * 5 / 3}, bad).after == ((11, 6), (12, 10))


def three(first, second, third, share=0.5):
    policy = parse(POLICY.replace("max_drained_share: 0.5", f"max_drained_share: {share}"))
    states = {path(1): first, path(2): second, path(3): third}
    return one(policy, states, group({rail: [path(rail)] for rail in (1, 2, 3)}))


def test_no_more_than_the_allowed_share_is_taken_away_oldest_first():
    plan = three(bad(for_ns=SECOND), bad(for_ns=2 * SECOND), good())
    assert plan.after == ((11, 1), (13, 1))
    assert plan.granted == ((path(2), 0.0),)
    [(where, why)] = plan.held
    assert where == path(1) and mentions(why, "held", "max_drained_share", "0.5")
    assert three(bad(), bad(), good(), share=0.7).after == ((13, 1),)


def test_the_share_is_of_the_weight_not_of_the_members():
    states = {path(1): bad(), path(2): good()}
    heavy = group({1: [path(1)], 2: [path(2)]}, weights={11: 3, 12: 1})
    assert one(POLICY_OF_TWO, states, heavy).after == ((11, 3), (12, 1))
    light = group({1: [path(1)], 2: [path(2)]}, weights={11: 1, 12: 3})
    assert one(POLICY_OF_TWO, states, light).after == ((12, 3),)


def test_a_returning_path_has_the_share_of_its_step():
    coming = state(POLICY_OF_TWO, 0, then="returning")
    plan = two_rails(coming, good(), current={12: 1})
    assert (plan.after, plan.paths) == (((11, 1), (12, 10)), (path(1),))
    assert two_rails(replace(coming, step=1, share=0.5), good(), current={12: 1}).after == ((11, 5), (12, 10))
    assert two_rails(replace(coming, step=2, share=1.0), good(), current={12: 1}).after == ORIGINAL


def test_a_relapse_on_the_way_back_goes_down_again():
    coming = state(POLICY_OF_TWO, 20 * MS, then="returning")
    plan = two_rails(coming, good(), current={11: 1, 12: 10})
    assert plan.after == ((12, 1),)
    assert plan.granted == ((path(1), 0.0),)


def three_hosts():
    paths = {rail: [path(rail, host) for host in ("h2", "h3", "h4")] for rail in (1, 2)}
    return paths, {each: good() for several in paths.values() for each in several}


def test_the_worst_paths_over_a_member_count():
    paths, states = three_hosts()
    states |= {path(1, "h3"): bad(), path(1, "h4"): bad()}
    plan = one(POLICY_OF_TWO, states, group(paths))
    assert plan.after == ((12, 1),)
    assert plan.granted == ((path(1, "h3"), 0.0), (path(1, "h4"), 0.0))
    assert plan.alone == frozenset()


def test_one_address_alone_takes_nothing_from_the_others():
    paths, states = three_hosts()
    plan = one(POLICY_OF_TWO, states | {path(1, "h3"): bad()}, group(paths))
    assert plan.after == ORIGINAL and plan.alone == {"10.9.0.3"}
    [(where, why)] = plan.held
    assert where == path(1, "h3") and mentions(why, "held", "only h3", "route of its own")


def test_all_addresses_of_one_peer_are_one_opinion():
    paths, states = three_hosts()
    second = {rail: replace(path(rail, "h3"), address="10.9.0.33") for rail in paths}
    states |= {second[1]: bad(), second[2]: good(), path(1, "h3"): bad()}
    plan = one(POLICY_OF_TWO, states, group({rail: [*paths[rail], second[rail]] for rail in paths}))
    assert plan.after == ORIGINAL and plan.alone == {"10.9.0.3", "10.9.0.33"}


def test_two_addresses_that_mean_different_members_are_each_alone():
    paths, states = three_hosts()
    plan = one(POLICY_OF_TWO, states | {path(1, "h3"): bad(), path(2, "h4"): bad()}, group(paths))
    assert plan.after == ORIGINAL and plan.alone == {"10.9.0.3", "10.9.0.4"}


def test_an_address_with_a_target_of_its_own_is_a_witness_and_nothing_more():
    paths, states = three_hosts()
    apart = tuple((10 + rail, path(rail, "h4")) for rail in (1, 2))
    rest = {rail: several[:2] for rail, several in paths.items()}
    shared = dataclasses.replace(group(rest), witnesses=apart)
    gone = state(POLICY_OF_TWO, 20 * MS, then="drained")
    alone = one(POLICY_OF_TWO, states | {path(1, "h4"): gone}, shared)
    assert alone.after == ORIGINAL and alone.alone == frozenset() and not alone.held
    both = one(POLICY_OF_TWO, states | {path(1, "h4"): gone, path(1, "h3"): bad()}, shared)
    assert both.after == ((12, 1),) and both.granted == ((path(1, "h3"), 0.0),)


def test_a_destination_that_is_bad_everywhere_has_no_say_about_the_others():
    """A peer that stalls looks bad on every path; congestion toward another peer is still steered around."""
    paths = {1: [path(1, "h2"), path(1, "h3")], 2: [path(2, "h2"), path(2, "h3")]}
    stalled = {path(1, "h3"): good(), path(2, "h3"): good(), path(1, "h2"): bad(), path(2, "h2"): bad()}
    assert one(POLICY_OF_TWO, stalled, group(paths)).after == ORIGINAL


def test_a_destination_that_is_not_heard_of_at_all_has_no_say_either():
    paths = {1: [path(1, "h2"), path(1, "h3")], 2: [path(2, "h2"), path(2, "h3")]}
    gone = transitions.advance(POLICY_OF_TWO, state(POLICY_OF_TWO, 0, now=NOW - 10 * SECOND), NOW)
    states = {path(1, "h2"): bad(), path(2, "h2"): good(), path(1, "h3"): gone, path(2, "h3"): gone}
    assert one(POLICY_OF_TWO, states, group(paths)).after == ((12, 1),)


def test_a_group_that_nobody_measures_has_its_original_weights():
    assert one(POLICY_OF_TWO, {}, group({1: [], 2: []}, current={12: 1})).after == ORIGINAL


def test_a_group_reduced_by_somebody_else_is_never_emptied():
    down = state(POLICY_OF_TWO, 0, then="drained")
    alone = group({1: [path(1)]}, current={11: 1})
    assert one(POLICY_OF_TWO, {path(1): down}, alone).after == ((11, 1),)


def test_a_share_above_zero_stays_on_the_path():
    policy = parse(POLICY.replace("share: 0}", "share: 0.05}"))
    known = group({1: [path(1)], 2: [path(2)]})
    plan = one(policy, {path(1): state(policy, 20 * MS), path(2): good(policy)}, known)
    assert plan.after == ((11, 5), (12, 100))


def test_every_group_is_decided_by_itself():
    paths = {path(1): bad(), path(2): good()}
    first = group({1: [path(1)], 2: [path(2)]})
    second = dataclasses.replace(group({1: [], 2: []}), target="nexthop_group:103")
    plans = {plan.target: plan for plan in decide(POLICY_OF_TWO, paths, [first, second], NOW)}
    assert plans[TARGET].after == ((12, 1),)
    assert plans["nexthop_group:103"].after == ORIGINAL


def test_it_is_a_function_of_its_arguments():
    paths = {path(1): bad(), path(2): good()}
    known = group({1: [path(1)], 2: [path(2)]})
    before = dict(paths)
    assert decide(POLICY_OF_TWO, paths, [known], NOW) == decide(POLICY_OF_TWO, paths, [known], NOW)
    assert paths == before


# ---- members that stand by ----


def standing_by(*weights):
    """A target over so many rails; those of weight 0 stand by."""
    known = group({rail: [path(rail)] for rail in range(1, len(weights) + 1)})
    members = tuple(dataclasses.replace(m, weight=w) for m, w in zip(known.members, weights, strict=True))
    known = dataclasses.replace(known, members=members)
    return dataclasses.replace(known, current=known.original)


def wanted(known, *conditions):
    paths = {path(rail): bad() if condition == "bad" else good() for rail, condition in enumerate(conditions, 1)}
    return one(POLICY_OF_TWO, paths, known).after


def test_one_that_stands_by_carries_nothing_while_all_is_well():
    assert wanted(standing_by(1, 0), "good", "good") == ((11, 1),)
    assert wanted(standing_by(2, 3, 0), "good", "good", "good") == ((11, 2), (12, 3))


def test_one_that_stands_by_takes_over_from_the_only_one_that_carries():
    assert wanted(standing_by(1, 0), "bad", "good") == ((12, 1),)
    assert wanted(standing_by(1, 0), "bad", "bad") == ((11, 1),), "every path looks bad"


def test_one_that_stands_by_waits_until_the_last_of_several_carriers_is_left():
    assert wanted(standing_by(1, 1, 0), "bad", "good", "good") == ((12, 1),)
    drained = Overrides((Override("drain", interface="rail1"), Override("drain", interface="rail2")))
    paths = {path(rail): good() for rail in (1, 2, 3)}
    [plan] = decide(POLICY_OF_TWO, paths, [standing_by(1, 1, 0)], NOW, overrides=drained)
    assert plan.after == ((13, 1),)
