"""Silence and answers on real paths: rails that lose both ways or one way, a peer that is gone, a reflector that is."""

from __future__ import annotations

import functools
import itertools
import select
import selectors
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import support
import watching
from msgspec.structs import replace
from watching import Watcher

from pytools.config import AgentConfig, Links, Probe
from pytools.ipc.bus import Subscription
from pytools.kernel import netns
from pytools.lab.building import agent_config
from pytools.lab.fabric import Lab
from pytools.signals import PathLiveness
from pytools.sources.probing.liveness import Liveness
from pytools.sources.probing.measurements import RECEIVED, SENT
from pytools.sources.probing.sessions import EXTRA_EVERY_NS, EXTRA_TICKS

INTERVAL_MS = 20.0
QUICK = Probe(interval_ms=INTERVAL_MS, timeout_ms=400)
NO_SIZES = Links(mtu_interval_s=0)  # their probes are requests as well
ENOUGH = 12  # probes in a row
Hosts = tuple["Listener", "Listener"]


class Listener:
    """One host, and what it tells of the lives of its paths."""

    def __init__(self, host: Watcher) -> None:
        self.host, self.mesh = host, host.mesh
        self._told: Subscription = host.bus.subscribe(frozenset({"path_liveness"}))
        self.heard: list[PathLiveness] = []

    @property
    def live(self) -> Liveness:
        return self.mesh.measurements.liveness

    def rows(self, interface: str) -> list[int]:
        return [pinned.index for pinned in self.mesh.paths.current if pinned.path.interface == interface]

    def counted(self, counter: int) -> int:
        return int(self.mesh.measurements.counts[:, counter].sum())

    def of(self, interface: str) -> list[PathLiveness]:
        """The newest of each path by an interface."""
        self.heard += [signal for signal in self._told.read() if isinstance(signal, PathLiveness)]
        return list({signal.path: signal for signal in self.heard if signal.path.interface == interface}.values())

    def missed(self, interface: str, at_least: int = ENOUGH) -> bool:
        return len(self.of(interface)) == 2 and all(signal.missed >= at_least for signal in self.of(interface))

    def all_answer(self, run: int = ENOUGH) -> bool:
        rows = self.rows("rail1") + self.rows("rail2")
        return len(rows) == 4 and all(self.answered_run(row) >= run for row in rows)

    def answered_run(self, row: int) -> int:
        """How many probes in a row a path has answered; 0 while it misses any."""
        return self.live.signal(row, "", time.monotonic_ns(), 0).answered_run

    def worst(self, interface: str) -> int:
        """The most that was told to be missed on any path by an interface."""
        self.of(interface)
        return max((signal.missed for signal in self.heard if signal.path.interface == interface), default=0)


LAB = {"rate": "none", "ipv6": True}


@pytest.fixture
def start(lab: Lab) -> Iterator[Callable[..., Hosts]]:
    """Starts a mesh on both hosts, and waits until all paths answer."""
    made: list[Watcher] = []

    def started(probe: Probe = QUICK, clock: str = "shared") -> Hosts:
        for host in lab.hosts:
            known = agent_config(host, lab.hosts, lab.spec.ipv6)
            peers = [replace(peer, clock=clock) for peer in known.peers]
            made.append(Watcher(host.netns, AgentConfig(known.host, peers, probe=probe, links=NO_SIZES)))
        first, second = (Listener(each) for each in made)
        work_until((first, second), lambda: first.all_answer() and second.all_answer(), "all paths answer")
        for each in (first, second):
            each.of("rail1")
            each.heard.clear()
        return first, second

    yield started
    left = [each.close() for each in made]
    assert not any(left), "close must leave no rule and no table"


def work_until(hosts: Hosts | tuple[Listener], condition: Callable[[], bool], what: str) -> None:
    watching.work_until([each.host for each in hosts], condition, what)


def serve_until(hosts: Hosts, condition: Callable[[], bool], what: str) -> None:
    """Let both answer and measure, without sending or counting misses."""

    def served() -> bool:
        for each in hosts:
            with netns.inside(each.host.namespace):
                each.mesh.serve(time.monotonic_ns())
        return condition()

    support.wait_until(served, 10, what, every_s=0.0005)


