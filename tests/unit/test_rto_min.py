"""Which minimum RTO routes of ours get: what this kernel can time, and never more than connections have without it."""

import re

import pytest
from steering_kit import MS, POLICY
from support import mentions

from pytools.errors import RefusedError
from steering.actuators import rto_min
from steering.commands import status
from steering.policy.file import parse


def chosen(wanted):
    return rto_min.chosen(parse(POLICY.replace("10.9.0.0/16]", f"10.9.0.0/16]{wanted}")).manage)


@pytest.fixture
def setting(monkeypatch, tmp_path):
    monkeypatch.setattr(rto_min, "_SETTING", tmp_path / "tcp_rto_min_us")
    monkeypatch.setattr(rto_min, "_tick_ns", lambda: 4 * MS)
    return tmp_path / "tcp_rto_min_us"


def test_what_the_policy_names_is_chosen_and_the_kernels_own_is_known(setting):
    assert chosen(", rto_min: 20ms") == rto_min.Chosen(20, 200)
    setting.write_text("100000\n")
    assert chosen(", rto_min: 20ms") == rto_min.Chosen(20, 100)
    assert chosen("") == rto_min.Chosen(0, 100)


def test_two_ticks_are_the_least(setting):
    assert chosen(", rto_min: 8ms").milliseconds == 8
    with pytest.raises(RefusedError, match="7 ms is less than two timer ticks of this kernel") as refused:
        chosen(", rto_min: 7ms")
    assert "8 ms or more" in str(refused.value.next_step)


@pytest.mark.parametrize("has_us", [10_000, 20_000])
def test_what_connections_have_is_never_raised(setting, has_us):
    setting.write_text(str(has_us))
    found = chosen(", rto_min: 20ms")
    assert found.milliseconds == 0 and re.search(r"already \(net.ipv4.tcp_rto_min_us\)", found.why_not)


def test_the_tick_of_this_kernel_is_known():
    assert rto_min._tick_ns() in {10 * MS, 4 * MS, 10 * MS // 3, 1 * MS}  # CONFIG_HZ 100, 250, 300, 1000


@pytest.mark.parametrize(
    ("facts", "said", "unsaid"),
    [
        ({"rto_min_ms": 20}, ("minimum RTO", "20 ms"), "wanted"),
        ({"rto_min_wanted_ms": 20, "apply": True}, ("minimum RTO", "20 ms", "wanted"), "dry run"),
        ({"rto_min_wanted_ms": 20}, ("minimum RTO", "20 ms", "wanted", "dry run"), "no minimum"),
        ({"rto_min_missing": "connections have 10 ms already"}, ("no minimum RTO", "connections have 10 ms"), "20"),
    ],
)
def test_the_status_says_it(facts, said, unsaid):
    [line] = status._rto_min(facts)
    assert mentions(line, *said) and unsaid not in line
