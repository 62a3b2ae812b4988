"""Agent and controller as the shipped units run them: without root, hardened, watched, and undone when killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import by_unit
import pytest
import service_kit as kit
import support
import under_unit
from service_kit import CONFIG, Service, room
from steering_kit import Host, guardians

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel import low_ports, netns, prepare, privileges, tracefs
from pytools.kernel.bpf import uprobes
from pytools.lab import Lab
from pytools.signals import Owner, TcpFlow
from steering.acting import journal
from steering.acting.lock import holder

__all__ = ["room"]  # a fixture

UNITS = [kit.AGENT, kit.STEER]
_SHARED = {"CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"}
CAPABILITIES = {kit.AGENT: _SHARED | {"CAP_NET_RAW"}, kit.STEER: _SHARED}  # the agent alone sends probes
ALL = [*UNITS, kit.METRICS]


def mask(unit: Path) -> str:
    """The unit's capabilities as /proc shows them."""
    return f"{sum(1 << under_unit.CAPABILITIES[name] for name in CAPABILITIES[unit]):016x}"


def systemd_analyze(*words: str) -> subprocess.CompletedProcess[str]:
    kit.require_systemd()
    return support.run(["systemd-analyze", *words], check=False)


# ---- the units ----


def test_every_unit_is_tried() -> None:
    assert sorted(ALL) == sorted(kit.UNITS.glob("*.service"))


@pytest.mark.parametrize("unit", ALL, ids=lambda unit: unit.stem)
def test_exposure_is_low(unit: Path) -> None:
    done = systemd_analyze("security", "--offline=true", "--no-pager", "--threshold=25", str(unit))
    assert done.returncode == 0, done.stdout.splitlines()[-1]
    worse = unit.read_text().replace("ProtectSystem=strict", "").replace("NoNewPrivileges=yes", "")
    assert "User=swerve" in worse and unit.read_text().count("CapabilityBoundingSet=") == 1


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_unit_has_its_few_capabilities_and_no_root(unit: Path) -> None:
    read = under_unit.Unit(unit)
    assert set(read.words("AmbientCapabilities")) == set(read.words("CapabilityBoundingSet")) == CAPABILITIES[unit]
    assert ("AF_PACKET" in read.words("RestrictAddressFamilies")) == ("CAP_NET_RAW" in CAPABILITIES[unit])
    assert read.words("User") == ["swerve"] and read.words("NoNewPrivileges") == ["yes"]
    privileged = [line for name in ("ExecStartPre", "ExecStart") for line in read.values[name] if line.startswith("+")]
    assert privileged == ["+/usr/bin/swerve agent --prepare"], "one step, and not the service itself"
    users = [line.split()[:2] for line in (kit.UNITS / "swerve.sysusers").read_text().splitlines() if line[0] != "#"]
    assert users == [["u", "swerve"], ["u", "swerve-metrics"]]
    if shutil.which("systemd-sysusers"):
        done = support.run(["systemd-sysusers", "--dry-run", str(kit.UNITS / "swerve.sysusers")], check=False)
        assert "not a valid" not in done.stderr, done.stderr


@pytest.mark.parametrize("unit", ALL, ids=lambda unit: unit.stem)
def test_systemd_understands_the_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"/usr/bin/swerve", "/bin/true", unit.read_text()).replace("man:swerve(1)", "man:true(1)"))
    said = systemd_analyze("verify", "--man=no", str(copy)).stderr
    assert not [line for line in said.splitlines() if unit.name in line], said


def test_a_guardian_outlives_its_controller() -> None:
    """`mixed` and `control-group` would have it killed as soon as the controller is gone."""
    steer = under_unit.Unit(kit.STEER)
    assert steer.words("KillMode") == ["process"] and steer.words("OOMPolicy") == ["continue"]


