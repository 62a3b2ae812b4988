"""Before a program is loaded: the text that the compiling child makes of it, and what Python repeats of swerve.h."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import support

from pytools.errors import SwerveError
from pytools.kernel.bpf import compiler, contract
from pytools.lab import clocks
from pytools.sources.rdma import table
from pytools.sources.samples import source as samples
from pytools.sources.tcp import rows
from steering.actuators import pins


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "prog").mkdir()
    (tmp_path / "plain.h").write_text("int plain;\n")
    (tmp_path / "prog/first.h").write_text('#ifndef FIRST\n#define FIRST\n#include "plain.h"\nint first;\n#endif\n')
    (tmp_path / "prog/second.h").write_text('#include "prog/first.h"\n\nint second = __LINE__;\nint wrong = nowhere;\n')
    (tmp_path / "prog.c").write_text(
        '#include "plain.h"\n#include "prog/first.h"\n#include "prog/second.h"\nint last = nosuch;\n'
    )
    return tmp_path


def test_parts_stand_in_the_text_and_other_headers_are_included(sources: Path) -> None:
    lines = list(compiler.whole("prog.c", str(sources)))
    assert lines.count('#include "plain.h"') == 3, "of the program once, and of the part that is named twice"
    assert lines.count("int first;") == 2, "the guard in it takes one out"
    assert lines.count("int second = __LINE__;") == 1
    assert not [line for line in lines if "prog/" in line and line.startswith("#include")]


def test_what_is_wrong_is_told_by_its_own_file_and_line(sources: Path) -> None:
    support.require("gcc")
    text = "\n".join(compiler.whole("prog.c", str(sources)))
    command = ["gcc", "-x", "c", "-fsyntax-only", f"-I{sources}", "-"]
    said = subprocess.run(command, input=text, capture_output=True, text=True, check=False).stderr
    assert [line.partition(": error")[0].rpartition(":")[0] for line in said.splitlines() if ": error" in line] == [
        "prog/second.h:4",
        "prog.c:4",
    ]


# ---- what is needed before anything is loaded is what stands in bpf/swerve.h ----


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
