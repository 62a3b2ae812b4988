#!/usr/bin/env python3
"""Every C file begins with its SPDX line, and every licence that is named has its text in LICENSES/.

Prints what is wrong and exits with 1, else prints what was looked at.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = re.compile(r"^(/\*|//) SPDX-License-Identifier: (?P<expression>[\w.() -]+?)( \*/)?$")


def main() -> int:
    """Look at every C file of the repository."""
    wrong, named = [], {"Apache-2.0"}
    tops = ("bpf", "examples", "pytools")
    files = sorted(path for end in ("*.c", "*.h") for top in tops for path in (ROOT / top).rglob(end))
    for path in files:
        first = path.read_text().splitlines()[0]
        found = SPDX.match(first)
        if found is None:
            wrong.append(f"{path.relative_to(ROOT)}:1: the first line is not an SPDX line: {first!r}")
            continue
        named |= set(re.findall(r"[\w.-]+", found["expression"])) - {"OR", "AND", "WITH"}
    wrong += [
        f"LICENSES/{name}.txt is missing" for name in sorted(named) if not (ROOT / f"LICENSES/{name}.txt").exists()
    ]
    print("\n".join(wrong) or f"licences: {len(files)} C files, {', '.join(sorted(named))}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
