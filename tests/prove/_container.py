"""A container as packaging/kubernetes/daemonset.yaml asks for it, run by crun without a cluster.

What kubelet and its runtime do with a pod is done here: hostPath, ConfigMap and Secret become directories and mounts,
the security context becomes an OCI bundle's config.json, `RuntimeDefault` a system call filter. As root, one thread.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import _debian
import yaml
from _clean_root import ENVIRONMENT, ROOT, run

DAEMONSET: Final = ROOT / "packaging/kubernetes/daemonset.yaml"
STEER: Final = ROOT / "packaging/kubernetes/steer.yaml"
CONTAINERFILE: Final = ROOT / "packaging/oci/Containerfile"
NAMESPACES: Final = ("pid", "ipc", "uts", "mount", "cgroup")  # its own; the network is the node's
# What every container has, as containerd mounts it.
_MOUNTS: Final = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")),
    ("/dev/shm", "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
)
_MASKED: Final = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
                  "/proc/sched_debug", "/proc/scsi", "/sys/firmware")  # fmt: skip
_READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
# Debian 12's containers-common gives these to CAP_SYS_ADMIN only. Later ones, Docker 23 and containerd 1.7 do not.
SINCE: Final = {"bpf": "CAP_BPF", "perf_event_open": "CAP_PERFMON"}


class Pod:
    """The container of a DaemonSet, and what its volumes are."""

    def __init__(self, file: Path = DAEMONSET) -> None:
        documents = list(yaml.safe_load_all(file.read_text()))
        self._data = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
        (made,) = (each for each in documents if each["kind"] == "DaemonSet")
        self.name = made["metadata"]["name"]
        self.spec = made["spec"]["template"]["spec"]
        self.container = self.spec["containers"][0]
        self.rights = self.container["securityContext"]

    def file(self, name: str) -> str:
        """The text of a file in the manifest's ConfigMap."""
        (text,) = (files[name] for files in self._data.values() if name in files)
        return text

    @property
    def capabilities(self) -> list[str]:
        """Those that are added, all others being dropped.

        Raises
        ------
        ValueError
            If the others are not dropped.
        """
        if self.rights["capabilities"]["drop"] != ["ALL"]:
            raise ValueError(f"not all others are dropped: {self.rights['capabilities']}")
        return [f"CAP_{name}" for name in self.rights["capabilities"]["add"]]

    def environment(self, node: str) -> list[str]:
        """The variables, those of the pod's fields filled in."""
        fields = {"spec.nodeName": node}
        return [
            f"{each['name']}={each['value'] if 'value' in each else fields[each['valueFrom']['fieldRef']['fieldPath']]}"
            for each in self.container.get("env", ())
        ]

    def mounts(self, node: Path, contents: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
        """The volumes as mounts, in the order of the manifest.

        Parameters
        ----------
        node : Path
            Stands for the root of the node, but for what lies in /sys, which is this machine's.
        contents : mapping
            Files by name, of each ConfigMap and Secret by name; of a ConfigMap the manifest's own unless given.
        """
        volumes = {each["name"]: each for each in self.spec["volumes"]}
        found: list[dict[str, Any]] = []
        for mount in self.container["volumeMounts"]:
            source = self._made(volumes[mount["name"]], node, contents)
            writable = "ro" if mount.get("readOnly") else "rw"
            found.append(_mount(mount["mountPath"], "bind", str(source), ("rbind", "rprivate", writable)))
        return found

    def _made(self, volume: Mapping[str, Any], node: Path, contents: Mapping[str, Mapping[str, str]]) -> Path:
        if "hostPath" in volume:
            path, kind = volume["hostPath"]["path"], volume["hostPath"]["type"]
            place = Path(path) if path.startswith("/sys/") else node / path.lstrip("/")
            if kind == "DirectoryOrCreate":
                place.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not place.is_dir():
                raise ValueError(f"hostPath {path}: {kind}: there is none")
            return place
        place = node / "pods" / self.name / volume["name"]
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)  # so kubelet makes all that are no hostPath
        if "configMap" in volume:
            name, mode = volume["configMap"]["name"], volume["configMap"]["defaultMode"]
            atomically_written(place, {**self._data[name], **contents.get(name, {})}, mode)
        elif "secret" in volume:
            if not place.is_mount():
                run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place])
            name, mode = volume["secret"]["secretName"], volume["secret"]["defaultMode"]
            if name not in contents and not volume["secret"].get("optional"):
                raise ValueError(f"Secret {name}: there is none")
            atomically_written(place, contents.get(name, {}), mode)
        return place


