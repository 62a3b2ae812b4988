"""Tests in another of Debian's kernels: fetched with apt, unpacked, booted under virtme-ng; nothing is installed.

Prints JSON Lines, one a test and one of the whole at the end; run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/vm")]

import _debian  # noqa: E402
import guest  # noqa: E402
import support  # noqa: E402

NAME: Final = re.compile(r"^linux-image-((\d+)\.(\d+)[.0-9]*\+deb\d+-amd64) ", re.MULTILINE)
LAST: Final = (6, 18)  # later ones are untried


def prove(file: str, suite: str, first: tuple[int, int], tests: Callable[[], Sequence[str]]) -> int:
    """Run these tests in the newest kernel of a suite that is tried; 1 if one of them does not pass.

    Parameters
    ----------
    file : str
        The proof, which runs again in a mount namespace of its own.
    suite : str
        Of the Debian archive.
    first : tuple of int
        The oldest release that will do.
    tests : callable
        Lists the tests.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, help="where to keep what is fetched, or where it was kept")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the guests")
    parser.add_argument("--only", default="", metavar="TEXT", help="only tests whose name contains TEXT")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if lacking := support.missing("second kernel"):
        print(f"missing: {lacking}", file=sys.stderr)
        return 1
    if options.inside:
        return _boot(options.inside, options.limit, [test for test in tests() if options.only in test])

    def newest(kernels: str) -> list[str]:
        found = {(int(major), int(minor)): name for name, major, minor in NAME.findall(kernels)}
        return [f"linux-image-{found[max(version for version in found if first <= version <= LAST)]}"]

    with tempfile.TemporaryDirectory(prefix="swerve-kernel-") as folder:
        [image] = _debian.unpacked(options.packages or Path(folder), suite, newest).glob("boot/vmlinuz-*")
        again = [sys.executable, file, "--inside", str(image), "--limit", str(options.limit), "--only", options.only]
        return subprocess.run(["unshare", "-m", *again], check=False).returncode


def _boot(image: Path, limit_s: float, wanted: Sequence[str]) -> int:
    """Run them in this kernel. Called in a mount namespace of our own."""
    release = image.name.removeprefix("vmlinuz-")
    place = Path("/usr/lib/modules")
    _debian.run("mount", "--make-rprivate", "/", cwd=ROOT)
    _debian.run("mount", "-t", "tmpfs", "tmpfs", str(place), cwd=ROOT)
    (place / release).mkdir()
    [modules] = image.parents[1].glob(f"**/lib/modules/{release}")  # /usr/lib in newer packages
    _debian.run("mount", "--bind", str(modules), str(place / release), cwd=ROOT)
    _debian.run("depmod", release, cwd=ROOT)
    guest.compile_sources()
    began_s, outcomes = time.monotonic(), Counter[str]()
    with contextlib.ExitStack() as stack:
        running = []
        for share in guest.shares(wanted):
            shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-guest-"))
            running.append(guest.Guest(share, Path(shared), limit_s, image))
            stack.callback(running[-1].stop)
        for run in (each.result() for each in running):
            for test in sorted(run.tests):
                result = run.results.get(test)
                outcome, words = (result.outcome, result.words) if result else ("not run", run.console[-2000:])
                outcomes[outcome] += 1
                _say(test=test, kernel=run.kernel, outcome=outcome, why=words)
    proven = bool(wanted) and outcomes["passed"] == len(wanted)
    name, seconds = Path(sys.argv[0]).stem, round(time.monotonic() - began_s, 1)
    _say(proof=name, kernel=release, tests=len(wanted), outcomes=outcomes, seconds=seconds, proven=proven)
    return int(not proven)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)
