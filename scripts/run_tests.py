"""Every test, for `make test`: several pytest sessions, some of them side by side.

kernel    tests of one host's kernel, then some files of tests/fabric that are marked `beside`
unit      unit tests, then the other files marked so; at the same time
alone     the files of tests/fabric that look at the clock, when both have ended
guests    tests in the second kernel, from the beginning on, with the processor time that nobody else asks for

The output of `unit` and `guests` is shown when they have ended.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL, UNIT, GUESTS = "tests/kernel", "tests/unit", "tests/vm"
MARK = re.compile(r"^pytestmark = .*\bmark\.beside\b", re.MULTILINE)
KERNELS_PART = 4  # of the files marked so, each 4th follows tests/kernel, which take longer than unit tests
_ENDING_S = 60


@contextlib.contextmanager
def session(arguments: Sequence[str], shown_later: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest session; interrupted if this process is, and once only, so that it takes down what it has made."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile() as said:
        into = said if shown_later else None
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=into, stderr=into, process_group=0
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(_ENDING_S)
            said.seek(0)
            shutil.copyfileobj(said, sys.stdout.buffer)
            sys.stdout.flush()


def main() -> int:
    """Run all of them, whatever fails; 0 if nothing did."""
    # SIGINT too: started in the background by a shell we would ignore it, and so would all that tests interrupt.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    files = {str(each.relative_to(ROOT)): each.read_text() for each in sorted(ROOT.glob("tests/fabric/test_*.py"))}
    shared = [name for name, text in files.items() if MARK.search(text)]
    after_kernel = shared[::KERNELS_PART]
    after_unit = [name for name in shared if name not in after_kernel]
    with session([GUESTS], shown_later=True) as guests:
        with session([UNIT, *after_unit], shown_later=True) as unit, session([KERNEL, *after_kernel]) as kernel:
            codes = [kernel.wait(), unit.wait()]
        with session([name for name in files if name not in shared]) as alone:
            codes.append(alone.wait())
        codes.append(guests.wait())
    return int(any(codes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
