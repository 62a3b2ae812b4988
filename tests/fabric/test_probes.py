"""The probe mesh on real packets: exact counts, foreign reflectors, pinning, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import samples
import support
import watching
from msgspec.structs import replace

from pytools.config import AgentConfig, Clocks, Peer, Probe, Windows
from pytools.estimators.delays import FOREIGN_BOUND_NS
from pytools.estimators.windows import MISSING
from pytools.ipc.bus import Bus
from pytools.kernel import netns
from pytools.kernel.bpf import attach
from pytools.kernel.netlink.routing import PROTOCOL, Member, Netlink
from pytools.lab.building import agent_config
from pytools.lab.fabric import Lab
from pytools.lab.topology import group_id
from pytools.signals import AnySignal, Path, PathDelay, ProbeSamples
from pytools.sources.probing import planner
from pytools.sources.probing.measurements import DUPLICATES, LOST, RECEIVED, REORDERED, SENT
from pytools.sources.probing.program import NUMBERS
from pytools.sources.probing.send_log import SendLog
from pytools.sources.probing.sessions import EXTRA_EVERY_NS, EXTRA_TICKS, PROBES, Results

pytestmark = pytest.mark.beside

PATIENT = Probe(timeout_ms=60_000)  # nothing is lost but what the test calls lost
LONG = Windows(long_ms=60_000)  # holds all that a test does, on a slow machine too
ADDRESSES = {4: ("10.77.0.1", "10.77.0.2"), 6: ("fd77::1", "fd77::2")}


class Node:
    """A mesh in a namespace, with its hooks attached; driven by the test."""

    def __init__(self, namespace: str, config: AgentConfig, hooks: bool = True) -> None:
        self.namespace, self.config, self.bus = namespace, config, Bus()
        self._closing = contextlib.ExitStack()
        keep = self._closing.enter_context
        try:
            with netns.inside(namespace):
                loaded, self.netlink, self.mesh = watching.mesh_of(keep, config, self.bus)
                for interface in self.mesh.interfaces() if hooks else ():
                    keep(attach.attach_tc(loaded.programs["probe_egress"], interface, "egress"))
                    keep(attach.attach_tc(loaded.programs["probe_ingress"], interface, "ingress"))
        except BaseException:
            self._closing.close()
            raise
        self.due = 0

    def counted(self, counter: int) -> int:
        return int(self.mesh.measurements.counts[:, counter].sum())

    def lost_anything(self) -> dict[str, int]:
        return {name: count for name, count in self.mesh.drops().items() if count}

    def in_kernel(self) -> dict[str, int]:
        """The kernel's counters that are not zero, but for bytes."""
        return {name: value for name, value in self.mesh.program.counters().items() if value and name != "wire_bytes"}

    def send(self) -> None:
        """One probe now on each path."""
        watching.send_now(self.mesh.sender)

    def told(self) -> list[PathDelay]:
        """What the long window says now."""
        measured, now_ns = self.mesh.measurements, time.monotonic_ns()
        overtaken = self.mesh.sender.overtaken(now_ns - measured.long.length_ns)
        return measured.signals(measured.long, now_ns, time.time_ns(), False, overtaken)

    def close(self) -> list[str]:
        """Close the mesh; what it has left in the kernel."""
        left = [str(rule) for family in (4, 6) for rule in self.netlink.rules(family) if rule.protocol == PROTOCOL]
        self._closing.close()
        return left


@dataclass
class Nodes:
    """Makes meshes and closes them."""

    made: list[Node] = field(default_factory=list)

    def __call__(self, namespace: str, config: AgentConfig, hooks: bool = True) -> Node:
        self.made.append(Node(namespace, config, hooks))
        return self.made[-1]

    def serve_until(self, condition: Callable[[], object], what: str, *others: Callable[[], None]) -> None:
        """Let all of them answer and measure, without sending, until the condition holds."""

        def served() -> bool:
            for node in self.made:
                node.mesh.serve(time.monotonic_ns())
            for other in others:
                other()
            return bool(condition())

        support.wait_until(served, 10, what, every_s=0.0005)

    def run_until(self, condition: Callable[[], object], what: str, deadline_s: float = 20) -> None:
        """Let all of them work as in the agent until the condition holds."""

        def ran() -> bool:
            now_ns = time.monotonic_ns()
            for node in self.made:
                if node.due <= now_ns:
                    node.due = node.mesh.tick(now_ns)
            return bool(condition())

        support.wait_until(ran, deadline_s, what, every_s=0.001)


