"""The nexthop actuator on the kernel; `ip -j nexthop` is the judge."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, GROUP, ORIGINAL, SECOND_HOP, TARGET

from pytools.kernel.netlink import Netlink
from steering.acting import journal, settle
from steering.actuators import topology
from steering.actuators.nexthops import NexthopGroups
from steering.plan import nexthop_group

KNOWN = kit.group({1: [], 2: []})
DRAINED = ((SECOND_HOP, 1),)
STEP = ((FIRST, 1), (SECOND_HOP, 10))
MANAGED = ("10.9.0.0/16", "fd00:9::/64")


@pytest.fixture(params=["mpath", "resilient"])
def host(request, make_namespace):
    return kit.two_rails(make_namespace(), make_namespace(), request.param)


@pytest.fixture
def groups(host):
    with Netlink(host.netns) as netlink:
        yield NexthopGroups(netlink)


def described(host):
    (found,) = json.loads(host.ip("-j", "-d", "nexthop", "list", "id", str(GROUP)))
    return found


@pytest.mark.guest
def test_weights_are_changed_in_place_and_read_back(host, groups):
    before = described(host)
    outcome = groups.apply(KNOWN, [ORIGINAL], STEP)
    assert (outcome.kind, outcome.weights) == ("applied", STEP)
    assert outcome.acknowledged_ns is not None
    assert host.weights() == dict(STEP)
    assert groups.apply(KNOWN, [STEP], DRAINED).kind == "applied"
    assert host.weights() == dict(DRAINED)
    after = described(host)
    for name in ("type", "protocol", "resilient_args"):
        assert after.get(name) == before.get(name), f"{name} is kept"
    assert "nhid 102" in host.ip("route", "show", "10.9.0.2")


def test_undo_gives_the_original_weights(host, groups):
    groups.apply(KNOWN, [ORIGINAL], DRAINED)
    assert groups.undo(KNOWN, [DRAINED]).kind == "applied"
    assert host.weights() == dict(ORIGINAL)
    assert groups.undo(KNOWN, [DRAINED]).kind == "applied", "and again, to no effect"


def test_an_empty_group_is_never_made(host, groups):
    with pytest.raises(ValueError, match="without a nexthop"):
        groups.apply(KNOWN, [ORIGINAL], ())
    assert host.weights() == dict(ORIGINAL)


def test_what_somebody_else_changed_stays(host, groups):
    host.ip("nexthop", "replace", "id", str(GROUP), "group", f"{FIRST},3/{SECOND_HOP},4", *_type(host))
    theirs = {FIRST: 3, SECOND_HOP: 4}
    outcome = groups.apply(KNOWN, [ORIGINAL], DRAINED)
    assert outcome.kind == "manual" and "11,3/12,4" in outcome.why
    assert groups.undo(KNOWN, [DRAINED]).kind == "manual"
    assert host.weights() == theirs


def _type(host):
    return ["type", "resilient"] if described(host).get("type") == "resilient" else []


def test_a_group_that_is_gone(host, groups):
    host.ip("nexthop", "delete", "id", str(GROUP))
    assert groups.apply(KNOWN, [ORIGINAL], DRAINED).kind == "gone"
    assert groups.undo(KNOWN, [DRAINED]).kind == "gone"
    assert groups.weights(KNOWN) is None


def test_a_refusal_is_told_in_the_kernels_words(host, groups):
    outcome = groups.apply(KNOWN, [ORIGINAL], ((FIRST, 1), (77, 1)))
    assert outcome.kind == "failed" and outcome.why
    assert outcome.weights == ORIGINAL
    assert host.weights() == dict(ORIGINAL)


@pytest.mark.guest
def test_undo_after_the_kernel_dropped_a_member_with_its_carrier(host, groups):
    groups.apply(KNOWN, [ORIGINAL], STEP)
    host.ip("link", "set", "rail1", "down")
    support.wait_until(lambda: host.weights() == {SECOND_HOP: 10}, 10, "the kernel drops the nexthop")
    outcome = groups.undo(KNOWN, [STEP])
    assert outcome.kind == "applied" and "without 10.1.1.1 dev rail1" in outcome.why
    assert host.weights() == {SECOND_HOP: 1}


def test_a_nexthop_that_is_somebody_elses_by_now_is_left_out(host, groups):
    groups.apply(KNOWN, [ORIGINAL], DRAINED)
    host.ip("nexthop", "delete", "id", str(FIRST))
    host.ip("nexthop", "add", "id", str(FIRST), "via", "10.2.1.77", "dev", "rail2")
    outcome = groups.undo(KNOWN, [DRAINED])
    assert outcome.kind == "applied" and "without 10.1.1.1 dev rail1" in outcome.why
    assert host.weights() == {SECOND_HOP: 1}


def test_settling_a_journal_undoes_what_is_outstanding_and_nothing_else(host, groups, tmp_path):
    host.ip("nexthop", "add", "id", "103", "group", f"{FIRST},2/{SECOND_HOP},5", "proto", "201")
    here = "here"

    def entry(kind, group_id, before, after, scope=here):
        group = replace(KNOWN, target=nexthop_group(group_id))
        return journal.entry_now(kind, "a", group, before, after, "why", "rule", scope)

    with journal.Journal(tmp_path / "journal.jsonl") as log:
        log.write(entry("intent", GROUP, ORIGINAL, DRAINED))
        groups.apply(KNOWN, [ORIGINAL], DRAINED)
        log.write(entry("intent", 103, ORIGINAL, DRAINED))  # somebody changed it since
        log.write(entry("intent", 104, ORIGINAL, DRAINED))  # there is none
        log.write(entry("intent", 105, ORIGINAL, DRAINED, scope="another boot"))
        done = {each.target: each.outcome.kind for each in settle.settle(log, groups, here, "command")}
        assert done == {TARGET: "applied", nexthop_group(103): "manual", nexthop_group(104): "gone"}
        assert host.weights() == dict(ORIGINAL)
        assert host.weights(103) == {FIRST: 2, SECOND_HOP: 5}
        assert log.read().outstanding(here) == {}
        assert settle.settle(log, groups, here, "command") == []
        kinds = [each.kind for each in log.read().entries]
    assert kinds[-3:] == ["undone", "released", "released"]


def test_every_group_is_undone_even_when_the_disk_is_full(host, groups, tmp_path, monkeypatch):
    host.ip("nexthop", "add", "id", "103", "group", str(SECOND_HOP), "proto", "201")
    with journal.Journal(tmp_path / "journal.jsonl") as log:
        for group_id in (GROUP, 103):
            group = replace(KNOWN, target=nexthop_group(group_id))
            log.write(journal.entry_now("intent", "a", group, ORIGINAL, DRAINED, "", "", "here"))
        groups.apply(KNOWN, [ORIGINAL], DRAINED)

        def full(_entry):
            raise OSError(28, "the disk is full")

        monkeypatch.setattr(log, "write", full)
        with pytest.raises(OSError, match="full"):
            settle.settle(log, groups, "here", "guardian")
    assert host.weights() == host.weights(103) == dict(ORIGINAL)


# ---- which groups may be steered ----


def found(host):
    with Netlink(host.netns) as netlink:
        return topology.find(netlink, MANAGED)


def test_a_group_that_carries_a_managed_route_is_found_with_its_members(host):
    known = found(host).groups[TARGET]
    assert known.destinations == ("10.9.0.2/32",)
    assert [(m.nexthop_id, m.gateway, m.interface, m.weight) for m in known.members] == [
        (FIRST, "10.1.1.1", "rail1", 1),
        (SECOND_HOP, "10.2.1.1", "rail2", 1),
    ]
    assert known.current == ORIGINAL


def test_a_group_that_carries_any_other_route_is_left_alone(host):
    host.ip("route", "add", "10.8.0.0/16", "nhid", str(GROUP))
    assert TARGET not in found(host).groups
    assert "10.8.0.0/16" in found(host).refused[TARGET]


def test_a_group_without_a_managed_route_is_not_even_looked_at(host):
    host.ip("route", "delete", "10.9.0.2/32")
    known = found(host)
    assert known.groups == {} and known.refused == {}


def test_an_address_is_reached_by_its_longest_prefix_and_lowest_metric(host):
    host.ip("nexthop", "add", "id", "103", "group", str(FIRST))
    host.ip("route", "add", "10.9.0.0/24", "nhid", "103")
    host.ip("route", "add", "10.9.0.2/32", "via", "10.1.1.1", "dev", "rail1", "metric", "500")
    known = found(host)
    assert known.target_of("10.9.0.2") == TARGET
    assert known.target_of("10.9.0.3") == nexthop_group(103)
    assert known.target_of("10.10.0.1") is None
    assert known.target_of("nonsense") is None
    assert known.target_of("fd00::1") is None


def test_ipv6_groups_are_found_too(host):
    for rail in (1, 2):
        host.ip("address", "add", f"fd00:{rail}:1::2/64", "dev", f"rail{rail}", "nodad")
        via = ["via", f"fd00:{rail}:1::1", "dev", f"rail{rail}"]
        host.ip("-6", "nexthop", "add", "id", str(20 + rail), *via)
    host.ip("nexthop", "add", "id", "202", "group", "21/22")
    host.ip("-6", "route", "add", "fd00:9::2/128", "nhid", "202")
    known = found(host)
    assert [member.gateway for member in known.groups[nexthop_group(202)].members] == ["fd00:1:1::1", "fd00:2:1::1"]
    assert known.target_of("fd00:9::2") == nexthop_group(202)
    with Netlink(host.netns) as netlink:
        groups = NexthopGroups(netlink)
        assert groups.apply(known.groups[nexthop_group(202)], [((21, 1), (22, 1))], ((22, 1),)).kind == "applied"
        assert groups.undo(known.groups[nexthop_group(202)], [((22, 1),)]).kind == "applied"
