"""The image and the manifests: valid for Kubernetes, and with the rights of the systemd units, each with its reason."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import under_unit
import yaml
from kubernetes_validate.utils import all_versions
from support import ROOT

from pytools import config, directories
from pytools.kernel.privileges import NEEDED
from steering.policy import file as policy_file

KUBERNETES: Final = ROOT / "packaging/kubernetes"
UNITS: Final = {"daemonset.yaml": "swerve-agent.service", "steer.yaml": "swerve-steer.service"}
# Capabilities that a manifest has and its unit has not, or the other way round: the reason.
DIFFERENCES: Final[dict[str, dict[str, str]]] = {"daemonset.yaml": {}, "steer.yaml": {}}
OLDEST: Final = "1.25.0"
VERSION: Final = importlib.metadata.version("swerve")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents(name) if each["kind"] == kind)
    return found


def pod_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = of_kind(name, "DaemonSet")["spec"]["template"]["spec"]
    return found


def container_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pod_of(name)["containers"][0]
    return found


def test_every_manifest_is_tried() -> None:
    assert sorted(UNITS) == sorted(each.name for each in KUBERNETES.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST, "1.31.0", all_versions()[-1]])
@pytest.mark.parametrize("name", UNITS)
def test_every_object_is_valid_and_has_no_unknown_field(name: str, version: str) -> None:
    for each in documents(name):
        assert kubernetes_validate.validate(each, version, strict=True)


def test_an_unknown_field_would_be_found() -> None:
    made = of_kind("daemonset.yaml", "DaemonSet")
    made["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRootFileSystem"):
        kubernetes_validate.validate(made, OLDEST, strict=True)


@pytest.mark.parametrize("name", UNITS)
def test_the_capabilities_are_those_of_the_unit(name: str) -> None:
    asked = container_of(name)["securityContext"]["capabilities"]
    ours = {f"CAP_{each}" for each in asked["add"]}
    unit = set(under_unit.Unit(ROOT / "packaging/systemd" / UNITS[name]).words("CapabilityBoundingSet"))
    assert asked["drop"] == ["ALL"]
    assert ours ^ unit == DIFFERENCES[name].keys() and all(DIFFERENCES[name].values())
    if name == "daemonset.yaml":
        assert ours == set(NEEDED)


@pytest.mark.parametrize("name", UNITS)
def test_each_capability_has_its_reason_beside_it(name: str) -> None:
    text = (KUBERNETES / name).read_text()
    for each in container_of(name)["securityContext"]["capabilities"]["add"]:
        assert re.search(rf"^ +- {each} # \w.{{10,}}$", text, re.MULTILINE), each


def test_a_second_container_guards_the_controller_from_outside_with_no_more_than_it_needs() -> None:
    pod = pod_of("steer.yaml")
    steer, guard = pod["containers"]
    assert pod["shareProcessNamespace"], "nothing in a namespace of its own can kill process 1"
    assert len(pod_of("daemonset.yaml")["containers"]) == 1
    assert guard["command"] == ["/usr/bin/swerve", "steer", "guard"] and guard["image"] == steer["image"]
    assert guard["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert [each["mountPath"] for each in guard["volumeMounts"]] == ["/run/swerve", "/var/lib/swerve"]
    assert all(each in steer["volumeMounts"] for each in guard["volumeMounts"])
    assert "--hand-over" not in steer["args"] and "--keep" not in steer["args"]


@pytest.mark.parametrize("name", UNITS)
def test_the_container_is_locked_down(name: str) -> None:
    pod = pod_of(name)
    for rights in (each["securityContext"] for each in pod["containers"]):
        assert not rights["privileged"] and not rights["allowPrivilegeEscalation"] and rights["readOnlyRootFilesystem"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "hostPID" not in pod and "hostIPC" not in pod and pod["hostNetwork"]
    account = of_kind(name, "ServiceAccount")
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    assert not account["automountServiceAccountToken"] and not pod["automountServiceAccountToken"]


@pytest.mark.parametrize("name", UNITS)
def test_what_may_be_written_is_what_swerve_writes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("RUNTIME", "STATE", "CACHE"):
        monkeypatch.delenv(f"SWERVE_{kind}_DIR", raising=False)
    volumes = {each["name"]: each for each in pod_of(name)["volumes"]}
    mounts = container_of(name)["volumeMounts"]
    assert {each["name"] for each in mounts} == set(volumes)
    writable = {each["mountPath"] for each in mounts if not each.get("readOnly")}
    assert writable == {"/run/swerve", "/var/lib/swerve", "/var/cache/swerve", "/tmp"}
    places = (directories.runtime_dir(None), directories.state_dir(None), directories.compiled_dirs()[0])
    assert {str(each.parent) for each in places} < writable
    for each in mounts:  # of the node nothing is seen elsewhere than where it is
        assert volumes[each["name"]].get("hostPath", {"path": each["mountPath"]})["path"] == each["mountPath"]
    assert not any(each["mountPath"].startswith("/sys/fs/bpf") for each in mounts), "others' maps can be opened there"


@pytest.mark.parametrize("name", UNITS)
def test_it_runs_on_every_node_and_one_after_the_other_is_replaced(name: str) -> None:
    made = of_kind(name, "DaemonSet")
    assert made["spec"]["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert pod_of(name)["tolerations"] == [{"operator": "Exists"}]
    assert made["spec"]["selector"]["matchLabels"].items() <= made["spec"]["template"]["metadata"]["labels"].items()
    unit = under_unit.Unit(ROOT / "packaging/systemd" / UNITS[name])
    assert pod_of(name)["terminationGracePeriodSeconds"] == int(unit.words("TimeoutStopSec")[0])


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
def test_the_probes_are_as_patient_as_the_unit(probe: str) -> None:
    unit, found = (
        under_unit.Unit(ROOT / "packaging/systemd/swerve-agent.service"),
        container_of("daemonset.yaml")[probe],
    )
    if probe == "startupProbe":
        assert found["periodSeconds"] * found["failureThreshold"] == int(unit.words("TimeoutStartSec")[0])
    else:
        assert found["periodSeconds"] == int(unit.words("WatchdogSec")[0])
    assert found["timeoutSeconds"] > 5, "the command itself gives up after that"


def test_the_configuration_is_one_for_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = container_of("daemonset.yaml")["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    tmp_path.chmod(0o700)
    file = tmp_path / "agent.yaml"
    file.write_text(of_kind("daemonset.yaml", "ConfigMap")["data"]["agent.yaml"])
    for node in ("node-1", "node-2"):
        monkeypatch.setenv(variable["name"], node)
        found = config.load(file)
        assert found.host == node and {each.name for each in found.peers} == {"node-1", "node-2"} - {node}


def test_the_controller_is_a_dry_run_with_a_valid_policy(tmp_path: Path) -> None:
    assert "--apply" not in container_of("steer.yaml")["args"]
    tmp_path.chmod(0o700)
    file = tmp_path / "policy.yaml"
    file.write_text(of_kind("steer.yaml", "ConfigMap")["data"]["policy.yaml"])
    assert policy_file.load(file)


# ---- the image ----

CONTAINERFILE: Final = (ROOT / "packaging/oci/Containerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Instruction and words, of one that is continued too."""
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", CONTAINERFILE, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_the_image_is_debian_with_the_package_and_runs_the_agent() -> None:
    assert [name for name, _ in instructions()] == ["FROM", "ARG", "LABEL", "RUN", "ENTRYPOINT"], "nothing is copied"
    said = dict(instructions())
    assert said["FROM"] == "docker.io/library/debian:bookworm-slim"
    assert said["ENTRYPOINT"] == '["/usr/bin/swerve", "agent"]'
    (installed,) = re.findall(r"apt-get install ([^&]+) &&", said["RUN"])
    compiler = ["python3-bpfcc", "linux-libc-dev"]
    assert installed.split() == ["--yes", "--no-install-recommends", "/dist/swerve_${VERSION}_*.deb", *compiler]


def test_its_labels_say_the_version_and_the_licence() -> None:
    assert dict(instructions())["ARG"] == f"VERSION={VERSION}"
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\S+?)="([^"]*)"', CONTAINERFILE))
    assert labels["version"] == "${VERSION}" and labels["licenses"] == PROJECT["license"]["text"]
    for name in UNITS:
        assert container_of(name)["image"].endswith(f"/swerve:{VERSION}")
        made = of_kind(name, "DaemonSet")
        for labelled in (made, made["spec"]["template"]):
            assert labelled["metadata"]["labels"]["app.kubernetes.io/version"] == VERSION
