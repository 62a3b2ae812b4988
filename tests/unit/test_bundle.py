"""The support bundle: what is in it, what never is, what becomes a number, and how large it may get."""

from __future__ import annotations

import gzip
import ipaddress
import json
import os
import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import samples
from bundle_parts import parts_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytools import directories
from pytools.doctor import bundle as doctor_bundle
from pytools.doctor import report as doctor
from pytools.doctor.redact import LEFT_OUT, Addresses, cleaned
from pytools.errors import UsageError
from pytools.recording import segments
from pytools.signals import encode

SECRET = "hunter2-hunter2"
CONFIG = f"""\
# the password of the switch is {SECRET}
host: h1
peers: [{{name: h2, address: 10.9.0.2}}, {{name: h3, address: 192.0.2.33}}]
bus: {{key_file: KEY}}
"""
POLICY = f"""\
version: 1
# ask {SECRET}
manage: {{destinations: [10.9.0.0/16]}}
webhook_token: {SECRET}
"""
REPORT = doctor.Report(
    "6.1",
    None,
    [
        doctor.Result("RDMA as the agent sees it", True, False, f"815 {SECRET}: tap", "", ""),
        doctor.Result("no others at TC", False, False, "eth0 ingress: tcx cil_from_netdev (id 7)", "costs", "mend"),
    ],
    ("nothing",),
    {"kernel": "6.1", "swerve": "0.1"},
)
LINK = [{"ifname": "eth0", "address": "52:54:00:12:34:56", "addr_info": [{"local": "192.0.2.1"}]}]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of its own: configuration, policy, state, and commands that say little."""
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    key = tmp_path / "key"
    key.write_text(SECRET)
    directories.runtime_dir(None).mkdir(parents=True)
    (directories.runtime_dir(None) / "agent.yaml").write_text(CONFIG.replace("KEY", str(key)))
    state = directories.state_dir(None)
    state.mkdir(parents=True)
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    (state / "lock").write_text(json.dumps({"pid": 1, "policy": str(policy)}))
    (state / "acts.jsonl").write_bytes(encode(samples.act()) + b"\nno record\n")

    def asked(command: tuple[str, ...]) -> Any:
        return LINK if "link" in command else [] if "filter" in command else [{"dst": "10.9.0.0/16"}]

    monkeypatch.setattr(doctor_bundle, "json_of", asked)
    return tmp_path


def made(host: Path, redact: bool = False) -> tuple[doctor_bundle.Manifest, dict[str, bytes]]:
    out = host / f"bundle{redact}.tar.gz"
    return doctor_bundle.write(out, None, None, REPORT, redact), parts_of(out)


def test_the_manifest_names_what_is_in_it_and_what_is_not(host: Path) -> None:
    manifest, parts = made(host)
    assert {part.name: part.bytes for part in manifest.parts} == {
        name: len(data) for name, data in parts.items() if name != doctor_bundle.MANIFEST
    }
    assert {"doctor.json", "config.json", "policy.json", "acts.jsonl", "ip-link.json", "tc-filter.json"} <= set(parts)
    why = {each.name: each.why for each in manifest.left_out}
    assert why.keys() == {"self.json", "journal.jsonl", "recording.jsonl"}
    assert "no agent" in why["self.json"] and "No such file" in why["journal.jsonl"]
    assert "no recording" in why["recording.jsonl"]
    told = json.loads(parts[doctor_bundle.MANIFEST])
    assert told["type"] == "bundle" and told["versions"]["swerve"] == "0.1" and len(told["never"]) == 4


def test_no_secret_leaves_the_host(host: Path) -> None:
    _, parts = made(host)
    assert not [name for name, data in parts.items() if SECRET.encode() in data]
    assert json.loads(parts["config.json"])["bus"]["key_file"] == LEFT_OUT
    assert json.loads(parts["config.json"])["peers"][1]["address"] == "192.0.2.33"
    assert json.loads(parts["policy.json"])["webhook_token"] == LEFT_OUT
    assert [json.loads(line)["type"] for line in parts["acts.jsonl"].splitlines()] == ["act"]


def test_processes_are_numbers(host: Path) -> None:
    flow = json.loads(encode(next(each for each in samples.one_of_each() if hasattr(each, "owner"))))
    flow["owner"] |= {"pid": 4711, "command": SECRET, "cgroup": "/user.slice/x", "container": "abc"}
    sight = {"type": "rdma_sight", "seen": {"815 ib_write_bw": "tap"}, "cmdline": ["a", "b"], "environ": {"A": "b"}}
    assert cleaned(flow)["owner"] == {"pid": 4711, "command": "", "cgroup": "", "container": ""}
    assert cleaned(sight) == {"type": "rdma_sight", "seen": {"815": "tap"}, "cmdline": LEFT_OUT, "environ": LEFT_OUT}


def test_only_managed_addresses_are_shown_when_redacted(host: Path) -> None:
    manifest, parts = made(host, redact=True)
    everything = b"".join(data for name, data in parts.items() if name.endswith((".json", ".jsonl")))
    assert b"192.0.2." not in everything and b"52:54:00" not in everything
    assert b"10.9.0.2" in everything
    config, link = json.loads(parts["config.json"]), json.loads(parts["ip-link.json"])
    assert config["peers"][1]["address"].startswith("ip-") and link[0]["address"].startswith("mac-")
    assert manifest.managed == ["10.9.0.0/16"]
    assert manifest.addresses_hidden == len(set(re.findall(rb"(?:ip|mac)-\d+", everything)))


def test_without_a_policy_nothing_is_managed(host: Path) -> None:
    (host / "policy.yaml").write_text("manage: [")
    manifest, parts = made(host, redact=True)
    assert (
        "policy.yaml:1: expected the node content" in {each.name: each.why for each in manifest.left_out}["policy.json"]
    )
    assert b"10.9.0." not in b"".join(parts.values())


def test_it_is_its_owners_alone_and_overwrites_nothing(host: Path) -> None:
    before = os.umask(0)
    try:
        made(host)
    finally:
        os.umask(before)
    out = host / "bundleFalse.tar.gz"
    assert out.stat().st_mode & 0o777 == 0o600
    with tarfile.open(out) as archive:
        assert {each.mode for each in archive.getmembers()} == {0o600}
    with pytest.raises(UsageError, match="exist"):
        made(host)
    (host / "linked.tar.gz").symlink_to(host / "elsewhere")
    with pytest.raises(UsageError):
        doctor_bundle.write(host / "linked.tar.gz", None, None, REPORT, False)
    assert not (host / "elsewhere").exists()


def test_what_fails_on_the_way_leaves_no_half_bundle(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_bundle, "json_of", broken)
    with pytest.raises(KeyboardInterrupt):
        doctor_bundle.write(host / "half.tar.gz", None, None, REPORT, False)
    assert not (host / "half.tar.gz").exists()


def test_sizes_are_bounded_and_the_newest_is_kept(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_bundle, "RECORDING_BYTES", 4000)
    monkeypatch.setattr(doctor_bundle, "PART_BYTES", 5000)
    folder = directories.recording("", None)
    folder.mkdir(parents=True)
    now = time.time_ns()
    acts = [encode(replace(samples.act(number=number), unix_ns=now)) for number in range(100)]
    with gzip.open(folder / segments.name("fine", 1, now), "wb") as file:
        file.write(b"\n".join(acts) + b"\n")
    many = b"\n".join(encode(samples.act(number=number)) for number in range(5000))
    (directories.state_dir(None) / "acts.jsonl").write_bytes(many)
    manifest, parts = made(host)
    notes = {part.name: part.note for part in manifest.parts}
    assert len(parts["recording.jsonl"]) <= 4000 and "lines were left out" in notes["recording.jsonl"]
    assert json.loads(parts["recording.jsonl"].splitlines()[-1])["act_id"] == "a99"
    assert len(parts["acts.jsonl"]) <= 5000 and notes["acts.jsonl"].startswith("the end of it")
    assert json.loads(parts["acts.jsonl"].splitlines()[-1])["act_id"] == "a4999"


def test_a_part_that_is_too_large_as_a_whole_is_left_out(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_bundle, "json_of", lambda _: ["x" * doctor_bundle.PART_BYTES])
    manifest, parts = made(host)
    assert "ip-link.json" not in parts
    assert "more than" in {each.name: each.why for each in manifest.left_out}["ip-link.json"]


def test_a_command_that_is_missing_or_fails_is_named() -> None:
    ask: Callable[[tuple[str, ...]], Any] = doctor_bundle.json_of
    for command, why in (
        (("no-such-command",), "is not here"),
        (("sh", "-c", "echo wrong >&2; exit 3"), "wrong"),
        (("echo", "{"), "no JSON"),
    ):
        with pytest.raises(doctor_bundle.MissingError, match=why):
            ask(command)
    assert ask(("true",)) == [] and ask(("echo", "[1]")) == [1]


ADDRESSES = st.ip_addresses().filter(
    lambda each: not (each.is_loopback or each.is_unspecified or getattr(each, "ipv4_mapped", None))
)
AROUND = st.sampled_from(["", " ", "via ", "peer=", "(", "[", "'", "to:", "dev rail0 ", "/"])
AFTER = st.sampled_from(["", " ", ".", ",", ")", "]:862", "/24", "%eth0", ": refused", " dev rail1", "'", "\n"])


@given(ADDRESSES, AROUND, AFTER)
def test_no_address_stays_in_a_text(address: ipaddress.IPv4Address, before: str, after: str) -> None:
    hidden = Addresses([]).text(f"{before}{address}{after}")
    assert hidden == f"{before}ip-1{after}"


@given(ADDRESSES, ADDRESSES)
def test_the_same_address_has_the_same_number(one: ipaddress.IPv4Address, other: ipaddress.IPv4Address) -> None:
    hide = Addresses([])
    first, second, third = hide.hidden([str(one), {str(other): [str(one.exploded)]}, 7])
    assert first == "ip-1" and third == 7 and list(second.values()) == [["ip-1"]]
    assert list(second) == (["ip-1"] if one == other else ["ip-2"])


def test_managed_ones_and_those_of_nobody_stay() -> None:
    hide = Addresses(["10.9.0.0/16", "fd77::/64", "rubbish"])
    for stays in ("10.9.3.4", "fd77::9", "::ffff:10.9.0.1", "0.0.0.0/0", "::/0", "127.0.0.1", "::1", "12:30:45",
                  "2026-11-22T09:34:16", "1.2.3", "00:00:00:00:00:00", "a1b2:c3"):  # fmt: skip
        assert hide.text(f"to {stays} now") == f"to {stays} now"
    assert hide.replaced == 0
    assert hide.text("52:54:00:12:34:56 10.8.0.1/24 fe80::1%eth0") == "mac-1 ip-2/24 ip-3%eth0"
