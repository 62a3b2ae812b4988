"""What is managed and what is not, said at the start and in `status`: short, with a reason and a remedy for each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from steering_kit import POLICY, group, path
from support import mentions

from steering.actuators.overlay import Found
from steering.commands import status
from steering.control import managed
from steering.control.managed import Managed
from steering.plan import overlay_target
from steering.policy.file import parse

FACTS: dict[str, Any] = {
    **{"running": True, "answers": True, "apply": True, "policy_changed": False, "confirm": None, "frozen": ""},
    **{"orders": [], "in_force": [], "paths": [], "torn_lines": 0},
}


def target(number=0, prefixes=1, **changes):
    named = tuple(f"10.9.{number % 250}.{n % 250}/32" for n in range(prefixes))
    made = group({1: [], 2: []})
    return replace(made, target=overlay_target("main", named[0]), destinations=named, **changes)


def found(groups=(), refused=None):
    return Found({each.target: each for each in groups}, refused or {}, frozenset(), frozenset(), (), ())


def said(policy, *seen):
    """What a policy's controller says, look by look."""
    one = Managed(parse(policy))
    return [list(one.take(each)) for each in seen], one


def test_the_start_names_targets_with_their_hops():
    standing_by = replace(target(1, 3), members=tuple(replace(m, weight=m.nexthop_id - 11) for m in target().members))
    [[*lines]], _ = said(POLICY, found([target(0), standing_by]))
    count, plain, with_one_by = lines
    assert mentions(count, "managed", "2 targets", "4 prefixes")
    hops = (("10.1.1.1", "rail1"), ("10.2.1.1", "rail2"))
    assert mentions(plain, "10.9.0.0/32", *hops[0], "weight 1", *hops[1], "weight 1") and "more" not in plain
    assert mentions(with_one_by, "10.9.1.0/32", "2 more prefixes", *hops[0], "stands by", *hops[1], "weight 1")


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("it has one hop: there is nothing to choose (manage.alternatives names more)", "manage.alternatives"),
        ("a route to it is for one type of service or one source only", "without tos"),
        ("a hop of it encapsulates, or leads nowhere", "the tunnel's destination"),
        ("a weight > 256", "smaller weights"),
        ("routing table 20000 is used by protocol bgp (10.0.0.0/8)", "manage.table"),
    ],
)
def test_each_reason_comes_with_what_to_do(reason, remedy):
    [lines], _ = said(POLICY, found(refused={"10.9.1.0/24": reason}))
    assert mentions(lines[0], "nothing is managed", "no rule")
    [line] = lines[1:]
    assert line.startswith(f"not managed: 10.9.1.0/24: {reason}; ") and remedy in line


@pytest.mark.parametrize("more", ["", "ports: {}\n"])
def test_a_policy_that_only_holds_misses_no_target(more: str) -> None:
    rules = "rules: [{name: short, then: {hold: {}}}]\n"
    policy = "version: 1\nmanage: {destinations: [10.9.0.0/16], vrfs: [nowhere]}\n" + rules + more
    one_hop = {"10.9.1.0/24": "it has one hop: there is nothing to choose"}
    (lines, later), _ = said(policy, found(), found(refused=one_hop))
    if more:
        assert lines[0].startswith("nothing is managed") and "no route over a gateway" in lines[1]
    else:
        assert mentions(lines[0], "no target", "needed", "hold")
        [refused] = lines[1:]
        assert mentions(refused, "not managed", "nowhere", "no such interface")
    assert later == []


def test_what_has_no_route_is_named():
    [lines], _ = said(POLICY, found())
    assert lines[1].startswith("not managed: 10.9.0.0/16: no route over a gateway leads to it; see `ip route get`")


def test_a_reason_that_is_not_known_here_leads_to_the_page():
    [[_, line, *_]], _ = said(POLICY, found(refused={"10.9.1.0/24": "it is odd"}))
    assert "it is odd; see" in line and "overlay.md" in line


def test_what_the_policy_names_and_is_not_there():
    more = 'destinations: [10.9.0.0/16, 10.8.0.0/16, "fd00:9::/64"], vrfs: [nowhere]'
    [lines], _ = said(POLICY.replace("destinations: [10.9.0.0/16]", more), found([target()]))
    assert any(mentions(line, "10.8.0.0/16", "fd00:9::/64", "no route", "gateway") for line in lines)
    assert any(mentions(line, "nowhere", "no such interface") for line in lines)


