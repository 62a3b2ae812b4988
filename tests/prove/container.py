"""Proof: the agent measures in a container with the rights that packaging/kubernetes/daemonset.yaml gives it.

    python tests/prove/container.py [--deb FILE] [--without PART] [--keep]

Builds the package unless one is named, and the image's root with debootstrap as packaging/oci/Containerfile says. crun,
from Debian, runs it in the network namespace of a lab host, with a config.json made from the manifest: capabilities,
read-only root, mounts (a ConfigMap and a Secret as kubelet lays them out), limits, system call filter. The peer is an
agent that runs natively in another lab host. Shown: both paths are measured, `swerve` and the probes of the manifest
exit with 0, a changed ConfigMap is taken up, a hung agent is found, SIGTERM leaves nothing in the kernel; without one
of the capabilities, with a ConfigMap that others can write, or with a filter that forbids bpf(), the agent says so in
one line; the controller of steer.yaml undoes what it did. Prints JSON Lines, one per part; exits with 1 if one fails.
Run as root, from the checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "bench")]

import bpf_objects
import yaml
from _agents import start_agent, stop, wait_measured
from _booted import until
from _clean_root import COMPILER, Proof, apt, bootstrap, install, main, run, there
from _container import CONTAINERFILE, STEER, Container, Limits, Pod, Runtime, atomically_written, configured, with_bpf

from pytools import directories
from pytools.errors import SwerveError
from pytools.kernel.privileges import NEEDED
from pytools.lab import Lab

LAB, READY_S = "container", 60.0
PATHS = 2
DIRECTORIES = ("SWERVE_RUNTIME_DIR", "SWERVE_STATE_DIR")


@dataclass
class Node:
    """A lab host that is the node of a cluster: its file system, what its containers are given, what runs."""

    root: Path  # of the image
    place: Path  # everything else
    runtime: Runtime
    lab: Lab
    pod: Pod = field(default_factory=Pod)
    configuration: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    policy: str = ""
    started: int = 0

    @property
    def contents(self) -> dict[str, dict[str, str]]:
        """The ConfigMaps and the Secret."""
        return {
            "swerve-policy": {"policy.yaml": self.policy},
            "swerve-agent": {"agent.yaml": yaml.safe_dump(self.configuration)},
            "swerve-bus": {"bus.key": self.key},
        }

    def start(self, pod: Pod | None = None, writable: bool = False, profile: dict[str, Any] | None = None,
              without: Sequence[str] = (), limits: Limits | None = None) -> Container:  # fmt: skip
        """A container of a pod, the agent's unless given."""
        pod = self.pod if pod is None else pod
        mounts = pod.mounts(self.place / "node", self.contents)
        if writable:
            mounts = [
                {**each, "options": ["rbind", "rw"]} if each["destination"] == "/etc/swerve" else each
                for each in mounts
            ]
        filtering = with_bpf(self.runtime.profile) if profile is None else profile
        host = self.lab.hosts[0]
        config = configured(pod, self.root, host.netns, host.name, mounts, without, filtering)
        self.started += 1
        bundle = self.place / f"bundle{self.started}"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(config, indent=1))
        return Container(self.runtime, bundle, limits)

    @contextlib.contextmanager
    def agent(self, limits: Limits | None = None) -> Iterator[Container]:
        """The agent, ready; it is gone at the end, whatever happens."""
        container = self.start(limits=limits)
        try:
            until(lambda: "agent ready" in container.said(), READY_S, "the agent is ready")
            yield container
        except (TimeoutError, ValueError) as error:
            raise ValueError(f"{error}: {container.said()[-500:]}") from None
        finally:
            container.remove()

    def probe(self, container: Container, name: str) -> int:
        """What a probe of the manifest exits with."""
        return container.run(*self.pod.container[name]["exec"]["command"]).returncode


# The parts, in their order. Each returns what it found; `ok` says whether that is as it should be.