@pytest.fixture
def nodes(make_namespace: object) -> Iterator[Nodes]:  # closed before the namespaces are looked through
    support.require("bcc", "netns")
    made = Nodes()
    yield made
    left = [node.close() for node in made.made]
    assert not any(left), "a mesh makes no rule"


def config(host: str, peer: str, address: str, clock: str = "shared", **changes: object) -> AgentConfig:
    fields = {"probe": PATIENT, "windows": LONG} | changes
    return AgentConfig(host, [Peer(peer, address, clock)], **fields)  # type: ignore[arg-type]


def two(nodes: Nodes, ends: tuple[str, str], family: int, **changes: object) -> tuple[Node, Node]:
    ours, theirs = ADDRESSES[family]
    first = nodes(ends[0], config("a", "b", theirs, **changes))
    return first, nodes(ends[1], config("b", "a", ours, **changes))


@pytest.mark.guest(every=4)
@pytest.mark.parametrize("how", ["plain", "offloads off"])
@pytest.mark.parametrize("family", [4, 6])
def test_23_probes_are_23_answers_with_both_delays(
    nodes: Nodes, veth_pair: tuple[str, str], family: int, how: str
) -> None:
    if how == "offloads off":
        support.without_offloads(*veth_pair)
    sender, reflector = two(nodes, veth_pair, family)
    for turn in range(23):
        sender.send()
        nodes.serve_until(lambda wanted=turn + 1: sender.counted(RECEIVED) == wanted, "the probe is answered")
    assert sender.in_kernel() == {"recorded": 23}
    assert reflector.in_kernel() == {"reflected": 23}
    assert [sender.counted(each) for each in (SENT, LOST, DUPLICATES, REORDERED)] == [23, 0, 0, 0]
    assert sender.lost_anything() == reflector.lost_anything() == {}
    (signal,) = sender.told()
    assert (signal.sent, signal.received) == (23, 23)
    assert (signal.forward.samples, signal.reverse.samples) == (23, 23)
    assert 0 < signal.forward.owd_min_ns <= signal.forward.owd_p50_ns <= signal.forward.owd_p99_ns
    assert signal.round_trip_min_ns >= signal.forward.owd_min_ns + signal.reverse.owd_min_ns
    assert signal.forward.bound_ns == 200


@pytest.mark.parametrize("family", [4, 6])
def test_an_address_that_no_interface_has_is_answered_once_it_was_asked_for(
    nodes: Nodes, veth_pair: tuple[str, str], family: int
) -> None:
    """A whole prefix is delivered on the peer, as load balancers have it."""
    ours, theirs = ADDRESSES[family]
    prefix, service = ("10.99.0.0/24", "10.99.0.7") if family == 4 else ("fd99::/64", "fd99::7")
    support.run(["ip", "-n", veth_pair[1], f"-{family}", "route", "add", "local", prefix, "dev", "lo"])
    support.run(["ip", "-n", veth_pair[0], f"-{family}", "route", "add", prefix, "via", theirs])
    first = nodes(veth_pair[0], config("a", "b", service))
    second = nodes(veth_pair[1], config("b", "a", ours))
    nodes.run_until(lambda: first.counted(RECEIVED) >= 3, "probes to it are answered")
    assert second.mesh.drops()["probe_requests_without_program"] > 0, "by no address of an interface"
    support.run(["ip", "-n", veth_pair[1], f"-{family}", "route", "delete", "local", prefix, "dev", "lo"])
    second.mesh.set_peers(second.config, time.monotonic_ns())  # looks at the routes again
    nodes.serve_until(lambda: True, "what was answered before is taken")
    received, sent = first.counted(RECEIVED), first.counted(SENT)
    nodes.run_until(lambda: first.counted(SENT) >= sent + 5, "more are sent")
    assert first.counted(RECEIVED) <= received + 1, "it is somebody else's now"


