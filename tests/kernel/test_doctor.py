"""`swerve doctor` against what other tools say of the same kernel, and its clean-up after a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Served
from support import AS_NOBODY, ROOT, SWERVE, require, run

from pytools import places
from pytools.config import AgentConfig
from pytools.errors import RefusedError, UsageError
from pytools.kernel import features
from pytools.kernel.loader import Program
from pytools.kernel.netns import inside
from pytools.sources import programs
from pytools.sources.probing import paths
from pytools.views import doctor

PROGRAMS = programs.all_of(AgentConfig("", []))


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    require("root", "bcc")
    return doctor.examine(None, None, PROGRAMS)


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
        command = ["tc", "-n", namespace, "qdisc", "replace", "dev", "lo", "root", *words.split()]
        assert found(report, name).present == works(*command), name
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
    assert found(report, "our programs").detail == "stamp_egress, stamp_ingress, tcp_egress"

    for needed in ("bpf system call", "ring buffer", "TC programs", "TCP sockets at TC", "bcc", "UAPI headers"):
        assert found(report, needed).present is True, f"our programs load, so this cannot be missing: {needed}"


def test_a_program_that_cannot_be_loaded_is_named() -> None:
    broken = Program("stamp.c", ("no_such_function",), PROGRAMS[0].defines)
    result = found(doctor.examine(None, None, [broken]), "our programs")
    assert result.present is False and "no_such_function" in result.detail


def test_looking_leaves_nothing_behind(namespace: str) -> None:
    def inventory() -> str:
        commands = ("link", "rule", "nexthop", "route show table all")
        return "".join(run(["ip", "-n", namespace, *words.split()]).stdout for words in commands)

    fds = len(os.listdir("/proc/self/fd"))
    before, where = inventory(), os.readlink("/proc/thread-self/ns/net")
    doctor.examine(namespace, None, PROGRAMS)
    assert inventory() == before
    assert os.readlink("/proc/thread-self/ns/net") == where
    assert len(os.listdir("/proc/self/fd")) == fds


def test_settings_are_those_of_the_namespace(namespace: str) -> None:
    for value, expected in (("0", False), ("1", True)):
        for family in ("ipv4", "ipv6"):
            setting = f"net.{family}.fib_multipath_hash_policy={value}"
            run(["ip", "netns", "exec", namespace, sys.executable, "-c", _SET, setting])
        assert found(doctor.examine(namespace, None, PROGRAMS), "ECMP by ports").present is expected


_SET = (
    "import sys; name, _, value = sys.argv[1].partition('=');"
    "open('/proc/sys/' + name.replace('.', '/'), 'w').write(value)"
)


def test_a_program_that_the_verifier_rejects_is_missing_not_fatal() -> None:
    reads_unchecked = [(0x79, 1, 1, 168, 0), (0x61, 0, 1, 0, 0), (0x95, 0, 0, 0, 0)]  # *skb->sk, which may be null
    finding = features.program(reads_unchecked)
    assert finding.present is False and finding.detail


def test_without_privileges_the_exit_code_is_5_and_every_gap_is_named() -> None:
    done = run([*AS_NOBODY, *SWERVE, "doctor", "-j"], check=False, cwd=Path("/"))
    assert done.returncode == 5, done.stderr
    results = {each["name"]: each for each in json.loads(done.stdout)["results"]}
    for name in ("CAP_BPF", "CAP_NET_ADMIN", "bpf system call", "TC programs", "our programs"):
        assert results[name]["present"] is False and results[name]["costs"], name
    assert results["TCX"]["present"] is None and "cannot be tried" in results["TCX"]["detail"]


def test_the_command_prints_findings_and_gaps() -> None:
    done = run([*SWERVE, "doctor"], cwd=ROOT, check=False)
    assert done.returncode in (0, 5)
    assert "present  CAP_BPF" in done.stdout and "cannot be done on any host" in done.stdout
    assert done.stdout.count("costs") >= done.stdout.lower().count("  missing ")


def test_an_unknown_namespace_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="network namespace no-such"):
        doctor.examine("no-such", None, PROGRAMS)


_CRASHING = """
import os, signal, sys
from pytools.kernel import attach, features
from pytools.kernel.netlink import Netlink
from pytools.kernel.netns import enter
enter(sys.argv[1])
with features.loaded(features.NOTHING) as fd:
    kept = [attach.attach_tc(fd, "lo", each, force_clsact=True) for each in ("ingress", "egress")]
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_clean_removes_what_a_killed_agent_left_and_only_that(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("ip", "tc")
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))

    def ip(*words: str) -> str:
        return run(["ip", "-n", namespace, *words]).stdout

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
    assert filters().count("swerve") == 2
    rules_before = ip("rule")
    mark, table, priority = hex(paths.MARK), str(paths.TABLE), str(paths.RULE)
    ours = ["fwmark", mark + "/0xff000fff", "table", table, "priority", priority, "protocol", "201"]
    ip("rule", "add", *ours)
    ip("rule", "add", "fwmark", "0x99", "table", "99", "priority", "99")
    ip("route", "add", "blackhole", "10.9.0.2/32", "table", table, "protocol", "201")
    ip("route", "add", "blackhole", "10.9.0.2/32", "table", "99", "protocol", "201")
    socket = places.agent_socket(namespace)
    crashed = Served(socket)
    crashed.server._sock.close()  # as a kill leaves it: the file is there, nobody listens

    removed = doctor.clean(namespace, paths.clean)

    assert sorted(removed) == sorted(
        [
            "clsact ingress filter on lo",
            "clsact egress filter on lo",
            f"IPv4 rule {priority} and table {table}",
            f"stale socket {socket}",
        ]
    )
    assert filters() == before and (not has_matchall or "matchall" in before)
    assert "10.9.0.2" in ip("route", "show", "table", "99")
    assert run(["ip", "-n", namespace, "route", "show", "table", table], check=False).stdout == ""
    assert (
        "fwmark 0x99" in ip("rule") and ip("rule").replace("99:\tfrom all fwmark 0x99 lookup 99\n", "") == rules_before
    )
    assert doctor.clean(namespace, paths.clean) == []
    crashed.selector.close()


def test_clean_refuses_while_an_agent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path))
    served = Served(places.agent_socket(namespace))
    with pytest.raises(RefusedError, match="stop it first"):
        doctor.clean(namespace, paths.clean)
    served.close()


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
