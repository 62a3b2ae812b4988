"""Follows all queue pairs of all tables: readings in, verdicts and figures out.

A reading looks at every row in use, but works only on those that moved or wait. Of a table with rows that found no
place in the register it reads those that have one, and looks for others four times a second: so no process makes
readings expensive. Times are CLOCK_MONOTONIC nanoseconds, passed in. One thread: the agent's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Rdma
from pytools.estimators import queue_rates, verdicts
from pytools.estimators.queue_pairs import Served, TimedRequests
from pytools.estimators.queue_rates import run_masks
from pytools.estimators.windows import MISSING
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.receivers import NotReady, Receivers
from pytools.sources.rdma.register import ROWS, QueuePair, Register
from pytools.sources.rdma.table import NOT_TIMED, Columns, Counters, Rows, Signed, Slots, Table, growth
from pytools.units import MS

_EVERY_NS: Final = 100_000_000


class Budget:
    """Sets the run masks of all tables."""

    def __init__(self, settings: Rdma) -> None:
        self._per_process, self._interval_ms = settings.budget_per_s, settings.interval_ms
        self._completed = np.zeros(ROWS, np.uint64)  # at the last look
        self._per_s = np.zeros(ROWS)
        self._looked_ns = 0

    def due(self, now_ns: int) -> bool:
        return now_ns - self._looked_ns >= _EVERY_NS

    def begin(self, table: Table, slot: int, row: int, completed: int) -> None:
        """Time a new queue pair as it comes, until it is known how much it posts."""
        self._completed[row], self._per_s[row] = completed, 0.0
        if table.records.flags.writeable:
            table.records["run_mask"][slot] = 0 if self._per_process else NOT_TIMED

    def share_out(self, rows: Rows, completed: Counters, processes: Counters, now_ns: int, readable: int) -> Counters:
        """The run mask of each of these rows; `readable` requests of a row are kept between two readings."""
        passed_s = max(now_ns - self._looked_ns, 1) / 1e9
        self._looked_ns = now_ns
        per_s = np.maximum(growth(completed, self._completed[rows]), 0) / passed_s
        self._per_s[rows] = np.maximum(per_s, self._per_s[rows] / 2)
        self._completed[rows] = completed
        group = np.unique(processes, return_inverse=True)[1]
        return run_masks(self._per_s[rows], group, self._per_process, readable * 1e3 / self._interval_ms)


def write_masks(table: Table, slots: Slots, masks: Counters) -> None:
    """Tell those who write a table, where it may be written and says otherwise."""
    differs = table.records["run_mask"][slots] != masks
    if differs.any() and table.records.flags.writeable:
        table.records["run_mask"][slots[differs]] = masks[differs]


_FORGOTTEN_NS: Final = verdicts.FROZEN_NS  # idle for that long: the old mean says nothing any more
_COMPLETED_CAP: Final = 1 << 40
_UNREGISTERED_NS: Final = 250 * MS  # a table with rows that found no place, or make no sense, is searched so seldom
_LOOKS: Final = 4  # so often at least requests are seen to wait before their path is dead
_NEW_AT_ONCE: Final = 64  # queue pairs described at one reading: more wait for the next
_MOVING: Final = (verdicts.UNKNOWN, verdicts.OK, verdicts.CONGESTED)  # verdicts whose figures go on changing
_MOVES: Final = ("posted", "completed", "receives_completed", "receives_posted", "refused", "timed")


@dataclass(slots=True)
class _Looked:
    table: Table
    columns: Columns
    rows: Rows


class Watch:
    """The state of every queue pair.

    Parameters
    ----------
    describe : callable
        Makes a queue pair of a table and a slot; asked once per queue pair.
    not_ready : NotReady
        The ports' counters of receivers that were not ready.
    """

    def __init__(
        self, settings: Rdma, describe: Callable[[Table, int, Columns, int, int], QueuePair], not_ready: NotReady
    ) -> None:
        self._settings, self._describe = settings, describe
        self.receivers = Receivers(not_ready)  # which of them wait for their receiver
        mean_ns, dead_ns = int(settings.mean_ms * MS), int(settings.dead_ms * MS)
        limits = verdicts.Limits(settings.congested_share, settings.congested_backlog, mean_ns, dead_ns)
        self.register = Register()  # the queue pairs, and their rows in the arrays below
        self.timed = TimedRequests(ROWS)  # latencies of requests
        self.rates = queue_rates.Rates(ROWS, mean_ns)  # bandwidth over time
        self.verdicts = verdicts.Verdicts(ROWS, limits)  # what is wrong with each, and since when
        # counters as they were last read, by name and row
        self.last: dict[str, Counters] = {name: np.zeros(ROWS, np.uint64) for name in tables.COUNTERS}
        self.sentences: dict[int, str] = {}  # the measurement behind each verdict, by row
        # what was lost or left out, by cause
        self.drops = Counter({"rdma_timed_missed": 0, "rdma_garbage": 0, "rdma_no_row": 0})
        self.moved_ns = 0  # when any queue pair last did anything
        self._active_ns = np.zeros(ROWS, np.int64)
        self._moved = np.zeros(ROWS, np.bool_)
        self.now_bps, self.mean_bps = np.full(ROWS, np.nan), np.full(ROWS, np.nan)  # bandwidth by row; NaN: not known
        self._statuses = np.zeros((ROWS, len(tables.STATUSES) + 1), np.uint64)
        self._ended = np.zeros((ROWS, len(tables.STATUSES) + 1), np.int64)  # since the last reading, by status
        self._judged = np.zeros(0, np.intp)
        self._judged_facts: verdicts.Facts
        self._read_ns = 0
        # Who read nothing for longer may have had no processor, like the application that takes completions.
        self._seen_ns = max(dead_ns // _LOOKS, 2 * int(settings.interval_ms * MS))
        self._watched_ns = np.zeros(ROWS, np.int64)
        self._garbage: dict[int, int] = {}
        self._whole_ns: dict[int, int] = {}  # by table: not before this are rows read that have no place
        self._budget = Budget(settings)

    def read(self, present: Sequence[Table], now_ns: int) -> tuple[list[int], list[int]]:
        """Look at all tables.

        Returns
        -------
        changed : list of int
            Rows whose verdict changed.
        over : list of int
            Rows whose queue pair is destroyed, or whose slot another one has.
        """
        since_ns, self._read_ns = self._read_ns or now_ns - 1, now_ns
        looked, over = self._look(present, now_ns)
        if not looked:
            return [], over
        rows = np.concatenate([each.rows for each in looked])
        columns = _joined([each.columns for each in looked])
        over += rows[columns.closed].tolist()
        moved = _any_differs(columns, self.last, rows)
        if moved.any():
            self.moved_ns = now_ns
        active = moved | self._moved[rows] | (columns.outstanding > 0)
        verdict = self.verdicts.verdict[rows]
        active |= (verdict != verdicts.NO_DEMAND) & ((verdict != verdicts.UNKNOWN) | (columns.completed > 0))
        self._moved[rows] = moved
        found = self._take_timed(looked, now_ns)
        self._take_statuses(looked)
        changed = self._judge(rows[active], columns.take(active), found, since_ns, now_ns) if active.any() else []
        for name in tables.COUNTERS:
            self.last[name][rows] = getattr(columns, name)
        if self._budget.due(now_ns):
            self._share_out(looked, rows, columns.completed, now_ns)
        return changed, over

    def moved(self, row: int) -> bool:
        """Whether a queue pair did anything in the last reading, or has something outstanding."""
        return bool(self._moved[row]) or self.last["posted"][row] != self.last["completed"][row]

    def refresh(self, row: int) -> None:
        """Take in what changes seldom: what kinds of requests a queue pair posts."""
        pair = self.register.pairs[row]
        opcodes = pair.table.records["opcodes"][pair.slot].copy()
        pair.opcodes = tables.named(opcodes, tables.OPCODES)
        self.receivers.refresh(row, pair, opcodes)

    def give_up(self, row: int) -> QueuePair:
        self.sentences.pop(row, None)
        others = self._judged != row
        if not others.all():
            self._judged, self._judged_facts = self._judged[others], self._judged_facts.take(others)
        return self.register.give_up(row)

    def statuses(self, row: int) -> Counters:
        """Completions of a queue pair by status, as they stood at the last reading."""
        counts: Counters = self._statuses[row]
        return counts

    # ---- one reading ----

    def _look(self, present: Sequence[Table], now_ns: int) -> tuple[list[_Looked], list[int]]:
        looked, over = [], []
        for gone in self.register.tables() - {id(each) for each in present}:
            over += self.register.rows_of(gone)
        room = _NEW_AT_ONCE
        for each in present:
            among = self.register.slots(each) if now_ns < self._whole_ns.get(id(each), 0) else None
            columns = tables.read(each.records, now_ns, getattr(each, "pid", 0), among)
            if among is None:
                self.drops["rdma_garbage"] += max(0, columns.garbage - self._garbage.get(id(each), 0))
                self._garbage[id(each)] = columns.garbage
            rows, new, lost = self.register.match(each, columns)
            over += lost
            some = self.register.worth_describing(each, columns, new)[:room]
            room -= len(some)
            for place in some.tolist():
                rows[place] = self._begin(each, columns, place, now_ns)
            held = rows >= 0
            if among is None and room > 0 and (columns.garbage or not held.all()):
                self._whole_ns[id(each)] = now_ns + _UNREGISTERED_NS
            if held.any():
                looked.append(_Looked(each, columns.take(held), rows[held]))
        return looked, over

    def _share_out(self, looked: Sequence[_Looked], rows: Rows, completed: Counters, now_ns: int) -> None:
        kept = looked[0].table.records.dtype["timed_requests"].shape[0]
        masks = self._budget.share_out(rows, completed, self.register.processes(rows), now_ns, kept)
        for each, some in zip(looked, np.split(masks, np.cumsum([len(each.rows) for each in looked])), strict=False):
            write_masks(each.table, each.columns.slots, some)

    def _begin(self, table: Table, columns: Columns, place: int, now_ns: int) -> int:
        row = self.register.add(self._describe(table, int(columns.slots[place]), columns, place, now_ns))
        if row is None:
            if columns.closed[place]:  # it was told already, or there is no room to
                table.free(int(columns.slots[place]))
            return -1
        chosen = np.array([row])
        self.timed.forget(chosen)
        self.rates.forget(chosen)
        self.verdicts.forget(chosen, now_ns)
        for name in tables.COUNTERS:
            self.last[name][row] = getattr(columns, name)[place]
        kept = np.uint64(table.records.dtype["timed_requests"].shape[0])
        self.last["timed"][row] -= min(columns.timed[place], kept)  # what lies there already is worth reading
        self._active_ns[row], self._moved[row] = now_ns, False
        self.receivers.forget(row)
        self._budget.begin(table, int(columns.slots[place]), row, int(columns.completed[place]))
        self.sentences[row] = "it has posted nothing yet" if not columns.posted[place] else "just seen"
        self.refresh(row)
        self._statuses[row] = table.records["statuses"][int(columns.slots[place])]
        return row

    def _take_timed(self, looked: Sequence[_Looked], now_ns: int) -> list[Served]:
        found = []
        for each in looked:
            before = self.last["timed"][each.rows]
            some = np.flatnonzero(each.columns.timed != before)
            if not len(some):
                continue
            timed = tables.read_timed(
                each.table.records, each.columns.slots[some], before[some], each.columns.timed[some], now_ns
            )
            self.drops["rdma_timed_missed"] += timed.missed
            self.drops["rdma_garbage"] += timed.garbage
            order = np.argsort(each.rows[some][timed.rows], kind="stable")  # requests of a row stay in order
            rows = each.rows[some][timed.rows][order]
            if len(rows):
                posted_ns, completed_ns = timed.posted_ns[order], timed.completed_ns[order]
                found.append(self.timed.add(rows, timed.number[order], posted_ns, completed_ns, timed.bytes[order]))
        return found

    def _growth(self, rows: Rows, columns: Columns, found: Sequence[Served]) -> queue_rates.Growth:
        """What was retired since the last reading: as timed requests tell where these are all there is."""
        count = queue_rates.Growth(
            _grown(columns.completed, self.last["completed"][rows]),
            _grown(columns.completed_bytes, self.last["completed_bytes"][rows]),
            columns.outstanding,
            columns.outstanding_bytes,
            np.full(len(rows), MISSING),
            np.full(len(rows), MISSING),
        )
        if not found:
            return count
        place = np.full(ROWS, -1, np.intp)
        place[rows] = np.arange(len(rows))
        for each in found:
            where = place[each.rows]
            exact = each.whole & (where >= 0)
            exact &= growth(each.last_number + np.uint64(1), columns.completed[where]) >= 0
            where = where[exact]
            for values, told in (
                (count.requests, each.requests),
                (count.bytes, each.bytes),
                (count.busy_ns, each.busy_ns),
                (count.ended_ns, each.ended_ns),
            ):
                values[where] = told[exact]
        return count

    def _judge(self, rows: Rows, columns: Columns, found: Sequence[Served], since_ns: int, now_ns: int) -> list[int]:
        grown = self._growth(rows, columns, found)
        came_back = (grown.requests > 0) & (now_ns - self._active_ns[rows] > _FORGOTTEN_NS)
        self.rates.forget_means(rows[came_back])
        self.rates.update(rows, since_ns, now_ns, grown)
        waits = (columns.outstanding > 0) & (grown.requests == 0)
        self._watched_ns[rows] = waits * (self._watched_ns[rows] + min(now_ns - since_ns, self._seen_ns))
        facts = self._facts(rows, columns, now_ns)
        told = self.verdicts.update(rows, facts, now_ns)
        usual = ~self.verdicts.unusual(rows, now_ns)
        self.rates.learn(rows[usual], since_ns, now_ns, queue_rates.Growth(*(each[usual] for each in grown)))
        self.now_bps[rows], self.mean_bps[rows] = facts.bandwidth_bps, facts.mean_bps
        self._judged, self._judged_facts = rows, facts
        changed: list[int] = rows[told].tolist()
        for place in np.flatnonzero(told).tolist():
            self._say(int(rows[place]), facts.take(np.array([place])))
        return changed

    def say_again(self) -> None:
        """Bring the sentences of the rows that were judged last up to date, where their figures move."""
        for place, row in enumerate(self._judged.tolist()):
            if row in self.register.pairs and self.verdicts.verdict[row] in _MOVING:
                self._say(row, self._judged_facts.take(np.array([place])))

    def _say(self, row: int, facts: verdicts.Facts) -> None:
        self.sentences[row] = verdicts.reason(int(self.verdicts.verdict[row]), facts)

    def _facts(self, rows: Rows, columns: Columns, now_ns: int) -> verdicts.Facts:
        posted = _grown(columns.posted, self.last["posted"][rows])
        completed = _grown(columns.completed, self.last["completed"][rows])
        before = growth(self.last["posted"][rows], self.last["completed"][rows])
        awaited = growth(columns.signalled, columns.completions) > 0
        busy = (posted > 0) | (completed > 0) | (columns.outstanding > 0)
        self._active_ns[rows[busy]] = now_ns
        bandwidth, settled = self.rates.now(rows, now_ns)
        mean, waiting = self.rates.means(rows)
        ended = self._ended[rows]
        facts = verdicts.Facts(
            outstanding=columns.outstanding,
            outstanding_bytes=columns.outstanding_bytes,
            due=awaited | (columns.signalled == 0),
            posted=posted,
            completed=completed,
            completed_ever=np.minimum(columns.completed, np.uint64(_COMPLETED_CAP)).astype(np.int64),
            drained=completed >= before,
            waited_ns=self.rates.waited_ns(rows, now_ns),
            watched_ns=self._watched_ns[rows],
            idle_ns=now_ns - self._active_ns[rows],
            bandwidth_bps=bandwidth,
            settled_bps=settled,
            mean_bps=mean,
            mean_outstanding_bytes=waiting,
            needs_receives=self.receivers.needed[rows],
            not_ready=np.zeros(len(rows), np.int64),
            not_ready_recently=np.zeros(len(rows), np.bool_),
            starved=np.zeros(len(rows), np.bool_),
            spent_answer=ended[:, tables.RETRIES_SPENT],
            spent_ready=ended[:, tables.NOT_READY_SPENT],
            succeeded=ended[:, 0] > 0,
        )
        self.receivers.ask(rows, facts, self._settings.congested_share, self.last, now_ns)
        return facts

    def _take_statuses(self, looked: Sequence[_Looked]) -> None:
        """Note the completions since the last reading by status, of the rows that had any."""
        for each in looked:
            rows = each.rows
            some = each.columns.completions != self.last["completions"][rows]
            some |= each.columns.receives_completed != self.last["receives_completed"][rows]
            self._ended[rows[~some]] = 0
            chosen = rows[some]
            now = each.table.records["statuses"][each.columns.slots[some]]
            self._ended[chosen] = _grown(now, self._statuses[chosen])
            self._statuses[chosen] = now


def _grown(later: Counters, earlier: Counters) -> Signed:
    """How much counters grew; those that went back, as only nonsense does, did not grow."""
    result: Signed = np.maximum(growth(later, earlier), 0)
    return result


def _joined(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return Columns._make([*(np.concatenate(column) for column in list(zip(*parts, strict=True))[:-1]), 0])


def _any_differs(columns: Columns, last: dict[str, Counters], rows: Rows) -> NDArray[np.bool_]:
    moved = np.zeros(len(rows), np.bool_)
    for name in _MOVES:
        moved |= getattr(columns, name) != last[name][rows]
    return moved
