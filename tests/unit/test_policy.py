"""Policy files: every fault is named with its line, what was expected, and the nearest valid word."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import faults, only_fault
from steering_kit import POLICY
from support import mentions

from pytools import units
from pytools.errors import RefusedError, UsageError
from pytools.units import parse_rate
from steering.commands.policy import policy as command
from steering.policy import file as policy_file
from steering.policy.conditions import SIGNALS
from steering.policy.explanation import explain
from steering.policy.file import InvalidPolicyError, parse
from steering.policy.model import signals_of
from steering.policy.schema import json_schema
from steering.policy.scope import Scope

MINIMAL = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave
    when: {signal: queueing_delay, above: 5ms, clear_below: 1ms}
    then: {shift: {share: 0}}
"""

KEYS = ["version", "manage", "safety", "ports", "labels", "bonds", "hooks", "rules"]


def test_the_example_is_read():
    policy = parse(POLICY)
    rule = policy.rules[0]
    assert policy.manage.destinations == ("10.9.0.0/16",)
    assert policy.safety.lease == 2_000_000_000
    assert (rule.when.signal, rule.when.quantile, rule.when.above, rule.when.for_, rule.when.clear_below) == (
        "queueing_delay",
        "p50",
        5_000_000,
        40_000_000,
        1_000_000,
    )
    assert rule.then.shift.share == 0
    assert rule.return_.steps == (0.1, 0.5, 1.0)
    assert (rule.when.fall, rule.priority, rule.scope, rule.return_.rise) == (1, None, Scope(), 1)


