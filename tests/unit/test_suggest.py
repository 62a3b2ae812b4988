"""Flapping, replays that learn, what is kept of it, what `explain` shows of it, and suggestions from a recording."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from click.testing import CliRunner
from steering_kit import MS, SECOND, measured, path
from support import mentions

from pytools import directories
from pytools.errors import SwerveError
from pytools.signals import Act, encode
from steering.acting import memory
from steering.acting.memory import UsualFile
from steering.cli import root
from steering.deciding.thresholds import Learnt
from steering.deciding.usual import Entry, Key, Usuals
from steering.policy.file import parse
from steering.replay import suggesting
from steering.replay.player import Player
from steering.replay.suggesting import replaced, thresholds

START = time.monotonic_ns() // SECOND * SECOND
POLICY = """\
# What this is for.
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave-dead-path   # first
    when: {signal: silence, missed: 10}
    then: {shift: {share: 0}}
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: p50, above: ABOVE, samples: 3, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 30s, steps: [0.1, 0.5, 1.0], step: 3s}
"""
FIXED = POLICY.replace("ABOVE", "5ms")
RELATIVE = POLICY.replace("ABOVE", '"usual p99 × 3, at least 5ms, until learned 10ms"')


def busy(into_ns: int) -> int:
    """A queue of 64 KiB at 100 Mbit/s, as TCP fills it: 3.5 ms at the median, and full for a second of twenty."""
    if into_ns // SECOND % 20 == 13:
        return 5_090_000
    return 2 * MS + into_ns // (200 * MS) * 7919 % 2_900 * 1000


def story(healthy_s=90, congested_s=13, after_s=120, every_ns=200 * MS, drained_ns=20_000):
    """The first hour's: a busy rail, cut to a tenth, left, healed, taken again; what leaves it, an act decides."""
    at = START
    end = START + (healthy_s + congested_s + after_s) * SECOND
    while at < end:
        second = (at - START) / SECOND
        congested = healthy_s <= second < healthy_s + congested_s
        # The dwell of 30 s counts from the healing; before that the rail carries nothing of ours.
        unused = healthy_s + congested_s <= second < healthy_s + congested_s + 31
        yield measured(path(1), at, 41 * MS if congested else drained_ns if unused else busy(at - START))
        yield measured(path(2), at, min(busy(at - START), 4 * MS))
        at += every_ns


def outs(text, signals):
    """When rail 1 was left, in seconds."""
    events = Player(parse(text)).play(signals)
    return [
        (each.at_ns - START) / SECOND
        for each in events
        if isinstance(each, Act) and each.after["10.1.1.1 dev rail1"] == 0
    ]


def test_a_busy_healed_rail_is_left_again_by_a_figure_and_not_by_what_is_usual():
    assert len(outs(FIXED, story())) == 2, "the figure leaves it again once it carries traffic"
    assert outs(RELATIVE, story()) == [pytest.approx(90, abs=1)], "left once, for what was congestion"


def test_not_even_before_anything_is_learnt():
    assert outs(RELATIVE, story(healthy_s=2)) == [pytest.approx(2, abs=1)]


def test_a_replay_that_learns_is_the_same_each_time():
    def once():
        player = Player(parse(RELATIVE))
        events = [msgspec.json.encode(each) for each in player.play(story()) if not isinstance(each, str)]
        return events, player.engine.usual.entries()

    first, second = once(), once()
    assert first == second and first[1][0].learnt.count > 290


# ---- what is kept ----

ENTRY = Entry(Key(path(1), "queueing_delay p50", "p99", 5e6), Learnt(400, START, 4.0 * MS))


def kept(folder, entries=(ENTRY,), said=None):
    usuals = Usuals(parse(RELATIVE))
    with UsualFile(folder, usuals, (said if said is not None else []).append):
        usuals.restore(entries, time.monotonic_ns())
    return folder / memory.USUAL_FILE


def test_the_next_controller_begins_with_it(tmp_path):
    file = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    usuals = Usuals(parse(RELATIVE))
    with UsualFile(tmp_path, usuals, print):
        assert usuals.entries() == [ENTRY]
        assert next(usuals.rows([path(1)])).limits.above == 12 * MS


