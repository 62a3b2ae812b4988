"""What a user without privileges is told: one line, and exit code 5. Needs root, to become somebody else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import ROOT, SWERVE

NOBODY = 65534


@pytest.mark.parametrize(
    "words",
    [
        ("top", "-n", "x"),
        ("self", "-n", "x"),
        ("replay", "-n", "x"),
        ("steer", "status", "-n", "x"),
        ("lab", "show", "--name", "x"),
    ],
    ids=" ".join,
)
def test_what_is_roots_is_refused_in_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    for place in ("run/x", "run/labs", "state/x/recording"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "run" / "x" / "agent.sock").touch()
    (tmp_path / "state" / "x" / "lock").touch(mode=0o600)
    (tmp_path / "run" / "labs" / "x.json").touch(mode=0o600)
    for private in (tmp_path / "run" / "x", tmp_path / "run" / "labs", tmp_path / "state" / "x"):
        private.chmod(0o700)
    environment = {"SWERVE_RUNTIME_DIR": f"{tmp_path}/run", "SWERVE_STATE_DIR": f"{tmp_path}/state"}
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    done = subprocess.run(
        [*SWERVE, *words], capture_output=True, text=True, cwd=ROOT, check=False,
        user=NOBODY, group=NOBODY, extra_groups=[], env={**os.environ, **environment},
    )  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1), done.stderr
    assert done.stderr.startswith("swerve: ") and "root" in done.stderr
