"""The journal: whole lines, readable after a crash, and what was in force last."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steering_kit import ORIGINAL, TARGET, group

from pytools.kernel import netns
from steering.acting import journal
from steering.acting.journal import Journal, entry_now, read

HERE = "boot/cookie:1"
DRAINED = ((12, 1),)
STEP = ((11, 1), (12, 10))


KNOWN = group({1: [], 2: []})


def entry(kind, before=ORIGINAL, after=DRAINED, act_id="a", target=TARGET, scope=HERE):
    return entry_now(kind, act_id, replace(KNOWN, target=target), before, after, "because", "rule", scope)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "journal.jsonl"


def written(file, *entries):
    with Journal(file) as log:
        for each in entries:
            log.write(each)
    return read(file)


def test_entries_come_back_as_they_were_written(file):
    entries = (entry("applied"), entry("failed"))
    assert written(file, *entries).entries == entries
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_the_file_is_ours_alone(file):
    written(file, entry("applied"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_directory_is_ours_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    assert stat.S_IMODE(journal.directory("x").stat().st_mode) == 0o700


def test_a_link_in_its_place_is_not_followed(file, tmp_path):
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Journal(file)


@pytest.mark.parametrize("sync", [True, False])
def test_only_what_has_to_outlive_a_crash_waits_for_the_disk(file, monkeypatch, sync):
    calls = []
    for name in ("write", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given))[1])
    with Journal(file) as log:
        log.write(entry("confirmed"), sync=sync)
    assert calls == (["write", "fdatasync"] if sync else ["write"])


@pytest.mark.parametrize(
    ("history", "in_force"),
    [
        ([], None),
        ([entry("failed")], None),
        ([entry("applied")], DRAINED),
        ([entry("applied"), entry("undone", DRAINED, ORIGINAL)], None),
        ([entry("applied"), entry("applied", DRAINED, STEP)], STEP),
        ([entry("applied"), entry("failed", DRAINED, STEP)], DRAINED),
        ([entry("applied"), entry("applied", DRAINED, ORIGINAL)], None),
        ([entry("applied", scope="boot/cookie:2")], None),
        ([entry("applied"), entry("undone", scope="boot/cookie:2")], DRAINED),
        ([entry("applied"), entry("undone", target="another")], DRAINED),
    ],
)
def test_what_was_in_force_last(file, history, in_force):
    found = written(file, *history).in_force(HERE).get(TARGET)
    assert (found.after if found else None) == in_force
    assert found is None or found.group.named(DRAINED) == {"10.1.1.1 dev rail1": 0, "10.2.1.1 dev rail2": 1}


@given(st.integers(0, 400))
def test_a_torn_last_line_is_counted_and_the_rest_is_read(cut):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "journal.jsonl")
        whole = written(file, entry("applied"), entry("failed")).entries
        data = file.read_bytes()
        second = data.index(b"\n") + 1
        torn = data[: min(second + cut, len(data) - 2)]  # at least the last brace is lost
        file.write_bytes(torn)
        found = read(file)
        assert found.entries == whole[:1]
        assert found.torn == (1 if len(torn) > second else 0)
        later = written(file, entry("undone"))
        assert [each.kind for each in later.entries] == ["applied", "undone"]
        assert later.torn == found.torn


@pytest.mark.parametrize(
    "line", [b"", b"null", b"[]", b"{}", b'{"kind":"applied"}', b"\xff\xfe", b'{"kind": 1, "original": 3}']
)
def test_foreign_lines_are_counted(file, line):
    file.write_bytes(line + b"\n")
    assert read(file) == journal.Contents((), 1 if line else 0)


def test_a_full_disk_is_an_error_and_the_next_entry_is_whole_again(file, monkeypatch):
    with Journal(file) as log:
        log.write(entry("applied"))
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="full"):
            log.write(entry("applied"))
        monkeypatch.setattr(os, "write", write)
        log.write(entry("undone"))
    found = read(file)
    assert [each.kind for each in found.entries] == ["applied", "undone"]
    assert found.torn == 1


def test_a_line_that_another_process_left_torn_is_closed_off(file):
    with Journal(file) as guardians, Journal(file) as controllers:
        controllers.write(entry("applied"))
        with file.open("ab") as dying:
            dying.write(b'{"kind":"appl')
        guardians.write(entry("undone"))
    found = read(file)
    assert [each.kind for each in found.entries] == ["applied", "undone"] and found.torn == 1


def test_a_missing_journal_is_empty(file):
    assert read(file) == journal.Contents((), 0)


def test_a_long_journal_is_put_aside(file, monkeypatch):
    with Journal(file) as log:
        log.write(entry("applied"))
        log.rotate()
        assert len(log.read().entries) == 1, "it is short"
        monkeypatch.setattr(journal, "ROTATE_BYTES", 100)
        log.rotate()
        assert log.read().entries == ()
        log.write(entry("undone"))
    assert [each.kind for each in read(file.with_suffix(".jsonl.1")).entries] == ["applied"]
    assert [each.kind for each in read(file).entries] == ["undone"]


def test_the_scope_is_this_boot_and_this_namespace():
    boot, namespace = netns.scope().split("/")
    assert len(boot) == 36 and namespace.startswith(("cookie:", "inode:"))
    assert netns.scope() == netns.scope()
