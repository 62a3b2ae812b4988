"""`bpf/probe.c` from user space: its maps and records. Layouts are those of swerve.h.

Addresses are texts, times CLOCK_MONOTONIC nanoseconds unless a record says otherwise. One thread.
"""

from __future__ import annotations

import contextlib
import secrets
import select
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.errors import UsageError
from pytools.kernel.addresses import mapped
from pytools.kernel.bpf import contract
from pytools.kernel.bpf.loader import Loaded
from pytools.sources.probing.measurements import Bases
from pytools.sources.probing.paths import PinnedPath, Session

SWEEP_ROWS: Final = 64  # of the sessions: one for each probe of a sweep that is under way
QUEUE_ROWS: Final = 32  # behind them: one for each path whose queue is looked at more often
MOST_SESSIONS: Final = (
    contract.constant("SWERVE_PROBE_SESSIONS") - SWEEP_ROWS - QUEUE_ROWS
)  # where those of sweeps begin
NUMBERS: Final = 1 << contract.constant("SWERVE_PROBE_SEQ_BITS")  # probes of a session before they begin again
SEQ_WRAP: Final = 1 << 32
DUPLICATE, OURS = (contract.constant(f"SWERVE_PROBE_{name}") for name in ("DUPLICATE", "OURS"))  # flags of a record
_MOST_PORTS: Final = contract.constant("SWERVE_PROBE_PORTS")
SHARED, SWEEP, QUEUE = (contract.constant(f"SWERVE_SESSION_{name}") for name in ("SHARED", "SWEEP", "QUEUE"))
_FAMILIES: Final = {each: contract.constant(f"SWERVE_FAMILY_IPV{each}") for each in (4, 6)}


class Requests(NamedTuple):
    """The requests of one peer that came in by one interface."""

    last_ns: int
    requests: int


