"""A held path is probed more often: the kernel learns of its queue, and nobody else has work with it."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import samples
import support
from probe_kit import ADDRESSES, PORT, Hosts, hosts, two

from pytools.config import Peer, Probe
from pytools.kernel.netns import inside
from pytools.signals import Path
from pytools.sources.probing.held_paths import HeldPaths
from pytools.sources.probing.measurements import Bases
from pytools.sources.probing.paths import PinnedPath

__all__ = ["hosts"]  # a fixture

WAITED_NS = 5_000_000


class Known:
    """What is known of the path: every probe seems to have waited so long."""

    clocks_agree = True

    def queueing_from(self, rows: np.ndarray, now_ns: int, at_ns: int) -> Bases:
        there, round_trip, drift, slack = np.zeros((4, len(rows)), np.int64)
        return Bases(np.full(len(rows), self.clocks_agree), there - WAITED_NS, round_trip - 10**9, drift, slack)


@pytest.mark.guest(thorough=True)
@pytest.mark.parametrize("family", [4, 6], ids=["ipv4", "ipv6"])
def test_the_kernel_learns_of_the_queue(hosts: Hosts, veth_pair: tuple[str, str], family: int) -> None:
    first, _ = two(hosts, veth_pair, family)
    ours, theirs = ADDRESSES[family]
    path = Path("a", "b", theirs, "", "v0")
    pinned = PinnedPath(0, path, Peer("b", theirs, clock="shared"), family, first.ifindex, ours, None, True)  # type: ignore[arg-type]
    record, known = first.program.paths, Known()
    with inside(first.namespace), contextlib.ExitStack() as stack:
        held = HeldPaths(first.program, known, Probe(port=PORT, flows=2), [first.ports[family]])  # type: ignore[arg-type]
        stack.callback(held.close)
        held.renew([pinned], 0)
        assert first.counted() == {}, "nobody has said that it is held"
        held.hear([samples.hold_state(path=path)], time.monotonic_ns())

        def sensed() -> int:
            held.renew([pinned], 0)
            return first.counted().get("sensed", 0)

        support.wait_until(lambda: sensed() > 100, 20, "more answers than there are frames")
        assert WAITED_NS <= record["queue_ns"][0] < WAITED_NS + 10**9
        assert record["unanswered"][0] == 0
        assert len(first.program.read()) == 0
        frame_bytes = {4: 118, 6: 138}[family]
        assert held.wire_bytes % frame_bytes == 0
        answered = first.counted()["sensed"]  # an answer may be here before the pacer says that its probe was sent
        support.wait_until(lambda: held.wire_bytes >= frame_bytes * answered, 20, "all answered probes are counted")

        known.clocks_agree = False
        held.renew([pinned], 0)
        assert record["base_until_ns"][0] == 0
        before = int(record["queue_sent_ns"][0])
        after = first.counted()["sensed"]
        support.wait_until(lambda: sensed() > after + 5, 20, "answers go on")
        assert record["queue_sent_ns"][0] == before, "but nothing is learnt from them"

        held.hear([samples.hold_state(path=path, armed=False)], time.monotonic_ns())
        held.renew([pinned], 0)
        last = held.wire_bytes
        held.renew([pinned], 0)
        assert held.wire_bytes == last
