"""Proof: the units work under a real systemd, from `systemctl start` to `systemctl stop`.

    python tests/prove/systemd_units.py [--deb FILE] [--keep]

Builds the package unless one is named, installs it in a fresh Debian 12, boots that with its own systemd as process 1
(_booted.py), and lays three cables in there to two peers. Then, with `systemctl` alone: the agent becomes active and
has the rights that its unit says and no others, reloads without losing a sample, is started anew by the watchdog after
it was stopped short; the controller runs dry, then drains a rail, which stays drained when it is killed and when it is
restarted, and is put back when it is stopped; the same with a rail that is silent, under a stream of datagrams of which
only the fault may lose any; the metrics are served; the journal has levels and fields; and after
`systemctl stop` nothing is left. Prints
JSON Lines, one per part; exits with 1 if one fails. Run as root, from the checkout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import _booted
from _booted import Machine, booted, until
from _clean_root import Proof, apt, bootstrap, install, main, tail
from _host_of_two import CONFIGURATION, RELOADED, inventory, measured, network, said_of, silence, steering, weights
from _taps import Tap
from _traffic import Starter, Traffic

AGENT, STEER, METRICS = UNITS = ("swerve-agent.service", "swerve-steer.service", "swerve-metrics.service")
CAPABILITIES = {"cap_net_admin": 12, "cap_net_raw": 13, "cap_perfmon": 38, "cap_bpf": 39}
MOST_EXPOSED = 2.5
LINK = "http://127.0.0.1:9762/metrics"
FETCH = f"import urllib.request; print(urllib.request.urlopen({LINK!r}, timeout=10).read().decode())"


def systemd(root: Path) -> dict[str, object]:
    """What a host has that the smallest root lacks; and our configuration."""
    done = apt(root, "install", "systemd", "systemd-sysv", "dbus")
    for name, text in CONFIGURATION.items():
        (root / f"etc/swerve/{name}.yaml").write_text(text)
    return {"ok": done.returncode == 0, "said": tail(done) if done.returncode else ""}


# What is asked of the booted machine, in this order. Each returns what it found; `ok` says whether that is right.


def starts(machine: Machine) -> dict[str, object]:
    """Enabled and started: active once it said READY, with the rights that its unit says and no others."""
    began = time.monotonic()
    machine.run("systemctl", "enable", "--now", AGENT)
    seconds = time.monotonic() - began
    names = (
        "ActiveState",
        "SubState",
        "StatusText",
        "User",
        "AmbientCapabilities",
        "WatchdogUSec",
        "WatchdogTimestamp",
    )
    shown = machine.show(AGENT, *names, "UnitFileState", "NRestarts")
    main, processes = machine.main_process(AGENT), machine.processes(AGENT)
    statuses = {each: status_of(each) for each in processes}
    status = statuses[main]
    sets = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    helpers = {status_of(each)["Name"]: statuses[each] for each in processes if each != main}
    wanted = sum(1 << bit for bit in CAPABILITIES.values())
    user = machine.run("id", "-u", "swerve")
    return {
        "ok": shown["ActiveState"] == "active"
        and shown["UnitFileState"] == "enabled"
        and shown["WatchdogTimestamp"] != ""
        and set(helpers) == {"swerve-pacer"}
        and all(set(each["Uid"].split()) == {user} for each in statuses.values())
        and not any(int(each[name], 16) & ~wanted for each in helpers.values() for name in sets)
        and all((each["NoNewPrivs"], each["Seccomp"]) == ("1", "2") for each in statuses.values())
        and {int(each, 16) for each in sets.values()} == {wanted},
        "ready_s": round(seconds, 2),
        **shown,
        **sets,
        "uid": status["Uid"].split()[1],
        "helpers": {name: each["CapEff"] for name, each in helpers.items()},
    }


def status_of(process: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: words.strip() for name, _, words in (line.partition(":") for line in lines)}


def answers(machine: Machine) -> dict[str, object]:
    """Root's commands, beside the service: every path is measured, by one clock, and no hook failed."""
    found = until(lambda: measured(machine, {"near", "far"}), 60, "every path is measured")
    own = machine.json("swerve", "self", "--json")
    lost = {name: count for name, count in own["drops"].items() if count}
    return {"ok": not own["failed"] and len(found) == 3, "paths": found, "failed": own["failed"], "counted": lost}


