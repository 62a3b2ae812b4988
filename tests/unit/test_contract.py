"""What Python repeats of bpf/swerve.h, where it is needed before anything is loaded, is what stands there."""

from __future__ import annotations

import pytest

from pytools.errors import SwerveError
from pytools.kernel.bpf import contract
from pytools.lab import clocks
from pytools.sources.rdma import table
from pytools.sources.samples import source as samples
from pytools.sources.tcp import rows
from steering.actuators import pins


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("SWERVE_KNOTS", clocks.KNOTS),
        ("SWERVE_KNOT_SHIFT", clocks.KNOT_SHIFT),
        ("SWERVE_FAMILY_IPV4", pins.FAMILIES[4]),
        ("SWERVE_FAMILY_IPV6", pins.FAMILIES[6]),
        ("SWERVE_SAMPLE_EGRESS", samples.EGRESS),
        ("SWERVE_SAMPLE_INGRESS", samples.INGRESS),
        ("SWERVE_TCP_CLOSED", rows.CLOSED),
        ("SWERVE_QP_FREE", table.FREE),
        ("SWERVE_QP_LIVE", table.LIVE),
        ("SWERVE_QP_CLOSED", table.CLOSED),
        ("SWERVE_DEVICE_BYTES", table.DEVICE_LETTERS + 1),
    ],
)
def test_a_number_is_the_same_on_both_sides(name: str, here: int) -> None:
    assert contract.constant(name) == here


@pytest.mark.parametrize("program_name", ["probe", "sample", "tcp", "steer", "lab", "rdma"])
def test_each_counter_has_its_index(program_name: str) -> None:
    names = contract.counters(program_name)
    prefix = f"SWERVE_{program_name.upper()}_"
    assert [contract.constant(f"{prefix}{name.upper()}") for name in names] == list(range(len(names)))
    assert contract.constant(f"{prefix}COUNTERS") == len(names)


def test_what_is_not_defined_is_said() -> None:
    with pytest.raises(SwerveError, match="does not define SWERVE_NOTHING"):
        contract.constant("SWERVE_NOTHING")
    with pytest.raises(SwerveError, match="no counters of nothing"):
        contract.counters("nothing")