class ProbeProgram:
    """The maps of one loaded `probe.c`.

    Parameters
    ----------
    slots : int
        Probes of one session that are remembered; a power of two, at most 65,536.

    Attributes
    ----------
    slow, slow_limit : ndarray
        By path, as in struct swerve_probe_path; the kernel writes the first.
    paths_fd : int
        The descriptor of the map with these; stays the program's.
    seq_base : int
        Random; with it a sequence number on the wire is `(seq_base + session * NUMBERS + number % NUMBERS) % 2^32`.
    """

    def __init__(self, loaded: Loaded, slots: int) -> None:
        if slots & (slots - 1) or not 1 <= slots <= 1 << 16:
            raise UsageError(f"{slots} probes per session cannot be remembered", "use a power of two up to 65536")
        self.seq_base, self.slots = secrets.randbits(32), slots
        self._ring = loaded.ring("probes", "probe")
        self._counters, self._peers = loaded.map("probe_counters"), loaded.map("probe_peers")
        self._requests, self._local_addresses = loaded.map("probe_requests"), loaded.map("probe_locals")
        self._known: dict[str, int] = {}
        self._locals: frozenset[str] = frozenset()
        with contextlib.ExitStack() as undo:
            # By edges: records that wake nobody make the ring readable, too.
            self._wakeups = undo.enter_context(select.epoll())
            self._wakeups.register(self._ring.fileno(), select.EPOLLIN | select.EPOLLET)
            mapped = [undo.enter_context(loaded.mapped(f"probe_{name}")) for name in ("settings", "paths", "sessions")]
            self._close = undo.pop_all().close
        self._settings, self.paths, self.sessions = (each.records for each in mapped)
        self.paths_fd = mapped[1].fd
        self.slow, self.slow_limit = self.paths["slow"], self.paths["slow_limit"]
        self._limits, self._graces_ns = self.paths["limit"], self.paths["grace_ns"]
        self._beat_ns = self._settings["beat_ns"]
        self._settings["seq_base"], self._settings["slots"] = self.seq_base, slots

    def set_peers(self, error_estimates: Mapping[str, int]) -> None:
        """Answer these hosts alone, by address; each reply carries the error estimate given here."""
        for address in self._known.keys() - error_estimates.keys():
            self._peers.delete(self._address(address))
        for address, estimate in error_estimates.items():
            if self._known.get(address) != estimate:
                value = np.zeros((), self._peers.value)
                value["error_estimate"] = estimate
                self._peers.update(self._address(address), value)
        self._known = dict(error_estimates)

    def _address(self, address: str) -> Any:
        return np.frombuffer(mapped(address), self._peers.key)[0]

    def set_locals(self, addresses: Iterable[str]) -> None:
        """Answer requests to these addresses of this host; all others are somebody else's."""
        wanted = frozenset(addresses)
        for address in self._locals - wanted:
            self._local_addresses.delete(self._address(address))
        for address in wanted - self._locals:
            self._local_addresses.update(self._address(address), np.uint8(1))
        self._locals = wanted

    def set_ports(self, ports: Iterable[int]) -> None:
        """Say which UDP ports the sender holds: replies to them end in the kernel."""
        wanted = sorted(set(ports))
        self._settings["ports"] = np.pad(np.array(wanted, np.uint16), (0, _MOST_PORTS - len(wanted)))

    def set_key(self, key: bytes) -> None:
        """Sign probes and replies with these 16 bytes, and believe none without; empty: neither."""
        self._settings["keyed"] = 0
        if key:
            self._settings["key"] = np.frombuffer(key, "<u8")
            self._settings["keyed"] = 1

    def set_path(self, pinned: PinnedPath) -> None:
        """Lead the probes of a path to its gateway; an on-link peer is its own. What stays as it was is left alone."""
        record, remote = self.paths[pinned.index : pinned.index + 1], pinned.path.address
        gateway = pinned.path.gateway or remote
        family = _FAMILIES[6 if ":" in gateway else 4]  # IPv4 may be routed by an IPv6 gateway
        same = record["gateway"][0].tobytes() == mapped(gateway) and record["remote"][0].tobytes() == mapped(remote)
        if same and (record["ifindex"][0], record["family"][0]) == (pinned.ifindex, family):
            return
        self.forget_path(pinned.index)
        record["remote"], record["gateway"] = self._address(remote), self._address(gateway)
        record["family"], record["bare"] = family, pinned.bare
        record["ifindex"] = pinned.ifindex

    def forget_path(self, path: int) -> None:
        """Send no probe along this path any more; whoever still holds its row finds another generation there."""
        generation = self.paths["generation"][path] + np.uint16(1)
        self.paths["ifindex"][path] = 0
        self.paths[path] = np.zeros((), self.paths.dtype)
        self.paths["generation"][path] = generation

    def set_limits(self, limits: NDArray[np.int64], graces_ns: NDArray[np.int64]) -> None:
        """Say, by path, how many unanswered probes make it silent (0: never), and how late an answer may be."""
        self._limits[: len(limits)], self._graces_ns[: len(limits)] = limits, graces_ns

    def set_slow(self, slow_ns: NDArray[np.int64], limits: NDArray[np.int64]) -> None:
        """Say, by path, from which t2 - t1 on a sample is slow, and how many in a row wake the agent (0: never)."""
        self.paths["slow_ns"][: len(limits)], self.slow_limit[: len(limits)] = slow_ns, limits

    def set_bases(self, rows: NDArray[np.intp], at_ns: int, until_ns: int, bases: Bases) -> None:
        """Say from what t2 - t1 on a probe along these paths has waited, and until when that holds.

        Where it is not known, the kernel learns nothing of the queue from now on.
        """
        self.paths["base_until_ns"][rows] = 0
        columns = {
            "base_at_ns": at_ns,
            "base_ns": bases.there_ns,
            "base_round_trip_ns": bases.round_trip_ns,
            "base_drift": bases.drift,
            "base_slack_ns": bases.slack_ns,
            "base_until_ns": np.where(bases.known, until_ns, 0),
        }
        for name, values in columns.items():
            self.paths[name][rows] = values

    def set_sweep_ports(self, first: int, ports: int) -> None:
        """Say by which UDP ports sweeps leave: replies to them end in the kernel, too."""
        self._settings["sweep_ports"] = 0
        self._settings["sweep_port"], self._settings["sweep_ports"] = first, ports

    def set_session(self, session: Session, kind: int = 0) -> None:
        """Take replies to the probes of a session; `kind`: SWEEP or QUEUE.

        What the kernel has learnt of a session stays, unless it is another one now.
        """
        record, pinned, port = self.sessions[session.row : session.row + 1], session.pinned, session.source_port
        path, remote = pinned.index, pinned.path.address
        flags = (SHARED if pinned.shared_clock else 0) | kind
        same = record["remote"][0].tobytes() == mapped(remote)
        if same and (record["path"][0], record["port"][0], record["flags"][0]) == (path, port, flags):
            return
        record["port"] = 0
        record["remote"], record["path"] = self._address(remote), path
        record["flags"], record["ours"] = flags, 0
        record["port"] = port

    def forget_session(self, session: int) -> None:
        """Take no reply for this session any more."""
        self.sessions[session] = np.zeros((), self.sessions.dtype)

    def seq(self, sessions: NDArray[Any], numbers: NDArray[Any]) -> NDArray[np.int64]:
        """Sequence numbers on the wire of the probes with these numbers."""
        seq: NDArray[np.int64] = (self.seq_base + sessions * NUMBERS + numbers % NUMBERS) % SEQ_WRAP
        return seq

    def set_lost_interface(self, ifindex: int) -> None:
        """Tell the peers, in replies and signed probes, which interface has lost its carrier; 0: none."""
        self._settings["lost_interface"] = ifindex & 0xFFFF

    def beat(self, now_ns: int) -> None:
        """Show that the agent works: the age of the last beat travels in every reply."""
        self._beat_ns[0] = now_ns

    def fileno(self) -> int:
        """For a selector: readable when the kernel has something to say that cannot wait, until `read` is called."""
        return self._wakeups.fileno()

    def read(self) -> NDArray[Any]:
        """The records (struct swerve_probe) since the last call."""
        self._wakeups.poll(0)
        return self._ring.read()

    def requests(self) -> dict[tuple[bytes, int], Requests]:
        """By peer's address (16 bytes, IPv4-mapped) and interface index, what came in from it."""
        keys, values = self._requests.read()
        remotes, interfaces = keys["remote"]["bytes"], keys["ifindex"].tolist()
        columns = zip(remotes, interfaces, values["last_ns"].tolist(), values["count"].tolist(), strict=True)
        return {(remote.tobytes(), ifindex): Requests(last, count) for remote, ifindex, last, count in columns}

    def counters(self) -> dict[str, int]:
        """All counters by name, since the program was loaded."""
        return dict(zip(contract.counters("probe"), self._counters.read_percpu_sum().tolist(), strict=True))

    def close(self) -> None:
        """Unmap the maps; they are the loader's."""
        del self._settings, self.paths, self.sessions, self.slow, self.slow_limit
        del self._beat_ns, self._limits, self._graces_ns
        self._close()
