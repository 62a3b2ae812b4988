"""The ring of one process of a job: what NCCL's profiler plugin (plugin.c) writes, and the mask that is written for it.

The file belongs to the job's user, who may be anybody: it is reached without following a link, read and written by
calls and never mapped (its owner could cut it short), and what is in it is doubted. One reader at a time. Times are
CLOCK_MONOTONIC nanoseconds, those of the GPU its globaltimer's. One thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import RefusedError, SwerveError, not_permitted

DIRECTORY_VARIABLE: Final = "SWERVE_NCCL_DIR"
WATCHED: Final = "swerve-nccl-watch-"  # how the directories of `swerve jobs watch` begin, which has a reader
MAGIC, VERSION, RECORDS, COMMUNICATORS = 0x4C434E53, 1, 8192, 256
STALE_NS: Final = 60_000_000_000  # RING_STALE_NS
COLLECTIVE, P2P, KERNEL, PROXY = 1, 2, 3, 4  # enum ring_kind
EVENTS: Final = {"operations": 0b110, "proxy": 0b11000, "kernel": 1 << 6}  # bits of the mask; each brings operations
COUNTERS: Final = ("full", "no_slot", "no_communicator", "unknown", "foreign", "unfinished")  # enum ring_counter

_HEADER: Final = np.dtype(
    {
        "names": [
            *("magic", "version", "records", "communicators", "record_bytes", "pid", "created_ns", "read", "until_ns"),
            *("events", "written", "alive_ns", "applied", "closed", "counters"),
        ],
        "formats": [*["u4"] * 6, *["u8"] * 3, "u4", "u8", "u8", "u4", "u4", ("u8", len(COUNTERS))],
        "offsets": [0, 4, 8, 12, 16, 20, 24, 64, 72, 80, 128, 192, 200, 204, 256],
        "itemsize": 4096,
    }
)
COMMUNICATOR: Final = np.dtype(
    {
        "names": ["serial", "hash", "created_ns", "closed_ns", "rank", "ranks", "nodes", "interface", "name"],
        "formats": ["u8", "u8", "u8", "u8", "i4", "i4", "i4", "u4", "S64"],
        "offsets": [0, 8, 16, 24, 32, 36, 40, 44, 48],
        "itemsize": 128,
    }
)
RECORD: Final = np.dtype(
    {
        "names": [
            *("id", "parent", "start_ns", "stop_ns", "communicator", "number", "bytes", "peer", "kind", "channel"),
            *("send", "sample"),  # sample: of operations, twice its number, plus 1 if some may be missing beside it
            *("called_ns", "function", "datatype", "algorithm", "protocol"),  # from called_ns on: operations
            *("gpu_start_ns", "gpu_stop_ns"),  # kernels
            *("wait_ns", "steps"),  # proxies
        ],
        "formats": [
            *["u8"] * 7,
            *("i4", "u1", "u1", "u1", "u1"),
            *("u8", "S16", "S16", "S16", "S8"),
            *("u8", "u8"),
            *(("u8", 3), "u8"),
        ],
        "offsets": [*range(0, 56, 8), 56, 60, 61, 62, 63, 64, 72, 88, 104, 120, 64, 72, 64, 88],
        "itemsize": 128,
    }
)
_ROWS: Final = _HEADER.itemsize
_TURNS: Final = _ROWS + COMMUNICATORS * COMMUNICATOR.itemsize
_RECORDS: Final = _TURNS + RECORDS * 8
FILE_BYTES: Final = _RECORDS + RECORDS * RECORD.itemsize


def directories() -> list[Path]:
    """Where rings are: the directory that the environment names, else those of all users."""
    named = os.environ.get(DIRECTORY_VARIABLE)
    return [Path(named)] if named else sorted(Path("/dev/shm").glob("swerve-nccl-*"))


def find(places: list[Path] | None = None) -> list[Path]:
    """The files that rings are in, of processes that live or have lived."""
    return sorted(file for place in (directories() if places is None else places) for file in place.glob("*.ring"))


class Ring:
    """The ring of one process; its only reader.

    Attributes
    ----------
    pid : int
        Of the process, as itself sees it.
    user : int
        Whose file it is.
    created_ns : int
        When it was made.

    Raises
    ------
    CapabilityError
        If this user may not use it.
    RefusedError
        If it is not what the plugin makes, or has a reader.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as undo:
            self._directory = self._opened(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            undo.callback(os.close, self._directory)
            self._fd = self._opened(path, os.O_RDWR | os.O_NONBLOCK, self._directory)
            undo.callback(os.close, self._fd)
            self._check()
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RefusedError(f"{path} has a reader", "end it, or wait until it has ended") from None
            header = self._header()
            self.pid, self.created_ns = int(header["pid"]), int(header["created_ns"])
            self.user = os.fstat(self._fd).st_uid
            self._read = int(header["read"])
            undo.pop_all()

    @staticmethod
    def _opened(path: Path, flags: int, directory: int | None = None) -> int:
        name = path if directory is None else path.name
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except PermissionError as error:
            raise not_permitted(error, path) from None
        except OSError as error:
            raise RefusedError(f"{path}: {error.strerror}") from None

    def _check(self) -> None:
        """Refuse what another user could have put there, and what the plugin did not make."""
        place, file = os.fstat(self._directory), os.fstat(self._fd)
        if place.st_uid not in (0, file.st_uid) or place.st_mode & 0o022:
            raise RefusedError(f"{self.path}: others can write its directory")
        if not stat.S_ISREG(file.st_mode) or file.st_mode & 0o077 or file.st_nlink != 1:
            raise RefusedError(f"{self.path}: not a file of its owner's alone")
        header = self._header() if file.st_size == FILE_BYTES else None
        expected = (MAGIC, VERSION, RECORDS, COMMUNICATORS, RECORD.itemsize)
        if header is None or tuple(header.tolist()[:5]) != expected:
            raise RefusedError(
                f"{self.path}: not a ring of this version of swerve", "start the job again with this one"
            )

    def _bytes(self, size: int, at: int) -> bytes:
        found = os.pread(self._fd, size, at)
        if len(found) != size:
            raise SwerveError(f"{self.path} was cut short")
        return found

    def _header(self) -> Any:
        return np.frombuffer(self._bytes(_HEADER.itemsize, 0), _HEADER)[0]

    def _around(self, first: int, many: int, base: int, size: int) -> bytes:
        """Places of a ring from a position on; the last is followed by the first."""
        at = first % RECORDS
        end = min(many, RECORDS - at)
        found = self._bytes(end * size, base + at * size)
        return found + self._bytes((many - end) * size, base) if many > end else found

    def skip(self) -> None:
        """Leave out what was written so far; the ring is free again."""
        self._read = int(self._header()["written"])
        self._write("read", self._read)

    def read(self, most: int = RECORDS) -> NDArray[Any]:
        """All records since the last call, as a copy; those that fit are free again.

        Parameters
        ----------
        most : int
            No more than these, the oldest.

        Returns
        -------
        ndarray of RECORD, shape (n,)
        """
        written = int(self._header()["written"])
        many = min(max(written - self._read, 0), most)
        if not many:
            return np.empty(0, RECORD)
        turns = np.frombuffer(self._around(self._read, many, _TURNS, 8), np.uint64)
        whole = turns == np.arange(self._read + 1, self._read + 1 + many, dtype=np.uint64)
        done = many if whole.all() else int(whole.argmin())  # stop at the first that is still being written
        records = np.frombuffer(self._around(self._read, done, _RECORDS, RECORD.itemsize), RECORD)
        self._read += done
        self._write("read", self._read)
        return records

    def _write(self, field: str, value: int) -> None:
        assert _HEADER.fields is not None
        kind, at = _HEADER.fields[field][:2]
        os.pwrite(self._fd, np.array(value, kind).tobytes(), at)

    def want(self, events: int, until_ns: int) -> None:
        """Have these events recorded until then; the plugin looks about four times a second.

        Parameters
        ----------
        events : int
            Sum of some of EVENTS; 0 for none.
        until_ns : int
            When the wish lapses, unless it is renewed.
        """
        self._write("events", events)
        self._write("until_ns", until_ns)

    @property
    def applied(self) -> int:
        """The events that are in force: what NCCL reports of the first operations of each period (limit.h)."""
        return int(self._header()["applied"])

    def communicators(self) -> NDArray[Any]:
        """The communicators that this process has or had, as an array of COMMUNICATOR."""
        rows = np.frombuffer(self._bytes(COMMUNICATORS * COMMUNICATOR.itemsize, _ROWS), COMMUNICATOR)
        used: NDArray[Any] = rows[rows["serial"] != 0]
        return used

    def counters(self) -> dict[str, int]:
        """What was lost, by reason."""
        return dict(zip(COUNTERS, self._header()["counters"].tolist(), strict=True))

    def is_over(self, now_ns: int) -> bool:
        """Whether nothing more will come: the process has ended, or has given no sign of life for a minute."""
        header = self._header()
        return bool(header["closed"]) or abs(now_ns - int(header["alive_ns"])) > STALE_NS

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path.name, dir_fd=self._directory)

    def close(self) -> None:
        """Let another read it. What is wanted lapses by itself."""
        os.close(self._fd)
        os.close(self._directory)
