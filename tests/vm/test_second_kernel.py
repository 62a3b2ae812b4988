"""Every test marked `guest` passes on Debian's own kernel as well: no TCX there, and other tracepoint fields.

Two guests share them, boot as soon as the session begins and run beside the tests out here (conftest.py); each of
their tests is reported here under its own name.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import guest
import pytest
import support

pytestmark = pytest.mark.deadline(guest.LIMIT_S + 60)
CONSOLE_LINES = 60
PLACES = ("tests/kernel", "tests/fabric", "tests/vm/guest_rdma.py", "tests/vm/guest_hold.py")  # the last two only here


@functools.cache
def marked_tests() -> tuple[str, ...]:
    """Node ids of all tests marked `guest`, as pytest itself finds them; of alike ones a sample (tests/conftest.py)."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "guest", *PLACES]
    found = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=support.ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise pytest.UsageError(f"the tests for the guest cannot be collected:\n{found.stdout}{found.stderr}")
    return tuple(line for line in found.stdout.splitlines() if line.startswith("tests/") and "::" in line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "inner" in metafunc.fixturenames:
        metafunc.parametrize("inner", marked_tests(), ids=[test.removeprefix("tests/") for test in marked_tests()])


@pytest.fixture(scope="session")
def guest_runs(started_guests: list[guest.Guest]) -> list[guest.Run]:
    """The outcome of each boot."""
    support.require("second kernel")
    assert started_guests
    return [each.result() for each in started_guests]


def test_guests_are_another_kernel(guest_runs: list[guest.Run]) -> None:
    for run in guest_runs:
        assert run.kernel.startswith("6.1."), run.console
        assert run.kernel != os.uname().release or Path("/boot", f"vmlinuz-{run.kernel}").exists()


def test_in_guest(inner: str, guest_runs: list[guest.Run]) -> None:
    guest_run = next(run for run in guest_runs if inner in run.tests)
    result = guest_run.results.get(inner)
    if result is None:
        tail = "\n".join(guest_run.console.splitlines()[-CONSOLE_LINES:])
        pytest.fail(f"the guest ended before this test was decided; its console ends with\n{tail}", pytrace=False)
    if result.outcome == "skipped":
        pytest.skip(f"in the guest: {result.words}")
    if result.outcome == "failed":
        pytest.fail(f"in the guest ({guest_run.kernel}):\n{result.words}", pytrace=False)
