#!/usr/bin/env python3
"""Build the Debian package: dist/swerve_VERSION_ARCHITECTURE.deb.

    python scripts/build_deb.py [--out dist]

The package holds an environment of its own in /usr/lib/swerve (docs/service.md says why), laid out as `python3 -m venv
--system-site-packages` would: processes that swerve starts find the same one. Templates and lists are in packaging/.
The same sources give the same bytes: every time is that of the changelog's newest entry.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import manpages
import vendored
from click.shell_completion import get_completion_class

from pytools.kernel import native
from steering.cli import root

ROOT: Final = vendored.ROOT
PACKAGING: Final = ROOT / "packaging"
HOME: Final = Path("usr/lib/swerve")
SITE: Final = HOME / f"lib/python3.{sys.version_info.minor}/site-packages"
DOCUMENTS: Final = Path("usr/share/doc/swerve")
COMPLETIONS: Final = {  # the shell -> where its packages look for what others bring
    "bash": Path("usr/share/bash-completion/completions/swerve"),
    "zsh": Path("usr/share/zsh/vendor-completions/_swerve"),
    "fish": Path("usr/share/fish/vendor_completions.d/swerve.fish"),
}
DEPENDS: Final = (
    f"python3 (>= 3.{sys.version_info.minor})",  # compiled modules fit this one alone
    f"python3 (<< 3.{sys.version_info.minor + 1})",
    *vendored.FROM_DEBIAN.values(),
    "iproute2",
    "procps",  # /bin/kill, by which systemd reloads the agent
)
LAUNCHER: Final = f"""#!/{HOME}/bin/python3 -I
from steering.cli import main

main()
"""
ENVIRONMENT: Final = f"""home = /usr/bin
include-system-site-packages = true
version = 3.{sys.version_info.minor}
"""
UNITS: Final = frozenset({".service", ".socket", ".target", ".timer", ".path"})
SCRIPTS: Final = ("postinst", "prerm", "postrm")


def write(place: Path, data: str | bytes) -> None:
    """A file, and the directories that it is in."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data.encode() if isinstance(data, str) else data)


def compressed(data: bytes) -> bytes:
    """As Debian compresses documents: the best, without time or name."""
    return gzip.compress(data, 9, mtime=0)


def built(tree: Path, made: native.Native) -> Path:
    """Where something of ours that is compiled lies in the package."""
    return tree / SITE / made.target.relative_to(ROOT)


def put_python(tree: Path, wheels: list[Path]) -> None:
    """The environment: its packages, what is compiled of ours, the launcher.

    Raises
    ------
    SystemExit
        If the wheels are not all that is needed.
    """
    for wheel in wheels:
        vendored.unpack(wheel, tree / SITE)
    if wrong := vendored.missing(tree / SITE):
        raise SystemExit("\n".join([*wrong, "lock what this environment has: scripts/vendored.py"]))
    for each in native.ALL:
        subprocess.run(["strip", "--strip-unneeded", each.build(built(tree, each))], check=True)
    write(tree / HOME / "pyvenv.cfg", ENVIRONMENT)
    write(tree / HOME / "bin/swerve", LAUNCHER)
    (tree / HOME / "bin/python3").symlink_to("../../../bin/python3")
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/swerve").symlink_to("../lib/swerve/bin/swerve")


def put_documents(tree: Path) -> None:
    """Man pages, completion, pages, examples, licences."""
    for page in manpages.pages():
        write(tree / "usr/share/man" / f"{page.path}.gz", compressed(page.text.encode()))
    for shell, place in COMPLETIONS.items():
        write(tree / place, completion(shell))
    for name in ("docs", "examples"):  # beside each other as in the checkout: links between them hold
        shutil.copytree(ROOT / name, tree / DOCUMENTS / name)
    write(tree / DOCUMENTS / "README.md", (ROOT / "README.md").read_bytes())
    write(tree / DOCUMENTS / "changelog.gz", compressed(manpages.CHANGELOG.read_bytes()))
    bsd = "".join(f"  {line}".rstrip() + "\n" for line in (ROOT / "LICENSES/BSD-2-Clause.txt").read_text().splitlines())
    told = (PACKAGING / "copyright").read_text().format(bsd=bsd, vendored=vendored.described(tree / SITE).rstrip())
    write(tree / DOCUMENTS / "copyright", told.rstrip() + "\n")
    write(tree / "usr/share/lintian/overrides/swerve", (PACKAGING / "lintian-overrides").read_bytes())
    (tree / "etc/swerve").mkdir(parents=True)


def completion(shell: str) -> str:
    """What a shell reads once; swerve itself is asked when the key is pressed."""
    found = get_completion_class(shell)
    assert found is not None, shell
    return found(root, {}, "swerve", "_SWERVE_COMPLETE").source()