def test_it_is_written_when_there_is_something_new_and_not_too_often(tmp_path):
    usuals = Usuals(parse(RELATIVE))
    file = UsualFile(tmp_path, usuals, print)
    file.tick(START)
    assert not (tmp_path / memory.USUAL_FILE).exists(), "nothing is learnt"
    usuals.restore([ENTRY], START)
    file.tick(START)
    first = (tmp_path / memory.USUAL_FILE).read_bytes()
    usuals.restore([msgspec.structs.replace(ENTRY, learnt=Learnt(500, START, 5e6))], START)
    file.tick(START + memory.USUAL_EVERY_NS - 1)
    assert (tmp_path / memory.USUAL_FILE).read_bytes() == first
    file.tick(START + memory.USUAL_EVERY_NS)
    assert (tmp_path / memory.USUAL_FILE).read_bytes() != first


@pytest.mark.parametrize("content", [b"", b"{", b'{"at_ns":"x","entries":[]}', b"\xff" * 100])
def test_what_makes_no_sense_is_left_out(tmp_path, content):
    (tmp_path / memory.USUAL_FILE).write_bytes(content)
    assert memory.read_usual(tmp_path) == (0, ())


def test_what_others_could_have_written_is_left_out(tmp_path):
    kept(tmp_path).chmod(0o666)
    assert memory.read_usual(tmp_path) == (0, ())


def test_a_place_that_cannot_be_written_is_said_once(tmp_path):
    said, usuals = [], Usuals(parse(RELATIVE))
    file = UsualFile(tmp_path / "none", usuals, said.append)
    usuals.restore([ENTRY], START)
    file.tick(START)
    file.tick(START + memory.USUAL_EVERY_NS)
    assert len(said) == 1 and said[0].startswith("what is usual is not kept for the next controller: ")


# ---- what explain shows ----


@pytest.fixture
def instance(tmp_path, monkeypatch):
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    directories.runtime_dir("x").mkdir(parents=True)
    return "x"


