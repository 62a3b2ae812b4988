"""Root beside a service without root: whatever links the service's user makes, root's commands do not follow them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import samples
from steering_kit import AtOnce

from pytools.errors import SwerveError
from pytools.owned_files import as_owner, owner_of
from pytools.recording.writer import TrackWriter
from steering import elapsed
from steering.acting import journal
from steering.acting.acts_file import ActsFile
from steering.acting.lock import Lock, holder
from steering.control import kept_orders, stop_file
from steering.control.requests import Reply
from steering.control.server import ControlServer
from steering.deciding.overrides import Override, Overrides

SERVICE = 61_862


def rotate(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        log = journal.Journal(folder / journal.FILE)
        stack.callback(log.close)
        os.truncate(folder / journal.FILE, journal.ROTATE_BYTES)
        log.rotate()


ACTIONS: dict[str, Callable[[Path], object]] = {
    "lock": lambda folder: Lock(folder / journal.LOCK_FILE).close(),
    "journal": lambda folder: journal.Journal(folder / journal.FILE).close(),
    "journal put aside": rotate,
    "acts": lambda folder: ActsFile(folder, AtOnce()).write(samples.act(actuator="operator")),
    "orders": lambda folder: kept_orders.save(folder, Overrides((Override("hold"),))),
    "freeze": lambda folder: stop_file.freeze(folder / stop_file.FILE, "why"),
    "thaw": lambda folder: stop_file.thaw(folder / stop_file.FILE),
    "control socket": lambda folder: ControlServer(folder / "control.sock", lambda *_: Reply()),
    "recording": lambda folder: TrackWriter(folder, "fine", 1 << 20, 10**12).write(b"{}\n", 10**18),
    "a directory": lambda folder: (folder / "more").exists() or stop_file.freeze(folder / "more" / "freeze", ""),
}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory of the service's, and beside it one of root's with files of the same names."""
    base, treasure = tmp_path / "swerve", tmp_path / "treasure"
    treasure.mkdir(mode=0o755)
    for name in (journal.LOCK_FILE, journal.FILE, "acts.jsonl", kept_orders.FILE, stop_file.FILE, "control.sock"):
        (treasure / name).write_text("root's\n")
    base.mkdir()
    os.chown(base, SERVICE, SERVICE)
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    yield base


def tree(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(each.relative_to(folder)): (each.lstat().st_mode, each.read_text() if each.is_file() else "")
        for each in folder.rglob("*")
    }


@pytest.mark.parametrize("name", ACTIONS)
def test_root_does_not_follow_a_link_in_the_place_of_the_instance(name: str, state: Path) -> None:
    treasure = state.parent / "treasure"
    (state / "host").symlink_to(treasure)
    os.chown(state / "host", SERVICE, SERVICE, follow_symlinks=False)
    before = tree(treasure)
    with contextlib.suppress(OSError, SwerveError):
        ACTIONS[name](state / "host")
    assert tree(treasure) == before
    assert os.stat("/proc/thread-self").st_uid == 0 and _reaches_roots_files(treasure)


def _reaches_roots_files(treasure: Path) -> bool:
    """Whether this thread is root again where files are concerned."""
    (treasure / "again").touch(mode=0o600)
    return (treasure / "again").stat().st_uid == 0


@pytest.mark.parametrize("name", ACTIONS)
def test_what_root_makes_is_the_services(name: str, state: Path) -> None:
    folder = state / "host"
    folder.mkdir(mode=0o700)
    os.chown(folder, SERVICE, SERVICE)
    ACTIONS[name](folder)
    assert {each.lstat().st_uid for each in folder.rglob("*")} <= {SERVICE}


def test_directories_are_made_as_the_service(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWERVE_STATE_DIR", str(state))
    made = journal.directory("one")
    assert made.stat().st_uid == SERVICE and stat.S_IMODE(made.stat().st_mode) == 0o700
    assert holder(made / journal.LOCK_FILE) is None


def test_orders_of_the_service_are_read_by_root(state: Path) -> None:
    (folder := state / "host").mkdir(mode=0o700)
    os.chown(folder, SERVICE, SERVICE)
    wanted = Overrides((Override("hold"),))
    kept_orders.save(folder, wanted)
    assert kept_orders.load(folder, elapsed.moment()) == wanted
    os.chown(folder / kept_orders.FILE, SERVICE + 1, SERVICE + 1)
    with pytest.raises(SwerveError):
        kept_orders.load(folder, elapsed.moment())


def test_the_owner_is_the_first_who_is_not_root(state: Path, tmp_path: Path) -> None:
    (state / "host").mkdir()  # root's, in a directory of another's
    assert owner_of(state / "host" / "journal.jsonl") == (SERVICE, SERVICE)
    assert owner_of(tmp_path / "nothing" / "here") is None
    (tmp_path / "roots").symlink_to("swerve/host")
    assert owner_of(tmp_path / "roots" / ".." / "x") == (SERVICE, SERVICE)
    assert owner_of(tmp_path) is None
    (tmp_path / "loop").symlink_to("loop")
    assert owner_of(tmp_path / "loop") is None


def test_a_refusal_names_the_user(state: Path) -> None:
    (state / "host").mkdir(mode=0o700)
    refused = pytest.raises(PermissionError, match=f"as user {SERVICE} to whom its directory belongs")
    with refused, as_owner(state / "host" / "x"):
        (state / "host" / "x").touch()
