"""Check what this host can do, what is missing, what each gap costs and how to fix it.

Everything is found out by trying (pytools/kernel/features.py). `clean` removes what a crashed agent or controller
left.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from pytools import directories
from pytools.doctor.agent import served
from pytools.doctor.checks import Check, checks
from pytools.errors import RefusedError, SwerveError
from pytools.kernel import features, netns

if TYPE_CHECKING:
    from pytools.kernel.bpf.loader import Program

_ASK_S: Final = 10.0
# Where bcc says its version; found without importing it, which would load LLVM.
_BCC: Final = """
from importlib.util import find_spec
print(open(find_spec("bcc").submodule_search_locations[0] + "/version.py").read())
"""


def versions_found() -> dict[str, str]:
    """Name -> version."""
    return {
        "kernel": os.uname().release,
        "swerve": _swerve(),
        "bcc": _bcc(),
        "iproute2": _of(["ip", "-V"], r"iproute2-([^\s,]+)"),
        "python": platform.python_version(),
    }


def versions_text(versions: dict[str, str]) -> str:
    """In a line, the kernel first, without its name."""
    others = [f"{name} {version}" for name, version in versions.items() if name != "kernel" and version]
    return ", ".join([versions["kernel"], *others])


def _swerve() -> str:
    try:
        return importlib.metadata.version("swerve")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _bcc() -> str:
    from pytools.kernel.bpf.loader import interpreter

    try:
        return _of([interpreter(), "-c", _BCC], r"['\"]([^'\"]+)['\"]")
    except SwerveError:
        return ""


def _of(command: list[str], pattern: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(pattern, done.stdout)
    return match[1] if match and done.returncode == 0 else ""


CANNOT: Final = (
    "RDMA on hardware (RoCE, InfiniBand) bypasses TC: queue pairs are counted and timed, its packets neither timed "
    "one by one nor moved by routes",
    "one-way delays need clocks that agree: without `clock: shared` peers only queueing and round trips are known",
    "a path ends at its nexthop: where the fabric hashes again, `probe.flows` samples several of the ways behind",
    "weights move flows by hash: a single large flow moves as a whole, or not at all",
)


class Result(msgspec.Struct, frozen=True):
    """What was found; `present` is None where it could not be tried."""

    name: str
    present: bool | None
    essential: bool
    detail: str
    costs: str  # empty when nothing is lost
    mend: str


class Report(msgspec.Struct, frozen=True, tag="doctor"):
    """All of it, and what swerve cannot do on any host."""

    kernel: str
    netns: str | None
    results: list[Result]
    cannot: tuple[str, ...]
    versions: dict[str, str] = {}  # of what is at work here; empty where it is not there

    @property
    def sound(self) -> bool:
        """Whether nothing essential is missing."""
        return not any(result.essential and result.present is False for result in self.results)


def examine(name: str | None, config: Path | None, programs: Sequence[Program]) -> Report:
    """Try everything, from inside the namespace.

    Parameters
    ----------
    name : str, optional
        The namespace; the thread's own unless given.
    config : Path, optional
        The agent's configuration, if it is not where it belongs.
    programs : sequence of Program
        What the agent loads; compiled, loaded, not attached.

    Raises
    ------
    UsageError, CapabilityError
        If the namespace does not exist or may not be entered.
    """
    with netns.inside(name):
        results = [_result(check) for check in checks(name, config, programs)]
    return Report(os.uname().release, name, results, CANNOT, versions_found())


def _result(check: Check) -> Result:
    found = check.find()
    missing = found.present is False
    return Result(
        check.name,
        found.present,
        check.essential,
        found.detail,
        check.costs if missing else "",
        check.mend if missing else "",
    )


def clean(name: str | None) -> list[str]:
    """Remove what a crashed agent or controller left in a namespace.

    Parameters
    ----------
    name : str, optional
        The namespace; the thread's own unless given.

    Returns
    -------
    list of str
        What was removed, one line each.

    Raises
    ------
    RefusedError
        If an agent or a controller runs there: this would take away what it works with.
    """
    from pytools.kernel import leftovers
    from pytools.kernel.bpf import attach
    from pytools.kernel.netlink.routing import Netlink

    socket = directories.agent_socket(name)
    if features.attempt(lambda: served(name)).present:
        raise RefusedError(f"an agent serves {socket}", "stop it first: it cleans up after itself")
    if _steered(name):
        raise RefusedError(
            f"a controller steers {directories.instance(name)}", "stop it first: it takes back what it did"
        )
    with netns.inside(name), Netlink() as netlink:
        hooks = [*attach.clean(), *attach.clean(attach.STEERING)]
        removed = [*hooks, *leftovers.sweep(netlink)]
    if socket.exists():
        socket.unlink()
        removed.append(f"stale socket {socket}")
    return removed


def _steered(name: str | None) -> bool:
    """Whether a controller, or the guardian that undoes what one did, holds the instance's lock."""
    try:
        with (directories.state_dir(name) / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, PermissionError):
        return False
    except BlockingIOError:
        return True
    return False


