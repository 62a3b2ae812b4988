"""`swerve doctor` against what other tools say of the same kernel, and its clean-up after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import samples
from serving import Served
from support import AS_NOBODY, ROOT, SWERVE, Namespace, mentions, require, run

from pytools import directories
from pytools.config import AgentConfig
from pytools.doctor import agent
from pytools.doctor import report as doctor
from pytools.doctor.checks import Check, checks
from pytools.errors import RefusedError, UsageError
from pytools.ipc.wire import TAGS
from pytools.kernel import features, leftovers
from pytools.kernel.bpf.loader import Program
from pytools.kernel.native import Native
from pytools.kernel.netns import inside
from pytools.signals import AnySignal, RdmaSight
from pytools.sources import programs
from steering.acting import journal
from steering.acting.lock import Lock

PROGRAMS = programs.all_of(AgentConfig("", []))


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    require("root", "bcc")
    return doctor.examine(None, None, PROGRAMS)


def check(namespace: str | None, name: str) -> Check:
    return next(each for each in checks(namespace, None, []) if each.name == name)


def found(report: doctor.Report, name: str) -> doctor.Result:
    return next(each for each in report.results if each.name == name)


def test_every_gap_says_what_it_costs_and_how_to_mend_it(report: doctor.Report) -> None:
    assert len({each.name for each in report.results}) == len(report.results)
    for each in report.results:
        assert bool(each.costs) == bool(each.mend) == (each.present is False), each
    assert report.sound == all(each.present is not False for each in report.results if each.essential)
    assert any("RDMA" in each for each in report.cannot)


def test_it_agrees_with_other_tools(report: doctor.Report, namespace: str) -> None:
    require("ip", "tc")

    def works(*command: str) -> bool:
        return run(command, check=False).returncode == 0

    assert found(report, "clsact").present == works("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "clsact")
    shapers = {"netem": "netem delay 1ms", "fq": "fq", "TBF": "tbf rate 1mbit burst 10k latency 1ms"}
    for name, words in shapers.items():
        made = works("tc", "-n", namespace, "qdisc", "replace", "dev", "lo", "root", *words.split())
        assert found(report, name).present == made, name
    for command in ("add id 1 dev lo", "add id 2 dev lo", "add id 3 group 1/2"):
        groups = works("ip", "-n", namespace, "nexthop", *command.split())
    assert found(report, "nexthop groups").present == groups
    resilient = works(
        "ip", "-n", namespace, *["nexthop", "add", "id", "4", "group", "1/2", "type", "resilient", "buckets", "8"]
    )
    assert found(report, "resilient groups").present == resilient
    held = run(["cat", "/proc/self/status"]).stdout
    mask = int(next(line for line in held.splitlines() if line.startswith("CapEff")).split()[1], 16)
    assert found(report, "CAP_NET_ADMIN").present == bool(mask >> 12 & 1)


def test_our_programs_are_compiled_and_loaded(report: doctor.Report) -> None:
    assert found(report, "our programs").present is True
    ours = sorted(function for program in PROGRAMS for function in program.functions)
    assert found(report, "our programs").detail == ", ".join(ours)

    for needed in ("bpf system call", "ring buffer", "TC programs", "TCP sockets at TC", "compiler"):
        assert found(report, needed).present is True, f"our programs load, so this cannot be missing: {needed}"


def test_what_tcp_needs_agrees_with_the_kernel(report: doctor.Report) -> None:
    def has(event: str) -> bool:
        return (Path("/sys/kernel/tracing/events") / event).is_dir()

    states = has("tcp/tcp_cong_state_set") and has("sock/inet_sock_set_state")
    assert found(report, "TCP congestion states").present == states
    fields = Path("/sys/kernel/tracing/events/skb/kfree_skb/format").read_text()
    assert found(report, "drop reasons").present == ("reason;" in fields)
    listed = len(set(re.findall(r'\{\s*([0-9a-fx]+),\s*"', fields.partition("print fmt")[2])))
    assert found(report, "drop reasons").detail == f"{listed} reasons"
    assert found(report, "drops by connection").present == ("rx_sk;" in fields)
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]
    groups = found(report, "control groups v2")
    assert groups.present == bool(places) and (not places or groups.detail.startswith(places[0]))


def test_what_rdma_there_is_agrees_with_the_kernel(report: doctor.Report) -> None:
    rooms = Path("/sys/class/infiniband")
    devices = found(report, "RDMA devices")
    assert devices.present == (rooms.is_dir() and any(rooms.iterdir()))
    assert devices.present or ("/sys/class/infiniband" in devices.detail and "rdma_rxe" in devices.mend)
    assert found(report, "uprobes").present == Path("/sys/bus/event_source/devices/uprobe/type").exists()
    linker = run(["/sbin/ldconfig", "-p"]).stdout
    assert found(report, "libibverbs").present == ("libibverbs.so" in linker)
    for name in ("RDMA devices", "libibverbs", "RDMA providers", "uprobes", "RDMA tap", "RDMA as the agent sees it"):
        assert not found(report, name).essential, "a host without RDMA is a sound host"


def test_looking_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> Path:
        raise AssertionError("doctor looks, and makes nothing")

    monkeypatch.setattr(Native, "build", build)
    for built in (True, False):
        monkeypatch.setattr(Native, "is_built", lambda _, built=built: built)
        tap = check(None, "RDMA tap")
        assert tap.find().present is built


def statistics_of(namespace: str) -> features.Finding:
    with inside(namespace):
        return check(None, "driver statistics").find()


def test_driver_statistics_are_those_of_the_namespace(namespace: str) -> None:
    require("ip")
    assert statistics_of(namespace).present is None  # nothing but a loopback interface
    run(["ip", "-n", namespace, "link", "add", "doc0", "type", "veth", "peer", "name", "doc1"])
    found = statistics_of(namespace)
    assert found.present is True and re.search(r"doc0 \d+, doc1 \d+|doc1 \d+, doc0 \d+", found.detail)


Ask = Callable[[str, AnySignal | None], features.Finding]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What one of these checks finds where an agent says this once, after it has looked where none runs."""
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))

    def answer(name: str, signal: AnySignal | None) -> features.Finding:
        find = check("t", name).find
        without = find()
        assert without.present is None and mentions(without.detail, "no agent")
        with contextlib.closing(Served(directories.agent_socket("t"))) as served, ThreadPoolExecutor() as pool:
            asking = pool.submit(find)
            if signal is not None:
                served.until(lambda: served.bus.wanted(TAGS[type(signal)]), "doctor has asked")
                served.bus.publish(signal)
            served.until(asking.done, "doctor has found something")
        return asking.result()

    return answer


