"""The tap's end in the agent: hands tables to the RDMA processes that the tap was loaded into, and finds them again.

A process asks over a Unix socket, once for every 512 queue pairs, and is given the descriptor of a mappable BPF array
map that belongs to it alone. The map lives as long as the process has it in memory: an agent that starts later finds
it by its name, which tells the process. Whoever connects may be anybody: a hello is checked, the number of tables per
user is limited, and what a process writes into its table is for the reader to doubt, but for the process id, which
is put right here. Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.ipc.socket_files import Listener, peer
from pytools.kernel.bpf import mapped
from pytools.sources.rdma.owners import user_of
from pytools.sources.rdma.table import CLOSED, FREE, LIVE, Sight, Way

MAGIC: Final = 0x50415453  # tap/share.h
VERSION: Final = 1
HELLO: Final = struct.Struct("=5I")  # magic, version, bytes of a row, rows, tables it has
REPLY: Final = struct.Struct("=3I")  # magic, version, why refused (0: it is not)
NAME: Final = "swtap_"  # of a map, before the process id

NOT_UNDERSTOOD, TOO_MANY, NO_MAP, FOREIGN = 1, 2, 3, 4  # why a table is refused

CONVERSATIONS: Final = 64
TABLES_PER_PROCESS: Final = 16
TABLES_PER_USER: Final = 4  # but for root, unless configured otherwise
TABLES_OF_ROOT: Final = 256
_HELLO_NS: Final = 1_000_000_000
_TAKE_NS: Final = 300_000_000_000  # a process looks for a late answer when it makes, changes or destroys something
_TICK_NS: Final = 1_000_000_000
_LEFT_NS: Final = 10_000_000_000  # for the source to tell the last of a table; rows that make no sense are never told


class TapTable:
    seen_by: Literal["tap"] = "tap"

    def __init__(self, array: mapped.MappedArray, pid: int, uid: int) -> None:
        self.array, self.pid, self.uid = array, pid, uid
        self.left_ns = 0  # when the process had no more use of it
        self.records: NDArray[Any] = array.records
        self._counters = [name for name in self.records.dtype.names or () if name != "state"]

    def free(self, slot: int) -> None:
        """Let the process use this row for another queue pair; nothing happens while it uses it for this one."""
        if self.records["state"][slot] == LIVE:
            return
        row = self.records[slot]
        for name in self._counters:
            row[name] = np.zeros((), self.records.dtype[name])
        self.records["state"][slot] = FREE  # last

    def abandon(self) -> None:
        """The process is gone: so are its queue pairs."""
        state = self.records["state"]
        state[state != FREE] = CLOSED

    @property
    def empty(self) -> bool:
        """Whether no row is in use."""
        return not self.records["state"].any()

    def close(self) -> None:
        self.records = self.records[:0].copy()
        self.array.close()


class _Process:
    """A tapped process: a descriptor that tells its end, and its tables."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid, self.pidfd = pid, pidfd
        self.tables: list[TapTable] = []
        self.gone = False


class _Conversation:
    """A connection between hello and the word that the table is in place."""

    def __init__(self, sock: socket.socket, uid: int, until_ns: int) -> None:
        self.sock, self.uid, self.until_ns = sock, uid, until_ns
        self.given: TapTable | None = None


