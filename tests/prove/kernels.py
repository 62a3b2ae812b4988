"""Proof: tests marked `guest` pass in the newest kernel of Debian 12's backports, which is Debian 13's series (6.12).

    python tests/prove/kernels.py [--packages DIR] [--limit 1800] [--only TEXT]

`make test` runs them in Debian 12's own (6.1). Of cases that are alike a sample runs, with SWERVE_GUEST=all every one.
Prints JSON Lines, one a test, and a last one that counts outcomes; exits with 1 if a test does not pass. Run as root,
from the checkout; emulation takes twenty to thirty minutes.
"""

from __future__ import annotations

import sys

import _other_kernel
import test_second_kernel

if __name__ == "__main__":
    sys.exit(_other_kernel.prove(__file__, "bookworm-backports", (6, 2), test_second_kernel.marked_tests))
