"""JSON Lines for other programs, and the reference that explains every field of them."""

from __future__ import annotations

import io
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import reference
import samples
from serving import Served
from support import ROOT

from pytools import signals
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.views import export, history_query


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    one = Served(tmp_path / "x" / "agent.sock")
    yield one
    one.close()


class Flushed(io.BytesIO):
    """Remembers what had been written at each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushes: list[bytes] = []

    def flush(self) -> None:
        self.flushes.append(self.getvalue())


class Broken(io.BytesIO):
    """A pipe whose reader is gone."""

    def write(self, _data: object) -> int:
        raise BrokenPipeError


def test_lines_are_whole_when_they_are_flushed() -> None:
    out = Flushed()
    for each in samples.one_of_each():
        export.write([each], out)
    assert len(out.flushes) == len(samples.one_of_each()) and all(written.endswith(b"\n") for written in out.flushes)
    assert [signals.decode(line) for line in out.getvalue().splitlines()] == samples.one_of_each()
    export.write([], out)
    assert len(out.flushes) == len(samples.one_of_each())


def test_watch_takes_what_it_was_asked_for_and_no_more(served: Served) -> None:
    client = served.lines()
    for _ in range(3):
        for each in samples.one_of_each():
            served.bus.publish(each)
    served.turn(0.1)
    out, notes = io.BytesIO(), io.StringIO()
    assert (
        export.lines(
            history_query.live(client, history_query.Wanted(), history_query.Read()),
            out,
            5,
            export.missed(client, notes),
        )
        == 5
    )
    assert [signals.decode(line) for line in out.getvalue().splitlines()] == samples.one_of_each()[:5]
    assert notes.getvalue() == ""


def test_watch_ends_without_a_word_when_nobody_reads(served: Served) -> None:
    client = served.lines()
    served.bus.publish(samples.act())
    served.turn(0.1)
    assert export.lines(history_query.live(client, history_query.Wanted(), history_query.Read()), Broken()) == 0


def test_watch_passes_on_that_the_agent_is_gone(served: Served) -> None:
    client = served.lines()
    served.bus.publish(samples.act())
    served.server.close()
    out = io.BytesIO()
    with pytest.raises(SwerveError, match="closed the connection"):
        export.lines(history_query.live(client, history_query.Wanted(), history_query.Read()), out)
    assert signals.decode(out.getvalue()) == samples.act()


def test_words_of_the_agent_itself_are_no_lines(tmp_path: Path) -> None:
    served = Served(tmp_path / "y" / "agent.sock", queue_bytes=4096)
    client = served.lines()
    for _ in range(5000):
        served.bus.publish(samples.act())
    told: list[bytes] = []

    def missed() -> bool:
        told.extend(client.read())
        return client.dropped > 0

    served.until(missed, "it is told what it missed")
    served.bus.publish(samples.act())
    served.until(lambda: told.extend(client.read()) or told, "it is told what comes afterwards")  # type: ignore[func-returns-value]
    assert told and all(signals.decode(line) == samples.act() for line in told)
    assert client.malformed == 0
    served.close()


def test_drops_are_told_once_a_second_when_there_are_more_and_at_the_end(served: Served) -> None:
    client: Client = served.client()
    notes, now = io.StringIO(), [100.0]
    tell = export.missed(client, notes, lambda: now[0])
    tell(False)
    assert notes.getvalue() == ""
    for dropped, at in ((3, 100.0), (4, 100.5), (4, 101.0), (5, 101.5), (5, 102.5), (5, 109.0)):
        client.dropped, now[0] = dropped, at
        tell(False)
    client.dropped = 6
    tell(True)
    tell(True)
    assert [line.split()[1] for line in notes.getvalue().splitlines()] == ["3", "4", "5", "6"]


def test_the_published_reference_is_that_of_the_records() -> None:
    assert (ROOT / "docs" / "signals.txt").read_text() == reference.signals(), "python scripts/reference.py"


def test_the_published_reference_has_every_kind_of_signal() -> None:
    kinds = {kind.__struct_config__.tag for kind in typing.get_args(signals.AnySignal)}
    assert kinds <= set(reference.signals().splitlines())


PARTS = [
    *(signals.Delay, signals.Path, signals.GroupMember, signals.ProgramCost, signals.Collocated, signals.Quantiles),
    *(signals.Owner, signals.Retransmissions, signals.CongestionTimes, signals.DropReason, signals.LinkCounters),
    *(signals.Qdisc, signals.Pause, signals.Bandwidth, signals.Suspect, signals.Histogram),
]


@pytest.mark.parametrize("kind", [*typing.get_args(signals.AnySignal), *PARTS], ids=lambda kind: kind.__name__)
def test_the_reference_explains_every_field(kind: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "signals.md").read_text()
    shared = dict(re.findall(r"^## (Common fields)\n(.*?)(?=^## )", page, re.M | re.S))["Common fields"]
    common = set(re.findall(r"^\| `(\w+)` \|", shared, re.M))
    assert common >= {field.name for field in msgspec.structs.fields(signals.Signal)}
    chapters = dict(re.findall(r"^(\w+)\n(    .*?)(?=^\w|\Z)", reference.signals(), re.M | re.S))
    chapter = chapters[str(kind.__struct_config__.tag or kind.__name__)]
    for field in msgspec.structs.fields(kind):
        if field.name not in common:
            assert re.search(rf"^    {field.name}: .*\n(?: {{12}}.*\n)* {{8}}\S", chapter, re.M), (
                f"{field.name} of {kind.__name__}"
            )


def test_the_page_names_every_kind_of_signal() -> None:
    page = (ROOT / "docs" / "signals.md").read_text()
    rows = re.findall(r"^\|(.*?)\|", page.partition("## Kinds\n")[2].partition("\n\n")[0], re.M)
    tags = {str(kind.__struct_config__.tag) for kind in typing.get_args(signals.AnySignal)}
    assert set(re.findall(r"`(\w+)`", " ".join(rows[1:]))) == tags