_TRIES = """
import ctypes, json, mmap, os, socket, sys
def tried(what):
    try:
        what()
        return "done"
    except OSError as error:
        return error.strerror
libc = ctypes.CDLL(None, use_errno=True)
def unshare():
    if libc.unshare(0x40000000):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
run, state = sys.argv[1:]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "uid": os.getuid(), "groups": os.getgroups(), "capabilities": status["CapEff"].strip(),
    "bounding": status["CapBnd"].strip(), "privileges": status["NoNewPrivs"].strip(),
    "root": tried(lambda: os.setuid(0)), "namespace": tried(unshare),
    "packets": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "internet": tried(lambda: socket.socket().close()),
    "code": tried(lambda: mmap.mmap(-1, 4096, prot=7)), "memory": tried(lambda: mmap.mmap(-1, 4096)),
    "etc": tried(lambda: open("/etc/swerve-was-here", "w")), "sys": tried(lambda: open("/proc/sys/kernel/panic", "w")),
    "run": tried(lambda: open(run + "/here", "w")), "state": tried(lambda: open(state + "/here", "w")),
    "tracing": tried(lambda: os.listdir("/sys/kernel/tracing/events")), "port": tried(
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).bind(("", 862))),
    "nice": tried(lambda: os.setpriority(os.PRIO_PROCESS, 0, 1)),
}))
"""


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_what_runs_so_is_confined(unit: Path, room: Path) -> None:
    """The tests below show nothing if the unit's limits are not in force."""
    run, state = kit.own(room / "run"), kit.own(room / "state")
    line = kit.command([sys.executable, "-c", _TRIES, str(run), str(state)], [run, state], unit=unit)
    found = json.loads(support.run(line).stdout)
    allowed = {name for name, word in found.items() if word == "done"}
    probes = {"packets"} if unit == kit.AGENT else set()
    assert allowed == {"internet", "memory", "run", "state"} | probes, found
    assert (found["uid"], found["groups"], found["privileges"]) == (kit.UID, [], "1")
    assert found["capabilities"] == found["bounding"] == mask(unit)
    assert found["packets"] == ("done" if probes else os.strerror(97))
    assert found["etc"] == found["sys"] == os.strerror(30)


# ---- the privileged step ----


def test_the_step_copies_three_formats_and_opens_nothing_else(tmp_path: Path) -> None:
    support.require("tracefs")
    umask = os.umask(0o077)
    try:
        prepare.copy_formats(tmp_path / "t")
        prepare.copy_formats(tmp_path / "t")  # a second service starts
    finally:
        os.umask(umask)
    copied = {str(path.relative_to(tmp_path / "t/events").parent) for path in tmp_path.rglob("format")}
    assert copied == {f"{system}/{event}" for system, event in prepare.EVENTS}
    for system, event in prepare.EVENTS:
        file = tmp_path / "t/events" / system / event / "format"
        assert file.read_text() == tracefs.event_format(system, event) != ""
        assert file.stat().st_mode & 0o777 == 0o444 and file.parent.stat().st_mode & 0o777 == 0o755
    assert Path("/sys/kernel/tracing").stat().st_mode & 0o077 == 0, "tracefs itself stays root's"


def test_the_step_gives_back_what_root_wrote_and_nothing_else(tmp_path: Path) -> None:
    state, outside = tmp_path / "state", tmp_path / "shadow"
    (state / "host").mkdir(parents=True)
    outside.write_text("root's own")
    (state / "host/journal.jsonl").write_text("")
    (state / "host/theirs").write_text("")
    (state / "linked").symlink_to(outside)
    os.link(outside, state / "twice")
    os.chown(state, kit.UID, kit.UID)
    os.chown(state / "host/theirs", 4711, 4711)
    os.mkfifo(state / "pipe")
    done = prepare.give_back(state)
    assert sorted(line.split()[1] for line in done) == [str(state / "host"), str(state / "host/journal.jsonl")]
    assert (state / "host/journal.jsonl").stat().st_uid == kit.UID
    assert (state / "host/theirs").stat().st_uid == 4711 and outside.stat().st_uid == 0
    os.chown(state, 0, 0)
    assert prepare.give_back(state) == [], "no service owns it"


