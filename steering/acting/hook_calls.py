"""What hooks have been told and are to be told: each occurrence to each hook, remembered in /run before it is told.

An event hook (webhook, exec) hears of every occurrence. A state hook (slurm, kubernetes) has one state, for as long as
any occurrence is open. Calls are made by processes of their own (hook_process.py), one at a time for each hook, each
waited for by a thread: no far end holds up anybody. Who ends a run, its successor or `swerve steer off` goes on from
the file. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from pytools import directories, owned_files
from pytools.errors import SwerveError
from pytools.signals import Path as NetPath
from pytools.units import SECOND
from steering.acting.background import Background
from steering.acting.hook_settings import Settings
from steering.deciding.notices import Notice, own_fault

SCHEMA: Final = 1  # of events
_MOST_WAIT_NS: Final = 30 * SECOND
_SPARE_S: Final = 2.0  # a process has so much longer, to end itself
_LOOK_S: Final = 0.02
_FILE_BYTES: Final = 32 << 20


class Delivery(msgspec.Struct):
    """What one hook is to be told of one occurrence, or of all of them."""

    hook: Settings
    notice: Notice  # of a state hook: the one that it was told of last
    id: str
    told: bool = False  # a call was begun: the far end may know of it
    received: int = 0  # how often it has answered since
    over: str = ""  # why it is over
    due_ns: int = 0
    failed: int = 0  # calls in a row

    @property
    def key(self) -> tuple[Settings, str]:
        """A hook has one for each occurrence, a state hook one in all."""
        return self.hook, "" if self.hook.of_state else self.id


class _File(msgspec.Struct, frozen=True):
    scope: str  # boot and network namespace
    notices: tuple[Notice, ...]
    deliveries: tuple[Delivery, ...]


class Told(msgspec.Struct, frozen=True):
    """News: a far end was told, or could not be."""

    delivery: Delivery
    over: bool
    text: str
    failure: bool = False


class _Line:
    """The calls of one hook: one at a time."""

    def __init__(self) -> None:
        self.call: Background[str] | None = None
        self.delivery: Delivery | None = None
        self.over = False  # whether the call says so
        self.made: deque[int] = deque()  # when the last ones began
        self.counts = {"calls": 0, "received": 0, "failed": 0, "given_up": 0}
        self.failure = ""
        self.limited = False

    def may(self, hook: Settings, now: int) -> bool:
        while self.made and now - self.made[0] >= hook.per_ns:
            self.made.popleft()
        self.limited = len(self.made) >= hook.count
        return not self.limited


def event_of(delivery: Delivery, open_count: int, scope: str, unix_ns: int) -> dict[str, Any]:
    """What a far end is told, as JSON."""
    notice, hook = delivery.notice, delivery.hook
    path = {name: getattr(notice.path, name) for name in notice.path.__struct_fields__}
    event: dict[str, Any] = {
        "schema": SCHEMA,
        "id": delivery.id,
        "status": "resolved" if delivery.over else "firing",
        "repeat": delivery.received,
        "host": notice.path.source,
        "boot_id": scope.partition("/")[0],
        "hook": hook.name,
        "rule": notice.rule,
        "act": notice.act,
        "path": path | {"name": str(notice.path)},
        "because": delivery.over or notice.because,
        "figures": [] if delivery.over else [msgspec.structs.asdict(each) for each in notice.figures],
        "since": _iso(notice.since_unix_ns),
        "at": _iso(unix_ns),
        "open": open_count,
    }
    if not delivery.over:
        event["expires_at"] = _iso(unix_ns + hook.lease_ns)
    return event


def _iso(unix_ns: int) -> str:
    when = datetime.datetime.fromtimestamp(unix_ns // 1000 / 1e6, datetime.UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def call(hook: Settings, event: dict[str, Any]) -> str:
    """Make one call in a process of its own, and wait for it; what came of it.

    Raises
    ------
    SwerveError
        If it failed, or was killed when its time was over.
    """
    timeout_s = hook.timeout_ns / 1e9
    said = {"kind": hook.kind, "options": json.loads(hook.options), "event": event, "timeout_s": timeout_s}
    said["caller"] = os.getpid()
    try:
        # A session of its own, so that all of it can be killed; -P: nothing is imported from the current directory.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "steering.acting.hook_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SwerveError(f"no process for it: {error.strerror}") from None
    with process:
        try:
            answer, _ = process.communicate(msgspec.json.encode(said), timeout_s + _SPARE_S)
        except subprocess.TimeoutExpired:
            answer = b""
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = answer.decode(errors="replace").strip()
    if process.returncode == 0:
        return text
    late = process.returncode in (-signal.SIGKILL, -signal.SIGALRM)
    raise SwerveError(text or (f"no end within {timeout_s:g} s: killed" if late else "the process for it failed"))


class HookCalls:
    """Tells hooks what they are to know.

    Parameters
    ----------
    scope : str
        This boot and network namespace.
    report : callable
        Takes what became of a delivery.
    make : callable, optional
        Makes a call in place of a process; raises SwerveError when it fails.
    """

    def __init__(
        self,
        file: Path,
        scope: str,
        report: Callable[[Told], None],
        make: Callable[[Settings, dict[str, Any]], str] | None = None,
    ) -> None:
        self._file, self._scope, self._report, self._make = file, scope, report, make
        self.deliveries: dict[tuple[Settings, str], Delivery] = {}  # those that are not finished
        self._notices: tuple[Notice, ...] = ()
        self._lines: dict[str, _Line] = {}
        self._written: bytes | None = None
        self._changed = True

    # ---- what is wanted ----

    def load(self) -> tuple[Notice, ...]:
        """Go on with what is remembered of this boot and namespace; the occurrences that are open."""
        try:
            self._written = directories.read_obeyed(self._file, _FILE_BYTES)
            found = msgspec.json.decode(self._written, type=_File)
        except (OSError, SwerveError, ValueError):  # torn, or others could have written it
            return ()
        if found.scope != self._scope:
            return ()
        self._notices = found.notices
        self.deliveries = {each.key: each for each in found.deliveries}
        for each in self.deliveries.values():
            each.due_ns = each.failed = 0
        return found.notices

    def want(
        self,
        notices: Iterable[Notice],
        hooks: Iterable[Settings],
        over: dict[str, str],
        now: int,
        paths: Iterable[NetPath],
    ) -> None:
        """Have hooks told of these occurrences, and of no others; `over` says of others why they are over.

        A state begins only where `own_fault` says so, by all `paths`, and lasts until every occurrence is over.
        """
        self._notices = tuple(notices)
        wanted: dict[tuple[Settings, str], Notice] = {}
        for hook in hooks:
            mine = [notice for notice in self._notices if hook.name in notice.hooks]
            if not hook.of_state:
                wanted |= {(hook, notice.id): notice for notice in mine}
            elif mine and ((hook, "") in self.deliveries or own_fault(mine, paths)):
                wanted[hook, ""] = mine[0]
        for key, notice in wanted.items():
            known = self.deliveries.get(key)
            if known is None:
                self.deliveries[key] = Delivery(key[0], notice, notice.id, due_ns=now)
            elif known.over:  # it holds again, before the far end knew that it was over
                known.over, known.received, known.notice = "", 0, notice
                known.due_ns, known.failed = now, 0
            else:
                known.notice = notice
        self._changed = True
        self._end({key: over for key in self.deliveries.keys() - wanted.keys()}, now)

    def end_all(self, why: str, now: int) -> None:
        """Have every hook told that all is over."""
        self._notices, self._changed = (), True
        self._end({key: {} for key in self.deliveries}, now, why)

    def _end(self, keys: dict[tuple[Settings, str], dict[str, str]], now: int, why: str = "") -> None:
        for key, over in keys.items():
            known = self.deliveries[key]
            if not known.told:
                del self.deliveries[key]  # nobody knows of it
            elif not known.over:
                last = next(reversed(over.values()), "the policy tells nobody of it any more")
                known.over = why or over.get(known.notice.id, last)
                known.due_ns, known.failed = now, 0

    # ---- calls ----

    def turn(self, now: int, unix_ns: int) -> None:
        """Take what came of calls, and begin those that are due; costs microseconds."""
        for name, line in self._lines.items():
            self._collect(name, line, now)
        due: dict[str, Delivery] = {}
        for each in self.deliveries.values():
            first = due.get(each.hook.name)
            if each.due_ns <= now and (first is None or _before(each) < _before(first)):
                due[each.hook.name] = each
        for name, each in due.items():
            line = self._lines.setdefault(name, _Line())
            if line.call is None and line.may(each.hook, now):
                self._begin(line, each, now, unix_ns)
        if self._changed:
            self.remember()

    def _begin(self, line: _Line, delivery: Delivery, now: int, unix_ns: int) -> None:
        delivery.told = True
        failure = self.remember()
        event = event_of(delivery, self._open(delivery.hook.name), self._scope, unix_ns)
        hook, make = delivery.hook, self._make or call

        def made() -> str:
            if failure:
                raise SwerveError(failure)
            return make(hook, event)

        line.made.append(now)
        line.counts["calls"] += 1
        try:
            line.call = Background(made)
        except RuntimeError as error:  # no thread is to be had just now
            line.failure, delivery.due_ns = str(error), now + SECOND
            line.counts["failed"] += 1
            return
        line.delivery, line.over = delivery, bool(delivery.over)

    def _open(self, name: str) -> int:
        return sum(name in notice.hooks for notice in self._notices)

    def _collect(self, name: str, line: _Line, now: int) -> None:
        delivery = line.delivery
        if line.call is None or delivery is None or not line.call.done:
            return
        done, line.call, line.delivery, self._changed = line.call, None, None, True
        changed = line.over != bool(delivery.over)  # meanwhile: it is to be told something else
        try:
            text = done.result()
        except SwerveError as error:
            line.failure = str(error)
            line.counts["failed"] += 1
            if not changed:
                self._failed(line, delivery, str(error), now)
            return
        line.counts["received"] += 1
        line.failure = ""
        if line.over and not changed:
            self.deliveries.pop(delivery.key, None)
            self._report(Told(delivery, True, text))
            return
        delivery.failed = 0
        if not line.over:
            delivery.received += 1
            if delivery.received == 1:
                self._report(Told(delivery, False, text))
        if not changed:
            delivery.due_ns = now + delivery.hook.lease_ns // 2

    def _failed(self, line: _Line, delivery: Delivery, why: str, now: int) -> None:
        """Try again later; what is given up is tried anew with the next lease, and of an event that is over no more."""
        delivery.failed += 1
        if delivery.failed < delivery.hook.tries:
            delivery.due_ns = now + min(SECOND << (delivery.failed - 1), _MOST_WAIT_NS)
            return
        line.counts["given_up"] += 1
        self._report(Told(delivery, bool(delivery.over), f"given up after {delivery.failed} tries: {why}", True))
        delivery.failed, delivery.due_ns = 0, now + delivery.hook.lease_ns // 2
        if delivery.over and not delivery.hook.of_state:
            del self.deliveries[delivery.key]

    def finish(self, timeout_s: float) -> list[Delivery]:
        """Make what calls are due, within this time; what is left, which stays in the file."""
        until = time.monotonic() + timeout_s
        self.turn(time.monotonic_ns(), time.time_ns())
        while self.deliveries and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self.turn(time.monotonic_ns(), time.time_ns())
        return list(self.deliveries.values())

    # ---- memory ----

    def remember(self) -> str:
        """Write down what may have been told, if that has changed; why that is impossible."""
        kept, self._changed = tuple(each for each in self.deliveries.values() if each.told), False
        try:
            data = msgspec.json.encode(_File(self._scope, self._notices, kept)) if kept else b""
            if data == self._written:
                return ""
            if kept:
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                owned_files.replace(self._file, data)
            else:
                self._file.unlink(missing_ok=True)
        except OSError as error:
            self._changed = True
            return f"it cannot be remembered: {error.strerror}"
        self._written = data
        return ""

    def facts(self) -> list[dict[str, Any]]:
        """What is known of each hook that was called, for the operator."""
        return [
            {
                "hook": name,
                "open": self._open(name),
                "waiting": sum(not each.received for each in self.deliveries.values() if each.hook.name == name),
                "limited": line.limited,
                "failure": line.failure,
                **line.counts,
            }
            for name, line in self._lines.items()
        ]


def _before(delivery: Delivery) -> tuple[bool, int]:
    """News before repetitions, then what waits for longest."""
    return not delivery.over and delivery.received > 0, delivery.due_ns