@pytest.mark.parametrize(
    ("sight", "present", "said"),
    [
        (samples.rdma_sight(), True, ("815 ib_write_bw", "tap")),
        (samples.rdma_sight(seen={}), True, ("no process",)),
        (samples.rdma_sight(available=False, reason="the kernel has no RDMA"), False, ("the kernel has no RDMA",)),
        (None, None, ("agent", "nothing of RDMA")),
    ],
    ids=["seen", "idle", "none", "silent"],
)
def test_the_agent_is_asked_how_each_process_is_seen(
    ask: Ask, sight: RdmaSight | None, present: bool | None, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_ASKED_S", 0.5 if sight is None else 10.0)
    found = ask("RDMA as the agent sees it", sight)
    assert found.present is present and mentions(found.detail, *said)


def test_a_program_that_cannot_be_loaded_is_named() -> None:
    broken = Program("probe.c", ("no_such_function",), PROGRAMS[0].defines)
    result = found(doctor.examine(None, None, [broken]), "our programs")
    assert result.present is False and "no_such_function" in result.detail


def test_looking_leaves_nothing_behind(namespace: str) -> None:
    def inventory() -> str:
        commands = ("link", "rule", "nexthop", "route show table all")
        return "".join(run(["ip", "-n", namespace, *words.split()]).stdout for words in commands)

    fds = len(os.listdir("/proc/self/fd"))
    before, where = inventory(), os.readlink("/proc/thread-self/ns/net")
    doctor.examine(namespace, None, PROGRAMS[:1])
    assert inventory() == before
    assert os.readlink("/proc/thread-self/ns/net") == where
    assert len(os.listdir("/proc/self/fd")) == fds


def test_each_family_spreads_flows_by_a_setting_of_its_own(veth_pair: tuple[str, str]) -> None:
    """Its mend, run as it is written, mends it; of the namespace that is examined and of this family alone."""
    name, _ = veth_pair
    with inside(name):
        for family in ("ipv4", "ipv6"):
            assert features.routed(family)
            Path(f"/proc/sys/net/{family}/fib_multipath_hash_policy").write_text("0")
        first, second = (check(name, f"ECMP by ports, {family}") for family in ("IPv4", "IPv6"))
        assert (first.find().present, second.find().present) == (False, False)
    run(first.mend.split())
    with inside(name):
        assert (first.find().present, second.find().present) == (True, False)
        Path("/proc/sys/net/ipv6/conf/v0/disable_ipv6").write_text("1")
        assert not features.routed("ipv6"), "with the loopback alone nothing leads anywhere"
        assert second.find().present is None


def test_a_namespace_without_routes_has_none_of_either_family(namespace: str) -> None:
    with inside(namespace):
        assert [features.routed("ipv4"), features.routed("ipv6")] == [False, False]


def test_a_program_that_the_verifier_rejects_is_missing_not_fatal() -> None:
    reads_unchecked = [(0x79, 1, 1, 168, 0), (0x61, 0, 1, 0, 0), (0x95, 0, 0, 0, 0)]  # *skb->sk, which may be null
    finding = features.program(reads_unchecked)
    assert finding.present is False and finding.detail


def test_without_privileges_the_exit_code_is_5_and_every_gap_is_named() -> None:
    done = run([*AS_NOBODY, *SWERVE, "doctor", "-j"], check=False, cwd=Path("/"))
    assert done.returncode == 5, done.stderr
    results = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    for name in ("CAP_BPF", "CAP_NET_ADMIN", "CAP_NET_RAW", "bpf system call", "TC programs", "our programs"):
        assert results[name]["present"] is False and results[name]["costs"], name
    assert results["TCX"]["present"] is None and "cannot be tried" in results["TCX"]["detail"]


def test_findings_and_gaps_are_printed(report: doctor.Report, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(None, None, [], as_json=False, color=False) == (0 if report.sound else 5)
    said = capsys.readouterr().out
    assert "present  CAP_BPF" in said and "cannot be done on any host" in said
    assert said.count("costs") >= said.lower().count("  missing ")


def test_an_unknown_namespace_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="network namespace no-such"):
        doctor.examine("no-such", None, PROGRAMS)


_CRASHING = """
import os, signal, sys
from pytools.kernel import features; from pytools.kernel.bpf import attach
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import enter
enter(sys.argv[1])
with features.loaded(features.NOTHING) as fd:
    kept = [attach.attach_tc(fd, "lo", each, force_clsact=True) for each in ("ingress", "egress")]
    kept.append(attach.attach_tc(fd, "lo", "egress", force_clsact=True, role=attach.STEERING))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clean_removes_what_a_killed_agent_left_and_only_that(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("ip", "tc")
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    ip = Namespace(namespace).ip

    def filters() -> str:
        return "".join(
            run(["tc", "-n", namespace, "filter", "show", "dev", "lo", each]).stdout for each in ("ingress", "egress")
        )

    run(["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "clsact"])
    foreign = ["pref", "7", "protocol", "ip", "matchall", "action", "pass"]
    has_matchall = (
        run(["tc", "-n", namespace, "filter", "add", "dev", "lo", "ingress", *foreign], check=False).returncode == 0
    )
    before = filters()
    assert subprocess.run([sys.executable, "-c", _CRASHING, namespace], cwd=ROOT, check=False).returncode == -9
    assert filters().count("swerve") == 3, "the agent's two, and the controller's"
    rules_before = ip("rule")
    ip("rule", "add", "fwmark", "0x99", "table", "99", "priority", "99")
    ip("route", "add", "blackhole", "10.9.0.2/32", "table", "99", "protocol", "201")
    socket = directories.agent_socket(namespace)
    crashed = Served(socket)
    [listening] = crashed.selector.get_map().values()
    listening.fileobj.close()  # type: ignore[union-attr]  # as a kill leaves it: the file is there, nobody listens

    removed = doctor.clean(namespace)

    assert sorted(removed) == sorted(
        [
            "clsact ingress filter on lo",
            "clsact egress filter on lo",
            "clsact egress filter on lo",
            f"stale socket {socket}",
        ]
    )
    assert filters() == before and (not has_matchall or "matchall" in before)
    assert "10.9.0.2" in ip("route", "show", "table", "99")
    assert (
        "fwmark 0x99" in ip("rule") and ip("rule").replace("99:\tfrom all fwmark 0x99 lookup 99\n", "") == rules_before
    )
    assert doctor.clean(namespace) == []
    crashed.selector.close()


@pytest.mark.parametrize(
    ("dropped", "present", "said"),
    [
        ({"probe_forged": 5}, True, ()),
        ({"probe_unsigned_request": 1203}, False, ("1,203 probes", "no key")),
        (
            {"probe_unsigned_reply": 1, "probe_forged_request": 2},
            False,
            ("1 replies", "no key", "2 probes", "another key"),
        ),
    ],
)
def test_peers_that_do_not_share_the_key_are_named(
    ask: Ask, dropped: dict[str, int], present: bool, said: tuple[str, ...]
) -> None:
    found = ask("one key for probes", samples.self_cost(drops=dropped))
    assert found.present is present and bool(found.detail) is bool(said) and mentions(found.detail, *said)


@pytest.mark.parametrize(
    ("age_ns", "present", "said"),
    [(12_000_000_000, False, ("h2", "12 s")), (90_000_000, True, ()), (None, True, ())],
    ids=["hung", "works", "no swerve"],
)
def test_an_agent_that_hangs_behind_its_kernel_is_named(
    ask: Ask, age_ns: int | None, present: bool, said: tuple[str, ...]
) -> None:
    found = ask("agents of the peers", samples.path_liveness(peer_agent_age_ns=age_ns))
    assert found.present is present and bool(found.detail) is bool(said) and mentions(found.detail, *said)


def test_clean_refuses_while_an_agent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    served = Served(directories.agent_socket(namespace))
    with pytest.raises(RefusedError, match="stop it first"):
        doctor.clean(namespace)
    served.close()


def test_clean_removes_what_a_killed_controller_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    ip = Namespace(namespace).ip
    ip("link", "set", "lo", "up")
    ip("nexthop", "add", "id", str(leftovers.FIRST_ID), "dev", "lo", "protocol", "201")
    ip("nexthop", "add", "id", str(leftovers.FIRST_ID + 1), "group", str(leftovers.FIRST_ID), "protocol", "201")
    ip("nexthop", "add", "id", "7", "dev", "lo", "protocol", "201")
    by_group = ["nhid", str(leftovers.FIRST_ID + 1)]
    ip("route", "add", "10.9.0.0/24", *by_group, "protocol", "201", "table", "20000")
    ip("rule", "add", "pref", "32765", "lookup", "20000", "protocol", "201")
    ip("rule", "add", "pref", "100", "lookup", "77", "protocol", "201")
    ip("route", "add", "10.9.0.0/24", "nhid", "7", "protocol", "static")
    assert len(doctor.clean(namespace)) == 3
    assert [line.split()[1] for line in ip("nexthop").splitlines()] == ["7"]
    assert "nhid 7" in ip("route") and ip("route", "show", "table", "20000") == ""
    assert "20000" not in ip("rule") and "lookup 77" in ip("rule"), "another of protocol 201 stays"


def test_clean_refuses_while_a_controller_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    folder = journal.directory(namespace)
    with Lock(folder / journal.LOCK_FILE), pytest.raises(RefusedError, match="a controller steers"):
        doctor.clean(namespace)
    assert doctor.clean(namespace) == []


def test_a_namespace_for_tries_is_gone_afterwards() -> None:
    def here() -> dict[str, features.Finding]:
        return {"where": features.Finding(True, os.readlink("/proc/thread-self/ns/net"))}

    outside = os.readlink("/proc/thread-self/ns/net")
    where = features.in_new_namespace(here)["where"].detail
    assert where != outside == os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ZeroDivisionError):
        features.in_new_namespace(lambda: 1 // 0)  # type: ignore[return-value]


def test_inside_is_where_settings_are_read(namespace: str) -> None:
    with inside(namespace):
        assert features.setting("net.ipv4.ip_forward") in ("0", "1")
    assert features.setting("net.no.such") == ""
