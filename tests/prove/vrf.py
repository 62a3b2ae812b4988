"""Proof: routes of a VRF are steered, where the kernel's rules match a VRF.

    python tests/prove/vrf.py [--packages DIR] [--limit 1500]

The machine's kernel may have no VRF, and Debian 12's (6.1) matches no rule with packets of one. So the newest kernel of
Debian's backports that does (6.15 or later) is fetched with apt, into a directory of its own, and booted under
virtme-ng; nothing is installed. In it run the cases of tests/fabric/test_route_kinds.py on a VRF, and the test of VRFs
in tests/kernel/test_overlay.py, for both families. Prints JSON Lines, one a test; exits with 1 if one does not pass.
Run as root, from the checkout; emulation takes some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/vm")]
os.environ["SWERVE_TEST_KIND"] = "VRF"

import _debian  # noqa: E402
import guest  # noqa: E402
import support  # noqa: E402

NAME: Final = re.compile(r"^linux-image-((\d+)\.(\d+)[.0-9]*\+deb13-amd64) ", re.MULTILINE)
FIRST: Final = (6, 15)
LAST: Final = (6, 18)  # later ones are untried
PLACES: Final = ("tests/kernel/test_overlay.py", "tests/fabric/test_route_kinds.py")


def chosen(kernels: str) -> list[str]:
    """The newest of these kernels that is to be tried."""
    found = {(int(major), int(minor)): name for name, major, minor in NAME.findall(kernels)}
    return [f"linux-image-{found[max(version for version in found if FIRST <= version <= LAST)]}"]


def tests() -> list[str]:
    """The tests that need a VRF."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-k", "VRF or vrf"]
    inside = {**os.environ, "SWERVE_GUEST_RESULTS": "/dev/null"}  # list what only a guest runs
    shown = subprocess.run(
        [*command, *PLACES], cwd=ROOT, env=inside, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [line for line in shown.splitlines() if "::" in line]


def boot(image: Path, limit_s: float) -> int:
    """Run them in this kernel. Called in a mount namespace of our own."""
    release = image.name.removeprefix("vmlinuz-")
    place = Path("/usr/lib/modules")
    _debian.run("mount", "--make-rprivate", "/", cwd=ROOT)
    _debian.run("mount", "-t", "tmpfs", "tmpfs", str(place), cwd=ROOT)
    (place / release).mkdir()
    _debian.run(
        "mount", "--bind", str(image.parents[1] / place.relative_to("/") / release), str(place / release), cwd=ROOT
    )
    _debian.run("depmod", release, cwd=ROOT)
    wanted = tests()
    guest.compile_sources()
    with tempfile.TemporaryDirectory(prefix="swerve-guest-") as shared:
        run = guest.Guest(wanted, Path(shared), limit_s, image).result()
    passed = 0
    for test in wanted:
        result = run.results.get(test)
        outcome, words = (result.outcome, result.words) if result else ("not run", run.console[-2000:])
        passed += outcome == "passed"
        print(json.dumps({"test": test, "kernel": run.kernel, "outcome": outcome, "why": words}), flush=True)
    return int(not wanted or passed < len(wanted))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, help="where to keep what is fetched, or where it was kept")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for the guest")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if lacking := support.missing("second kernel"):
        print(f"missing: {lacking}", file=sys.stderr)
        return 1
    if options.inside:
        return boot(options.inside, options.limit)
    with tempfile.TemporaryDirectory(prefix="swerve-vrf-") as folder:
        place = options.packages or Path(folder)
        [image] = _debian.unpacked(place, "trixie-backports", chosen).glob("boot/vmlinuz-*")
        again = [sys.executable, __file__, "--inside", str(image), "--limit", str(options.limit)]
        return subprocess.run(["unshare", "-m", *again], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
