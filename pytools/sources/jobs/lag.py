"""Which ranks are behind, from two answers of RAS, and which rank of the job each is. Pure.

RAS collects the counts of all ranks within milliseconds, not at one instant. So a rank counts as behind when it has
begun fewer collective operations by now than another rank of its communicator had begun one answer earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytools.sources.jobs.ras import Communicator, Rank


def behind(before: Sequence[Communicator], now: Sequence[Communicator]) -> list[tuple[Communicator, Rank, int]]:
    """Communicator, rank, and operations, the most first."""
    reached = {
        (each.hash, each.secondary_hash): max((rank.operations for rank in each.ranks), default=0) for each in before
    }
    found = [
        (each, rank, missing)
        for each in now
        for rank in each.ranks
        if (missing := reached.get((each.hash, each.secondary_hash), 0) - rank.operations) > 0
    ]
    return sorted(found, key=lambda item: (-item[2], item[1].rank))


def of_job(communicators: Sequence[Communicator], size: int | None, pids: Mapping[int, set[int]]) -> dict[int, Rank]:
    """The ranks of the communicator that numbers them as the job does, by number; empty if there is none.

    It has all ranks, and those of this host have the processes that they have here. A process number alone says
    nothing: on other hosts, and in containers, others have the same.
    """
    for each in communicators:
        found = {rank.rank: rank for rank in each.ranks}
        if each.size == size and all(number in found and found[number].pid in pids[number] for number in pids):
            return found
    return {}
