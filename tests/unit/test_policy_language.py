"""The language: trees, actions, scopes, priorities; what does not go together, all of it at once; the explanation."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import HEAD, MS, SECOND, faults, only_fault, rule
from steering_kit import path
from support import mentions

from pytools.signals import Owner, Path
from pytools.units import parse_rate, rate_text
from steering.plan import FlowKey
from steering.policy.actions import Pin, Relabel, Shift
from steering.policy.conditions import SIGNALS, All, AnyOf, CeShare, LinkState, Loss, Not, QueueingDelay, leaves
from steering.policy.conditions_text import condition_text
from steering.policy.explanation import explain
from steering.policy.file import InvalidPolicyError, parse
from steering.policy.model import signals_of
from steering.policy.schema import json_schema
from steering.policy.scope import Scope

SILENT = "{signal: silence}"
LOSS = "{signal: loss, above: 0.5, clear_below: 0.1}"
NO_SIGNAL = ['"signal"', "missing", *SIGNALS, "all", "any", "not"]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def one(when: str = SILENT, then: str = "{drain: {}}", more: str = ""):
    return parse(rule(when, then, more)).rules[0]


def several(*rules: str) -> str:
    return HEAD + "".join(f"  - {{when: {SILENT}, {each}}}\n" for each in rules)


# ---- conditions ----


def test_a_tree():
    found = one(f"{{all: [{SILENT}, {{any: [{LOSS}, {{not: {LOSS}}}]}}]}}").when
    assert isinstance(found, All) and isinstance(found.all[1], AnyOf) and isinstance(found.all[1].any[1], Not)
    assert [leaf.signal for leaf in leaves(found)] == ["silence", "loss", "loss"]
    assert isinstance(found.all[1].any[1].not_, Loss)
    assert hash(found) == hash(one(f"{{all: [{SILENT}, {{any: [{LOSS}, {{not: {LOSS}}}]}}]}}").when)


def test_defaults():
    silence = one().when
    assert (silence.missed, silence.for_, silence.fall) == (3, 0, 1)
    marks = one("{signal: ce_share, above: 0.1, clear_below: 0.01}").when
    assert isinstance(marks, CeShare) and (marks.direction, marks.at_least) == ("out", 100)
    flap = one("{signal: link, event: flap}").when
    assert isinstance(flap, LinkState) and flap.hold == 10 * SECOND


@pytest.mark.parametrize(
    ("when", "failure", "by_traffic"),
    [
        (SILENT, True, False),
        ("{signal: link, event: carrier_lost}", True, False),
        ("{signal: link, event: flap}", False, False),
        (LOSS, False, False),
        ("{signal: rdma, verdict: dead}", False, True),
        ("{signal: retransmits, above: 0.1, clear_below: 0.01}", False, True),
    ],
)
def test_what_a_leaf_stands_for(when, failure, by_traffic):
    leaf = one(when).when
    assert (leaf.failure, leaf.by_traffic) == (failure, by_traffic)


@pytest.mark.parametrize(
    ("when", "where", "facts", "hint"),
    [
        ("{all: []}", "when.all", ["at least one entry", "empty list"], ""),
        ("{all: 3}", "when.all", ["at least one entry", "3"], ""),
        (f"{{all: [{SILENT}], any: [{SILENT}]}}", "when.any", ["unknown", '"any"', "only all"], ""),
        (f"{{not: [{SILENT}]}}", "when.not", ["mapping", "signal", "all", "any", "not", "a list"], ""),
        ("nothing", "when", ["mapping", "signal", "all", "any", "not", '"nothing"'], ""),
        ("{any: [{not: {signal: loss, above: x, clear_below: 0.1}}]}", "when.any[0].not.above",
         ["from 0", "below 1", '"x"'], ""),
        ("{all: [{signal: link, event: flapp}]}", "when.all[0].event",
         ["carrier_lost", "neighbour_failed", "mtu_mismatch", "port_down", "flap", "queue_full", "pause_storm",
          "gid_changed", '"flapp"'], "flap"),
        ("{signal: link, event: carrier_lost, hold: 3s}", "when.hold",
         ["no hold", "carrier_lost", "carrier_found", '"3s"'], ""),
        ("{signal: silence, missed: 1}", "when.missed", ["whole number", "from 2 to 1000000", "1"], ""),
        ("{signal: rdma, verdict: dead, share: 0}", "when.share", ["above 0", "up to 1", "0"], ""),
        ("{signal: rdma, verdict: dead, share: 0.1, clear_below: 0.5}", "when.clear_below",
         ["at most share", "0.1", "0.5"], ""),
        ("{signal: silence, above: 3}", "when.above",
         ["unknown", '"above"', "fall", "for", "lasting", "missed", "signal"], ""),
        ("{signl: silence}", "when.signal", NO_SIGNAL, "signal"),
        ("{nto: {signal: silence}}", "when.signal", NO_SIGNAL, "not"),
    ],
)  # fmt: skip
def test_a_fault_in_a_condition_is_named_with_its_place(when, where, facts, hint):
    only_fault(rule(when), 5, f"rules[0].{where}", facts, hint)


def test_deep_trees_are_refused_not_followed():
    deep = SILENT
    for _ in range(2000):
        deep = f"{{not: {deep}}}"
    assert "nested too deeply" in faults(rule(deep))[0].what


# ---- actions ----


def test_what_a_rule_does():
    shift = one(then="{shift: {by: headroom, step: 0.25, settle: 2s}}").then
    assert isinstance(shift.action, Shift)
    assert (shift.kind, shift.share, shift.action.by, shift.action.settle) == ("shift", 1.0, "headroom", 2 * SECOND)
    assert (one().then.kind, one().then.share) == ("drain", 0.0)
    assert one(then="{shift: {share: 0.3}}", more="    return: {steps: [1.0]}").then.share == 0.3
    pin = one(then="{pin: {flows: {min_rate: 1.5gbit, at_most: 3}, gain: 0.2, lease: 5s}}").then
    assert isinstance(pin.action, Pin) and pin.share == 1.0
    assert (pin.action.flows.min_rate, pin.action.flows.at_most, pin.action.gain) == (1_500_000_000, 3, 0.2)
    assert isinstance(one(then="{relabel: {}}").then.action, Relabel)
    assert one(then="{alert: {}}").then.kind == "alert"


MAIN = ("shift", "drain", "pin", "spread", "relabel", "hold", "alert")  # a rule has one of them
DELAY = "{signal: queueing_delay, above: 5ms, clear_below: 1ms"


@pytest.mark.parametrize(
    ("when", "at"),
    [
        (f"{DELAY}, for: 40ms, samples: 3}}", "when.samples"),
        (f"{{all: [{{not: {DELAY}, for: 40ms, samples: 3}}}}]}}", "when.all[0].not.samples"),
    ],
)
def test_time_and_samples_are_mutually_exclusive(when, at):
    only_fault(rule(when), 5, f"rules[0].{at}", ["for", "samples", "not both"])


@pytest.mark.parametrize("when", [f"{DELAY}, samples: 0}}", "{signal: loss, above: 0.5, clear_below: 0.1, samples: 3}"])
def test_samples_are_of_delays_and_one_at_least(when):
    (fault,) = faults(rule(when))
    assert fault.where == "rules[0].when.samples"


def test_samples_in_words():
    found = parse(rule(f"{DELAY}, samples: 3}}")).rules[0].when
    assert isinstance(found, QueueingDelay) and (found.samples, found.for_) == (3, 0)
    facts = ("p50 queueing delay", "above 5 ms", "more than its error", "3 samples at least")
    assert mentions(condition_text(found), *facts)


@pytest.mark.parametrize(
    ("then", "where", "facts", "hint"),
    [
        ("{}", "then", ["exactly one", *MAIN, "none"], ""),
        ("3", "then", ["mapping", *MAIN, "notify", "3"], ""),
        ("{drain: {}, alert: {}}", "then.alert", ["exactly one", *MAIN, "drain and alert"], ""),
        ("{drain: }", "then.drain", ["empty mapping", "{}", "nothing"], ""),
        ("{drian: {}}", "then.drian", ["unknown", '"drian"', *sorted([*MAIN, "notify"])], "drain"),
        ("{shift: {share: 0.5, by: capacity}}", "then.shift.share", ["share", "by: capacity", "not both"], ""),
        ("{shift: {step: 0}}", "then.shift.step", ["above 0", "up to 1", "0"], ""),
        ("{shift: {settle: 0s}}", "then.shift.settle", ["more than 0", '"0s"'], ""),
        ("{pin: {flows: {min_rate: 10}}}", "then.pin.flows.min_rate", ["unit", "10mbit", "1gbit", "10"], ""),
        ("{pin: {flows: {min_rate: 10 Mbps}}}", "then.pin.flows.min_rate",
         ["unit", "10mbit", "1gbit", '"10 Mbps"'], "10mbit"),
        ("{pin: {flows: {at_most: 2000}}}", "then.pin.flows.at_most", ["whole number", "from 1 to 1000", "2000"], ""),
        ("{pin: {lease: 500ms}}", "then.pin.lease", ["between 1s and 10m", '"500ms"'], ""),
    ],
)  # fmt: skip
def test_a_fault_in_an_action_is_named_with_its_place(then, where, facts, hint):
    only_fault(rule(SILENT, then), 6, f"rules[0].{where}", facts, hint)


@pytest.mark.parametrize(
    ("managed", "scope", "where"),
    [
        ("[10.9.0.0/16]", "{}", "manage.destinations"),
        ('[10.9.0.0/16, "fd00:9::/64"]', "{destinations: [10.9.1.0/24, 10.9.2.0/24]}", "scope.destinations"),
        ('["fd00:9::/64"]', "{flows: {remote: [10.9.1.0/24]}}", "scope.flows.remote"),
        ('["fd00:9::/64"]', '{destinations: [10.9.0.0/16, "fd00:9::/64"]}', ""),
    ],
)
def test_a_label_is_for_what_has_labels(managed: str, scope: str, where: str) -> None:
    text = f"version: 1\nmanage: {{destinations: {managed}}}\nrules:\n"
    text += f"  - {{name: r, when: {SILENT}, scope: {scope}, then: {{relabel: {{}}}}}}\n"
    if not where:
        assert parse(text).rules[0].then.kind == "relabel"
        return
    only_fault(text, 4, "rules[0].then.relabel", ["never acts", "IPv4", "IPv6", where])


def test_a_way_back_is_for_what_moves_something():
    back = "    return: {rise: 200}\n"
    only_fault(rule(SILENT, "{alert: {}}", back), 7, "rules[0].return", ["alert"])
    for then in ("{drain: {}}", "{pin: {}}", "{relabel: {}}"):
        assert one(SILENT, then, back).return_.rise == 200


def test_a_rule_that_spreads_has_no_condition_one_that_holds_may_have_one_and_every_other_has_one() -> None:
    head = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nrules:\n  - {name: r, then: "
    found = parse(f"{head}{{spread: {{flows: {{at_most: 8}}}}}}}}")
    assert (found.rules[0].when, found.rules[0].then.kind) == (None, "spread")
    assert signals_of(found) == {"path_delay", "tcp_flow", "link"}
    (line,) = [line for line in explain(found).splitlines() if line.startswith("1. ")]
    assert mentions(line, "r: on a path", "healthy", "up to 8 live flows", "10 Mbit/s or more", "move together")
    text = f"{head}{{spread: {{}}, notify: [x]}}, when: {SILENT}, return: {{rise: 2}}}}\nhooks: {{x: {{slurm: {{}}}}}}"
    wrong, keys = faults(text), ("return", "then.notify", "when")
    assert [(each.line, each.where) for each in wrong] == [(4, f"rules[0].{key}") for key in keys]
    assert all(mentions(each.what, "only without spread", "healthy") for each in wrong)
    assert not VALIDATOR.is_valid(yaml.safe_load(text))
    held = text.replace("spread", "hold")
    of_holds = [replace(each, what=each.what.replace("spread", "hold")) for each in wrong[:2]]
    assert list(faults(held)) == of_holds
    assert not VALIDATOR.is_valid(yaml.safe_load(held))
    assert VALIDATOR.is_valid(yaml.safe_load(f"{head}{{hold: {{dwell: 5s}}}}, when: {SILENT}}}"))
    (line,) = [
        each
        for each in explain(parse(f"{head}{{hold: {{dwell: 5s}}}}, when: {SILENT}}}")).splitlines()
        if each.startswith("1. ")
    ]
    assert mentions(line, "on a path, when", "until 5 s after", "packets wait at this host")
    assert VALIDATOR.is_valid(yaml.safe_load(f"{head}{{hold: {{threshold: 2ms, qdisc: fq}}}}}}"))
    for then in ("{pin: {}}", "{drain: {}}", "{alert: {}}"):
        only_fault(f"{head}{then}}}", 4, "rules[0].when", ['"when" is missing', "condition"])
        assert not VALIDATOR.is_valid(yaml.safe_load(f"{head}{then}}}"))


@given(st.integers(0, 10**6), st.sampled_from(["bit", "kbit", "mbit", "gbit"]))
def test_rates_are_exact(number, unit):
    size = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}[unit]
    assert parse_rate(f"{number}{unit}") == number * size
    assert parse_rate(f"{number}.5{unit}") == number * size + size // 2


@pytest.mark.parametrize(
    ("bps", "text"), [(0, "0 bit/s"), (999, "999 bit/s"), (10**7, "10 Mbit/s"), (2_500_000_000, "2.5 Gbit/s")]
)
def test_rates_in_words(bps, text):
    assert rate_text(bps) == text


# ---- scope ----


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ("{}", True),
        ("{paths: ['h1>h2']}", True),
        ("{paths: ['h1>h3']}", False),
        ("{paths: ['h1>h3', '*>h?']}", True),
        ("{destinations: [10.9.0.0/24]}", True),
        ("{destinations: [10.8.0.0/24, 'fd00::/8']}", False),
        ("{interfaces: ['rail*']}", True),
        ("{interfaces: [rail2]}", False),
        ("{nexthops: [10.1.1.1]}", True),
        ("{nexthops: [10.2.1.1]}", False),
        ("{nexthops: [10.1.1.1], interfaces: [rail2]}", False),  # everything named must fit
    ],
)
def test_where_a_rule_holds(scope, covered):
    assert one(more=f"    scope: {scope}\n").scope.covers(path(1)) is covered


def test_addresses_are_compared_however_they_are_written():
    over = Path("h1", "h2", "fd00:9:0:0::2", "fd00:0001::1", "rail1")
    assert one(more="    scope: {nexthops: ['fd00:1:0::1'], destinations: ['fd00:9::/64']}\n").scope.covers(over)


FLOW = FlowKey(6, "10.0.0.1", 40_000, "10.9.0.2", 29_500)
OWNER = Owner(pid=1, command="python3.11", cgroup="/kubepods/pod1/x")


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ("{}", True),
        ("{flows: {protocol: tcp}}", True),
        ("{flows: {protocol: udp}}", False),
        ("{flows: {remote_port: 29500}}", True),
        ("{flows: {remote_port: [1, 29500]}}", True),
        ("{flows: {local_port: 29500}}", False),
        ("{flows: {remote: [10.9.0.0/24]}}", True),
        ("{flows: {remote: ['fd00::/8']}}", False),
        ("{processes: ['python*']}", True),
        ("{processes: [iperf3]}", False),
        ("{cgroups: ['/kubepods/*']}", True),
        ("{cgroups: ['/system.slice*']}", False),
    ],
)
def test_which_flows_are_meant(scope, covered):
    found = one(then="{pin: {}}", more=f"    scope: {scope}\n").scope
    assert found.covers_flow(FLOW, OWNER) is covered
    named = "processes" in scope or "cgroups" in scope
    assert found.covers_flow(FLOW, None) is (covered and not named)
    assert found.covers_flow(FLOW, Owner()) is (covered and not named)


@pytest.mark.parametrize(
    ("scope", "where", "facts", "hint"),
    [
        ("{flows: {}}", "scope.flows", ["only with pin, spread or relabel", "drain"], ""),
        ("{processes: [x]}", "scope.processes", ["only with pin, spread or relabel", "drain"], ""),
        ("{paths: []}", "scope.paths", ["at least one entry", "empty list"], ""),
        ("{paths: [h1]}", "scope.paths[0]", ["h1>h2", '"h1"'], ""),
        ("{destinations: [10.9.0.1/16]}", "scope.destinations[0]",
         ["prefix", "10.9.0.0/16", '"10.9.0.1/16"', "host bits"], "10.9.0.0/16"),
        ("{nexthops: [10.1.1.1/24]}", "scope.nexthops[0]",
         ["address", "10.1.1.1", "fd00::1", '"10.1.1.1/24"'], "10.1.1.1"),
        ("{nexthops: ['fe80::1%rail1']}", "scope.nexthops[0]",
         ["address", "10.1.1.1", "fd00::1", '"fe80::1%rail1"'], "fe80::1"),
        ("{nexthops: [h1]}", "scope.nexthops[0]", ["address", "10.1.1.1", "fd00::1", '"h1"'], ""),
        ("{interface: [x]}", "scope.interface",
         ["unknown", '"interface"', "cgroups", "destinations", "flows", "interfaces", "nexthops", "paths",
          "processes"], "interfaces"),
    ],
)  # fmt: skip
def test_a_fault_in_a_scope_is_named_with_its_place(scope, where, facts, hint):
    only_fault(rule(SILENT, more=f"    scope: {scope}\n"), 7, f"rules[0].{where}", facts, hint)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "[]", "true", "[80, 0]", "1.5"])
def test_ports(port):
    text = rule(SILENT, "{pin: {}}", f"    scope: {{flows: {{remote_port: {port}}}}}\n")
    only_fault(text, 7, "rules[0].scope.flows.remote_port", ["from 1 to 65535", "list"])


@given(st.text(max_size=20), st.integers(-5, 70_000), st.text(max_size=20))
def test_no_flow_and_no_path_breaks_a_scope(text, port, other):
    scope = Scope.model_validate(
        {"paths": ["a*>b"], "destinations": ["10.0.0.0/8"], "nexthops": ["10.0.0.1"], "flows": {"remote": ["::/0"]}}
    )
    assert scope.covers(Path(text, other, text, other, text)) in (True, False)
    assert scope.covers_flow(FlowKey(port, other, port, text, port), Owner(command=text, cgroup=other)) in (True, False)


# ---- the order of rules, and what no rule alone shows ----


def test_rules_are_in_the_order_of_their_priorities():
    names = [
        each.name
        for each in parse(several(*(f"name: r{p}, priority: {p}, then: {{drain: {{}}}}" for p in (30, 5, 10)))).rules
    ]
    assert names == ["r5", "r10", "r30"]
    names = [each.name for each in parse(several(*(f"name: r{p}, then: {{drain: {{}}}}" for p in (30, 5, 10)))).rules]
    assert names == ["r30", "r5", "r10"]


def test_priorities_are_in_all_rules_or_in_none_and_each_once():
    text = several(
        "name: a, priority: 1, then: {drain: {}}",
        "name: b, then: {drain: {}}",
        "name: c, priority: 1, then: {drain: {}}",
    )
    missing, taken = faults(text)
    assert (missing.line, missing.where) == (5, "rules[1].priority")
    assert mentions(missing.what, '"priority" is missing', "every rule", "none")
    assert (taken.line, taken.where) == (6, "rules[2].priority") and mentions(taken.what, "1", "line 4")


def test_faults_of_every_sort_are_named_at_once():
    text = HEAD + (
        "  - name: a\n"
        "    priority: 1\n"
        "    when: {any: [{signal: lss}, {signal: link, event: flap, hold: 0s}]}\n"
        "    then: {shift: {share: 0.5, by: capacity}, drain: {}}\n"
        "  - name: a\n"
        "    when: {signal: silence, fall: 0}\n"
        "    then: {drain: {}}\n"
        "    scope: {flows: {protocol: sctp}}\n"
        "    return: {steps: [0.5, 0.2]}\n"
    )
    assert [(fault.line, fault.where) for fault in faults(text)] == [
        (6, "rules[0].when.any[0].signal"),
        (6, "rules[0].when.any[1].hold"),
        (7, "rules[0].then.drain"),
        (8, "rules[1].name"),
        (8, "rules[1].priority"),
        (9, "rules[1].when.fall"),
        (11, "rules[1].scope.flows"),
        (11, "rules[1].scope.flows.protocol"),
        (12, "rules[1].return.steps[1]"),
    ]


def test_manage_and_safety():
    text = rule(SILENT).replace(
        "manage: {destinations: [10.9.0.0/16]}",
        "manage: {destinations: [10.9.0.0/16], table: 21000, priority: 4900, vrfs: [blue],\n"
        "  alternatives: [{via: 10.2.1.1, dev: rail2}]}\n"
        "safety: {herd: {jitter: 300ms, fraction: 0.1}, max_moves_per_flow: {count: 2, per: 1m}}",
    )
    policy = parse(text)
    assert (policy.manage.table, policy.manage.priority, policy.manage.vrfs) == (21000, 4900, ("blue",))
    assert [(hop.via, hop.dev) for hop in policy.manage.alternatives] == [("10.2.1.1", "rail2")]
    assert (policy.safety.herd.jitter, policy.safety.herd.fraction) == (300 * MS, 0.1)
    assert (policy.safety.max_moves_per_flow.count, policy.safety.max_moves_per_flow.per) == (2, 60 * SECOND)
    plain = parse(rule(SILENT))
    assert (plain.manage.table, plain.manage.priority, plain.manage.vrfs) == (20000, None, ())
    assert (plain.manage.alternatives, plain.safety.herd.jitter) == ((), 0)


@pytest.mark.parametrize(
    ("manage", "where", "facts"),
    [
        ("table: 100", "table", ["whole number", "from 20000 to 29899", "100"]),
        ("priority: 40000", "priority", ["whole number", "from 1 to 32765", "40000"]),
        ("rto_min: 1ms", "rto_min", ["between 2ms and 200ms", '"1ms"']),
        ("rto_min: 1s", "rto_min", ["between 2ms and 200ms", '"1s"']),
        ("rto_min: 2500us", "rto_min", ["whole milliseconds", '"2500us"']),
        ("alternatives: [{via: 10.2.1.1}]", "alternatives[0].dev", ['"dev" is missing', "text"]),
    ],
)
def test_a_fault_in_manage(manage, where, facts):
    only_fault(rule(SILENT).replace("10.9.0.0/16]", f"10.9.0.0/16], {manage}"), 2, f"manage.{where}", facts)


def test_a_minimum_rto_is_explained():
    policy = parse(rule(SILENT).replace("10.9.0.0/16]", "10.9.0.0/16], rto_min: 20ms"))
    assert policy.manage.rto_min == 20 * MS
    assert mentions(explain(policy), "retransmission timeout", "20 ms")
    assert "retransmission timeout" not in explain(parse(rule(SILENT)))


# ---- in words ----


def test_the_explanation_says_who_moves_what():
    text = several(
        "name: a, then: {drain: {}}",
        "name: b, then: {pin: {}}",
        "name: c, then: {relabel: {}}",
        "name: d, then: {alert: {}}",
        "name: e, then: {shift: {by: capacity, step: 0.2}}",
    ).replace("10.9.0.0/16", '10.9.0.0/16, "fd00:9::/64"')
    words = explain(parse(text)).splitlines()
    assert any(mentions(line, "live ones", "hash", "another hop") for line in words)

    def line_of(name: str) -> str:
        return next(line for line in words if f" {name}: on a path" in line)

    assert mentions(line_of("a"), "moves new flows", "live ones")
    assert mentions(line_of("b"), "moves these flows only", "at once")
    assert mentions(line_of("c"), "moves these flows only", "fabric")
    assert "moves nothing" in line_of("d")
    assert mentions(line_of("e"), "at most 20%", "weight", "one act")
    assert mentions(explain(parse(text)), "rules that move weights", "first")


def test_the_explanation_says_how_a_path_comes_back_in_steps():
    stepped = "{shift: {share: 0, step: 0.2}}"
    queueing = "{signal: queueing_delay, above: 5ms, clear_below: 1ms}"
    text = rule(queueing, stepped)
    words = explain(parse(text))
    assert mentions(words, "weight back", "at most 20% at a time", "stopping at 10%, 50%, each step", "3 s")
    assert "up to twice" not in words
    words = explain(parse(rule(queueing, stepped, "    return: {steps: [1.0]}\n")))
    assert mentions(words, "weight back", "at most 20% at a time", "3 s") and "stopping" not in words
    words = explain(parse(text.replace("rules:", "safety: {herd: {jitter: 1s}}\nrules:")))
    assert mentions(words, "good", "first step", "up to twice")


@pytest.mark.parametrize("then", ["{pin: {}}", "{relabel: {}}"])
def test_the_explanation_says_how_flows_come_back(then):
    back = "    return: {dwell: 7s, rise: 9, retry_after: 11s}\n"
    words = explain(parse(rule(SILENT, then, back)))
    assert mentions(words, "After 7 s", "9 good measurements", "10%, 50%, 100% of the flows", "let go")
    assert mentions(words, "no sooner than 11 s", "last")
    assert "weight back" not in words
    words = explain(parse(rule(SILENT, then, "    return: {steps: [1.0]}\n")))
    assert mentions(words, "all of the flows", "let go", "healthy 3 s later")


def test_the_explanation_says_that_the_limit_of_moves_is_one_of_pins():
    assert mentions(explain(parse(rule(SILENT, "{relabel: {}}"))), "pinned", "at most once in 10 s")


# ---- whatever is written ----

KEYS = [
    *("version", "manage", "destinations", "objects", "safety", "herd", "jitter", "rules", "name", "priority", "scope"),
    *("paths", "flows", "remote_port", "when", "all", "any", "not", "signal", "above", "for", "event", "then", "shift"),
    *("by", "share", "drain", "pin", "alert", "return", "steps", "x"),
]
WORDS = st.sampled_from(["silence", "link", "loss", "capacity", "1s", "10mbit", "all of", "h1>h2", "10.0.0.0/8", "any"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=15,
)


@st.composite
def nearly(draw: st.DrawFn):
    """A good policy with something in it replaced, or anything in its place."""
    if draw(st.booleans()):
        return draw(ANYTHING)
    good = yaml.safe_load(
        rule(
            f"{{all: [{SILENT}, {{not: {LOSS}}}, {{signal: link, event: flap, hold: 3s}}]}}",
            draw(st.sampled_from(["{drain: {}}", "{shift: {share: 0.5}}", "{pin: {flows: {min_rate: 1gbit}}}"])),
            "    scope: {paths: ['a>b']}\n",
        )
    )
    node, key = good, draw(st.sampled_from(["manage", "rules"]))
    while draw(st.integers(0, 3)):
        inner = node[key]
        choices = list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
        if not choices:
            break
        node, key = inner, draw(st.sampled_from(choices))
    node[key] = draw(ANYTHING)
    return good


@given(nearly())
def test_whatever_is_wrong_is_named_and_what_is_right_passes_the_schema(value):
    text = json.dumps(value)
    try:
        parse(text)
    except InvalidPolicyError as error:
        assert error.problems
        assert all(problem.line == 1 and problem.what for problem in error.problems)
    else:
        VALIDATOR.validate(json.loads(text))


@pytest.mark.parametrize(
    "when", ["{signal: straggler}", "{any: [{signal: loss, above: 0.1, clear_below: 0.01}, {not: {signal: job_step}}]}"]
)
def test_what_jobs_say_only_alerts(when):
    at = "when.signal" if when.startswith("{signal") else "when.any[1].not.signal"
    only_fault(rule(when), 5, f"rules[0].{at}", ["only with alert or notify", "path"])
    assert signals_of(parse(rule(when, "{alert: {}}"))) >= {"job"}
