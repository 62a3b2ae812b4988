"""The flight recorder: bounded in size and age, readable after a crash at any byte, nothing twice and nothing lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from support import wait_until

from pytools.config import Recording
from pytools.errors import CapabilityError, SwerveError
from pytools.ipc.bus import Bus
from pytools.ipc.wire import TAGS, TYPES
from pytools.recording import reader, segments, writer
from pytools.recording.reader import Read
from pytools.recording.segments import ASIDE, NEVER, Segment, Track
from pytools.recording.writer import TrackWriter
from pytools.signals import AnySignal, decode, encode
from pytools.sources.recording import RecordingSource

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
NOON = 1_795_000_000 * SECOND


def record(number: int, unix_ns: int, padding: int = 0) -> bytes:
    return msgspec.json.encode(
        {"type": "x", "host": "h1", "unix_ns": unix_ns, "number": number, "padding": os.urandom(padding).hex()}
    )


def add(folder: Path, number: int, unix_ns: int, age_ns: int = DAY) -> None:
    """Another writer's only record."""
    with contextlib.closing(TrackWriter(folder, "fine", 1 << 20, age_ns)) as again:
        again.write(record(number, unix_ns) + b"\n", unix_ns)


def numbers(lines: Iterable[bytes]) -> list[int]:
    return [msgspec.json.decode(line)["number"] for line in lines]


def written(folder: Path, count: int, track: Track = "fine", step_ns: int = SECOND, **limits: int) -> TrackWriter:
    """A record a step from noon on, flushed each time."""
    writer = TrackWriter(folder, track, limits.get("limit_bytes", 1 << 20), limits.get("age_ns", DAY))
    for number in range(count):
        now = NOON + number * step_ns
        writer.write(record(number, now, limits.get("padding", 0)) + b"\n", now)
        writer.flush()
    return writer


def touch_as_named(folder: Path) -> None:
    """The tests' time is not the disk's: give each segment the end that its successor's beginning shows."""
    for track in segments.TRACKS:
        row = [each for each in segments.listed(folder) if each.track == track]
        for each, later in itertools.pairwise(row):
            os.utime(each.path, ns=(later.began_unix_ns, later.began_unix_ns))


# ---- what is kept ----


def test_what_was_written_is_read_in_its_order(tmp_path: Path) -> None:
    written(tmp_path, 2000).close()
    told = Read()
    assert numbers(reader.lines(tmp_path, told=told)) == list(range(2000))
    assert (told.records, told.broken, told.cut) == (2000, 0, 0)
    assert (told.first_unix_ns, told.last_unix_ns) == (NOON, NOON + 1999 * SECOND)
    assert len(segments.listed(tmp_path)) == 4, "one for ten minutes"


@pytest.mark.parametrize(("count", "padding"), [(3000, 100), (300, 3000), (30, 40_000)])
def test_a_recording_is_no_larger_than_it_may_be_and_keeps_the_newest(tmp_path: Path, count: int, padding: int) -> None:
    """Also where one record is as large as a segment should be, or as a third of all."""
    limit = 1 << 17
    writer = TrackWriter(tmp_path, "fine", limit, DAY)
    for number in range(count):
        writer.write(record(number, NOON + number, padding) + b"\n", NOON + number)
        writer.flush()
        assert sum(each.size_bytes for each in segments.listed(tmp_path)) <= limit
    assert limit * 0.9 < sum(each.size_bytes for each in segments.listed(tmp_path)) + padding
    writer.close()
    kept = numbers(reader.lines(tmp_path))
    assert kept == list(range(kept[0], count)), "the newest, without a hole"
    assert writer.lost == 0


