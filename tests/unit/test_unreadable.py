"""A line that nests deeper than a decoder goes is a line that is no record: counted, and the end of nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import samples
from serving import Served

from pytools.recording.reader import Read
from pytools.signals import UNREADABLE, decode, encode
from pytools.sources.clocks import messages
from pytools.views import history_query
from pytools.views.report.reading import published_ns
from pytools.views.top.state import Known

GOOD = encode(samples.act())
DEEP = b'{"type":"act","deep":' + b"[" * 20_000 + b"]" * 20_000 + b"," + GOOD[1:]


def test_it_is_what_a_decoder_calls_a_recursion_error() -> None:
    with pytest.raises(RecursionError):
        decode(DEEP)
    with pytest.raises(UNREADABLE):
        decode(DEEP)


def test_records_of_the_past_go_on_behind_it() -> None:
    told = Read()
    wanted = history_query.Wanted(types=frozenset({"act"}))
    assert list(history_query.passing([DEEP, GOOD], wanted, told)) == [GOOD]
    assert told.broken == 1
    assert [encode(each) for each in history_query.signals([DEEP, GOOD], told)] == [GOOD]
    assert told.broken == 2
    assert published_ns(DEEP) == 0


def test_the_live_view_counts_it() -> None:
    known = Known()
    known.take([DEEP, GOOD])
    assert known.malformed == 1


def test_what_another_agent_says_of_clocks_is_passed_over() -> None:
    assert messages.decode_edges(b"\x91" * 20_000 + b"\x00") is None


def test_an_agent_answers_and_lives(tmp_path: Path) -> None:
    served = Served(tmp_path / "instance" / "agent.sock")
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(str(served.path))
    raw.settimeout(20)
    raw.sendall(DEEP.replace(b'"act"', b'"subscribe"', 1) + b"\n")
    served.until(lambda: served.server.drops()["bus_malformed"] == 1, "the line is rejected")
    served.turn(0.01)
    assert raw.recv(65536).startswith(b'{"type":"error","message":"')
    raw.close()
    served.server.close()
    served.selector.close()
