"""Hooks of rules: what the policy may say, when an occurrence begins and is over, who is told what, how often, once."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace

import jsonschema
import msgspec
import pytest
import support
import yaml
from click.testing import CliRunner
from policy_kit import HEAD, faults, only_fault
from steering_kit import MS, SECOND, TARGET, group, measured, path

from pytools import directories
from pytools.errors import RefusedError, SwerveError
from pytools.signals import Act, encode
from pytools.units import parse_duration
from steering.acting import hook_calls, hooks, messages
from steering.acting.hook_calls import HookCalls, event_of
from steering.acting.hook_settings import settings_of
from steering.acting.hooks import HookActing
from steering.cli import root
from steering.deciding.engine import Engine
from steering.deciding.notices import Figure, Notices, own_fault
from steering.policy.explanation import explain, notes
from steering.policy.file import parse
from steering.policy.schema import json_schema

T0, STEP = 10**12, 20 * MS
SCONTROL, NODE = "/usr/bin/scontrol", "this host's node"
SLOW = "{signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}"
POLICY = f"""\
version: 1
manage: {{destinations: [10.9.0.0/16]}}
hooks:
  noc: {{webhook: {{url: "https://noc.example/x"}}, lease: 1m, tries: 3, limit: {{count: 5, per: 1m}}}}
  slurm: {{slurm: {{}}, lease: 1m}}
rules:
  - name: slow
    when: {SLOW}
    then: {{notify: [noc, slurm]}}
    return: {{dwell: 5s, max_dwell: 12s}}