def reloads(machine: Machine) -> dict[str, object]:
    """Another peer by `systemctl reload`: the same process, and of the probes of the others none is lost."""
    before = machine.show(AGENT, "MainPID", "NRestarts")
    with machine.collecting("swerve", "watch", "--type", "probe_samples") as told:
        time.sleep(2)  # probes before it
        (machine.root / "etc/swerve/agent.yaml").write_text(RELOADED)
        machine.run("systemctl", "reload", AGENT)
        said = until(lambda: said_of(machine, AGENT, "configuration read again"), 10, "the agent says so")
        until(lambda: measured(machine, {"near", "far", "third"}), 30, "the new peer is measured")
    after = machine.show(AGENT, "MainPID", "NRestarts")
    sequences: dict[tuple[str, str], list[int]] = {}
    unanswered = 0
    for each in told:
        if each["path"]["destination"] != "third":
            sequences.setdefault((each["path"]["destination"], each["path"]["interface"]), []).extend(each["seq"])
            unanswered += each["forward_ns"].count(None)
    gaps = sum(two != one + 1 for seqs in sequences.values() for one, two in itertools.pairwise(seqs))
    probes = sum(map(len, sequences.values()))
    return {
        "ok": before == after
        and not gaps
        and not unanswered
        and probes > 300
        and "changed=peers" in said[-1]["MESSAGE"],
        "said": said[-1]["MESSAGE"],
        "probes": probes,
        "missing": gaps,
        "unanswered": unanswered,
        **after,
    }


def journal(machine: Machine) -> dict[str, object]:
    """Events in the journal: the level apart from the words, the fields in them as key=value."""
    ready = said_of(machine, AGENT, "agent ready")[0]
    without = said_of(machine, AGENT, "agent runs without")
    fields = dict(word.split("=", 1) for word in shlex.split(ready["MESSAGE"]) if "=" in word)
    # That a window waits: `reloads` made it so.
    (warning,) = machine.lines("journalctl", f"--unit={AGENT}", "--priority=warning", "--output=json", "--no-pager")
    return {
        "ok": fields.keys() == {"paths", "interfaces", "after_s"}
        and ready["PRIORITY"] == "6"
        and {each["PRIORITY"] for each in without} == {"5"}
        and "windows.short" in warning["MESSAGE"]
        and warning["PRIORITY"] == "4"
        and not any(each["MESSAGE"].startswith("<") for each in (ready, *without, warning)),
        "ready": fields,
        "without": [re.findall(r"missing=(\w+)", each["MESSAGE"])[0] for each in without],
        "warning": warning["MESSAGE"],
    }


def dry_run(machine: Machine) -> dict[str, object]:
    """The controller as it comes: it changes nothing, and has no guardian; it ends when it is told to."""
    before = weights(machine)
    machine.run("systemctl", "start", STEER)
    status = until(lambda: steering(machine), 15, "the controller answers")
    machine.run("systemctl", "stop", STEER)
    shown = machine.show(STEER, "Result", "ActiveState")
    ok = not status["apply"] and status["guardian_pid"] is None and shown["Result"] == "success"
    return {"ok": ok and weights(machine) == before and not machine.processes(STEER), **shown}