class TapServer(Way):
    """Serves tables to tapped processes; one of the source's ways in.

    Parameters
    ----------
    path : Path
        The socket. Any user may connect to it.
    record : numpy.dtype
        Layout of `struct swerve_qp`, as compiled.
    rows : int
        Queue pairs in one table (SWERVE_QPS).
    per_user : int
        Tables that all processes of one user may have at once; root may have TABLES_OF_ROOT.

    Raises
    ------
    SwerveError
        If another agent serves this socket, or it cannot be made.
    """

    def __init__(self, path: Path, record: np.dtype[Any], rows: int, per_user: int = TABLES_PER_USER) -> None:
        self._record, self._rows, self._per_user = record, rows, per_user
        self._processes: dict[int, _Process] = {}
        self._left: list[TapTable] = []  # of processes that are gone, until their rows have been told
        self.conversations: set[_Conversation] = set()  # connections of processes that have no table yet
        self._selector: selectors.BaseSelector | None = None
        self._refused = self._malformed = self._abandoned = 0
        self._listener = Listener(path, self._admit, 0o666, socket.SOCK_SEQPACKET)
        for name, fd in mapped.named(NAME):
            self._find(name, fd)

    # ---- what the source asks ----

    def register(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._listener.register(selector)
        for process in self._processes.values():
            self._watch(process)

    def tick(self, now_ns: int) -> int:
        """End conversations that say nothing, forget tables that are told; returns when to be called next."""
        self._listener.tick(now_ns)
        for each in [each for each in self.conversations if each.until_ns <= now_ns]:
            self._malformed += 1
            self._end(each)
        for table in [table for table in self._left if table.empty or now_ns > table.left_ns + _LEFT_NS]:
            self._left.remove(table)
            table.close()
        return now_ns + _TICK_NS

    def tables(self) -> Sequence[TapTable]:
        """The tables of all tapped processes, and of those that are gone and not told yet."""
        return [table for process in self._processes.values() for table in process.tables] + self._left

    def sight(self) -> Sight:
        return Sight(seen=tuple((pid, "tap") for pid, process in self._processes.items() if process.tables))

    def drops(self) -> dict[str, int]:
        """Processes refused, hellos not understood, tables that were not taken; pauses for want of descriptors."""
        return {
            "tap_refused": self._refused,
            "tap_malformed": self._malformed,
            "tap_abandoned": self._abandoned,
            "tap_accept_paused": self._listener.paused,
        }

    def close(self) -> None:
        """Stop serving. Tapped processes go on counting, for an agent to come."""
        for conversation in list(self.conversations):
            self._end(conversation)
        for process in self._processes.values():
            self._unregister(process.pidfd)
            os.close(process.pidfd)
            for table in process.tables:
                table.close()
        for table in self._left:
            table.close()
        self._processes, self._left = {}, []
        self._listener.close()

    # ---- processes ----

    def _find(self, name: str, fd: int) -> None:
        """A map of a process that an earlier agent gave it to."""
        try:
            array = mapped.MappedArray(fd, self._record)
        except SwerveError:
            self._malformed += 1  # of another version of swerve
            return
        pid = int(name.removeprefix(NAME)) if name.removeprefix(NAME).isdecimal() else 0
        process = self._process(pid) if _same_network(pid) and _has_map(pid) else None
        uid = user_of(pid)
        if process is None or uid is None or len(array.records) != self._rows:
            array.close()
            return
        if self._crowded(uid) or len(process.tables) >= TABLES_PER_PROCESS:
            self._refused += 1
            array.close()
            return
        process.tables.append(TapTable(array, pid, uid))

    def _crowded(self, uid: int) -> bool:
        held = sum(table.uid == uid for table in self.tables())
        return held >= (TABLES_OF_ROOT if uid == 0 else self._per_user)

    def _process(self, pid: int) -> _Process | None:
        if pid in self._processes:
            return self._processes[pid]
        try:
            process = self._processes[pid] = _Process(pid, os.pidfd_open(pid))
        except (OSError, ValueError):
            return None  # gone already
        self._watch(process)
        return process

    def _watch(self, process: _Process) -> None:
        def ended(_mask: int) -> None:
            self._ended(process)

        if self._selector is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, ended)

    def _ended(self, process: _Process) -> None:
        self._unregister(process.pidfd)
        os.close(process.pidfd)
        self._processes.pop(process.pid, None)
        self._leave(process)

    def _leave(self, process: _Process) -> None:
        """Its tables are of no more use to it, but the source has yet to tell their last state."""
        for table in process.tables:
            table.abandon()
            table.left_ns = time.monotonic_ns()
        self._left += process.tables
        process.tables = []

    def _unregister(self, what: int | socket.socket) -> None:
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(what)

    # ---- conversations ----

    def _admit(self, sock: socket.socket) -> None:
        uid = peer(sock)[1]
        theirs = sum(each.uid == uid for each in self.conversations)
        crowded = len(self.conversations) >= CONVERSATIONS or (uid != 0 and theirs >= CONVERSATIONS // 4)
        if crowded or self._selector is None:
            self._refused += 1
            sock.close()
            return
        conversation = _Conversation(sock, uid, time.monotonic_ns() + _HELLO_NS)
        self.conversations.add(conversation)

        def said(_mask: int) -> None:
            self._said(conversation)

        self._selector.register(sock, selectors.EVENT_READ, said)
        self._said(conversation)  # the hello is there already, as a rule

    def _end(self, conversation: _Conversation) -> None:
        """Close the connection, and take back a table that nobody said was in place."""
        self.conversations.discard(conversation)
        self._unregister(conversation.sock)
        conversation.sock.close()
        table, conversation.given = conversation.given, None
        if table is not None:
            self._abandoned += 1
            process = self._processes.get(table.pid)
            if process is not None and table in process.tables:
                process.tables.remove(table)
            table.close()

    def _said(self, conversation: _Conversation) -> None:
        try:
            words = conversation.sock.recv(256)
        except BlockingIOError:
            return
        except OSError:
            words = b""
        if conversation.given is None and words:
            self._answer(conversation, words)
            return
        if words == b"k":
            conversation.given = None  # it is the process's from now on
        elif not words and conversation.given is None:
            self._malformed += 1
        self._end(conversation)

    def _answer(self, conversation: _Conversation, words: bytes) -> None:
        pid, uid, _ = peer(conversation.sock)
        refused, table = self._table(pid, uid, words)
        if table is None:
            self._refused += 1
        reply = REPLY.pack(MAGIC, VERSION, refused)
        try:
            if table is None:
                conversation.sock.send(reply)
            else:
                conversation.given = table
                conversation.until_ns = time.monotonic_ns() + _TAKE_NS
                socket.send_fds(conversation.sock, [reply], [table.array.fd])
        except OSError:
            self._end(conversation)
            return
        if table is None:
            self._end(conversation)

    def _table(self, pid: int, uid: int, words: bytes) -> tuple[int, TapTable | None]:
        expected = (MAGIC, VERSION, self._record.itemsize, self._rows)
        if len(words) != HELLO.size or HELLO.unpack(words)[:4] != expected:
            return NOT_UNDERSTOOD, None
        crowded = self._crowded(uid)
        process = self._process(pid) if _same_network(pid) and not crowded else None
        if process is None:
            return TOO_MANY if crowded else FOREIGN, None
        if HELLO.unpack(words)[4] == 0 and process.tables:
            self._leave(process)  # it became another program
        if len(process.tables) >= TABLES_PER_PROCESS:
            return TOO_MANY, None
        try:
            table = TapTable(mapped.create(f"{NAME}{pid}", self._record, self._rows), pid, uid)
        except SwerveError:
            return NO_MAP, None
        process.tables.append(table)
        return 0, table


def _same_network(pid: int) -> bool:
    """Whether a process lives in this agent's network namespace; process 0 is one that this agent cannot see."""
    try:
        return pid > 0 and os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        return False


def _has_map(pid: int) -> bool:
    """Whether a process has some BPF map in its memory: a number that was used again has none."""
    try:
        return "bpf-map" in Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
