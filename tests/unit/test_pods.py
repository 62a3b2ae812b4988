"""Names of pods and containers: from paths of control groups, and from files that may say anything."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.sources.tcp import containers
from pytools.sources.tcp.containers import Cgroups
from pytools.sources.tcp.namespaces import Names
from pytools.sources.tcp.pods import Pods, described, pod, unit

UID = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
CONTAINER = "4ed2d2d1bd03ff74f6ab2ab9a4d7b5e22bf9fe3a9a3bd0a70ba0d5c3f3f1a6b7"
CONTAINERD = "run/containerd/io.containerd.runtime.v2.task/k8s.io"
SECOND = 10**9
NAMED = {"annotations": {"io.kubernetes.cri.sandbox-namespace": "shop", "io.kubernetes.cri.sandbox-name": "cart-5f7c"}}
FILES = {
    f"{CONTAINERD}/{CONTAINER}/config.json": NAMED,
    f"run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{CONTAINER}/config.json": NAMED,
    f"run/containers/storage/overlay-containers/{CONTAINER}/userdata/config.json": {
        "annotations": {"io.kubernetes.pod.namespace": "shop", "io.kubernetes.pod.name": "cart-5f7c"}
    },
    f"var/lib/docker/containers/{CONTAINER}/config.v2.json": {
        "Name": "/k8s_cart",
        "Config": {"Labels": {"io.kubernetes.pod.namespace": "shop", "io.kubernetes.pod.name": "cart-5f7c"}},
    },
}
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text() | st.sampled_from(["annotations", "Config"]), inside),
)


def write(root: Path, place: str, text: bytes) -> Path:
    file = root / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)
    return file


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/x.scope", UID),
        (f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice", UID),
        (f"/kubepods/besteffort/pod{UID}/{CONTAINER}", UID),
        (f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UID.replace('-', '_')}.slice/x", UID),
        (f"/kubepods/pod{32 * 'a'}/{CONTAINER}", 32 * "a"),  # static: a hash
        (f"/docker/{CONTAINER}", ""),
        ("/kubepods.slice/kubepods-podshort.slice", ""),
        (f"/pod{UID}x", ""),
        ("/", ""),
        ("", ""),
    ],
)
def test_the_pod_of_a_group(path: str, uid: str) -> None:
    assert pod(path) == uid


def test_the_innermost_service() -> None:
    assert unit("/system.slice/a.service/b.service/init") == "b.service"
    assert unit("/user.slice/session-1.scope") == ""


@pytest.mark.parametrize("place", FILES)
def test_every_runtime_tells_the_pod(tmp_path: Path, place: str) -> None:
    write(tmp_path, place, json.dumps(FILES[place]).encode())
    found = Pods(tmp_path)
    assert found.name("", CONTAINER, 0) == "shop/cart-5f7c"
    assert found.refused == 0


def test_a_container_of_no_pod_has_its_own_name(tmp_path: Path) -> None:
    write(
        tmp_path, f"var/lib/docker/containers/{CONTAINER}/config.v2.json", b'{"Name": "/web", "Config": {"Labels": {}}}'
    )
    assert Pods(tmp_path).name("", CONTAINER, 0) == "web"


def test_the_directory_of_logs_tells_pods(tmp_path: Path) -> None:
    for name in (f"shop_cart-5f7c_{UID}", "no such form", f"shop_{'x' * 300}_{UID}"[:255]):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)
    found = Pods(tmp_path)
    assert found.name(UID, "", 0) == "shop/cart-5f7c"
    assert found.refused == 2
    (tmp_path / f"var/log/pods/shop_late_{32 * 'b'}").mkdir()
    assert found.name(32 * "b", "", SECOND) == "", "the directory is read every ten seconds at most"
    assert found.name(32 * "b", "", 11 * SECOND) == "shop/late"


@pytest.mark.parametrize("hostile", ["link", "directory link", "fifo", "large", "no JSON", "deep", "list", "directory"])
def test_what_is_not_as_it_should_be_is_counted_and_left_out(tmp_path: Path, hostile: str) -> None:
    secret = write(tmp_path, "secret", json.dumps(NAMED).encode())
    place = tmp_path / CONTAINERD / CONTAINER
    file = place / "config.json"
    if hostile == "directory link":
        write(tmp_path, "elsewhere/config.json", json.dumps(NAMED).encode())
        place.parent.mkdir(parents=True)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir(parents=True)
    if hostile == "link":
        file.symlink_to(secret)
    elif hostile == "fifo":
        os.mkfifo(file)
    elif hostile == "directory":
        file.mkdir()
    elif hostile != "directory link":
        wrong = {"large": b" " * 300_000 + json.dumps(NAMED).encode(), "deep": b"[" * 200_000, "list": b"[1]"}
        file.write_bytes(wrong.get(hostile, b"\xff{"))
    found = Pods(tmp_path)
    assert found.name("", CONTAINER, 0) == ""
    assert found.refused == 1
    assert found.name("", CONTAINER, SECOND) == "" and found.refused == 1, "not read again so soon"


@pytest.mark.parametrize("identifier", ["../../../secret", "x", "", 64 * "A", 64 * "a" + "/.."])
def test_only_identifiers_are_looked_up(tmp_path: Path, identifier: str) -> None:
    write(tmp_path, f"{CONTAINERD}/x/config.json", json.dumps(NAMED).encode())
    found = Pods(tmp_path)
    assert (found.name("", identifier, 0), found.refused) == ("", 0)


@given(ANY)
def test_no_description_breaks_it(document: Any) -> None:
    name = described(document)
    assert name is None or (name.isprintable() and len(name) <= 2 * 253 + 1)
    assert (name is None) == (not isinstance(document, dict))


@given(st.text() | st.text(alphabet="0123456789abcdef-_/.podslicekube"))
def test_no_path_breaks_it(path: str) -> None:
    assert len(pod(path)) in (0, 32, 36)
    assert "/" not in unit(path)


@given(st.dictionaries(st.sampled_from(["io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "x"]), st.text()))
def test_names_print(labels: dict[str, str]) -> None:
    name = described({"annotations": labels, "Name": "/own"})
    assert name is not None and name.isprintable()


def groups_without_handles(root: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    class Libc:
        def open_by_handle_at(self, *_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(containers, "_libc", Libc())
    return Cgroups(root)


def test_without_the_right_to_use_handles_the_tree_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / f"kubepods/pod{UID}" / CONTAINER
    group.mkdir(parents=True)
    (tmp_path / "loop").symlink_to(tmp_path)
    groups = groups_without_handles(tmp_path, monkeypatch)
    identifier = group.stat().st_ino
    assert groups.find(identifier) == ("", ""), "not walked yet"
    groups.work(0, time.monotonic_ns() + SECOND)
    assert groups.find(identifier) == (f"/kubepods/pod{UID}/{CONTAINER}", CONTAINER)
    late = tmp_path / "late.service"
    late.mkdir()
    assert groups.find(late.stat().st_ino) == ("", "")
    groups.work(SECOND, time.monotonic_ns() + SECOND)
    assert groups.find(late.stat().st_ino) == ("", ""), "not walked again so soon"
    groups.work(11 * SECOND, time.monotonic_ns() + SECOND)
    assert groups.find(late.stat().st_ino) == ("/late.service", "")
    groups.close()


def test_the_name_that_says_most_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Port forwarding, say, makes sockets in a pod's namespace from a group of the host's."""
    root = tmp_path / "cgroup"
    service, bare = root / "system.slice/containerd.service", root / f"kubepods/pod{UID}"
    for each in (service, bare):
        each.mkdir(parents=True)
    names = Names(groups_without_handles(root, monkeypatch), Pods(tmp_path))
    service_id, pod_id = service.stat().st_ino, bare.stat().st_ino

    def known(cgroup: int, now_ns: int) -> str:
        names.known(7, cgroup, now_ns)
        names.work(now_ns)
        names.known(7, cgroup, now_ns + 10 * SECOND)
        names.work(now_ns + 10 * SECOND)
        return names.known(7, 0, now_ns)

    assert known(service_id, 0) == "containerd.service"
    assert known(pod_id, 30 * SECOND) == f"pod:{UID}"
    assert known(service_id, 60 * SECOND) == f"pod:{UID}"
    (tmp_path / f"var/log/pods/shop_cart_{UID}").mkdir(parents=True)
    assert known(pod_id, 90 * SECOND) == "shop/cart"
    assert known(service_id, 120 * SECOND) == "shop/cart"
    assert names.known(0, service_id, 0) == "", "the agent's own has no name"
    assert names.known(8, 0, 0) == "netns:8"
