"""One call of one hook, in a process of its own: nothing that a far end does, or does not do, reaches the controller.

Reads a call as JSON from standard input; writes what came of it, one line; exit status 0 when the far end was told, or
when there is nothing to tell it. Whoever starts it kills it, and its group, when its time is over; it also ends itself.
Replies are read up to a limit, and are believed only as far as they decide what of ours is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import http.client
import json
import os
import re
import select
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit

from pytools.errors import SwerveError
from steering.acting import hook_files

OURS: Final = "swerve"  # what the reason of a drained node begins with, and the value of a taint
CONDITION: Final = "Swerve"  # the reason of a condition
_CALL_BYTES: Final = 1 << 20
_REPLY_BYTES: Final = 8 << 20  # a node with all of its images
_SAID_BYTES: Final = 64 << 10
_REASON: Final = 240  # characters
_CONFLICTS: Final = 5
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_PR_SET_PDEATHSIG = 1
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_NICE: Final = 10


def deliver(call: Mapping[str, Any]) -> str:
    """Tell a far end what it is to know; what came of it.

    Raises
    ------
    SwerveError
        If it could not be told.
    """
    options, event = call["options"], call["event"]
    try:
        match call["kind"]:
            case "webhook":
                return _webhook(options, event, call["timeout_s"])
            case "slurm":
                return _slurm(options, event)
            case "kubernetes":
                return _kubernetes(options, event, call["timeout_s"])
            case _:
                return _program(options, event)
    except ssl.SSLCertVerificationError as error:
        raise SwerveError(f"its certificate is not accepted: {error.verify_message}") from None
    except OSError as error:
        raise SwerveError(error.strerror or str(error) or type(error).__name__) from None
    except http.client.HTTPException as error:
        raise SwerveError(f"its answer is not HTTP: {type(error).__name__}") from None


# ---- HTTP ----


def _webhook(options: Mapping[str, Any], event: Mapping[str, Any], timeout_s: float) -> str:
    headers = {}
    if options.get("secret_file"):
        headers[options["secret_header"]] = hook_files.secret(options["secret_file"])
    status, _ = _ask("POST", options["url"], headers, event, "application/json", options.get("ca_file"), timeout_s)
    if not 200 <= status < 300:
        raise SwerveError(f"it answered {status}{' (redirects are not followed)' if 300 <= status < 400 else ''}")
    return f"it answered {status}"


def _ask(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None,
    body_type: str,
    ca_file: str | None,
    timeout_s: float,
) -> tuple[int, bytes]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trusted = ssl.create_default_context(cafile=ca_file)
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=trusted)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
    sent = {"User-Agent": "swerve", "Connection": "close", **headers}
    if data is not None:
        sent["Content-Type"] = body_type
    with contextlib.closing(connection):
        connection.request(method, path, data, sent)
        reply = connection.getresponse()
        found = reply.read(_REPLY_BYTES + 1)
    if len(found) > _REPLY_BYTES:
        raise SwerveError(f"its answer is longer than {_REPLY_BYTES} bytes")
    return reply.status, found


# ---- Kubernetes ----


def _kubernetes(options: Mapping[str, Any], event: Mapping[str, Any], timeout_s: float) -> str:
    server = options.get("server") or _server()
    node = f"{server.rstrip('/')}/api/v1/nodes/{quote(options.get('node') or event['host'], safe='')}"
    headers = {"Authorization": f"Bearer {hook_files.token(options['token_file'])}", "Accept": "application/json"}

    def ask(method: str, url: str, body: Mapping[str, Any] | None = None, form: str = "") -> dict[str, Any]:
        """A reply that is an object; empty for a conflict."""
        status, data = _ask(method, url, headers, body, form, options["ca_file"], timeout_s)
        if status == http.client.CONFLICT and method == "PATCH":
            return {}
        if status != http.client.OK:
            raise SwerveError(f"{method} of the node: it answered {status}{_message(data)}")
        return _object(data)

    for _ in range(_CONFLICTS):
        found = ask("GET", node)
        if options.get("taint"):
            done, patch = _tainted(found, options["taint"], event)
            url, form = node, "application/merge-patch+json"
        else:
            done, patch = _condition(found, options["condition"], event)
            url, form = f"{node}/status", "application/strategic-merge-patch+json"
        if patch is None or ask("PATCH", url, patch, form):
            return done
    raise SwerveError("the node was changed by others meanwhile, again and again")


def _server() -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
    if not host:
        raise SwerveError(
            "no API server is known: KUBERNETES_SERVICE_HOST is not set", "set hooks.NAME.kubernetes.server"
        )
    return f"https://[{host}]:{port or 443}" if ":" in host else f"https://{host}:{port or 443}"


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SwerveError("its answer is not a JSON object")
    return found


def _message(data: bytes) -> str:
    with contextlib.suppress(SwerveError):
        return f": {_printable(str(_object(data).get('message', '')))[:_REASON]}"
    return ""


def _part(found: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found


def _rows(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _tainted(
    node: Mapping[str, Any], taint: Mapping[str, Any], event: Mapping[str, Any]
) -> tuple[str, dict[str, Any] | None]:
    """What to say, and the patch; the list is replaced as a whole, and only if nobody changed the node since."""
    there = _rows(_part(node, "spec", "taints"))
    same = [each for each in there if (each.get("key"), each.get("effect")) == (taint["key"], taint["effect"])]
    ours = any(each.get("value") == OURS for each in same)
    name = f"{taint['key']}:{taint['effect']}"
    version = _part(node, "metadata", "resourceVersion")
    if not isinstance(version, str) or not version:
        raise SwerveError("its answer has no metadata.resourceVersion")
    if event["status"] == "resolved":
        if not ours:
            return f"left alone: taint {name} is not there, or not ours", None
        taints = [each for each in there if each not in same]
        return f"taint {name} is removed", _patch(version, taints)
    if ours:
        return f"taint {name} is there", None
    if same or event["repeat"]:
        return f"left alone: taint {name} is {'not ours' if same else 'removed by somebody'}", None
    fresh = {"key": taint["key"], "value": OURS, "effect": taint["effect"], "timeAdded": _now()}
    return f"taint {name} is set", _patch(version, [*there, fresh])


def _patch(version: str, taints: list[dict[str, Any]]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}


def _condition(node: Mapping[str, Any], kind: str, event: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    there = [each for each in _rows(_part(node, "status", "conditions")) if each.get("type") == kind]
    ours = any(each.get("reason") == CONDITION for each in there)
    if there and not ours:
        return f"left alone: condition {kind} is not ours", None
    if event["status"] == "resolved":
        if not ours:
            return f"left alone: condition {kind} is not there", None
        return f"condition {kind} is removed", {"status": {"conditions": [{"type": kind, "$patch": "delete"}]}}
    if event["repeat"] and not ours:
        return f"left alone: condition {kind} is removed by somebody", None
    since = there[0].get("lastTransitionTime") if there else None
    fresh = {
        "type": kind,
        "status": "True",
        "reason": CONDITION,
        "message": _reason(event),
        "lastHeartbeatTime": _now(),
        "lastTransitionTime": since or _now(),
    }
    return f"condition {kind} is set", {"status": {"conditions": [fresh]}}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- programs ----


def _slurm(options: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    node = options.get("node") or event["host"]
    found = _scontrol(options, "show", "node", node)
    state = re.search(r"\bState=([A-Z0-9_+*~#!%$@^-]+)", found)
    if state is None:
        raise SwerveError(f"scontrol shows no state of node {node}")
    reason = next((line.strip()[7:] for line in found.splitlines() if line.strip().startswith("Reason=")), "")
    ours = reason.startswith(f"{OURS} ") and "DRAIN" in state[1]
    if event["status"] == "resolved":
        if not ours:
            return f"left alone: node {node} is not drained by us ({state[1]})"
        # To resume a node that is down as well would tell Slurm that somebody has mended it.
        how = "UNDRAIN" if "DOWN" in state[1] else "RESUME"
        _scontrol(options, "update", f"NodeName={node}", f"State={how}")
        return f"node {node} is resumed"
    if ours:
        return f"node {node} is drained"
    if event["repeat"]:
        return f"left alone: somebody changed node {node} since ({state[1]})"
    if re.search("DRAIN|DOWN|FAIL", state[1]):
        return f"left alone: node {node} is {state[1]} already"
    _scontrol(options, "update", f"NodeName={node}", "State=DRAIN", f"Reason={_reason(event)}")
    return f"node {node} is drained"


def _scontrol(options: Mapping[str, Any], *words: str) -> str:
    status, said = _run([options["scontrol"], *words], b"")
    text = said.decode(errors="replace")
    if status:
        raise SwerveError(f"scontrol {words[0]} failed ({status}): {_printable(text)[:_REASON]}")
    return text


def _reason(event: Mapping[str, Any]) -> str:
    """The reason in one line of ASCII, without what a program may take for a quotation."""
    return _printable(f"{OURS} {event['id']}: {event['rule']}: {event['path']['name']}: {event['because']}")[:_REASON]


def _printable(text: str) -> str:
    text = " ".join(text.replace("µ", "u").replace("×", "x").replace("→", "->").split())
    return "".join(each if each.isascii() and each.isprintable() and each not in "\"'`\\" else "?" for each in text)


def _program(options: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    data = json.dumps(event, ensure_ascii=False).encode() + b"\n"
    status, said = _run([options["program"], *options["arguments"]], data)
    if status:
        raise SwerveError(f"it ended with {status}: {_printable(said.decode(errors='replace'))[:_REASON]}")
    return "it ran"


def _run(words: list[str], data: bytes) -> tuple[int, bytes]:
    """Run a program to its end; its exit status, and the beginning of what it wrote."""
    if why := hook_files.program_objection(words[0]):
        raise SwerveError(f"refused: {why}", "make it root's alone (chown root, chmod go-w)")
    said = b""
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_ENVIRONMENT, cwd="/"
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as end:
            end.write(data)
        ended, poll, out = os.pidfd_open(process.pid), select.poll(), process.stdout.fileno()
        poll.register(out, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while ready := {fd for fd, _ in poll.poll()}:  # whoever else holds its output is not waited for
            if out in ready:
                found = os.read(out, _SAID_BYTES)
                said = (said + found)[:_SAID_BYTES]
                if not found:
                    poll.unregister(out)
            elif ended in ready:
                break
        os.close(ended)
        return process.wait(), said


# ---- the process ----


def _limit(call: Mapping[str, Any]) -> None:
    """End with all that we started when nobody else ends us in time, or who called is gone; give programs no rights.

    What a dead controller began to say must not arrive after what its successor says.
    """

    def overdue(_number: int, _frame: object) -> None:
        os.killpg(0, signal.SIGKILL)

    runs = call["kind"] in ("exec", "slurm")
    signal.signal(signal.SIGALRM, overdue if runs else signal.SIG_DFL)  # the kernel's own also ends a look-up of a name
    signal.setitimer(signal.ITIMER_REAL, call["timeout_s"] + 1)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGALRM)
    prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    if os.getppid() != call["caller"]:
        sys.exit(1)
    with contextlib.suppress(OSError):
        os.nice(_NICE)


def main() -> int:
    """Make the call that standard input has."""
    call = json.loads(sys.stdin.buffer.read(_CALL_BYTES))
    _limit(call)
    try:
        said, status = deliver(call), 0
    except SwerveError as error:
        said, status = str(error), 1
    print(_printable(said)[: 2 * _REASON], flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