def atomically_written(place: Path, files: Mapping[str, str], mode: int) -> None:
    """Files as kubelet's AtomicWriter lays them out: in a directory of their own, which links lead to."""
    fresh = place / f"..2026_11_26_{len(list(place.iterdir()))}"
    fresh.mkdir(mode=0o755)
    for name, text in files.items():
        (fresh / name).write_text(text)
        (fresh / name).chmod(mode)
        if not (place / name).is_symlink():
            (place / name).symlink_to(f"..data/{name}")
    (place / "..data_tmp").symlink_to(fresh.name)
    os.replace(place / "..data_tmp", place / "..data")


def entry_point() -> list[str]:
    """What the image runs."""
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE.read_text(), re.MULTILINE)
    words: list[str] = json.loads(line)
    return words


def filtered(profile: Mapping[str, Any], granted: Sequence[str]) -> dict[str, Any]:
    """A profile of containers-common for a container with these capabilities, as the OCI has it."""
    rules = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
        if not set(includes.get("caps", ())) <= set(granted) or set(excludes.get("caps", ())) & set(granted):
            continue
        if includes.get("arches") and "amd64" not in includes["arches"]:
            continue
        kept = {key: rule[key] for key in ("names", "action", "errnoRet") if rule.get(key) is not None}
        arguments = [
            {key: each[key] for key in ("index", "value", "valueTwo", "op") if key in each}
            for each in rule.get("args") or ()
        ]
        rules.append({**kept, "args": arguments} if arguments else kept)
    return {"defaultAction": profile["defaultAction"], "defaultErrnoRet": 38,
            "architectures": ["SCMP_ARCH_X86_64"], "syscalls": rules}  # fmt: skip


