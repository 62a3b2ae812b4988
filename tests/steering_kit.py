"""What the tests of steering share: measurements to feed in, a fake agent, a host with two rails, a controller process.

Imported as `steering_kit`. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import samples
import support

from pytools import directories
from pytools.ipc.bus import Bus
from pytools.ipc.server import Server
from pytools.kernel.leftovers import is_our_nexthop, is_our_rule
from pytools.kernel.netlink.routing import Netlink, NexthopGroup
from pytools.lab import Lab
from pytools.signals import Act, Delay, Path, PathDelay, PathState
from steering.acting import journal
from steering.acting.background import Later
from steering.commands.status import facts_of
from steering.deciding.evidence import Facts
from steering.demo.observe import Observer
from steering.plan import Group, Member, Weights, nexthop_group, overlay_target, weights_of

MS = 1_000_000
SECOND = 1_000 * MS
GROUP, FIRST, SECOND_HOP = 102, 11, 12
TARGET = nexthop_group(GROUP)  # in tests without a kernel, where any name will do
ROUTES = overlay_target("main", "10.9.0.2/32")  # in those with one
ORIGINAL: Weights = ((FIRST, 1), (SECOND_HOP, 1))
EVEN = dict(ORIGINAL)
STEERED = {SECOND_HOP: 1}  # rail 1 is out
DIED = "the controller died"  # why a guardian undid at once, without waiting for the lease

LEASE_S = 2 * support.slow_factor()  # a guardian that is emulated takes its time to answer
STALE_MS = 500 * support.slow_factor()  # and so do those who measure

POLICY = (
    """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: LEASE, takeover: 0s, max_drained_share: 0.5, stale_after: STALE, baseline_after: BASELINE}
rules:
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 1s, retry_after: 60s, steps: [0.1, 0.5, 1.0], step: 200ms}
""".replace("LEASE", f"{LEASE_S:g}s")
    .replace("STALE", f"{STALE_MS:g}ms")
    .replace("BASELINE", f"{4 * STALE_MS / 1000:g}s")
)


def policy_file(folder: File, text: str = POLICY) -> File:
    """A policy that nobody else can write."""
    file = folder / "policy.yaml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def hold_policy(hold: str) -> str:
    """One that holds with these settings, and does nothing else."""
    return f"""\
version: 1
manage: {{destinations: [10.9.0.0/16]}}
safety: {{lease: {LEASE_S:g}s, takeover: 0s}}
rules:
  - name: short-queues
    then: {{hold: {{{hold}}}}}
"""


def queue_of(netns: str) -> str:
    """The queue discipline of a lab host's first rail."""
    [found] = json.loads(Host(netns).ip("-j", "link", "show", "dev", "rail1"))
    return found["qdisc"]


def path(rail: int = 1, destination: str = "h2") -> Path:
    """Host h1's path over a rail."""
    return Path("h1", destination, f"10.9.0.{destination[1:]}", f"10.{rail}.1.1", f"rail{rail}")


def measured(
    over: Path,
    at_ns: int,
    queueing_ns: int | None = 0,
    bound_ns: int | None = 1_000,
    lost: int = 0,
    received: int = 5,
    window_ns: int = 100 * MS,
) -> PathDelay:
    """A measurement of a path; None for the delay when no probe came back."""
    delay = Delay(
        samples=received if queueing_ns is not None else 0,
        queueing_p50_ns=queueing_ns,
        queueing_p99_ns=queueing_ns,
        queueing_last_ns=queueing_ns,
        queueing_bound_ns=bound_ns,
    )
    moment = {"host": over.source, "at_ns": at_ns, "unix_ns": at_ns, "path": over, "window_ns": window_ns}
    counts = {"sent": received + lost, "received": received, "lost": lost}
    return samples.path_delay(forward=delay, reverse=delay, **moment, **counts)


def facts(signal: PathDelay) -> Facts:
    """All that is known of a path of which only this was measured."""
    return Facts(signal.path, delay=signal)


def group(
    paths: dict[int, list[Path]], weights: dict[int, int] | None = None, current: dict[int, int] | None = None
) -> Group:
    """A group whose members are the rails (nexthop 10 + rail) that these paths run over."""
    weights = weights or {10 + rail: 1 for rail in paths}
    members = tuple(Member(n, f"10.{n - 10}.1.1", f"rail{n - 10}", w) for n, w in sorted(weights.items()))
    return Group(
        TARGET,
        ("10.9.0.2/32",),
        members,
        weights_of(current or weights),
        tuple((10 + rail, each) for rail, several in paths.items() for each in several),
    )


class AtOnce(Later):
    """Writes where it is asked to, so that a test sees what was written."""

    def put(self, write: Callable[[], object]) -> bool:
        """Write it now."""
        self._try(write)
        return True

    def do(self, write: Callable[[], object], timeout_s: float) -> None:
        """Write it now."""
        write()


