"""What `doctor` says of the spreading of flows: each family by itself, whatever its setting holds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support import mentions

from pytools.doctor.checks import Check, checks
from pytools.kernel import features
from pytools.kernel.features import Finding

POLICY_4, POLICY_6 = (f"net.{family}.fib_multipath_hash_policy" for family in ("ipv4", "ipv6"))
FIELDS_4 = "net.ipv4.fib_multipath_hash_fields"


def hashing(namespace: str | None) -> list[Check]:
    return [each for each in checks(namespace, None, []) if each.name.startswith("ECMP")]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch):
    """Findings by check, under settings and with routes of these families."""

    def find(settings: Mapping[str, str], routed: tuple[str, ...] = ("ipv4", "ipv6")) -> dict[str, Finding]:
        monkeypatch.setattr(features, "setting", lambda name: settings.get(name, ""))
        monkeypatch.setattr(features, "routed", lambda family: family in routed)
        return {check.name.rpartition(" ")[2]: check.find() for check in hashing(None)}

    return find


def test_one_family_says_nothing_of_the_other(found) -> None:
    said = found({POLICY_4: "1", POLICY_6: "0"})
    assert said == {"IPv4": Finding(True, f"{POLICY_4} is 1"), "IPv6": Finding(False, f"{POLICY_6} is 0")}
    said = found({POLICY_4: "0", POLICY_6: "1"})
    assert (said["IPv4"].present, said["IPv6"].present) == (False, True)


def test_a_family_that_is_not_used_is_no_gap(found) -> None:
    said = found({POLICY_4: "1", POLICY_6: "0"}, routed=("ipv4",))
    assert said["IPv6"].present is None and mentions(said["IPv6"].detail, f"{POLICY_6} is 0", "no IPv6 route")
    said = found({POLICY_4: "1"})
    assert said["IPv6"].present is None and mentions(said["IPv6"].detail, "kernel", f"no {POLICY_6}")


@pytest.mark.parametrize(
    ("settings", "present"),
    [
        ({POLICY_4: "2"}, False),  # by the addresses inside tunnels
        ({POLICY_4: "3", FIELDS_4: "0x0007"}, False),  # as the kernel has them at first: no ports
        ({POLICY_4: "3", FIELDS_4: "0x0017"}, False),  # the source port alone
        ({POLICY_4: "3", FIELDS_4: "0x0037"}, True),
    ],
)
def test_only_what_takes_both_ports_in_spreads_by_ports(found, settings: dict[str, str], present: bool) -> None:
    assert found(settings)["IPv4"].present is present


def test_the_mend_is_of_the_family_and_of_the_namespace() -> None:
    assert [each.mend for each in hashing(None)] == [
        f"sysctl -w {POLICY_4}=1",
        f"sysctl -w {POLICY_6}=1",
    ]
    assert hashing("nc-a")[1].mend == f"ip netns exec nc-a sysctl -w {POLICY_6}=1"
    costs = [each.costs for each in hashing(None)]
    assert "IPv4" in costs[0] and "IPv6" in costs[1]