def test_the_step_is_for_root_alone() -> None:
    done = support.run([*support.AS_NOBODY, *support.SWERVE, "agent", "--prepare"], check=False, cwd=Path("/"))
    assert done.returncode == 5 and done.stderr.count("\n") == 1


_BINDS = """
import json, socket
from pytools.kernel import low_ports
def bound(port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(("" if family == socket.AF_INET else "::", port))
        except OSError:
            return False
    return True
before = bound(862)
with low_ports.allowed(862):
    within = [bound(862), bound(862, socket.AF_INET6), bound(863), bound(80)]
with low_ports.allowed(8620):  # nothing to do
    pass
print(json.dumps([before, within, bound(862)]))
"""


def test_one_low_port_may_be_bound_while_it_is_opened(namespace: str, room: Path) -> None:
    run = kit.own(room / "run")
    line = kit.command([sys.executable, "-c", _BINDS], [run], namespace)
    assert json.loads(support.run(line).stdout) == [False, [True, True, False, False], False]
    assert not low_ports.needed(862), "root needs no leave"


# ---- the agent ----


def signals(service: Service, kind: str, count: int = 1) -> list[dict]:
    done = service.swerve("watch", "--type", kind, "-c", str(count))
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def pair(veth_pair: tuple[str, str], room: Path) -> Iterator[tuple[Service, Service]]:
    """Two services that probe each other."""
    support.require("bcc", "tracefs")
    first, second = veth_pair
    turned = CONFIG.replace("one", "x").replace("two", "one").replace("x", "two").replace("77.0.2", "77.0.1")
    for name in ("a", "b"):
        (room / name).mkdir(mode=0o755)
    with kit.service(room / "a", first, CONFIG) as one, kit.service(room / "b", second, turned) as two:
        yield one, two


def test_every_hook_attaches_and_everything_is_measured(pair: tuple[Service, Service], veth_pair) -> None:
    one, _ = pair
    for each in pair:
        each.manager.until("READY=1")
    status = Path(f"/proc/{one.process.pid}/status").read_text()
    assert f"Uid:\t{kit.UID}\t" in status and f"CapEff:\t{mask(kit.AGENT)}\n" in status
    (self,) = signals(one, "self")
    assert self["failed"] == {}
    assert {each["name"] for each in self["programs"]} == {
        "observe_egress",
        "observe_ingress",
        "tcp_callbacks",
        "tcp_created",
    }

    def both_ways() -> bool:
        (delay,) = signals(one, "path_delay")
        return all(delay[way].get("owd_p50_ns") is not None for way in ("forward", "reverse")) and not delay["lost"]

    support.wait_until(both_ways, 30, "delays of both ways are known")
    program = "import socket; s = socket.create_connection(('10.77.0.2', 9)); print('?')"
    inside = ["ip", "netns", "exec", veth_pair[0], sys.executable, "-c", program]

    def refused() -> bool:
        support.run(inside, check=False)
        (host,) = signals(one, "tcp_host")
        return host["resets_received"] > 0

    support.wait_until(refused, 30, "TCP is counted")
    (drops,) = signals(one, "packet_drops")
    names = {each["reason"] for each in drops["reasons"]}
    assert names and not [name for name in names if name.startswith("reason_")], "they come from the copied format"
    assert list((Path(one.env["SWERVE_STATE_DIR"]) / "host/recording").iterdir()), "it records"
    assert not [name for name in one.said().splitlines() if "hook failed" in name]


def test_what_is_lost_without_root_is_what_the_log_and_doctor_say(pair: tuple[Service, Service]) -> None:
    one, _ = pair
    one.manager.until("READY=1")
    lines = [line for line in one.said().splitlines() if "agent runs without" in line]
    named = {re.findall(r"missing=(\S+)", line)[0] for line in lines}
    assert all(line.startswith("<5>") for line in lines)
    done = one.swerve("doctor", "-j", check=False)
    results = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    found = results["privileges of the agent"]
    lost = {each.capability: each.what for each in privileges.LOST}
    assert found["present"] is False and f"user {kit.UID}" in found["detail"]
    for name in named:
        assert lost[name] in found["costs"] and name in found["mend"]
    assert named == lost.keys()
    (self,) = signals(one, "self")
    assert {each["run_time_ns"] for each in self["programs"]} == {None}, "CAP_SYS_ADMIN, as it was said"


