"""Proof: whoever of controller and guardian is killed, whenever, routes end as they began or as the policy says.

    python tests/prove/kill_steering.py [--kills 100] [--seed N] [--pins-every 12] [--stolen 0]

Two hosts of a lab with real agents, each steered; either rail falls silent, or slow, and is whole again, so that acts
are under way all the time. On the first host SIGKILL takes the controller, the guardian, or both, at random instants,
half of them within milliseconds after an act was noted. Then a successor starts, at once or late, or `swerve steer off`
does. UDP and TCP run all the while, and `ip monitor` writes down each route and each group that is changed: nobody
else's may be. Now and then the controller has rules that pin flows, and so a kernel program. The last `--stolen` kills
happen under CPU steal (bench/_steal.py). A datagram may be lost in a rail, by its fault, and nowhere else; none goes
into a silent rail that had been left when a controller was killed, until its successor is in charge. Prints JSON Lines:
one per kill, then the verdict; exits with 1 unless all of it holds. Run as root, from the checkout.
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
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

import bpf_objects  # noqa: E402
import steering_kit as kit  # noqa: E402
import support  # noqa: E402
from _faults import SILENT, Faults, RailCounts  # noqa: E402
from _steal import steal  # noqa: E402
from _steered_host import SteeredHost, directory_of_its_own, start_agents, until  # noqa: E402
from _traffic import Traffic  # noqa: E402

from pytools.kernel.leftovers import is_our_rule  # noqa: E402
from pytools.kernel.netlink.routing import Netlink  # noqa: E402
from pytools.lab import Lab  # noqa: E402
from steering.acting import journal  # noqa: E402
from steering.plan import Weights, weights_of  # noqa: E402

LONGEST_ACT_S: Final = 0.006  # from its intent to its last entry
LONGEST_IDLE_S: Final = 0.8
TAKEOVER_S: Final = 6.0  # a successor that takes longer is killed
POLICY: Final = f"""\
version: 1
manage: {{destinations: [10.9.0.0/16]}}
safety: {{lease: {kit.LEASE_S:g}s, takeover: {TAKEOVER_S:g}s, stale_after: 500ms, baseline_after: 2s}}
rules:
  - name: leave-silent-rail
    when: {{signal: silence, missed: 3}}
    then: {{drain: {{}}}}
    return: {{dwell: 60ms, max_dwell: 60ms, retry_after: 100ms, steps: [0.1, 0.5, 1.0], step: 40ms}}
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