def test_a_policy_cannot_be_changed():
    policy = parse(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        policy.safety.lease = 1
    assert hash(policy) == hash(parse(MINIMAL))


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "facts", "hint"),
    [
        ("version: 1", "version: 2", 1, "version", ["1", "2"], ""),
        ("version: 1", "version: true", 1, "version", ["1", "true"], ""),
        ("version: 1\n", "", 1, "version", ['"version"', "missing", "1"], ""),
        ("quantile: p50", "quantile: p95", 6, "rules[0].when.quantile", ["p50", "p99", "last", '"p95"'], "p99"),
        ("signal: queueing_delay", "signal: queuing_delay", 6, "rules[0].when.signal", [*SIGNALS, '"queuing_delay"'],
         "queueing_delay"),
        ("signal: queueing_delay, ", "", 6, "rules[0].when.signal",
         ['"signal"', "missing", *SIGNALS, "all", "any", "not"], ""),
        ("stale_after: 500ms", "stale_aftr: 500ms", 3, "safety.stale_aftr",
         ["unknown", '"stale_aftr"', "baseline_after", "dead_baseline_after", "herd", "lease", "max_drained_share",
          "max_moves_per_flow", "reroute_hold", "stale_after", "takeover"], "stale_after"),
        ("for: 40ms", "for: 40 msec", 6, "rules[0].when.for", ["unit", "40ms", "3s", "1m", '"40 msec"'], "40ms"),
        ("for: 40ms", "for: 40", 6, "rules[0].when.for", ["unit", "40ms", "3s", "1m", "40"], ""),
        ("clear_below: 1ms", "clear_below: 5ms", 6, "rules[0].when.clear_below",
         ["less than above", "5 ms", '"5ms"'], ""),
        ("[10.9.0.0/16]", "[10.9.0.1/16]", 2, "manage.destinations[0]",
         ["prefix", "10.9.0.0/16", '"10.9.0.1/16"', "host bits"], "10.9.0.0/16"),
        ("[10.9.0.0/16]", '["fe80::%rail1/64"]', 2, "manage.destinations[0]",
         ["prefix", "10.9.0.0/16", '"fe80::%rail1/64"', "scope"], "fe80::/64"),
        ("max_drained_share: 0.5", "max_drained_share: 50", 3, "safety.max_drained_share",
         ["above 0", "up to 1", "50"], ""),
        ("max_drained_share: 0.5", "max_drained_share: yes", 3, "safety.max_drained_share",
         ["above 0", "up to 1", "true"], ""),
        ("lease: 2s", "lease: 1s", 3, "safety.lease", ["between 2s and 1m", '"1s"'], ""),
        ("{share: 0}", "{share: 1}", 7, "rules[0].then.shift.share", ["from 0", "below 1", "1"], ""),
        ("[0.1, 0.5, 1.0]", "[0.5, 0.1, 1.0]", 8, "rules[0].return.steps[1]", ["more than", "0.5", "0.1"], ""),
        ("[0.1, 0.5, 1.0]", "[0.1, 0.5]", 8, "rules[0].return.steps[1]", ["1.0", "0.5"], ""),
        ("{share: 0}", "{share: 0.3}", 8, "rules[0].return.steps[0]", ["more than then.shift.share", "0.3", "0.1"], ""),
        ("retry_after: 60s", "max_dwell: 500ms", 8, "rules[0].return.max_dwell",
         ["at least dwell", "1 s", '"500ms"'], ""),
        ("name: leave-congested-rail", "name: 7", 5, "rules[0].name", ["text", "matches"], ""),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_place(old, new, line, where, facts, hint):
    assert old in POLICY
    only_fault(POLICY.replace(old, new), line, where, facts, hint)


def test_lines_are_those_of_block_style_too():
    text = MINIMAL.replace(
        "    when: {signal: queueing_delay, above: 5ms, clear_below: 1ms}\n",
        "    when:\n      signal: queueing_delay\n      # a comment\n      above: 5\n      clear_below: 1ms\n",
    )
    only_fault(text, 8, "rules[0].when.above", ["duration", "5"])


def test_faults_are_printed_as_a_compiler_prints_them():
    with pytest.raises(InvalidPolicyError) as caught:
        parse(POLICY.replace("lease: 2s", "lease: 2").replace("p50", "p95"), "p.yaml")
    lease, quantile = caught.value.problems
    assert str(caught.value).splitlines() == [
        f"p.yaml:3: safety.lease: {lease.what}",
        f'p.yaml:6: rules[0].when.quantile: {quantile.what}; did you mean "p99"?',
    ]


def test_two_rules_of_one_name_and_a_key_given_twice():
    text = MINIMAL + MINIMAL[MINIMAL.index("  - name") :] + "    then: {}\n"
    named, given = faults(text)
    assert (named.line, named.where) == (7, "rules[1].name") and mentions(named.what, '"leave"', "line 4")
    assert (given.line, given.where) == (10, "rules[1].then") and mentions(given.what, "twice", "line 9")


@pytest.mark.parametrize(
    ("text", "line", "where", "facts"),
    [
        ("", 1, "", ["mapping", *KEYS, "nothing"]),
        ("[]", 1, "", ["mapping", *KEYS, "empty list"]),
        ("version: 1\nrules: [", 2, "", ["not a policy"]),
        ("version: 1\nrules: &x [*x]", 2, "", ["not a policy", "alias *x"]),
        ("version: 1\n---\nversion: 1", 2, "", ["not a policy"]),
        ("!!python/object/apply:os.system [x]", 1, "", ["tag"]),
        ("a: " + "[" * 5000 + "]" * 5000, 1, "", ["not a policy", "nested too deeply"]),
        ("a: \0", 1, "", ["not a policy"]),
        ('"\\ud800": 1', 1, "\ufffd", ["unknown", '"\ufffd"']),
        ('version: "\\ud83d\\ude00"', 1, "version", ["1", '"\U0001f600"']),
    ],
)
def test_what_is_no_policy_at_all(text, line, where, facts):
    assert any((found.line, found.where) == (line, where) and mentions(found.what, *facts) for found in faults(text))


@given(st.integers(1, 50_000), st.sampled_from(sorted(units.UNITS)))
def test_durations_are_exact(number, unit):
    assert units.parse_duration(f"{number}{unit}") == number * units.UNITS[unit]
    assert units.parse_duration(f"{number}.5{unit}") == number * units.UNITS[unit] + units.UNITS[unit] // 2


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (999, "999 ns"), (40_000_000, "40 ms"), (1_500_000_000, "1.5 s"), (60_000_000_000, "1 m"),
     (90_000_000_000, "90 s"), (12_345_678, "12.3 ms"), (3_600_000_000_000, "1 h"), (123_456_789_000, "123 s"),
     (1_234_000_000_000, "1234 s")],
)  # fmt: skip
def test_durations_in_words(ns, text):
    assert units.duration_text(ns) == text


def test_the_schema_describes_the_file():
    schema = json_schema()
    assert list(schema["properties"]) == KEYS
    assert "for" in schema["$defs"]["QueueingDelay"]["properties"]
    assert "return" in schema["$defs"]["Rule"]["properties"]
    assert schema["$defs"]["Manage"]["additionalProperties"] is False
    assert schema["$defs"]["Safety"]["properties"]["lease"]["type"] == "string"


def test_the_schemas_defaults_are_written_as_in_a_file():
    for part in json_schema()["$defs"].values():
        for name, field in part.get("properties", {}).items():
            if field.get("pattern") in (units.SCHEMA_DURATION, units.SCHEMA_RATE) and "default" in field:
                assert isinstance(field["default"], str), name
                parse_rate(field["default"]) if "gbit" in field["pattern"] else units.parse_duration(field["default"])


# ---- the file; who may have written it is in test_directories.py ----


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "policy.yaml"
    found.write_text(POLICY)
    found.chmod(0o600)
    tmp_path.chmod(0o755)
    return found


def test_a_safe_file_is_loaded(file):
    assert policy_file.load(file) == parse(POLICY)


def test_something_that_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(UsageError, match="policy"):
            policy_file.load(path)