def put_units(tree: Path) -> None:
    """What is in packaging/systemd: units, users and directories. Nothing enables or starts them.

    Raises
    ------
    SystemExit
        If there is a file of another kind: it would be left out in silence.
    """
    for file in sorted((PACKAGING / "systemd").glob("*")):
        if file.suffix in UNITS:
            write(tree / "usr/lib/systemd/system" / file.name, file.read_bytes())
        elif file.suffix in (".sysusers", ".tmpfiles"):
            write(tree / "usr/lib" / f"{file.suffix[1:]}.d" / f"{file.stem}.conf", file.read_bytes())
        elif file.suffix != ".md":
            raise SystemExit(f"{file.relative_to(ROOT)}: no place is known for it")


def put_control(tree: Path, arch: str, depends: str) -> None:
    """What dpkg reads: the description, the sums, the scripts."""
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    files = [path for path in files if "DEBIAN" not in path.relative_to(tree).parts]
    entry = manpages.CHANGELOG.read_text()
    facts = {
        "version": manpages.release(entry).version,
        "architecture": arch,
        "maintainer": entry.partition("\n -- ")[2].partition("  ")[0],
        "installed_kib": sum(-(-path.stat().st_size // 1024) for path in files),
        "depends": depends,
    }
    control = tree / "DEBIAN"
    write(control / "control", (PACKAGING / "control").read_text().format(**facts))
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n" for path in files)
    write(control / "md5sums", "".join(sums))
    for name in SCRIPTS:
        write(control / name, (PACKAGING / name).read_bytes())


def settle(tree: Path, epoch_s: int) -> None:
    """Modes and times, whatever the umask and the clock of the machine that builds."""
    programs = {tree / HOME / "bin/swerve", built(tree, native.PACER), *(tree / "DEBIAN" / name for name in SCRIPTS)}
    for path in [tree, *tree.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path in programs else 0o644)
        os.utime(path, (epoch_s, epoch_s), follow_symlinks=False)


def shared_libraries(tree: Path) -> str:
    """The Debian packages, with versions, that hold what the compiled modules are linked with."""
    libraries = [path for path in (tree / SITE).rglob("*.so*") if path.name != native.TAP.target.name]
    libraries += [path for path in (built(tree, native.PACER),) if path.exists()]
    if not libraries:
        return ""
    (tree / "DEBIAN").mkdir(exist_ok=True)  # by it dpkg-shlibdeps knows the tree
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory) / "debian/control", "Source: swerve\n\nPackage: swerve\nArchitecture: any\n")
        beside = sorted({f"-l{path.parent}" for path in libraries})
        done = subprocess.run(
            ["dpkg-shlibdeps", "-O", "--warnings=0", *beside, *libraries],
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout.strip().removeprefix("shlibs:Depends=")


def own_wheel(target: Path) -> Path:
    """Ours, by way of the source distribution; from a copy, so that neither an earlier build nor one beside gets in.

    Raises
    ------
    SystemExit
        If it cannot be built.
    """
    with tempfile.TemporaryDirectory() as directory:
        for name in ("pytools", "steering", "bpf", "LICENSES"):
            unwanted = shutil.ignore_patterns("__pycache__", *(each.target.name for each in native.ALL))
            shutil.copytree(ROOT / name, Path(directory, name), symlinks=True, ignore=unwanted)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, directory)
        command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={target}", directory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the wheel cannot be built:\n{(done.stdout + done.stderr)[-1000:]}")
    (wheel,) = target.glob("swerve-*.whl")
    return wheel


def build(out: Path) -> Path:
    """The package; returns where it is."""
    arch, made = vendored.architecture(), manpages.release(manpages.CHANGELOG.read_text())
    with tempfile.TemporaryDirectory(prefix="swerve-deb-") as directory:
        tree, wheels, own = (Path(directory) / name for name in ("tree", "wheels", "own"))
        for each in (tree, wheels, own):
            each.mkdir()
        put_python(tree, [*vendored.fetch(arch, wheels), own_wheel(own)])
        put_documents(tree)
        put_units(tree)
        linked = shared_libraries(tree)
        put_control(tree, arch, ", ".join(each for each in (*DEPENDS, linked) if each))
        settle(tree, made.epoch_s)
        out.mkdir(parents=True, exist_ok=True)
        package = out / f"swerve_{made.version}_{arch}.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "--build", tree, package],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(made.epoch_s)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return package


def main() -> int:
    """Build it, and say where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="Directory (dist).")
    for tool, package in (("dpkg-deb", "dpkg"), ("dpkg-shlibdeps", "dpkg-dev"), ("strip", "binutils")):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is missing; apt-get install {package}")
    print(build(parser.parse_args().out.absolute()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
