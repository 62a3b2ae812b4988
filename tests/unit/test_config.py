"""The agent's configuration: what makes no sense is refused by name, in one line that says where, never a traceback.

On SIGHUP an agent that runs reads its file again: what the loader does not turn into such an error ends it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytools import config
from pytools.config import AgentConfig, Clocks, Peer, Probe, checked
from pytools.config_units import key_of
from pytools.errors import CapabilityError, UsageError
from pytools.yaml_reader import NotYamlError, Reader, decoded
from steering.policy import file as policy_file
from steering.policy.file import InvalidPolicyError


def with_peer(address: str) -> AgentConfig:
    return checked(AgentConfig(host="h1", peers=[Peer("h2", address)]), "agent.yaml")


@pytest.mark.parametrize("address", ["10.9.0.2", "127.0.0.1", "169.254.1.2", "fd00::2", "::1", "240.0.0.1"])
def test_a_peer_has_any_address_of_a_host(address: str) -> None:
    assert with_peer(address).peers[0].address == address


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nowhere", "not an IP address"),
        ("10.9.0.0/24", "not an IP address"),
        ("0.0.0.0", "not of one host"),
        ("::", "not of one host"),
        ("224.0.0.1", "not of one host"),
        ("ff02::1", "not of one host"),
        ("255.255.255.255", "not of one host"),
        ("::ffff:10.9.0.2", "an IPv4-mapped IPv6 address"),
        ("fe80::1", "of one link alone"),
        ("fe80::1%rail1", "of one link alone"),
    ],
)
def test_a_peers_address_that_is_not_of_one_host_everywhere_is_refused(address: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"agent.yaml: peer h2: '{address}' is {why}"):
        with_peer(address)


@pytest.mark.parametrize("load", [config.load, policy_file.load])
def test_what_may_not_be_read_is_a_matter_of_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: object
) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    for module in (config, policy_file):
        monkeypatch.setattr(module, "read_obeyed", refuse)
    with pytest.raises(CapabilityError, match=r"x\.yaml: Permission denied"):
        load(tmp_path / "x.yaml")  # type: ignore[operator]


OLD_AND_NEW = [
    (section, name)
    for section, part in msgspec.structs.asdict(AgentConfig("h1", [])).items()
    if isinstance(part, msgspec.Struct)
    for name in part.__struct_fields__
    if key_of(name) != name
]


@pytest.mark.parametrize(("section", "name"), OLD_AND_NEW)
def test_the_spelling_of_earlier_versions_is_read_with_a_hint(tmp_path: Path, section: str, name: str) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_text(f"host: h1\npeers: []\n{section}:\n  {name}: 600\n")
    old, hints = config.read(file)
    assert getattr(getattr(old, section), name) == 600
    (hint,) = hints
    new = hint.rpartition(" as ")[2]
    assert hint.startswith(f"line 4: write {section}.{name}: 600 as {section}.{key_of(name)}: ")
    file.write_text(f"host: h1\npeers: []\n{section}:\n  {new.removeprefix(f'{section}.')}\n")
    assert config.read(file) == (old, ())


@given(st.builds(AgentConfig, st.just("h1"), st.just([Peer("h2", "10.9.0.2")]), st.builds(
    Probe, interval_ms=st.floats(1, 60_000)), clocks=st.builds(Clocks, tolerance_ns=st.integers(1, 10**6))
))  # fmt: skip
def test_a_configuration_is_read_back_as_it_was_written(wanted: AgentConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "agent.yaml"
        file.write_text(yaml.safe_dump(config.as_file(wanted)))
        found = config.load(file)
    assert found.clocks == wanted.clocks and found.peers == wanted.peers
    assert found.probe.interval_ms == pytest.approx(wanted.probe.interval_ms, abs=1e-6)


# ---- no YAML, or YAML that is no value ----

PEERS = b"peers: [{name: h2, address: 10.9.0.2}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"host: [a\nb: c\n", r":2: expected ',' or '\]'"),
        (b"host:\n\t- a\n", ":2: found character"),
        (b"# x\nhost: \xe9\n", ":2: not UTF-8 text"),
        (b"# x\nhost: \x01\n", ":2: unacceptable character #x0001"),
        (b"host: a\n---\nhost: b\n", ":2: but found another document"),
        (b"host: !nobody x\n", ":1: host: tag !nobody"),
        (b"[1]: 2\n", ":1: Object contains unknown field `\\?`"),
        (b"!!map [a]\n", ":1: Expected `object`, got `array`"),
        (b"host: 2026-02-30\n", ":1: host: not a value: day"),
        (b"host: !!bool maybe\n", ":1: host: not a value: 'maybe'"),
        (b"host: !!timestamp x\n", ":1: host: not a value"),
        (b"[" * 5_000, ":1: nested too deeply"),
        (b"a: &a [*a]\n", ":1: nested too deeply"),
        (b"a: &a {<<: *a}\n", ":1: nested too deeply"),
        (b"a: &a [1]\n<<: *a\n", ":2: <<: expected mappings"),
        (b"host: a\n" + PEERS + b"host: b\n", ":3: host: given twice, first in line 1"),
        (b"host: a\n" + PEERS + b"probe: {flows: 2, flows: 4}\n", r":3: probe\.flows: given twice"),
        (b"host: a\n" + PEERS + b'bus: {key_file: "/a\\ud800\\n"}\n', ":3: bus.key_file is"),
        (b"host: a\n" + PEERS + b"probe: {port: x}\n", r":3: probe\.port: Expected `int`"),
        (b"host: a\n" + PEERS + b"probe:\n  interval: 20\n", r":4: probe\.interval: expected a number with its unit"),
        (b"host: a\n" + PEERS + b"probe:\n  interval: 0ms\n", r":4: probe\.interval is 0s, must be within 1ms and 1m"),
        (b"host: a\n" + PEERS + b"probe:\n  interval_ms: 0\n", r":4: probe\.interval is 0s, must be within"),
        (b"host: a\n" + PEERS + b"probe: {interval_ms: 5, interval: 5ms}\n", ":3: probe.interval_ms: given twice"),
        (b"host: a\n" + PEERS + b"clocks:\n  tolerance: 1.5us\n  window: 1ms\n", r":5: clocks\.window is 1ms"),
        (b"host: a\npeers:\n- name: h2\n  address: ''\n", ":4: peer h2: '' is not an IP address"),
        (b"host: a\npeers:\n- name: h2\n  address: 4\n", r":4: peers\[0\]\.address: Expected `str`"),
    ],
)
def test_it_is_one_line(tmp_path: Path, text: bytes, says: str) -> None:
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_bytes(text)
    with pytest.raises(UsageError, match=says) as raised:
        config.load(file)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"{file}:")


@pytest.mark.parametrize("value", ["!!bool maybe", "!!timestamp x"])
def test_a_policy_says_so_too(value: str) -> None:
    with pytest.raises(InvalidPolicyError, match="not a value"):
        policy_file.parse(f"version: {value}\n")


def test_what_is_merged_may_be_given_anew() -> None:
    assert Reader(aliases=True).read("a: &a {x: 1}\nb: {<<: *a, x: 2}\n") == {"a": {"x": 1}, "b": {"x": 2}}


@given(st.booleans(), st.one_of(st.binary(), st.text("{}[]:-!&*#|>'\"%@`,\n\t ab1.0=<~?").map(str.encode)))
def test_whatever_it_is(aliases: bool, text: bytes) -> None:
    try:
        Reader(aliases).read(decoded(text))
    except NotYamlError as error:
        assert len(str(error).splitlines()) <= 1
        assert 1 <= error.line <= len(text.splitlines()) + 2


def test_what_a_small_file_stands_for_is_limited() -> None:
    ten = (", ".join([f"*a{n - 1}"] * 10) for n in range(1, 12))
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{each}]\n" for n, each in enumerate(ten, 1))
    with pytest.raises(NotYamlError, match="too large"):
        Reader(aliases=True).read(laughs)


def test_of_what_is_merged_the_first_holds() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {x: 2, z: 2}\nc: {<<: [*a, *b], y: 3}\n"
    assert Reader(aliases=True).read(text)["c"] == {"x": 1, "z": 2, "y": 3}


# ---- one file for all hosts ----

FOR_ALL = "peers: [{name: h1, address: 10.9.0.1}, {name: h2, address: 10.9.0.2}, {name: h2, address: 'fd00::2'}]\n"


def written(tmp_path: Path, text: str) -> Path:
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    return file


def test_a_host_that_is_left_out_is_the_one_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_HOST", "h2")
    found = config.load(written(tmp_path, FOR_ALL))
    assert (found.host, found.peers) == ("h2", [Peer("h1", "10.9.0.1")]), "it is not its own peer, in neither family"


@pytest.mark.parametrize("value", [None, ""])
def test_without_that_it_is_the_kernels_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SWERVE_HOST", raising=False)
    if value is not None:
        monkeypatch.setenv("SWERVE_HOST", value)
    assert config.load(written(tmp_path, FOR_ALL)).host == os.uname().nodename


def test_a_name_in_the_file_counts_and_peers_are_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_HOST", "h2")
    found = config.load(written(tmp_path, "host: h1\n" + FOR_ALL))
    assert found.host == "h1" and len(found.peers) == 3, "the bus says that a name is used twice"
    with pytest.raises(UsageError, match="a name has 1 to 255 bytes"):
        config.load(written(tmp_path, "host: ''\n" + FOR_ALL))


def test_the_entry_of_this_host_is_checked_like_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_HOST", "h1")
    with pytest.raises(UsageError, match=r"agent\.yaml:1: peer h1: 'nowhere' is not an IP address"):
        config.load(written(tmp_path, FOR_ALL.replace("10.9.0.1", "nowhere")))
