"""The agent's configuration: what makes no sense is refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytools import config
from pytools.config import AgentConfig, Clocks, Peer, Probe, checked
from pytools.errors import CapabilityError, UsageError
from steering.policy import file as policy_file


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
    if config.key_of(name) != name
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
    assert hint.startswith(f"line 4: write {section}.{name}: 600 as {section}.{config.key_of(name)}: ")
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