class FakeAgent:
    """An agent's socket with measurements made up here: a thread publishes every path's every 20 ms.

    Set `queueing_ns[rail]` to congest a rail, `silent` to say nothing. `paths` are those over a rail.
    """

    def __init__(
        self,
        netns: str,
        rails: tuple[int, ...] = (1, 2),
        every_s: float = 0.02,
        paths: Callable[[int], list[Path]] = lambda rail: [path(rail)],
    ) -> None:
        self._paths = paths
        self.queueing_ns: dict[int, int | None] = dict.fromkeys(rails, 0)
        self.lost: dict[int, int] = dict.fromkeys(rails, 0)
        self.silent = False
        self.published = 0
        self.acts: list[Act] = []
        self.states: dict[Path, PathState] = {}
        self.state_log: list[PathState] = []
        self._every_s = every_s
        self._netns = netns
        self._end = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def close(self) -> None:
        """End the thread and the socket."""
        self._end.set()
        self._thread.join(10)

    def acts_of(self, outcome: str) -> list[Act]:
        """The acts heard of with this outcome."""
        return [act for act in list(self.acts) if act.outcome == outcome]

    def _run(self) -> None:
        bus = Bus()
        with selectors.DefaultSelector() as selector, Server(bus, directories.agent_socket(self._netns)) as server:
            server.register(selector)
            heard = bus.subscribe(frozenset({"act", "path_state"}))
            self._started.set()
            due = time.monotonic()
            while not self._end.is_set():
                for key, mask in selector.select(max(0, due - time.monotonic())):
                    key.data(mask)
                for each in heard.read():
                    self._take(each)
                if time.monotonic() < due:
                    continue
                due = time.monotonic() + self._every_s
                for rail, value in self.queueing_ns.items():
                    if not self.silent:
                        received = 0 if value is None else 5
                        now = time.monotonic_ns()
                        for over in self._paths(rail):
                            bus.publish(measured(over, now, value, lost=self.lost[rail], received=received))
                            self.published += 1

    def _take(self, signal_heard: Any) -> None:
        if isinstance(signal_heard, Act):
            self.acts.append(signal_heard)
        elif isinstance(signal_heard, PathState):
            self.states[signal_heard.path] = signal_heard
            self.state_log.append(signal_heard)


class Host(support.Namespace):
    """A namespace with two rails and a nexthop group to a peer."""

    def groups(self) -> set[int]:
        """The numbers of all groups."""
        return {each["id"] for each in json.loads(self.ip("-j", "nexthop", "list")) if "group" in each}

    def weights(self) -> dict[int, int]:
        """The weights that decide about packets to the peer, whoever's route has them, by 10 + rail."""
        [route] = json.loads(self.ip("-j", "route", "get", "fibmatch", "10.9.0.2"))
        hops = route.get("nexthops", [route])
        return {10 + int(hop["dev"].removeprefix("rail")): hop.get("weight", 1) for hop in hops}

    def ours(self, *whats: str) -> int:
        """How many rules of ours there are, or other things."""
        return super().ours(*(whats or ("rule",)))


def two_rails(first: str, second: str, kind: str = "mpath") -> Host:
    """Give a namespace two rails to another and the group that spreads over them."""
    for end, address in ((first, 2), (second, 1)):
        joining = [support.joining(second, f"rail{rail}") for rail in (1, 2) if end == first]
        rails = [f"address add 10.{rail}.1.{address}/24 dev rail{rail}" for rail in (1, 2)]
        support.ip(end, *joining, *rails, *(f"link set rail{rail} up" for rail in (1, 2)))
    extra = " type resilient buckets 32 idle_timer 60" if kind == "resilient" else ""
    support.ip(
        first,
        *(f"nexthop add id {10 + rail} via 10.{rail}.1.1 dev rail{rail}" for rail in (1, 2)),
        f"nexthop add id {GROUP} group {FIRST}/{SECOND_HOP}{extra}",
        f"route add 10.9.0.2/32 nhid {GROUP}",
    )
    return Host(first)


