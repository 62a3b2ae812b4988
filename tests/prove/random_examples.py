"""Proof: tests with random examples hold for many more of them than `make test` has time for.

    python tests/prove/random_examples.py

1,000 examples for each that does not say how many itself (tests/conftest.py). Arguments are given to pytest, as
tests/unit/test_frames.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Run them; 0 if all hold."""
    chosen = arguments or ["tests/unit"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "hypothesis", "--hypothesis-profile=many", *chosen]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
