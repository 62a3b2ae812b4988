"""Replays: the acts of a recording by hand, honesty about what is missing, and byte soup."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
import samples
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from steering_kit import MS, POLICY, SECOND, measured, path
from support import mentions

from pytools.ipc.wire import LINE_BYTES
from pytools.kernel.leftovers import FIRST_ID
from pytools.recording import files
from pytools.recording.reader import Read
from pytools.signals import Act, BondPort, GroupMember, NexthopGroup, PathState, encode
from steering.cli import root
from steering.policy.file import parse
from steering.replay import timeline
from steering.replay.player import Note, Player
from steering.replay.recording import Recording, kinds_of
from steering.replay.virtual_kernel import VirtualKernel

START = 10**12
FIRST, OTHER = "10.1.1.1 dev rail1", "10.2.1.1 dev rail2"
WITH_ALERT = (
    POLICY
    + """\
  - name: lossy
    when: {signal: loss, above: 0.5, clear_below: 0.1}
    then: {alert: {}}
"""
)
WITH_ALL = POLICY.replace("[10.9.0.0/16]}", '[10.9.0.0/16, "fd00:9::/64"]}\nports: {}\nlabels: {}\nbonds: {}')


def records(seconds, bad=lambda _: False, start=START, rails=(1, 2), every_ns=20 * MS):
    """Measurements of the rails; rail 1 is congested while `bad(second)` holds."""
    for at in range(start, start + int(seconds * SECOND), every_ns):
        for rail in rails:
            congested = rail == 1 and bad((at - start) / SECOND)
            yield measured(path(rail), at, 20 * MS if congested else 0)


def played(signals, policy=POLICY, host=""):
    """The events of a replay, the player, the recording."""
    data = b"".join(each if isinstance(each, bytes) else encode(each) + b"\n" for each in signals)
    found = parse(policy)
    player = Player(found)
    told = Read()
    recording = Recording(files.lines(io.BytesIO(data), told), told, kinds_of(found), host)
    return list(player.play(recording)), player, recording


def acts(events):
    return [each for each in events if isinstance(each, Act) and each.actuator != "alert"]


def between(begin, end):
    return lambda second: begin <= second < end


def recorded_group(prefix, weight):
    """Both rails in one group, as the agent tells of it."""
    return NexthopGroup(
        host="h1",
        at_ns=START,
        unix_ns=START,
        group_id=102,
        destinations=[prefix],
        members=[
            GroupMember(
                nexthop_id=10 + rail, gateway=f"10.{rail}.1.1", interface=f"rail{rail}", weight=weight, packets=None
            )
            for rail in (1, 2)
        ],
    )


def test_congestion_that_comes_and_goes():
    events, player, _ = played(records(20, between(2, 4)))
    assert [each.after[FIRST] / each.after[OTHER] for each in acts(events)] == [0, 0.1, 0.5, 1]
    assert {each.outcome for each in acts(events)} == {"dry_run"}
    assert all(each.under == "leave-congested-rail" and "queueing delay" in each.because for each in acts(events))
    first = acts(events)[0]
    assert 2 * SECOND + 40 * MS <= first.at_ns - START <= 2 * SECOND + 70 * MS, "bad for 40 ms"
    assert first.unix_ns == first.at_ns, "the clock is the recording's"
    states = [each.state for each in events if isinstance(each, PathState) and each.path == path(1)]
    assert states == ["unmeasured", "healthy", "suspect", "drained", "returning", "healthy"]
    times = player.tally.in_state_ns[path(1)]
    assert times["drained"] == pytest.approx(3 * SECOND, abs=0.2 * SECOND), "2 s of congestion, a dwell of 1 s"
    assert sum(times.values()) == pytest.approx(20 * SECOND, abs=0.1 * SECOND)
    assert player.tally.reversals == 0


def test_a_relapse_is_a_reversal():
    events, player, _ = played(records(12, lambda second: 2 <= second < 4 or 5.1 <= second < 8))
    assert player.tally.reversals == 1
    assert [each.after[FIRST] for each in acts(events)][:3] == [0, 1, 0]


def test_silence_gives_the_original_weights_back_in_the_middle_of_a_gap():
    congested = [each for each in records(3, between(1, 99))]
    later = list(records(1, start=START + 3600 * SECOND))
    events, player, _ = played([*congested, *later])
    back = acts(events)[-1]
    assert back.after == {FIRST: 1, OTHER: 1}
    silence = back.at_ns - congested[-1].at_ns
    assert 2 * SECOND <= silence <= 2.2 * SECOND, "baseline_after"
    assert player.tally.played_ns == pytest.approx(3601 * SECOND, abs=SECOND)


def test_recorded_groups_stand_for_those_made_up():
    group = recorded_group("10.9.0.2/32", 2)
    measurements = list(records(4, between(1, 3)))
    events, player, _ = played([*measurements[:10], group, *measurements[10:]])
    assert list(player.kernel.groups) == ["nexthop_group:102"]
    assert acts(events)[0].before == {FIRST: 2, OTHER: 2}
    assert acts(events)[0].target == "nexthop_group:102"
    other_weights = msgspec.structs.replace(group, members=[group.members[1]])
    lines = timeline.summary_lines(*_summary([*measurements[:10], group, other_weights]))
    assert any(mentions(line, "weights", "changed", "recorded") for line in lines)


def test_what_one_host_says_moves_its_own_traffic_alone_as_when_it_is_live():
    group = recorded_group("10.9.0.0/24", 1)
    to_h2 = list(records(90, between(1, 3)))
    to_h3 = [measured(path(rail, "h3"), at, 0) for at in range(START, START + 90 * SECOND, 20 * MS) for rail in (1, 2)]
    events, player, _ = played([group, *sorted((*to_h2, *to_h3), key=lambda each: each.at_ns)])
    assert {act.target for act in acts(events)} == {"overlay:main:10.9.0.2"}
    assert next(act.after[FIRST] for act in acts(events)) == 0
    assert list(player.kernel.groups) == ["nexthop_group:102"], "together again after a minute"


def _summary(signals, **how):
    _, player, recording = played(signals, **how)
    return recording, player


def test_of_groups_that_carry_more_than_is_managed_what_is_managed_is_steered():
    group = NexthopGroup(
        host="h1",
        at_ns=START,
        unix_ns=START,
        group_id=7,
        destinations=["10.9.0.2/32", "192.0.2.0/24"],
        members=[GroupMember(nexthop_id=1, gateway="10.1.1.1", interface="rail1", weight=1, packets=None)],
    )
    kernel = VirtualKernel(["10.9.0.0/16"])
    kernel.see_group(group)
    assert kernel.groups["nexthop_group:7"].destinations == ("10.9.0.2/32",)
    assert kernel.target_of("10.9.0.2") == "nexthop_group:7" and kernel.target_of("192.0.2.1") is None


def test_a_group_of_steerings_own_is_no_group_to_be_steered():
    """Recorded while ours was in force: its weights are no owner's, and a drained hop is missing."""
    kernel = VirtualKernel(["10.9.0.0/16"])
    kernel.see_path(path(1))
    kernel.see_path(path(2))
    ours = NexthopGroup(
        host="h1",
        at_ns=START,
        unix_ns=START,
        group_id=FIRST_ID + 2,
        destinations=["10.9.0.2/32"],
        members=[GroupMember(nexthop_id=1, gateway="10.2.1.1", interface="rail2", weight=1, packets=None)],
    )
    before = dict(kernel.groups)
    assert not kernel.see_group(ours) and kernel.groups == before
    assert kernel.reweighted == 1