def invoked(*words):
    done = CliRunner().invoke(root, ["policy", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit | SwerveError), done.exception
    return done


def policy_file(folder, text):
    file = folder / "policy.yaml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_explain_shows_what_the_controller_has_learnt(instance, tmp_path):
    file = policy_file(tmp_path, RELATIVE)
    assert mentions(invoked("explain", file, "-n", "x").output, "nothing learned", "instance x")
    early = Entry(Key(path(2), "queueing_delay p50", "p99", 5e6), Learnt(40, START, early=(1e6,) * 40))
    kept(directories.runtime_dir("x"), (ENTRY, early)).chmod(
        0o666
    )  # not to be obeyed, as one of a service's user for root
    lines = invoked("explain", file, "-n", "x").output.splitlines()
    assert lines[-3].startswith("What is usual on each path, learned by the controller of instance x, ")
    rule = ("leave-congested-rail", "queueing_delay p50", "above")
    assert mentions(lines[-2], str(path(1)), *rule, "3 × usual p99", "4 ms", "clear below 1 ms")
    assert mentions(lines[-1], str(path(2)), *rule, "10 ms", "learning", "40 of 300", "clear below 1 ms")
    facts = json.loads(invoked("explain", file, "-n", "x", "-j").output)["usual"]
    assert [(each["usual"], each["measurements"], each["above"]) for each in facts] == [
        (4e6, 400, 12e6),
        (None, 40, 10e6),
    ]


def test_explain_shows_nothing_of_the_kind_for_figures(instance, tmp_path):
    assert "usual" not in invoked("explain", policy_file(tmp_path, FIXED), "-n", "x").output


# ---- suggestions ----


def recorded(folder, signals):
    file = folder / "recording.jsonl"
    file.write_bytes(b"".join(encode(each) + b"\n" for each in signals))
    return file


def test_a_suggestion_ends_the_flapping(instance, tmp_path):
    recording, present = recorded(tmp_path, story()), policy_file(tmp_path, FIXED)
    found = json.loads(invoked("suggest", recording, "--policy", present, "-j").output)
    assert found["present"]["acts_by_rule"]["leave-congested-rail"] > 2 and found["present"]["reversals"] == 1
    assert found["suggested"]["reversals"] == 0
    assert found["suggested"]["acts"] == 4, "left once, and back in three steps"
    (threshold,) = found["thresholds"]
    assert threshold["signal"] == "queueing_delay p50" and threshold["measurements"] > 300
    assert threshold["usual_p99"] == pytest.approx(4 * MS, rel=0.025), "of rail 2: rail 1 was out for too long"
    assert threshold["above"] == "usual p99 × 3, at least 6.1ms, at most 61ms, until learned 13ms"
    assert len(outs(found["policy"], story())) == 1


def test_its_text_is_the_present_policy_with_other_thresholds(instance, tmp_path):
    recording, present = recorded(tmp_path, story()), policy_file(tmp_path, FIXED)
    text = invoked("suggest", recording, "--policy", present).output
    parse(text)
    said = [line for line in text.splitlines() if line.startswith("# ")]
    assert said[0].startswith(f"# Suggested by `swerve policy suggest` from {recording}: 223 s.")
    assert any(line.startswith(f"# Over this time {present}: ") and "reversals" in line for line in said)
    assert any(
        line.startswith("# Over this time the policy below: 4 acts (4 by leave-congested-rail)") for line in said
    )
    body = text[text.index("# What this is for.") :]
    begin, end = body.index('above: "usual'), body.index(", samples: 3")
    assert body[:begin] + "above: 5ms" + body[end:].replace('"above × 0.2"', "1ms") == FIXED


def test_without_a_policy_one_for_queues(instance, tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "default_policy", lambda: tmp_path / "none.yaml")
    text = invoked("suggest", recorded(tmp_path, story())).output
    policy = parse(text)
    assert policy.manage.destinations == ("10.9.0.2/32",)
    assert [rule.name for rule in policy.rules] == ["leave-dead-path", "leave-congested-rail"]
    assert any(line[0] == "#" and mentions(line, "10 ms", "4 acts") for line in text.splitlines() if line)


@pytest.mark.parametrize(
    ("signals", "text", "why", "hint"),
    [
        (lambda: story(30, 0, 0), FIXED, "too little was recorded while all was well: at most 1", "under load"),
        (lambda: story(0, 200, 0), FIXED, "no path was healthy at any time", "--since, --until"),
        (lambda: [], FIXED, "no path that the policy manages was measured", "--since"),
        (story, FIXED.replace("10.9.0.0/16", "10.8.0.0/16"), "no path that the policy manages", "--since"),
        (story, FIXED.partition("  - name: leave-congested")[0], "no rule of this policy has a thr", "--policy"),
    ],
    ids=["little", "ill", "nothing", "unmanaged", "no-threshold"],
)
def test_what_cannot_be_said_is_an_error_with_a_next_step(instance, tmp_path, signals, text, why, hint):
    both_bad = [
        measured(each.path, each.at_ns, 41 * MS) if why.startswith("no path was") else each for each in signals()
    ]
    done = invoked("suggest", recorded(tmp_path, both_bad), "--policy", policy_file(tmp_path, text))
    assert done.exit_code == 1
    error = done.exception
    assert isinstance(error, SwerveError), done.output
    assert str(error).startswith(why) and hint in error.next_step


def test_standard_input_cannot_be_read_twice(instance):
    assert "cannot be read twice" in str(invoked("suggest", "-").exception)


def test_much_ill_time_is_said(instance, tmp_path):
    signals = story(70, 100, 30)
    text = invoked("suggest", recorded(tmp_path, signals), "--policy", policy_file(tmp_path, FIXED)).output
    assert "of it the paths were not healthy by" in text


def test_an_idle_recording_gives_the_floor(tmp_path):
    survey = suggesting.Survey(policy := parse(FIXED))
    signals = (measured(path(rail), START + i * 200 * MS, 2_000) for i in range(400) for rail in (1, 2))
    suggesting.play(policy, signals, survey)
    (found,) = suggesting.proposals(policy, survey).values()
    assert found.text == "usual p99 × 3, at least 1ms, at most 10ms, until learned 2ms"


def test_places_in_trees_and_texts():
    text = POLICY.replace(
        "{signal: queueing_delay, quantile: p50, above: ABOVE, samples: 3, clear_below: 1ms}",
        """
      any:
        - not: {signal: link, event: flap}
        - signal: loss
          above: 0.5   # half
          clear_below: 0.1""",
    )
    assert thresholds(text)["leave-congested-rail"][1] == ("rules", 1, "when", "any", 1)
    changed = replaced(text, {("rules", 1, "when", "any", 1, "above"): "x", ("version",): "2"})
    assert changed == text.replace("above: 0.5   #", 'above: "x"   #').replace("version: 1", 'version: "2"')


def test_the_classes_are_fine_enough():
    import numpy as np

    values = np.random.default_rng(3).lognormal(np.log(2 * MS), 1.0, 5_000)
    counts = suggesting.Counts()
    for i, value in enumerate(values):
        counts.add(float(value), START + i * 200 * MS)
    found = counts.usual(0.0)
    assert found == pytest.approx(np.quantile(values, 0.99, method="inverted_cdf"), rel=0.025)
    assert counts.number == 5_000
