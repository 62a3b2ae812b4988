"""Proof: routes of a VRF are steered, where the kernel's rules match a VRF.

    python tests/prove/vrf.py [--packages DIR] [--limit 1800]

The machine's kernel may have no VRF, and Debian 12's (6.1) matches no rule with packets of one. So the newest kernel of
Debian's backports that does (6.15 or later) is fetched with apt, into a directory of its own, and booted under
virtme-ng; nothing is installed. In it run the cases of tests/fabric/test_route_kinds.py on a VRF, and the test of VRFs
in tests/kernel/test_overlay.py, for both families. Prints JSON Lines, one a test; exits with 1 if one does not pass.
Run as root, from the checkout; emulation takes some ten minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

os.environ["SWERVE_TEST_KIND"] = "VRF"

import _other_kernel

PLACES: Final = ("tests/kernel/test_overlay.py", "tests/fabric/test_route_kinds.py")


def tests() -> list[str]:
    """The tests that need a VRF."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-k", "VRF or vrf"]
    inside = {**os.environ, "SWERVE_GUEST_RESULTS": "/dev/null"}  # list what only a guest runs
    shown = subprocess.run(
        [*command, *PLACES], cwd=_other_kernel.ROOT, env=inside, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [line for line in shown.splitlines() if "::" in line]


if __name__ == "__main__":
    sys.exit(_other_kernel.prove(__file__, "trixie-backports", (6, 15), tests))
