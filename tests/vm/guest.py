"""Runs the repository's tests in Debian's own kernel, under virtme-ng with an emulated processor.

The guest sees this machine's file system read-only (its writes to /tmp, /var, … stay in the guest's memory) and one
directory it can write to, at /mnt. Emulation makes it about ten times slower than the machine.
vng finds the modules and makes the emulator's command and the initial file system; what is run in the guest from its
first process on is `SCRIPT`: what vng starts there (udev, temporary files) takes longer than the kernel itself.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import compiled_outside
import native_build
import support
import tsc

from pytools.kernel.native import TAP

SHARED_IN_GUEST = "/mnt"
COMPILED, NATIVE = "compiled", "native"
SLOW_FACTOR = 30
# For all tests in the guest, its boot and the tests beside it included; without it a dead guest would be waited for.
LIMIT_S = 1800.0
MODULES = (
    *("sch_ingress", "cls_bpf", "sch_fq", "sch_tbf", "sch_htb", "veth", "rdma_rxe", "ib_uverbs", "rdma_ucm"),
    *("ip_gre", "sit"),  # make devices when they are loaded
)

# One processor each: with two, each atomic operation is emulated as one, and they wait for each other while only one of
# them runs out here. All cases, by themselves, see two.
PROCESSORS = "2" if os.environ.get("SWERVE_GUEST") == "all" else "1"

# What costs an emulator much and decides no test: mitigations of faults that it does not have, hardening (memory that
# is cleared when it is given, checks of copies), a fifth level of page tables, and user memory that is guarded from the
# kernel; ciphers that test themselves. Without fast byte copies (ERMS) the kernel copies and clears eight bytes at a
# time; with them the emulator does each byte. The processor is vng's (`max`) otherwise. Its counter is the clock, by
# the frequency that it is told (tsc.py): a look at the HPET leaves the emulated code.
# Nor does the boot count interrupts of the timer: a guest that has no processor meanwhile would panic for lack of them.
# Of its messages the console shows the last ones, of a panic.
KERNEL_OPTIONS = (
    "mitigations=off init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off apparmor=0 audit=0 "
    "cryptomgr.notests tsc=reliable no_timer_check nowatchdog quiet loglevel=1"
)
PROCESSOR = "-cpu max,-la57,-smap,-smep,-erms "

# vng's five serial devices have queues for 31 ports each: 320 descriptors, which the emulator would poll with every
# event. They have one port, after the one that is a console's.
FEW_PORTS = "-global virtio-serial-device.max_ports=2 "

# A second export of the root file system: the guest mounts it with a cache, which the boot's own root lacks. Without
# it every process reads its libraries anew through the emulated device (LLVM alone has 100 MB).
CACHED_ROOT = "-fsdev local,id=cached,path=/,security_model=none,readonly=on,multidevs=remap " + (
    "-device virtio-9p-pci,fsdev=cached,mount_tag=cached"
)

# The guest's first process, and what follows in the root with a cache. The checkout may lie in /tmp. Bytecode is this
# machine's (`compile_sources`). Where libraries lie at one address in every process, the emulator translates their code
# once.
SCRIPT = """#!/bin/sh
root=/srv
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=524288 cached $root
mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t devtmpfs devtmpfs $root/dev
mkdir $root/dev/pts $root/dev/shm
mount -t devpts devpts $root/dev/pts
mount -t tmpfs -o mode=755 tmpfs $root/run
mount --bind $root /opt
for place in dev/shm tmp; do mount -t tmpfs tmpfs $root/$place; done
mkdir -p $root{root}
mount --bind /opt{root} $root{root}
mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 virtme.initmount0 $root{shared}
exec chroot $root sh {shared}/inner
"""
INNER = """ln -s /proc/self/fd /dev/fd
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
echo 0 >/proc/sys/kernel/randomize_va_space
export HOME=/tmp PYTHONPATH={plugins} {environment}
ip link set lo up
modprobe -a {modules}
uname -r >{shared}/kernel
cd {root}
{python} -m pytest -p no:cacheprovider -p no:hypothesispytest -p guest_results --durations=40 @{shared}/tests \
	</dev/null >{shared}/said 2>&1
