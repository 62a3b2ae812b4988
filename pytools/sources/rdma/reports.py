"""Signals of queue pairs, and of the hosts and links they agree to be slow. Runs in the agent's thread."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import numpy as np

from pytools.estimators import verdicts
from pytools.estimators.distributions import Distribution, by_group
from pytools.estimators.queue_pairs import WINDOWS, Figures
from pytools.estimators.suspects import Thing, Witness, suspects
from pytools.estimators.windows import MISSING
from pytools.signals import Bandwidth, Quantiles, RdmaQueuePair, RdmaSuspects, header
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.backups import Backups, Found
from pytools.sources.rdma.register import QueuePair
from pytools.sources.rdma.watching import Watch

_PERCENT: Final = (50, 90, 99, 100)
_SAME_NAME: Final = (
    *("posted", "completed", "posted_bytes", "completed_bytes", "untracked"),
    *("receives_posted", "receives_completed", "received_bytes"),
)
_UNJUDGED: Final = ("no_demand", "unknown")


class Reports:
    """Makes the signals.

    Parameters
    ----------
    host : str
        This host's name.
    """

    def __init__(self, host: str, watch: Watch, backups: Backups) -> None:
        self._host, self._watch, self._backups = host, watch, backups
        self._window_ns = 0
        self._completed: dict[int, int] = {}  # at the beginning of the window

    def begin_window(self, now_ns: int) -> None:
        watch = self._watch
        self._window_ns = now_ns
        watch.timed.restart()
        watch.rates.restart()
        self._completed = {row: int(watch.last["completed"][row]) for row in watch.register.pairs}

    def signals(self, rows: list[int], now_ns: int, closed: bool = False) -> list[RdmaQueuePair]:
        """Queue pairs as they stand now, with the figures of the window so far."""
        if not rows:
            return []
        chosen = np.array(rows, np.intp)
        bandwidths = self._bandwidths(chosen)
        latencies = self._latencies(chosen)
        unix_ns = time.time_ns()
        return [
            self._signal(row, bandwidths[place], _quantiles(latencies, place), now_ns, unix_ns, closed)
            for place, row in enumerate(rows)
        ]

    def _bandwidths(self, rows: Any) -> list[list[Bandwidth]]:
        watch = self._watch
        result: list[list[Bandwidth]] = [[] for _ in rows]
        timed = [(messages, watch.timed.figures(place, rows)) for place, messages in enumerate(WINDOWS)]
        for messages, figures in [(0, watch.rates.counted(rows)), *timed]:
            for place in range(len(rows)):
                result[place].append(_bandwidth(messages, figures, place))
        return result

    def _latencies(self, rows: Any) -> Distribution:
        where, ns = self._watch.timed.latencies()
        place = np.full(len(self._watch.verdicts.verdict), -1, np.intp)
        place[rows] = np.arange(len(rows))
        group = place[where]
        return by_group(ns[group >= 0], group[group >= 0], len(rows), _PERCENT)

    def _signal(
        self, row: int, bandwidths: list[Bandwidth], latency: Quantiles, now_ns: int, unix_ns: int, closed: bool
    ) -> RdmaQueuePair:
        watch = self._watch
        pair = watch.register.pairs[row]
        last = {name: int(values[row]) for name, values in watch.last.items()}
        completed = last["completed"] - self._completed.get(row, 0)
        statuses = watch.statuses(row)
        dead = int(watch.verdicts.verdict[row]) == verdicts.DEAD and not closed
        found = self._backups.find(pair, now_ns) if dead else Found()
        return RdmaQueuePair(
            host=self._host,
            at_ns=now_ns,
            unix_ns=unix_ns,
            seen_by=pair.table.seen_by,
            owner=pair.owner,
            device=pair.device,
            qp_number=pair.number,
            qp_type=pair.qp_type,
            remote=pair.remote,
            remote_qp_number=pair.remote_number,
            path=pair.path,
            window_ns=max(now_ns - max(self._window_ns, pair.first_ns), 0),
            outstanding=max(last["posted"] - last["completed"], 0),
            outstanding_bytes=(last["posted_bytes"] - last["completed_bytes"]) % 2**64,
            shared_receive_queue=pair.shared_receives,
            opcodes=pair.opcodes,
            errors={
                name: count for name, count in tables.named(statuses, tables.STATUSES).items() if name != "success"
            },
            refused_posts=last["refused"],
            bandwidths=bandwidths,
            latency=latency,
            sampled_share=min(1.0, latency.samples / completed) if completed > 0 else 0.0,
            verdict=verdicts.NAMES[int(watch.verdicts.verdict[row])],
            reason=watch.sentences.get(row, ""),
            since_ns=int(watch.verdicts.since_ns[row]),
            closed=closed,
            uid=pair.uid,
            path_answers=found.path_answers,
            backups=list(found.backups),
            no_backup=found.no_backup,
            **{name: last[name] for name in _SAME_NAME},
        )

    def suspects(self, now_ns: int) -> RdmaSuspects:
        """Whom the queue pairs with demand agree to be slow."""
        found = suspects([witness for row in self._watch.register.pairs if (witness := self._witness(row)) is not None])
        return RdmaSuspects(**header(self._host, now_ns), suspects=found)

    def _witness(self, row: int) -> Witness | None:
        watch, pair = self._watch, self._watch.register.pairs[row]
        verdict = verdicts.NAMES[int(watch.verdicts.verdict[row])]
        if verdict in _UNJUDGED:
            return None
        here, link, there = self._things(pair)
        things = tuple(thing for thing in (here, link, there) if thing[1])
        complains_of: tuple[Thing, ...] = ()
        if verdict in ("congested", "dead"):
            complains_of = things
        elif verdict == "slow_receiver":
            complains_of = (there,) if there[1] else ()
        mean, now = float(watch.mean_bps[row]), float(watch.now_bps[row])
        usual = mean if math.isfinite(mean) else 0.0
        current = usual if verdict == "ok" else 0.0 if verdict == "dead" or not math.isfinite(now) else now
        return Witness(things, complains_of, usual, current, verdict)

    def _things(self, pair: QueuePair) -> tuple[Thing, Thing, Thing]:
        leaves_by = pair.interface or pair.device
        there = pair.path.destination if pair.path is not None else pair.remote
        return ("host", self._host), ("link", f"{self._host}:{leaves_by}" if leaves_by else ""), ("host", there)


def _bandwidth(messages: int, figures: Figures, place: int) -> Bandwidth:
    def whole(values: Any) -> int | None:
        value = float(values[place])
        return round(value) if math.isfinite(value) else None

    last_ns = int(figures.last_ns[place])
    return Bandwidth(
        messages=messages,
        windows=int(figures.windows[place]),
        last_bps=whole(figures.last),
        mean_bps=whole(figures.mean),
        min_bps=whole(figures.smallest),
        max_bps=whole(figures.largest),
        last_us=None if last_ns == MISSING else last_ns // 1000,
    )


def _quantiles(found: Distribution, place: int) -> Quantiles:
    values = [int(row[place]) for row in found.percentiles]
    known = [None if value == MISSING else value for value in values]
    return Quantiles(int(found.counts[place]), *known)
