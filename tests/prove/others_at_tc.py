"""Proof: the TC programs of Cilium or Calico and ours all see all packets, and probes and pins work.

    make prove NAME=others_at_tc CILIUM=/path/to/bpf_host.o CALICO=/path/to/directory

Their objects are compiled from their own sources, with clang (19 was tried) -g --target=bpf -mcpu=v3; nothing of them
is in this tree. Of Cilium (1.19): bpf/bpf_host.c, with options that its Makefile compile-tests. Of Calico (3.32), from
felix/bpf-gpl, with the headers of Linux 6.9 or later and libbpf's: `from_hep_no_log.o`, `to_hep_no_log.o`,
`tc_preamble_ingress.o`, `tc_preamble_egress.o`, `policy_default_ingress.o`, `policy_default_egress.o`, each with what
`calculate-flags NAME.ll` prints. They take the place of the empty programs in tests/kernel/test_others_at_tc.py: as
TCX and as clsact, before ours and after ours, replaced, with empty maps; Calico's policy allows all. Needs libbpf 1.1,
bpftool and readelf. Exits with 1 if a test fails, 2 if an object cannot be read. Run as root, from the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = "tests/kernel/test_others_at_tc.py"
OBJECTS: Final = {"CILIUM": "an object of Cilium's bpf_host.c", "CALICO": "a directory with Calico's objects"}


def main() -> int:
    chosen = {name: os.environ[name] for name in OBJECTS if os.environ.get(name)}
    if not chosen:
        wanted = ", or ".join(f"{what}, {name}=PATH" for name, what in OBJECTS.items())
        print(f"skipped: name {wanted}", file=sys.stderr)
    for name, path in chosen.items():
        if not os.access(path, os.R_OK) or os.path.isdir(path) != (name == "CALICO"):
            print(f"{name}={path} cannot be read: name {OBJECTS[name]}", file=sys.stderr)
            return 2
    failed = 0
    for name, path in chosen.items():
        print(f"{name}={path}", flush=True)
        command = [sys.executable, "-m", "pytest", "-v", "-k", "either_order or where_they_leave", TESTS]
        environment = {**os.environ, "SWERVE_TEST_NODE": os.path.abspath(path)}
        failed |= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
