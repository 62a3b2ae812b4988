"""Which sessions are probed in which half of an interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pytools.config import Peer
from pytools.signals import Path
from pytools.sources.probing.paths import PinnedPath, Session
from pytools.sources.probing.ticks import LEAST_HALVED_NS, halves


def session(row: int, peer: str, rail: str = "rail1", family: Any = 4) -> Session:
    path = Path("us", peer, f"10.0.0.{row + 1}", "", rail)
    pinned = PinnedPath(row, path, Peer(peer, path.address), family, 1, "10.0.0.99", nexthop_id=None, onlink=True)
    return Session(pinned, 40_000, row)


def rows(parts: list[Sequence[Session]]) -> list[list[int]]:
    return [[each.row for each in part] for part in parts]


def test_every_other_peer_is_probed_in_the_middle_by_all_its_paths() -> None:
    sessions = [
        session(row, peer, rail)
        for row, (peer, rail) in enumerate(
            [("c", "rail1"), ("a", "rail1"), ("b", "rail1"), ("c", "rail2"), ("a", "rail2"), ("b", "rail2")]
        )
    ]
    assert rows(halves(sessions, LEAST_HALVED_NS)) == [[0, 1, 3, 4], [2, 5]]


def test_a_peer_with_addresses_of_both_families_stays_together() -> None:
    sessions = [session(0, "a"), session(1, "b"), session(2, "b", family=6)]
    assert rows(halves(sessions, LEAST_HALVED_NS)) == [[0], [1, 2]]


@pytest.mark.parametrize(("peers", "interval_ns"), [("aa", LEAST_HALVED_NS), ("ab", LEAST_HALVED_NS - 1)])
def test_with_one_peer_or_a_short_interval_all_leave_at_once(peers: str, interval_ns: int) -> None:
    sessions = [session(row, peer) for row, peer in enumerate(peers)]
    assert rows(halves(sessions, interval_ns)) == [[0, 1]]