# ---- the command ----


def test_check_says_valid_or_every_fault(file):
    runner = CliRunner()
    assert runner.invoke(command, ["check", str(file)], standalone_mode=False).return_value == 0
    file.write_text(POLICY.replace("p50", "p95").replace("lease: 2s", "lease: 2"))
    done = runner.invoke(command, ["check", "-j", str(file)], standalone_mode=False)
    assert done.return_value == 3
    assert [json.loads(line)["line"] for line in done.output.splitlines()] == [3, 6]
    failed = runner.invoke(command, ["check", str(file)], standalone_mode=False)
    assert isinstance(failed.exception, InvalidPolicyError) and failed.exception.exit_code == 3


def noted(file, text):
    file.write_text(text)
    done = CliRunner().invoke(command, ["check", "-j", str(file)], standalone_mode=False)
    assert done.return_value == 0
    found = json.loads(done.output)["notes"]
    plain = CliRunner().invoke(command, ["check", str(file)], standalone_mode=False).output
    assert plain.splitlines() == [f"{file}: valid", *(f"note: {note}" for note in found)]
    return found


def test_check_notes_what_oscillates_where_many_hosts_do_it(file):
    jitter = ("rules:", "safety: {herd: {jitter: 1s}}\nrules:")
    step = ("share: 0}", "share: 0, step: 0.1, settle: 1s}")
    (whole,) = noted(file, MINIMAL)
    assert whole.startswith("leave: takes the whole weight in one act")
    assert "step: 0.1, settle: 1s" in whole and "safety.herd.jitter: 1s" in whole
    (part,) = noted(file, MINIMAL.replace("share: 0}", "share: 0.05}"))
    assert part.startswith("leave: takes 95% of the weight in one act")
    (drain,) = noted(file, MINIMAL.replace("shift: {share: 0}", "drain: {}"))
    assert drain == whole
    (together,) = noted(file, MINIMAL.replace(*step))
    assert "at the same instant" in together and "safety.herd.jitter: 1s" in together
    assert noted(file, MINIMAL.replace(*step).replace(*jitter)) == []
    assert noted(file, MINIMAL.replace("shift: {share: 0}", "alert: {}")) == []
    failure = MINIMAL.replace("{signal: queueing_delay, above: 5ms, clear_below: 1ms}", "{signal: silence}")
    assert noted(file, failure) == [], "a failure is to be left at once"


def test_check_refuses_what_is_valid_but_unsafe(file):
    file.chmod(0o666)
    done = CliRunner().invoke(command, ["check", str(file)], standalone_mode=False)
    assert isinstance(done.exception, RefusedError)


def test_explain_says_it_in_words(file):
    words = CliRunner().invoke(command, ["explain", str(file)], standalone_mode=False).output
    for part in ("10.9.0.0/16", "above 5 ms", "for 40 ms", "taken out of its group", "10%, 50%, 100%", "every path"):
        assert part in words


def test_schema_is_json():
    assert json.loads(CliRunner().invoke(command, ["schema"], standalone_mode=False).output) == json_schema()


def test_ports_need_no_rules_and_one_of_them_must_be_there():
    text = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\n"
    policy = parse(text + "ports: {avoid: [dead], keep: 8}\n")
    assert policy.rules == () and {"path_way", "tcp_flow"} <= signals_of(policy)
    said = explain(policy)
    assert mentions(said, "Ways", "dead", "up to 8 local ports")
    assert "rules" not in said
    only_fault(text, 1, "", ['"rules" is missing', "rules", "ports", "labels"])


def test_bonds_need_a_rule_that_says_when():
    text = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nbonds: {trial: 5s}\nrules:\n"
    rule = "  - {name: a, when: {signal: loss, above: 0.1, clear_below: 0.01}, then: {%s: {}}}\n"
    said = explain(parse(text + rule % "drain"))
    assert mentions(said, "another port", "bond", "active", "5 s later")
    assert "active-backup" not in explain(parse((text + rule % "drain").replace("bonds: {trial: 5s}\n", "")))
    only_fault(text + rule % "alert", 3, "bonds", ["never acts", "shift", "drain", "when"])


def test_labels_need_no_rules_and_go_with_none_that_relabels():
    text = 'version: 1\nmanage: {destinations: ["fd00:9::/64"]}\nlabels: {avoid: [slow], dwell: 3s}\n'
    policy = parse(text)
    assert policy.ports is None and {"path_way", "tcp_flow"} <= signals_of(policy)
    assert mentions(explain(policy), "slow", "good for 3 s", "live IPv6 TCP connections")
    rule = "{name: a, when: {signal: loss, above: 0.1, clear_below: 0.01}, then: {relabel: {}}}"
    only_fault(f"{text}rules:\n  - {rule}\n", 5, "rules[0].then.relabel", ["only without labels"])
