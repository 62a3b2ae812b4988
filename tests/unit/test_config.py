"""The agent's configuration: what makes no sense is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytools import config
from pytools.config import AgentConfig, Peer, checked
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