def assert_all_sent_are_missed(host: Listener, interface: str) -> None:
    """Missed is all that the kernel has sent since the last answer, but for what is within its grace.

    Of a pair one counts, of several source ports one, and extra ones do not.
    """
    with netns.inside(host.host.namespace):
        host.mesh.serve(time.monotonic_ns())
        host.live.look(time.monotonic_ns())
    sent = host.mesh.program.paths["unanswered"][host.rows(interface)].astype(np.int64)
    missed = host.live.missed[host.rows(interface)]
    assert ((sent - 2 <= missed) & (missed <= sent)).all()


def test_a_rail_that_loses_both_ways_is_silent_and_heals(lab: Lab, start: Callable[..., Hosts]) -> None:
    first, second = hosts = start()
    lab.blackhole(1)
    work_until(hosts, lambda: first.missed("rail1") and second.missed("rail1"), "the rail is silent")
    for each in hosts:
        assert each.worst("rail2") < 2, "the other rail is not"
        told = [signal for signal in each.heard if signal.path.interface == "rail1" and signal.missed]
        numbers = {signal.path: [0] for signal in told}
        for _, together in itertools.groupby(told, lambda signal: signal.at_ns):
            grown = []
            for signal in together:
                grown.append(signal.missed - numbers[signal.path][-1])
                numbers[signal.path].append(signal.missed)
            assert min(grown) >= 0
            assert max(grown) > 0, "each further one, and with it the other paths to that peer"
        assert all(len(set(missed)) > ENOUGH // 4 for missed in numbers.values()), "and not only the last"
        assert all(signal.missed <= signal.silent_ns / signal.interval_ns + 1.5 for signal in told)
        assert_all_sent_are_missed(each, "rail1")
    lab.heal(1)
    work_until(hosts, first.all_answer, "the rail answers again")
    newest = first.of("rail1")
    assert [signal.missed for signal in newest] == [0, 0], "told at once"
    assert all(1 <= signal.answered_run <= ENOUGH for signal in newest), "the run has just begun"


def test_misses_are_exactly_the_probes_that_were_sent(lab: Lab, start: Callable[..., Hosts]) -> None:
    """The test sends the probes itself, so it knows how many; the kernel's own count of each path says the same."""
    first, _ = hosts = start()
    first.mesh.sender.set_paths(first.mesh.paths.current)  # nothing is planned any more
    serve_until(hosts, lambda: first.counted(RECEIVED) == first.counted(SENT), "all answers are in")
    lab.blackhole(1)
    received, probes = first.counted(RECEIVED), 40
    for turn in range(1, probes + 1):
        watching.send_now(first.mesh.sender)
        in_kernel = first.mesh.program.paths["unanswered"][first.rows("rail1")]
        assert in_kernel.tolist() == [turn, turn]
        first.live.look(time.monotonic_ns() + int(INTERVAL_MS * 1e6))  # the grace of all of them has passed by then
        assert first.live.missed[first.rows("rail1")].tolist() == [turn, turn]
    serve_until(hosts, lambda: first.counted(RECEIVED) == received + 2 * probes, "the other rail has answered")
    first.live.look(time.monotonic_ns() + int(INTERVAL_MS * 1e6))
    assert first.live.missed[first.rows("rail1")].tolist() == [probes, probes]
    assert first.live.missed[first.rows("rail2")].tolist() == [0, 0]


@pytest.mark.parametrize("towards_the_peer", [True, False])
def test_a_rail_that_loses_one_way_says_which(lab: Lab, start: Callable[..., Hosts], towards_the_peer: bool) -> None:
    """Both hosts miss answers; requests come in at the end towards which the rail works."""
    first, second = hosts = start()
    lab.blackhole(1, (1, 2) if towards_the_peer else (2, 1))
    lost_ns = time.monotonic_ns()
    work_until(hosts, lambda: first.missed("rail1") and second.missed("rail1"), "the rail is silent")
    hears, deaf = (first, second) if towards_the_peer else (second, first)
    for signal in hears.of("rail1"):
        assert signal.last_request_ns > signal.at_ns - signal.silent_ns // 2, "the way back works"
    for signal in deaf.of("rail1"):
        assert signal.last_request_ns <= lost_ns, "it does not"
    for each in hosts:
        assert each.worst("rail2") < 2


def test_a_peer_that_is_gone_is_silent_on_all_paths(lab: Lab, start: Callable[..., Hosts]) -> None:
    first, _ = hosts = start()
    for rail in ("rail1", "rail2"):
        support.run(["ip", "-n", lab.hosts[1].netns, "link", "set", rail, "down"])
    gone_ns = time.monotonic_ns()
    work_until(hosts, lambda: first.missed("rail1") and first.missed("rail2"), "all are silent")
    for signal in first.of("rail1") + first.of("rail2"):
        assert signal.last_request_ns <= gone_ns
        assert signal.last_answer_ns <= gone_ns
        assert signal.at_ns - signal.silent_ns > signal.last_answer_ns


def test_a_reflector_that_is_gone_leaves_the_requests_of_its_host(start: Callable[..., Hosts]) -> None:
    first, second = hosts = start()
    second.mesh.program.set_peers({})  # as if it did not know us
    work_until(hosts, lambda: first.missed("rail1") and first.missed("rail2"), "all are silent")
    for signal in first.of("rail1") + first.of("rail2"):
        assert signal.last_request_ns > signal.at_ns - signal.silent_ns // 2
    assert second.worst("rail1") < 2
    assert second.worst("rail2") < 2


def test_an_agent_that_hangs_is_answered_for_and_that_is_told(start: Callable[..., Hosts]) -> None:
    first, _ = start()
    age_ns = 300_000_000

    def aged() -> bool:
        heard = first.of("rail1")
        return bool(heard) and all((each.peer_agent_age_ns or 0) > age_ns and each.missed == 0 for each in heard)

    work_until((first,), aged, "the other agent's last sign of life is old, and its kernel answers")


def test_several_source_ports_are_one_path(lab: Lab, start: Callable[..., Hosts]) -> None:
    flows = 4
    first, _ = hosts = start(Probe(interval_ms=INTERVAL_MS, timeout_ms=400, flows=flows))
    lab.blackhole(2)
    work_until(hosts, lambda: first.missed("rail2"), "the rail is silent")
    assert first.worst("rail1") < 2
    assert all(signal.missed <= signal.silent_ns / signal.interval_ns + 1.5 for signal in first.of("rail2"))
    assert_all_sent_are_missed(first, "rail2")
    lab.heal(2)
    work_until(hosts, first.all_answer, "the rail answers again")


def test_a_coded_pair_is_one_probe(lab: Lab, start: Callable[..., Hosts]) -> None:
    """Of three packets that leave at once one counts: a single full queue may take them all."""
    first, second = hosts = start(clock="free_running")
    lab.blackhole(1)
    work_until(hosts, lambda: first.missed("rail1") and second.missed("rail1"), "the rail is silent")
    for each in hosts:
        assert each.worst("rail2") < 2
        assert all(signal.missed <= signal.silent_ns / signal.interval_ns + 1.5 for signal in each.of("rail1"))
        assert_all_sent_are_missed(each, "rail1")
    lab.heal(1)
    before = [first.answered_run(row) for row in first.rows("rail2")]
    received = first.mesh.measurements.counts[first.rows("rail2"), RECEIVED].copy()
    work_until(hosts, functools.partial(first.all_answer, 2 * ENOUGH), "the rail answers again")
    for row, run, count in zip(first.rows("rail2"), before, received, strict=True):
        answers = first.mesh.measurements.counts[row, RECEIVED] - count
        assert (first.answered_run(row) - run) * 2 <= answers + 3, "three packets to every second probe"


def test_a_path_without_a_way_misses_the_probes_that_were_refused(
    lab: Lab, start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = hosts = start()
    monkeypatch.setattr(first.mesh.paths, "refresh", lambda _: False)  # a path whose route has gone goes with it
    support.run(["ip", "-n", lab.hosts[0].netns, "link", "set", "rail1", "down"])
    work_until(hosts, lambda: first.missed("rail1", 5), "the path is silent")
    assert first.host.lost()["probe_send_refused"] >= 10


def test_a_young_silence_wakes_the_mesh_when_the_next_miss_falls_due(
    lab: Lab, start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = hosts = start()
    mesh = first.mesh
    due: set[int] = set()
    look, said = first.live.look, list[int | None]()

    def looked(now_ns: int) -> int | None:
        said.append(look(now_ns))
        return said[-1]

    monkeypatch.setattr(first.live, "look", looked)
    lab.blackhole(1)

    def silent() -> bool:
        miss_ns = said[-1] if said else None  # at the mesh's own last look: a later one may know of more
        if miss_ns is not None:
            due.add(miss_ns)
            assert first.host.due[mesh.tick] <= miss_ns
        return first.missed("rail1")

    work_until(hosts, silent, "the rail is silent")
    assert len(due) >= 3
    monkeypatch.undo()
    assert first.live.look(time.monotonic_ns()) is None, (
        "a path that is known to be dead is looked at as often as others"
    )


def test_what_the_pacer_sees_makes_the_mesh_look_at_once(
    lab: Lab, start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = hosts = start()
    mesh, watcher = first.mesh, first.host
    pacer = mesh.sender.schedule
    speaks = watcher.selector.get_key(pacer).data
    watcher.selector.unregister(pacer)  # the test hears it

    def heard() -> bool:
        mesh.program.paths["overdue"][:] = 0  # as if probe.c had seen none: a look that is late is left out
        return bool(select.select([pacer], [], [], 0)[0])

    assert not heard(), "while all answer"
    lab.blackhole(1)
    work_until(hosts, heard, "an answer is overdue")
    early_ns = watcher.due[mesh.tick] - 1
    looked: list[int] = []
    monkeypatch.setattr(mesh.sender, "expire", looked.append)
    with netns.inside(watcher.namespace):
        assert mesh.tick(early_ns) == early_ns + 1 and not looked, "nothing is due yet"
        speaks(selectors.EVENT_READ)
        mesh.tick(early_ns)
        assert looked
    watcher.selector.register(pacer, selectors.EVENT_READ, speaks)


def test_when_an_answer_is_overdue_extra_probes_show_whether_it_waits(lab: Lab, start: Callable[..., Hosts]) -> None:
    """Where a rail loses everything, most of its probes are overtaken, though only few are due."""
    first, _ = hosts = start()
    sender = first.mesh.sender
    extra, waited = np.zeros(4, np.int64), np.zeros(4, np.int64)

    def count_extra() -> None:
        for path, results in sender.results():
            extra[path] += len(results.extra)

    def overtaken() -> bool:
        count_extra()
        found = sender.overtaken(0)
        for path in first.rows("rail1"):  # further ones leave an interval apart
            apart_ns = np.diff(np.sort(found.sent_ns[found.paths == path]))
            waited[path] = max(waited[path], np.count_nonzero(apart_ns < 2 * EXTRA_EVERY_NS))
        on_rail1 = first.rows("rail1")
        return bool((waited[on_rail1] >= EXTRA_TICKS // 2).all() and (extra >= EXTRA_TICKS // 2).all())

    count_extra()
    assert not extra.any(), "while all answer there are none"
    lab.blackhole(1)
    work_until(hosts, overtaken, "extra probes left on all paths, and those of the rail were overtaken while they wait")
    work_until(hosts, lambda: first.missed("rail1"), "the rail is silent")
    assert_all_sent_are_missed(first, "rail1")
    assert first.worst("rail2") < 2


@pytest.mark.parametrize("way", ["there", "back"])
def test_answers_by_the_other_rail_say_on_which_way_probes_are_missing(
    lab: Lab, start: Callable[..., Hosts], way: str
) -> None:
    first, _ = hosts = start()
    rows, interval_ns = first.rows("rail1"), int(INTERVAL_MS * 1e6)

    lab.blackhole(1, (1, 2) if way == "there" else (2, 1))
    there, leads = np.zeros((2, 0), np.int64)

    def overtaken() -> bool:
        nonlocal there, leads
        found = first.mesh.sender.overtaken(0)
        chosen = np.isin(found.paths, rows) & (found.leads_ns > interval_ns)
        there, leads = found.there_ns[chosen], found.leads_ns[chosen] - interval_ns
        return len(there) >= len(rows) * ENOUGH

    work_until(hosts, overtaken, "the other rail answers what left later")
    if way == "back":
        assert set(there.tolist()) == {0}, "they have come to the peer"
    else:
        assert (there >= leads).all(), "none has"