def test_a_rule_that_relabels_without_a_target_of_ipv6():
    more = '[10.9.0.0/16, "fd00:9::/64"]'
    relabel = POLICY.replace("[10.9.0.0/16]", more).replace("{shift: {share: 0}}", "{relabel: {}}")
    [lines], _ = said(relabel, found([target()]))
    assert any(mentions(line, "not managed", "leave-congested-rail", "relabels") for line in lines)


def test_ten_thousand_prefixes_get_a_short_answer():
    refused = {f"10.{a}.{b}.0/24": "it has one hop: nothing to choose" for a in range(100) for b in range(100)}
    groups = [target(number, 40) for number in range(250)]
    [lines], one = said(POLICY, found(groups, refused))
    assert len(lines) <= 15 and max(map(len, lines)) < 300
    assert mentions(lines[0], "managed", "250 targets", "10,000 prefixes") and "  and 240 more targets" in lines
    assert lines[-1].startswith("not managed: 10.0.0.0/24, 10.0.1.0/24, 10.0.2.0/24 and 9,997 more: it has one hop")
    facts = one.facts({each.target: each for each in groups})
    assert len(json.dumps(facts)) < 12_000 and facts["not_managed"][0]["count"] == 10_000


def test_later_only_what_is_new_is_said():
    one, other = target(0), target(1)
    many = {f"10.9.{n}.0/24": "it has one hop" for n in range(20)}
    (_, same, more, fewer), _ = said(
        POLICY, found([one]), found([one]), found([one, other], many), found([other], many)
    )
    assert same == [] and fewer == []
    assert mentions(more[0], "10.9.1.0/32", "managed") and "not managed" not in more[0]
    assert mentions(more[1], "10.9.0.0/24", "not managed", "one hop")
    assert mentions(more[-1], "15 more prefixes", "not managed") and len(more) == 7


def test_status_shows_it_and_whether_anything_is_measured():
    one = Managed(parse(POLICY))
    list(one.take(found([target(0), target(1)])))
    measured = replace(target(0), paths=((11, path(1)),))
    facts = FACTS | {"managed": one.facts({each.target: each for each in (measured, target(1))})}
    lines = [line for line in status.lines_of(facts) if "routes to" in line]
    assert "no peer" not in lines[0] and lines[1].endswith("no peer of the agent is reached by it")
    assert list(managed.lines(facts["managed"], started=True))[2] == lines[1].partition(";")[0]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"label_count": 2, "labels": []}, "no weights of ours are in force, but 2 labels"),
        ({"pin_count": 1, "standbys": 4}, "no weights of ours are in force, but 1 pins, 4 stand-bys"),
        ({"label_count": 0, "standbys": 0}, "nothing of ours is in force"),
    ],
)
def test_labels_pins_and_standbys_are_in_force(more, shown):
    assert shown in status.lines_of(FACTS | more)


@pytest.mark.parametrize(
    ("why", "shown"), [("", "fast reroute: 2 paths have"), ("nobody guards", "no fast reroute: nobody guards")]
)
def test_standbys_that_may_not_be_used_are_none(why, shown):
    lines = list(status.lines_of(FACTS | {"standbys": 0 if why else 2, "standbys_missing": why}))
    assert next(line for line in lines if "fast reroute" in line).startswith(shown)


def test_a_label_is_shown_with_its_flow():
    flow = {"protocol": 6, "local": "fd00:9::1", "local_port": 1, "remote": "fd00:9::2", "remote_port": 2}
    labels = [{"flow": flow, "label": 0x123, "expires_ns": 1}]
    lines = list(status.lines_of(FACTS | {"label_count": 2, "labels": labels}))
    assert (
        "relabelled: tcp:[fd00:9::1]:1-[fd00:9::2]:2 has flow label 0x00123" in lines and "and 1 more labels" in lines
    )


def test_with_ports_a_prefix_with_one_hop_is_managed_by_them():
    one_hop = {"10.9.1.0/24": "it has one hop: there is nothing to choose", "fd00:9::/64": "it has one hop: too"}
    policy = POLICY.replace("[10.9.0.0/16]", '[10.9.0.0/16, "fd00:9::/64"]') + "ports: {}\n"
    [lines, later], _ = said(policy, found(), found(refused=one_hop))
    assert lines[0].startswith("nothing is managed")
    assert [line.partition(": it")[0] for line in later] == ["fd00:9::/64 is not managed"]
    [[first, *others]], _ = said(policy, found(refused=one_hop))
    assert mentions(first, "managed", "ports", "labels", "1 prefix", "one hop")
    assert [line.partition(": it")[0] for line in others] == ["not managed: fd00:9::/64"]
