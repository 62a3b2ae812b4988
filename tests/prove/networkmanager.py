"""Proof: beside NetworkManager the same holds as beside the other owners of routes.

    python tests/prove/networkmanager.py [--packages DIR]

Debian 12's NetworkManager is fetched with apt into a directory of its own, and not installed: as a service it would
take the machine's interfaces. It runs in a network namespace, with a bus and a /run of its own, and owns the routes
in all cases of tests/fabric/test_route_kinds.py, whose outcome is printed: as configured, and with leases and routers
of a dnsmasq. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import _debian

ROOT = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("network-manager", "libnm0", "libndp0")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", type=Path, help="where to keep what is fetched, or where it was kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swerve-manager-") as folder:
        root = _debian.unpacked(options.packages or Path(folder), "bookworm", lambda _: PACKAGES)
        command = [sys.executable, "-m", "pytest", "-v", "-k", "NetworkManager", "tests/fabric/test_route_kinds.py"]
        chosen = {"SWERVE_TEST_KIND": "NetworkManager,NetworkManager leases", "SWERVE_TEST_PACKAGES": str(root)}
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **chosen}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
