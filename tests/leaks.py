"""What a test could leave behind on the machine, as a set of sentences: taken before and after, and compared.

Looks at the namespace the tests run in, the list of named namespaces, pinned BPF objects, the runtime
directory, and the processes that carry the session's mark in their environment.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import support

SESSION_VARIABLE = "SWERVE_TEST_SESSION"  # in the environment of every process that a test starts


def command_line(pid: int) -> str:
    """What the process was started as; it may have ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def _processes_of_session() -> set[str]:
    """Living processes that a test of this session started, directly or not."""
    mark = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        try:
            ours = pid != os.getpid() and mark in (place / "environ").read_bytes()
        except OSError:
            continue
        if ours:
            found.add(f"process {pid} {command_line(pid)}")
    return found


def _listed(place: Path, pattern: str = "*") -> set[str]:
    return {f"file {path}" for path in place.glob(pattern)} if place.is_dir() else set()


def _kernel_objects() -> set[str]:
    """What of ours, or where ours would be, is in the namespace the tests run in."""
    found: set[str] = set()
    for family in ("-4", "-6"):
        for what in (["rule"], ["nexthop"], ["route", "show", "table", "all"]):
            lines = support.run(["ip", family, *what]).stdout.splitlines()
            found |= {f"{what[0]} {line.strip()}" for line in lines if "proto 201" in line}
    links = [
        line.split()[1].split(":")[0].split("@")[0] for line in support.run(["ip", "-o", "link"]).stdout.splitlines()
    ]
    for link in links:
        queues = support.run(["tc", "qdisc", "show", "dev", link], check=False).stdout.splitlines()
        found |= {f"qdisc on {link}: {line.strip()}" for line in queues if "clsact" in line or "ingress" in line}
        found.add(f"link {link}")
    return found


def inventory() -> set[str]:
    """Everything that a test could leave behind: files, namespaces, kernel objects, processes."""
    found = _listed(Path("/run/netns")) | _listed(Path("/sys/fs/bpf"), "*swerve*") | _processes_of_session()
    runtime = Path(os.environ.get("SWERVE_RUNTIME_DIR", "/run/swerve"))
    found |= {f"file {path}" for path in runtime.rglob("*") if not path.is_dir()}
    if shutil.which("ip") and shutil.which("tc"):
        found |= _kernel_objects()
    return found
