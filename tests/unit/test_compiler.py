"""The compiling child's text of a program: its parts stand in it, and each line keeps its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import support

from pytools.kernel.bpf import compiler


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
