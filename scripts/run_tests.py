"""Every test, for `make test`: several pytest sessions, some of them side by side. With `quick`, for `make test-quick`:
unit tests but the slow ones, with fewer random examples, in two sessions.

free      tests of one host's kernel and files of tests/fabric that are marked `beside`; in four sessions
timed     the files of tests/fabric that look at the clock, when those have ended; in two sessions
unit      unit tests, from the beginning on, with the processor time that those leave, or little more beside `free`
guests    tests in the second kernel, from the beginning on, with the processor time that nobody else asks for

Four at first, on two processors, as all but unit tests wait for most of their time; two that look at the clock, so that
each has a processor. Sessions that have the same files take the next one that none has begun (tests/conftest.py): all
end together. What one compiles the others load. Of each group the output of the first is shown at once, the rest later.
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
KERNEL, UNIT, FABRIC, GUESTS = "tests/kernel", "tests/unit", "tests/fabric", "tests/vm"
MARK = re.compile(r"^pytestmark = .*\bmark\.beside\b", re.MULTILINE)
QUICK = ("-q", "-m", "not slow", "--hypothesis-profile=quick")
FREE, TIMED = 4, 2  # sessions
# Files that take longest, in this order: begun last, one would keep a session after the others have ended.
LONG = (
    *("test_route_kinds", "test_job_verdicts", "test_recording", "test_service", "test_restarts"),
    *("test_steering_safety", "test_tcp_program", "test_metrics", "test_service_reload", "test_probes"),
    *("test_top_terminal", "test_tcp", "test_takeover", "test_standing_queue", "test_hidden_ways", "test_app_delay"),
    *("test_clocks", "test_path_mtu", "test_operator", "test_pins", "test_demo", "test_path_liveness", "test_labels"),
)
CACHE, BEGUN, SPARE = "SWERVE_TEST_CACHE", "SWERVE_TEST_BEGUN", "SWERVE_TEST_SPARE"  # tests/conftest.py
_ENDING_S = 60


@contextlib.contextmanager
def session(
    arguments: Sequence[str], shown_later: bool = False, spare: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """A pytest session; interrupted if this process is, and once only, so that it takes down what it has made."""
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = os.environ | ({SPARE: "1"} if spare else {})
    with tempfile.TemporaryFile() as said:
        into = said if shown_later else None
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=into, stderr=into, process_group=0
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


def files_of(*tiers: str) -> list[str]:
    """Their files: first those that take longest, so that no session is left alone with one."""
    names = [str(each.relative_to(ROOT)) for tier in tiers for each in sorted(ROOT.glob(f"{tier}/test_*.py"))]
    return sorted(names, key=lambda name: (*LONG, Path(name).stem).index(Path(name).stem))


def quick() -> list[int]:
    """Run one half of the unit tests on each of two processors."""
    files = files_of(UNIT)
    return run(*([*QUICK, *half] for half in (files[::2], files[1::2])))


def everything() -> list[int]:
    """Run every tier."""
    timed = [name for name in files_of(FABRIC) if not MARK.search((ROOT / name).read_text())]
    free = [name for name in files_of(KERNEL, FABRIC) if name not in timed]
    with contextlib.ExitStack() as stack:
        for variable in (CACHE, BEGUN):
            os.environ[variable] = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-shared-"))
        guests = stack.enter_context(session([GUESTS], shown_later=True))
        unit = stack.enter_context(session([UNIT], shown_later=True, spare=True))
        codes = run(*[free] * FREE)
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(unit.pid, os.SCHED_IDLE, os.sched_param(0))
        codes += run(*[timed] * TIMED)
        codes += [unit.wait(), guests.wait()]
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
