"""The write-ahead journal: JSON Lines, synced to disk before each act, so that whoever comes later can undo it.

Entries: intent (about to act), applied, failed, undone, released (somebody else changed the group: hands off).
About a whole run (`act_id` names it): confirmed, expired (confirming.py).
Only entries of this boot and this network namespace are outstanding: the kernel forgot the others.
`at_ns` is CLOCK_MONOTONIC, `unix_ns` CLOCK_REALTIME. One writer at a time: whoever holds the `Lock`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, Self

from pytools import places
from pytools.errors import CapabilityError
from steering.plan import Group, Member, Target, Weights, nexthop_group, weights_of

Kind = Literal["intent", "applied", "failed", "undone", "released", "confirmed", "expired"]
KINDS: Final = ("intent", "applied", "failed", "undone", "released", "confirmed", "expired")
FILE: Final = "journal.jsonl"
LOCK_FILE: Final = "lock"
ROTATE_BYTES: Final = 4 << 20
_SO_NETNS_COOKIE: Final = 71


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    kind: Kind
    act_id: str
    target: Target
    members: tuple[Member, ...]  # of the target before anything of ours, with their original weights
    before: Weights
    after: Weights
    because: str
    under: str
    scope: str  # boot and network namespace
    by: str = "controller"  # who wrote it: controller, guardian, command
    at_ns: int = 0
    unix_ns: int = 0
    origin: str = ""  # of the target; see `Group.origin`
    host: str = ""  # as the agent calls it: for whoever tells of this act later

    @property
    def group(self) -> Group:
        """The target before anything of ours; its destinations are not known any more."""
        return Group(self.target, (), self.members, self.before, origin=self.origin)

    @property
    def original(self) -> Weights:
        """The weights before anything of ours."""
        return weights_of((member.nexthop_id, member.weight) for member in self.members)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A target that may not have its original weights because of us."""

    group: Group  # as it was before us; no destinations
    ours: tuple[Weights, ...]  # weights of ours that the kernel may have
    last: Entry

    @property
    def target(self) -> Target:
        """Its name."""
        return self.group.target


@dataclass(frozen=True, slots=True)
class Contents:
    """What a journal says."""

    entries: tuple[Entry, ...]
    torn: int  # lines that are no entry: a write that a crash cut off

    def outstanding(self, scope: str) -> dict[Target, Outstanding]:
        """What is still to be undone, by target."""
        found: dict[Target, Outstanding] = {}
        _follow(found, self.entries, scope)
        return found

    def last_in_force(self, scope: str) -> dict[Target, tuple[Weights, ...]]:
        """Weights that the kernel may have had when a target was last there: of ours, or of one that is gone since."""
        outstanding: dict[Target, Outstanding] = {}
        found: dict[Target, tuple[Weights, ...]] = {}
        for entry in self.entries:
            if entry.scope != scope:
                continue
            before = outstanding.get(entry.target)
            _follow_one(outstanding, entry)
            found.pop(entry.target, None)
            if entry.kind == "released" and before is not None and not entry.after:
                found[entry.target] = before.ours
        return found | {target: each.ours for target, each in outstanding.items()}


def _follow(found: dict[Target, Outstanding], entries: Iterable[Entry], scope: str) -> None:
    for entry in entries:
        if entry.scope == scope:
            _follow_one(found, entry)


def _follow_one(found: dict[Target, Outstanding], entry: Entry) -> None:
    known = found.get(entry.target)
    group = known.group if known else entry.group
    match entry.kind:
        case "intent":
            ours = (*known.ours, entry.after, entry.before) if known else (entry.before, entry.after)
            found[entry.target] = Outstanding(group, tuple(dict.fromkeys(ours)), entry)
        case "applied":
            if entry.after == entry.original:
                found.pop(entry.target, None)
            else:
                found[entry.target] = Outstanding(group, (entry.after,), entry)
        case "failed":
            if known and entry.before == known.group.original:
                found.pop(entry.target)
            elif known:
                found[entry.target] = Outstanding(group, (entry.before,), entry)
        case "undone" | "released":
            found.pop(entry.target, None)


def scope() -> str:
    """This boot and this thread's network namespace, by numbers that are never used twice."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            raw = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            namespace = f"cookie:{int.from_bytes(raw, 'little')}"
        except OSError:  # before Linux 5.14
            namespace = f"inode:{os.stat('/proc/thread-self/ns/net').st_ino}"
    return f"{boot}/{namespace}"


def directory(netns: str | None) -> Path:
    """Where this instance's journal and lock are; made with mode 0700 when missing."""
    path = places.state_dir(netns)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    return path


def _not_ours(path: Path, error: OSError) -> CapabilityError:
    return CapabilityError(f"{path}: {error.strerror}", "run it as root")


