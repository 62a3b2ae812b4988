"""Proof: whoever of controller and guardian is killed, whenever, routes end as they began or as the policy says.

    python tests/prove/kill_steering.py [--kills 100] [--seed N] [--pins-every 12]

Two hosts of a lab; congestion, made up by a stand-in for the agent, comes and goes on either rail, so that acts are
under way all the time. SIGKILL takes the controller, the guardian, or both, at random instants, half of them within
milliseconds after an act was noted. Then a successor starts, at once or late, or `swerve steer off` does. UDP and TCP
run all the while, and `ip monitor` writes down each route and each group that is changed: nobody else's may be. Now
and then the controller has rules that pin flows, and so a kernel program. Prints JSON Lines: one per kill, then the
verdict; exits with 1 unless all of it holds. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

import bpf_objects  # noqa: E402
import steering_kit as kit  # noqa: E402
import support  # noqa: E402
from _traffic import Traffic  # noqa: E402

from pytools.kernel.leftovers import is_our_rule  # noqa: E402
from pytools.kernel.netlink.routing import Netlink  # noqa: E402
from pytools.lab import Lab  # noqa: E402
from steering.acting import journal  # noqa: E402
from steering.plan import Weights, weights_of  # noqa: E402

LONGEST_ACT_S: Final = 0.006  # from its intent to its last entry
LONGEST_IDLE_S: Final = 0.8
LATEST_S: Final = 20.0
TAKEOVER_S: Final = 6.0  # a successor that takes longer is killed
POLICY: Final = f"""\
version: 1
manage: {{destinations: [10.9.0.0/16]}}
safety: {{lease: {kit.LEASE_S:g}s, takeover: {TAKEOVER_S:g}s, stale_after: 500ms, baseline_after: 2s}}
rules:
  - name: leave-congested-rail
    when: {{signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}}
    then: {{shift: {{share: 0}}}}
    return: {{dwell: 60ms, max_dwell: 60ms, retry_after: 100ms, steps: [0.1, 0.5, 1.0], step: 40ms}}
"""
PINS: Final = """\
  - name: pins
    when: {signal: queueing_delay, quantile: p50, above: 5ms, clear_below: 1ms}
    then: {pin: {flows: {min_rate: 100mbit, at_most: 8}}}