class Proof:
    """A host that is steered, and whoever is killed on it."""

    def __init__(self, lab: Lab, policies: dict[bool, Path], log: Path, seed: int, pins_every: int) -> None:
        self._chance = random.Random(seed)
        netns = lab.hosts[0].netns
        self._host, self._policies, self._pins_every = kit.Host(netns), policies, pins_every
        self.steered = SteeredHost(lab, lab.hosts[0], log)
        self._file = self.steered.folder / journal.FILE
        self._started = 0
        self.runs = False  # whether a controller does
        self.programs: set[int] = set()  # kernel programs that a controller of ours held
        self.first_routes = self.routes()
        self._stack = contextlib.ExitStack()
        self._netlink = self._stack.enter_context(Netlink(netns))
        self.rails = self._stack.enter_context(contextlib.closing(RailCounts(lab)))
        self.faults = Faults(lab, seed)
        self.start()
        self.faults.start()
        self._stack.callback(self.faults.close)

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

    def start(self) -> float:
        """A controller that steers, with its guardian; how long until it is in charge, in ms."""
        began = time.monotonic()
        self._started += 1
        pins = self._started % self._pins_every == 0
        self.steered.start(self._policies[pins])
        self.runs = True
        self.steered.wait_in_charge()
        took_ms = (time.monotonic() - began) * 1e3
        until(lambda: len(self.steered.states()) == 2, "the controller speaks of both paths")
        if pins:
            self.programs |= _programs_of(self.pid)
        return took_ms

    @property
    def pid(self) -> int:
        """The controller's process number."""
        assert self.steered.controller is not None
        return self.steered.controller.pid

    def stop(self) -> None:
        """End in order."""
        if self.runs:
            self.runs = False
            code = self.steered.stop()
            assert code in (0, 130), f"exit code {code}: {self.steered.said()}"
            until(self.steered.lock_is_free, "the guardian has gone")

    def round(self) -> dict[str, Any]:
        """One kill, and all that follows from it."""
        if not self.runs:
            self.start()
        victim = self._chance.choices(("controller", "guardian", "both"), (50, 30, 20))[0]
        if victim == "controller" and self._chance.random() < 0.3:  # beside a rail that has been left for its silence
            with self.faults.held({1: SILENT, 2: ""}):
                until(lambda: self.weights() == STEERED, "the silent rail is left")
                return self._kill(victim)
        self._await_the_instant()
        return self._kill(victim)

    def _kill(self, victim: str) -> dict[str, Any]:
        pid = self.pid
        guardians = [self.steered.guardian()] if victim != "controller" else []
        gap_s = self._chance.choice((0.0, self._chance.uniform(0, 0.05)))
        order = [pid] if victim != "guardian" else []
        for each in guardians:
            order.insert(self._chance.randrange(len(order) + 1), each or pid)
        for number, each in enumerate(order):
            time.sleep(gap_s if number else 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        killed = time.monotonic()
        told: dict[str, Any] = {"victim": victim, "in_force": self.in_force()}
        if victim == "guardian":
            return told | self._after_guardian(guardians[0])
        self.runs = False
        if victim == "controller" and self._chance.random() < 0.5:
            return told | self._succeeded(killed)
        return told | self._after_controller(killed, victim)

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
        until(lambda: self.steered.guardian() not in (dead, None), "there is another guardian")
        assert self.steered.controller is not None and self.steered.controller.poll() is None, (
            "it outlives its guardian"
        )
        return {"ended": "as the policy says"}

    def _succeeded(self, killed: float) -> dict[str, Any]:
        """A successor at once; what is in force stays as it is until it is in charge."""
        with self.faults.held():
            out = {10 + rail for rail, fault in self.faults.now.items() if fault == SILENT}
            out -= {hop for hop, _ in self.weights()}
            before = self._came_before(out)
            self.steered.start(self._policies[False])
            self.runs = True
            self.steered.wait_in_charge()
            in_charge_ms = (time.monotonic() - killed) * 1e3
            into_dead = sum(count - before[rail] for rail, count in self.rails.came().items() if 10 + rail in out)
        until(lambda: len(self.steered.states()) == 2, "the controller speaks of both paths")
        return {
            "ended": "as the policy says",
            "by": "successor",
            "taken_over": "a successor has taken over" in self.steered.said(),
            "in_charge_ms": round(in_charge_ms),
            "rails_left": len(out),
            "into_left_rail": into_dead,
        }

    def _came_before(self, out: set[int]) -> dict[int, int]:
        """What has come by each rail, once that which was under way when these were left has come, too."""
        counts = [self.rails.came()]

        def rest() -> bool:
            counts.append(self.rails.came())
            same = all(count == counts[-2][rail] for rail, count in counts[-1].items() if 10 + rail in out)
            return same and len(counts) > 2  # the first two were read at once

        until(rest, "nothing comes any more by a rail that was left", every_s=0.05)
        return counts[-1]

    def _after_controller(self, killed: float, victim: str) -> dict[str, Any]:
        """Nobody at once: the guardian keeps, and undoes; or nobody is left, until somebody comes."""
        if victim == "controller":
            until(lambda: not self.in_force(), "our rule is gone", every_s=0.0005)
        restored_ms = (time.monotonic() - killed) * 1e3
        until(self.steered.lock_is_free, "the guardian has gone", every_s=0.005)
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
        """The weights are those that a rail that stays silent, then none, asks for."""
        if not self.runs:
            self.start()
        for faults, wanted in (({1: SILENT, 2: ""}, STEERED), ({1: "", 2: ""}, kit.ORIGINAL)):
            with self.faults.held(faults):
                until(lambda w=wanted: self.weights() == w, f"the weights are {wanted}")
        self.programs |= _programs_of(self.pid)


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
    parser.add_argument("--stolen", type=int, default=0, help="so many of the kills, the last ones, under CPU steal")
    parser.add_argument("--pins-every", type=int, default=12, help="every Nth controller has a kernel program")
    wanted = parser.parse_args()
    began = time.monotonic()
    with directory_of_its_own() as folder:
        policies = {pins: Path(folder, f"policy{pins}.yaml") for pins in (False, True)}
        for pins, file in policies.items():
            file.write_text(POLICY + PINS * pins)
            file.chmod(0o600)
        done: list[dict[str, Any]] = []
        news = Path(folder, "monitor")
        log = Path(folder, "log")
        with Lab.up(f"kills{os.getpid()}", hosts=2, rails=2) as lab, news.open("w") as out, log.open("a") as agents:
            first, second = lab.hosts
            start_agents(lab, agents)
            other = SteeredHost(lab, second, Path(folder, "other"))
            other.start(policies[False])
            other.wait_in_charge()
            command = ["ip", "-rcvbuf", str(8 << 20), "monitor", "nexthop", "route"]
            monitor = lab.start(first, command, stdout=out, stderr=out)
            proof = Proof(lab, policies, log, wanted.seed, wanted.pins_every)
            traffic = Traffic.between(lab, first, second)
            try:
                with contextlib.closing(proof), contextlib.ExitStack() as stolen:
                    for number in range(1, wanted.kills + 1):
                        if number == wanted.kills - wanted.stolen + 1:
                            stolen.enter_context(steal(wanted.seed))
                        told = proof.round()
                        done.append(told)
                        print(json.dumps({"proof": "kill_steering", "kill": number, **told}), flush=True)
                        if number % 10 == 0:
                            proof.follows_the_policy()
                    proof.stop()
                    proof.faults.close()
                    monitor_lived = monitor.poll() is None
                    monitor.terminate()
                    counts = traffic.stop()
                    came, out_of = sum(proof.rails.came().values()), sum(proof.rails.left().values())
                    as_it_began = proof.routes() == proof.first_routes
                    rules_left = proof.in_force()
            except BaseException:
                sys.stderr.write(log.read_text()[-8000:])
                raise
            file = journal.directory(first.netns) / journal.FILE
            entries = collections.Counter(entry.kind for entry in journal.read(file).entries)
            other.stop()
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
        "faults": proof.faults.made,
        "in_charge_max_ms": max((each["in_charge_ms"] for each in done if "in_charge_ms" in each), default=None),
        "rails_left_at_a_kill": sum(each.get("rails_left", 0) for each in done),
        "into_left_rail": sum(each.get("into_left_rail", 0) for each in done),
        "restored_max_ms": max((each["restored_ms"] for each in done if "restored_ms" in each), default=None),
        **counts,
        "lost_in_rails": came - out_of,
        "lost_elsewhere": counts["datagrams"] - counts["datagrams_received"] - (came - out_of),
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
                *("rules_left", "processes_left", "programs_left", "into_left_rail", "lost_elsewhere"),
            )
        )
    )
    print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