def test_no_figure_is_dated_before_an_answer_that_it_counts(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    """The tick began, then probes left and were answered, then the ring was read: all of it is one tick's work."""
    sender, _ = two(nodes, veth_pair, 4)
    sub = sender.bus.subscribe(frozenset({"path_delay"}))
    began_ns = sender.mesh.tick(time.monotonic_ns())
    support.wait_until(lambda: time.monotonic_ns() > began_ns, 10, "the next tick is due")
    before = sender.in_kernel().get("recorded", 0)
    support.wait_until(lambda: sender.in_kernel().get("recorded", 0) > before, 10, "another probe is answered")
    sender.mesh.tick(began_ns)
    answered_ns = int(sender.mesh.sender.singles(0, 0).reverse_at.max())
    (signal,) = [each for each in sub.read() if isinstance(each, PathDelay) and each.received]
    assert signal.at_ns >= answered_ns > began_ns


def test_stamps_are_those_of_the_probes_that_were_sent(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    """Each delay lies between the call that sent the probe and the look that found its reply."""
    sender, _ = two(nodes, veth_pair, 4)
    for turn in range(5):
        before = time.monotonic_ns()
        sender.send()
        nodes.serve_until(lambda wanted=turn + 1: sender.counted(RECEIVED) == wanted, "the probe is answered")
        (left,), (forward,), (back,), (reverse,) = sender.mesh.sender.singles(0, before)
        assert before < left < left + forward < back < time.monotonic_ns()
        assert 0 < reverse < back - left


def test_a_host_whose_program_is_not_attached_answers_nothing_and_learns_where_it_is_missing(
    nodes: Nodes, veth_pair: tuple[str, str]
) -> None:
    ours, theirs = ADDRESSES[4]
    sender = nodes(veth_pair[0], config("a", "b", theirs))
    blind = nodes(veth_pair[1], config("b", "a", ours), hooks=False)
    sender.send()
    nodes.run_until(lambda: blind.lost_anything().get("probe_requests_without_program"), "the request is seen")
    assert blind.mesh.interfaces() >= {"v0"}
    assert sender.counted(RECEIVED) == 0


def test_of_two_replies_the_first_counts(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    sender, _ = two(nodes, veth_pair, 4)
    sender.send()
    record = np.zeros(3, sender.mesh.program.read().dtype)
    record["t1_ns"], record["t2_ns"], record["t3_ns"], record["t4_ns"] = 10, 20, 30, (100, 200, 300)
    record["seen_ns"] = time.monotonic_ns()
    sender.mesh.sender.take(record[:2])
    sender.mesh.sender.take(record[2:])
    assert sender.mesh.sender.singles(0, 0).reverse_at.tolist() == [100]
    assert (sender.counted(RECEIVED), sender.counted(DUPLICATES)) == (1, 2)


def test_free_running_clocks_give_queueing_but_no_one_way_delay(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    ours, theirs = ADDRESSES[4]
    sender = nodes(veth_pair[0], config("a", "b", theirs, "free_running"))
    nodes(veth_pair[1], config("b", "a", ours, "free_running"))
    for turn in range(4):
        sender.send()
        wanted = sum(PROBES if each % 2 == 0 else 1 for each in range(turn + 1))  # every other time a pair
        nodes.serve_until(lambda wanted=wanted: sender.counted(RECEIVED) == wanted, "the probes are answered")
    (signal,) = sender.told()
    assert signal.clock == "free_running"
    assert signal.received == 8
    assert signal.forward.samples == signal.reverse.samples == 8
    assert signal.forward.owd_min_ns is signal.asymmetry_ns is None
    assert signal.forward.queueing_last_ns >= 0
    assert signal.round_trip_min_ns > 0


class Foreign:
    """A TWAMP Light reflector: NTP timestamps, no session identifier, no TLVs, and faults as told.

    Parameters
    ----------
    fate : callable
        From the sender's sequence number (counted from the session's first) to how often it is answered.
    """

    def __init__(self, namespace: str, address: str, fate: Callable[[int], int] = lambda _: 1) -> None:
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        with netns.inside(namespace):
            self.socket = socket.socket(kind, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind((address, 862))
        self._fate, self.held, self.hold = fate, [], False
        self._count = 0
        self._first: int | None = None

    def __call__(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                request, back = self.socket.recvfrom(2048)
                seq = struct.unpack_from("!I", request)[0]
                self._first = seq if self._first is None else self._first
                for _ in range(self._fate((seq - self._first) % NUMBERS)):
                    self.held.append((self._reply(request), back))
        if not self.hold:
            for reply, back in self.held:
                self.socket.sendto(reply, back)
            self.held = []

    def _reply(self, request: bytes) -> bytes:
        now = time.monotonic_ns()
        stamp = struct.pack("!II", now // 10**9, ((now % 10**9) << 32) // 10**9)
        head = struct.pack("!I", self._count) + stamp + b"\x00\x01" + bytes(2) + stamp + request[:14] + bytes(2)
        self._count += 1
        return (head + b"\xff" + request[41:])[: len(request)]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def foreign(nodes: Nodes, veth_pair: tuple[str, str]) -> Iterator[Callable[..., tuple[Node, Foreign]]]:
    """A host that probes a foreign reflector, and this."""
    made: list[Foreign] = []

    def make(family: int = 4, *arguments: object) -> tuple[Node, Foreign]:
        _, theirs = ADDRESSES[family]
        made.append(Foreign(veth_pair[1], theirs, *arguments))  # type: ignore[arg-type]
        return nodes(veth_pair[0], config("a", "b", theirs)), made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("family", [4, 6])
def test_a_twamp_light_reflector_gives_round_trips_with_an_honest_bound(
    nodes: Nodes, foreign: Callable[..., tuple[Node, Foreign]], family: int
) -> None:
    sender, reflector = foreign(family)
    for turn in range(10):
        sender.send()
        nodes.serve_until(
            lambda wanted=turn + 1: sender.counted(RECEIVED) == wanted, "the probe is answered", reflector
        )
    (signal,) = sender.told()
    assert sender.lost_anything() == {}
    assert (signal.forward.samples, signal.reverse.samples) == (10, 10)
    assert signal.round_trip_min_ns > 0
    assert signal.forward.bound_ns >= FOREIGN_BOUND_NS


def test_losses_duplicates_and_late_replies_are_counted_exactly(
    nodes: Nodes, foreign: Callable[..., tuple[Node, Foreign]]
) -> None:
    sender, reflector = foreign(4, lambda seq: 0 if seq % 7 == 3 else 2 if seq % 5 == 0 else 1)
    for _ in range(40):
        sender.send()
    answered = [seq for seq in range(40) if seq % 7 != 3]
    twice = [seq for seq in answered if seq % 5 == 0]
    nodes.serve_until(
        lambda: sender.counted(RECEIVED) + sender.counted(DUPLICATES) == len(answered) + len(twice),
        "all replies are in",
        reflector,
    )
    assert (sender.counted(SENT), sender.counted(RECEIVED)) == (40, len(answered))
    assert (sender.counted(DUPLICATES), sender.counted(REORDERED), sender.counted(LOST)) == (len(twice), 0, 0)
    sender.mesh.sender.expire(time.monotonic_ns() + 61 * 10**9)
    assert sender.counted(LOST) == 40 - len(answered)
    assert sender.lost_anything() == {}

    reflector.hold = True
    sender.send()
    nodes.serve_until(lambda: reflector.held, "the probe is with the reflector", reflector)
    sender.mesh.sender.expire(time.monotonic_ns() + 61 * 10**9)
    lost = sender.counted(LOST)
    reflector.hold = False
    nodes.serve_until(sender.lost_anything, "the late reply is in", reflector)
    assert sender.lost_anything() == {"probe_late_replies": 1}
    assert (sender.counted(LOST), sender.counted(RECEIVED)) == (lost, len(answered))


def extra_with_answer(results: Sequence[Results]) -> int:
    answered = {seq for each in results for seq, ns in zip(each.seq, each.forward_ns, strict=True) if ns is not None}
    return sum(seq in answered for each in results for seq in each.extra)


@pytest.mark.parametrize("family", [4, 6])
def test_extra_probes_are_answered_as_the_others_and_count_for_no_silence(
    nodes: Nodes, veth_pair: tuple[str, str], family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_EXTRA_PATIENCE_NS", 10**10)
    sender, _ = two(nodes, veth_pair, family)
    probes, path, results = sender.mesh.sender, np.zeros(1, np.intp), list[Results]()

    def extra_answered() -> int:
        results.extend(more for _, more in probes.results())
        return extra_with_answer(results)

    sender.send()
    for turn in range(1, 4):  # the memory of the extra ones is used again
        assert probes.hurry(path)
        nodes.serve_until(lambda turn=turn: extra_answered() == turn * EXTRA_TICKS, "all are answered")
    probes.set_paths(sender.mesh.paths.current)  # what is planned ahead is withdrawn
    nodes.serve_until(lambda: sender.counted(RECEIVED) == sender.counted(SENT), "the last one is answered")
    assert sender.in_kernel() == {"recorded": sender.counted(SENT)}
    assert extra_answered() == 3 * EXTRA_TICKS
    assert [seq for each in results for seq in each.seq] == list(range(sender.counted(SENT)))
    assert all(None not in each.forward_ns + each.reverse_ns for each in results), "all are answered"
    assert sum(len(each.extra) for each in results) == 3 * EXTRA_TICKS
    steady = sender.counted(SENT) - 3 * EXTRA_TICKS
    liveness = sender.mesh.measurements.liveness
    assert (sent_so_far(liveness.steady), liveness._answered[0]) == (steady, steady)
    assert [sender.counted(each) for each in (LOST, DUPLICATES, REORDERED)] == [0, 0, 0]
    assert sender.lost_anything().keys() <= {"probe_missed_sends"}  # not lost: a machine may be late for what is due


def sent_so_far(log: SendLog) -> int:
    """On the first path."""
    return int(log.sent_by(np.array([time.monotonic_ns()]), np.array([0]))[0])


def test_extra_probes_along_one_path_are_counted_there(
    nodes: Nodes, veth_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_EXTRA_PATIENCE_NS", 10**10)
    sender, _ = two(nodes, veth_pair, 4)
    probes, liveness = sender.mesh.sender, sender.mesh.measurements.liveness
    sender.send()
    assert not probes.hurry(np.array([1]), alone=True), "no such path"
    assert probes.hurry(np.zeros(1, np.intp), alone=True)
    nodes.serve_until(lambda: sent_so_far(liveness.extra) == EXTRA_TICKS, "all are sent")
    results: list[Results] = []

    def all_answered() -> bool:
        results.extend(more for _, more in probes.results())
        return extra_with_answer(results) == EXTRA_TICKS

    nodes.serve_until(all_answered, "all are answered")
    assert liveness.extra.answered_by[0] == EXTRA_TICKS


def test_extra_probes_that_are_too_late_are_left_out_and_counted(
    nodes: Nodes, veth_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_EXTRA_PATIENCE_NS", -(10**10))
    sender, _ = two(nodes, veth_pair, 4)
    probes, left_out = sender.mesh.sender, {"probe_missed_extra": EXTRA_TICKS}
    sender.send()
    assert probes.hurry(np.zeros(1, np.intp))
    nodes.serve_until(lambda: sender.lost_anything() == left_out, "all are left out")
    probes.set_paths(sender.mesh.paths.current)
    nodes.serve_until(lambda: sender.counted(RECEIVED) == sender.counted(SENT), "the others are answered")
    ((_, results),) = probes.results()
    assert len(results.seq) and not results.extra


def test_no_extra_probes_leave_where_the_others_are_as_frequent(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    frequent = Probe(interval_ms=EXTRA_EVERY_NS / 1e6, timeout_ms=1000)
    sender, _ = two(nodes, veth_pair, 4, probe=frequent, windows=Windows())
    assert not sender.mesh.sender.hurry(np.zeros(1, np.intp))


def test_extra_probes_that_were_withdrawn_leave_no_gap(
    nodes: Nodes, veth_pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_EXTRA_PATIENCE_NS", 10**10)
    sender, _ = two(nodes, veth_pair, 4)
    probes = sender.mesh.sender
    sender.send()
    for _ in range(5):
        probes.hurry(np.zeros(1, np.intp))
    probes.set_paths(sender.mesh.paths.current)
    sent = sender.counted(SENT)
    assert 1 < sent < 1 + 5 * EXTRA_TICKS
    sender.send()
    nodes.serve_until(lambda: sender.counted(RECEIVED) == sent + 1, "all are answered")
    ((_, results),) = probes.results()
    assert results.seq == list(range(sent + 1))
    assert sender.lost_anything().keys() <= {"probe_missed_sends"}  # not lost: a machine may be late for what is due


def test_overtaken_replies_are_counted_exactly(nodes: Nodes, foreign: Callable[..., tuple[Node, Foreign]]) -> None:
    sender, reflector = foreign()
    reflector.hold = True
    for _ in range(6):
        sender.send()
    nodes.serve_until(lambda: len(reflector.held) == 6, "the probes are with the reflector", reflector)
    reflector.held = [reflector.held[place] for place in (1, 0, 2, 5, 3, 4)]  # 0, 3 and 4 come after a later one
    reflector.hold = False
    nodes.serve_until(lambda: sender.counted(RECEIVED) == 6, "all replies are in", reflector)
    assert sender.counted(REORDERED) == 3
    assert sender.counted(DUPLICATES) == 0


def test_replies_from_elsewhere_and_strays_are_counted_and_change_nothing(
    nodes: Nodes, veth_pair: tuple[str, str], foreign: Callable[..., tuple[Node, Foreign]]
) -> None:
    sender, reflector = foreign()
    reflector.hold = True
    sender.send()
    nodes.serve_until(lambda: reflector.held, "the probe is with the reflector", reflector)
    (reply, back), reflector.held = reflector.held[0], []
    with netns.inside(veth_pair[1]):
        other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with other:
        other.bind((ADDRESSES[4][1], 0))
        other.sendto(reply, back)  # from another port
    wrong_seq = reply[:24] + struct.pack("!I", 12345) + reply[28:]
    corrupt = reply[:12] + b"\x00\x00" + reply[14:]
    for sent in (wrong_seq, reply[:43], corrupt, reply):
        reflector.socket.sendto(sent, back)
    nodes.serve_until(lambda: sender.counted(RECEIVED) == 1, "the reply itself is in")
    support.wait_until(
        lambda: sender.mesh.sender.look() or sender.lost_anything().get("probe_foreign_replies"), 10, "it"
    )
    assert sender.counted(DUPLICATES) == 0
    assert sender.lost_anything() == {"probe_foreign_replies": 1, "probe_stray": 1, "probe_malformed": 2}


def test_strangers_are_not_answered_and_counted(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    reflector = nodes(veth_pair[1], config("b", "nobody", "10.77.0.99"))
    with netns.inside(veth_pair[0]):
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with asking:
        asking.bind(("10.77.0.1", 0))
        for _ in range(3):
            asking.sendto(struct.pack("!I8xHH", 1, 0xC001, 5).ljust(64, b"\0"), ("10.77.0.2", 862))
        nodes.serve_until(lambda: reflector.lost_anything().get("probe_no_peer") == 3, "all three are in")
        with pytest.raises(BlockingIOError):
            asking.recv(100)
    assert reflector.in_kernel() == {"no_peer": 3}


# ---- several paths ----
LAB = {"rate": "none", "ipv6": True}


def in_lab(nodes: Nodes, lab: Lab, **changes: object) -> list[Node]:
    made = []
    for host in lab.hosts:
        known = agent_config(host, lab.hosts, True)
        fields = {"probe": PATIENT, "windows": LONG} | changes
        made.append(nodes(host.netns, AgentConfig(known.host, known.peers, **fields)))  # type: ignore[arg-type]
    return made


def packets(namespace: str, interface: str) -> int:
    """Packets that came in by an interface, as the kernel counts them."""
    shown = support.run(["ip", "-n", namespace, "-s", "-j", "link", "show", interface]).stdout
    return int(json.loads(shown)[0]["stats64"]["rx"]["packets"])


def rows_of(node: Node, interface: str) -> list[int]:
    return [pinned.index for pinned in node.mesh.paths.current if pinned.path.interface == interface]


def test_every_nexthop_of_every_peer_is_a_path_of_its_own(nodes: Nodes, lab: Lab) -> None:
    first, _ = in_lab(nodes, lab)
    found = {(p.path.address, p.path.gateway, p.path.interface, p.source) for p in first.mesh.paths.current}
    assert found == {
        ("10.9.0.2", "10.1.1.1", "rail1", "10.9.0.1"),
        ("10.9.0.2", "10.2.1.1", "rail2", "10.9.0.1"),
        ("fd00:9::2", "fd00:1:1::1", "rail1", "fd00:9::1"),
        ("fd00:9::2", "fd00:2:1::1", "rail2", "fd00:9::1"),
    }
    for pinned in first.mesh.paths.current:
        assert first.mesh.paths.path_of(pinned.path.address, pinned.path.interface) == pinned.path
    assert first.mesh.paths.path_of("10.9.0.2", "lo") is None


def test_probes_and_replies_stay_on_their_path_whatever_the_weights(nodes: Nodes, lab: Lab) -> None:
    first, second = in_lab(nodes, lab)
    for node, other in ((first, 2), (second, 1)):
        for family, member in ((4, 12), (6, 22)):
            node.netlink.replace_group(group_id(other, family), [Member(member, 1)])
        assert not node.mesh.paths.refresh(time.monotonic_ns()), "a member that was taken out stays a path"
    for interface, rail in (("rail1", 0), ("rail2", 1)):
        rows = rows_of(first, interface)
        assert len(rows) == 2
        others = [row for row in range(4) if row not in rows]
        before = [packets(each.netns, host) for each in lab.rails for host in ("h1", "h2")]
        sender = first.mesh.sender
        sender.set_paths([pinned for pinned in first.mesh.paths.current if pinned.index in rows])
        received = first.mesh.measurements.counts[:, RECEIVED].copy()
        for _ in range(100):
            first.send()
        nodes.serve_until(
            lambda was=received: (first.mesh.measurements.counts[:, RECEIVED] - was).sum() == 200, "all are answered"
        )
        sender.set_paths(first.mesh.paths.current)
        grown = first.mesh.measurements.counts[:, RECEIVED] - received
        assert grown[rows].tolist() == [100, 100]
        assert grown[others].tolist() == [0, 0]
        after = [packets(each.netns, host) for each in lab.rails for host in ("h1", "h2")]
        passed = np.subtract(after, before).reshape(2, 2)  # [rail, from which host]
        assert (passed[rail] >= 200).all(), "requests from h1, replies from h2"
        assert (passed[1 - rail] < 20).all(), "neighbour discovery at most"
    assert first.lost_anything() == second.lost_anything() == {}


def test_a_path_that_was_drained_before_the_start_is_found_when_its_controller_speaks_of_it(
    nodes: Nodes, lab: Lab
) -> None:
    with Netlink(lab.hosts[0].netns) as netlink:
        netlink.replace_group(group_id(2, 4), [Member(12, 1)])
    first, _ = in_lab(nodes, lab)
    drained = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
    assert drained not in [pinned.path for pinned in first.mesh.paths.current]
    strange = [replace(drained, gateway="10.1.1.9"), replace(drained, address="10.9.0.3"), replace(drained, source="x")]
    for path in (*strange, drained):
        first.bus.publish(samples.path_state(path=path))
    nodes.run_until(lambda: len(first.mesh.paths.current) == 4, "the path is found")
    (found,) = [pinned for pinned in first.mesh.paths.current if pinned.path == drained]
    assert (found.nexthop_id, found.source) == (11, "10.9.0.1")
    row = found.index
    nodes.run_until(lambda: first.mesh.measurements.counts[row, RECEIVED], "it answers")


def test_a_path_that_is_gone_is_lost_and_not_probed_over_another(nodes: Nodes, lab: Lab) -> None:
    first, second = in_lab(nodes, lab)
    rows = rows_of(first, "rail1")
    support.run(["ip", "-n", lab.hosts[0].netns, "link", "set", "rail1", "down"])
    first.send()
    nodes.serve_until(lambda: first.counted(RECEIVED) == 2, "the other rail answers")
    counts = first.mesh.measurements.counts
    assert counts[rows, LOST].tolist() == [1, 1], "known at once, without a timeout"
    assert counts[rows, RECEIVED].tolist() == [0, 0]
    assert first.lost_anything() == {"probe_send_refused": 2}
    assert second.in_kernel()["reflected"] == 2
    assert first.mesh.paths.refresh(time.monotonic_ns())
    assert rows_of(first, "rail1") == []
    # The kernel has deleted the nexthop with its interface. It comes back, but not into the group: still a path.
    support.run(["ip", "-n", lab.hosts[0].netns, "link", "set", "rail1", "up"])
    support.run(["ip", "-n", lab.hosts[0].netns, "nexthop", "add", "id", "11", "via", "10.1.1.1", "dev", "rail1"])
    assert first.mesh.paths.refresh(time.monotonic_ns())
    assert [p.path.address for p in first.mesh.paths.current if p.path.interface == "rail1"] == ["10.9.0.2"]


def test_measuring_puts_no_rule_and_no_route_into_the_kernel(nodes: Nodes, lab: Lab) -> None:
    netns_name = lab.hosts[0].netns

    def state() -> list[str]:
        shown = [["rule"], ["-6", "rule"], ["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"]]
        return [support.run(["ip", "-n", netns_name, *words]).stdout for words in (*shown, ["nexthop"])]

    before = state()
    first, _ = in_lab(nodes, lab)
    first.send()
    nodes.serve_until(lambda: first.counted(RECEIVED) == 4, "all paths answer")
    assert state() == before


def test_a_running_mesh_publishes_both_windows_and_raw_samples_on_demand(nodes: Nodes, lab: Lab) -> None:
    quick = Probe(interval_ms=20, timeout_ms=500)
    first, _ = in_lab(nodes, lab, probe=quick, windows=Windows(short_ms=100, long_ms=400))
    sub = first.bus.subscribe(frozenset({"path_delay"}))
    got: list[AnySignal] = []

    def full(length_ms: float) -> set[str]:
        wanted = [s for s in got if isinstance(s, PathDelay) and s.window_ns == length_ms * 1e6]
        return {str(s.path) for s in wanted if s.forward.samples and s.reverse.samples}

    def enough() -> bool:
        got.extend(sub.read())
        return len(full(100)) == len(full(400)) == 4

    nodes.run_until(enough, "every path has told figures of both windows")
    assert not any(isinstance(signal, ProbeSamples) for signal in got)
    assert {signal.clock for signal in got} == {"synchronised"}
    for signal in got:
        assert signal.at_ns <= time.monotonic_ns()
        assert signal.forward.owd_min_ns is None or signal.forward.owd_min_ns > 0
    raw = first.bus.subscribe(frozenset({"probe_samples"}))
    samples: list[ProbeSamples] = []

    def told() -> bool:
        samples.extend(raw.read())
        return len({str(signal.path) for signal in samples}) == 4 and len(samples) >= 8

    nodes.run_until(told, "raw samples of every path have come twice")
    for path in {str(signal.path) for signal in samples}:
        numbers = [seq for signal in samples if str(signal.path) == path for seq in signal.seq]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "each probe once, in order"
    both = [pair for signal in samples for pair in zip(signal.forward_ns, signal.reverse_ns, strict=True)]
    assert sum(None not in pair for pair in both) > len(both) / 2


def test_a_change_of_routes_is_noticed_without_waiting_for_the_next_look(nodes: Nodes, lab: Lab) -> None:
    quick = Probe(interval_ms=20, timeout_ms=500)
    (first, _) = in_lab(nodes, lab, probe=quick)
    with selectors.DefaultSelector() as selector:
        first.mesh.register(selector)
        nodes.run_until(lambda: first.counted(RECEIVED) > 0, "it runs")
        support.run(["ip", "-n", lab.hosts[0].netns, "route", "delete", "10.9.0.2/32"])

        def noticed() -> bool:
            for key, mask in selector.select(0):
                key.data(mask)
            return "10.9.0.2" in first.mesh.paths.unreachable

        nodes.run_until(noticed, "the peer is unreachable")


def test_the_missing_value_never_leaves_the_estimators(nodes: Nodes, lab: Lab) -> None:
    first, _ = in_lab(nodes, lab)
    first.send()
    signals = first.told()
    assert len(signals) == 4
    for signal in signals:
        for direction in (signal.forward, signal.reverse):
            assert MISSING not in [getattr(direction, name) for name in direction.__struct_fields__]


def test_every_probe_of_a_coded_pair_is_measured_both_ways(nodes: Nodes, veth_pair: tuple[str, str]) -> None:
    """Pairs and single probes in turn: of all, both directions become known."""
    ours, theirs = ADDRESSES[4]
    sender = nodes(veth_pair[0], config("a", "b", theirs, "free_running"))
    nodes(veth_pair[1], config("b", "a", ours, "free_running"))
    began_ns, rounds = time.monotonic_ns(), 20
    for turn in range(rounds):
        sender.send()
        sent = sum(PROBES if each % 2 == 0 else 1 for each in range(turn + 1))
        nodes.serve_until(lambda wanted=sent: sender.counted(RECEIVED) == wanted, "the probes are answered")
    pairs = sender.mesh.sender.pairs(0, began_ns)
    assert pairs.forward.shape == (rounds // 2, 2)
    for at, difference in ((pairs.forward_at, pairs.forward), (pairs.reverse_at, pairs.reverse)):
        assert (difference != MISSING).all()
        assert (difference > 0).all(), "both ends read one clock here"
        assert (at[:, 1] > at[:, 0]).all(), "the second left, and came back, after the first"
        assert (np.diff(at[:, 0]) > 0).all(), "oldest first"
    assert sender.mesh.sender.pairs(0, time.monotonic_ns()).forward.shape == (0, 2), "none since now"


@pytest.mark.parametrize("spacing_us", [0.0, 200.0])
def test_the_probes_of_a_pair_leave_as_far_apart_as_they_are_set(
    nodes: Nodes, veth_pair: tuple[str, str], spacing_us: float
) -> None:
    ours, theirs = ADDRESSES[4]
    every_time = Clocks(spacing_us=spacing_us, pair_interval_ms=PATIENT.interval_ms)
    sender = nodes(veth_pair[0], config("a", "b", theirs, "free_running", clocks=every_time))
    nodes(veth_pair[1], config("b", "a", ours, "free_running"))
    began_ns = time.monotonic_ns()
    for turn in range(9):
        sender.send()
        nodes.serve_until(lambda wanted=PROBES * (turn + 1): sender.counted(RECEIVED) == wanted, "they are answered")
    apart_us = np.diff(sender.mesh.sender.pairs(0, began_ns).forward_at, axis=1) / 1000
    assert apart_us.shape == (9, 1)
    assert np.median(apart_us) >= 0.8 * spacing_us, "where the first leaves late, the second does not wait for it"
    if not spacing_us:
        assert np.median(apart_us) < 200, "one right behind the other"
