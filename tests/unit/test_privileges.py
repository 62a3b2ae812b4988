"""What an agent needs: every capability that is missing is named, and root's own includes two of them."""

from __future__ import annotations

import pytest

from pytools.errors import CapabilityError
from pytools.kernel import privileges
from pytools.kernel.privileges import NEEDED

ALL = sum(1 << bit for bit in NEEDED.values())
ADMIN = 1 << 21


@pytest.mark.parametrize("name", NEEDED)
def test_each_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "effective", lambda: ALL & ~(1 << NEEDED[name]))
    with pytest.raises(CapabilityError, match=rf"^the agent has no {name}; run it as root, or grant it"):
        privileges.require()


def test_several_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "effective", lambda: 0)
    with pytest.raises(CapabilityError, match="no CAP_NET_ADMIN and no CAP_NET_RAW and no CAP_PERFMON and no CAP_BPF"):
        privileges.require()


@pytest.mark.parametrize("mask", [ALL, None])
def test_with_all_of_them_or_none_known_it_goes_on(mask: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privileges, "effective", lambda: mask)
    privileges.require()


def test_the_kernel_takes_cap_sys_admin_for_two_of_them() -> None:
    assert privileges.missing(ADMIN) == ["CAP_NET_ADMIN", "CAP_NET_RAW"]