def run(name: str | None, config: Path | None, programs: Sequence[Program], as_json: bool, color: bool) -> int:
    """Print the report; returns the exit code (5: something essential is missing)."""
    report = examine(name, config, programs)
    if as_json:
        _print_json(report)
    else:
        from pytools.views.follow import console

        console(color).print(_diagnosis(report))
    return 0 if report.sound else 5


def bundle(
    out: Path, name: str | None, config: Path | None, programs: Sequence[Program], redact: bool, as_json: bool
) -> None:
    """Write a support bundle, and say what is in it and what is not.

    Raises
    ------
    UsageError
        If the file exists, or cannot be made; or there is no such namespace.
    """
    from pytools.doctor import bundle as bundling

    report = examine(name, config, programs)
    with netns.inside(name):
        manifest = bundling.write(out, name, config, report, redact)
    if as_json:
        _print_json(manifest)
        return
    print(f"{out}: {len(manifest.parts)} parts, {out.stat().st_size / 1000:.0f} kB; readable by its owner alone")
    for part in manifest.parts:
        print(f"  {part.name}: {part.bytes} bytes" + (f" ({part.note})" if part.note else ""))
    for each in manifest.left_out:
        print(f"  without {each.name}: {each.why}")
    if manifest.addresses_hidden is not None:
        shown = ", ".join(manifest.managed) or "none"
        print(f"  {manifest.addresses_hidden} addresses are numbers now; shown as they are: {shown}")
    print("never in it: " + "; ".join(manifest.never))


def print_removed(removed: list[str], as_json: bool) -> None:
    if as_json:
        _print_json({"type": "cleaned", "removed": removed})
        return
    print("\n".join(f"removed {what}" for what in removed) or "nothing was left behind")


def _print_json(what: Any) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")


def _diagnosis(report: Report) -> RenderableType:
    """Findings line by line; below each gap what it costs and how to mend it."""
    lines = [
        Text(f"kernel {versions_text(report.versions)}{f' in {report.netns}' if report.netns else ''}", style="bold")
    ]
    width = max((len(result.name) for result in report.results), default=0)
    for result in report.results:
        word, style = _verdict(result)
        line = Text("  ").append(f"{word:<8}", style=style).append(f" {result.name:<{width}}")
        lines.append(line.append(f"  {result.detail}" if result.detail else "", style="dim"))
        for label, text in (("costs", result.costs), ("mend", result.mend)):
            if text:
                lines.append(Text(f"           {label:<6}{text}"))
    lines.append(Text("cannot be done on any host", style="bold"))
    lines.extend(Text(f"  - {each}") for each in report.cannot)
    return Group(*lines)


def _verdict(result: Result) -> tuple[str, str]:
    if result.present is None:
        return "unknown", "yellow"
    if result.present:
        return "present", "green"
    return ("MISSING", "bold red") if result.essential else ("missing", "yellow")
