"""Whose a connection is: a made-up /proc, and group names as engines give them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pytools.kernel.printable import printable
from pytools.signals import Owner
from pytools.sources.tcp import owners
from pytools.sources.tcp.containers import Cgroups, container
from pytools.sources.tcp.owners import Identity, Owners

ID = "4ed2d2d1bd03ff74f6ab2ab9a4d7b5e22bf9fe3a9a3bd0a70ba0d5c3f3f1a6b7"
OTHER = ID[::-1]
SECOND = 10**9


@pytest.mark.parametrize(
    ("path", "identifier"),
    [
        (f"/system.slice/docker-{ID}.scope", ID),
        (f"/docker/{ID}", ID),
        (f"/docker/{OTHER}/docker/{ID}", ID),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2c48913c_2f1e_4a3c_9f0a_1c2e3d4f5a6b.slice/"
            f"cri-containerd-{ID}.scope",
            ID,
        ),
        (f"/kubepods/besteffort/pod2c48913c-2f1e-4a3c-9f0a-1c2e3d4f5a6b/{ID}", ID),
        (f"/system.slice/kubepods-pod2c48913c.slice:cri-containerd:{ID}", ID),
        (f"/kubepods.slice/kubepods-pod2c48913c.slice/crio-{ID}.scope", ID),
        (f"/machine.slice/libpod-{ID}.scope/container", ID),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", ID),
        (f"/libpod_parent/libpod-{ID}", ID),
        (f"/machine.slice/libpod-conmon-{ID}.scope", ""),
        (f"/kubepods.slice/crio-conmon-{ID}.scope", ""),
        (f"/system.slice/nerdctl-{ID}.scope", ID),
        (f"/ecs/8f9c1d2e3b4a5968/{ID}", ID),
        (
            "/ecs/0a1b2c3d4e5f60718293a4b5c6d7e8f9/0a1b2c3d4e5f60718293a4b5c6d7e8f9-2531612879",
            "0a1b2c3d4e5f60718293a4b5c6d7e8f9-2531612879",
        ),
        ("/lxc.payload.web1/system.slice/nginx.service", "web1"),
        ("/machine.slice/machine-buster.scope/payload", "buster"),
        ("/machine.slice/systemd-nspawn@buster.service/payload", "buster"),
        ("/system.slice/containerd.service", ""),
        ("/user.slice/user-1000.slice/session-2.scope", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_container(path: str, identifier: str) -> None:
    assert container(path) == identifier


def test_groups_without_a_hierarchy(tmp_path: Path) -> None:
    for groups in (Cgroups(tmp_path / "missing"), Cgroups(tmp_path)):
        assert groups.find(7) == ("", "")
        groups.close()
        assert groups.find(8) == ("", "")


class Proc:
    """A process table, and sockets by cookie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inodes: dict[int, int] = {}
        self.asked: list[int] = []

    def process(self, pid: int, name: str, *targets: str) -> None:
        files = self.folder / str(pid) / "fd"
        files.mkdir(parents=True)
        (self.folder / str(pid) / "comm").write_text(f"{name}\n")
        for number, target in enumerate(targets):
            os.symlink(target, files / str(number))

    def inode_of(self, identity: Identity) -> int:
        self.asked.append(identity.cookie)
        return self.inodes.get(identity.cookie, 0)

    def owners(self, remembered: int = 100) -> Owners:
        return Owners(self.inode_of, Cgroups(self.folder), remembered, self.folder)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def identity(cookie: int) -> Identity:
    return Identity(bytes(16), 40000, bytes(16), 5201, 7, cookie)


def look(found: Owners, cookie: int, now_ns: int = 0) -> Owner:
    """As the source does: what is not known is asked for."""
    owner = found.known(cookie, 0)
    if not owner.pid:
        found.ask(identity(cookie), now_ns)
    return owner


def finish(found: Owners, now_ns: int = 0) -> None:
    for _ in range(10_000):
        if not found.busy:
            return
        now_ns = max(now_ns, found.work(now_ns))
    pytest.fail("the look-up does not end")


