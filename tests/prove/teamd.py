"""Proof: rails that are teams of the real teamd are seen, probed and steered, and their options stay the daemon's.

    make prove NAME=teamd TEAMD=/path/to/teamd

With runner loadbalance the port that loses silently is named; with its tx_balancer, which moves flows, no port is; with
activebackup the daemon changes the port when a carrier is lost, and a silent port stays. teamd must be 1.32 or later:
1.31, which Debian 12 and 13 have, never stops enabling ports. The machine's own kernel may have no teams: it runs in
the newest kernel of Debian 12's backports, in the emulator, with teamnl (libteam-utils) and the libraries of teamd from
the machine. Prints JSON Lines; exits with 1 if it does not pass. Run as root, from the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import _other_kernel

TESTS = (
    "tests/prove/_teamd.py::test_the_bad_port_of_a_balanced_team_is_named",
    "tests/prove/_teamd.py::test_flows_that_the_daemon_moves_have_no_ways",
    "tests/prove/_teamd.py::test_the_port_of_an_active_backup_team_is_the_daemons_choice",
)


def main() -> int:
    teamd = os.environ.get("TEAMD") or shutil.which("teamd")
    if not teamd or not shutil.which("teamnl"):
        print("skipped: name a teamd, TEAMD=FILE, and install libteam-utils for teamnl", file=sys.stderr)
        return 0
    said = subprocess.run([teamd, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (1, 32):
        print(f"skipped: {teamd} is {said.strip()}; name one of 1.32 or later, TEAMD=FILE", file=sys.stderr)
        return 0
    os.environ["SWERVE_TEST_TEAMD"] = teamd
    return _other_kernel.prove(__file__, "bookworm-backports", (6, 2), lambda: TESTS)


if __name__ == "__main__":
    sys.exit(main())
