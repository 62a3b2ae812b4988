"""`swerve doctor` about its neighbours at TC and the versions at work, and its bundle of a real namespace."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_parts import parts_of
from support import AS_NOBODY, SWERVE, require, run

from pytools import directories
from pytools.config import AgentConfig
from pytools.doctor import report as doctor
from pytools.doctor.checks import checks
from pytools.kernel import features
from pytools.kernel.bpf import attach, loader, tc_programs
from pytools.kernel.netns import inside
from pytools.sources import programs

CONFIG = "host: one\npeers: [{name: two, address: 10.77.0.2, clock: shared}]\n"


@pytest.fixture
def host(veth_pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A namespace with a configuration, whose paths go by v0; another interface is beside it."""
    require("ip", "tc", "bcc")
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    name = veth_pair[0]
    folder = directories.runtime_dir(name)
    folder.mkdir(parents=True)
    (folder / "agent.yaml").write_text(CONFIG)
    run(["ip", "-n", name, "link", "add", "w0", "type", "veth", "peer", "name", "w1"])
    yield name


def others(name: str) -> features.Finding:
    with inside(name):
        return next(each for each in checks(name, None, []) if each.name == "no others at TC").find()


def at_tc(name: str, interface: str) -> list[tuple[str, str, str, bool]]:
    with inside(name):
        found = tc_programs.on(interface, attach.interfaces()[interface])
        return [(each.direction, each.mechanism, each.name, each.ours) for each in found]


def test_programs_of_others_are_named_and_ours_are_not(host: str) -> None:
    require("bpftool")
    assert others(host) == features.Finding(True, "on v0")
    with (
        inside(host),
        loader.load([programs.probes(AgentConfig("", []))]) as ours,
        attach.attach_tc(ours.programs["probe_egress"], "v0", "egress"),
    ):
        assert others(host) == features.Finding(True, "on v0")
        assert at_tc(host, "v0") == [("egress", "tcx", "probe_egress", True)]
        with (
            features.loaded(features.NOTHING) as theirs,
            attach.attach_tc(theirs, "v0", "ingress"),
            attach.attach_tc(theirs, "w0", "egress"),
        ):
            found = others(host)
            (number,) = (int(each) for each in re.findall(r"id (\d+)", found.detail))
            told = json.loads(run(["bpftool", "-j", "prog", "show", "id", str(number)]).stdout)
            assert found.present is False and (told["type"], told.get("name", "")) == ("sched_cls", "")
            assert found.detail.startswith("v0 ingress: tcx program (id") and "w0" not in found.detail
            assert at_tc(host, "w0") == [("egress", "tcx", "", False)]
    assert others(host) == features.Finding(True, "on v0")


def test_without_sys_admin_a_program_may_be_ours(host: str) -> None:
    """As in a pod, where the agent's own programs are there."""
    asked = "from pytools.doctor import agent; f = agent.others_at_tc(None, None); print(f.present, f.detail)"
    pod = ["ip", "netns", "exec", host, "setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", asked]
    assert run(pod).stdout.startswith("True ")
    with inside(host), features.loaded(features.NOTHING) as fd, attach.attach_tc(fd, "v0", "ingress"):
        found = run(pod).stdout
    words = r"None names need CAP_SYS_ADMIN, and these may be ours: v0 ingress: tcx program \(id \d+\)\n"
    assert re.fullmatch(words, found), found


def test_filters_of_others_are_named_and_ours_are_not(host: str) -> None:
    run(["tc", "-n", host, "qdisc", "add", "dev", "v0", "clsact"])
    with inside(host), features.loaded(features.NOTHING) as fd, attach.attach_tc(fd, "v0", "egress", force_clsact=True):
        assert others(host).present is True, "it carries our name"
        assert at_tc(host, "v0") == [("egress", "clsact", "swerve", True)]
        line = ["filter", "add", "dev", "v0", "ingress", "pref", "7", "protocol", "ip", "matchall", "action", "pass"]
        if run(["tc", *line], check=False).returncode == 0:
            assert others(host) == features.Finding(False, "v0 ingress: clsact matchall")


