"""The source distribution and the wheel made from it carry all that a checkout has and a user needs."""

from __future__ import annotations

import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support import ROOT, require, run

from pytools.kernel import native

pytestmark = pytest.mark.slow

MADE_THERE = (".pyc", ".so")  # by Python, and by the tap's first use


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, built from a copy, the wheel from the unpacked source distribution: as any user gets it."""
    require("wheel")
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pytools", "steering", "bpf", "LICENSES"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy], timeout_s=110)
    return out


COMPILED = {made.target.resolve() for made in native.ALL}


def of_the_checkout() -> set[str]:
    """Every file of both packages, those of the kernel programs through the link that leads to them."""
    found = set()
    for place, name in ((ROOT / "pytools", "pytools"), (ROOT / "steering", "steering"), (ROOT / "bpf", "pytools/bpf")):
        inside = (path for path in place.rglob("*") if path.is_file() and path.suffix not in MADE_THERE)
        inside = (path for path in inside if path.resolve() not in COMPILED)
        found |= {f"{name}/{path.relative_to(place).as_posix()}" for path in inside}
    return found


def test_the_wheel_has_every_file_and_no_other(built: Path) -> None:
    (wheel,) = built.glob("swerve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        texts = {Path(name).name for name in archive.namelist() if ".dist-info/" in name}
    assert there == of_the_checkout()
    assert {path.name for path in (ROOT / "LICENSES").iterdir()} <= texts
    assert wheel.name.endswith("-py3-none-any.whl")  # the kernel programs are compiled where they run


def test_the_source_distribution_has_them_too(built: Path) -> None:
    (source,) = built.glob("swerve-*.tar.gz")
    with tarfile.open(source) as archive:
        there = {member.name.split("/", 1)[-1] for member in archive.getmembers() if member.isfile()}
        links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    wanted = of_the_checkout() | {"pyproject.toml", "README.md"}
    wanted |= {f"LICENSES/{path.name}" for path in (ROOT / "LICENSES").iterdir()}
    assert wanted - there == set() and not links