def test_alerts_are_told():
    lossy = [measured(path(1), START + n * 20 * MS, 0, lost=9, received=1) for n in range(50)]
    events, player, _ = played(lossy, WITH_ALERT)
    assert [each.outcome for each in events if isinstance(each, Act) and each.actuator == "alert"] == ["alert"]
    assert player.tally.alerts == 1


def test_what_is_left_out_is_said():
    foreign = msgspec.structs.replace(measured(path(1), START, 0), host="h9")
    broken = [b"{\n", b"\xff\xfe\n", b"[1]\n", b'{"type":"path_delay"}\n', b'{"type":"self"}\n', b"\n"]
    long = b'{"type":"path_delay",' + b" " * (2 * LINE_BYTES) + b"}\n"
    _, player, recording = played([*records(1), *broken, long, foreign, *records(1, start=START + SECOND)])
    counts = recording.counts
    assert (counts.used, counts.broken, counts.other_hosts) == (200, 5, {"h9": 1})
    assert counts.first_broken == 101
    assert counts.not_needed == 1
    lines = timeline.summary_lines(recording, player)
    assert any("5 lines are not signals" in line and "line 101" in line for line in lines)
    assert any("h9 1" in line for line in lines)
    assert any("no traffic moved" in line for line in lines)
    _, _, other = played([*records(1), foreign], host="h9")
    assert other.counts.used == 1
    _, player, oversized = played([*records(1), long])
    (note,) = [line for line in timeline.summary_lines(oversized, player) if "not signals" in line]
    assert mentions(note, "1 lines", "skipped", "too long", "unpacked")


