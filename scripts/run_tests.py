"""Every test, for `make test`: two sessions side by side, then one alone.

first     tests of one host's kernel; the second kernel runs beside them with the processor time that nobody asks for
beside    unit tests; shown when both sessions have ended
last      the files of tests/fabric that look at the clock

Those that do not, marked `beside`, are shared out between the first two.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^pytestmark = .*\bmark\.beside\b", re.MULTILINE)
FIRSTS_PART = 4  # of the files marked so, each 4th runs after tests/kernel, which take longer than unit tests
_ENDING_S = 60


@contextlib.contextmanager
def session(*arguments: str, into: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest session; interrupted if this process is, so that it takes down what it has made."""
    command = [sys.executable, "-m", "pytest", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=into, stderr=into)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_ENDING_S)


def main() -> int:
    """Run all of them, whatever fails; 0 if nothing did."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    files = {str(each.relative_to(ROOT)): each.read_text() for each in sorted(ROOT.glob("tests/fabric/test_*.py"))}
    shared = [name for name, text in files.items() if MARK.search(text)]
    last = [name for name in files if name not in shared]
    after_kernel = shared[::FIRSTS_PART]
    after_unit = [name for name in shared if name not in after_kernel]
    with tempfile.TemporaryFile() as said:
        try:
            with (
                session("tests/kernel", *after_kernel, "tests/vm") as first,
                session("tests/unit", *after_unit, into=said) as beside,
            ):
                codes = [beside.wait(), first.wait()]
        finally:  # also of a run that was interrupted
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    with session(*last) as alone:
        codes.append(alone.wait())
    return int(any(codes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