def test_without_a_configuration_every_interface_is_looked_at(host: str) -> None:
    (directories.runtime_dir(host) / "agent.yaml").unlink()
    with inside(host), features.loaded(features.NOTHING) as fd, attach.attach_tc(fd, "w0", "egress"):
        assert others(host).detail.startswith("w0 egress: tcx")


def test_our_names_are_those_that_we_load() -> None:
    loaded = {name for program in programs.all_of(AgentConfig("", [])) for name in program.functions}
    of_tc = {name for name in loaded if name not in (programs.TCP_CALLBACKS, programs.TCP_CREATED)}
    assert {name[:15] for name in of_tc} | {"steer_egress", "sample_ingress"} <= tc_programs.our_names()


def test_versions_are_what_the_packages_say() -> None:
    require("bcc", "ip")
    found = doctor.versions_found()
    package = run(["dpkg-query", "-W", "-f", "${Version}", "python3-bpfcc"], check=False).stdout
    assert found["bcc"] and (not package or package.startswith(found["bcc"]))
    assert found["iproute2"] in run(["ip", "-V"]).stdout and found["kernel"] == os.uname().release
    assert doctor.versions_text(found).startswith(f"{os.uname().release}, swerve ")


def test_the_clock_is_said_to_be_set_or_not() -> None:
    check = next(each for each in checks(None, None, []) if each.name == "system clock").find()
    said = run(["adjtimex", "--print"], check=False) if Path("/usr/sbin/adjtimex").exists() else None
    assert check.present in (True, False) and check.detail
    assert said is None or ("status: 64" in said.stdout) == (check.present is False)


def test_a_bundle_of_a_namespace(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["ip", "-n", host, "route", "add", "10.9.0.0/16", "via", "10.77.0.2"])
    run(["ip", "-n", host, "rule", "add", "fwmark", "0x99", "table", "99"])
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\nmanage: {destinations: [10.9.0.0/16]}\n")
    state = directories.state_dir(host)
    state.mkdir(parents=True)
    (state / "lock").write_text(json.dumps({"pid": 1, "policy": str(policy)}))
    out = tmp_path / "out.tar.gz"
    said = run([*SWERVE, "doctor", "-n", host, "--bundle", str(out), "--redact"]).stdout
    assert "without self.json: no agent serves" in said and "never in it: keys" in said
    assert out.stat().st_mode & 0o777 == 0o600
    parts = parts_of(out)
    names = {each["ifname"] for each in json.loads(parts["ip-link.json"])}
    assert names == {"lo", "v0", "w0", "w1"}, "of the namespace, not of the host"
    routes = json.loads(parts["ip-route.json"])
    ways = {each["dst"]: each for each in routes}
    assert ways["10.9.0.0/16"]["gateway"].startswith("ip-"), "a gateway that is not managed"
    assert any(each.get("fwmark") == "0x99" for each in json.loads(parts["ip-rule.json"]))
    assert b"10.77.0." not in b"".join(parts.values())
    report = json.loads(parts["doctor.json"])
    assert report["versions"]["bcc"] and len(report["results"]) > 30
    plain = tmp_path / "plain.tar.gz"
    doctor.bundle(plain, host, None, [], redact=False, as_json=True)
    manifest = json.loads(capsys.readouterr().out)
    assert manifest["addresses_hidden"] is None
    assert json.loads(parts_of(plain)["config.json"])["peers"][0]["address"] == "10.77.0.2"


def test_a_bundle_is_made_without_privileges_too(tmp_path: Path) -> None:
    """Of what can be had: somebody who may do nothing here needs help most."""
    tmp_path.chmod(0o777)
    for above in tmp_path.parents:
        if above.stat().st_uid == 0 and above != Path("/") and above != Path("/tmp"):
            above.chmod(above.stat().st_mode | 0o011)
    out = tmp_path / "out.tar.gz"
    done = run([*AS_NOBODY, *SWERVE, "doctor", "--bundle", str(out)], check=False, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert {"doctor.json", "ip-link.json", "manifest.json"} <= set(parts_of(out))


@pytest.mark.parametrize("words", [["--redact"], ["--clean", "--bundle", "x.tar.gz"]])
def test_what_does_not_go_together_is_refused(words: list[str], tmp_path: Path) -> None:
    assert run([*SWERVE, "doctor", *words], check=False, cwd=tmp_path).returncode == 2