def test_the_process_that_holds_the_socket(proc: Proc) -> None:
    proc.process(11, "sh", "/dev/null", "pipe:[900]", "socket:[901]")
    proc.process(12, "iperf3", *(f"socket:[{inode}]" for inode in range(1000, 1100)))
    (proc.folder / "self").mkdir()
    proc.inodes = {1: 1077, 2: 901, 3: 5555}
    found = proc.owners()
    for cookie in (1, 2, 3, 4):
        assert look(found, cookie).pid == 0
    finish(found)
    known = {cookie: look(found, cookie) for cookie in (1, 2, 3, 4)}
    assert {cookie: (owner.pid, owner.command) for cookie, owner in known.items()} == {
        1: (12, "iperf3"),
        2: (11, "sh"),
        3: (0, ""),
        4: (0, ""),
    }


def test_a_socket_is_asked_about_once(proc: Proc) -> None:
    proc.process(11, "sh", "socket:[901]")
    proc.inodes = {1: 901}
    found = proc.owners()
    for _ in range(3):
        look(found, 1)
        look(found, 2)
    finish(found)
    for _ in range(3):
        look(found, 1)
        look(found, 2, 59 * SECOND)
    assert not found.busy
    assert proc.asked == [1, 2]
    look(found, 2, 60 * SECOND)
    finish(found, 60 * SECOND)
    assert proc.asked == [1, 2, 2]


def test_a_socket_without_a_cookie_is_not_looked_up(proc: Proc) -> None:
    found = proc.owners()
    look(found, 0)
    assert not found.busy


def test_what_comes_while_a_walk_is_under_way_waits_for_the_next(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.process(11, "sh", *(f"socket:[{inode}]" for inode in range(1000)))
    proc.inodes = {1: 999, 2: 5}
    found = proc.owners()
    clock = iter(range(0, 10**12, owners.SLICE_NS // 2))
    monkeypatch.setattr(owners.time, "monotonic_ns", lambda: next(clock))
    look(found, 1)
    for _ in range(3):
        found.work(found.work(0))
    look(found, 2)
    finish(found)
    assert [look(found, cookie).pid for cookie in (1, 2)] == [11, 11]


def test_what_is_remembered_is_bounded(proc: Proc) -> None:
    proc.process(11, "sh", *(f"socket:[{inode}]" for inode in range(50)))
    proc.inodes = {cookie: cookie for cookie in range(1, 50)}
    found = proc.owners(remembered=10)
    for cookie in range(1, 100):
        look(found, cookie)
    finish(found)
    assert sum(found.known(cookie, 0).pid != 0 for cookie in range(1, 100)) == 10
    proc.asked.clear()
    for cookie in range(50, 100):
        look(found, cookie)
    finish(found)
    assert len(proc.asked) == 50 - 10, "of ten it is known that nobody holds them"


def test_slices_keep_to_their_share(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.process(11, "sh", *(f"socket:[{inode}]" for inode in range(5000)))
    proc.inodes = {1: 4999}
    now = [0]

    def clock() -> int:
        now[0] += 100_000
        return now[0]

    monkeypatch.setattr(owners.time, "monotonic_ns", clock)
    found = proc.owners()
    look(found, 1)
    spent, at_ns = 0, 0
    while found.busy:
        before = now[0]
        due_ns = found.work(at_ns)
        spent += now[0] - before
        assert due_ns - at_ns >= owners.EVERY_NS
        at_ns = due_ns
    assert spent / at_ns < 0.025
    assert look(found, 1).pid == 11


def test_no_process_table(tmp_path: Path) -> None:
    found = Owners(lambda _: 77, Cgroups(tmp_path), 10, tmp_path / "missing")
    look(found, 1)
    finish(found)
    assert look(found, 1).pid == 0


def test_a_socket_of_this_process() -> None:
    with socket.socket() as mine:
        inode = os.fstat(mine.fileno()).st_ino
        found = Owners(lambda _: inode, Cgroups(Path("/nonexistent")), 10)
        look(found, 1)
        finish(found)
        owner = look(found, 1)
    assert owner.pid == os.getpid()
    assert owner.command == Path("/proc/self/comm").read_text().strip()


@pytest.mark.parametrize("said", ["\x1b[2Jgone", "a\nb", b"\xff".decode(errors="surrogateescape"), "\u202enimda"])
def test_names_that_others_chose_are_fit_for_terminals_and_json(said: str) -> None:
    shown = printable(said)
    assert len(shown) == len(said)
    assert "\N{REPLACEMENT CHARACTER}" in shown
    assert shown.isprintable()
    shown.encode()


def test_names_stay_as_they_are() -> None:
    assert printable("iperf3 übung (1)") == "iperf3 übung (1)"
