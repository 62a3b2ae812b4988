"""Where files live: one instance of swerve per network namespace, each with its own directories.

An instance is called by the namespace's name, or `host` for the namespace the host itself lives in. Configurations and
policies are searched for; what is found is obeyed as root, so nobody else may be able to write it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytools.errors import RefusedError

CONFIG: Final = "agent.yaml"
POLICY: Final = "policy.yaml"
READERS_SUFFIX: Final = ".read"
_SYSTEM: Final = Path("/etc/swerve")
PAGES: Final = (Path(__file__).resolve().parents[1] / "docs", Path("/usr/share/doc/swerve/docs"))  # checkout, package
_MEND: Final = "make it root's alone (chown root, chmod go-w)"


def instance(netns: str | None) -> str:
    """The name under which this namespace's files are kept."""
    return netns if netns else "host"


def option_of(name: str) -> str:
    """What a command needs behind it to reach the instance of this name, with the blank before it."""
    return "" if name == instance(None) else f" -n {name}"


def runtime_dir(netns: str | None) -> Path:
    """Sockets, leases and lab configurations: gone after a reboot."""
    return Path(os.environ.get("SWERVE_RUNTIME_DIR", "/run/swerve")) / instance(netns)


def state_dir(netns: str | None) -> Path:
    """The journal: survives a reboot."""
    return Path(os.environ.get("SWERVE_STATE_DIR", "/var/lib/swerve")) / instance(netns)


def compiled_dirs() -> list[Path]:
    """Compiled kernel programs, a cache: this user's own directory, then root's, into which root may have imported."""
    top = Path(os.environ.get("SWERVE_CACHE_DIR", "/var/cache/swerve"))
    return [top / f"compiled.{user}" for user in dict.fromkeys([os.geteuid(), 0])]


def recording(directory: str, netns: str | None) -> Path:
    """The flight recorder's files: where the configuration says, else with the instance's state."""
    return Path(directory) if directory else state_dir(netns) / "recording"


def agent_socket(netns: str | None) -> Path:
    """The agent's control socket: signals out, requests and published signals in."""
    return runtime_dir(netns) / "agent.sock"


def readers_socket(netns: str | None) -> Path:
    """Where signals can be read and nothing else: outside the instance's directory, which is its owner's alone."""
    directory = runtime_dir(netns)
    return directory.parent / f"{directory.name}{READERS_SUFFIX}"


def maps_socket(netns: str | None) -> Path:
    """Where the agent lends its kernel maps to a controller."""
    return runtime_dir(netns) / "maps.sock"


def steering_memory(netns: str | None) -> Path:
    """What a controller remembers for its successor."""
    return runtime_dir(netns) / "steering.json"


def bond_ports(netns: str | None) -> Path:
    """Which ports of bonds a controller has selected, for whoever puts the former ones back."""
    return runtime_dir(netns) / "bonds.json"


def hook_calls(netns: str | None) -> Path:
    """What a controller has told by hooks, for whoever tells them that it is over."""
    return runtime_dir(netns) / "hooks.json"


def base_delays(netns: str | None) -> Path:
    """What an agent knows of base delays, for its successor."""
    return runtime_dir(netns) / "bases.json"


def tap_socket(netns: str | None) -> Path:
    """Where tapped RDMA processes, of any user, ask the agent for the table that they count in."""
    directory = runtime_dir(netns)  # itself for its owner alone
    return directory.parent / f"{directory.name}.tap"


def default_config(netns: str | None) -> Path:
    """The agent's configuration when `--config` is not given: the instance's own (a lab's), else where one looks.

    Raises
    ------
    RefusedError
        If somebody else could have written the one that is there.
    """
    return _first([runtime_dir(netns) / CONFIG, *searched(CONFIG)], "--config")


def default_policy() -> Path:
    """The policy when `--policy` is not given.

    Raises
    ------
    RefusedError
        If somebody else could have written the one that is there.
    """
    return _first(searched(POLICY), "--policy")


def searched(name: str) -> list[Path]:
    """Where a file of this name is looked for: the working directory, the user's own, the system's."""
    found = []
    with contextlib.suppress(OSError):  # the working directory may be gone
        found.append(Path.cwd() / name)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    if home.is_absolute():  # a relative one is to be ignored, says XDG
        found.append(home / "swerve" / name)
    return [*found, _SYSTEM / name]


@functools.cache
def page(name: str) -> str:
    """Where a page of docs/ is on this host: in the checkout that runs, or with the Debian package's documents.

    A wheel brings none, and many an image leaves documents out: then it is in the sources.
    """
    found = (directory / name for directory in PAGES)
    return next((str(place) for place in found if place.exists()), f"docs/{name} in swerve's sources")


def _first(places: Sequence[Path], option: str) -> Path:
    """The first that exists; the last, the system's, when none does. One that cannot be trusted is not passed over.

    Who looks would not know why another one is obeyed than the one in front of him.
    """
    for place in places:
        why, mend = "", _MEND
        try:
            why = unsafe(place, place.stat())
        except OSError:  # not there, or not for us
            if not place.is_symlink():
                continue
            why, mend = "it is a link that cannot be followed", "mend or remove it"
        if why:
            raise RefusedError(f"{place}: refused: {why}", f"{mend}, or name one with {option}")
        return place
    return places[-1]


def read_obeyed(path: Path, limit: int, *, guarded: bool = True) -> bytes:
    """What is in a file that will be obeyed, as configuration or policy.

    Parameters
    ----------
    path : Path
        The file, however it was found: who names one knows its name, not who else may write it.
    limit : int
        Read no more bytes than this.
    guarded : bool
        Refuse a file that somebody else could have written. Only for explaining is this not needed.

    Raises
    ------
    OSError
        If it cannot be read.
    RefusedError
        If somebody else could have written it.
    """
    with open(path, "rb", opener=without_waiting) as file:
        if guarded and (why := unsafe(path, os.fstat(file.fileno()))):
            raise RefusedError(f"{path}: refused: {why}", _MEND)
        return file.read(limit)


def without_waiting(name: str, flags: int) -> int:
    """Open even a pipe at once; it is refused afterwards."""
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def unsafe(path: Path, opened: os.stat_result, trusted: Sequence[int] = ()) -> str:
    """Why a file that is obeyed cannot be trusted; empty when it can.

    The file and the directories that hold it (the one named, and the one it resolves to) must belong to root or
    to us, and be writable by nobody else. A directory that holds only a link to the file may have any mode where its
    mount is read-only: so Kubernetes mounts a ConfigMap, mode 0777 above links to a directory of mode 0755.

    Parameters
    ----------
    opened : os.stat_result
        What it is: of the descriptor where there is one, so that nobody can change it in between.
    trusted : sequence of int
        Users that may own it as well.
    """
    if not stat.S_ISREG(opened.st_mode):
        return "it is not a regular file"
    owners = (0, os.geteuid(), *trusted)
    named, real = path.absolute().parent, path.resolve().parent
    checked = [("the file", opened, False)]
    for directory in sorted({named, real}):
        checked.append((f"its directory {directory}", directory.stat(), directory != real and _read_only(directory)))
    for what, found, excused in checked:
        if found.st_uid not in owners:
            return f"{what} belongs to user {found.st_uid}, not to root"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not excused:
            whom = "everybody" if found.st_mode & stat.S_IWOTH else f"group {found.st_gid}"
            return f"{what} is writable by {whom} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def _read_only(directory: Path) -> bool:
    """Whether nothing can be written there, whatever its mode, because of how it is mounted."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