def test_one_track_makes_no_room_for_the_other(tmp_path: Path) -> None:
    written(tmp_path, 700, "coarse").close()
    written(tmp_path, 700, limit_bytes=100).close()
    tracks = [each.track for each in segments.listed(tmp_path)]
    assert tracks.count("coarse") == 2 and tracks.count("fine") <= 2


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    written(tmp_path, 3).close()
    for each in segments.listed(tmp_path):
        os.utime(each.path, ns=(NOON, NOON))
    add(tmp_path, 7, NOON + 7200 * SECOND, 3600 * SECOND)
    # the segment that is newest when room is made stays until there is another one
    add(tmp_path, 8, NOON + 7201 * SECOND, 3600 * SECOND)
    assert numbers(reader.lines(tmp_path)) == [7, 8]


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000)), max_size=30),
    st.integers(1, 5000),
    st.integers(0, 1000),
)
def test_the_oldest_go_until_the_rest_fits(files: list[tuple[int, int]], limit: int, oldest: int) -> None:
    found = [Segment(Path(str(n)), "fine", n, 0, ended, size) for n, (size, ended) in enumerate(files)]
    gone = segments.surplus(found, limit, oldest)
    assert gone == found[: len(gone)]
    kept = found[len(gone) :]
    assert not found or kept, "the newest stays whatever its size"
    if len(kept) > 1:
        assert sum(each.size_bytes for each in kept) <= limit
        assert kept[0].ended_unix_ns >= oldest
    if gone:  # not one more than needed
        back = [gone[-1], *kept]
        assert sum(each.size_bytes for each in back) > limit or gone[-1].ended_unix_ns < oldest


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    for name in ("fine-1-2.jsonl.gz", "notes.txt", "fine-00000001-x.jsonl.gz", "coarse-00000001-5.jsonl"):
        (tmp_path / name).write_text("theirs")
    written(tmp_path, 50, limit_bytes=100).close()
    assert sum(path.read_text("latin-1") == "theirs" for path in tmp_path.iterdir()) == 4


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    written(tmp_path, 1).close()
    assert [each.path.stat().st_mode & 0o777 for each in segments.listed(tmp_path)] == [0o600]


# ---- crashes and full disks ----


def test_what_was_flushed_is_read_while_it_is_being_written(tmp_path: Path) -> None:
    written(tmp_path, 5)  # not closed
    told = Read()
    assert numbers(reader.lines(tmp_path, told=told)) == [0, 1, 2, 3, 4]
    assert told.cut == 1 and told.broken == 0


@given(st.integers(0, 1 << 14))
def test_a_segment_that_is_cut_anywhere_is_read_as_far_as_it_goes(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written(folder, 40, padding=30).close()
        (segment,) = segments.listed(folder)
        os.truncate(segment.path, min(cut, segment.size_bytes))
        told = Read()
        found = numbers(reader.lines(folder, told=told))
        assert found == list(range(len(found)))
        assert told.broken == 0
        assert told.cut == (cut < segment.size_bytes)


def test_a_successor_begins_a_segment_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, 2)
    add(tmp_path, 9, NOON + 5 * SECOND)
    assert [each.number for each in segments.listed(tmp_path)] == [1, 2]
    assert numbers(reader.lines(tmp_path)) == [0, 1, 9]


def test_a_full_disk_costs_counted_records_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written(tmp_path, 2)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for number in (2, 3):
        writer.write(record(number, NOON) + b"\n" + record(number, NOON) + b"\n", NOON + number)
        writer.flush()
    assert writer.lost == 4 and writer.error == "No space left on device"
    monkeypatch.setattr(os, "write", write)
    writer.write(record(4, NOON + 4 * SECOND) + b"\n", NOON + 4 * SECOND)
    writer.close()
    assert numbers(reader.lines(tmp_path)) == [0, 1, 4]
    assert writer.error == "" and writer.lost == 4


def test_the_last_of_a_file_system_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = os.statvfs(tmp_path)
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: os.statvfs_result((*room[:2], 1000, 60, 49, *room[5:])),  # blocks, free, for users
    )
    writer = written(tmp_path, 3)
    assert writer.lost == 3 and "nearly full" in writer.error
    assert segments.listed(tmp_path) == []


