"""Writes that a thread does: in order, counted when lost, and never waited for longer than asked."""

from __future__ import annotations

import errno
import threading

import pytest
import samples
import steering_kit as kit
import support

from steering.acting import acts_file, journal
from steering.acting import background as later_module
from steering.acting.background import MOST, Later


@pytest.fixture
def hung():
    """A disk that hangs until it is let go."""
    gate = threading.Event()
    yield gate
    gate.set()


def entry(number):
    group = kit.group({1: [], 2: []})
    return journal.entry_now("applied", f"act {number}", group, kit.ORIGINAL, ((12, 1),), "because", "rule", "here")


def test_what_is_put_is_written_in_order():
    written = []
    with Later() as later:
        for number in range(100):
            later.put(lambda number=number: written.append(number))
        assert later.wait(10) and written == list(range(100))


def test_what_fails_is_counted_and_said_once():
    def full():
        raise OSError(errno.ENOSPC, "the disk is full")

    with Later() as later:
        later.put(full)
        assert later.wait(10)
        assert (later.lost, later.failure(), later.failure()) == (1, "the disk is full", "")
        with pytest.raises(OSError, match="full"):
            later.do(full, 10)


def test_nobody_waits_for_a_disk_that_hangs(hung):
    written = []
    with Later() as later:
        later.put(hung.wait)
        with pytest.raises(TimeoutError, match="does not answer"):
            later.do(lambda: written.append("order"), 0.01)
        assert not later.wait(0.01)
        for number in range(MOST + 5):
            later.put(lambda number=number: written.append(number))
        lost = later.lost
        assert 5 <= lost <= 10 and support.mentions(later.failure(), "disk", "not answer")
        hung.set()
        assert later.wait(10) and written == ["order", *range(MOST + 5 - lost)]


def test_a_journal_knows_what_is_still_to_be_written(tmp_path, hung):
    file = tmp_path / journal.FILE
    with Later() as later, journal.Journal(file, later) as log:
        log.write(entry(1))
        later.put(hung.wait)
        log.write(entry(2))
        assert [each.act_id for each in log.read().entries] == ["act 1", "act 2"]
        assert [each.act_id for each in journal.read(file).entries] == ["act 1"]
        hung.set()
        support.wait_until(lambda: len(journal.read(file).entries) == 2, 10, "the second is written")
        assert [each.act_id for each in log.read().entries] == ["act 1", "act 2"]


def test_acts_are_kept_while_the_disk_hangs(tmp_path, hung):
    act = samples.act(actuator="pin")
    with Later() as later:
        kept = acts_file.ActsFile(tmp_path, later)
        later.put(hung.wait)
        kept.write(act)
        kept.close()
        assert list(acts_file.read(tmp_path)) == []
        hung.set()
        assert later.wait(10) and [each for _, each in acts_file.read(tmp_path)] == [act] and kept.lost == 0


def test_what_was_noted_last_is_written_before_the_journal_is_closed(tmp_path, hung):
    file = tmp_path / journal.FILE
    with Later() as later:
        with journal.Journal(file, later) as log:
            later.put(hung.wait)
            log.write(entry(1))
        hung.set()
        assert later.wait(10) and later.lost == 0
        assert [each.act_id for each in journal.read(file).entries] == ["act 1"]


def test_a_journal_is_put_aside_after_what_is_still_to_be_written(tmp_path, hung, monkeypatch):
    monkeypatch.setattr(journal, "ROTATE_BYTES", 1)
    file = tmp_path / journal.FILE
    with Later() as later, journal.Journal(file, later) as log:
        later.put(hung.wait)
        log.write(entry(1))
        log.rotate()
        log.write(entry(2))
        hung.set()
        assert later.wait(10) and later.lost == 0
        old, new = (journal.read(place).entries for place in (file.with_suffix(".jsonl.1"), file))
        assert [[each.act_id for each in part] for part in (old, new)] == [["act 1"], ["act 2"]]


def test_what_there_is_no_room_for_is_not_said_to_be_still_written(tmp_path, hung, monkeypatch):
    monkeypatch.setattr(later_module, "MOST", 1)
    with Later() as later, journal.Journal(tmp_path / journal.FILE, later) as log:
        started = threading.Event()
        later.put(lambda: (started.set(), hung.wait()))
        assert started.wait(10)
        for number in range(3):
            log.write(entry(number))
        assert later.lost == 2 and [each.act_id for each in log.read().entries] == ["act 0"]
