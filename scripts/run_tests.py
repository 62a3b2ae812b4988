"""Every test, for `make test`: several pytest sessions, some of them side by side. With `quick`, for `make test-quick`:
unit tests but the slow ones, with fewer random examples, in two sessions.

kernel    tests of one host's kernel
unit      unit tests, then some files of tests/fabric that are marked `beside`; at the same time
beside    the other files marked so; at the same time
timed     the files of tests/fabric that look at the clock, in two sessions, when those have ended
guests    tests in the second kernel, from the beginning on, with the processor time that nobody else asks for

Three at first, on two processors, as each waits about half of its time; two that look at the clock, so that each has a
processor. What one compiles the others load. Of each group the output of the first is shown at once, the rest later.
"""

from __future__ import annotations

import contextlib
import os
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
QUICK = ("-q", "-m", "not slow", "--hypothesis-profile=quick")
UNITS_PART = 3  # of the files marked so, each 3rd follows tests/unit, which take less time than the others
CACHE = "SWERVE_TEST_CACHE"  # tests/conftest.py
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


def run(*sessions: Sequence[str]) -> list[int]:
    """Run these side by side until all have ended."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(session(each, bool(number))) for number, each in enumerate(sessions)]
        return [each.wait() for each in running]


def quick() -> list[int]:
    """Run one half of the unit tests on each of two processors."""
    files = [str(each.relative_to(ROOT)) for each in sorted(ROOT.glob(f"{UNIT}/test_*.py"))]
    return run(*([*QUICK, *half] for half in (files[::2], files[1::2])))


def everything() -> list[int]:
    """Run every tier."""
    files = {str(each.relative_to(ROOT)): each.read_text() for each in sorted(ROOT.glob("tests/fabric/test_*.py"))}
    beside = [name for name, text in files.items() if MARK.search(text)]
    timed = [name for name in files if name not in beside]
    after_unit = beside[::UNITS_PART]
    others = [name for name in beside if name not in after_unit]
    with tempfile.TemporaryDirectory(prefix="swerve-compiled-") as cache, contextlib.ExitStack() as stack:
        os.environ[CACHE] = cache
        guests = stack.enter_context(session([GUESTS], shown_later=True))
        codes = run([KERNEL], [UNIT, *after_unit], others) + run(timed[::2], timed[1::2])
        codes.append(guests.wait())
    return codes


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, whatever fails; 0 if nothing did."""
    # SIGINT too: started in the background by a shell we would ignore it, and so would all that tests interrupt.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    chosen = {(): everything, ("quick",): quick}.get(tuple(arguments))
    if chosen is None:
        print("usage: run_tests.py [quick]", file=sys.stderr)
        return 2
    return int(any(chosen()))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
