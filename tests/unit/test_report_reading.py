"""Where a report comes from: files and recordings of several hosts, the flight recorder, an agent; and the command."""

from __future__ import annotations

import gzip
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import report_world
import samples
from click.testing import CliRunner, Result
from msgspec.structs import replace as replaced
from report_world import World
from serving import Served

from pytools import cli, directories
from pytools.errors import SwerveError, UsageError
from pytools.signals import AnySignal, encode
from pytools.views.report import reading
from pytools.views.report.aggregate import Report
from pytools.views.report.gather import TYPES
from pytools.views.report.reading import Asked

SECOND = 1_000_000_000
SHORT = World(seconds=20)


def lines(signals: list[AnySignal]) -> bytes:
    return b"".join(encode(each) + b"\n" for each in signals)


def of(*files: Path, since_ns: int = 0, until_ns: int = 1 << 62) -> Report:
    return reading.recorded(Asked(files, Path(), since_ns, until_ns, None))


# ---- sources ----


def test_recordings_of_several_hosts_make_one_report(tmp_path: Path) -> None:
    found = of(*report_world.record(tmp_path, SHORT))
    assert [host.host for host in found.hosts] == list(SHORT.hosts)
    assert len(found.paths) == 4 * 3 * 2
    assert found.told.records == sum(1 for host in SHORT.hosts for _ in SHORT.signals(host))
    assert (found.since_ns, found.until_ns) == (report_world.BEGAN_NS, report_world.BEGAN_NS + 19 * SECOND)
    assert (found.told.broken, found.told.cut, found.told.late) == (0, 0, 0)


def parts(histories: Iterable[object]) -> list[dict[str, object]]:
    """What can be read of them."""
    found = [
        {name: part for name, part in vars(each).items() if not name.startswith("_")} | {"of": type(each)}
        for each in histories
    ]
    return [{name: getattr(part, "figures", part) for name, part in each.items()} for each in found]


