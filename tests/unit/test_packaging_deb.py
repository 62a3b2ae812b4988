"""The Debian package as a tree and as a file; the wheels that go into it are made up here."""

from __future__ import annotations

import functools
import gzip
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import build_deb
import manpages
import pytest
import vendored
from support import ROOT, run

from pytools import cli, directories
from pytools.kernel.native import TAP, Native
from steering.cli import root

pytestmark = pytest.mark.slow

SWERVE = {
    "pytools/__init__.py": "",
    "pytools/sources/rdma/tap/tap.c": "int x;\n",
    "pytools/sources/probing/pacer.c": "int x;\n",
    "pytools/sources/jobs/nccl/plugin.c": "int x;\n",
    "steering/cli.py": "def main(): pass\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    """Makes a wheel with these files, as a package index would serve it."""
    return functools.partial(_wheel, tmp_path)


def _wheel(directory: Path, name: str, files: Mapping[str, str], *requires: str) -> Path:
    place = directory / f"{name}-1.0-py3-none-any.whl"
    facts = [f"Name: {name}", "Version: 1.0", "License-Expression: MIT", *(f"Requires-Dist: {x}" for x in requires)]
    info = f"{name}-1.0.dist-info"
    recorded = {**files, f"{info}/METADATA": "Metadata-Version: 2.4\n" + "\n".join(facts) + "\n"}
    recorded[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in recorded)
    with zipfile.ZipFile(place, "w") as archive:
        for path, text in recorded.items():
            archive.writestr(path, text)
    return place


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of two wheels, and a tap that needs no compiler."""
    _make_up(tmp_path, monkeypatch)


def _make_up(directory: Path, patch: pytest.MonkeyPatch) -> None:
    swerve = _wheel(directory, "swerve", SWERVE, "helper>=1", "PyYAML>=6")
    helper = _wheel(directory, "helper", {"helper/__init__.py": "X = 1\n", "helper-1.0.dist-info/LICENSE": "MIT\n"})

    def build(_: Native, target: Path) -> Path:
        shutil.copy("/usr/bin/true", target)
        return target

    patch.setattr(vendored, "fetch", lambda arch, target: [helper])
    patch.setattr(build_deb, "own_wheel", lambda target: swerve)
    patch.setattr(Native, "build", build)
    patch.setattr(build_deb.subprocess, "run", _without_strip(subprocess.run))


def _without_strip(real: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., object]:
    return lambda command, **rest: None if command[0] == "strip" else real(command, **rest)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built package, unpacked, for all tests that only read it; DEBIAN holds what dpkg reads."""
    directory = tmp_path_factory.mktemp("package")
    with pytest.MonkeyPatch.context() as patch:
        _make_up(directory, patch)
        place = build_deb.build(directory / "out")
    run(["dpkg-deb", "--raw-extract", place, directory / "tree"])
    return directory / "tree"


def fields(tree: Path) -> dict[str, str]:
    lines = (tree / "DEBIAN/control").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith(" "))


def test_the_command_runs_in_the_packages_own_environment(package: Path) -> None:
    home = package / build_deb.HOME
    assert (package / "usr/bin/swerve").resolve() == (home / "bin/swerve").resolve()
    first, *_ = (home / "bin/swerve").read_text().splitlines()
    assert first == "#!/usr/lib/swerve/bin/python3 -I"  # neither the user's modules nor PYTHONPATH
    assert os.path.normpath(f"/{build_deb.HOME}/bin/{os.readlink(home / 'bin/python3')}") == "/usr/bin/python3"
    assert "include-system-site-packages = true" in (home / "pyvenv.cfg").read_text()
    site = package / build_deb.SITE
    tap = site / "pytools/sources/rdma/tap"
    assert (tap / "tap.c").exists() and (site / "helper/__init__.py").exists()
    assert (tap / TAP.target.name).stat().st_mtime >= (tap / "tap.c").stat().st_mtime


def test_nothing_outside_its_places_is_touched(package: Path) -> None:
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if not path.is_dir()}
    outside = {
        each
        for each in files
        if not each.startswith(("DEBIAN/", "usr/lib/swerve/", "usr/share/", "usr/lib/systemd/", "usr/lib/sysusers.d/"))
    }
    assert outside - {"usr/bin/swerve", "usr/lib/tmpfiles.d/swerve.conf"} == set()
    assert list((package / "etc/swerve").iterdir()) == []


def test_what_dpkg_reads(package: Path) -> None:
    told = fields(package)
    made = manpages.release(manpages.CHANGELOG.read_text())
    assert (told["Package"], told["Version"]) == ("swerve", made.version)
    assert told["Architecture"] == vendored.architecture()
    depends = told["Depends"].split(", ")
    assert {"python3-yaml", "iproute2"} <= set(depends)
    assert {"python3-bpfcc", "linux-libc-dev"} <= set(told["Recommends"].split(", ")), "not on a host that imports"
    minor = sys.version_info.minor
    assert {f"python3 (>= 3.{minor})", f"python3 (<< 3.{minor + 1})"} <= set(depends)
    run(["md5sum", "--check", "--strict", "--quiet", "DEBIAN/md5sums"], cwd=package)
    summed = {line.split("  ", 1)[1] for line in (package / "DEBIAN/md5sums").read_text().splitlines()}
    there = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert summed == {each for each in there if not each.startswith("DEBIAN/") and not (package / each).is_symlink()}


def test_what_the_units_run_comes_with_the_package(package: Path) -> None:
    depends = set(fields(package)["Depends"].split(", "))
    units = [path.read_text() for path in (package / "usr/lib/systemd/system").glob("*.service")]
    programs = {found for text in units for found in re.findall(r"^Exec\w+=[-+]*(/\S+)", text, re.MULTILINE)}
    assert {"/usr/bin/swerve", "/bin/kill"} <= programs
    for program in programs - {"/usr/bin/swerve"}:
        owner = run(["dpkg-query", "--search", program]).stdout.partition(":")[0]
        assert owner in depends, f"{program} is of {owner}, which a small Debian lacks"


@pytest.mark.parametrize("name", build_deb.SCRIPTS)
def test_scripts_are_shell_and_start_nothing(package: Path, name: str) -> None:
    script = package / "DEBIAN" / name
    run(["sh", "-n", script])
    assert script.stat().st_mode & stat.S_IXUSR
    said = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    assert not any(re.search(r"\b(start|restart|enable|reload-or|bin/swerve)\b", line) for line in said)


def test_modes_do_not_depend_on_the_builder(made_up: None, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        place = build_deb.build(tmp_path / "out")
    finally:
        os.umask(before)
    listed = run(["dpkg-deb", "--contents", place]).stdout.splitlines()
    assert {line.split()[0] for line in listed} == {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx"}
    assert {line.split()[1] for line in listed} == {"root/root"}
    programs = [line.split()[5].removeprefix("./usr/lib/swerve/") for line in listed if line.startswith("-rwx")]
    assert len(programs) == 2 and programs[0] == "bin/swerve" and programs[1].endswith("probing/swerve-pacer")


def test_every_time_is_the_changelogs(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "usr").mkdir(parents=True)
    (tree / "usr/old").touch()
    (tree / "usr/link").symlink_to("old")
    os.utime(tree / "usr/old", (1, 1))  # as in a checkout of long ago
    build_deb.settle(tree, 1_000_000)
    assert {path.lstat().st_mtime for path in (tree, *tree.rglob("*"))} == {1_000_000}


def test_the_same_sources_give_the_same_bytes(made_up: None, tmp_path: Path) -> None:
    first, second = (build_deb.build(tmp_path / name).read_bytes() for name in ("one", "two"))
    assert first == second


def test_documents_are_where_people_look(package: Path) -> None:
    shared = package / "usr/share"
    pages = {path.name for path in shared.glob("man/man?/*.gz")}
    assert pages == {f"{page.name}.{page.section}.gz" for page in manpages.pages()}
    assert gzip.decompress((shared / "man/man1/swerve.1.gz").read_bytes()).startswith(b'.TH "SWERVE" 1 ')
    documents = shared / "doc/swerve"
    assert (documents / "examples/agent.yaml").read_bytes() == (ROOT / "examples/agent.yaml").read_bytes()
    assert documents / "docs" == package / directories.PAGES[-1].relative_to("/"), "where errors say that pages are"
    assert (documents / "docs/config.md").exists() and (documents / "README.md").exists()
    told = (documents / "copyright").read_text()
    assert "helper 1.0\n  License: MIT\n" in told and "Redistribution and use" in told
    assert "GPL-2.0-only OR BSD-2-Clause" in told and "common-licenses/Apache-2.0" in told
    assert all((package / line.strip().lstrip("/")).is_dir() for line in told.splitlines() if "dist-info" in line)


@pytest.mark.parametrize("shell", build_deb.COMPLETIONS)
def test_completion_is_where_each_shell_looks(package: Path, shell: str) -> None:
    text = (package / build_deb.COMPLETIONS[shell]).read_text()
    assert f"_SWERVE_COMPLETE={shell}_complete" in text
    if shell == "bash":
        run(["bash", "-n", package / build_deb.COMPLETIONS[shell]])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("swerve del", "delay"),
        ("swerve steer dr", "drain"),
        ("swerve lab bl", "blackhole"),
        ("swerve tcp --so", "--sort"),
    ],
)
def test_the_shell_gets_what_could_follow(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SWERVE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        cli.run(root, [])
    assert capfd.readouterr().out.split() == [f"plain,{expected}"]


def test_units_are_carried_and_not_enabled(
    made_up: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Callable[..., Path]
) -> None:
    places = tmp_path / "packaging"
    shutil.copytree(build_deb.PACKAGING, places)
    shutil.rmtree(places / "systemd", ignore_errors=True)
    (places / "systemd").mkdir()
    for name in ("swerve-agent.service", "swerve.sysusers", "swerve.tmpfiles", "README.md"):
        (places / "systemd" / name).write_text("x\n")
    monkeypatch.setattr(build_deb, "PACKAGING", places)
    tree = tmp_path / "units"
    build_deb.put_units(tree)
    assert {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()} == {
        "usr/lib/systemd/system/swerve-agent.service",
        "usr/lib/sysusers.d/swerve.conf",
        "usr/lib/tmpfiles.d/swerve.conf",
    }
    monkeypatch.setattr(build_deb, "ROOT", tmp_path)
    (places / "systemd" / "swerve.preset").write_text("enable *\n")
    with pytest.raises(SystemExit, match=r"packaging/systemd/swerve\.preset: no place is known"):
        build_deb.put_units(tree)


@pytest.mark.parametrize(
    ("files", "requires", "said"),
    [
        ({"helper-1.0.data/scripts/f2x": "x"}, (), "does not go below site-packages"),
        ({"../outside": "x"}, (), "does not go below site-packages"),
        ({"/outside": "x"}, (), "does not go below site-packages"),
        ({}, ("nowhere>=2",), r"helper needs nowhere>=2, here is none"),
        ({}, ("swerve>=2",), r"helper needs swerve>=2, here is 1\.0"),
    ],
)
def test_a_wheel_that_does_not_fit_is_said(
    made_up: None,
    wheel: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    requires: tuple[str, ...],
    said: str,
) -> None:
    bad = wheel("helper", files, *requires)
    monkeypatch.setattr(vendored, "fetch", lambda arch, target: [bad])
    with pytest.raises(SystemExit, match=said):
        build_deb.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture_has_to_be_locked_first(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"packaging/vendored\.m68k\.txt is missing; make it with: scripts/vendored"):
        vendored.fetch("m68k", tmp_path)
