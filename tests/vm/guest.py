"""Runs the repository's tests in Debian's own kernel, under virtme-ng with an emulated processor.

The guest sees this machine's file system read-only (its writes to /tmp, /var, … stay in the guest's memory) and one
directory it can write to, at /mnt. Emulation makes it about ten times slower than the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import support

SHARED_IN_GUEST = "/mnt"
SLOW_FACTOR = 10
MODULES = ("sch_ingress", "cls_bpf", "sch_tbf", "sch_htb", "veth", "rdma_rxe", "ib_uverbs", "rdma_ucm")

# A second export of the root file system: the guest mounts it with a cache, which the boot's own root lacks. Without
# it every process reads its libraries anew through the emulated device (LLVM alone has 100 MB).
CACHED_ROOT = "-fsdev local,id=cached,path=/,security_model=none,readonly=on,multidevs=remap " + (
    "-device virtio-9p-pci,fsdev=cached,mount_tag=cached"
)

# Runs as root in the guest. Debian mounts no BPF file system there; bytecode goes to the guest's memory.
SCRIPT = """#!/bin/sh
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
for module in {modules}; do modprobe $module; done
uname -r >{shared}/kernel
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=524288 cached /srv
for directory in proc sys dev run tmp {shared}; do mount --rbind /$directory /srv/$directory; done
export HOME=/tmp PYTHONPYCACHEPREFIX=/tmp/bytecode PYTHONPATH={plugins} {environment}
unset PYTHONDONTWRITEBYTECODE
cd {root}
exec chroot /srv sh -c 'cd "$0" && exec "$@"' {root} {python} -m pytest -p no:cacheprovider -p guest_results \
	--durations=20 @{shared}/tests
"""


@dataclass(frozen=True)
class Result:
    """What became of one test in the guest."""

    outcome: str  # passed, failed, skipped
    words: str  # why it failed, or was skipped


@dataclass(frozen=True)
class Run:
    """What came back from one boot of the guest."""

    kernel: str  # release; empty when it never got that far
    results: dict[str, Result]
    console: str


def kernel_image() -> Path | None:
    """The newest kernel of the distribution that is installed with its modules."""
    images = [
        image
        for image in Path("/boot").glob("vmlinuz-*-amd64")
        if Path("/lib/modules", image.name.removeprefix("vmlinuz-")).is_dir()
    ]
    return max(images, key=lambda image: image.stat().st_mtime, default=None)


def run(tests: Sequence[str], shared: Path, limit_s: float) -> Run:
    """Boot the guest, run these tests in it, shut it down; never longer than the limit."""
    image = kernel_image()
    assert image is not None
    write_script(tests, shared)
    directory = Path(sys.executable).parent
    command = [
        str(directory / "vng"),
        "--disable-kvm",  # nested virtualisation hangs on some hosts; emulation works everywhere
        *("--run", str(image), "--memory", "2G", "--cpus", "2", "--user", "root"),
        *("--rwdir", f"{SHARED_IN_GUEST}={shared}", f"--qemu-opts={CACHED_ROOT}"),
        *("--", f"sh {SHARED_IN_GUEST}/script"),
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
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            console.write(f"\n(stopped: not done after {limit_s:g} s)\n".encode())
        finally:
            stop(process)
    return collect(shared)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the guest and its helpers: the whole process group, which is ours."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_script(tests: Sequence[str], shared: Path) -> None:
    """Put what the guest runs where it can read it."""
    variables = {
        "SWERVE_SLOW_FACTOR": str(SLOW_FACTOR),
        "SWERVE_GUEST_RESULTS": f"{SHARED_IN_GUEST}/results",
        "SWERVE_FORBID_SKIPS": os.environ.get("SWERVE_FORBID_SKIPS", ""),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    script = SCRIPT.format(
        modules=" ".join(MODULES),
        shared=SHARED_IN_GUEST,
        root=shlex.quote(str(support.ROOT)),
        plugins=shlex.quote(str(Path(__file__).parent)),
        python=shlex.quote(sys.executable),
        environment=" ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
    )
    (shared / "script").write_text(script)
    (shared / "tests").write_text("".join(f"{test}\n" for test in tests))


def collect(shared: Path) -> Run:
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
    return Run(text("kernel").strip(), results, text("console"))