"""
STEERED: Final[Weights] = ((kit.SECOND_HOP, 1),)


class Congestion:
    """Comes and goes on either rail of a fake agent, until told to stay as it is."""

    def __init__(self, agent: kit.FakeAgent, seed: int) -> None:
        self._agent, self._chance = agent, random.Random(seed)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._chance.uniform(0.05, 0.4)):
            with self._lock:
                for rail in (1, 2):
                    self._agent.queueing_ns[rail] = self._chance.choice((0, 0, 20 * kit.MS))

    @contextlib.contextmanager
    def held(self, first_rail_ns: int) -> Iterator[None]:
        """Keep it on the first rail, or off."""
        with self._lock:
            self._agent.queueing_ns.update({1: first_rail_ns, 2: 0})
            yield

    def close(self) -> None:
        self._end.set()
        self._thread.join()


class Proof:
    """A host that is steered, and whoever is killed on it."""

    def __init__(self, netns: str, policies: dict[bool, Path], seed: int, pins_every: int) -> None:
        self._chance = random.Random(seed)
        self._host, self._policies, self._pins_every = kit.Host(netns), policies, pins_every
        self._folder = journal.directory(netns)
        self._file = self._folder / journal.FILE
        self._started = 0
        self._guardian: int | None = None
        self.controller: kit.Controller | None = None
        self.programs: set[int] = set()  # kernel programs that a controller of ours held
        self.first_routes = self.routes()
        self._stack = contextlib.ExitStack()
        self._netlink = self._stack.enter_context(Netlink(netns))
        self.agent = self._stack.enter_context(contextlib.closing(kit.FakeAgent(netns)))
        self.congestion = self._stack.enter_context(contextlib.closing(Congestion(self.agent, seed)))

    def close(self) -> None:
        self._stack.close()

    # ---- what there is ----

    def weights(self) -> Weights:
        return weights_of(self._host.weights())

    def routes(self) -> dict[str, Any]:
        """All routes, nexthops and rules, by `ip`."""
        found = {}
        for family in ("-4", "-6"):
            for what in (["nexthop"], ["route", "show", "table", "all"], ["rule"]):
                rows = json.loads(self._host.ip("-j", family, *what) or "[]")
                found[f"{family} {what[0]}"] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        return found

    def in_force(self) -> int:
        """How many rules of ours there are."""
        return sum(is_our_rule(rule) for rule in self._netlink.rules(4))

    # ---- living and dying ----

    def start(self) -> None:
        """A controller that steers, with its guardian."""
        self._started += 1
        self.agent.states.clear()
        pins = self._started % self._pins_every == 0
        self.controller = kit.Controller(self._host, self._policies[pins], "--apply")
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_controller)
            support.wait_until(lambda: len(self.agent.states) == 2, LATEST_S, "the controller speaks of both paths")
            self._guardian = support.wait_until(self.controller.guardian, LATEST_S, "it has a guardian")
            undo.pop_all()
        if pins:
            self.programs |= _programs_of(self.controller.process.pid)

    def _end_controller(self) -> None:
        assert self.controller is not None
        if self.controller.process.poll() is None:
            self.controller.kill()
        _, errors = self.controller.process.communicate(timeout=LATEST_S)
        self.controller.errors = errors

    def stop(self) -> None:
        """End in order."""
        if self.controller is not None:
            assert self.controller.end(signal.SIGTERM) == 0, self.controller.errors
            self.controller = None

    def round(self) -> dict[str, Any]:
        """One kill, and all that follows from it."""
        if self.controller is None:
            self.start()
        assert self.controller is not None
        victim = self._chance.choices(("controller", "guardian", "both"), (50, 30, 20))[0]
        self._await_the_instant()
        pid = self.controller.process.pid
        guardians = [self.controller.guardian()] if victim != "controller" else []
        gap_s = self._chance.choice((0.0, self._chance.uniform(0, 0.05)))
        order = [pid] if victim != "guardian" else []
        for each in guardians:
            order.insert(self._chance.randrange(len(order) + 1), each or pid)
        for number, each in enumerate(order):
            time.sleep(gap_s if number else 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed = time.monotonic()
        told = {"victim": victim, "in_force": self.in_force()}
        if victim == "guardian":
            told |= self._after_guardian(guardians[0])
        else:
            told |= self._after_controller(killed, victim)
        return told

    def _await_the_instant(self) -> None:
        """Any moment, or within an act."""
        if self._chance.random() < 0.5:
            time.sleep(self._chance.uniform(0, LONGEST_IDLE_S))
            return
        size, deadline = self._file.stat().st_size, time.monotonic() + 3
        while self._file.stat().st_size == size and time.monotonic() < deadline:
            time.sleep(0.0002)
        wait = time.perf_counter() + self._chance.uniform(0, LONGEST_ACT_S)
        while time.perf_counter() < wait:
            pass

    def _after_guardian(self, dead: int | None) -> dict[str, Any]:
        """The controller goes on, with another guardian, and its weights are in force."""
        controller = self.controller
        assert controller is not None
        support.wait_until(lambda: controller.guardian() not in (dead, None), LATEST_S, "there is another guardian")
        assert controller.process.poll() is None, "the controller outlives its guardian"
        return {"ended": "as the policy says"}

    def _after_controller(self, killed: float, victim: str) -> dict[str, Any]:
        controller, self.controller = self.controller, None
        assert controller is not None
        if victim == "controller" and self._chance.random() < 0.5:
            self.start()
            _, errors = controller.process.communicate(timeout=LATEST_S)  # its guardian has gone
            taken_over = "a successor has taken over" in errors
            return {"ended": "as the policy says", "by": "successor", "taken_over": taken_over}
        if victim == "controller":
            support.wait_until(lambda: not self.in_force(), LATEST_S, "our rule is gone", every_s=0.0005)
        restored_ms = (time.monotonic() - killed) * 1e3
        controller.process.communicate(timeout=LATEST_S)
        support.wait_until(controller.lock_is_free, LATEST_S, "the guardian has gone", every_s=0.005)
        left = self.in_force()
        if victim == "controller" or not left:
            assert not left and self.weights() == kit.ORIGINAL
        if victim == "controller":
            self._as_it_began()
            return {"ended": "as it began", "restored_ms": round(restored_ms, 1)}
        if self._chance.random() < 0.5:
            support.run([*support.SWERVE, "steer", "off", "-n", self._host.netns])
            self._as_it_began()
            return {"ended": "as it began", "by": "off", "left": left}
        self.start()
        return {"ended": "as the policy says", "by": "successor", "left": left}

    def _as_it_began(self) -> None:
        now = self.routes()
        assert now == self.first_routes, f"routes differ: {_difference(self.first_routes, now)}"

    def follows_the_policy(self) -> None:
        """The weights are those that steady congestion, then none, asks for."""
        if self.controller is None:
            self.start()
        for queueing_ns, wanted in ((20 * kit.MS, STEERED), (0, kit.ORIGINAL)):
            with self.congestion.held(queueing_ns):
                support.wait_until(lambda w=wanted: self.weights() == w, LATEST_S, f"the weights are {wanted}")
        self.programs |= _programs_of(self.controller.process.pid) if self.controller else set()


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    rows = [f"-{row}" for key in before for row in set(before[key]) - set(after[key])]
    return "\n".join(rows + [f"+{row}" for key in after for row in set(after[key]) - set(before[key])])


def _programs_of(pid: int) -> set[int]:
    """The numbers of the kernel programs that a process holds, by descriptor or by link."""
    found = set()
    for place in Path(f"/proc/{pid}/fdinfo").glob("*"):
        with contextlib.suppress(OSError):
            found |= {int(number) for number in re.findall(r"^prog_id:\s*(\d+)$", place.read_text(), re.MULTILINE)}
    return found


def _programs_left(programs: set[int]) -> list[int]:
    """Those of them that are still there after a while: the kernel frees a program a moment after its last user."""
    deadline = time.monotonic() + 5
    while True:
        left = sorted(number for kind, number in bpf_objects.numbered() if kind == "prog" and number in programs)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _processes_of(folder: str) -> list[str]:
    """Living processes that were started for this proof."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(place.name) != os.getpid() and folder.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def watched(file: Path) -> dict[str, Any]:
    """What `ip monitor` wrote down of the group and the route that others have."""
    changed = deleted = missed = 0
    for line in file.read_text().splitlines():
        changed += line.startswith(f"id {kit.GROUP} ")
        deleted += line.startswith(f"Deleted id {kit.GROUP} ") or (
            line.startswith("Deleted 10.9.0.2 ") and f"nhid {kit.GROUP} " in line
        )
        missed += "overrun" in line.lower() or "lost" in line.lower()
    return {"changes_seen": changed, "deleted": deleted, "news_missed": missed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--pins-every", type=int, default=12, help="every Nth controller has a kernel program")
    wanted = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swerve-prove-") as folder:
        os.environ["SWERVE_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["SWERVE_STATE_DIR"] = f"{folder}/state"
        policies = {pins: Path(folder, f"policy{pins}.yaml") for pins in (False, True)}
        for pins, file in policies.items():
            file.write_text(POLICY + PINS * pins)
            file.chmod(0o600)
        done: list[dict[str, Any]] = []
        news = Path(folder, "monitor")
        with Lab.up(f"kills{os.getpid()}", hosts=2, rails=2) as lab, news.open("w") as out:
            first, second = lab.hosts
            command = ["ip", "-rcvbuf", str(8 << 20), "monitor", "nexthop", "route"]
            monitor = lab.start(first, command, stdout=out, stderr=out)
            traffic = Traffic(lab, first, second)
            proof = Proof(first.netns, policies, wanted.seed, wanted.pins_every)
            with contextlib.closing(proof):
                try:
                    for number in range(1, wanted.kills + 1):
                        told = proof.round()
                        done.append(told)
                        print(json.dumps({"proof": "kill_steering", "kill": number, **told}), flush=True)
                        if number % 10 == 0:
                            proof.follows_the_policy()
                finally:
                    if proof.controller is not None and sys.exc_info()[0] is not None:
                        proof.controller.kill()
                proof.stop()
                as_it_began = proof.routes() == proof.first_routes
                rules_left = proof.in_force()
                entries = collections.Counter(
                    entry.kind for entry in journal.read(journal.directory(first.netns) / journal.FILE).entries
                )
            monitor_lived = monitor.poll() is None
            monitor.terminate()
            counts = traffic.stop()
        left = _processes_of(folder)
        seen = watched(news)
    programs_left = _programs_left(proof.programs)
    verdict = {
        "proof": "kill_steering",
        "kills": len(done),
        "of": collections.Counter(each["victim"] for each in done),
        "in_force_at_the_kill": sum(bool(each["in_force"]) for each in done),
        "taken_over": sum(each.get("taken_over", False) for each in done),
        "left_to_a_successor": sum(each.get("left", 0) for each in done),
        "seed": wanted.seed,
        "acts": entries["applied"],
        "restored_max_ms": max((each["restored_ms"] for each in done if "restored_ms" in each), default=None),
        **counts,
        "datagrams_lost": counts["datagrams"] - counts["datagrams_received"],
        **seen,
        "routes_as_they_began": as_it_began,
        "rules_left": rules_left,
        "processes_left": len(left),
        "programs_held": len(proof.programs),
        "programs_left": len(programs_left),
        "seconds": round(time.monotonic() - began, 1),
    }
    verdict["passed"] = (
        monitor_lived
        and as_it_began
        and verdict["acts"] > 0
        and (verdict["taken_over"] > 0 or len(done) < 20)
        and counts["stream_broken"] == ""
        and not any(
            verdict[name]
            for name in (
                *("no_route", "kernel_no_route", "other_errors", "changes_seen", "deleted", "news_missed"),
                *("rules_left", "processes_left", "programs_left"),
            )
        )
    )
    print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
