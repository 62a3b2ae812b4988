"""One controller that acts per network namespace, whatever name that has: real namespaces, processes and users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import support

from pytools.errors import RefusedError, SwerveError
from pytools.kernel.netns import inside
from steering.acting.lock import Lock
from steering.acting.namespace_lock import NamespaceLock

NOBODY = 65534
_SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
taken = socket.socket(socket.AF_UNIX)
taken.bind("\\0swerve-steer")
taken.listen(0)
fill = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(int(sys.argv[2]))]
for each in fill:
    each.connect_ex("\\0swerve-steer")
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"swerve-lock-{os.getpid()}"
    support.run(["ip", "netns", "add", name])
    yield name
    support.run(["ip", "netns", "delete", name])


def test_a_second_controller_of_the_namespace_is_refused_and_told_by_whom(namespace: str) -> None:
    refused = pytest.raises(RefusedError, match=rf"another name \(process {os.getpid()}\)")
    with inside(namespace), NamespaceLock(), refused:
        NamespaceLock(0.05)
    with inside(namespace), NamespaceLock() as again:
        assert again.fileno() >= 0


def test_another_namespace_is_another_lock(namespace: str) -> None:
    with NamespaceLock(), inside(namespace), NamespaceLock():
        pass


def test_what_a_guardian_inherited_is_waited_for(namespace: str) -> None:
    with inside(namespace):
        lock = NamespaceLock()
        guardian = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
        lock.close()
        with pytest.raises(RefusedError):
            NamespaceLock(0.05)
        assert guardian.stdin is not None
        guardian.stdin.close()
        with NamespaceLock(5):
            pass
        assert guardian.wait(20) == 0


@pytest.mark.parametrize("pending", [0, 4], ids=["asked", "queue-full"])
def test_another_user_keeps_nobody_from_steering(namespace: str, pending: int) -> None:
    with inside(namespace):
        command = [sys.executable, "-c", _SQUATTER, str(NOBODY), str(pending)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
            assert squatter.stdout is not None and squatter.stdin is not None
            assert squatter.stdout.readline() == "taken\n"
            with NamespaceLock(0.05):
                pass
            squatter.stdin.close()


def test_a_guardian_that_still_undoes_is_no_refusal(tmp_path: Path) -> None:
    """As a service the controller is started again after a failure, and not after a refusal."""
    first = Lock(tmp_path / "lock")
    guardian = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(first.fd,))
    first.say({"pid": 2**22 + 1})  # a controller that is gone
    first.close()
    with pytest.raises(SwerveError, match="is being undone") as failure:
        Lock(tmp_path / "lock")
    assert failure.value.exit_code == 1
    assert guardian.stdin is not None
    guardian.stdin.close()
    guardian.wait(20)
    Lock(tmp_path / "lock").close()