def test_a_directory_that_is_gone_is_counted(tmp_path: Path) -> None:
    place = tmp_path / "recording"
    place.mkdir()
    writer = TrackWriter(place, "fine", 1 << 20, DAY)
    place.rmdir()
    writer.write(record(1, NOON) + b"\n", NOON)
    assert writer.lost == 1 and writer.error


# ---- what is read ----


@pytest.mark.parametrize("since", [0, 5, 699, 700, 2000])
@pytest.mark.parametrize("until", [0, 6, 700, 1300, 5000])
def test_a_stretch_of_time_is_read_exactly(tmp_path: Path, since: int, until: int) -> None:
    written(tmp_path, 1500).close()
    touch_as_named(tmp_path)
    found = numbers(reader.lines(tmp_path, NOON + since * SECOND, NOON + until * SECOND))
    assert found == [number for number in range(1500) if since <= number < until]


def test_segments_outside_the_stretch_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 6000).close()
    touch_as_named(tmp_path)
    opened: list[str] = []
    unpacked = reader.unpacked
    monkeypatch.setattr(reader, "unpacked", lambda path, told: opened.append(path.name) or unpacked(path, told))  # type: ignore[func-returns-value]
    assert len(numbers(reader.lines(tmp_path, NOON + 1300 * SECOND, NOON + 1400 * SECOND))) == 100
    assert len(opened) == 2, "the first one, for its beginning, and the one that has it"


def test_what_the_fine_track_has_lost_comes_from_the_coarse_one(tmp_path: Path) -> None:
    coarse = written(tmp_path, 3000, "coarse", step_ns=SECOND)
    coarse.close()
    fine = TrackWriter(tmp_path, "fine", 1 << 20, DAY)
    for number in range(1000, 3000):
        for half in (0, 1):
            now = NOON + number * SECOND + half * SECOND // 2
            fine.write(record(10_000 * (1 + half) + number, now) + b"\n", now)
    fine.close()
    told = Read()
    found = numbers(reader.lines(tmp_path, told=told))
    assert found[:1000] == list(range(1000))
    assert found[1000:] == [10_000 * (1 + half) + number for number in range(1000, 3000) for half in (0, 1)]
    assert told.tracks == {"coarse": 1000, "fine": 4000}
    assert set(reader.covered(tmp_path)) == {"fine", "coarse"}
    assert reader.covered(tmp_path)["coarse"][0] == NOON


def test_a_clock_that_is_set_back_loses_nothing(tmp_path: Path) -> None:
    writer = TrackWriter(tmp_path, "fine", 1 << 20, DAY)
    times = [NOON, NOON + SECOND, NOON - 3600 * SECOND, NOON - 3599 * SECOND]
    for number, now in enumerate(times):
        writer.write(record(number, now) + b"\n", now)
    writer.close()
    assert numbers(reader.lines(tmp_path)) == [0, 1, 2, 3]
    assert len(segments.listed(tmp_path)) == 2, "within a segment time goes forward"
    touch_as_named(tmp_path)
    assert numbers(reader.lines(tmp_path, NOON - 3600 * SECOND, NOON)) == [2, 3]


def test_foreign_bytes_in_a_segment_are_counted(tmp_path: Path) -> None:
    written(tmp_path, 2).close()
    (tmp_path / segments.name("fine", 2, NOON)).write_bytes(b"no gzip at all")
    bad = zlib.compressobj(wbits=31)
    lines = b'{"type":"x"}\n[]\n\xff\n' + record(3, NOON) + b"\n"
    (tmp_path / segments.name("fine", 3, NOON)).write_bytes(bad.compress(lines) + bad.flush())
    told = Read()
    assert numbers(reader.lines(tmp_path, told=told)) == [0, 1, 3]
    assert told.broken == 4


def test_no_recording_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(SwerveError, match="there is no recording") as caught:
            list(reader.lines(place))
        assert "recording.retention" in str(caught.value)


# ---- the agent's end ----


def recorded(folder: Path, signals: Iterable[AnySignal], **settings: float) -> RecordingSource:
    bus = Bus()
    source = RecordingSource(Recording(**settings), folder, SECOND, bus)
    for signal in signals:
        bus.publish(signal)
    source.tick(0)
    return source