@pytest.mark.parametrize("more", ["", "CAP_SYS_PTRACE CAP_DAC_READ_SEARCH"], ids=["as shipped", "with the drop-in"])
def test_the_process_of_a_connection_takes_a_capability_more_and_its_group_none(
    veth_pair: tuple[str, str], room: Path, tmp_path: Path, more: str
) -> None:
    """As docs/service.md has it, the loss and what brings it back."""
    unit = tmp_path / "swerve-agent.service"
    added = f"AmbientCapabilities={more}\nCapabilityBoundingSet={more}\n" if more else ""
    unit.write_text(kit.AGENT.read_text().replace("\n[Install]", f"{added}\n[Install]"))
    with kit.service(room, veth_pair[0], CONFIG, unit=unit) as one:
        one.manager.until("READY=1")
        with netns.inside(veth_pair[1]):
            listener = socket.create_server(("10.77.0.2", 7777))
        with netns.inside(veth_pair[0]):
            near = socket.create_connection(("10.77.0.2", 7777))
        path = Path(one.env["SWERVE_RUNTIME_DIR"]) / "host/agent.sock"
        with listener, near, listener.accept()[0] as far, Client(path, frozenset({"tcp_flow"})) as client:
            owners: list[Owner] = []

            def told() -> bool:
                near.sendall(b"x")
                far.recv(1)
                flows = [each for each in client.read() if isinstance(each, TcpFlow)]
                owners.extend(each.owner for each in flows if 7777 in (each.remote_port, each.local_port))
                return bool(owners and owners[-1].cgroup and (owners[-1].pid or not more))

            support.wait_until(told, 40, "the connection is told", every_s=0.05)
        assert owners[-1].pid == (os.getpid() if more else 0)
        assert not more or all(owner.cgroup for owner in owners), "at once"
        assert ("agent runs without missing=CAP_SYS_PTRACE" in one.said()) != bool(more)


_BREAKS = """
import ctypes, os, struct, sys
from pytools.kernel import features; from pytools.kernel.bpf import syscall, uprobes
rows = [struct.pack("<BBhi", op, src << 4 | dst, off, imm) for op, dst, src, off, imm in features.NOTHING]
code = b"".join(rows)
body, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
asked = struct.pack("<2I2Q", 2, len(rows), syscall.address(body), syscall.address(licence))
kprobe = syscall.bpf(5, asked.ljust(68, bytes(1)) + struct.pack("<I", syscall.UPROBE_MULTI))
libc = ctypes.CDLL(None)
at = ctypes.cast(libc.getppid, ctypes.c_void_p).value
for line in open("/proc/self/maps"):
    span, _, offset, _, _, *path = line.split()
    low, high = (int(each, 16) for each in span.split("-"))
    if low <= at < high:
        with uprobes.Uprobe(kprobe, path[0], at - low + int(offset, 16)) as set_in:
            os.getppid()
        print("set in", path[0], "by a link" if set_in.linked else "by an event")
"""


def test_breakpoints_for_rdma_take_one_capability_more_where_they_are_events(room: Path, tmp_path: Path) -> None:
    """As docs/service.md has it: the shipped unit may set links; events of perf take CAP_SYS_ADMIN on some kernels."""
    if uprobes.missing():
        pytest.skip(f"missing: {uprobes.missing()}")
    run = kit.own(room / "run")
    unit = tmp_path / "swerve-agent.service"
    added = "AmbientCapabilities=CAP_SYS_ADMIN\nCapabilityBoundingSet=CAP_SYS_ADMIN\n"
    unit.write_text(kit.AGENT.read_text().replace("\n[Install]", f"{added}\n[Install]"))
    words = [sys.executable, "-c", _BREAKS]
    more = support.run(kit.command(words, [run], unit=unit)).stdout
    assert "set in /" in more
    shipped = support.run(kit.command(words, [run]), check=False)
    assert "set in /" in shipped.stdout or ("by a link" not in more and "no breakpoint may be set" in shipped.stderr)
    assert shipped.stdout in ("", more)