def image(root: Path) -> dict[str, object]:
    """The package, installed as the Containerfile does; the caches and the package do not stay."""
    asked = " ".join(CONTAINERFILE.read_text().split())
    found = install(root)
    apt(root, "clean")
    for each in (*root.glob("swerve_*.deb"), *root.glob("var/lib/apt/lists/*_*")):
        each.unlink()
    packages = there(root, "dpkg-query", "-W", "-f", "${Package}\n").stdout.split()
    size = int(
        run(["du", "-sxm", "--exclude=./proc", "--exclude=./sys", "--exclude=./dev", "."], cwd=root).stdout.split()[0]
    )
    installed = f"/dist/swerve_${{VERSION}}_*.deb {' '.join(COMPILER)}"
    ok = bool(found["ok"]) and f"apt-get install --yes --no-install-recommends \\ {installed}" in asked
    return {**found, "ok": ok, "root_mib": size, "packages": len(packages)}


def starts(node: Node) -> dict[str, object]:
    """With the limits of the manifest: ready, with these rights and no others; what it takes at its first start."""
    limits = Limits(node.place / "limits", node.pod.container["resources"]["limits"])
    with node.agent(limits) as container:
        cold_s = ready_after_s(container)
        status = status_of(container.pid)
        written = container.run("touch", "/usr/here")
        name = re.findall(r"agent starting host=(\S+) peers=(\d+)", container.said())
        peak = limits.peak_mib()
        code = container.end()
    limits.remove()
    with node.agent() as container:
        warm_s = ready_after_s(container)
    granted = sum(1 << NEEDED[each] for each in node.pod.capabilities)
    sets = {each: int(status[each], 16) for each in ("CapPrm", "CapEff", "CapBnd")}
    return {
        "ok": set(sets.values()) == {granted}
        and (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        and written.returncode != 0
        and "Read-only file system" in written.stderr
        and name == [(node.lab.hosts[0].name, "1")]
        and code == 0,
        "ready_after_s": {"cold": cold_s, "warm": warm_s},
        "limits": limits.said,
        "peak_mib": peak,
        "host": name,
        "capabilities": f"{granted:016x}",
        **{each: status[each] for each in ("NoNewPrivs", "Seccomp", "Uid")},
        "write": written.stderr.strip(),
    }


def ready_after_s(container: Container) -> float:
    """What the agent says it took."""
    return round(float(re.findall(r"agent ready .*after_s=([\d.]+)", container.said())[0]), 2)


def status_of(process: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return {name: words.strip() for name, _, words in (line.partition(":") for line in lines)}


def measures(node: Node) -> dict[str, object]:
    """One-way delays of both paths to the native peer, and of the peer's to it, with authenticated probes."""
    with node.agent() as container:

        def measured() -> list[dict[str, Any]]:
            lines = container.run("swerve", "delay", "--json").stdout.splitlines()
            told = [each for each in map(json.loads, lines) if each["type"] == "path_delay"]
            whole = [each for each in told if each["clock"] == "synchronised" and each["received"] and not each["lost"]]
            return whole if len(whole) == PATHS else []

        found = until(measured, READY_S, "both paths are measured")
        wait_measured(node.lab.hosts[1], PATHS)
        overview = container.run("swerve")
        own = json.loads(container.run("swerve", "self", "--count", "1", "--json").stdout)
        codes = {each: node.probe(container, each) for each in ("startupProbe", "livenessProbe")}
        resident = status_of(container.pid)["VmRSS"]
    refused = {name: count for name, count in own["drops"].items() if count and "tag" in name}
    return {
        "ok": overview.returncode == 0 and not any(codes.values()) and not own["failed"] and not refused,
        "paths": {
            f"{each['path']['destination']} by {each['path']['interface']}": " ".join(
                f"{way} {each[way]['owd_p50_ns']} ± {each[way]['bound_ns']} ns" for way in ("forward", "reverse")
            )
            for each in found
        },
        "swerve": [overview.returncode, overview.stdout.splitlines()[:3]],
        "probes": codes,
        "failed": own["failed"],
        "untagged": refused,
        "cpu_share": round(own["cpu_share"], 4),
        "resident": resident,
    }


def reloads(node: Node) -> dict[str, object]:
    """The ConfigMap changes as kubelet changes it; SIGHUP, and the agent has taken it up without a restart."""
    with node.agent() as container:
        changed = {**node.configuration, "links": {"interval": "500ms"}}
        volume = node.place / f"node/pods/{node.pod.name}/configuration"
        atomically_written(volume, {"agent.yaml": yaml.safe_dump(changed)}, 0o444)
        hung_up = container.run("kill", "-HUP", "1").returncode
        said = until(
            lambda: re.findall(r"configuration read again.*|not taken up.*", container.said()), 20, "it is read"
        )
        return {
            "ok": hung_up == 0 and "changed=links.interval" in said[0],
            "said": said,
            "mode": f"{volume.stat().st_mode:o}",
        }


def hangs(node: Node) -> dict[str, object]:
    """An agent that is stopped short is found by the liveness probe."""
    with node.agent() as container:
        os.kill(container.pid, signal.SIGSTOP)
        hung = node.probe(container, "livenessProbe")
        os.kill(container.pid, signal.SIGCONT)
        until(lambda: node.probe(container, "livenessProbe") == 0, 20, "it answers again")
    return {"ok": hung == 1, "hung": hung}


def ends(node: Node) -> dict[str, object]:
    """SIGTERM: exit code 0, and nothing of it is left in the kernel or on the node but what the next one reads."""
    before = traces(node)
    with node.agent() as container:
        held = bpf_objects.held_by(Path(f"/proc/{container.pid}"))  # others of this machine have theirs
        code = container.end()
    until(lambda: not bpf_objects.numbered() & held, 20, "nothing is left in the kernel")
    left = sorted(traces(node) - before)
    files = sorted(
        str(each.relative_to(node.place / "node")) for each in (node.place / "node/run").rglob("*") if each.is_file()
    )
    sockets = [str(each) for each in (node.place / "node/run").rglob("*") if each.is_socket()]
    return {
        "ok": code == 0 and len(held) > 20 and not left and not sockets,
        "exit_code": code,
        "held": len(held),
        "left": left,
        "sockets": sockets,
        "files": files,
        "last": container.said().splitlines()[-1],
    }


def traces(node: Node) -> set[str]:
    """What an agent could leave in the network of the node: filters, queues, rules, routes, nexthops."""
    host = node.lab.hosts[0]
    found = set()
    for words in ("ip rule", "ip -6 rule", "ip route show table all", "ip nexthop", "tc qdisc", "ip -o link"):
        found |= {f"{words}: {line.strip()}" for line in node.lab.run(host, words.split()).splitlines()}
    for name in (f"rail{number + 1}" for number in range(PATHS)):
        for way in ("ingress", "egress"):
            lines = run(
                ["ip", "netns", "exec", host.netns, "tc", "filter", "show", "dev", name, way]
            ).stdout.splitlines()
            found |= {f"{name} {way}: {line.strip()}" for line in lines}
    return found


def without_one(node: Node) -> dict[str, object]:
    """Without any one of the capabilities: exit code 5, and one line that names it."""
    said = {}
    for name in node.pod.capabilities:
        code, lines = refused(node.start(without=[name]))
        said[name] = (code, lines)
    ok = all(code == 5 and len(lines) == 1 and name in lines[0] for name, (code, lines) in said.items())
    return {"ok": ok, "said": {name: lines for name, (_, lines) in said.items()}}


def refused(container: Container) -> tuple[int, list[str]]:
    """How a container ends by itself, and what it says at the end: no notice, no progress."""
    try:
        code = container.process.wait(READY_S)
    finally:
        container.remove()
    return code, [line for line in container.said().splitlines() if not line.startswith("agent ")]


def others_may_write(node: Node) -> dict[str, object]:
    """The same ConfigMap on a mount that can be written: mode 0777 is refused there, exit code 4."""
    code, lines = refused(node.start(writable=True))
    return {"ok": code == 4 and len(lines) == 1 and "is writable by everybody" in lines[0], "code": code, "said": lines}


def filter_forbids(node: Node) -> dict[str, object]:
    """The filter of Debian 12's containers-common, which allows bpf() with CAP_SYS_ADMIN only: one line."""
    code, lines = refused(node.start(profile=node.runtime.profile))
    return {"ok": code == 5 and len(lines) == 1 and "seccomp" in lines[0], "code": code, "said": lines}


def steers(node: Node) -> dict[str, object]:
    """The controller of steer.yaml beside the agent: a dry run as it comes; with --apply a stop undoes a drain."""
    dry, acting = Pod(STEER), Pod(STEER)
    acting.container["args"].append("--apply")
    node.policy = dry.file("policy.yaml").replace("192.0.2.0/24", "10.9.0.0/16")
    found = [steered(node, pod) for pod in (dry, acting)]
    ok = [(each["apply"], bool(each["changed"]), each["exit_code"]) for each in found]
    return {"ok": ok == [(False, False, 0), (True, True, 0)], "runs": found}


def steered(node: Node, pod: Pod) -> dict[str, Any]:
    """A controller that is asked to drain a rail, and then stopped; the routes are as before."""
    with node.agent():
        before = traces(node)
        container = node.start(pod)
        try:

            def known() -> Any:
                status = json.loads(container.run("swerve", "steer", "status", "--json").stdout or "{}")
                return status if status.get("running") and status.get("answers") and status["paths"] else None

            status = until(known, READY_S, "the controller answers")
            drained = container.run("swerve", "steer", "drain", "rail1")
            changed = until(lambda: traces(node) - before, 10, "routes change") if status["apply"] else ()
            code = container.end()
            until(lambda: traces(node) == before, 10, "all is as before")
        except ValueError as error:
            raise ValueError(f"{error}: {container.said()[-500:]}") from None
        finally:
            container.remove()
    return {"apply": status["apply"], "drain": drained.returncode, "changed": len(changed), "exit_code": code}


def everything(proof: Proof, root: Path, left_out: Sequence[str]) -> int:
    """All parts, in a lab of two hosts: one is the node, the other has an agent of this checkout."""
    if not (proof.part(bootstrap, root) and proof.part(image, root)):
        return proof.end()
    for name in ("proc", "sys", "dev", "run"):  # what is mounted for apt is no part of an image
        run(["umount", "--recursive", "--lazy", root / name])
    for words in (("umount", "--recursive", "/sys/fs/cgroup"), ("mount", "-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")):
        run(words)  # a node with the version 2 hierarchy alone, which crun asks for
    place = root.with_name(f"{root.name}-node")
    with contextlib.ExitStack() as stack:
        for each in DIRECTORIES:
            os.environ[each] = str(place / each)
        runtime = Runtime.fetched(place / "runtime")
        lab = stack.enter_context(Lab.up(LAB, hosts=2, rails=PATHS, rate="100mbit", bus=True))
        node = Node(root, place, runtime, lab)
        prepare(node)
        peer = start_agent(lab, lab.hosts[1], stderr=stack.enter_context((place / "peer.log").open("w")))
        proof.say(part="set up", crun=runtime.version(), capabilities=node.pod.capabilities)
        for part in (starts, measures, reloads, hangs, ends, without_one, others_may_write, filter_forbids, steers):
            if part.__name__ not in left_out:
                proof.part(part, node)
        stop(peer)
    return proof.end()


def prepare(node: Node) -> None:
    """The manifest's own configuration, with the hosts of the lab as nodes; and their key."""
    configuration = yaml.safe_load(node.pod.file("agent.yaml"))
    key_file = yaml.safe_load(directories.default_config(node.lab.hosts[1].netns).read_text())["bus"]["key_file"]
    node.key = secrets.token_urlsafe(32)
    Path(key_file).write_text(node.key)
    peers = [{"name": host.name, "address": host.service, "clock": "shared"} for host in node.lab.hosts]
    node.configuration = {**configuration, "peers": peers, "bus": {"key_file": "/etc/swerve-bus/bus.key"}}


def afterwards(root: Path) -> None:
    """Remove the node's files, and the lab where this was killed."""
    place = root.with_name(f"{root.name}-node")
    os.environ.update({each: str(place / each) for each in DIRECTORIES})
    with contextlib.suppress(SwerveError):
        Lab.open(LAB).down()
    shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__ or "", everything, ("ip", "tc"), afterwards))
