"""What `doctor` finds of devices: counters of drivers, RDMA and its libraries, GPUs."""

from __future__ import annotations

import ctypes.util
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pytools.kernel import features, rdma_class
from pytools.kernel.features import NVIDIA_DRIVER, NVML_PACKAGE, Finding
from pytools.kernel.printable import printable

_PROVIDER_ROOMS: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/opt")
_ASK_S: Final = 10.0
_ASK: Final = """
import pynvml as nvml
try:
    nvml.nvmlInit()
    count = nvml.nvmlDeviceGetCount()
    print(f"{count} GPUs, driver {nvml.nvmlSystemGetDriverVersion()}")
except nvml.NVMLError as error:
    raise SystemExit(f"NVML: {error}")
"""


def driver_statistics() -> Finding:
    from pytools.kernel.ethtool import Ethtool

    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not names:
        return Finding(None, "no interface but the loopback one")
    asked = Ethtool()
    try:
        counts = {name: asked.count(name) for name in names}
    finally:
        asked.close()
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return Finding(bool(said), said or f"none of {', '.join(names)}")


def rdma_through_tc() -> Finding:
    devices = features.rdma_devices()
    return Finding(not any("hardware" in each for each in devices), "; ".join(devices) or "no RDMA devices")


def rdma_devices() -> Finding:
    missing = rdma_class.absent()
    return Finding(not missing, missing or "; ".join(features.rdma_devices()))


def libibverbs() -> Finding:
    found = ctypes.util.find_library("ibverbs")
    return Finding(found is not None, found or "not where the linker looks")


def providers() -> Finding:
    found = sorted({path.name.partition("-rdmav")[0].removeprefix("lib") for path in _provider_files()})
    return Finding(bool(found), ", ".join(found) or "no lib*-rdmav*.so")


def _provider_files() -> Iterable[Path]:
    for room in map(Path, _PROVIDER_ROOMS):
        # Either in a directory of their own, or beside the library, by architecture or not.
        for pattern in ("libibverbs/*-rdmav*.so", "*/libibverbs/*-rdmav*.so", "lib*-rdmav*.so"):
            yield from room.glob(pattern)


def gpus() -> Finding:
    if not NVIDIA_DRIVER.exists():
        return Finding(None, "NVIDIA's driver is not loaded")
    if importlib.util.find_spec("pynvml") is None:
        return Finding(False, f"the package {NVML_PACKAGE} is not installed")
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(False, f"NVML has not answered for {_ASK_S:.0f} s")
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return Finding(done.returncode == 0, printable(lines[-1]) if lines else "NVML said nothing")
