"""An operator's end of the control socket: one question, one answer, with a deadline."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final

from pytools.errors import CapabilityError, RefusedError, SwerveError, UsageError
from steering.control.requests import AGAIN, SOCKET, AnyRequest, Reply, decode_reply, encode

_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 0.01
_AGAIN_S: Final = 0.1
_RECEIVED_BYTES: Final = 1 << 20
_ERRORS: Final[dict[int, type[SwerveError]]] = {2: UsageError, 4: RefusedError, 5: CapabilityError}


class NotRunningError(SwerveError):
    """There is no controller to ask."""


def ask(folder: Path, request: AnyRequest, timeout_s: float = _TIMEOUT_S, patience_s: float = 0.0) -> Reply:
    """What a controller answers.

    Parameters
    ----------
    timeout_s : float
        How long to wait.
    patience_s : float
        For so long a refusal that may be none a moment later is not believed.

    Raises
    ------
    NotRunningError
        If no controller runs.
    SwerveError
        If it does not answer, or says no: of the kind that its exit code names.
    """
    patient_until = time.monotonic() + patience_s
    reply = _exchange(folder / SOCKET, encode(request), timeout_s)
    while reply.facts.get(AGAIN) and time.monotonic() < patient_until:
        time.sleep(_AGAIN_S)
        reply = _exchange(folder / SOCKET, encode(request), timeout_s)
    if reply.code:
        raise _ERRORS.get(reply.code, SwerveError)("; ".join(reply.lines), reply.next_step)
    return reply


def _exchange(path: Path, data: bytes, timeout_s: float) -> Reply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        try:
            _connect(sock, path, timeout_s)
            sock.send(data)
            answer = sock.recv(_RECEIVED_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            name = path.parent.name
            where = "" if name == "host" else f" -n {name}"
            raise NotRunningError(f"no controller runs for {name}", f"start one: swerve steer run{where}") from None
        except PermissionError as error:
            raise CapabilityError(f"{path}: {error.strerror}", "run it as root") from None
        except OSError as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise _silent(path, why) from None
    if not answer:
        raise _silent(path, "it hung up without an answer")
    try:
        return decode_reply(answer)
    except ValueError as error:
        raise _silent(path, f"its answer makes no sense: {error}") from None


def _connect(sock: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect; a queue that is full is waited for, which the kernel does for blocking sockets only."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(str(path))
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
            time.sleep(_RETRY_S)


def _silent(path: Path, why: str) -> SwerveError:
    return SwerveError(f"controller at {path}: {why}", "if it hangs its guardian ends it: see `swerve steer status`")