def test_files_plain_and_packed_in_any_order(tmp_path: Path) -> None:
    told = list(SHORT.signals("h1"))
    early, late = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    early.write_bytes(lines(told[: len(told) // 2]))
    late.write_bytes(gzip.compress(lines(told[len(told) // 2 :]) + b"{oh\n"))
    whole = of(early, late)
    assert whole.told.broken == 1 and whole.told.late == 0
    backwards = of(late, early)
    assert backwards.told.late == 0, "the one that begins first is read first"
    assert parts(backwards.paths) == parts(whole.paths) and parts(backwards.groups) == parts(whole.groups)


def test_a_stretch_of_time_is_taken_out(tmp_path: Path) -> None:
    found = of(*report_world.record(tmp_path, SHORT), since_ns=report_world.BEGAN_NS + 5 * SECOND,
               until_ns=report_world.BEGAN_NS + 8 * SECOND)  # fmt: skip
    assert {story.windows for story in found.paths} == {3}
    assert found.until_ns - found.since_ns == 2 * SECOND


def test_what_the_report_needs_is_all_that_is_read(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    told = samples.one_of_each()
    file.write_bytes(lines(told))
    assert of(file).told.records == len(TYPES)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "run" / "x" / "agent.sock")
    yield one
    one.close()


def test_a_live_window_is_what_the_agent_tells_meanwhile(served: Served) -> None:
    client = served.client(TYPES)
    now, told = [0.0], list(SHORT.signals("h1"))[:100]

    def wait(seconds: float) -> None:
        now[0] += seconds
        for each in told[:20]:
            served.bus.publish(each)
        del told[:20]
        served.turn(0.01)

    found = reading.live(client, 1.0, lambda: now[0], wait)
    client.close()
    assert not told and found.told.records == 100 and found.told.dropped == 0
    assert "within 1 s" in found.told.source


# ---- the command ----


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return directories.recording("", "x")


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.report, list(words), standalone_mode=False)


def test_of_the_flight_recorder_the_last_ten_minutes_are_shown(state: Path, tmp_path: Path) -> None:
    from pytools.recording.writer import TrackWriter

    state.mkdir(parents=True)
    writer = TrackWriter(state, "fine", 1 << 24, 1 << 62)
    now = time.time_ns()
    for age_s in (3600, 700, 500, 5):
        at = now - age_s * SECOND
        writer.write(encode(replaced(samples.act(number=age_s), unix_ns=at)) + b"\n", at)
    writer.close()
    done = run("r.html", "-n", "x")
    assert done.exception is None and "2 records of 1 hosts" in done.output
    words = Path("r.html").read_text()
    assert "swerve report: h1" in words and str(state) in words
    assert "4 records" in run("r.html", "-n", "x", "--since", "2h").output
    assert "1 records" in run("r.html", "-n", "x", "--since", "15m", "--until", "10m").output
    assert "2 records" in run("r.html", "-n", "x", "--until", "6m").output, "ten minutes before that"


def test_with_json_what_was_written_is_said_as_an_object(state: Path, tmp_path: Path) -> None:
    folder = report_world.record(tmp_path / "w", SHORT)
    done = run("r.html", *map(str, folder), "-j")
    said = json.loads(done.output)
    assert said["page"] == "r.html" and said["paths"] == 24 and said["hosts"] == list(SHORT.hosts)
    assert said["size_bytes"] == Path("r.html").stat().st_size
    piped = run("-", str(folder[0]), "-j")
    assert piped.stdout.startswith("<!DOCTYPE html>") and json.loads(piped.stderr)["page"] == "-"


def test_the_command_listens_to_an_agent(state: Path, served: Served) -> None:
    done = threading.Event()

    def agent() -> None:
        for signal in SHORT.signals("h1"):
            if done.is_set():
                return
            served.bus.publish(signal)
            served.turn(0.001)
        while not done.is_set():
            served.turn(0.01)

    thread = threading.Thread(target=agent)
    thread.start()
    try:
        found = run("r.html", "-n", "x", "-c", "1")
    finally:
        done.set()
        thread.join()
    assert found.exception is None and "of 1 hosts" in found.output
    assert "Of what the agent told within 1 s" in Path("r.html").read_text()


def test_a_page_is_written_whole_or_not_at_all_and_may_be_read_by_others(state: Path, tmp_path: Path) -> None:
    (folder,) = report_world.record(tmp_path / "w", World(seconds=2, hosts=("h1",)))
    mask = os.umask(0o022)
    try:
        assert run("r.html", str(folder)).exception is None
    finally:
        os.umask(mask)
    assert stat.S_IMODE(Path("r.html").stat().st_mode) == 0o644
    before = Path("r.html").read_bytes()
    assert run("r.html", str(tmp_path / "none.jsonl")).exception is not None
    assert Path("r.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "w"]


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (("recording.jsonl",), UsageError, "the page to write, like report.html"),
        (("r.html", "none.jsonl"), SwerveError, "swerve watch"),
        (("r.html", "-n", "x"), SwerveError, "there is no recording"),
        (("r.html", "-n", "x", "-c", "1"), SwerveError, "swerve agent"),
        (("r.html", "-n", "x", "-c", "1", "--since", "1h"), UsageError, "leave it out"),
        (("r.html", "-n", "x", "--since", "noon"), UsageError, "is not a time"),
        (("r.html", "-n", "x", "--since", "1m", "--until", "1h"), UsageError, "--until is before --since"),
    ],
)
def test_errors_say_what_to_do_next(state: Path, words: tuple[str, ...], kind: type[Exception], said: str) -> None:
    error = run(*words).exception
    assert isinstance(error, kind) and said in str(error)
    assert not Path("r.html").exists()


def test_a_directory_that_may_not_be_written_is_an_error_with_the_next_step(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_bytes(lines([samples.act()]))
    error = run("none/r.html", str(file)).exception
    assert isinstance(error, SwerveError) and "that you may write" in str(error)


def test_a_recording_is_never_written_over(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "incident.jsonl"
    file.write_bytes(lines([samples.act()]))
    assert isinstance(run(str(file)).exception, UsageError)
    assert file.read_bytes() == lines([samples.act()])


def test_the_recording_is_looked_for_only_where_it_is_needed() -> None:
    def never() -> Path:
        raise AssertionError

    wanted: Callable[[], Path] = never
    assert reading.asked([Path("a")], wanted, None, None, None, 10).since_ns == 0
    assert reading.asked([], wanted, None, None, 5.0, 10).live_s == 5.0