def with_bpf(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The profile as it is since: bpf() and perf_event_open() by capabilities of their own."""
    others = [{**rule, "names": [name for name in rule["names"] if name not in SINCE]} for rule in profile["syscalls"]]
    since = [
        {"names": [name], "action": "SCMP_ACT_ALLOW", "includes": {"caps": [capability]}}
        for name, capability in SINCE.items()
    ]
    return {**profile, "syscalls": [rule for rule in others if rule["names"]] + since}


def _mount(destination: str, kind: str, source: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def configured(
    pod: Pod, root: Path, netns: str, node: str, mounts: Sequence[Mapping[str, Any]],
    without: Sequence[str] = (), profile: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The bundle's config.json.

    Parameters
    ----------
    root : Path
        The image's.
    netns : str
        The network namespace that is the node's.
    without : sequence of str
        Capabilities of the manifest that are kept back.
    profile : mapping, optional
        What `RuntimeDefault` is here; no filter unless given.
    """
    granted = [name for name in pod.capabilities if name not in without]
    context = pod.spec["securityContext"]
    filtering = {"seccomp": filtered(profile, granted)} if profile is not None else {}
    own = [{"type": each} for each in NAMESPACES]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": pod.rights["readOnlyRootFilesystem"]},
        "hostname": node,
        "process": {
            "terminal": False,
            "user": {"uid": context["runAsUser"], "gid": context["runAsGroup"]},
            "args": [*pod.container.get("command", entry_point()), *pod.container["args"]],
            "env": [f"PATH={ENVIRONMENT['PATH']}", *pod.environment(node)],
            "cwd": "/",
            # Kubernetes has no ambient or inheritable ones.
            "capabilities": {each: granted for each in ("bounding", "effective", "permitted")},
            "noNewPrivileges": not pod.rights["allowPrivilegeEscalation"],
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 16384, "soft": 16384}],
        },
        "mounts": [_mount(*each) for each in _MOUNTS] + list(mounts),
        "linux": {
            "namespaces": [*own, {"type": "network", "path": f"/run/netns/{netns}"}],
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
            **filtering,
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Runtime:
    """crun, and the profile of system calls, as Debian has them; unpacked, not installed."""

    root: Path
    state: Path

    @classmethod
    def fetched(cls, folder: Path) -> Runtime:
        """Fetch it into a directory."""
        (folder / "state").mkdir(parents=True)
        packages = ("crun", "libyajl2", "golang-github-containers-common")
        return cls(_debian.unpacked(folder, "bookworm", lambda _: packages), folder / "state")

    @property
    def profile(self) -> dict[str, Any]:
        """The profile of system calls that Podman and CRI-O have by default."""
        found: dict[str, Any] = json.loads((self.root / "usr/share/containers/seccomp.json").read_text())
        return found

    def command(self, *words: str | Path) -> list[str | Path]:
        """A command of crun's."""
        return [self.root / "usr/bin/crun", f"--root={self.state}", "--cgroup-manager=disabled", *words]

    @property
    def environment(self) -> dict[str, str]:
        """By which it finds its library."""
        return {**ENVIRONMENT, "LD_LIBRARY_PATH": str(self.root / "usr/lib/x86_64-linux-gnu")}

    def version(self) -> str:
        """What it is."""
        return run(self.command("--version"), env=self.environment).stdout.splitlines()[0]


class Limits:
    """Control groups with a container's limits; where version 1 has the controllers, there.

    Parameters
    ----------
    place : Path
        A directory, made here, to mount the hierarchies in.
    wanted : mapping
        `limits` of the manifest's resources.
    """

    def __init__(self, place: Path, wanted: Mapping[str, str]) -> None:
        memory = int(wanted["memory"].removesuffix("Mi")) << 20
        self._groups, self.said = [], dict(wanted)
        settings = (
            ("memory", "memory.limit_in_bytes", memory),
            ("cpu", "cpu.cfs_quota_us", round(float(wanted["cpu"]) * 100_000)),  # of a period of 100 ms
        )
        for controller, file, value in settings:
            hierarchy = place / controller
            hierarchy.mkdir(parents=True)
            if (done := run(["mount", "-t", "cgroup", "-o", controller, "cgroup", hierarchy])).returncode != 0:
                raise ValueError(f"control groups of version 1, {controller}: {done.stderr.strip()}")
            group = hierarchy / "swerve-container"
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(value))
            self._groups.append(group)

    def enter(self) -> None:
        """Have the calling process in them, and what it starts."""
        for group in self._groups:
            (group / "cgroup.procs").write_text("0")

    def peak_mib(self) -> float:
        """The most memory that was in use at once, kernel maps and cached files included."""
        return round(int((self._groups[0] / "memory.max_usage_in_bytes").read_text()) / (1 << 20), 1)

    def remove(self) -> None:
        """Remove them, once nothing is in them."""
        for group in self._groups:
            group.rmdir()


class Container:
    """One container, from its start to its removal.

    Parameters
    ----------
    bundle : Path
        A directory with config.json; the log is put there, too.
    limits : Limits, optional
        What holds it.
    """

    def __init__(self, runtime: Runtime, bundle: Path, limits: Limits | None = None) -> None:
        self._runtime, self.name, self._log = runtime, f"swerve-{bundle.name}", bundle / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                runtime.command("run", f"--bundle={bundle}", self.name),
                env=runtime.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=None if limits is None else limits.enter,  # noqa: PLW1509 (there is one thread)
            )  # fmt: skip

    def said(self) -> str:
        """What it wrote so far."""
        return self._log.read_text()

    def run(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A command in the container, with the container's rights, to its end."""
        command = self._runtime.command("exec", self.name, *words)
        return run(command, env=self._runtime.environment, timeout=timeout)

    @property
    def pid(self) -> int:
        """The first process in it, by its number out here."""
        done = run(self._runtime.command("state", self.name), env=self._runtime.environment)
        return int(json.loads(done.stdout)["pid"])

    def end(self, signal: str = "TERM", timeout: float = 30) -> int:
        """Send it a signal and wait for its end; the exit code."""
        if self.process.poll() is None:
            run(self._runtime.command("kill", self.name, signal), env=self._runtime.environment)
        return self.process.wait(timeout)

    def remove(self) -> None:
        """Remove what is left of it, however it ended."""
        run(self._runtime.command("delete", "--force", self.name), env=self._runtime.environment)
        self.process.wait(30)
