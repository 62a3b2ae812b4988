"""Every test, for `make test`: two sessions side by side, then one alone.

first     tests of one host's kernel; the second kernel runs beside them with the processor time that nobody asks for
beside    unit tests, then those of tests/fabric that are marked `beside`; shown when both sessions have ended
last      the rest of tests/fabric, which looks at the clock
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("tests/kernel", "tests/vm")
BESIDE = (("tests/unit",), ("-m", "beside", "tests/fabric"))
LAST = ("-m", "not beside", "tests/fabric")
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


def run(*arguments: str) -> int:
    """Run one session to its end; its exit code."""
    with session(*arguments) as process:
        return process.wait()


def main() -> int:
    """Run all of them, whatever fails; 0 if nothing did."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    codes = []
    with tempfile.TemporaryFile() as said, session(*FIRST) as first:
        for arguments in BESIDE:
            with session(*arguments, into=said) as beside:
                codes.append(beside.wait())
        codes.append(first.wait())
        said.seek(0)
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    codes.append(run(*LAST))
    return int(any(codes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