class Controller:
    """`swerve steer run` as a process."""

    def __init__(self, host: Host, policy: File, *options: str) -> None:
        self.host = host
        self.folder = directories.state_dir(host.netns)
        self.process = subprocess.Popen(
            [*support.SWERVE, "steer", "run", "-n", host.netns, "--policy", str(policy), "-j", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output, self.errors = "", ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal and wait until it has gone; its exit code."""
        if self.process.poll() is None:
            self.kill(number)
        self.output, self.errors = self.process.communicate(timeout=30 * support.slow_factor())
        return self.process.returncode

    def journal(self) -> list[journal.Entry]:
        """What it wrote."""
        return list(journal.read(self.folder / journal.FILE).entries)

    def lock_is_free(self) -> bool:
        """Whether neither it nor its guardian runs any more."""
        from steering.acting.lock import holder

        return holder(self.folder / journal.LOCK_FILE) is None

    def guardian(self) -> int | None:
        """Its guardian's process number."""
        return next(iter(guardians(self.process.pid)), None)


def guardians(parent: int) -> list[int]:
    """The guardians that a controller started and that live."""
    found = []
    for place in File("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            command = (place / "cmdline").read_bytes()
            if fields[0] != "Z" and int(fields[1]) == parent and b"steering.guarding.guardian" in command:
                found.append(int(place.name))
    return found


def status(host: Any) -> dict[str, Any]:
    """What `swerve steer status -j` says of a host, but for the paths, which it waits for."""
    return facts_of(host.netns, with_paths=False)


@contextlib.contextmanager
def controlled(host: Host, policy: File, *options: str) -> Iterator[Controller]:
    """A controller that is gone at the end, and its guardian with it."""
    controller = Controller(host, policy, *options)
    try:
        yield controller
    finally:
        if controller.process.poll() is None:
            controller.kill()
        if not controller.process.stdout.closed:
            controller.output, controller.errors = controller.process.communicate(timeout=30 * support.slow_factor())
        support.wait_until(controller.lock_is_free, 20, "the guardian has gone")


@dataclass(frozen=True)
class Killed:
    """One controller killed in the middle of an act."""

    delay_ms: float  # from the moment when our group was seen to change
    in_force: bool  # whether our rule was there right after the kill
    restored_ms: float  # from the kill until our rule was gone
    by: str  # who wrote the last entry; empty when there is none
    at_once: bool  # whether its guardian undid as it died, without waiting for the lease


def kill_mid_act(host: Host, agent: FakeAgent, policy: File, delay_s: float) -> Killed:
    """Congest a rail, kill the controller `delay_s` after its act began in the kernel, wait for the guardian."""
    agent.queueing_ns[1] = 0
    with Netlink(host.netns) as netlink, controlled(host, policy, "--apply") as controller:

        def ours() -> list[NexthopGroup]:
            return [group for group in netlink.groups() if is_our_nexthop(group)]

        def rules() -> bool:
            return any(is_our_rule(rule) for rule in netlink.rules(4))

        support.wait_until(
            lambda: controller.guardian() and agent.states.get(path(1)) and agent.states[path(1)].state == "healthy",
            20,
            "the controller is ready",
        )
        mirrored, before = ours(), host.others()  # by now the kernel has made its own routes of the new links, too
        assert len(mirrored) == 1 and not rules()
        agent.queueing_ns[1] = 20 * MS
        deadline = time.monotonic() + 20 * support.slow_factor()
        while ours() == mirrored:  # no pause: an act takes a millisecond or two
            assert time.monotonic() < deadline, "the controller never acted"
        wait = time.perf_counter() + delay_s
        while time.perf_counter() < wait:
            pass
        controller.kill()
        killed = time.monotonic()
        in_force = rules()
        controller.process.wait(10)
        support.wait_until(lambda: not rules(), 10, "our rule is gone", every_s=0.0002)
        restored = time.monotonic() - killed
        support.wait_until(controller.lock_is_free, 20, "the guardian has gone")
        assert not rules() and not ours() and host.weights() == dict(ORIGINAL) and host.others() == before
        entries = controller.journal()
        agent.states.clear()
        controller.end()
        at_once = f"{DIED}: its rules are deleted" in controller.errors
        return Killed(delay_s * 1e3, in_force, restored * 1e3, entries[-1].by if entries else "", at_once)


def steered(host: Host, agent: FakeAgent) -> None:
    """Congest rail 1 and wait until its traffic has left."""
    agent.queueing_ns[1] = 20 * MS
    support.wait_until(lambda: host.weights() == STEERED, 20, "rail 1 is taken out of the group")


def agents(lab: Lab) -> list[subprocess.Popen[str]]:
    """Start an agent on every host of a lab; each is up."""
    started = [lab.start(host, [*support.SWERVE, "agent", "-n", host.netns]) for host in lab.hosts]
    for host in lab.hosts:
        places = directories.agent_socket(host.netns), directories.maps_socket(host.netns)
        support.wait_until(lambda p=places: all(map(File.exists, p)), 30, f"the agent of {host.name} is up")
    return started


@contextlib.contextmanager
def measuring(lab: Lab) -> Iterator[Observer]:
    """Agents on all hosts of a lab, and what they are heard to say."""
    agents(lab)
    with contextlib.closing(Observer(lab.hosts)) as heard:
        yield heard