def test_without_the_step_it_measures_and_names_what_is_lost(veth_pair: tuple[str, str], room: Path) -> None:
    with kit.service(room, veth_pair[0], CONFIG, prepared=False) as one:
        one.manager.until("READY=1")
        missing = [line for line in one.said().splitlines() if "agent runs without" in line and "format" in line]
        assert len(missing) == 2 and "tcp:tcp_cong_state_set" in missing[0] and "skb:kfree_skb" in missing[1]
        (self,) = signals(one, "self")
        assert self["failed"] == {}
        names = [each["name"] for each in self["programs"]]
        assert sorted(names) == ["observe_egress", "observe_ingress", "tcp_callbacks", "tcp_created"]


def test_it_is_alive_only_while_its_loop_turns(veth_pair: tuple[str, str], room: Path) -> None:
    with kit.service(room, veth_pair[0], CONFIG, watchdog_s=1) as one:
        one.manager.until("READY=1")
        one.manager.until("STATUS=probes 1 paths to 1 peers by 1 interfaces")
        one.manager.forget()
        one.manager.until("WATCHDOG=1", 10)
        one.process.send_signal(signal.SIGSTOP)
        one.manager.forget()
        kit.settle(1.5)
        assert one.manager.listen() == []
        one.process.send_signal(signal.SIGCONT)
        one.manager.until("WATCHDOG=1", 10)
        one.process.terminate()
        assert one.process.wait(20) == 0
        assert one.manager.listen()[-1] == "STOPPING=1"
        assert "<6>agent starting host=one peers=1" in one.said() and "<6>agent stopping" in one.said()
    rules = support.run(["ip", "-n", veth_pair[0], "rule"]).stdout
    assert "fwmark" not in rules, "nothing stays behind"


def test_metrics_are_served_without_any_capability(veth_pair: tuple[str, str], room: Path) -> None:
    with kit.service(room, veth_pair[0], CONFIG) as one:
        one.manager.until("READY=1")
        line = kit.command([*support.SWERVE, "metrics", "--once"], [], unit=kit.METRICS, uid=kit.READER)
        said = support.run(line, env=dict(one.env)).stdout
        assert re.search(r"^swerve_up(\{.*\})? 1(\.0)?$", said, re.MULTILINE), said
    unit = under_unit.Unit(kit.METRICS)
    assert unit.words("CapabilityBoundingSet") == unit.words("AmbientCapabilities") == []
    assert unit.words("User") == unit.words("Group") == ["swerve-metrics"] and "ExecStartPre" not in unit.values


