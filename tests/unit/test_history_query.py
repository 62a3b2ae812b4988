"""Records of the past: `watch --since` joins them to the present exactly, `replay` reads them back with the filters."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import samples
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from serving import Served
from support import ROOT, SWERVE, mentions, wait_until

from pytools import cli, directories
from pytools.config import Recording
from pytools.ipc.client import LineClient
from pytools.ipc.wire import TAGS
from pytools.recording import files, segments
from pytools.recording.reader import Read
from pytools.recording.segments import NEVER
from pytools.recording.writer import TrackWriter
from pytools.signals import Act, AnySignal, PathDelay, TcpFlow, decode, encode
from pytools.sources.recording import RecordingSource
from pytools.views import history_query
from pytools.views.filters import parse

SECOND = 1_000_000_000


def act(number: int, unix_ns: int | None = None) -> Act:
    at = time.time_ns() if unix_ns is None else unix_ns
    return msgspec.structs.replace(samples.act(), act_id=str(number), unix_ns=at)


# ---- files ----


def lines_of(data: bytes) -> tuple[list[bytes], Read]:
    told = Read()
    return list(files.lines(io.BytesIO(data), told)), told


def test_plain_and_gzip_are_told_apart_by_what_they_begin_with() -> None:
    lines = [encode(each) for each in samples.one_of_each()]
    plain = b"".join(line + b"\n" for line in lines)
    assert lines_of(plain)[0] == lines
    assert lines_of(gzip.compress(plain))[0] == lines
    assert lines_of(gzip.compress(plain) + gzip.compress(plain))[0] == 2 * lines, "as of cat a.gz b.gz"
    assert lines_of(plain.rstrip(b"\n"))[0] == lines, "the last line without its end"
    assert lines_of(b"") == ([], Read())


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_lines_or_counted(data: bytes, packed: bool) -> None:
    given_ = gzip.compress(data) if packed else data
    if not packed and data.startswith(b"\x1f\x8b"):
        return
    found, told = lines_of(given_)
    assert found == [line for line in data.split(b"\n") if line]
    assert told.broken == 0


@given(st.integers(2, 400))
def test_gzip_that_is_cut_is_read_as_far_as_it_goes(cut: int) -> None:
    plain = b"".join(b"%d\n" % number for number in range(100))
    found, _ = lines_of(gzip.compress(plain)[:cut])
    whole = plain.splitlines()
    assert found[:-1] == whole[: len(found[:-1])]
    assert not found or whole[len(found) - 1].startswith(found[-1]), "of the last one as much as there is"


def test_what_a_pipe_has_is_read_before_it_ends() -> None:
    near, far = os.pipe()
    with open(near, "rb") as reading, open(far, "wb", buffering=0) as writing:
        found = files.lines(reading, Read())
        for number in (b"1", b"22", b"333"):
            writing.write(number + b"\n")
            assert next(found) == number


def test_a_line_without_an_end_takes_no_memory_and_is_counted() -> None:
    found, told = lines_of(b"1\n" + b"x" * (3 << 20) + b"\n2\n")
    assert found == [b"1", b"2"] and told.broken == 1


# ---- what is wanted ----


def passing(signals: list[AnySignal], **wanted: object) -> list[AnySignal]:
    told = Read()
    lines = history_query.passing([encode(each) for each in signals], history_query.Wanted(**wanted), told)  # type: ignore[arg-type]
    found = [decode(line) for line in lines]
    assert told.broken == 0
    return found


def test_types_times_hosts_and_filters_narrow() -> None:
    told = samples.one_of_each()
    at = told[0].unix_ns
    assert passing(told) == told
    assert [type(each) for each in passing(told, types=frozenset({"act", "tcp_flow"}))] == [TcpFlow, Act]
    assert passing(told, since_ns=at) == told and passing(told, since_ns=at + 1) == []
    assert passing(told, until_ns=at) == [] and passing(told, until_ns=at + 1) == told
    assert passing(told, host="h1") == told and passing(told, host="h2") == []
    found = passing(told, filters=parse(path=["rail1"]))
    assert any(isinstance(each, PathDelay) for each in found) and not any(isinstance(each, Act) for each in found)


def test_fields_of_later_programs_are_handed_on_untouched() -> None:
    line = json.dumps(json.loads(encode(samples.act())) | {"comes_later": [1, 2]}).encode()
    assert list(history_query.passing([line], history_query.Wanted(types=frozenset({"act"})), Read())) == [line]


@pytest.mark.parametrize("line", [b"{}", b"[]", b"null", b"\xff", b"{", b'{"type":"act","unix_ns":"x"}'])
def test_what_is_no_record_is_left_out_and_counted(line: bytes) -> None:
    told = Read()
    assert list(history_query.passing([line, encode(samples.act())], history_query.Wanted(since_ns=1), told)) == [
        encode(samples.act())
    ]
    assert told.broken == 1


# ---- from the past into the present ----


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "x" / "agent.sock", queue_bytes=1 << 24)
    yield one
    one.close()


@pytest.mark.slow
def test_since_joins_what_was_recorded_to_what_is_told_with_nothing_twice_or_left_out(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an agent publishes an act a millisecond, and records them."""
    monkeypatch.setattr(history_query, "_WRITTEN_NS", 3 * SECOND // 2)
    recording = RecordingSource(Recording(), tmp_path / "recording", SECOND, served.bus)
    done, numbers = threading.Event(), iter(range(1 << 30))

    def agent() -> None:
        due = 0
        while not done.is_set():
            served.bus.publish(act(next(numbers)))
            due = due if due > time.monotonic_ns() else recording.tick(time.monotonic_ns())
            served.turn(0.001)

    for _ in range(500):
        served.bus.publish(act(next(numbers)))
    recording.tick(0)
    old_ns = time.time_ns() + history_query._WRITTEN_NS
    wait_until(lambda: time.time_ns() > old_ns, 20, "these are certainly written")
    client = LineClient(served.path, frozenset({"act"}))  # the agent hears of it once it turns
    thread = threading.Thread(target=agent)
    thread.start()
    try:
        since = history_query.Wanted(types=frozenset({"act"}), since_ns=time.time_ns() - 3600 * SECOND)
        found: list[int] = []
        for lot in history_query.recorded_and_on(tmp_path / "recording", client, since, Read()):
            found += [int(msgspec.json.decode(line)["act_id"]) for line in lot]
            if len(found) > 6000:
                break
    finally:
        done.set()
        thread.join()
        recording.close()
    assert client.dropped == 0
    assert found == list(range(len(found)))


# ---- the commands ----


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    return directories.recording("", "x")


def run(*words: str, stdin: bytes = b"") -> Result:
    command = next(each for each in cli.commands if each.name == words[0])
    return CliRunner().invoke(command, list(words[1:]), input=stdin, standalone_mode=False)


def recorded(folder: Path, signals: list[AnySignal]) -> None:
    from pytools.ipc.bus import Bus

    bus = Bus()
    source = RecordingSource(Recording(), folder, SECOND, bus)
    for each in signals:
        bus.publish(each)
    source.close()


def recorded_then(folder: Path, signals: list[Act]) -> None:
    """The same, each at its own time."""
    folder.mkdir(parents=True)
    writers = [TrackWriter(folder, track, 1 << 20, 1 << 60) for track in segments.TRACKS]
    for writer in writers:
        for each in signals:
            writer.write(encode(each) + b"\n", each.unix_ns)
        writer.close()


def test_watch_until_reads_the_recording_and_needs_no_agent(state: Path) -> None:
    now = time.time_ns()
    told = [act(number, now - (300 - number) * SECOND) for number in range(200)]
    recorded_then(state, told)
    done = run("watch", "-n", "x", "--since", "250s", "--until", "210s")
    shown = [int(json.loads(line)["act_id"]) for line in done.stdout.splitlines()]
    assert done.exception is None and shown == list(range(shown[0], shown[0] + 40)) and shown[0] in (50, 51)
    few = run("watch", "-n", "x", "--since", "1h", "--until", "0s", "-c", "3")
    assert len(few.stdout.splitlines()) == 3
    assert isinstance(run("watch", "-n", "x", "--until", "1m").exception, Exception)
    never = run("watch", "-n", "x", "--since", "1h", "--until", "0s", "--type", "tcp_flow")
    assert never.stdout == "" and "tcp_flow is not recorded" in never.stderr


def test_replay_reads_back_what_was_recorded(state: Path) -> None:
    told = samples.one_of_each()
    recorded(state, told)
    kept = [encode(each).decode() for each in told if TAGS[type(each)] not in NEVER]
    assert run("replay", "-n", "x").stdout.splitlines() == kept
    assert run("replay", str(state)).stdout.splitlines() == kept
    one = run("replay", "-n", "x", "--type", "act")
    assert [json.loads(line)["type"] for line in one.stdout.splitlines()] == ["act"]


def test_replay_reads_a_file_and_a_pipe_and_says_what_it_left_out(tmp_path: Path) -> None:
    told = samples.one_of_each()
    lines = b"".join(encode(each) + b"\n" for each in told)
    file = tmp_path / "watched.jsonl.gz"
    file.write_bytes(gzip.compress(lines + b"{oh\n"))
    done = run("replay", str(file), "--type", "path_delay", "--type", "act")
    assert len(done.stdout.splitlines()) == 2
    assert "1 lines were skipped" in done.stderr
    piped = run("replay", "-", "--path", "rail1", stdin=lines)
    assert piped.exception is None and len(piped.stdout.splitlines()) > 5
    assert all("rail1" in line for line in piped.stdout.splitlines())


@pytest.mark.parametrize("words", [(), ("--path", "rail1")])
def test_a_line_that_a_kill_cut_off_is_left_out_and_counted(tmp_path: Path, words: tuple[str, ...]) -> None:
    """So are lines of something else, and times that are none; types of later programs are handed on."""
    good = encode(samples.path_delay(1))
    later = good.replace(b'"path_delay"', b'"comes_later"', 1)
    file = tmp_path / "watched.jsonl"
    endless = good.replace(b'"unix_ns":', b'"unix_ns":9223372036854775807', 1)
    file.write_bytes(b"\n".join([good, b"hello", endless, *([] if words else [later]), good[:-30]]))
    done = run("replay", str(file), *words)
    assert done.stdout.encode().splitlines() == [good, *([] if words else [later])]
    assert "swerve: 3 lines were skipped" in done.stderr


def test_a_time_of_which_nothing_is_recorded_is_told(state: Path) -> None:
    recorded(state, samples.one_of_each())
    for words in (("watch", "--since", "400d", "--until", "300d"), ("replay", "--until", "300d", "--view", "delay")):
        done = run(*words, "-n", "x")
        assert done.stdout == ""
        assert re.search(r"^swerve: nothing was recorded then; .* reaches from 20\d\d-.* to 20\d\d-", done.stderr)
        assert len(done.stderr.splitlines()) == 1
    quiet = run("replay", "-n", "x", "--verdict", "dead")
    assert quiet.stdout == "" == quiet.stderr, "there is something, of another kind"


def test_a_file_without_signals_has_no_table(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    done = run("replay", str(tmp_path / "empty.jsonl"), "--view", "delay")
    assert done.stdout == "" and mentions(done.stderr, "swerve", f"{tmp_path}/empty.jsonl", "no signal")


@pytest.mark.parametrize("view", ["delay", "tcp", "links", "rdma", "clocks", "drops"])
def test_replay_shows_a_table_of_how_it_was_at_the_end(tmp_path: Path, view: str) -> None:
    file = tmp_path / "watched.jsonl"
    file.write_bytes(b"".join(encode(each) + b"\n" for each in samples.one_of_each()))
    done = run("replay", str(file), "--view", view, "--no-color")
    assert done.exception is None, done.exception
    assert "h1" in done.stdout
    as_json = run("replay", str(file), "--view", view, "-j")
    assert as_json.stdout and all(decode(line) for line in as_json.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("replay", "none.jsonl"), "swerve watch"),
        (("replay", "-n", "x"), "there is no recording"),
        (("replay", "-", "--view", "delya"), "did you mean delay"),
        (("replay", "-", "--type", "none"), "no such signal type"),
        (("replay", "-", "--since", "noon"), "is not a time"),
        (("replay", "-", "--sort", "x"), "--view"),
        (("watch", "-n", "x", "--since", "1h", "--until", "1m"), "there is no recording"),
        (("watch", "-n", "x", "--since", "1m", "--until", "1h"), "--until is before --since"),
        (("replay", "-", "--since", "1m", "--until", "1h"), "--until is before --since"),
        (("watch", "-n", "x", "--since", "2999-01-01"), "--since is still to come"),
    ],
)
def test_errors_say_what_to_do_next(state: Path, words: tuple[str, ...], said: str) -> None:
    error = run(*words).exception
    assert error is not None and said in str(error)


def test_what_a_killed_watch_has_written_is_read_back(tmp_path: Path) -> None:
    """Whole lines, in order, none twice: but for the last one, which the kill may have cut."""
    served = Served(tmp_path / "run" / "x" / "agent.sock", queue_bytes=1 << 24)
    file = tmp_path / "watched.jsonl"
    with file.open("wb") as out:
        environment = {**os.environ, "SWERVE_RUNTIME_DIR": str(tmp_path / "run")}
        process = subprocess.Popen(
            [*SWERVE, "watch", "-n", "x", "--type", "act"], stdout=out, env=environment, cwd=ROOT
        )
    try:
        served.until(lambda: served.bus.wanted("act"), "it has subscribed")
        number = 0
        while file.stat().st_size < 1 << 20:
            served.bus.publish(act(number))
            number += 1
            served.turn()
    finally:
        process.kill()
        process.wait(10)
        served.close()
    done = run("replay", str(file))
    read = [int(json.loads(line)["act_id"]) for line in done.stdout.splitlines()]
    assert read == list(range(len(read))) and len(read) > 1000
    assert len(read) >= file.read_bytes().count(b"\n")