def applies(machine: Machine) -> dict[str, object]:
    """With --apply: it drains a rail, which stays so when it is killed and when it is restarted, until it stops."""
    (machine.root / "etc/swerve/steer.env").write_text("SWERVE_STEER_OPTIONS=--apply\n")
    before = weights(machine)
    machine.run("systemctl", "start", STEER)
    guardians = [until(lambda: steering(machine), 15, "the controller answers")["guardian_pid"]]
    machine.run("swerve", "steer", "drain", "rail1")
    drained = until(lambda: (now := weights(machine)) != before and now, 10, "the weights of a drained rail")
    seconds, others = [], []
    for words in (("kill", "--signal=KILL", "--kill-whom=main"), ("restart",)):
        began, pid = time.monotonic(), machine.show(STEER, "MainPID")["MainPID"]
        machine.run("systemctl", *words, STEER)

        def another(pid: str = pid) -> object:
            others.extend(now for now in (weights(machine),) if now != drained)
            found = steering(machine)
            return found if found and found["pid"] != int(pid) and found["guarded"] else None

        found = until(another, 30, "the next controller answers")
        guardians.append(found["guardian_pid"])
        seconds.append(round(time.monotonic() - began, 1))
    took_over = said_of(machine, STEER, "took over from the controller before")
    restarts = machine.show(STEER, "NRestarts")
    machine.run("systemctl", "stop", STEER)
    back = until(lambda: weights(machine) == before, 3, "the weights are back after a stop")
    shown = machine.show(STEER, "Result", "ActiveState") | restarts
    return {
        "ok": drained.get("rail1", 0) == 0
        and len(set(guardians)) == 3
        and not others
        and len(took_over) == 2
        and bool(back)
        and not machine.processes(STEER)
        and shown["Result"] == "success",
        "weights": [before, drained, weights(machine)],
        "otherwise": others,
        "taken_over_s": seconds,
        **shown,
    }


def in_trouble(machine: Machine) -> dict[str, object]:
    """A rail is silent and left: a restart and a kill lose nothing, what ends for good is undone at once."""
    before = weights(machine)

    def left(wanted: dict[str, int]) -> bool:
        status = steering(machine)
        return bool(status) and status["guarded"] and weights(machine) == wanted

    with contextlib.ExitStack() as stack:
        into, out_of = (
            stack.enter_context(contextlib.closing(machine.inside("r1", lambda name=name: Tap(name))))
            for name in ("rail1", "near")
        )
        traffic = Traffic(starter(machine, ""), starter(machine, "near"), "10.78.0.2")
        machine.run("systemctl", "start", STEER)
        until(lambda: steering(machine), 30, "the controller answers")
        machine.run("swerve", "steer", "undrain", "rail1")  # an order outlives its controller
        until(lambda: left(before), 30, "the controller steers")
        silence(machine, "add")
        stack.callback(silence, machine, "delete")
        until(lambda: left({"rail2": 1}), 30, "the silent rail is left")
        entered, took, lasted = into.passed(), {}, {}
        for name, words in (("restart", ("restart",)), ("kill", ("kill", "--signal=KILL", "--kill-whom=main"))):
            began, pid = time.monotonic(), machine.show(STEER, "MainPID")["MainPID"]
            machine.run("systemctl", *words, STEER)

            def another(pid: str = pid) -> bool:
                found = steering(machine)
                return bool(found) and found["pid"] != int(pid) and found["guarded"]

            until(another, 30, "the next controller answers")
            took[name] = round(time.monotonic() - began, 1)
            lasted[name] = weights(machine)
        entered = into.passed() - entered
        began = time.monotonic()
        machine.run("systemctl", "stop", STEER)
        stopped = round(time.monotonic() - began, 1)
        undone = weights(machine)
        kept = [line for line in machine.run("ip", "rule").splitlines() if "proto 201" in line]
        counts = traffic.stop()
        dropped = into.passed() - out_of.passed()
    lost = counts["datagrams"] - counts["datagrams_received"]
    return {
        "ok": entered == 0
        and lost == dropped > 0
        and set(map(str, lasted.values())) == {"{'rail2': 1}"}
        and undone == before
        and not kept
        and not machine.processes(STEER)
        and not counts["stream_broken"]
        and not counts["kernel_no_route"],
        "taken_over_s": took,
        "into_the_left_rail": entered,
        "datagrams": counts["datagrams"],
        "lost": lost,
        "lost_by_the_fault": dropped,
        "stopped_in_s": stopped,
        "undone": undone,
        "rules": kept,
    }


def starter(machine: Machine, netns: str) -> Starter:
    """Starts a program of the checkout in the root's network, or in that of a namespace there."""
    return lambda words: subprocess.Popen(machine.command(words, netns), stdout=subprocess.PIPE, text=True)