def read(path: Path) -> Contents:
    """All that can be read of a journal; a missing one is empty."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return Contents((), 0)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    return _parse_all(text)


def _parse_all(text: bytes) -> Contents:
    found = [parse(line) for line in text.split(b"\n") if line]
    entries = tuple(entry for entry in found if entry is not None)
    return Contents(entries, len(found) - len(entries))


def parse(line: bytes) -> Entry | None:
    """The entry in a line; None for what is none."""
    try:
        raw = json.loads(line)
        known = {name: raw[name] for name in (f.name for f in fields(Entry)) if name in raw}
        if "group_id" in raw:
            known |= {"target": nexthop_group(int(raw["group_id"])), "members": _members_by_name(raw)}
        else:
            known["members"] = tuple(Member(int(n), str(g), str(i), int(w)) for n, g, i, w in raw["members"])
        for name in ("before", "after"):
            known[name] = weights_of((int(n), int(w)) for n, w in raw[name])
        entry = Entry(**known)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return entry if entry.kind in KINDS and isinstance(entry.target, str) else None


def _members_by_name(raw: dict[str, Any]) -> tuple[Member, ...]:
    """The members in an entry that knows nexthop groups only, by their names for people."""
    found = []
    for nexthop, weight in raw["original"]:
        gateway, _, interface = str(raw.get("names", {}).get(str(nexthop), "")).rpartition("dev ")
        found.append(Member(int(nexthop), gateway.strip(), interface, int(weight)))
    return tuple(found)


class Journal:
    """Appends entries, each on disk before `write` returns.

    Parameters
    ----------
    path : Path
        The file; made with mode 0600 when missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_synced(path)
        self._followed: tuple[str, int] = ("", 0)  # for which scope, and how much of the file
        self._outstanding: dict[Target, Outstanding] = {}

    def write(self, *entries: Entry) -> None:
        """Append entries, in one write, and wait until they are on disk.

        Raises
        ------
        OSError
            If not all of them are.
        """
        lines = [json.dumps(_as_line(entry), separators=(",", ":")).encode() for entry in entries]
        if lines:
            append_line(self._fd, b"\n".join(lines), self.path)
            os.fdatasync(self._fd)

    def read(self) -> Contents:
        """All that was written, by whomever."""
        return read(self.path)

    def outstanding(self, scope: str) -> Mapping[Target, Outstanding]:
        """What is still to be undone, by target; only what was appended since the last time is read."""
        known, start = self._followed
        size = os.fstat(self._fd).st_size
        if known != scope or size < start:  # another namespace, or somebody cut the file
            self._outstanding, start = {}, 0
        text = os.pread(self._fd, size - start, start)
        whole = text.rfind(b"\n") + 1
        if parse(text[whole:]) is not None:  # what is torn is closed off by the next line
            whole = len(text)
        _follow(self._outstanding, _parse_all(text[:whole]).entries, scope)
        self._followed = scope, start + whole
        return self._outstanding

    def rotate(self, scope: str) -> None:
        """Put a long journal aside once nothing in it is outstanding."""
        if os.fstat(self._fd).st_size < ROTATE_BYTES or self.outstanding(scope):
            return
        os.replace(self.path, self.path.with_suffix(".jsonl.1"))
        os.close(self._fd)
        self._fd = _open_synced(self.path)
        self._followed = "", 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_line(entry: Entry) -> dict[str, Any]:
    return asdict(entry) | {"members": [astuple(member) for member in entry.members]}


def append_line(fd: int, line: bytes, path: Path) -> None:
    """Append a line, or several; one that somebody, or a full disk, left torn before it is closed off.

    Raises
    ------
    OSError
        If it was not, or not wholly, written.
    """
    size = os.fstat(fd).st_size
    torn = size and os.pread(fd, 1, size - 1) != b"\n"
    data = (b"\n" if torn else b"") + line + b"\n"
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, "the disk is full", str(path))


def _open_synced(path: Path) -> int:
    """A journal opened for appending; its name, too, is on disk."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise _not_ours(path, error) from None
    os.fsync(fd)
    sync_folder(path.parent)
    return fd


def sync_folder(folder: Path) -> None:
    """Have the names in a directory on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def entry_now(  # the two clocks are read here, so that no caller forgets one
    kind: Kind,
    act_id: str,
    group: Group,
    before: Weights,
    after: Weights,
    because: str,
    under: str,
    scope: str,
    by: str = "controller",
    host: str = "",
) -> Entry:
    """An entry with the present time; `group` is the target before anything of ours."""
    return Entry(
        kind,
        act_id,
        group.target,
        group.members,
        before,
        after,
        because,
        under,
        scope,
        by,
        time.monotonic_ns(),
        time.time_ns(),
        group.origin,
        host,
    )


def as_json(entry: Entry) -> dict[str, Any]:
    """An entry for other programs."""
    return asdict(entry) | {"original": entry.original}