def test_a_clock_that_goes_back_is_another_run():
    events, player, _ = played([*records(3, between(1, 99)), *records(3, start=START - 60 * SECOND)])
    assert player.tally.restarts == 1
    assert [type(each) for each in events].count(Note) == 1
    after = events[[isinstance(each, Note) for each in events].index(True) :]
    assert acts(after) == []


def test_an_unmanaged_destination_is_left_alone():
    events, player, _ = played(
        [
            msgspec.structs.replace(each, path=msgspec.structs.replace(each.path, address="192.0.2.1"))
            for each in records(3)
        ]
    )
    assert events == [] and player.kernel.unmanaged == {"192.0.2.1"}


def test_the_command_prints_a_timeline_or_signals(tmp_path):
    recording, policy = tmp_path / "recording.jsonl", tmp_path / "policy.yaml"
    recording.write_bytes(b"".join(encode(each) + b"\n" for each in records(8, between(1, 3))))
    policy.write_text(POLICY)
    words = ["policy", "replay", str(recording), "--policy", str(policy)]
    text = CliRunner().invoke(root, words)
    assert text.exit_code == 0 and "4 acts" in text.output and "drained because" in text.output
    short = CliRunner().invoke(root, [*words, "--only-changes"])
    assert "drained because" not in short.output and "dry_run" in short.output
    lines = [json.loads(line) for line in CliRunner().invoke(root, [*words, "-j"]).output.splitlines()]
    assert {line["type"] for line in lines} == {"path_state", "act", "replay_summary"}
    assert lines[-1]["acts"] == 4 and lines[-1]["reversals"] == 0
    policy.write_text("nonsense")
    assert CliRunner().invoke(root, words).exit_code != 0


# ---- byte soup ----

_numbers = st.integers(-(2**70), 2**70) | st.floats() | st.integers(0, 2 * 10**12)
_junk = st.none() | st.booleans() | _numbers | st.text(max_size=8) | st.lists(st.integers(), max_size=3)
_bonded = samples.link(bond="bond0", port=BondPort("active-backup", "layer2", True, "up", "", 0, 0))
_real = [json.loads(encode(each)) for each in (*records(0.2), samples.path_way(), _bonded)]


@st.composite
def almost_signals(draw):
    """A signal with some of its values replaced, also deep inside."""
    raw = json.loads(json.dumps(draw(st.sampled_from(_real))))
    for _ in range(draw(st.integers(0, 4))):
        place = raw
        key = draw(st.sampled_from(sorted(place)))
        while isinstance(place[key], dict) and place[key] and draw(st.booleans()):
            place = place[key]
            key = draw(st.sampled_from(sorted(place)))
        place[key] = draw(_junk)
    try:
        return json.dumps(raw).encode() + b"\n"
    except ValueError:
        return b"\n"


@settings(max_examples=150)
@given(
    st.lists(st.binary(max_size=60) | almost_signals(), max_size=40), st.sampled_from([POLICY, WITH_ALERT, WITH_ALL])
)
def test_no_byte_soup_crashes_a_replay(lines, policy):
    events, player, recording = played(lines, policy)
    for event in events:
        timeline.text_of(event)
        timeline.json_of(event)
    timeline.summary_lines(recording, player)
    json.dumps(timeline.summary(recording, player))
