"""What `doctor` says of GPUs: a driver, the package, and whether NVML answers, in a process that may hang."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Final

from pytools.kernel.features import NVIDIA_DRIVER, NVML_PACKAGE, Finding
from pytools.kernel.printable import printable
from pytools.views.check import Check

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


def checks() -> list[Check]:
    """One line."""
    return [
        Check(
            "GPUs",
            False,
            "`swerve gpu` shows nothing, and no verdict on a job names a slow GPU",
            f"what the detail names: NVIDIA's driver, or pip install {NVML_PACKAGE}",
            _gpus,
        )
    ]


def _gpus() -> Finding:
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