def metrics(machine: Machine) -> dict[str, object]:
    """Served to who asks on this host, by a process without any capability, and with a user of its own."""
    machine.run("systemctl", "start", METRICS)
    found = until(lambda: re.findall(r"^swerve_path_\w+\{.*", page(machine), re.MULTILINE), 20, "figures of paths")
    process = machine.main_process(METRICS)
    (effective,) = re.findall(r"CapEff:\t(\w+)", Path(f"/proc/{process}/status").read_text())
    own_user = os.stat(f"/proc/{process}").st_uid != os.stat(f"/proc/{machine.main_process(AGENT)}").st_uid
    return {
        "ok": int(effective, 16) == 0 and own_user,
        "own_user": own_user,
        "samples": len(found),
        "one": found[0],
        "CapEff": effective,
    }


def page(machine: Machine) -> str:
    return machine.run("python3", "-c", FETCH, check=False)


def exposure(machine: Machine) -> dict[str, object]:
    """What `systemd-analyze security` says of the units as they are loaded."""
    found = {}
    for unit in UNITS:
        said = machine.run("systemd-analyze", "security", "--no-pager", unit)
        (level,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
        found[unit] = float(level)
    return {"ok": max(found.values()) <= MOST_EXPOSED, **found}


def watchdog(machine: Machine) -> dict[str, object]:
    """An agent that is stopped short falls silent, is killed, and another one measures."""
    before = machine.show(AGENT, "MainPID")
    former = machine.processes(AGENT)
    began = time.monotonic()
    os.kill(machine.main_process(AGENT), signal.SIGSTOP)
    until(lambda: machine.show(AGENT, "NRestarts")["NRestarts"] == "1", 60, "the watchdog has it started anew")
    until(lambda: machine.show(AGENT, "ActiveState")["ActiveState"] == "active", 30, "it is active")
    seconds = time.monotonic() - began
    after = machine.show(AGENT, "MainPID", "NRestarts", "ActiveState")
    until(lambda: measured(machine, {"near", "far", "third"}), 30, "every path is measured")
    said = machine.run("journalctl", "--unit", AGENT, "--output=cat", "--no-pager")
    left = set(former) & set(machine.processes(AGENT))
    ok = after["MainPID"] != before["MainPID"] and "Watchdog timeout" in said and not left
    return {"ok": ok, "active_again_s": round(seconds, 1), **after}


def leaves_nothing(machine: Machine, before: set[str]) -> dict[str, object]:
    """After `systemctl stop`: no process, rule, route, filter or socket, and none of the BPF objects that were held."""
    machine.run("systemctl", "start", *UNITS)
    until(lambda: steering(machine), 30, "all three are at work")
    held = {each for unit in UNITS for each in machine.hooks(unit)}
    meanwhile = inventory(machine) - before
    began = time.monotonic()
    machine.run("systemctl", "stop", *UNITS)
    seconds = time.monotonic() - began
    left = inventory(machine) - before
    running = [unit for unit in UNITS if machine.processes(unit)]
    states = {unit: machine.show(unit, "ActiveState", "Result") for unit in UNITS}
    until(lambda: not held & _booted.loaded(), 10, f"the kernel has let go of {sorted(held & _booted.loaded())}")
    kinds = [kind for kind, _ in held]
    return {
        "ok": not left
        and not running
        and len(held) > 0
        and len(meanwhile) > 0
        and all(each == {"ActiveState": "inactive", "Result": "success"} for each in states.values()),
        "left": sorted(left),
        "running": running,
        "were_there": len(meanwhile),
        "held": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "stopped_in_s": round(seconds, 1),
    }


PARTS = (starts, answers, reloads, journal, dry_run, applies, in_trouble, metrics, exposure, watchdog)


def inside(proof: Proof, root: Path, without: Sequence[str]) -> int:
    """All parts, in the namespaces; the first that fails to build or boot the root ends it."""
    for part in (bootstrap, install, systemd):
        if not proof.part(part, root):
            return proof.end()
    with booted(root) as machine:
        if not proof.part(network, machine):
            return proof.end()
        before = inventory(machine)
        for each in PARTS:
            if each.__name__ not in without:
                proof.part(each, machine)
        proof.part(leaves_nothing, machine, before)
    return proof.end()


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__ or "", inside, _booted.COMMANDS, _booted.remove_group))
