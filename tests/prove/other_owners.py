"""Proof: beside DHCP clients, routers and the rules of Cilium the same holds as beside the other owners of routes.

    python tests/prove/other_owners.py [--renewals 20]

systemd-networkd has leases of a dnsmasq, which announces routers to it, too; a person lays rules and routes as Cilium
does. Each is tried in all cases of tests/fabric/test_route_kinds.py, whose outcome is printed. While an act is in
force every lease is renewed, and every router heard again, --renewals times, 20 s each. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--renewals", type=int, default=3)
    renewals = str(parser.parse_args().renewals)
    command = [sys.executable, "-m", "pytest", "-v", "-k", "leases or Cilium", "tests/fabric/test_route_kinds.py"]
    chosen = {"SWERVE_TEST_KIND": "networkd leases,Cilium", "SWERVE_TEST_RENEWALS": renewals}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **chosen}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
