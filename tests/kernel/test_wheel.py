"""The installed wheel carries the C sources and works outside the checkout, in an environment of its own."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from support import ROOT, require, run

LOAD = """
import pathlib, sys
import pytools, steering
from pytools.kernel.bpf import loader
assert str(pathlib.Path(sys.prefix)) in pytools.__file__, pytools.__file__
names = ("probe_egress", "probe_ingress")
with loader.load([loader.Program("probe.c", names)]) as loaded:
    assert set(loaded.programs) == set(names) and not loaded.failed, loaded.failed
print(loader.bpf_dir())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that the checkout stays as it is."""
    require("wheel")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pytools", "steering", "bpf", "LICENSES"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, copy]
    run(build, timeout_s=120)
    (built,) = out.glob("swerve-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the wheel in it; what it depends on is lent by this one through the path."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", place], timeout_s=120)
    pip = [sys.executable, "-m", "pip", "--python", place / "bin/python"]
    run([*pip, "install", "--no-deps", "--no-index", wheel], timeout_s=120)
    return place


def lent() -> dict[str, str]:
    """The environment variable that lends this environment's packages, which come after the wheel's own."""
    return {"PYTHONPATH": sysconfig.get_path("purelib"), "PYTHONSAFEPATH": "1"}


def test_programs_load_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    require("bcc", "tracefs")
    done = run([installed / "bin/python", "-c", LOAD], cwd=tmp_path, env={**lent(), "SWERVE_CACHE_DIR": str(tmp_path)})
    sources = Path(done.stdout.strip())
    assert sources.is_relative_to(installed)
    assert {path.relative_to(ROOT / "bpf") for path in (ROOT / "bpf").rglob("*.[ch]")} == {
        path.relative_to(sources) for path in sources.rglob("*.[ch]")
    }


def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    require("bcc", "tracefs")
    done = run([installed / "bin/swerve", "doctor", "-j"], cwd=tmp_path, env=lent(), check=False)
    assert "Traceback" not in done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()], done.stderr