def test_the_user_of_the_metrics_reads_and_can_do_nothing_else(veth_pair: tuple[str, str], room: Path) -> None:
    """With the unit's user and sandbox: it gets no other socket, publishes nothing, and is told so."""
    script = (
        "import sys, json; from pytools import directories; from pytools.ipc.bus import AgentGoneError, Client\n"
        "from pytools.errors import SwerveError; from pytools.signals import decode\n"
        "from steering.control import client; from steering.control.requests import Drain\n"
        "for attempt in (lambda: Client(directories.agent_socket(None)),\n"
        "                lambda: open(directories.state_dir(None) / 'journal.jsonl'),\n"
        "                lambda: client.ask(directories.state_dir(None), Drain(leaves_by='rail1'))):\n"
        "    try: attempt()\n"
        "    except (SwerveError, OSError) as error: print(error)\n"
        "    else: sys.exit('it was let in')\n"
        "with Client(directories.readers_socket(None), frozenset({'path_liveness'})) as agent:\n"
        "    told = agent.next(30); agent.publish(told)\n"
        "    try:\n"
        "        while True: agent.next(30)\n"
        "    except AgentGoneError as error: print(error)\n"
    )
    with kit.service(room, veth_pair[0], CONFIG) as one:
        one.manager.until("READY=1")
        line = kit.command([sys.executable, "-c", script], [], unit=kit.METRICS, uid=kit.READER)
        done = support.run(line, env={**one.env, "PYTHONPATH": str(support.ROOT)})
        assert done.stdout.count("ermission denied") == 3, done.stdout
        assert support.mentions(done.stdout, "published", "reading only")
        refused = [each["drops"]["bus_readers_published"] for each in signals(one, "self", 1)]
        assert refused == [1]
        stranger = kit.command([*support.SWERVE, "metrics", "--once"], [], unit=kit.METRICS, uid=kit.READER + 1)
        done = support.run(stranger, env=dict(one.env), check=False)
        assert done.returncode == 1 and support.mentions(done.stderr, "group swerve-metrics")


def test_it_waits_for_nobody_who_does_not_listen(veth_pair: tuple[str, str], room: Path) -> None:
    with kit.service(room, veth_pair[0], CONFIG) as one:
        one.manager.until("READY=1")
        one.manager.sock.close()
        assert len(signals(one, "path_delay", 40)) == 40
        assert one.process.poll() is None


# ---- the controller ----

POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 2s, takeover: 1s, max_drained_share: 0.5}
rules:
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: p50, above: 5s, for: 1s, clear_below: 1s}
    then: {shift: {share: 0}}
"""


@pytest.mark.deadline(180)
def test_a_killed_controller_is_undone_by_its_guardian(unique_name) -> None:
    """As systemd leaves it with KillMode=process: the main process is gone, everything else of the unit lives."""
    support.require("bcc", "tracefs")
    with Lab.up(unique_name(), hosts=2, rails=2, rate="100mbit") as lab:
        host = lab.hosts[0]
        for each in lab.hosts:
            by_unit.start(lab.name, each.netns, [*support.SWERVE, "agent", "-n", each.netns])
        file = directories.runtime_dir(None).parent.parent / f"{lab.name}.yaml"
        file.write_text(POLICY)
        file.chmod(0o644)
        words = ["steer", "run", "--apply", "--policy", str(file)]
        room = directories.state_dir(host.netns)
        controller = by_unit.under_the_unit(kit.STEER, lab.name, host.netns, words, stderr=subprocess.PIPE)

        def weights() -> dict[int, int]:
            return Host(host.netns).weights()

        def steer(*words: str) -> subprocess.CompletedProcess[str]:
            return support.run([*support.SWERVE, "steer", *words, "-n", host.netns], check=False)

        before = weights()
        support.wait_until(lambda: steer("drain", "rail1", "--why", "test").returncode == 0, 60, "rail 1 is drained")
        assert weights() != before and len(before) == 2
        (guardian,) = guardians(controller.pid)
        status = Path(f"/proc/{guardian}/status").read_text()
        assert f"Uid:\t{kit.UID}\t" in status and "Seccomp:\t2" in status, "it is confined like its controller"
        assert steer("undrain", "rail1").returncode == 0 and weights() == before
        # Where others hold the processors, rail 1 may just not be measured: then it is refused.
        support.wait_until(lambda: steer("drain", "rail2").returncode == 0, 60, "rail 2 is drained")
        assert weights() != before
        controller.kill()
        controller.wait(10)
        support.wait_until(lambda: weights() == before, 20, "the guardian has put the weights back")
        support.wait_until(lambda: holder(room / journal.LOCK_FILE) is None, 20, "and has gone")
        command = kit.STEER, lab.name, host.netns, ["steer", "undo"]
        after = by_unit.under_the_unit(*command, stdout=subprocess.PIPE)
        assert "nothing to undo" in after.communicate(timeout=60)[0], "ExecStopPost= finds nothing left"
        file.unlink()
