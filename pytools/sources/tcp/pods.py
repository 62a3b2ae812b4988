"""Names of pods and containers, from what kubelet and runtimes leave on disk: no API server is asked.

Everything read is bounded, and no link below the directories is followed. What is not as it should be is counted and
left out. One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from pytools.kernel.printable import printable

_MOST_BYTES: Final = 256 * 1024  # of a file; specifications have 10 to 60 KiB
_MOST_NAME: Final = 253  # characters, of each part of a name
_MOST_ENTRIES: Final = 16384  # of the directory of logs
_REMEMBERED: Final = 4096
_AGAIN_NS: Final = 10 * 10**9

_LOGS: Final = "var/log/pods"  # of kubelet: a directory NAMESPACE_NAME_UID per pod
_TASKS: Final = "containerd/io.containerd.runtime.v2.task/k8s.io"
# Directory with one directory per container, and the file in that: OCI specifications, and Docker's own file.
_FILES: Final = (
    (f"run/{_TASKS}", ("config.json",)),
    (f"run/k3s/{_TASKS}", ("config.json",)),
    ("run/containers/storage/overlay-containers", ("userdata", "config.json")),  # CRI-O
    ("var/lib/containers/storage/overlay-containers", ("userdata", "config.json")),
    ("var/lib/docker/containers", ("config.v2.json",)),
)
# Annotations or labels: namespace, name.
_POD: Final = (
    ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name"),
    ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name"),
)

_UID: Final = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # the latter of static pods
_GROUP: Final = re.compile(rf"(?:[\w-]*kubepods[\w-]*-)?pod({_UID})(?:\.slice)?")
_LOG: Final = re.compile(rf"([a-z0-9-]{{1,63}})_([a-z0-9.-]{{1,253}})_({_UID})")
_IDENTIFIER: Final = re.compile(r"[0-9a-f]{64}")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def pod(path: str) -> str:
    """The UID of the pod whose control group lies on the path; empty for none.

    >>> pod("/kubepods.slice/kubepods-pod0123_4567.slice")
    ''
    >>> pod("/kubepods/burstable/pod" + 32 * "a" + "/x") == 32 * "a"
    True
    """
    for part in path.split("/"):
        found = _GROUP.fullmatch(part)
        if found:
            return found[1].replace("_", "-")
    return ""


def unit(path: str) -> str:
    """The innermost systemd service on the path; empty for none."""
    return next((part for part in reversed(path.split("/")) if part.endswith(".service")), "")


class Pods:
    """Names by UID of the pod and by identifier of the container.

    Parameters
    ----------
    root : Path
        Where the directories are looked for.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.refused = 0  # entries and files that were not as they should be
        self._root = root
        self._logged: dict[str, str] = {}
        self._logs_due_ns = 0
        self._read: OrderedDict[str, tuple[int, str]] = OrderedDict()  # container -> when read, name

    def name(self, uid: str, container: str, now_ns: int) -> str:
        """NAMESPACE/NAME of a pod, or the name of a container of none; empty while nothing on disk tells it."""
        if uid and uid not in self._logged and now_ns >= self._logs_due_ns:
            self._logs_due_ns = now_ns + _AGAIN_NS
            self._logged = self._logs()
        return self._logged.get(uid, "") or self._of_container(container, now_ns)

    def _of_container(self, container: str, now_ns: int) -> str:
        if not _IDENTIFIER.fullmatch(container):
            return ""
        read_ns, name = self._read.get(container, (-_AGAIN_NS, ""))
        if not name and now_ns - read_ns >= _AGAIN_NS:
            name = next(filter(None, (self._described(place, (container, *file)) for place, file in _FILES)), "")
            self._read[container] = now_ns, name
            while len(self._read) > _REMEMBERED:
                self._read.popitem(last=False)
        return name

    def _logs(self) -> dict[str, str]:
        found: dict[str, str] = {}
        with contextlib.suppress(OSError), os.scandir(self._root / _LOGS) as entries:
            for count, entry in enumerate(entries):
                named = _LOG.fullmatch(entry.name)
                if count >= _MOST_ENTRIES or named is None:
                    self.refused += 1
                    if count >= _MOST_ENTRIES:
                        break
                    continue
                found[named[3]] = f"{named[1]}/{named[2]}"
        return found

    def _described(self, place: str, file: tuple[str, ...]) -> str:
        try:
            text = _contents(self._root / place, file)
        except FileNotFoundError:
            return ""
        except OSError:
            self.refused += 1
            return ""
        try:
            name = described(msgspec.json.decode(text))
        except _UNREADABLE:
            name = None
        if name is None:
            self.refused += 1
        return name or ""


def described(document: Any) -> str | None:
    """The name that a runtime's description of a container tells: empty for none, None for no description.

    >>> described({"annotations": {"io.kubernetes.pod.name": "p", "io.kubernetes.pod.namespace": "n"}})
    'n/p'
    """
    if not isinstance(document, dict):
        return None
    labels = _dictionary(_dictionary(document, "Config"), "Labels")
    for given in (_dictionary(document, "annotations"), labels):
        for keys in _POD:
            parts = [_text(given, key) for key in keys]
            if all(parts):
                return "/".join(parts)
    return _text(document, "Name").removeprefix("/")


def _dictionary(given: Mapping[Any, Any], key: str) -> Mapping[Any, Any]:
    value = given.get(key)
    return value if isinstance(value, dict) else {}


def _text(given: Mapping[Any, Any], key: str) -> str:
    value = given.get(key)
    return printable(value) if isinstance(value, str) and len(value) <= _MOST_NAME else ""


def _contents(place: Path, file: tuple[str, ...]) -> bytes:
    """A regular file of bounded size; `place` itself may be a link, nothing below it.

    Raises
    ------
    OSError
        If it is anything else, or cannot be read; FileNotFoundError if it is not there.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would have us wait
    with contextlib.ExitStack() as opened:
        at = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, at)
        for part in file:
            directory = 0 if part is file[-1] else os.O_DIRECTORY
            at = os.open(part, flags | directory, dir_fd=at)
            opened.callback(os.close, at)
        found = os.fstat(at)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise OSError("no regular file of a sensible size")
        text = os.read(at, _MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise OSError("larger than it said")
    return text
