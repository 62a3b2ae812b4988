"""Proof: the TC programs of Cilium and ours both see all packets, and probes and pins work.

    make prove NAME=cilium CILIUM=/path/to/bpf_host.o

The object is compiled from Cilium's own bpf/bpf_host.c (1.19), with clang -g --target=bpf and the options that its
Makefile compile-tests; nothing of it is in this tree. Its programs take the place of the empty ones in
tests/kernel/test_others_at_tc.py: as TCX and as clsact, before ours and after ours, replaced, with empty maps. Needs
libbpf 1.1, bpftool and readelf. Run as root, from the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = "tests/kernel/test_others_at_tc.py"


def main() -> int:
    file = os.environ.get("CILIUM", "")
    if not file:
        print("skipped: name an object of Cilium's bpf_host.c, CILIUM=FILE", file=sys.stderr)
        return 0
    if not os.access(file, os.R_OK):
        print(f"CILIUM={file} cannot be read: name an object of Cilium's bpf_host.c", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "pytest", "-v", "-k", "either_order or where_they_leave", TESTS]
    environment = {**os.environ, "SWERVE_TEST_CILIUM": os.path.abspath(file)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
