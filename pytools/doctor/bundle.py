"""A support bundle: one file with what somebody needs who helps from afar, and nothing that should not leave the host.

Every part is parsed and written again, so that comments, keys and processes stay here (redact.py). What cannot
be had is named in the manifest with the reason. Sizes are bounded. Run in the network namespace that is described.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import tarfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pytools import config as configuration
from pytools import directories, yaml_reader
from pytools.doctor.redact import Addresses, cleaned
from pytools.errors import SwerveError, UsageError
from pytools.ipc.client import Client
from pytools.owned_files import as_owner
from pytools.recording import reader

MANIFEST: Final = "manifest.json"
PART_BYTES: Final = 4 << 20
RECORDING_BYTES: Final = 16 << 20
HISTORY_BYTES: Final = 1 << 20
_RECORDED_S: Final = 300
_ANSWER_S: Final = 3.0
_COMMAND_S: Final = 10.0
_MOST_INTERFACES: Final = 64
_HISTORY: Final = ("journal.jsonl", "acts.jsonl")  # in the instance's state directory
_COMMANDS: Final = {
    "ip-link.json": ("ip", "-j", "-d", "-s", "link"),
    "ip-address.json": ("ip", "-j", "address"),
    "ip-route.json": ("ip", "-j", "route", "show", "table", "all"),
    "ip-route6.json": ("ip", "-j", "-6", "route", "show", "table", "all"),
    "ip-rule.json": ("ip", "-j", "rule"),
    "ip-rule6.json": ("ip", "-j", "-6", "rule"),
    "ip-nexthop.json": ("ip", "-j", "nexthop"),
    "tc-qdisc.json": ("tc", "-j", "-s", "qdisc"),
}
NEVER: Final = (
    "keys and what key files hold",
    "command lines, names and environments of processes, their control groups and containers",
    "single connections and single probes",
    "comments of configuration and policy",
)


class Part(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    note: str = ""  # what was cut off


class LeftOut(msgspec.Struct, frozen=True):
    name: str
    why: str


class Manifest(msgspec.Struct, frozen=True, tag="bundle"):
    made_unix_ns: int
    instance: str
    versions: dict[str, str]
    addresses_hidden: int | None  # None: they were not to be hidden
    managed: list[str]  # prefixes whose addresses are shown all the same
    parts: list[Part]
    left_out: list[LeftOut]
    never: tuple[str, ...] = NEVER


class MissingError(Exception):
    """A part that cannot be had; says why."""


@dataclass(frozen=True)
class Made:
    """A part: lines, or one value, as JSON."""

    lines: Iterable[Any] | None = None
    value: Any = None
    note: Callable[[], str] = str
    limit_bytes: int = 0  # 0: PART_BYTES


def write(out: Path, name: str | None, config: Path | None, report: msgspec.Struct, redact: bool) -> Manifest:
    """Make a bundle.

    Parameters
    ----------
    out : Path
        Must not exist; is readable by its owner alone.
    config : Path, optional
        The agent's configuration, if it is not where it belongs.
    report : Struct
        What `doctor` found, with `versions`.
    redact : bool
        Whether addresses outside the policy's managed prefixes become numbers.

    Raises
    ------
    UsageError
        If the file exists or cannot be made.
    """
    try:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{out}: {error.strerror}", "name a file that does not exist yet") from None
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            return _write(file, name, config, report, redact)
    except BaseException:
        with contextlib.suppress(OSError):
            out.unlink()
        raise


def _write(file: io.BufferedWriter, name: str | None, config: Path | None, report: Any, redact: bool) -> Manifest:
    policy = _policy(name)
    manage = policy.get("manage") if isinstance(policy, dict) else None
    destinations = manage.get("destinations") if isinstance(manage, dict) else None
    managed = [str(each) for each in destinations or []] if isinstance(destinations, list) else []
    hide = Addresses(managed) if redact else None
    parts: list[Part] = []
    left_out: list[LeftOut] = []
    stem = f"swerve-{directories.instance(name)}"
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for part, make in _parts(name, config, report, policy):
            try:
                made = make()
                data, note = _encoded(made, hide)
            except MissingError as why:
                left_out.append(LeftOut(part, str(why)))
                continue
            except (OSError, ValueError, SwerveError) as error:
                left_out.append(LeftOut(part, getattr(error, "strerror", None) or str(error)))
                continue
            parts.append(Part(part, len(data), note))
            _add(archive, f"{stem}/{part}", data)
        manifest = Manifest(
            made_unix_ns=time.time_ns(),
            instance=directories.instance(name),
            versions=report.versions,
            addresses_hidden=hide.replaced if hide is not None else None,
            managed=managed if redact else [],
            parts=parts,
            left_out=left_out,
        )
        _add(archive, f"{stem}/{MANIFEST}", msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def _parts(name: str | None, config: Path | None, report: Any, policy: Any) -> Iterator[tuple[str, Callable[[], Made]]]:
    yield "doctor.json", lambda: Made(value=_report(report))
    yield "config.json", lambda: Made(value=configuration.as_file(_config(name, config)))
    yield "policy.json", lambda: Made(value=_given(policy))
    yield "self.json", lambda: Made(value=_self(name))
    for each in _HISTORY:
        yield each, lambda each=each: _history(directories.state_dir(name) / each)  # type: ignore[misc]
    for part, command in _COMMANDS.items():
        yield part, lambda command=command: Made(value=json_of(command))  # type: ignore[misc]
    yield "tc-filter.json", _filters
    yield "recording.jsonl", lambda: _recorded(name, config)


def _encoded(made: Made, hide: Addresses | None) -> tuple[bytes, str]:
    """A part as it is written, and what is to be said of it."""

    def written(value: Any) -> bytes:
        value = cleaned(value)
        return json.dumps(value if hide is None else hide.hidden(value)).encode() + b"\n"

    limit_bytes = made.limit_bytes or PART_BYTES
    if made.lines is None:
        data = written(made.value)
        if len(data) > limit_bytes:
            raise MissingError(f"it has {len(data)} bytes, more than {limit_bytes}")
        return data, made.note()
    kept: deque[bytes] = deque()
    size = cut = 0
    for line in made.lines:
        kept.append(written(line))
        size += len(kept[-1])
        while size > limit_bytes:
            size -= len(kept.popleft())
            cut += 1
    said = [made.note(), f"the first {cut} lines were left out: no more than {limit_bytes} bytes" if cut else ""]
    return b"".join(kept), "; ".join(filter(None, said))


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
    archive.addfile(entry, io.BytesIO(data))


# ---- the parts ----


def _report(report: Any) -> Any:
    found = msgspec.to_builtins(report)
    for each in found["results"]:
        if each["name"] == "RDMA as the agent sees it":
            each["detail"] = ""  # names processes
    return found


def _config(name: str | None, config: Path | None) -> configuration.AgentConfig:
    return configuration.load(config or directories.default_config(name))


def _policy(name: str | None) -> Any:
    """The policy of the controller that runs, else the one where it belongs; why not, in words, where there is none."""
    try:
        facts = json.loads((directories.state_dir(name) / "lock").read_text())
        file = Path(facts["policy"]) if facts.get("policy") else directories.default_policy()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        try:
            file = directories.default_policy()
        except SwerveError as error:
            return str(error)
    try:
        return yaml_reader.Reader().read(yaml_reader.decoded(file.read_bytes()))
    except OSError as error:
        return f"{file}: {error.strerror or error}"
    except yaml_reader.NotYamlError as error:
        return f"{file}:{error.line}: {error}"


def _given(policy: Any) -> Any:
    if not isinstance(policy, dict):
        raise MissingError(policy if isinstance(policy, str) else "it is empty")
    return json.loads(json.dumps(policy, default=str))


def _self(name: str | None) -> Any:
    with Client(directories.agent_socket(name), frozenset({"self"})) as client:
        said = client.next(_ANSWER_S)
    if said is None:
        raise MissingError(f"the agent said nothing for {_ANSWER_S:g} s")
    return msgspec.to_builtins(said)


def _history(file: Path) -> Made:
    with as_owner(file):
        opened = file.open("rb")
    with opened:
        size = os.fstat(opened.fileno()).st_size
        opened.seek(max(0, size - HISTORY_BYTES))
        data = opened.read(HISTORY_BYTES)
    lines = data.split(b"\n")[1 if size > HISTORY_BYTES else 0 :]
    return Made(lines=_parsed(lines), note=lambda: "the end of it" if size > HISTORY_BYTES else "")


def _parsed(lines: Iterable[bytes]) -> Iterator[Any]:
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def json_of(command: tuple[str, ...]) -> Any:
    """What a command prints, which is JSON; an empty list when it prints nothing.

    Raises
    ------
    MissingError
        If there is no such command, or it fails, takes too long or prints something else.
    """
    try:
        done = subprocess.run(command, capture_output=True, timeout=_COMMAND_S, check=False)
    except FileNotFoundError:
        raise MissingError(f"the command {command[0]} is not here (package iproute2)") from None
    except subprocess.TimeoutExpired:
        raise MissingError(f"{' '.join(command)} took longer than {_COMMAND_S:g} s") from None
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise MissingError(words[0] if words else f"{' '.join(command)} failed")
    try:
        return json.loads(done.stdout or b"[]")
    except ValueError:
        raise MissingError(f"what {' '.join(command)} says is no JSON") from None


def _filters() -> Made:
    names = [name for _, name in socket.if_nameindex()]
    found: dict[str, Any] = {}
    for name in names[:_MOST_INTERFACES]:
        for direction in ("ingress", "egress"):
            listed = json_of(("tc", "-j", "filter", "show", "dev", name, direction))
            if listed:
                found.setdefault(name, {})[direction] = listed
    more = len(names) - _MOST_INTERFACES
    return Made(value=found, note=lambda: f"{more} more interfaces were left out" if more > 0 else "")


def _recorded(name: str | None, config: Path | None) -> Made:
    try:
        directory = _config(name, config).recording.directory
    except SwerveError:
        directory = ""
    told = reader.Read()
    lines = reader.lines(directories.recording(directory, name), time.time_ns() - _RECORDED_S * 10**9, told=told)
    return Made(
        lines=_parsed(lines),
        note=lambda: f"the last {_RECORDED_S} s" + (f"; {told.broken} lines were none" if told.broken else ""),
        limit_bytes=RECORDING_BYTES,
    )
