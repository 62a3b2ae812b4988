"""The edge of the report: signals from files, recordings or a running agent in, a page on the disk out.

Waits for the agent and the disk. Times are CLOCK_REALTIME nanoseconds; listening is by CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pytools.errors import SwerveError, UsageError
from pytools.ipc.client import Client
from pytools.recording import reader
from pytools.recording.reader import FOR_EVER, Read
from pytools.signals import UNREADABLE
from pytools.views import history_query
from pytools.views.history_query import Wanted
from pytools.views.report import page
from pytools.views.report.aggregate import Report, Told
from pytools.views.report.gather import TYPES, Gathering
from pytools.views.times import check_order, parse

LATELY_NS: Final = 600_000_000_000  # what is shown of the flight recorder unless more is asked for
_LOT_S: Final = 0.2
_ENDS: Final = (".html", ".htm")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a report is wanted of: files, the flight recorder, or what comes within the next seconds."""

    files: tuple[Path, ...]
    recording: Path  # of this instance
    since_ns: int
    until_ns: int
    live_s: float | None


def asked(
    files: Sequence[Path], recording: Callable[[], Path], since: str | None, until: str | None, live_s: float | None,
    now_ns: int,
) -> Asked:  # fmt: skip
    """What was typed, understood.

    Parameters
    ----------
    recording : callable
        Finds the flight recorder's directory; called only when it is needed.

    Raises
    ------
    UsageError
        If a time is none, or two sources were named.
    """
    if live_s is not None and (files or since is not None or until is not None):
        raise UsageError(
            "-c is what comes from now on, which is in no recording", "leave it out, or the files, --since and --until"
        )
    lately_ns = 0 if files or live_s is not None else now_ns - LATELY_NS
    until_ns = FOR_EVER if until is None else parse(until, now_ns)
    if since is None and until is not None and not files:
        lately_ns = until_ns - LATELY_NS
    since_ns = lately_ns if since is None else parse(since, now_ns)
    check_order(since_ns, until_ns, now_ns)
    return Asked(tuple(files), Path() if files or live_s is not None else recording(), since_ns, until_ns, live_s)


def check_out(out: Path) -> None:
    """Raise UsageError unless this can be meant as a page: a recording shall not be written over by mistake."""
    if str(out) != "-" and out.suffix.lower() not in _ENDS:
        raise UsageError(f"{out} is not a name for a page", "the first argument is the page to write, like report.html")


def recorded(wanted: Asked) -> Report:
    """A report of files, or of the flight recorder.

    Raises
    ------
    SwerveError
        If one cannot be read.
    """
    told, gathering = Read(), Gathering()
    choice = Wanted(TYPES, since_ns=wanted.since_ns, until_ns=wanted.until_ns)
    sources = [history_query.of(file, None, choice, told) for file in wanted.files]
    for lines in _in_order(sources or [history_query.recorded(wanted.recording, choice, told)]):
        for lot in history_query.lots(lines):
            gathering.add(history_query.signals(lot, told))
    source = "From " + (", ".join(map(str, wanted.files)) if wanted.files else f"the recording in {wanted.recording}")
    return gathering.report(Told(source, broken=told.broken, cut=told.cut))


def _in_order(sources: Sequence[Iterator[bytes]]) -> list[Iterator[bytes]]:
    """By the time of their first record, so that parts of one recording may be named in any order."""
    found: list[tuple[int, Iterator[bytes]]] = []
    for lines in sources:
        first = next(lines, None)
        if first is not None:
            found.append((published_ns(first), itertools.chain([first], lines)))
    return [lines for _, lines in sorted(found, key=lambda each: each[0])]


def published_ns(line: bytes) -> int:
    """When a record was published, by its host's CLOCK_REALTIME; 0 for a line that is none."""
    with contextlib.suppress(*UNREADABLE):
        return reader.head_of.decode(line).unix_ns
    return 0


def live(
    client: Client,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Report:
    """A report of what an agent tells within the next seconds.

    Raises
    ------
    AgentGoneError
        If the agent ends meanwhile.
    """
    gathering, until_s = Gathering(), clock() + seconds
    while (left_s := until_s - clock()) > 0:
        wait(min(left_s, _LOT_S))
        gathering.add(client.read())
    source = f"Of what the agent told within {seconds:g} s"
    return gathering.report(Told(source, broken=client.malformed, dropped=client.dropped))


def summary(report: Report, out: Path, size_bytes: int, as_json: bool) -> str:
    """What was written, on one line."""
    hosts = [host.host for host in report.hosts]
    if as_json:
        said = {
            "page": str(out),
            "size_bytes": size_bytes,
            "records": report.told.records,
            "hosts": hosts,
            "since_unix_ns": report.since_ns,
            "until_unix_ns": report.until_ns,
            "paths": len(report.paths),
            "acts": len(report.acts),
            "broken": report.told.broken,
            "dropped": report.told.dropped,
        }
        return msgspec.json.encode(said).decode()
    return (
        f"{out}: {size_bytes / 1e6:.2f} MB, {report.told.records:,} records of {len(hosts)} hosts, "
        f"{len(report.paths)} paths, {len(report.acts)} acts"
    )


def write(report: Report, out: Path) -> int:
    """Write the page, whole or not at all; returns its size in bytes.

    Raises
    ------
    SwerveError
        If it cannot be written.
    """
    data = page.page(report, lambda at: at.astimezone()).encode("utf-8", "replace")
    if str(out) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return len(data)
    try:
        _replace(out, data)
    except OSError as error:
        raise SwerveError(f"{out}: {error.strerror}", "name a page in a directory that you may write") from None
    return len(data)


def _replace(out: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644 & ~_umask())
        os.replace(name, out)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """What this user takes from files' modes."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