"""
DRAINING = POLICY.replace("{notify: [noc, slurm]}", "{drain: {}, notify: [noc]}").replace(
    "max_dwell: 12s", "max_dwell: 12s, steps: [1.0], step: 3s, retry_after: 0s"
)


# ---- the policy ----

KINDS = ("webhook", "slurm", "kubernetes", "exec")


def with_hook(text, when=SLOW):
    return HEAD.replace("rules:", f"hooks:\n  noc: {text}\nrules:") + (
        f"  - {{name: r, when: {when}, then: {{notify: [noc]}}}}\n"
    )


def test_a_rule_that_only_tells_is_an_alert():
    found = parse(POLICY).rules[0].then
    assert (found.kind, found.notify, found.share) == ("alert", ("noc", "slurm"), 1.0)
    found = parse(DRAINING).rules[0].then
    assert (found.kind, found.notify, found.share) == ("drain", ("noc",), 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{webhook: {url: 'https://a/', secret_file: /x, secret_header: X-Y}, timeout: 3s}",
            "posts the event to https://a/",
        ),
        ("{slurm: {node: n7}}", "drains node n7 in Slurm"),
        ("{kubernetes: {taint: {key: swerve/bad}}}", "taints this host's node swerve/bad=swerve:NoSchedule"),
        (
            "{kubernetes: {condition: NetworkBad, server: 'https://[fd00::1]:6443'}}",
            "sets condition NetworkBad of this host",
        ),
        ("{exec: {program: /usr/local/sbin/page, arguments: [-v, '{}']}}", "runs /usr/local/sbin/page -v {}"),
    ],
)
def test_each_kind_is_explained(text, said):
    found = parse(with_hook(text))
    assert f"Hook noc {said}" in explain(found) and "Called then: noc; and again" in explain(found)
    assert json.loads(settings_of("noc", found.hooks["noc"]).options)


@pytest.mark.parametrize(
    ("text", "key", "facts"),
    [
        ("{}", "", ["exactly one", *KINDS, "none"]),
        ("{slurm: {}, exec: {program: /x}}", ".exec", ["exactly one", *KINDS, "slurm and exec"]),
        ("{slurm: {}, leese: 3s}", ".leese", ["unknown", '"leese"']),
        ("{slurm: {scontrol: scontrol}}", ".slurm.scontrol", ["text", "/usr/local/sbin/page", '"scontrol"']),
        ("{slurm: {node: '-n'}}", ".slurm.node", ['"-n"']),
        ("{kubernetes: {}}", ".kubernetes", ["exactly one", "taint", "condition", "none"]),
        ("{kubernetes: {taint: {key: a, effect: Sometimes}}}", ".kubernetes.taint.effect",
         ["NoSchedule", "PreferNoSchedule", "NoExecute", '"Sometimes"']),
        ("{kubernetes: {condition: X, server: 'http://a'}}", ".kubernetes.server", ["URL", "https", '"http://a"']),
        ("{webhook: {url: 'ftp://a/'}}", ".webhook.url", ["URL", "https", '"ftp://a/"']),
        ("{webhook: {url: 'https://user@a/'}}", ".webhook.url", ["without a user", '"https://user@a/"']),
        ("{webhook: {url: 'https://a:port/'}}", ".webhook.url", ["URL", '"https://a:port/"']),
        ('{webhook: {url: "https://a/ b"}}', ".webhook.url", ["URL", '"https://a/ b"']),
        ("{webhook: {url: 'http://noc/', secret_file: /x}}", ".webhook.secret_file", ["only", "https"]),
        ("{exec: {program: page}}", ".exec.program", ["text", "/usr/local/sbin/page", '"page"']),
        ("{slurm: {}, lease: 1s}", ".lease", ["between 10s and 24h", '"1s"']),
        ("{slurm: {}, timeout: 2m}", ".timeout", ["between 1s and 1m", '"2m"']),
    ],
)  # fmt: skip
def test_faults_are_named(text, key, facts):
    found = faults(with_hook(text))
    assert [each.line for each in found] == [4]
    assert found[0].where == f"hooks.noc{key}" and support.mentions(found[0].what, *facts), found


def test_hooks_that_are_none_and_acts_that_are_two():
    slum = POLICY.replace("[noc, slurm]", "[noc, slum]")
    only_fault(slum, 9, "rules[0].then.notify[1]", ['"slum"', "hook", "noc", "slurm"], "slurm")
    two = POLICY.replace("{notify:", "{drain: {}, alert: {}, notify:")
    acts = ("shift", "drain", "pin", "spread", "relabel", "hold", "alert")
    only_fault(two, 9, "rules[0].then.alert", ["exactly one", *acts, "drain and alert"])
    only_fault(POLICY.replace("[noc, slurm]", "[]"), 9, "rules[0].then.notify", ["at least one entry"])
    processes = POLICY + "    scope: {processes: [x]}\n"
    only_fault(processes, 11, "rules[0].scope.processes", ["only with pin, spread or relabel"])


def test_editors_see_hooks_of_no_kind_or_of_two():
    schema = jsonschema.Draft202012Validator(json_schema())
    assert schema.is_valid(yaml.safe_load(POLICY)) and schema.is_valid(yaml.safe_load(DRAINING))
    for text in ("{}", "{slurm: {}, exec: {program: /x}}", "{kubernetes: {}}", "{slurm: {}, tries: 0}"):
        assert not schema.is_valid(yaml.safe_load(with_hook(text))), text
    assert not schema.is_valid(yaml.safe_load(POLICY.replace("  noc:", "  NOC:")))


def test_what_is_not_encrypted_is_noted():
    assert "not encrypted" in notes(parse(with_hook("{webhook: {url: 'http://noc/'}}")))[0]
    assert notes(parse(with_hook("{webhook: {url: 'http://[::1]/', secret_file: /x}}"))) == []


def test_a_check_looks_at_programs_and_secrets(tmp_path):
    tmp_path.chmod(0o700)
    secret, file = tmp_path / "secret", tmp_path / "policy.yaml"
    secret.write_text("x")
    secret.chmod(0o644)
    hook = f"{{webhook: {{url: 'https://a/', secret_file: {secret}}}}}"
    mine = tmp_path / "page"
    mine.write_text("")
    hooks_text = f"  page: {{exec: {{program: {mine}}}}}\n  other: {{slurm: {{scontrol: /nowhere/scontrol}}}}\nrules:"
    file.write_text(with_hook(hook).replace("rules:", hooks_text, 1))
    file.chmod(0o600)
    result = CliRunner().invoke(root, ["policy", "check", str(file)])
    assert isinstance(result.exception, RefusedError)  # exit code 4
    said = str(result.exception)
    assert "hooks.noc: " in said and "others may read it" in said and "hooks.page: " in said and "nowhere" not in said
    secret.chmod(0o600)
    file.write_text(with_hook(hook).replace("rules:", "  other: {slurm: {scontrol: /nowhere/scontrol}}\nrules:", 1))
    result = CliRunner().invoke(root, ["policy", "check", str(file)])
    assert result.exit_code == 0 and support.mentions(
        result.output, "note", "hook other", "/nowhere/scontrol", "not there"
    )


# ---- occurrences ----


class World:
    """Two rails to a peer, an engine whose acts are carried out, and the occurrences."""

    def __init__(self, policy=POLICY):
        self.engine, self.notices, self.now = Engine(parse(policy)), Notices(parse(policy)), T0
        self.engine.arrange([group({1: [], 2: []})], lambda _: (TARGET,), self.now)
        self.began, self.ended, self.acts = [], [], 0

    def step(self, slow=(), heard=(1, 2)):
        self.now += STEP
        for rail in heard:
            self.engine.take(measured(path(rail), self.now, 20 * MS if rail in slow else 0), self.now)
        for change in self.engine.changes(self.now):
            self.engine.carried_out(change, self.now, change.after)
            self.acts += 1
        began, ended = self.notices.look(self.engine.paths, self.now, self.now)
        self.began, self.ended = self.began + began, self.ended + ended

    def run(self, lasts, slow=(), heard=(1, 2)):
        end = self.now + parse_duration(lasts)
        while self.now < end:
            self.step(slow, heard)


def test_an_occurrence_begins_with_the_rule_and_ends_after_the_dwell():
    world = World()
    world.run("1s")
    world.run("20ms", slow=[1])
    assert world.began == [], "not yet for 40 ms"
    world.run("2s", slow=[1])
    [notice] = world.began
    assert (notice.rule, notice.act, notice.path) == ("slow", "alert", path(1)) and "20 ms" in notice.because
    [figure] = notice.figures
    assert (figure.signal, figure.value, figure.unit) == ("queueing_delay", 20 * MS, "ns") and "20 ms" in figure.text
    world.run("4900ms")
    assert world.ended == []
    world.run("200ms")
    [(ended, why)] = world.ended
    assert ended == notice and "good for 5 s" in why and world.notices.open == {}


def test_a_flapping_path_waits_twice_as_long_each_time():
    world, lasted = World(), []
    for _ in range(4):
        world.run("1s", slow=[1])
        good = world.now
        while world.notices.open:
            world.step()
        lasted.append(round((world.now - good) / SECOND))
    assert lasted == [5, 10, 12, 12] and len({each.id for each in world.began}) == 4
    world.run("1m")
    world.run("1s", slow=[1])
    good = world.now
    while world.notices.open:
        world.step()
    assert round((world.now - good) / SECOND) == 5, "forgotten after as many dwells without another"


def test_short_relapses_begin_no_other_occurrence():
    world = World()
    for _ in range(5):
        world.run("1s", slow=[1])
        world.run("3s")
    assert len(world.began) == 1 and world.ended == []


def test_beside_an_act_it_lasts_until_the_path_is_back():
    world = World(DRAINING)
    world.run("1s", slow=[1])
    assert len(world.began) == 1 and world.began[0].act == "drain" and world.acts == 1
    world.run("7s")
    assert world.engine.paths[path(1)].state == "returning" and world.ended == []
    world.run("3s")
    assert world.engine.paths[path(1)].state == "healthy" and len(world.ended) == 1


def test_a_path_that_must_not_be_left_is_told_of_all_the_same():
    world = World(DRAINING)
    world.run("1s", slow=[1, 2])
    assert world.acts == 0 and len(world.began) == 2


def test_without_measurements_it_stays_open_for_long():
    world = World(POLICY.replace("hooks:", "safety: {dead_baseline_after: 20s}\nhooks:"))
    world.run("1s", slow=[1])
    world.run("19s", heard=[2])
    assert world.ended == []
    world.run("2s", heard=[2])
    assert support.mentions(world.ended[0].why, "not measured", "20 s")
    world.run("1s", heard=[2])
    assert len(world.began) == 1, "what was measured long ago begins nothing"


def test_a_successor_goes_on_with_the_same_occurrence():
    before, world = World(), World()
    before.run("1s", slow=[1])
    world.notices.adopt(before.notices.open.values(), world.now)
    world.run("1s", slow=[1])
    assert world.began == []
    world.run("6s")
    assert [each.notice.id for each in world.ended] == [before.began[0].id]


def test_a_successor_whose_policy_tells_nobody_ends_it():
    before, world = World(), World(POLICY.replace("name: slow", "name: other"))
    before.run("1s", slow=[1])
    world.notices.adopt(before.notices.open.values(), world.now)
    world.step()
    assert support.mentions(world.ended[0].why, "policy", "nobody")


def test_there_is_room_for_so_many(monkeypatch):
    monkeypatch.setattr("steering.deciding.notices.MOST", 1)
    world = World()
    world.run("1s", slow=[1, 2])
    assert len(world.began) == 1 and world.notices.dropped > 0


def slow(number, rail=1, signal="loss"):
    found = notice(rail=rail)
    figures = (Figure(signal, "bad"),)
    return msgspec.structs.replace(found, path=path(rail, f"h{number}"), figures=figures)


def test_a_host_is_taken_out_for_its_own_fault_only():
    """By its link, or by most of the peers behind one interface; not by one peer or rack that is bad for everybody."""
    known = [path(rail, f"h{peer}") for rail in (1, 2) for peer in range(2, 12)]
    assert not own_fault([slow(2), slow(2, rail=2)], known), "the peer is the likely cause"
    assert not own_fault([slow(peer, rail=rail) for rail in (1, 2) for peer in range(2, 7)], known), "half of them"
    assert own_fault([slow(peer) for peer in range(2, 8)], known)
    assert own_fault([slow(2, signal="link")], known)
    assert own_fault([slow(2)], [path(1, "h2")]), "there is only one"
    assert not own_fault([], known)


# ---- calls ----


def notice(number=1, names=("noc",), rail=1):
    world = World()
    world.run("1s", slow=[rail])
    return msgspec.structs.replace(world.began[0], id=f"id{number}", hooks=tuple(names))


def hook_settings(policy=POLICY):
    return {name: settings_of(name, hook) for name, hook in parse(policy).hooks.items()}


class Far:
    """Stands for every far end: what it was told, and what it does."""

    def __init__(self, file):
        self.told, self.failing, self.hanging = [], set(), set()
        self.release = threading.Event()
        self.news, self.file, self.now = [], file, T0
        self.calls = self.another()

    def another(self):
        """Those of a successor."""
        self.calls = HookCalls(self.file, "boot/here", self.news.append, self.make)
        return self.calls

    def make(self, hook, event):
        assert self.file.exists(), "remembered before it is told"
        self.told.append((hook.name, event["status"], event["id"], event["repeat"]))
        if hook.name in self.hanging:
            self.release.wait()
        if hook.name in self.failing:
            raise SwerveError("no")
        return "yes"

    def want(self, *notices, why=None, hooks=None):
        self.calls.want(notices, (hooks or hook_settings()).values(), why or {}, self.now, [path(1), path(2)])
        self.turn()

    def turn(self, lasts="0s"):
        """Let time pass, and calls end, but for those that hang."""
        end = self.now + parse_duration(lasts)
        while True:
            self.calls.turn(self.now, self.now)
            support.wait_until(self.idle, 10, "calls end")
            self.calls.turn(self.now, self.now)
            if self.now >= end:
                return
            self.now += 100 * MS

    def idle(self):
        """Whether no call is being made, but for those that hang."""
        lines = [line for name, line in self.calls._lines.items() if name not in self.hanging]
        return all(each.call is None or each.call.done for each in lines)

    @property
    def statuses(self):
        return [(name, status) for name, status, _, _ in self.told]


@pytest.fixture
def far(tmp_path):
    tmp_path.chmod(0o700)
    found = Far(tmp_path / "hooks.json")
    yield found
    found.release.set()


def test_what_begins_and_ends_is_told_once(far):
    far.want(notice())
    far.turn("5s")
    assert far.told == [("noc", "firing", "id1", 0)]
    far.want(why={"id1": "good"})
    far.turn("5m")
    assert far.told == [("noc", "firing", "id1", 0), ("noc", "resolved", "id1", 1)]
    assert [(each.over, each.failure, each.delivery.over) for each in far.news] == [
        (False, False, "good"),
        (True, False, "good"),
    ]
    assert not far.file.exists() and far.calls.deliveries == {}


def test_it_is_repeated_before_its_lease_ends(far):
    far.want(notice())
    far.turn("95s")
    assert [each[3] for each in far.told] == [0, 1, 2, 3] and len(far.news) == 1


def test_an_event_says_what_where_why_and_until_when():
    found = notice()
    hook = hook_settings()["noc"]
    delivery = hook_calls.Delivery(hook, found, found.id)
    event = json.loads(json.dumps(event_of(delivery, 2, "boot/net", 1_764_000_000 * SECOND)))
    assert (event["status"], event["host"], event["boot_id"], event["rule"], event["open"]) == (
        "firing", "h1", "boot", "slow", 2,
    )  # fmt: skip
    assert event["path"]["interface"] == "rail1" and "20 ms" in event["because"]
    assert event["figures"][0]["value"] == 20 * MS and event["figures"][0]["unit"] == "ns"
    assert (event["at"], event["expires_at"]) == ("2025-11-24T16:00:00.000Z", "2025-11-24T16:01:00.000Z")
    delivery.over = "well"
    event = event_of(delivery, 0, "boot/net", 0)
    assert (event["status"], event["because"]) == ("resolved", "well") and "expires_at" not in event


def test_what_is_over_before_it_was_told_is_never_told(far):
    far.calls.want([notice()], hook_settings().values(), {}, far.now, [])
    far.want(why={"id1": "good"})
    assert far.told == [] and not far.file.exists()


def test_failed_calls_are_made_again_so_many_times(far):
    far.failing = {"noc"}
    far.want(notice())
    far.turn("29s")
    assert len(far.told) == 3 and [each.failure for each in far.news] == [True] and "3 tries: no" in far.news[0].text
    [facts] = far.calls.facts()
    assert (facts["failed"], facts["given_up"], facts["failure"], facts["waiting"]) == (3, 1, "no", 1)
    far.failing = set()
    far.turn("10s")
    assert len(far.told) == 4 and far.calls.facts()[0]["failure"] == "", "with the next lease anew"


def test_an_event_that_cannot_be_told_is_over_when_its_lease_is_a_state_never(far):
    far.want(notice(names=("noc", "slurm")))
    far.failing = {"noc", "slurm"}
    far.want(why={"id1": "good"})
    far.turn("20s")
    assert [each.hook.name for each in far.calls.deliveries.values()] == ["slurm"]
    far.failing = set()
    far.turn("60s")
    assert far.calls.deliveries == {} and far.told[-1][:2] == ("slurm", "resolved")


def test_a_hook_that_hangs_holds_up_no_other(far):
    far.hanging = {"noc"}
    far.want(notice(names=("noc", "slurm")))
    far.want(notice(), notice(2, names=("slurm",)), why={})
    far.turn("5s")
    assert far.statuses.count(("noc", "firing")) == 1 and ("slurm", "firing") in far.statuses
    far.want(why={"id1": "good", "id2": "good"})
    assert far.told[-1][:2] == ("slurm", "resolved")
    far.hanging = set()
    far.release.set()
    far.turn()
    far.turn()
    assert far.told[-1][:2] == ("noc", "resolved") and far.calls.deliveries == {}


def test_a_storm_is_limited_and_news_come_before_repetitions(far):
    far.want(*(notice(number) for number in range(20)))
    far.turn("50s")
    assert len(far.told) == 5 and far.calls.facts()[0]["limited"]
    far.turn("15s")
    assert len(far.told) == 10 and len({each[2] for each in far.told}) == 10


def test_a_state_is_one_for_all_occurrences(far):
    first, second = notice(1, ["slurm"]), notice(2, ["slurm"], rail=2)
    far.want(first)
    far.want(first, second)
    far.want(second, why={"id1": "good"})
    assert far.told == [("slurm", "firing", "id1", 0)]
    far.want(why={"id2": "well again"})
    assert far.told[1:] == [("slurm", "resolved", "id1", 1)] and far.news[-1].delivery.over == "well again"


def test_a_state_begins_when_most_peers_say_so_and_lasts_until_all_are_well(far):
    known = [path(1, f"h{peer}") for peer in (2, 3, 4)]
    first, second = (msgspec.structs.replace(slow(n), id=f"id{n}", hooks=("noc", "slurm")) for n in (2, 3))

    def want(*open_now):
        far.calls.want(open_now, hook_settings().values(), {}, far.now, known)
        far.turn()

    want(first)
    assert far.statuses == [("noc", "firing")], "an event is told in any case"
    want(first, second)
    assert far.statuses.count(("slurm", "firing")) == 1
    want(second)
    assert ("slurm", "resolved") not in far.statuses
    want()
    assert far.statuses.count(("slurm", "resolved")) == 1


def test_what_begins_again_while_its_end_is_told_is_told_again(far):
    far.want(notice(1, ["slurm"]))
    far.hanging = {"slurm"}
    far.want(why={"id1": "good"})
    far.want(notice(2, ["slurm"]))
    far.hanging = set()
    far.release.set()
    far.turn()
    far.turn()
    assert far.statuses == [("slurm", "firing"), ("slurm", "resolved"), ("slurm", "firing")]
    assert far.told[-1][3] == 0 and len(far.calls.deliveries) == 1


def test_a_successor_resolves_what_was_told_exactly_once(far):
    far.want(notice(names=("noc", "slurm")))
    successor = far.another()
    assert [each.id for each in successor.load()] == ["id1"]
    far.want(notice(names=("noc", "slurm")))
    far.turn("1s")
    assert all(each[1:] == ("firing", "id1", 1) for each in far.told[2:]), "repeated, not begun again"
    far.want(why={"id1": "good"})
    far.another().load()
    far.turn("1s")
    assert sorted(far.statuses[-2:]) == [("noc", "resolved"), ("slurm", "resolved")]
    assert [status for _, status in far.statuses].count("resolved") == 2 and not far.file.exists()


def test_a_successor_ends_what_its_policy_does_not_name(far):
    far.want(notice())
    far.another().load()
    other = hook_settings(POLICY.replace("noc.example", "other.example"))
    far.want(notice(), hooks=other)
    far.turn("2s")
    assert sorted(each[1] for each in far.told[1:]) == ["firing", "resolved"], "another server is another hook"
    assert [json.loads(each.hook.options)["url"] for each in far.calls.deliveries.values()] == [
        "https://other.example/x"
    ]


@pytest.mark.parametrize("spoil", ["torn", "other scope", "others can write"])
def test_what_cannot_be_trusted_is_no_memory(far, spoil):
    far.want(notice())
    if spoil == "torn":
        far.file.write_bytes(far.file.read_bytes()[:-5])
    elif spoil == "other scope":
        far.file.write_bytes(far.file.read_bytes().replace(b"boot/here", b"boot/else"))
    else:
        far.file.chmod(0o666)
    assert far.another().load() == () and far.calls.deliveries == {}


def test_what_cannot_be_remembered_is_not_told(far, monkeypatch):
    def full(*_args, **_more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hook_calls.owned_files, "replace", full)
    far.want(notice())
    assert far.told == [] and "No space left" in far.calls.facts()[0]["failure"]


def test_without_a_thread_it_is_tried_again(far, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        far.want(notice())
    assert far.told == [] and "new thread" in far.calls.facts()[0]["failure"]
    far.turn("1s")
    assert far.statuses == [("noc", "firing")]


# ---- beside the controller ----


@pytest.fixture
def told(monkeypatch, tmp_path):
    """Calls that are made, in place of processes."""
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    calls = []

    def make(hook, event):
        calls.append((hook.name, event["status"], event["because"]))
        return "yes"

    monkeypatch.setattr(hook_calls, "call", make)
    return calls


def acting(apply, world, policy=POLICY):
    said, acts = [], []
    output = messages.Output("h1", said.append, acts.append)
    made = HookActing(parse(policy), apply, world.engine, directories.hook_calls(None), output)
    made.begin()
    return SimpleNamespace(hooks=made, said=said, acts=acts)


def test_a_dry_run_says_what_it_would_send_and_to_whom(told):
    world = World()
    made = acting(False, world)
    for _ in range(2):
        world.run("1s", slow=[1])
        made.hooks.turn(world.now, False)
    assert support.mentions(made.said[0], "hook noc", "would be", "POST https://noc.example/x", "{")
    assert support.mentions(made.said[1], "hook slurm", "would be", SCONTROL, NODE) and len(made.said) == 2
    assert [(act.actuator, act.outcome, act.under) for act in made.acts] == [("notify", "dry_run", "slow")] * 2
    for _ in range(6):
        world.run("1s")
        made.hooks.turn(world.now, False)
    assert [act.after for act in made.acts[2:]] == [{"POST https://noc.example/x": 0}, {f"{SCONTROL} for {NODE}": 0}]
    assert told == [] and not directories.hook_calls(None).exists() and made.hooks.take_back("over", 1.0) == ""


def test_a_stop_tells_everybody_and_reports_it(told):
    world = World()
    made = acting(True, world)
    world.run("1s", slow=[1])
    made.hooks.turn(world.now, False)
    assert made.hooks.take_back("the controller was stopped", 10.0) == ""
    resolved = [(name, why) for name, status, why in told if status == "resolved"]
    assert sorted(resolved) == [("noc", "the controller was stopped"), ("slurm", "the controller was stopped")]
    assert {act.outcome for act in made.acts} == {"undone"} | {"applied"} and not directories.hook_calls(None).exists()


def test_nothing_begins_and_nothing_ends_while_frozen(told):
    world = World()
    made = acting(True, world)
    world.run("1s", slow=[1])
    made.hooks.turn(world.now, True)
    assert not made.hooks.outstanding and made.hooks.facts()["notices"] == 0


def test_whoever_has_no_policy_ends_what_a_controller_left(told):
    world = World()
    made = acting(True, world)
    world.run("1s", slow=[1])
    made.hooks.turn(world.now, False)
    support.wait_until(lambda: len(told) == 2, 10, "both are told")
    acts, failures = hooks.undo(None, "the operator took everything back", 10.0)
    assert failures == [] and [act.outcome for act in acts] == ["undone"] * 2
    assert [status for _, status, _ in told].count("resolved") == 2
    assert hooks.undo(None, "again", 1.0) == ([], []) and len(told) == 4


def test_what_cannot_be_ended_stays_for_the_next(told, monkeypatch):
    world = World()
    made = acting(True, world)
    world.run("1s", slow=[1])
    made.hooks.turn(world.now, False)
    support.wait_until(lambda: len(told) == 2, 10, "both are told")

    def refuse(*_):
        raise SwerveError("no route to host")

    monkeypatch.setattr(hook_calls, "call", refuse)
    _, failures = hooks.undo(None, "off", 0.5)
    noc, slurm = failures
    assert support.mentions(noc, "noc", "no route to host") and support.mentions(slurm, "slurm", "no route to host")
    assert directories.hook_calls(None).exists()


def test_a_replay_tells_who_would_have_been_called(tmp_path):
    file, recording = tmp_path / "policy.yaml", tmp_path / "r.jsonl"
    file.write_text(DRAINING)
    with recording.open("wb") as out:
        for at in range(T0, T0 + 20 * SECOND, STEP):
            for rail in (1, 2):
                slow = rail == 1 and at < T0 + 2 * SECOND
                out.write(encode(measured(path(rail), at, 20 * MS if slow else 0)) + b"\n")
    words = ["policy", "replay", str(recording), "--policy", str(file), "--only-changes"]
    lines = CliRunner().invoke(root, words).output.splitlines()
    called = [line for line in lines if "notify noc" in line]
    assert "POST https://noc.example/x 0→1" in called[0] and "1→0" in called[1] and len(called) == 2
    assert lines.index(called[0]) > next(n for n, line in enumerate(lines) if "routes" in line or "dry_run" in line)
    assert any("2 calls of hooks" in line for line in lines)


def test_acts_of_hooks_are_signals():
    act = messages.notified("h1", "noc", "POST x", notice(), False, "applied")
    assert isinstance(act, Act) and act.acknowledged_ns is None and os.fsdecode(encode(act))
    assert act.paths == [notice().path]
