"""The flight recorder's end in the agent: every signal goes into the recording, and nothing waits for the disk.

The agent's thread hands lots of encoded lines to a thread that compresses and writes them (both let go of the
interpreter meanwhile). What that thread is too slow for is dropped and counted. Times are CLOCK_MONOTONIC nanoseconds;
file names have CLOCK_REALTIME.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from pathlib import Path
from typing import Final

from pytools.config import Recording
from pytools.errors import CapabilityError
from pytools.ipc.bus import Bus, Published
from pytools.ipc.wire import TYPES, is_detail
from pytools.owned_files import as_owner
from pytools.recording.segments import ASIDE, FINE_ONLY, NEVER, TRACKS, Track
from pytools.recording.writer import TrackWriter
from pytools.sources.source import Source

RECORDING_LATE_NS: Final = 750_000_000  # how late we may be called
_LOT_NS: Final = 250_000_000
_FLUSH_S: Final = 1.0
_WAITING_BYTES: Final = 16 << 20  # handed over and not yet compressed
_MIB: Final = 1 << 20
_HOUR_NS: Final = 3_600_000_000_000


class RecordingSource(Source):
    """Writes a recording.

    Parameters
    ----------
    settings : Recording
        Sizes and ages.
    directory : Path
        Where; made with mode 0700 when missing.
    long_window_ns : int
        Shorter windows are details: they go to the fine track alone.
    bus : Bus
        Whose signals.

    Raises
    ------
    CapabilityError
        If the directory cannot be made.
    """

    def __init__(self, settings: Recording, directory: Path, long_window_ns: int, bus: Bus) -> None:
        try:
            with as_owner(directory):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CapabilityError(
                f"{directory}: {error.strerror}",
                "name another with recording.directory, or set recording.retention: 0s",
            ) from None
        age_ns = int(settings.hours * _HOUR_NS)
        limits: dict[Track, float] = {"fine": settings.fine_mib, "coarse": settings.coarse_mib}
        writers = {track: TrackWriter(directory, track, int(limits[track] * _MIB), age_ns) for track in TRACKS}
        self._long_ns, self._bus = long_window_ns, bus
        self._lots: dict[Track, list[bytes]] = {track: [] for track in TRACKS}
        self._dropped = 0  # records
        self.failed: dict[str, str] = {}  # why nothing is written now, by track; another one after each tick
        self._thread = _Thread(writers)
        bus.add(self, TYPES - NEVER - ASIDE, self._offer, besides=ASIDE)
        self._thread.start()

    def _offer(self, published: Published) -> None:
        line = published.line()
        self._lots["fine"].append(line)
        if published.tag not in FINE_ONLY and not is_detail(published.signal, self._long_ns):
            self._lots["coarse"].append(line)

    def tick(self, now_ns: int) -> int:
        """Hand over what has come; returns when to be called next."""
        for track, lines in self._lots.items():
            if lines and not self._thread.hand_over(track, b"".join(lines)):
                self._dropped += len(lines)
            lines.clear()
        self.failed = self._thread.errors()
        return now_ns + _LOT_NS

    @property
    def waiting_bytes(self) -> int:
        """What was handed over and is not written yet."""
        return self._thread.waiting_bytes

    def drops(self) -> dict[str, int]:
        """Records that are missing in the recording: the writer was behind, or the disk refused them."""
        return {"recording_behind": self._dropped, "recording_disk": self._thread.lost()}

    def close(self) -> None:
        """Write what is left, and end the files in order."""
        self._bus.remove(self)
        self.tick(time.monotonic_ns())
        self._thread.finish()


class _Thread(threading.Thread):
    """Compresses and writes lots in the order in which they come."""

    def __init__(self, writers: dict[Track, TrackWriter]) -> None:
        super().__init__(name="swerve-recording", daemon=True)
        self._writers = writers
        self._lots: queue.SimpleQueue[tuple[Track, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.waiting_bytes = 0

    def hand_over(self, track: Track, lines: bytes) -> bool:
        """Have this written; False when too much waits already."""
        with self._lock:
            if self.waiting_bytes + len(lines) > _WAITING_BYTES:
                return False
            self.waiting_bytes += len(lines)
        self._lots.put((track, lines))
        return True

    def lost(self) -> int:
        return sum(writer.lost for writer in self._writers.values())

    def errors(self) -> dict[str, str]:
        found = {f"recording ({track})": writer.error for track, writer in self._writers.items()}
        return {name: error for name, error in found.items() if error}

    def finish(self) -> None:
        self._lots.put(None)
        self.join()

    def run(self) -> None:
        flush_s = time.monotonic() + _FLUSH_S
        ended = False
        while not ended:
            with contextlib.suppress(queue.Empty):
                lot = self._lots.get(timeout=max(0.0, flush_s - time.monotonic()))
                ended = lot is None
                if lot is not None:
                    self._write(*lot)
            if time.monotonic() >= flush_s:
                for writer in self._writers.values():
                    writer.flush()
                flush_s = time.monotonic() + _FLUSH_S
        for writer in self._writers.values():
            writer.close()

    def _write(self, track: Track, lines: bytes) -> None:
        self._writers[track].write(lines, time.time_ns())
        with self._lock:
            self.waiting_bytes -= len(lines)
