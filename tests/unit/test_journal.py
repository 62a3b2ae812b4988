"""The journal: on disk before the act, readable after a crash, and clear about what is outstanding."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steering_kit import ORIGINAL, TARGET, group

from steering.acting import journal
from steering.acting.journal import Journal, Outstanding, entry_now, read

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
    entries = (entry("intent"), entry("applied"))
    assert written(file, *entries).entries == entries
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_the_file_is_ours_alone(file):
    written(file, entry("intent"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_directory_is_ours_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    assert stat.S_IMODE(journal.directory("x").stat().st_mode) == 0o700


def test_a_link_in_its_place_is_not_followed(file, tmp_path):
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Journal(file)


def test_each_entry_is_synced_before_write_returns_and_so_is_the_directory(file, monkeypatch):
    """The order of system calls is the promise: a crash right after `write` finds the entry on disk."""
    calls = []
    fsync, fdatasync, write = os.fsync, os.fdatasync, os.write

    def noting(name, function):
        def called(fd, *rest):
            kind = "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
            calls.append((name, kind))
            return function(fd, *rest)

        return called

    monkeypatch.setattr(os, "fsync", noting("fsync", fsync))
    monkeypatch.setattr(os, "fdatasync", noting("fdatasync", fdatasync))
    monkeypatch.setattr(os, "write", noting("write", write))
    with Journal(file) as log:
        assert calls == [("fsync", "file"), ("fsync", "directory")]
        calls.clear()
        log.write(entry("intent"))
    assert calls == [("write", "file"), ("fdatasync", "file")]


@pytest.mark.parametrize(
    ("history", "outstanding"),
    [
        ([], None),
        ([entry("intent")], (ORIGINAL, DRAINED)),
        ([entry("intent"), entry("applied")], (DRAINED,)),
        ([entry("intent"), entry("failed")], None),
        ([entry("intent"), entry("applied"), entry("undone")], None),
        ([entry("intent"), entry("applied"), entry("released")], None),
        ([entry("intent"), entry("applied"), entry("intent", DRAINED, STEP)], (DRAINED, STEP)),
        (
            [entry("intent"), entry("applied"), entry("intent", DRAINED, STEP), entry("failed", DRAINED, STEP)],
            (DRAINED,),
        ),
        (
            [entry("intent"), entry("applied"), entry("intent", STEP, ORIGINAL), entry("applied", STEP, ORIGINAL)],
            None,
        ),
        ([entry("intent", scope="boot/cookie:2"), entry("applied", scope="boot/cookie:2")], None),
    ],
)
def test_what_is_outstanding(file, history, outstanding):
    found = written(file, *history).outstanding(HERE).get(TARGET)
    if outstanding is None:
        assert found is None
    else:
        assert isinstance(found, Outstanding)
        assert set(found.ours) == set(outstanding)
        assert found.group.members == KNOWN.members


def test_what_was_last_in_force_outlives_that_its_target_is_gone(file):
    applied = entry("intent"), entry("applied")
    assert written(file, *applied).last_in_force(HERE) == {TARGET: (DRAINED,)}
    file.unlink()
    gone = entry("released", DRAINED, ())
    assert written(file, *applied, gone).last_in_force(HERE) == {TARGET: (DRAINED,)}
    assert written(file, gone).last_in_force(HERE) == {}, "nothing of ours was in force then"
    assert written(file, *applied, entry("undone", DRAINED, ORIGINAL)).last_in_force(HERE) == {}
    assert written(file, *applied, entry("released", DRAINED, STEP)).last_in_force(HERE) == {}, "somebody else's"


def test_groups_are_kept_apart(file):
    other = "multipath:main:10.9.2.0/24"
    found = written(file, entry("intent"), entry("intent", target=other), entry("undone", target=other))
    assert list(found.outstanding(HERE)) == [TARGET]


def test_a_target_can_be_rebuilt_from_its_entry_alone(file):
    known = replace(KNOWN, origin="c0ffee")
    intent = entry_now("intent", "a", known, ORIGINAL, DRAINED, "", "", HERE)
    (found,) = written(file, intent).outstanding(HERE).values()
    assert (found.target, found.group.members, found.group.origin) == (TARGET, KNOWN.members, "c0ffee")
    assert found.group.named(DRAINED) == {"10.1.1.1 dev rail1": 0, "10.2.1.1 dev rail2": 1}


def test_entries_of_nexthop_groups_only_are_still_understood(file):
    """As versions before there were other targets wrote them."""
    old = {
        **{"kind": "intent", "act_id": "a", "group_id": 102, "original": [[11, 1], [12, 1]], "scope": HERE},
        **{"before": [[11, 1], [12, 1]], "after": [[12, 1]], "because": "", "under": "", "by": "controller"},
        **{"at_ns": 1, "unix_ns": 1, "names": {"11": "10.1.1.1 dev rail1", "12": "dev rail2"}},
    }
    file.write_text(json.dumps(old) + "\n")
    found = read(file).outstanding(HERE)[TARGET]
    assert found.ours == (ORIGINAL, DRAINED) and found.group.original == ORIGINAL
    assert [(m.gateway, m.interface) for m in found.group.members] == [("10.1.1.1", "rail1"), ("", "rail2")]


@given(st.integers(0, 400))
def test_a_torn_last_line_is_counted_and_the_rest_is_read(cut):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "journal.jsonl")
        whole = written(file, entry("intent"), entry("applied")).entries
        data = file.read_bytes()
        second = data.index(b"\n") + 1
        torn = data[: min(second + cut, len(data) - 2)]  # at least the last brace is lost
        file.write_bytes(torn)
        found = read(file)
        assert found.entries == whole[:1]
        assert found.torn == (1 if len(torn) > second else 0)
        later = written(file, entry("undone"))
        assert [each.kind for each in later.entries] == ["intent", "undone"]
        assert later.torn == found.torn


@pytest.mark.parametrize(
    "line", [b"", b"null", b"[]", b"{}", b'{"kind":"intent"}', b"\xff\xfe", b'{"kind": 1, "original": 3}']
)
def test_foreign_lines_are_counted(file, line):
    file.write_bytes(line + b"\n")
    assert read(file) == journal.Contents((), 1 if line else 0)


def test_a_full_disk_is_an_error_and_the_next_entry_is_whole_again(file, monkeypatch):
    with Journal(file) as log:
        log.write(entry("intent"))
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="full"):
            log.write(entry("applied"))
        monkeypatch.setattr(os, "write", write)
        log.write(entry("undone"))
    found = read(file)
    assert [each.kind for each in found.entries] == ["intent", "undone"]
    assert found.torn == 1


def test_a_line_that_another_process_left_torn_is_closed_off(file):
    with Journal(file) as guardians, Journal(file) as controllers:
        controllers.write(entry("intent"))
        with file.open("ab") as dying:
            dying.write(b'{"kind":"appl')
        guardians.write(entry("undone"))
    found = read(file)
    assert [each.kind for each in found.entries] == ["intent", "undone"] and found.torn == 1


KINDS_OF_LINES = st.sampled_from([*journal.KINDS, "foreign", "torn", "torn but whole", "elsewhere", "rotated", "cut"])


@given(st.lists(KINDS_OF_LINES, max_size=12))
def test_what_is_outstanding_is_the_same_whether_followed_or_read_anew(kinds):
    """Also with lines of others, and of those that died while they wrote one."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "journal.jsonl")
        with Journal(file) as followed, Journal(file) as others:
            for kind in kinds:
                match kind:
                    case "foreign":
                        others.write(entry("intent"))
                        file.open("ab").write(b"{}\n")
                    case "torn":  # as `append_line` begins: it ends what another has left without its end
                        begun = b"" if file.read_bytes()[-1:] in (b"", b"\n") else b"\n"
                        file.open("ab").write(begun + b'{"kind":"inte')
                    case "torn but whole":
                        others.write(entry("intent"))
                        os.truncate(file, file.stat().st_size - 1)
                    case "elsewhere":
                        others.write(entry("intent", scope="elsewhere"))
                    case "rotated":
                        if not followed.outstanding(HERE) and file.stat().st_size:
                            followed.rotate(HERE)
                    case "cut":
                        os.truncate(file, 0)
                    case _:
                        others.write(entry(kind))
                assert followed.outstanding(HERE) == read(file).outstanding(HERE)


def test_a_missing_journal_is_empty(file):
    assert read(file) == journal.Contents((), 0)


def test_a_long_journal_is_put_aside_once_nothing_is_outstanding(file, monkeypatch):
    monkeypatch.setattr(journal, "ROTATE_BYTES", 100)
    with Journal(file) as log:
        log.write(entry("intent"))
        log.rotate(HERE)
        assert len(log.read().entries) == 1
        log.write(entry("undone"))
        log.rotate(HERE)
        assert log.read().entries == ()
        log.write(entry("intent"))
    assert len(read(file.with_suffix(".jsonl.1")).entries) == 2
    assert len(read(file).entries) == 1


def test_the_scope_is_this_boot_and_this_namespace():
    boot, namespace = journal.scope().split("/")
    assert len(boot) == 36 and namespace.startswith(("cookie:", "inode:"))
    assert journal.scope() == journal.scope()