echo o >/proc/sysrq-trigger
while :; do :; done
"""


@dataclass(frozen=True)
class Result:
    """What became of one test in the guest."""

    outcome: str  # passed, failed, skipped
    words: str  # why it failed, or was skipped


@dataclass(frozen=True)
class Run:
    """What came back from one boot of the guest."""

    tests: frozenset[str]  # that it was to run
    kernel: str  # release; empty when it never got that far
    results: dict[str, Result]
    console: str  # and what pytest wrote


def shares(tests: Sequence[str]) -> list[list[str]]:
    """Which tests run in which guest, about half of the work in each: a guest uses one of our processors at most."""
    files = ("rdma", "tests/fabric/", "test_stamp_packet_scapy", "test_probe_tags")
    first = [test for test in tests if any(part in test.partition("::")[0] for part in files)]
    return [share for share in (first, [test for test in tests if test not in first]) if share]


def compile_sources() -> None:
    """Leave bytecode and the tap beside the sources, where the guest can only read: it would compile them again."""
    TAP.ready()
    command = [sys.executable, "-m", "compileall", "-q", "pytools", "steering", "tests"]
    subprocess.run(command, cwd=support.ROOT, stdout=subprocess.DEVNULL, check=False)


def kernel_image() -> Path | None:
    """The newest kernel of the distribution that is installed with its modules."""
    images = [
        image
        for image in Path("/boot").glob("vmlinuz-*-amd64")
        if Path("/lib/modules", image.name.removeprefix("vmlinuz-")).is_dir()
    ]
    return max(images, key=lambda image: image.stat().st_mtime, default=None)


def unpacked(image: Path, place: Path) -> Path:
    """The kernel in an image of it, left at this place: an emulated processor needs seconds to unpack it.

    Or the image, if it is packed in another way than Debian's are.
    """
    data = image.read_bytes()
    sectors = data[0x1F1]  # setup_sects; then payload_offset and payload_length: the x86 boot protocol
    offset, length = struct.unpack_from("<II", data, 0x248)
    packed = data[(sectors + 1) * 512 + offset :][:length]
    if not packed.startswith(b"\xfd7zXZ"):
        return image
    place.write_bytes(lzma.LZMADecompressor().decompress(packed))  # its length follows
    return place


class Guest:
    """One boot of the guest, in which these tests run beside whatever runs out here.

    It has what processor time nobody else asks for: tests out here depend on time, those in the guest wait longer.
    Its kernel is an image that is given, with its modules where such modules are, or the distribution's.
    """

    def __init__(self, tests: Sequence[str], shared: Path, limit_s: float, image: Path | None = None) -> None:
        image = image or kernel_image()
        assert image is not None
        self._tests, self._shared, self._limit_s = frozenset(tests), shared, limit_s
        self._end_s = time.monotonic() + limit_s
        write_script(tests, shared)
        compiled_outside.put(shared / COMPILED)
        native_build.for_guest(shared / NATIVE)
        directory, kernel = Path(sys.executable).parent, unpacked(image, shared / "vmlinux")
        # Instead of vng's, so that init is ours; panic: the emulator ends.
        options = f"{KERNEL_OPTIONS} tsc_early_khz={tsc.frequency_khz()} console=ttyS0 panic=-1 init={shared}/script"
        command = [
            *("chrt", "--idle", "0"),
            str(directory / "vng"),
            "--verbose",
            "--disable-kvm",  # nested virtualisation hangs on some hosts; emulation works everywhere
            *("--run", str(image), "--memory", "2G", "--cpus", PROCESSORS, "--user", "root"),
            *("--rwdir", f"{SHARED_IN_GUEST}={shared}"),
            f"--qemu-opts={PROCESSOR}{FEW_PORTS}{CACHED_ROOT} -kernel {kernel} -append '{options}'",
            *("--", "unused: the first process is ours"),
        ]
        with (shared / "console").open("wb") as console:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"},
                start_new_session=True,
            )
        # Where sessions are scheduled as groups (CONFIG_SCHED_AUTOGROUP), idle tasks give way within their own only.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text("19")

    def result(self) -> Run:
        """Wait until it has shut down, and say what became of the tests; no longer than the limit."""
        try:
            self._process.wait(max(0.0, self._end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            with (self._shared / "console").open("ab") as console:
                console.write(f"\n(stopped: not done after {self._limit_s:g} s)\n".encode())
        finally:
            self.stop()
        return collect(self._tests, self._shared)

    def stop(self) -> None:
        """End the guest and its helpers: the whole process group, which is ours."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def write_script(tests: Sequence[str], shared: Path) -> None:
    """Put what the guest runs where it can read it."""
    if teamd := os.environ.get("SWERVE_TEST_TEAMD"):  # tests/prove/teamd.py; the guest has a /tmp of its own
        shutil.copy(teamd, shared / "teamd")
    variables = {
        "SWERVE_SLOW_FACTOR": str(SLOW_FACTOR),
        "SWERVE_GUEST_RESULTS": f"{SHARED_IN_GUEST}/results",
        compiled_outside.VARIABLE: f"{SHARED_IN_GUEST}/{COMPILED}",
        native_build.VARIABLE: f"{SHARED_IN_GUEST}/{NATIVE}",
        "SWERVE_FORBID_SKIPS": os.environ.get("SWERVE_FORBID_SKIPS", ""),
        "SWERVE_TEST_KIND": os.environ.get("SWERVE_TEST_KIND", ""),  # tests/prove/vrf.py
        "SWERVE_TEST_TEAMD": f"{SHARED_IN_GUEST}/teamd" if teamd else "",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    words = {
        "modules": " ".join(MODULES),
        "shared": SHARED_IN_GUEST,
        "root": shlex.quote(str(support.ROOT)),
        "plugins": shlex.quote(str(Path(__file__).parent)),
        "python": shlex.quote(sys.executable),
        "environment": " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
    }
    for name, text in (("script", SCRIPT), ("inner", INNER)):
        (shared / name).write_text(text.format(**words))
    (shared / "script").chmod(0o755)
    (shared / "tests").write_text("".join(f"{test}\n" for test in tests))


def collect(tests: frozenset[str], shared: Path) -> Run:
    """Read what the guest wrote; a test that was seen to fail in any phase has failed."""

    def text(name: str) -> str:
        place = shared / name
        return place.read_text(errors="replace") if place.exists() else ""

    results: dict[str, Result] = {}
    for line in text("results").splitlines():
        entry = json.loads(line)
        earlier = results.get(entry["test"])
        if earlier is None or earlier.outcome != "failed":
            words = entry["why"] or "\n".join(part for part in (entry["words"], entry["captured"]) if part)
            results[entry["test"]] = Result(entry["outcome"], words)
    return Run(tests, text("kernel").strip(), results, text("console") + text("said"))
