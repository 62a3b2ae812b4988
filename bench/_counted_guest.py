"""A guest with Debian's own kernel whose time is counted in instructions: figures do not depend on this machine's load.

QEMU's clock (`-icount`) advances by a nanosecond an instruction, and where nothing runs, at once to the next timer. The
guest is told that its time stamp counter runs `FASTER` times as fast, so in its own time its one processor does that
many instructions a nanosecond. Its kernel then takes the timer of its processor for slower than it is, and a timer
would fire in vain again and again until its time has come; so the kernel's scale of it is corrected (`_correct_timer`).

The guest sees this machine's file system read-only, and one directory it can write to, at /mnt.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path += [str(Path(__file__).resolve().parent.parent / "tests" / each) for each in ("", "vm")]

import guest
import support
from _common import note

from pytools.errors import CapabilityError, SwerveError

FASTER: Final = 8
_BUSY: Final = "SWERVE_GUEST_BUSY"
_MODULES: Final = ("sch_ingress", "cls_bpf", "sch_tbf", "sch_fq", "veth", "tcp_bbr", "tcp_dctcp")
_SYMBOLS: Final = ("lapic_events", "__per_cpu_offset")
# struct clock_event_device: longest and shortest time in ns, then the scale and its shift.
_SCALE: Final = struct.Struct("<QQII")
_SCALE_OFFSET: Final = 32
_PACKET: Final = re.compile(rb"\$([^#]*)#[0-9a-f]{2}")
_PATIENCE_S: Final = 20.0
# Where the kernel sees the beginning of memory: in its own image, and wherever it wants (x86-64, without KASLR).
_TEXT: Final = 0xFFFF_FFFF_8000_0000
_DIRECT: Final = 0xFFFF_8880_0000_0000
_SCRIPT: Final = """#!/bin/sh
exec 2>/mnt/errors
grep -E ' ({symbols})$' /proc/kallsyms >/mnt/symbols.part && mv /mnt/symbols.part /mnt/symbols
while ! [ -e /mnt/corrected ]; do sleep 1; done
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
for module in {modules}; do modprobe $module; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=524288 cached /srv
for directory in proc sys dev run tmp mnt; do mount --rbind /$directory /srv/$directory; done
mkdir /tmp/cache && cp -r /mnt/{compiled} /tmp/cache/compiled.0
chrt --idle 0 sh -c 'while :; do :; done' &
export {busy}=$! HOME=/tmp SWERVE_CACHE_DIR=/tmp/cache PYTHONDONTWRITEBYTECODE=1
chroot /srv sh -c 'cd "$0" && exec "$@"' {root} {words} >/mnt/output
echo $? >/mnt/status
"""


def run(words: Sequence[str], shared: Path, limit_s: float) -> None:
    """Run a command in a guest; its output lines go to standard output as they come.

    Parameters
    ----------
    shared : Path
        An empty directory but for `guest.COMPILED`, compiled programs; the guest's /mnt.

    Raises
    ------
    CapabilityError
        If there is no second kernel.
    SwerveError
        If the command fails, or takes longer than the limit.
    """
    missing = support.missing("second kernel")
    image = guest.kernel_image()
    if missing or image is None:
        raise CapabilityError(f"there is no second kernel: {missing}", "run `make setup-vm`")
    script = _SCRIPT.format(
        symbols="|".join(_SYMBOLS),
        modules=" ".join(_MODULES),
        compiled=guest.COMPILED,
        busy=_BUSY,
        root=shlex.quote(str(support.ROOT)),
        words=shlex.join(words),
    )
    (shared / "script").write_text(script)
    directory, debugger = Path(sys.executable).parent, shared / "debugger"
    counted = f"-icount shift=0,sleep=off -gdb unix:{debugger},server=on,wait=off"
    command = [
        *(str(directory / "vng"), "--verbose", "--disable-kvm", "--run", str(image), "--memory", "3G"),
        *("--cpus", "1", "--user", "root", "--rwdir", f"/mnt={shared}"),
        *("--append", f"{guest.KERNEL_OPTIONS} nokaslr tsc_early_khz={FASTER * 1_000_000}"),
        *(f"--qemu-opts={guest.PROCESSOR}{guest.CACHED_ROOT} {counted}", "--", "sh /mnt/script"),
    ]
    environment = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}
    with (shared / "console").open("wb") as console:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _follow(process, shared, debugger, time.monotonic() + limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def settled() -> None:
    """In the guest, when all is loaded: from now on its time does jump to the next timer.

    Until then a process keeps its processor busy: else, while a file is read out here, time would jump on and on.
    """
    os.kill(int(os.environ[_BUSY]), signal.SIGKILL)


def _follow(process: subprocess.Popen[bytes], shared: Path, debugger: Path, end_s: float) -> None:
    symbols, shown = shared / "symbols", dict.fromkeys(("output", "errors"), 0)
    while process.poll() is None and time.monotonic() < end_s:
        if symbols.exists() and not (shared / "corrected").exists():
            _correct_timer(debugger, symbols.read_text())
            (shared / "corrected").touch()
        _show(shared, shown)
        time.sleep(0.2)
    _show(shared, shown)
    status = shared / "status"
    if not status.exists() or status.read_text().strip() != "0":
        console = (shared / "console").read_text(errors="replace").splitlines()[-20:]
        raise SwerveError("the command in the guest did not end well; its console ends with\n" + "\n".join(console))


def _show(shared: Path, shown: dict[str, int]) -> None:
    """Print what has been added; half a line waits."""
    for name, stream in (("output", sys.stdout), ("errors", sys.stderr)):
        file = shared / name
        if file.exists():
            new = file.read_bytes()[shown[name] :]
            whole = new[: new.rfind(b"\n") + 1]
            stream.buffer.write(whole)
            stream.flush()
            shown[name] += len(whole)


# ---- the timer ----


def _correct_timer(debugger: Path, symbols: str) -> None:
    """Let the kernel know how fast its processor's timer runs in its own time: by QEMU's debugger, in its memory."""
    where = {words[2]: int(words[0], 16) for words in map(str.split, symbols.splitlines())}
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_PATIENCE_S)
        link.connect(str(debugger))
        stub = _Stub(link)
        stub.ask("Qqemu.PhyMemMode:1")  # whatever runs now, and however it sees memory
        (offset,) = struct.unpack("<Q", stub.read(where["__per_cpu_offset"] - _TEXT, 8))
        place = offset - _DIRECT + where["lapic_events"] + _SCALE_OFFSET
        longest, shortest, scale, shift = _SCALE.unpack(stub.read(place, _SCALE.size))
        if not (0 < shortest < 100_000 and shift == 32 and 1e7 < scale < 2**32 / FASTER):
            raise SwerveError("the guest's kernel keeps its timers in another way than this expects")
        new = _SCALE.pack(longest // FASTER, shortest, scale * FASTER, shift)
        if stub.ask(f"M{place:x},{len(new):x}:{new.hex()}") != "OK":
            raise SwerveError("QEMU's debugger did not change the guest's memory")
        stub.ask("D")
    note("the guest is up")


class _Stub:
    """QEMU's end of GDB's remote protocol."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._got = link, b""

    def read(self, place: int, size: int) -> bytes:
        """Memory at a physical address."""
        answer = self.ask(f"m{place:x},{size:x}")
        try:
            return bytes.fromhex(answer)
        except ValueError:
            raise SwerveError(f"QEMU's debugger does not show the guest's memory: {answer}") from None

    def ask(self, words: str) -> str:
        """One request, and its answer; that the guest has stopped, which is said unasked, is none."""
        self._link.sendall(f"${words}#{sum(words.encode()) % 256:02x}".encode())
        while (answer := self._packet()).startswith("T"):
            pass
        return answer

    def _packet(self) -> str:
        while (found := _PACKET.search(self._got)) is None:
            more = self._link.recv(4096)
            if not more:
                raise SwerveError("QEMU's debugger hung up")
            self._got += more
        self._got = self._got[found.end() :]
        self._link.sendall(b"+")
        return found[1].decode()