def test_every_kind_but_those_without_a_bound_is_recorded_as_it_was_told(tmp_path: Path) -> None:
    told = samples.one_of_each()
    source = recorded(tmp_path, told)
    source.close()
    found = [decode(line) for line in reader.lines(tmp_path)]
    assert found == [each for each in told if TAGS[type(each)] not in NEVER]
    assert source.drops() == {"recording_behind": 0, "recording_disk": 0}
    assert source.failed == {}


def test_short_windows_are_in_the_fine_track_alone(tmp_path: Path) -> None:
    short, long = (samples.path_delay(window_ns=window) for window in (SECOND // 10, SECOND))
    recorded(tmp_path, [short, long]).close()
    lines = {each.track: list(reader.unpacked(each.path, Read())) for each in segments.listed(tmp_path)}
    assert lines == {"fine": [encode(short), encode(long)], "coarse": [encode(long)]}


def test_what_costs_something_to_make_is_not_made_for_the_recording(tmp_path: Path) -> None:
    bus = Bus()
    source = RecordingSource(Recording(), tmp_path, SECOND, bus)
    assert {tag for tag in TYPES if bus.wanted(tag)} == TYPES - NEVER - ASIDE
    somebody = bus.subscribe(ASIDE)
    assert all(bus.wanted(tag) for tag in ASIDE)
    for each in samples.one_of_each():
        bus.publish(each)
    source.close()
    assert len(somebody.read()) == len(ASIDE)
    assert {msgspec.json.decode(line)["type"] for line in reader.lines(tmp_path)} == TYPES - NEVER
    assert not any(bus.wanted(tag) for tag in TYPES - ASIDE), "it has left"


def test_records_are_on_the_disk_a_second_later_without_a_close(tmp_path: Path) -> None:
    source = recorded(tmp_path, [samples.act()])

    def there() -> bool:
        return [decode(line) for line in reader.lines(tmp_path)] == [samples.act()]

    wait_until(lambda: segments.listed(tmp_path) and there(), 10, "the record can be read")
    source.close()


def test_what_the_disk_refuses_is_named_until_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detail = samples.path_delay(window_ns=SECOND // 10)  # in one track alone
    really, bus = os.open, Bus()

    def full(path: Any, *how: Any) -> int:
        if Path(path).is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(path, *how)

    source = RecordingSource(Recording(), tmp_path, SECOND, bus)

    def failed() -> dict[str, str]:
        bus.publish(detail)
        source.tick(0)
        return source.failed

    monkeypatch.setattr(writer.os, "open", full)
    wait_until(failed, 20, "the disk refuses it")
    assert source.failed == {"recording (fine)": "No space left on device"}
    monkeypatch.undo()
    wait_until(lambda: not failed(), 20, "it is over")
    source.close()


def test_a_writer_that_is_behind_costs_counted_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytools.sources import recording

    monkeypatch.setattr(recording, "_WAITING_BYTES", 10)
    source = recorded(tmp_path, [samples.act(), samples.act()])
    source.close()
    assert source.drops() == {"recording_behind": 4, "recording_disk": 0}, "of two tracks"


def test_a_writer_that_keeps_up_loses_nothing_however_much_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytools.sources import recording

    line = len(encode(samples.act())) + 1
    monkeypatch.setattr(recording, "_WAITING_BYTES", 4 * line)
    bus = Bus()
    source = RecordingSource(Recording(), tmp_path, SECOND, bus)
    for _ in range(10):
        bus.publish(samples.act())
        source.tick(0)
        wait_until(lambda: source.waiting_bytes == 0, 20, "it was written")
    source.close()
    assert source.drops() == {"recording_behind": 0, "recording_disk": 0}
    assert len(list(reader.lines(tmp_path))) == 10


def test_a_directory_that_cannot_be_made_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CapabilityError, match=r"recording\.directory"):
        RecordingSource(Recording(), tmp_path / "file" / "recording", SECOND, Bus())
